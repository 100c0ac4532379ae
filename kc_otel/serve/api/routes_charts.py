"""Charts of a cell as SVG, for the page and for other programs."""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict, dataclass
from datetime import UTC, tzinfo
from typing import Annotated, Any, Final, Literal
from zoneinfo import ZoneInfo

import numpy as np
from fastapi import APIRouter, Depends, HTTPException, Query
from numpy.typing import NDArray

from kc_otel.charts.chart import Chart, unit_word
from kc_otel.charts.depth_chart import depth_chart
from kc_otel.charts.distribution_chart import draw_distribution
from kc_otel.charts.history_chart import Marker, draw_evidence, draw_history, draw_sparkline, markers_of
from kc_otel.charts.place_chart import draw_places
from kc_otel.contract.clause import Clause
from kc_otel.contract.registry.clause_metrics import DERIVED
from kc_otel.contract.slices import ALL
from kc_otel.contract.words import number, place
from kc_otel.judge.plain_json import finite_or_none
from kc_otel.judge.verdict import Cell
from kc_otel.serve.api.shapes import View, find_clause
from kc_otel.serve.core import Core
from kc_otel.serve.history import HistoryPoint
from kc_otel.stats import Binned

_MAX_EVENTS: Final = 1000
_PER_DECADE: Final = 8
_MAX_DECADES: Final = 12
"""Decades below the largest observation with bins of their own; smaller values go into the lowest bin."""

Start = Annotated[float, Query(alias="from", description="Unix time, seconds.")]
End = Annotated[float | None, Query(alias="to", description="Unix time, seconds; now when left out.")]
Over = Annotated[Literal["time", "step"], Query(description="Horizontal axis: time, or training steps.")]
Zone = Annotated[str, Query(description="Time zone of the labels, such as Europe/Berlin.")]


class SeriesView(View):
    """The past of a cell."""

    kernel_train: str
    kernel_inference: str
    points: list[tuple[float, float | None, float | None, float | None, float, int, int, float | None, int | None]]
    """(time, estimate, lower, upper, limit, samples, status code, evidence as a share of an alarm, trainer's step where
    it is told), oldest first."""


class HistoryView(View):
    """The history of a clause on a slice, for every compared pair of kernels; older points are thinned out."""

    step: float
    """Seconds between two points where it is thinned."""
    series: list[SeriesView]


@dataclass(frozen=True, slots=True)
class _Asked:
    """A cell, and the period of its past."""

    cell: Cell
    start: float
    end: float | None
    zone: tzinfo


def _asked(
    contract: str,
    clause: str,
    slice: str = ALL,
    kernel_train: str = "",
    kernel_inference: str = "",
    start: Start = 0.0,
    end: End = None,
    zone: Zone = "UTC",
) -> _Asked:
    return _Asked(Cell(contract, clause, slice, kernel_train, kernel_inference), start, end, _zone(zone))


Asked = Annotated[_Asked, Depends(_asked)]


def history_routes(core: Core) -> APIRouter:
    """`/api/v1/history`."""
    router = APIRouter(prefix="/api/v1")

    @router.get("/history", tags=["verdicts"])
    async def history(
        contract: str,
        clause: str,
        slice: str = ALL,
        start: Start = 0.0,
        end: End = None,
    ) -> HistoryView:
        """Return the history of a clause on a slice: twenty points per long window, over twenty-four of them."""
        find_clause(core, contract, clause, slice)
        past = core.history.past(contract, clause, slice, start, time.time() if end is None else end)
        return HistoryView(
            step=core.history.step(contract),
            series=[
                SeriesView(
                    kernel_train=cell.kernel_train,
                    kernel_inference=cell.kernel_inference,
                    points=list(moments),
                )
                for cell, moments in past.items()
            ],
        )

    return router


def chart_routes(core: Core) -> APIRouter:
    """`/api/v1/charts/history`, `evidence`, `sparkline`, `distribution`, `depth` and `places`."""
    router = APIRouter(prefix="/api/v1/charts", tags=["charts"])

    @router.get("/history")
    async def history(asked: Asked, over: Over = "time") -> Chart | None:
        """Return a cell's history against its limit, with its events; null without a history."""
        cell = asked.cell
        found = find_clause(core, cell.contract, cell.clause, cell.slice)
        points, others = _past(core, asked)
        return draw_history(
            f"{cell.clause} on {place(cell.slice)} over {over}{'s' if over == 'step' else ''}",
            points,
            kernel=cell.kernel_inference,
            others={other.kernel_inference: found for other, found in others.items()},
            markers=_markers(core, cell),
            unit=unit_word(found.limit_unit),
            step=core.history.step(cell.contract),
            zone=asked.zone,
            over=over,
        )

    @router.get("/evidence")
    async def evidence(asked: Asked, over: Over = "time") -> Chart | None:
        """Return the evidence against a cell's limit, as a share of an alarm; null where there is none."""
        cell = asked.cell
        find_clause(core, cell.contract, cell.clause, cell.slice)
        points, others = _past(core, asked)
        title = f"Evidence against {cell.clause} on {place(cell.slice)}"
        step = core.history.step(cell.contract)
        return draw_evidence(title, points, others=others.values(), step=step, zone=asked.zone, over=over)

    @router.get("/sparkline")
    async def sparkline(asked: Asked) -> Chart | None:
        """Return a small chart of a cell's history against its limit; null without a history."""
        cell = asked.cell
        find_clause(core, cell.contract, cell.clause, cell.slice)
        points, others = _past(core, asked)
        title = f"{cell.clause} on {place(cell.slice)} over time"
        step, markers = core.history.step(cell.contract), _markers(core, cell)
        return draw_sparkline(title, points, others=list(others.values()), markers=markers, step=step, zone=asked.zone)

    @router.get("/distribution")
    async def distribution(
        contract: str, clause: str, slice: str = ALL, kernel_train: str = "", kernel_inference: str = ""
    ) -> Chart | None:
        """Return a cell's distribution in the long window, against all traffic; null where nothing was observed."""
        found = find_clause(core, contract, clause, slice)
        own = Cell(contract, clause, slice, kernel_train, kernel_inference)
        seen = _seen(core, own, found)
        whole = None if slice == ALL else _seen(core, own._replace(slice=ALL), found)
        return draw_distribution(f"{seen['metric']} on {place(slice)} by size", seen, place(slice), whole)

    @router.get("/depth")
    async def depth(
        incident: Annotated[str, Query(description="Id of the incident.")],
        evidence: Annotated[str, Query(description="SHA-256 of a diagnosis's evidence.")],
    ) -> Chart | None:
        """Return drift by layer, as locate found it; null for other evidence."""
        found = core.evidence(incident, evidence)
        if found is None:
            raise HTTPException(404, f"no such evidence of incident {incident[:40]!r}")
        try:
            return depth_chart(json.loads(found))
        except ValueError:
            return None

    @router.get("/places")
    async def places(incident: Annotated[str, Query(description="Id of the incident.")]) -> Chart | None:
        """Return the drift of an incident's kernels by position and turn; null if no recorder reports it."""
        of = core.incident(incident)
        if of is None or of.contract not in core.contracts:
            raise HTTPException(404, f"no incident {incident[:40]!r} of a contract that is served")
        found = core.by_place(of)
        confidence = core.contracts[of.contract].observability.confidence
        return draw_places("Drift by position and turn", found, confidence)

    return router


def _past(core: Core, asked: _Asked) -> tuple[list[HistoryPoint], dict[Cell, list[HistoryPoint]]]:
    """The cell's own past, and that of the same clause and slice with other kernels."""
    cell, end = asked.cell, time.time() if asked.end is None else asked.end
    past = core.history.past(cell.contract, cell.clause, cell.slice, asked.start, end)
    return past.pop(cell, []), past


def _markers(core: Core, cell: Cell) -> tuple[Marker, ...]:
    events = core.events.newest(cell.contract, _MAX_EVENTS, verdicts=False)
    said = [asdict(event) | {"message": event.data.get("message", "")} for event in events]
    return markers_of(said, cell.contract, cell.clause, cell.slice)


def _zone(name: str) -> tzinfo:
    """Return the zone, or UTC if this machine does not know it: labels name their zone."""
    try:
        return ZoneInfo(name)
    except (LookupError, ValueError, OSError):
        return UTC


def _seen(core: Core, cell: Cell, clause: Clause) -> dict[str, Any]:
    """The distribution of a cell's quantity in the long window that ends at the last evaluation."""
    window, quantity = core.contracts[cell.contract].observability.long_window, clause.quantity
    return distribution_of(core.evaluator.distribution(cell, window, core.evaluated_at or time.time())) | {
        "metric": clause.metric if quantity is None else quantity.key,
        "unit": clause.limit_unit if quantity is None else quantity.unit,
        "window": window,
        "marks": _marks(clause, cell.slice),
    }


def _marks(clause: Clause, slice: str) -> list[dict[str, Any]]:
    """The limit, where it is a value of the quantity; a fraction's threshold."""
    if clause.metric in DERIVED:
        return []
    statistic, limit = clause.parsed_statistic, clause.limit_for(slice)
    if statistic.kind == "fraction":
        return [{"value": statistic.argument, "text": f"counted above {number(statistic.argument)}"}]
    return [{"value": limit, "text": f"limit of the {clause.statistic_text} {number(limit)}"}]


def distribution_of(sample: Binned) -> dict[str, Any]:
    """Observations by size; each source bin goes where its geometric middle is.

    `edges` of the bins of |value|, ascending and positive, [k + 1], and the observations `above` and `below` zero in
    each, [k]; none where all are zero. `zero` counts also what is too small to be told from it. Unknown numbers are
    None.

    >>> import numpy as np
    >>> found = distribution_of(Binned.of_samples(np.array([0.0, 1.0, -1.0, 10.0])))
    >>> found["zero"], sum(found["above"]), sum(found["below"]), len(found["edges"])
    (1, 2, 1, 10)
    """
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
