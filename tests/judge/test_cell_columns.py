"""Bounds that are kept from one evaluation to the next are those of a new one, whatever happens to the series."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from kc_otel.judge.cell_columns import CellColumns
from kc_otel.judge.evaluator import Evaluator
from kc_otel.judge.series import Listening
from kc_otel.judge.verdict import Status, Verdict

METRICS = {
    "tv_token": "kc.drift.tv_token",
    "log_ratio": "kc.drift.log_ratio",
    "top1_disagreement": "kc.drift.top1_disagreement",
    "ratio": "kc.drift.ratio",
}
CLAUSES = [
    {"id": "mean", "metric": "tv_token", "unit": "token", "limit": 0.05, "slices": {"code": 0.02}},
    {"id": "share", "metric": "tv_token", "statistic": "fraction > 0.5", "unit": "token", "limit": 0.1},
    {"id": "none", "metric": "tv_token", "statistic": "fraction > 0.9", "unit": "token", "limit": 0.0},
    {"id": "max", "metric": "tv_token", "statistic": "max", "limit": 0.97},
    {"id": "p99", "metric": "log_ratio", "statistic": "p99", "limit": 0.5},
    {"id": "k1", "metric": "k1", "unit": "token", "limit": 0.1},
    {"id": "two", "metric": "top1_disagreement", "unit": "token", "limit": 0.2},
    {"id": "deficit", "metric": "support_deficit", "unit": "token", "limit": 0.2, "cap": 5},
]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_kept_bounds_are_those_computed_anew(seed: int, contract: Any, sender: Any, now: float) -> None:
    """Through panes that turn, faults that come and go, silence, new kernels and clocks that go back."""
    rng = np.random.default_rng(seed)
    made = contract(statistical=CLAUSES, observability={"window": "1m", "long_window": "10m", "min_samples": 30})
    evaluator = Evaluator([made])
    evaluator.listening(now)
    sources = {
        (metric, slice, kernel): sender(METRICS[metric], slice=slice, inference=kernel, start=now)
        for metric in METRICS
        for slice in ("all", "code")
        for kernel in ("b" * 12, "c" * 12)
    }
    seen: list[tuple[Sequence[Verdict], list[Verdict]]] = []
    for _ in range(40):
        now += float(rng.choice([1.0, 5.0, 6.0, 12.0, 70.0, 700.0, -3.0], p=[0.3, 0.3, 0.2, 0.1, 0.06, 0.02, 0.02]))
        drift = float(rng.choice([0.01, 0.04, 0.3], p=[0.5, 0.4, 0.1]))
        for (metric, _, kernel), source in sources.items():
            if rng.random() < (0.6 if kernel[0] == "b" else 0.1):
                size = int(rng.integers(0, 60))
                values = {
                    "tv_token": rng.beta(1.0, 1.0 / drift, size),
                    "log_ratio": rng.normal(0.0, drift, size),
                    "top1_disagreement": rng.random(size) < drift,
                    "ratio": np.exp(rng.normal(0.0, drift, size)),
                }[metric]
                evaluator.ingest_metrics(source.request(now, values), now)
        verdicts = evaluator.evaluate(now)[made.name].verdicts
        state = evaluator.states[made.name]
        fresh, _ = CellColumns(state).judge(now, Listening(START))
        seen.append(([*verdicts], [*fresh]))
    for verdicts, others in seen:
        for verdict, other in zip(verdicts, others, strict=True):
            assert difference(verdict, other) == {}
    assert {verdict.status for verdicts, _ in seen for verdict in verdicts} == set(Status) - {Status.INVALID_INPUT}


START = 1_800_000_000.0


def difference(verdict: Verdict, other: Verdict) -> dict[str, Any]:
    """What two verdicts do not agree on, up to rounding."""
    pairs = {field.name: (getattr(verdict, field.name), getattr(other, field.name)) for field in fields(verdict)}
    return {
        name: (a, b)
        for name, (a, b) in pairs.items()
        if a != (pytest.approx(b, rel=1e-7, nan_ok=True) if isinstance(b, float) else b)
    }


@pytest.mark.slow
def test_verdicts_are_freed_with_their_last_user_and_not_by_the_collector(contract: Any, sender: Any) -> None:
    """They hold whole windows, of which a tick begins new ones; also where cells fail, whose evidence is kept."""
    made = contract(statistical=CLAUSES, observability={"window": "1m", "long_window": "10m", "min_samples": 30})
    evaluator = Evaluator([made])
    evaluator.listening(START)
    for metric in METRICS.values():
        source = sender(metric, start=START)
        evaluator.ingest_metrics(source.request(START + 5.0, np.full(200, 0.9)), START + 5.0)
    gc.collect()
    gc.disable()
    try:
        verdicts = evaluator.evaluate(START + 6.0)[made.name].verdicts
        assert Status.FAIL in {verdict.status for verdict in verdicts}
        held = weakref.ref(verdicts)
        del verdicts
        evaluator.evaluate(START + 7.0)
        assert held() is None
    finally:
        gc.enable()
