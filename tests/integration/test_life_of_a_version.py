"""A kernel version's whole life with real processes: the story that the example tells, and a crash on the way."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter

import kc_otel
from kc_otel.client.router import Router
from kc_otel.contract.load import load
from kc_otel.offline.gate.evidence import verify_evidence

from .conftest import Evaluator, logprobs

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
STABLE = kc_otel.Kernel("vllm", version="1", dtype="bfloat16")
NEW = kc_otel.Kernel("vllm", version="2", dtype="int8")
CONTRACT = """\
apiVersion: kernel-contract/v1
kind: KernelContract
metadata: {name: policy, version: 1, owner: tests}
kernels: {train: {engine: torch, dtype: float32}, inference: {engine: vllm}}
slices: {code: {where: {task: code}}, prose: {where: {task: prose}}}
statistical: [{id: token-tv, metric: tv_token, unit: token, limit: 0.02}]
observability: {window: 3s, long_window: 6s, min_samples: 500, heartbeat: 3s}
promotion: {windows: 1, steps: [10%, 50%], skip: [offline-ci]}
"""


def run(*arguments: str, url: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "kc_otel", *arguments],
        env={**os.environ, "KC_OTEL_URL": url}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


@contextmanager
def recording(contract: Path, endpoint: str) -> Iterator[Callable[..., None]]:
    """Sends comparisons of the new version, code and prose, with the drift that it is told."""
    exporter = OTLPMetricExporter(endpoint=endpoint, insecure=True, timeout=2)
    rng = np.random.default_rng(0)
    with kc_otel.Recorder(
        contract, train=kc_otel.Kernel("torch", dtype="float32"), inference=NEW, metric_exporter=exporter,
        export_interval=0.25, sampling=1.0,
    ) as recorder:  # fmt: skip

        def send(**sigma: float) -> None:
            for task, size in sigma.items():
                train, inference = logprobs(rng, 16, 64, size)
                recorder.compare(train, inference, attributes={"task": task})
            recorder.force_flush()

        yield send


def until(happens: Callable[[], bool], meanwhile: Callable[[], Any], otherwise: Callable[[], Any]) -> None:
    end = time.monotonic() + 60.0
    while not happens():
        assert time.monotonic() < end, otherwise()
        meanwhile()
        time.sleep(0.2)


def test_a_crash_in_the_canary_loses_nothing(contract_file: Path, serve: Callable[..., Evaluator], tmp_path: Path):
    """Killed in the canary, the evaluator comes back there; then a slice fails, and nothing is routed there."""
    contract_file.write_text(CONTRACT)
    evaluator = serve()
    version = NEW.fingerprint
    where = f"/api/v1/promotions/policy/{version}"
    code, said = run("promote", "policy", version, "--start", "--by", "ada", url=evaluator.api)
    assert (code, "is in shadow: it may serve 0% of the requests" in said) == (0, True), said
    with recording(contract_file, evaluator.grpc) as send:
        until(
            lambda: evaluator.get(where)["stage"] == "canary",
            lambda: send(code=0.005, prose=0.005),
            lambda: evaluator.get(where),
        )
        evaluator.kill()
    again = serve()
    found = again.get(where)
    assert (found["stage"], found["status"]) == ("canary", "running")
    versions = (version, STABLE.fingerprint)
    with (
        recording(contract_file, again.grpc) as send,
        Router(again.api, contracts=[load(contract_file)], refresh=0.1, wait=1.0) as router,
    ):
        assert router.wait_for_table(5.0)

        def share() -> float:
            keys = (str(n) for n in range(2000))
            return sum(router.choose_version("policy", {}, versions, key=key) == version for key in keys) / 2000

        assert share() == pytest.approx(found["share"], abs=0.05)
        until(
            lambda: again.get(where)["status"] == "rolled-back",
            lambda: send(code=0.2, prose=0.005),
            lambda: again.get(where),
        )
        until(lambda: share() == 0.0, lambda: None, lambda: router.table)
        assert "token-tv on code: FAIL" in again.get(where)["reason"]
        assert {router.choose_version("policy", {"task": "code"}, versions, key="x")} == {STABLE.fingerprint}
    code, said = run("promote", "policy", version, "--save", str(tmp_path / "evidence"), url=again.api)
    assert code == 1
    records = [json.loads(file.read_text()) for file in sorted((tmp_path / "evidence").iterdir())]
    for record in records:
        verify_evidence(record)
    steps = [(record["step"]["kind"], record["step"]["to"]["stage"]) for record in records]
    assert (steps[0], steps[-1]) == (("advance", "canary"), ("rollback", "offline-ci"))
    metrics = httpx.get(f"{again.api}/metrics").text
    assert re.search(rf'kc_promotion_stage{{.*kc_kernel_inference="{version}"}} -1\.0', metrics)


def test_the_whole_life_of_one_bad_version(tmp_path: Path, demo_weights: Path):
    """Refused in CI, forced through, caught on one slice, routed back, evidence sound; its successor becomes full."""
    kept = tmp_path / "evidence"
    done = subprocess.run(
        [sys.executable, "-m", "examples.promotion", "--weights", str(demo_weights), "--keep", str(kept)],
        cwd=ROOT, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    told = done.stdout.partition("What happened")[2]
    marks = [
        "bf16 .* passes the offline gate",
        "the gate rejects int8 .*: exit code 1",
        "the evaluator does not admit it",
        "ada forces int8 into the canary",
        "rolled back after",
        "bf16 serves all of them",
        "2 records of int8's steps, each verified",
        "the gate advances int8-mended .*: exit code 0",
        "shadow: .* mirrored requests",
        "its gate is open, and a person is asked",
        "full: int8-mended serves every request",
        "3 records of int8-mended's steps, each verified",
    ]
    assert re.search(".*".join(marks), told, re.DOTALL), told
    forced, rolled_back = (json.loads(file.read_text()) for file in sorted((kept / "int8").iterdir()))
    assert (forced["step"]["kind"], forced["step"]["by"], forced["verdicts"]) == ("force", "ada", [])
    failed = {verdict["slice"] for verdict in rolled_back["verdicts"] if verdict["status"] == "FAIL"}
    assert (rolled_back["step"]["kind"], rolled_back["stage"]) == ("rollback", "canary")
    assert "tables" in failed
    assert not failed & {"code", "prose"}
