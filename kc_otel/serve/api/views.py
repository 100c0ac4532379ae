"""Shapes of the API's answers. Numbers that are not finite are null: JSON has no NaN."""

from __future__ import annotations

import math
from typing import Any

from pydantic import BaseModel, ConfigDict

from kc_otel.judge.verdict import Status, Verdict

__all__ = [
    "ActionView",
    "BrokenCellView",
    "CellList",
    "CellView",
    "ClauseView",
    "ContractList",
    "ContractView",
    "DistributionView",
    "EventList",
    "EventView",
    "HealthView",
    "HistoryView",
    "InForceView",
    "IncidentView",
    "KernelView",
    "MarkView",
    "OutboxView",
    "Overview",
    "ProblemDetails",
    "ResumeRequest",
    "Resumed",
    "SeriesView",
    "VerdictList",
    "VerdictView",
    "view_of",
]


class _View(BaseModel):
    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)


class VerdictView(_View):
    """A verdict and everything that decided it."""

    contract: str
    clause: str
    slice: str
    kernel_train: str
    """Short fingerprint of the training kernel; empty before any has reported."""
    kernel_inference: str
    """Short fingerprint of the inference kernel; empty before any has reported."""
    status: Status
    at: float
    """Unix time of the evaluation, seconds."""
    limit: float
    estimate: float | None
    lower: float | None
    upper: float | None
    margin: float | None
    """Limit minus the bound that decided; negative is bad."""
    samples: int
    window: str
    method: str
    reason: str
    contract_version: int
    contract_hash: str


class VerdictList(_View):
    """The newest verdict of every cell."""

    at: float | None
    """Unix time of the last evaluation; null before the first."""
    verdicts: list[VerdictView]


class CellView(_View):
    """A cell: its verdict, since when, what fires, and its recent past."""

    verdict: VerdictView
    since: float
    """Unix time since when the status is what it is."""
    firing: list[str]
    """Severities of the escalation steps that fire for this cell."""
    history: list[tuple[float, float | None, float | None, float | None, int]]
    """(time, estimate, lower, upper, status code) of recent evaluations, oldest first."""


class CellList(_View):
    """Every cell."""

    at: float | None
    cells: list[CellView]


class ClauseView(_View):
    """A clause as the contract states it."""

    id: str
    section: str
    metric: str
    statistic: str
    limit: float
    unit: str
    per: str | None
    slices: dict[str, float]
    description: str
    meaning: str
    """What must not be above which limit, and what the metric is, in sentences."""


class KernelView(_View):
    """A kernel version that has reported."""

    version: str
    role: str
    fields: dict[str, Any]
    last_seen: float | None


class ContractView(_View):
    """A contract that this evaluator judges."""

    name: str
    version: int
    hash: str
    owner: str
    description: str
    clauses: list[ClauseView]
    slices: dict[str, dict[str, Any]]
    kernels: list[KernelView]
    status: Status
    """Worst status of its cells: FAIL, then NO_DATA, then INCONCLUSIVE, then PASS."""
    directives: dict[str, Any]
    """What the escalation policy asks of trainers and gates at the moment."""
    window: float
    """Seconds of the short window."""
    long_window: float
    """Seconds of the long window."""
    confidence: float
    """Confidence of the intervals, such as 0.99."""
    runbook: str | None
    """Where the contract's runbook is."""


class ContractList(_View):
    """Every contract."""

    contracts: list[ContractView]


class EventView(_View):
    """Something that changed."""

    id: int
    at: float
    kind: str
    contract: str
    message: str
    data: dict[str, Any]


class EventList(_View):
    """EventList, oldest first."""

    events: list[EventView]


class BrokenCellView(_View):
    """A cell of an incident."""

    clause: str
    slice: str
    since: float
    until: float | None
    limit: float | None
    estimate: float | None
    lower: float | None
    upper: float | None
    reason: str


class ActionView(_View):
    """Something that the escalation policy or a person did."""

    at: float
    kind: str
    text: str
    in_force: bool | None
    """Whether it still holds; null for what is over once it is done."""


class IncidentView(_View):
    """Something that is broken, since when, for whom, and what was done about it."""

    id: str
    contract: str
    status: Status
    headline: str
    extents: list[tuple[str, str]]
    """(clause, how bad it is where it is worst), the worst clause first."""
    since: float
    kernel_train: str
    kernel_inference: str
    clauses: list[str]
    slices: list[str]
    cells: list[BrokenCellView]
    """The worst cells, at most 20."""
    more: int
    """CellList beyond those."""
    actions: list[ActionView]


class InForceView(_View):
    """Something that holds until a person or a time ends it.

    A route whose cause is not broken any more, a pin, a silence, an acknowledgement, a dry run.
    """

    contract: str
    kind: str
    """route, pin, silence, acknowledgement, dry-run."""
    slice: str
    since: float
    until: float | None = None
    """Unix time at which it ends by itself; null when a person ends it."""
    id: str = ""
    """What a person names to end it, where its slice is not enough."""
    text: str


class Overview(_View):
    """What is broken now, and what is in force."""

    at: float | None
    """Unix time of the last evaluation; null before the first."""
    now: float
    """Unix time of the answer."""
    version: str
    heard: bool
    """Whether any kernel has ever reported."""
    counts: dict[str, dict[Status, int]]
    """CellList by contract and status."""
    incidents: list[IncidentView]
    """Worst first."""
    in_force: list[InForceView]


class SeriesView(_View):
    """The past of a cell."""

    kernel_train: str
    kernel_inference: str
    points: list[tuple[float, float | None, float | None, float | None, float, int, int]]
    """(time, estimate, lower, upper, limit, samples, status code), oldest first."""


class HistoryView(_View):
    """The past of a clause on a slice, for every pair of kernels that was compared; what is older is thinned."""

    step: float
    """Seconds between two points where it is thinned."""
    series: list[SeriesView]


class MarkView(_View):
    """A value worth a line across a distribution."""

    value: float
    text: str


class DistributionView(_View):
    """Observations of a cell's quantity within a window, by size."""

    metric: str
    unit: str
    window: float
    """Seconds."""
    edges: list[float]
    """Edges of the bins of |value|, ascending, evenly spaced on a logarithmic axis."""
    above: list[int]
    """Positive observations per bin."""
    below: list[int]
    """Negative observations per bin."""
    zero: int
    total: int
    mean: float | None
    minimum: float | None
    maximum: float | None
    marks: list[MarkView]
    """Limit and thresholds, where they are in the quantity's unit."""


class OutboxView(_View):
    """How a webhook endpoint is doing."""

    endpoint: str
    waiting: int
    parked: int
    oldest: float | None
    """Unix time of the oldest message that waits."""
    disabled: str
    """Why it is not tried any more; empty while it is."""
    error: str
    """What the last attempt met."""


class HealthView(_View):
    """What the evaluator says of itself."""

    evaluated_at: float | None
    tick_seconds: float
    series: int
    streams: int
    points: dict[str, int]
    """Data points received, by what became of them."""
    requests: dict[str, int]
    """OTLP requests, by `transport outcome`."""
    streams_events: dict[str, int]
    """Resets, gaps, evictions and the like."""
    invalid: dict[str, dict[str, int]]
    """Sequences that failed an input check within the short window, by contract and reason."""
    outbox: list[OutboxView]
    recording: dict[str, int]
    """What `--record` keeps, by what became of it: written, dropped, failed."""


class ResumeRequest(_View):
    """A person lifts a route."""

    contract: str
    slice: str | None = None
    """Only this slice; every slice when null."""
    by: str
    """Who."""
    why: str
    """Why; kept with the event."""


class Resumed(_View):
    """What lifting routes did."""

    lifted: int
    """Routes that were lifted."""
    version: int
    """Version of the decision table."""


class ProblemDetails(_View):
    """An error, as RFC 9457 has it."""

    title: str
    detail: str
    status: int


def finite(value: float) -> float | None:
    """The number, or None where JSON could not say it."""
    return value if math.isfinite(value) else None


def view_of(verdict: Verdict) -> VerdictView:
    """A verdict in the API's shape."""
    cell = verdict.cell
    return VerdictView(
        contract=cell.contract,
        clause=cell.clause,
        slice=cell.slice,
        kernel_train=cell.kernel_train,
        kernel_inference=cell.kernel_inference,
        status=verdict.status,
        at=verdict.at,
        limit=verdict.limit,
        estimate=finite(verdict.estimate),
        lower=finite(verdict.lower),
        upper=finite(verdict.upper),
        margin=finite(verdict.margin),
        samples=verdict.samples,
        window=verdict.window,
        method=verdict.method,
        reason=verdict.reason,
        contract_version=verdict.contract_version,
        contract_hash=verdict.contract_hash,
    )
