"""The past of a cell, and what was observed in its long window: the numbers that the page draws."""

from __future__ import annotations

import math
import time
from typing import Annotated, Any, Final

import numpy as np
from fastapi import APIRouter, Query
from numpy.typing import NDArray

from kc_otel.contract.clause import Clause
from kc_otel.contract.registry.clause_metrics import DERIVED
from kc_otel.contract.slices import ALL
from kc_otel.contract.words import number
from kc_otel.judge.plain_json import finite_or_none
from kc_otel.judge.verdict import Cell
from kc_otel.serve.api.shapes import View, find_clause
from kc_otel.serve.core import Core
from kc_otel.serve.history import HistoryPoint
from kc_otel.stats import Binned

_PER_DECADE: Final = 8
_MAX_DECADES: Final = 12
"""Decades below the largest observation with bins of their own; smaller values go into the lowest bin."""

Start = Annotated[float, Query(alias="from", description="Unix time, seconds.")]
End = Annotated[float | None, Query(alias="to", description="Unix time, seconds; now when left out.")]


class SeriesView(View):
    """The past of a cell."""

    kernel_train: str
    kernel_inference: str
    points: list[HistoryPoint]
    """(time, estimate, lower, upper, limit, samples, status code, evidence as a share of an alarm, trainer's step where
    it is told), oldest first."""


class HistoryView(View):
    """The history of a clause on a slice, for every compared pair of kernels; older points are thinned out."""

    step: float
    """Seconds between two points where it is thinned."""
    series: list[SeriesView]


class Mark(View):
    """A value that a distribution is compared with: the limit, or a fraction's threshold."""

    value: float
    text: str


class Observations(View):
    """Observations by size; none of the bins where all are zero."""

    metric: str
    unit: str
    window: float
    """Seconds that the window covers."""
    marks: list[Mark]
    edges: list[float]
    """Edges of the bins of |value|, ascending and positive: one more than there are bins."""
    above: list[int]
    """Observations above zero in each bin."""
    below: list[int]
    """Observations below zero in each bin."""
    zero: int
    """Those that are zero, or too small to be told from it."""
    total: int
    mean: float | None
    minimum: float | None
    maximum: float | None


def history_routes(core: Core) -> APIRouter:
    """`/api/v1/history` and `/api/v1/distribution`."""
    router = APIRouter(prefix="/api/v1", tags=["verdicts"])

    @router.get("/history")
    async def history(contract: str, clause: str, slice: str = ALL, start: Start = 0.0, end: End = None) -> HistoryView:
        """Return the history of a clause on a slice: twenty points per long window, over twenty-four of them."""
        find_clause(core, contract, clause, slice)
        past = core.history.past(contract, clause, slice, start, time.time() if end is None else end)
        series = [
            SeriesView(kernel_train=cell.kernel_train, kernel_inference=cell.kernel_inference, points=points)
            for cell, points in past.items()
        ]
        return HistoryView(step=core.history.step(contract), series=series)

    @router.get("/distribution")
    async def distribution(
        contract: str, clause: str, slice: str = ALL, kernel_train: str = "", kernel_inference: str = ""
    ) -> Observations:
        """Return what was observed of a cell in the long window that ends at the last evaluation, by size."""
        found, window = find_clause(core, contract, clause, slice), core.contracts[contract].observability.long_window
        cell, quantity = Cell(contract, clause, slice, kernel_train, kernel_inference), found.quantity
        return Observations(
            metric=found.metric if quantity is None else quantity.key,
            unit=found.limit_unit if quantity is None else quantity.unit,
            window=window,
            marks=_marks(found, slice),
            **distribution_of(core.evaluator.distribution(cell, window, core.evaluated_at or time.time())),
        )

    return router


def _marks(clause: Clause, slice: str) -> list[Mark]:
    """The limit, where it is a value of the quantity; a fraction's threshold."""
    if clause.metric in DERIVED:
        return []
    statistic, limit = clause.parsed_statistic, clause.limit_for(slice)
    if statistic.kind == "fraction":
        return [Mark(value=statistic.argument, text=f"counted above {number(statistic.argument)}")]
    return [Mark(value=limit, text=f"limit of the {clause.statistic_text} {number(limit)}")]


def distribution_of(sample: Binned) -> dict[str, Any]:
    """Observations by size, in the fields of `Observations`; each source bin goes where its geometric middle is."""
    size, sign = _middles(sample)
    used = sign != 0
    edges, above, below = np.array([]), np.array([]), np.array([])
    if used.any():
        index = np.floor(np.log10(size[used]) * _PER_DECADE + 1e-9).astype(np.int64)
        index = np.maximum(index, index.max() - _PER_DECADE * _MAX_DECADES)
        first, bins = int(index.min()), int(index.max() - index.min()) + 1
        edges = 10.0 ** ((first + np.arange(bins + 1)) / _PER_DECADE)
        above, below = (
            np.bincount(index - first, sample.count[used] * (sign[used] == side), minlength=bins).astype(np.int64)
            for side in (1.0, -1.0)
        )
    return {
        "edges": edges.tolist(),
        "above": above.tolist(),
        "below": below.tolist(),
        "zero": int(sample.count[~used].sum()),
        "total": sample.total,
        "mean": finite_or_none(sample.sum / sample.total if sample.total else math.nan),
        "minimum": finite_or_none(sample.minimum),
        "maximum": finite_or_none(sample.maximum),
    }


def _middles(sample: Binned) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """|middle| of every bin and its sign; the sign of a bin that reaches or crosses zero is 0."""
    lower, upper = sample.lower, sample.upper
    sign = np.where(lower > 0, 1.0, np.where(upper < 0, -1.0, 0.0))
    near = np.where(sign > 0, lower, -upper)
    far = np.where(sign > 0, upper, -lower)
    far = np.where(np.isfinite(far), far, near)  # an open end counts where it begins
    known = sign != 0
    size = np.zeros_like(lower)
    size[known] = np.sqrt(near[known]) * np.sqrt(far[known])
    return size, sign
