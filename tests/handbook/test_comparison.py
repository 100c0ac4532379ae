"""The comparison with other tools: each row rests on a source, and what it says of averages is so."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from kc_otel.contract.load import load_text
from kc_otel.offline.gate.recorded_verdicts import by_contract, judge
from kc_otel.record.measure.sampled import TOKEN, log_ratio
from kc_otel.recordings.recording import Recording

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "kc_otel" / "handbook" / "pages" / "comparison.md"
ROWS = [
    [cell.strip() for cell in line.strip("|\n ").split(" | ")]
    for line in PAGE.read_text().splitlines()
    if line.startswith("| ") and not line.startswith(("| |", "| ---"))
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_row_names_a_source(row):
    _, theirs, ours = row
    assert re.search(r"\]\(https://[^)]+\)", theirs), theirs
    assert ours


CONTRACT = """\
apiVersion: kernel-contract/v1
kind: KernelContract
metadata: {name: policy, version: 1, owner: rl}
kernels: {train: {engine: fsdp}, inference: {engine: vllm}}
slices: {tables: {where: {task: tables}}}
statistical: [{id: token-tv, metric: tv_token, unit: token, limit: 0.02}]
observability: {min_samples: 500}
"""


def test_an_average_of_the_batch_hides_what_a_slice_shows():
    """4 % of the traffic drifts: verl's k3 stays below 0.01 nats, all traffic is PASS, and the slice FAILs."""
    rng, lengths = np.random.default_rng(0), np.full(1000, 50)
    drift = np.where(np.arange(1000) % 25 == 0, 0.3, 0.004).repeat(50)
    inference = np.log(rng.uniform(0.2, 0.8, 50_000))
    train = np.minimum(inference + drift * rng.standard_normal(50_000) - drift**2 / 2, 0.0)
    tasks = tuple({"task": "tables" if at % 25 == 0 else "prose"} for at in range(1000))
    assert TOKEN["k3"](log_ratio(train, inference)).mean() < 0.01  # `rollout_corr/k3_kl`
    contract = load_text(CONTRACT)
    verdicts = judge(contract, by_contract(Recording(train, inference, lengths, tasks), contract), 1e9).verdicts
    assert {verdict.cell.slice: str(verdict.status) for verdict in verdicts} == {"all": "PASS", "tables": "FAIL"}
