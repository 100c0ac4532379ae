"""A kernel version's whole life with real processes: the story that the example tells, and a crash on the way."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter

import kc_otel
from kc_otel.client.router import Router
from kc_otel.contract.load import load
from kc_otel.offline.gate.evidence import verify_evidence
from tests.tools.waiting import eventually

from .conftest import GOOD as STABLE
from .conftest import Evaluator, Traffic, command

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
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


def promote(*words: str, url: str) -> tuple[int, str]:
    done = command("promote", "policy", NEW.fingerprint, *words, KC_OTEL_URL=url)
    return done.returncode, done.stdout + done.stderr


def traffic(contract: Path, endpoint: str) -> Traffic:
    """Comparisons of the new version."""
    return Traffic(contract, OTLPMetricExporter(endpoint=endpoint, insecure=True, timeout=2), NEW)


def test_a_crash_in_the_canary_loses_nothing(contract_file: Path, serve: Callable[..., Evaluator], tmp_path: Path):
    """Killed in the canary, the evaluator comes back there; then a slice fails, and nothing is routed there."""
    contract_file.write_text(CONTRACT)
    evaluator = serve()
    version = NEW.fingerprint
    where = f"/api/v1/promotions/policy/{version}"
    code, said = promote("--start", "--by", "ada", url=evaluator.api)
    assert (code, "is in shadow: it may serve 0% of the requests" in said) == (0, True), said
    sender = traffic(contract_file, evaluator.grpc)
    with sender.recorder:
        in_canary = lambda: evaluator.get(where)["stage"] == "canary"  # noqa: E731
        sender.send_until(in_canary, lambda: evaluator.get(where), code=0.005, prose=0.005)
        evaluator.kill()
    again = serve()
    found = again.get(where)
    assert (found["stage"], found["status"]) == ("canary", "running")
    versions = (version, STABLE.fingerprint)
    sender = traffic(contract_file, again.grpc)
    with sender.recorder, Router(again.api, contracts=[load(contract_file)], refresh=0.1, wait=1.0) as router:
        assert router.wait_for_table(5.0)

        def share() -> float:
            keys = (str(n) for n in range(2000))
            return sum(router.choose_version("policy", {}, versions, key=key) == version for key in keys) / 2000

        assert share() == pytest.approx(found["share"], abs=0.05)
        rolled_back = lambda: again.get(where)["status"] == "rolled-back"  # noqa: E731
        sender.send_until(rolled_back, lambda: again.get(where), code=0.2, prose=0.005)
        eventually(lambda: share() == 0.0, 60.0, 0.2, lambda: router.table)
        assert "token-tv on code: FAIL" in again.get(where)["reason"]
        assert {router.choose_version("policy", {"task": "code"}, versions, key="x")} == {STABLE.fingerprint}
    code, said = promote("--save", str(tmp_path / "evidence"), url=again.api)
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
