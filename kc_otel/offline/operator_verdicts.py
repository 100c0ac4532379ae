"""Steps of `kc-otel locate operators` between a file with comparisons and the text: load, judge, lay out."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import numpy as np

from kc_otel.contract.model import Contract
from kc_otel.contract.slices import ALL
from kc_otel.integrations.operators import CaseReport, OperatorPair
from kc_otel.judge.plain_json import for_others
from kc_otel.judge.verdict import Cell, Verdict
from kc_otel.judge.verdicts import Evidence
from kc_otel.offline.gate.recorded_verdicts import on_either_window, verdict_for_others, without_windows
from kc_otel.offline.python_names import python_name
from kc_otel.stats import Binned

COLUMNS: Final = {
    ("", "rows"): "rows",
    ("not", "finite"): "not_finite",
    ("max", "abs"): "max_abs",
    ("relat.", "p99.9"): "relative_p99.9",
    ("ULP", "p50"): "ulp_p50",
    ("ULP", "p99.9"): "ulp_p99.9",
    ("ULP", "max"): "ulp_max",
    ("1 - cos", "max"): "cosine_max",
    ("batch", "depend."): "batch_dependence_max",
}
"""Heading of a column, in two lines -> key in a case's summary."""


def comparisons_in(target: str) -> list[OperatorPair]:
    """The comparisons that `FILE.py:NAME` says: a list of them, or a function that returns it."""
    found = python_name(target, "a list of OperatorPair, or of a function for one")
    found = list(found() if callable(found) else found)
    wrong = next((pair for pair in found if not isinstance(pair, OperatorPair)), None)
    if wrong is not None or not found:
        got = "nothing" if not found else type(wrong).__name__
        raise ValueError(f"{target}: holds {got}, not kc_otel.integrations.operators.OperatorPair")
    return found


def judge(contract: Contract, reports: Sequence[CaseReport]) -> tuple[tuple[Verdict, ...], tuple[str, ...]]:
    """Verdicts as if the reports were what both windows hold, and what was left out; rows are taken as independent."""
    evidence, left_out = [], []
    for clause in contract.clauses:
        mine = [report for report in reports if clause.operator is not None and report.operator == clause.operator]
        values = {id(report): report.values().get(clause.metric) for report in mine}
        if not any(value is not None for value in values.values()):
            left_out.append(f"{clause.id}: {clause.metric_text} was not compared here")
            continue
        empty = []
        for slice in (ALL, *contract.slices):
            inside = [
                drifts
                for report in mine
                if slice in contract.slices_of(report.attributes) and (drifts := values[id(report)]) is not None
            ]
            if not inside:
                empty.append(slice)
                continue
            sample = Binned.of_samples(np.concatenate(inside))
            evidence.append(Evidence(Cell(contract.name, clause.id, slice), clause, partial(on_either_window, sample)))
        if empty:
            left_out.append(f"{clause.id} on {', '.join(empty)}: no case of {clause.operator} is there")
    return without_windows(contract, evidence, time.time()), tuple(left_out)


def cells_of(report: CaseReport) -> list[str]:
    """A case's numbers, as text."""
    summary = report.summary()
    return [_shown(summary[key]) for key in COLUMNS.values()]


def as_json(reports: Sequence[CaseReport], verdicts: Sequence[Verdict], left_out: Sequence[str]) -> dict[str, Any]:
    """Everything as JSON; numbers that are not finite are null."""
    return {
        "cases": [
            {
                "operator": report.operator,
                "case": report.case,
                "dtype": report.dtype,
                "attributes": dict(report.attributes),
                **for_others(report.summary()),
                "batch_dependence_by_size": for_others(
                    {size: float(drift.relative.max(initial=0.0)) for size, drift in report.batches.items()}
                ),
            }
            for report in reports
        ],
        "verdicts": list(map(verdict_for_others, verdicts)),
        "left_out": list(left_out),
    }


def _shown(value: float) -> str:
    if math.isnan(value):
        return "-"
    return f"{value:.0f}" if value.is_integer() and abs(value) < 1e7 else f"{value:.2g}"
