"""Operators with real processes: two models watched, one planted fault, and exactly one clause that fails."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

import kc_otel

from .conftest import CONTRACT, Evaluator

torch = pytest.importorskip("torch")

from kc_otel.integrations.operators import cases_over, compare_callables, watch_modules  # noqa: E402 - needs torch

pytestmark = pytest.mark.slow

NUMERICAL = """\
numerical:
  - {id: attention-ulp, metric: operator_ulp, operator: attention, statistic: p99, limit: 4}
  - {id: mlp-relative, metric: operator_relative, operator: mlp, statistic: p99, limit: 0.01}
  - {id: norm-relative, metric: operator_relative, operator: norm, statistic: p99, limit: 0.01}
"""


@pytest.fixture
def contract_file(tmp_path: Path) -> Path:
    """The contract of the other tests with operators instead of tokens."""
    section = "statistical:\n  - {id: token-tv, metric: tv_token, unit: token, limit: 0.02}\n"
    assert section in CONTRACT
    text = CONTRACT.replace(section, NUMERICAL).replace("window: 6s, long_window: 12s", "window: 1m")
    path = tmp_path / "contract.yaml"
    path.write_text(text)
    return path


class Block(torch.nn.Module):
    """A norm and a matrix product, as every layer has them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.RMSNorm(64)
        self.mlp = torch.nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., 64] to the same shape."""
        return self.mlp(self.norm(x))


def test_a_planted_operator_fails_exactly_its_clause(serve: Callable[..., Evaluator], contract_file: Path) -> None:
    """A coarsely quantised mlp of one slice's traffic is found, by operator and by slice; all else passes."""
    evaluator = serve()
    torch.manual_seed(0)
    train = torch.nn.Sequential(Block(), Block()).eval()
    sound, broken = copy.deepcopy(train), copy.deepcopy(train)
    with torch.no_grad():
        for block in broken:
            block.mlp.weight.copy_((block.mlp.weight / 0.05).round() * 0.05)

    def attention_inputs(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return [torch.randn(shape, generator=generator).to(dtype) for _ in range(3)]

    exporter = OTLPMetricExporter(endpoint=f"{evaluator.http}/v1/metrics", timeout=2)
    kernel = kc_otel.Kernel("torch", dtype="int4")
    with kc_otel.Recorder(contract_file, inference=kernel, metric_exporter=exporter) as recorder:
        for task, other in (("code", broken), ("prose", sound)):
            attributes = {"task": task}
            with watch_modules(train, other, {"mlp": "*.mlp", "norm": "*.norm"}, recorder, attributes=attributes):
                for seed in range(10):
                    train(torch.randn(8, 50, 64, generator=torch.Generator().manual_seed(seed)))
            compare_callables(
                torch.nn.functional.scaled_dot_product_attention,
                torch.nn.functional.scaled_dot_product_attention,
                cases_over(attention_inputs, [(2, 4, 128, 16)], [torch.bfloat16], attributes=attributes),
                recorder,
                operator="attention",
            )
        assert recorder.force_flush()
        assert recorder.stats().dropped == {}
    answer = evaluator.wait(
        "/api/v1/verdicts", lambda answer: {v["status"] for v in answer["verdicts"]} == {"PASS", "FAIL"}
    )
    failed = {(v["clause"], v["slice"]) for v in answer["verdicts"] if v["status"] == "FAIL"}
    assert failed == {("mlp-relative", "code"), ("mlp-relative", "all")}
    samples = {(v["clause"], v["slice"]): v["samples"] for v in answer["verdicts"]}
    assert samples["mlp-relative", "code"] == samples["norm-relative", "prose"] == 10 * 8 * 50 * 2
    assert samples["attention-ulp", "all"] == 2 * 2 * 4 * 128
    clauses = {c["id"]: c["per"] for c in evaluator.get("/api/v1/contracts")["contracts"][0]["clauses"]}
    assert set(clauses.values()) == {"row"}
