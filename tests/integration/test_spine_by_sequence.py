"""A clause judged by sequence, with real processes: the recorder sends its stream, the evaluator judges sequences."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

import kc_otel

from .conftest import CONTRACT, Evaluator, logprobs

pytestmark = pytest.mark.slow

SEQUENCES, TOKENS, BATCHES = 100, 64, 10


@pytest.fixture
def contract_file(tmp_path: Path) -> Path:
    """The contract of the other tests, with a second clause on the same metric by sequence."""
    by_token = "  - {id: token-tv, metric: tv_token, unit: token, limit: 0.02}\n"
    by_sequence = "  - {id: sequence-tv, metric: tv_token, unit: sequence, limit: 0.02}\n"
    assert by_token in CONTRACT
    text = CONTRACT.replace(by_token, by_token + by_sequence).replace("window: 6s, long_window: 12s", "window: 1m")
    path = tmp_path / "contract.yaml"
    path.write_text(text)
    return path


def test_sequences_are_judged_beside_tokens(serve: Callable[..., Evaluator], contract_file: Path) -> None:
    """Two clauses on one metric: the one by sequence counts sequences, and both find which slice is broken."""
    evaluator = serve()
    rng = np.random.default_rng(0)
    exporter = OTLPMetricExporter(endpoint=f"{evaluator.http}/v1/metrics", timeout=2)
    with kc_otel.Recorder(
        contract_file,
        train=kc_otel.Kernel("torch", dtype="float32"),
        inference=kc_otel.Kernel("vllm", version="1", dtype="int8"),
        metric_exporter=exporter,
    ) as recorder:
        for _ in range(BATCHES):
            for task, sigma in (("code", 0.4), ("prose", 0.005)):
                recorder.compare(*logprobs(rng, SEQUENCES, TOKENS, sigma), attributes={"task": task})
        assert recorder.force_flush()
    answer = evaluator.wait(
        "/api/v1/verdicts",
        lambda answer: (
            {v["clause"] for v in answer["verdicts"] if v["status"] == "FAIL"} == {"token-tv", "sequence-tv"}
        ),
    )
    found = {(v["clause"], v["slice"]): v for v in answer["verdicts"]}
    assert found["sequence-tv", "code"]["status"] == "FAIL"
    assert found["sequence-tv", "code"]["samples"] == SEQUENCES * BATCHES
    assert found["token-tv", "code"]["samples"] == SEQUENCES * BATCHES * TOKENS
    assert f"with {SEQUENCES * BATCHES:,} sequences" in found["sequence-tv", "code"]["reason"]
    # Sequences of one length: both means are the same number, known with less certainty by sequence.
    estimates = [found[clause, "code"]["estimate"] for clause in ("token-tv", "sequence-tv")]
    assert estimates[0] == pytest.approx(estimates[1], rel=1e-9)
    assert found["sequence-tv", "prose"]["status"] != "FAIL"
    clauses = {c["id"]: c["per"] for c in evaluator.get("/api/v1/contracts")["contracts"][0]["clauses"]}
    assert clauses == {"token-tv": "token", "sequence-tv": "sequence"}
