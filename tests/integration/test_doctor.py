"""`kc-otel doctor` beside a real evaluator: what it prints, and how it exits."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import Evaluator


def doctor(*words: str, **environ: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "kc_otel", "doctor", *words],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path), **environ},
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_it_says_that_nothing_arrives_and_where_to_send(serve: Callable[..., Evaluator], contract_file: Path) -> None:
    """The endpoint that answers is said, and that no request came."""
    evaluator = serve()
    assert "--external-url" in evaluator.log, "what it sends links to an address that nobody else knows"
    evaluator.wait("/api/v1/health", lambda health: health["evaluated_at"] is not None)
    endpoint = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{evaluator.grpc}"}
    code, said = doctor(str(contract_file), "--url", evaluator.api, **endpoint)
    assert code == 1
    assert f"ok: recorders in this environment send grpc to {evaluator.grpc}" in said
    assert "error: the evaluator has accepted no OTLP request since it started" in said
    code, text = doctor("--url", evaluator.api, "--json", **endpoint)
    found: dict[str, list[dict[str, Any]]] = json.loads(text)
    assert [finding["level"] for finding in found["This process's environment"]] == ["ok"]
    assert code == 1


@pytest.mark.slow
def test_it_goes_on_where_no_evaluator_answers() -> None:
    """What can be found without one is found."""
    code, said = doctor("--url", "http://127.0.0.1:9", OTEL_SDK_DISABLED="true")
    assert code == 1
    assert "OTEL_SDK_DISABLED=true turns every recorder off" in said
    assert "its API does not answer" in said
