"""Cells that are judged together have the verdicts, and the evidence, that they have one by one."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from kc_otel.judge import fail_evidence
from kc_otel.judge.cells import evidence
from kc_otel.judge.evaluator import Evaluator
from kc_otel.judge.series import Listening
from kc_otel.judge.verdict import Status, Verdict
from kc_otel.judge.verdicts import decide
from kc_otel.stats.histogram_rows import rows_of_columns
from tests.benchmarks.bench_evaluate import START, Fleet, contract

SLICES = 9
"""Of each clause."""


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1, 40])
def test_verdicts_of_many_cells_are_those_of_each(scale: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On windows of several panes, of limits that are kept, broken and open, with the evidence against each."""
    raw = contract(SLICES).model_dump(mode="json", by_alias=True, exclude_unset=True)
    for clause in raw["statistical"]:
        clause["slices"] = {"s1": clause["limit"] / 10, "s2": clause["limit"] / 3, "s3": clause["limit"] / 1000}
    made = type(contract(1)).model_validate(raw)
    together, apart = Evaluator([made]), Evaluator([made])
    fleet = Fleet(["all", *made.slices], [("a" * 12, "b" * 12)], scale)
    now = START
    seen: set[Status] = set()
    for _ in range(4):
        now += 20.0
        message = fleet.request(now)
        for evaluator, at_once in ((together, rows_of_columns), (apart, lambda *_: ())):
            monkeypatch.setattr(fail_evidence, "rows_of_columns", at_once)
            evaluator.ingest_metrics(message, now)
            evaluator.evaluate(now)
        held, alone = (one.states[made.name].evidence.cells for one in (together, apart))
        assert held.keys() == alone.keys()
        for cell, one in held.items():
            assert one.log_sums == pytest.approx(alone[cell].log_sums, rel=1e-9, abs=1e-9)
        cells = list(evidence(together.states[made.name], now, Listening(START)))
        one_by_one = [replace(cell, parts=None) for cell in cells]
        for verdict, other in zip(decide(made, cells, now), decide(made, one_by_one, now), strict=True):
            assert close(verdict, other)
            seen.add(verdict.status)
    assert seen == {Status.PASS, Status.INCONCLUSIVE, Status.FAIL}


def close(one: Verdict, other: Verdict) -> bool:
    """Equal up to rounding."""
    pairs = [(getattr(one, field.name), getattr(other, field.name)) for field in fields(one)]
    return all(a == (pytest.approx(b, rel=1e-7, nan_ok=True) if isinstance(b, float) else b) for a, b in pairs)
