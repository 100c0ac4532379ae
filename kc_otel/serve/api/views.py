"""Shapes of the API's answers. Numbers that are not finite are null: JSON has no NaN."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from kc_otel.contract.clause import About
from kc_otel.judge.decisions.table import kept_since
from kc_otel.judge.incidents.actions_taken import ActionTaken
from kc_otel.judge.incidents.incident import BrokenCell, Diagnosis, IncidentState
from kc_otel.judge.incidents.incident_lifecycle import TrafficSeen
from kc_otel.judge.plain_json import finite_or_none
from kc_otel.judge.verdict import Causes, Cell, Status, Verdict
from kc_otel.serve.api.people_input import Name, Order, Reason, Signature, View
from kc_otel.serve.core import Core
from kc_otel.serve.shards.shard_health import ShardSeen
from kc_otel.serve.store.policy_store import Event
from kc_otel.serve.webhooks.outbox import EndpointStatus

Finite = Annotated[float | None, BeforeValidator(finite_or_none)]
"""A number, or null where JSON could not say it."""


class PartView(View):
    """A part of a mean, with its confidence interval."""

    estimate: Finite
    lower: Finite
    upper: Finite


class LagView(View):
    """A mean over what weights of some lags sampled, with its confidence interval."""

    lag: str
    """Versions that they were behind: `0`, `1`, `2-3`, `4-7` or `8+`."""
    share: float
    """Share of the observations; of a clause by prompt, of the tokens."""
    estimate: Finite
    lower: Finite
    upper: Finite


class CausesView(View):
    """Split of a mean over everything sampled into the kernels' drift and the age of the weights."""

    clause: str
    """Clause whose mean it is; that of a clause on the weights' lag is of another."""
    limit: float
    share: float
    """Share of the observations that older weights sampled; of a clause by prompt, of the tokens."""
    total: PartView
    kernel: PartView
    """The mean over what the training kernel's weights sampled; null where that is nothing."""
    staleness: PartView
    """Increase due to the age of the other weights."""
    by_lag: list[LagView]
    """The mean at each lag that was observed; a sequence's older tokens have the lag of the oldest."""
    text: str
    """The larger of the two causes, as a phrase."""


class VerdictView(View):
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
    """`population` if the verdict covers future traffic, too; `traffic` if it covers only the measured traffic."""
    evidence: Finite
    """Evidence against the limit, 0 to 1: chance alone reaches 1 in any cell of the contract no more often than once
    per `observability.false_alarms`. Null for a maximum or a share of none, which have no such measure."""
    observed: bool
    """True if any observation of the cell is stored; otherwise NO_DATA means that nobody has reported yet."""
    no_traffic: bool
    """True where NO_DATA follows from an order that keeps the slice's requests from the kernel."""
    causes: CausesView | None
    """Split by cause, on all traffic, where older weights sampled some of it."""


class VerdictList(View):
    """The newest verdict of every cell."""

    at: float | None
    """Unix time of the last evaluation; null before the first."""
    verdicts: list[VerdictView]


class CellView(View):
    """A cell: its verdict, since when, what fires, and its recent past."""

    verdict: VerdictView
    since: float
    """Unix time since when the status is what it is."""
    firing: list[str]
    """Severities of the escalation steps that fire for this cell."""
    history: list[tuple[float, float | None, float | None, float | None, int]]
    """(time, estimate, lower, upper, status code) of recent evaluations, oldest first."""


class CellList(View):
    """Every cell."""

    at: float | None
    cells: list[CellView]


class ClauseView(View):
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
    """The limit and the metric, explained in sentences."""


class KernelView(View):
    """A kernel version that has reported itself."""

    role: str
    """`train` or `inference`."""
    version: str
    """Short fingerprint."""
    name: str
    """As people call it; with the fields in which it differs from others that would be called alike."""
    fields: dict[str, str]
    last_seen: float
    otherwise: list[str]
    """Differences from the contract's declaration, while the kernel is among those seen last; and recorders of it that
    fell silent without shutting down while others report."""


class ContractView(View):
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
    """Worst status of its cells: INVALID_INPUT, then FAIL, NO_DATA, INCONCLUSIVE, and PASS."""
    directives: dict[str, Any]
    """Current requests of the escalation policy to trainers and gates."""
    window: float
    """Seconds of the short window."""
    long_window: float
    """Seconds of the long window."""
    confidence: float
    """Confidence of the intervals, such as 0.99."""
    claims: list[str]
    """Claims of a PASS, an interval and a FAIL, as sentences."""
    runbook: str | None
    """Location of the contract's runbook."""


class ContractList(View):
    """Every contract."""

    contracts: list[ContractView]


class EventList(View):
    """Events, oldest first."""

    events: list[Event]


class IncidentView(View):
    """Something that is or was broken, since when, for whom, and what was done about it."""

    id: str
    """The same from the first breach to the end."""
    contract: str
    on: str
    """Kind of fault, as escalation steps call it: fail, no-data, inconclusive, invalid-input."""
    status: Status
    state: IncidentState
    """`contained` where the routers show that users are kept from all that is broken, or from what was and is not given
    back."""
    state_text: str
    """The state as a sentence begins; it names routers that have not applied a route."""
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
    """Findings about it, oldest first; `/api/v1/incidents/{id}/diagnoses/{evidence}` returns their evidence."""


class IncidentList(View):
    """Incidents: those that last, the most urgent first, then those that are over, newest first."""

    at: float | None
    """Unix time of the last evaluation; null before the first."""
    incidents: list[IncidentView]


class InForceView(View):
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
    """Name by which a person ends it, where its slice is not enough."""
    text: str


class MissingView(View):
    """Points of a kernel pair that arrive and are not judged, for one reason."""

    contract: str
    kernel_train: str
    """Short fingerprint; empty where the points do not say."""
    kernel_inference: str
    """Short fingerprint; empty where the points do not say."""
    outcome: str
    """As in `kc.evaluator.points`; `invalid` where more than 1 % of the sequences failed the input checks."""
    senders: int
    since: float
    text: str
    """Reason, remedy and senders."""


class Overview(View):
    """Current faults, and the decisions in force."""

    at: float | None
    """Unix time of the last evaluation; null before the first."""
    started_at: float
    """Unix time of the start of the evaluator."""
    now: float
    """Unix time of the answer."""
    version: str
    heard: bool
    """True if any kernel has ever reported."""
    otlp_port: int
    """Port of this process that takes OTLP over HTTP."""
    counts: dict[str, dict[Status, int]]
    """Number of cells by contract and status."""
    no_traffic: dict[str, int]
    """Of those without data, how many have no traffic by order; by contract."""
    incidents: list[IncidentView]
    """Worst first."""
    missing: list[MissingView]
    """Points that arrive and are not judged: verdicts say nothing about them. Ends a window after the last."""
    in_force: list[InForceView]


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


class MarkView(View):
    """A value worth a line across a distribution."""

    value: float
    text: str


class DistributionView(View):
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


class HealthView(View):
    """Health of the evaluator."""

    evaluated_at: float | None
    tick_seconds: float
    series: int
    streams: int
    points: dict[str, int]
    """Data points received, by what became of them."""
    requests: dict[str, int]
    """OTLP requests, by `transport outcome`."""
    failures: dict[str, str]
    """Current failures of the evaluator, by contract; an empty name stands for all contracts."""
    streams_events: dict[str, int]
    """Resets, gaps, evictions and the like."""
    invalid: dict[str, dict[str, int]]
    """Sequences that failed an input check within the short window, by contract and reason."""
    listeners: dict[str, dict[str, float | None]]
    """Unix time when a program last looked at a contract's directives, by contract and directive; null where none has
    since the evaluator started."""
    outbox: list[EndpointStatus]
    shards: tuple[ShardSeen, ...]
    """Shards that hold the streams, if those are not in the evaluator's process."""


class ResizeRequest(Order):
    """Another number of shards."""

    shards: int = Field(ge=1, le=1000)


class ResumeRequest(Order):
    """A person lifts a route."""

    contract: Name
    slice: Name | None = None
    """Only this slice; every slice when null."""
    by: Signature
    """Author; kept with the event."""
    why: Reason
    """Reason; kept with the event."""


class Resumed(View):
    """Result of lifting routes."""

    lifted: int
    """Routes that were lifted."""
    version: int
    """Version of the decision table."""


class ProblemDetails(View):
    """An error, as RFC 9457 has it."""

    title: str
    detail: str
    status: int


KeptAway = Callable[[Verdict], bool]


def kept_away(core: Core) -> KeptAway:
    """Says of a verdict whether it is NO_DATA because requests are kept from its kernel, as ordered and obeyed."""
    orders: dict[str, Callable[[str, str], float | None]] = {}
    traffic: dict[str, TrafficSeen] = {}
    now = core.evaluated_at

    def away(verdict: Verdict) -> bool:
        name, _, slice, _, version = verdict.cell
        if verdict.status is not Status.NO_DATA or not version or now is None or name not in core.contracts:
            return False
        if name not in orders:
            orders[name] = kept_since(core.decisions, name)
        if orders[name](slice, version) is None:
            return False
        if name not in traffic:
            traffic[name] = core.traffic(name, core.escalation, now)
        return traffic[name].excuses(slice, version, orders[name])

    return away


def view_of(verdict: Verdict, kept_away: KeptAway, causes: Mapping[Cell, Causes]) -> VerdictView:
    """A verdict in the API's shape."""
    of = causes.get(verdict.cell)
    told = None if of is None else CausesView.model_validate({**dataclasses.asdict(of), "text": of.text})
    fields = {field.name: getattr(verdict, field.name) for field in dataclasses.fields(verdict) if field.name != "cell"}
    derived: dict[str, Any] = {"margin": verdict.margin, "no_traffic": kept_away(verdict), "causes": told}
    return VerdictView(**verdict.cell._asdict(), **fields, **derived)
