"""Shapes of the API's answers. Numbers that are not finite are null: JSON has no NaN."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from kc_otel.contract.clause import About
from kc_otel.judge.facts import KernelInfo
from kc_otel.judge.incidents.actions_taken import ActionTaken
from kc_otel.judge.incidents.incident import BrokenCell, Diagnosis, IncidentState
from kc_otel.judge.plain_json import finite_or_none
from kc_otel.judge.verdict import Status, Verdict
from kc_otel.serve.api.people_input import Name, Reason, Signature
from kc_otel.serve.store.policy_store import Event
from kc_otel.serve.webhooks.outbox import EndpointStatus

__all__ = [
    "CellList",
    "CellView",
    "ClauseView",
    "ContractList",
    "ContractView",
    "DistributionView",
    "EventList",
    "HealthView",
    "HistoryView",
    "InForceView",
    "IncidentList",
    "IncidentView",
    "MarkView",
    "Overview",
    "ProblemDetails",
    "ResumeRequest",
    "Resumed",
    "SeriesView",
    "VerdictList",
    "VerdictView",
    "view_of",
]


Finite = Annotated[float | None, BeforeValidator(finite_or_none)]
"""A number, or null where JSON could not say it."""


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
    estimate: Finite
    lower: Finite
    upper: Finite
    margin: Finite
    """Limit minus the bound that decided; negative is bad."""
    samples: int
    window: str
    method: str
    reason: str
    contract_version: int
    contract_hash: str
    about: About
    """`population` where it speaks of what the slice will show, `traffic` where of what this window saw only."""
    evidence: Finite
    """What is held against the limit, 0 to 1: chance alone reaches 1 in any cell of the contract no more often than
    once per `observability.false_alarms`. Null where nothing of the kind can be held: of a maximum, of a share of
    none."""
    observed: bool
    """Whether any observation of the cell is remembered; without one, NO_DATA says that nobody has reported yet."""


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


class ContractView(_View):
    """A contract that this evaluator judges."""

    name: str
    version: int
    hash: str
    owner: str
    description: str
    clauses: list[ClauseView]
    slices: dict[str, dict[str, Any]]
    kernels: list[KernelInfo]
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
    claims: list[str]
    """What a PASS, an interval and a FAIL claim, as sentences."""
    runbook: str | None
    """Where the contract's runbook is."""


class ContractList(_View):
    """Every contract."""

    contracts: list[ContractView]


class EventList(_View):
    """EventList, oldest first."""

    events: list[Event]


class IncidentView(_View):
    """Something that is or was broken, since when, for whom, and what was done about it."""

    id: str
    """The same from the first breach to the end."""
    contract: str
    on: str
    """What is wrong, as escalation steps call it: fail, no-data, inconclusive, invalid-input."""
    status: Status
    state: IncidentState
    """`contained` where routes or pins keep users from all that is broken, or from what was and is not given back."""
    headline: str
    extents: list[tuple[str, str]]
    """(clause, how bad it is where it is worst), the worst clause first."""
    since: float
    contained: float | None
    """Unix time since when it is contained; null while it is not."""
    until: float | None
    """Unix time at which it was over; null while it lasts."""
    growth: list[tuple[float, int]]
    """(Unix time, slices that had been broken until then), for every minute that added some; `all` counts as one."""
    grew: str
    """The same in words; empty where it never grew."""
    kernel_train: str
    kernel_inference: str
    clauses: list[str]
    """Those that are broken still; all of them once none is."""
    slices: list[str]
    """Those where it is broken still; all of them once it is nowhere."""
    cells: list[BrokenCell]
    """The worst cells, each with its onset and its end. In a list of incidents: at most 20 of those broken still."""
    more: int
    """Cells beyond those."""
    actions: list[ActionTaken]
    diagnoses: list[Diagnosis]
    """What was found out about it, oldest first; `/api/v1/incidents/{id}/diagnoses/{evidence}` has what it rests on."""


class IncidentList(_View):
    """Incidents: those that last, the most urgent first, then those that are over, newest first."""

    at: float | None
    """Unix time of the last evaluation; null before the first."""
    incidents: list[IncidentView]


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
    started_at: float
    """Unix time of the start of the evaluator."""
    now: float
    """Unix time of the answer."""
    version: str
    heard: bool
    """Whether any kernel has ever reported."""
    otlp_port: int
    """Port of this process that takes OTLP over HTTP."""
    counts: dict[str, dict[Status, int]]
    """CellList by contract and status."""
    incidents: list[IncidentView]
    """Worst first."""
    in_force: list[InForceView]


class SeriesView(_View):
    """The past of a cell."""

    kernel_train: str
    kernel_inference: str
    points: list[tuple[float, float | None, float | None, float | None, float, int, int, float | None, int | None]]
    """(time, estimate, lower, upper, limit, samples, status code, evidence as a share of an alarm, trainer's step where
    it is told), oldest first."""


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


class ShardView(_View):
    """A shard of a Ray cluster, which owns the streams of its share of senders."""

    number: int
    """From 0; senders are divided over the numbers by their resource attributes."""
    node: str
    """Host that it runs on; empty before it answered."""
    pid: int
    started: float
    """Unix time at which its process began; later than the evaluator's where it was started again."""
    recovered: int
    """Exports that it then took from its log."""
    streams: int
    points: int
    """Points that it took since then."""
    lag: int
    """Bytes that wait for its disk, or are in its log and not in a batch for the judge."""
    waiting: int
    """Bytes that wait for it in the evaluator."""
    cpu_seconds: float
    answered: float
    """Unix time of its last answer."""
    trouble: str
    """Why it is not heard; empty where it is."""


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
    failures: dict[str, str]
    """What the evaluator fails at now, by contract; an empty name is all of them."""
    streams_events: dict[str, int]
    """Resets, gaps, evictions and the like."""
    invalid: dict[str, dict[str, int]]
    """Sequences that failed an input check within the short window, by contract and reason."""
    listeners: dict[str, dict[str, float | None]]
    """Unix time when a program last looked at a contract's directives, by contract and directive; null where none has
    since the evaluator started."""
    outbox: list[EndpointStatus]
    shards: list[ShardView]
    """Where streams are, if they are not in the evaluator's process."""


class ResizeRequest(_View):
    """Another number of shards."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True, extra="forbid")

    shards: int = Field(ge=1, le=1000)


class ResumeRequest(_View):
    """A person lifts a route."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True, extra="forbid")

    contract: Name
    slice: Name | None = None
    """Only this slice; every slice when null."""
    by: Signature
    """Who."""
    why: Reason
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


def view_of(verdict: Verdict) -> VerdictView:
    """A verdict in the API's shape."""
    fields = {field.name: getattr(verdict, field.name) for field in dataclasses.fields(verdict) if field.name != "cell"}
    return VerdictView(**verdict.cell._asdict(), **fields, margin=verdict.margin)
