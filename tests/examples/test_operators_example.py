"""The operators example: what it prints is what its contract is meant to find."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from kc_otel.contract.lint import lint
from kc_otel.contract.load import load

ROOT = Path(__file__).resolve().parents[2]


def test_its_contract_is_sound():
    assert lint(load(ROOT / "examples" / "operators" / "contract.yaml")) == []


@pytest.mark.slow
def test_it_finds_what_is_wrong_and_nothing_else():
    """int8 with outliers and the float32 product's batch fail; attention and the norm hold."""
    command, env = [sys.executable, "-m", "examples.operators"], os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "160"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=180, check=True)
    found = {}
    for line in done.stdout.splitlines():
        words = line.split()
        if len(words) > 3 and words[3] in {"PASS", "FAIL", "INCONCLUSIVE"}:
            found[words[0], words[1]] = words[3]
    assert found[("int8-linear", "outliers")] == "FAIL"
    assert {clause for (clause, _), status in found.items() if status == "FAIL"} <= {"int8-linear", "batch-f32"}
    assert {found[clause, "all"] for clause in ("attention", "rms-norm")} == {"PASS"}
