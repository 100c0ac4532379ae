"""Routes for contracts, verdicts and their past, events, and the worst sequences of a cell.

Numbers that are not finite are null: JSON has no NaN.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Annotated, Any, Final

from fastapi import APIRouter, HTTPException, Query, Response
from pydantic import BeforeValidator

from kc_otel.contract.clause import About
from kc_otel.contract.model import Contract
from kc_otel.contract.sentences import assurances, promise
from kc_otel.contract.slices import ALL
from kc_otel.judge.escalation.alerts import Alert
from kc_otel.judge.plain_json import finite_or_none
from kc_otel.judge.recorders import kernel_names, stand_in, unlike_declared
from kc_otel.judge.verdict import INPUT_CLAUSE, Causes, Cell, Status
from kc_otel.recordings.worst_sequences import WorstSequence, read_worst
from kc_otel.serve.api.shapes import MAY_READ_PROMPTS, SIGNER, ContractName, View, check_known
from kc_otel.serve.core import Core
from kc_otel.serve.history import Event, HistoryPoint
from kc_otel.serve.traffic import kept_away

_log: Final = logging.getLogger(__name__)


Start = Annotated[float, Query(alias="from", description="Unix time, seconds.")]
End = Annotated[float | None, Query(alias="to", description="Unix time, seconds; now when left out.")]
Finite = Annotated[float | None, BeforeValidator(finite_or_none)]
"""A number, or null where JSON could not say it."""


class CellKey(View):
    """A clause on a slice for one pair of kernels."""

    contract: str
    clause: str
    slice: str
    kernel_train: str
    """Short fingerprint of the training kernel; empty before any has reported."""
    kernel_inference: str
    """Short fingerprint of the inference kernel; empty before any has reported."""


class VerdictView(CellKey):
    """A cell: its newest verdict with everything that decided it, and what fires."""

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
    causes: Causes | None
    """Split by cause, on all traffic, where older weights sampled some of it."""
    since: float
    """Unix time since when the status is what it is."""
    firing: list[str]
    """Severities of the escalation steps that fire for this cell."""
    gone: bool
    """True if the cell is judged no longer, because its kernel is gone, and its alert fires still."""


class VerdictList(View):
    """The newest verdict of every cell."""

    at: float | None
    """Unix time of the last evaluation; null before the first."""
    verdicts: list[VerdictView]


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
    """Differences from the contract's declaration, while the kernel is among those seen last."""
    silent: str
    """Recorders of it that fell silent without shutting down while others report, as a sentence; empty for none."""


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


class EventList(View):
    """Events, oldest first."""

    events: list[Event]


class WorstList(View):
    """The worst sequences of a cell, the worst first."""

    sequences: list[WorstSequence]


def verdict_routes(core: Core) -> APIRouter:
    """`/api/v1/contracts`, `verdicts`, `history`, `events` and `worst`."""
    router = APIRouter(prefix="/api/v1")

    @router.get("/contracts", tags=["contracts"])
    async def contracts() -> ContractList:
        """Return every contract, its clauses, and the kernel versions that have reported."""
        return ContractList(contracts=[_contract(core, contract) for contract in core.contracts.values()])

    @router.get("/verdicts", tags=["verdicts"])
    async def verdicts(response: Response, contract: ContractName = None) -> VerdictList:
        """Return the newest verdict of every cell, since when it has its status, and firing alerts.

        The header `Age` has the seconds since the last evaluation.
        """
        response.headers["Age"] = f"{core.age:.0f}"
        check_known(core, contract)
        return VerdictList(at=core.evaluated_at, verdicts=list(_verdicts(core, contract)))

    @router.get("/history", tags=["verdicts"])
    async def history(contract: str, clause: str, slice: str = ALL, start: Start = 0.0, end: End = None) -> HistoryView:
        """Return the history of a clause on a slice: twenty points per long window, over twenty-four of them."""
        check_known(core, contract, clause, slice)
        past = core.history.past(contract, clause, slice, start, time.time() if end is None else end)
        series = [
            SeriesView(kernel_train=cell.kernel_train, kernel_inference=cell.kernel_inference, points=points)
            for cell, points in past.items()
        ]
        return HistoryView(step=core.history.step(contract), series=series)

    @router.get("/events", tags=["events"])
    async def events(
        contract: ContractName = None,
        newest: Annotated[int, Query(ge=1, le=10_000, description="Number of events.")] = 100,
        verdicts: Annotated[bool, Query(description="Include changes of verdicts.")] = True,
    ) -> EventList:
        """Return the newest changes: verdicts, alerts, routes, people's actions. Oldest first."""
        check_known(core, contract)
        return EventList(events=list(core.events.newest(contract, newest, verdicts=verdicts)))

    @router.get("/worst", tags=["worst sequences"])
    def worst(
        response: Response,
        contract: str,
        clause: str,
        slice: str = ALL,
        kernel_inference: Annotated[str, Query(description="Fingerprint; any when left out.")] = "",
    ) -> WorstList:
        """Return the sequences of a cell that the rescorer stored, the worst first."""
        check_known(core, contract, clause, slice)
        if not MAY_READ_PROMPTS.get():
            raise HTTPException(403, "prompts and completions are shown to tokens with may: [read, prompts]")
        if not core.worst:
            raise HTTPException(
                404, "none are kept: run `kc-otel rescore --worst FILE` and `kc-otel serve --worst FILE`"
            )
        found = _worst(core, contract, clause, slice, kernel_inference)
        _log.info("%s reads the worst sequences of %s on %s of %s", SIGNER.get() or "somebody", clause, slice, contract)
        response.headers["cache-control"] = "no-store"
        return WorstList(sequences=sorted(found, key=lambda sequence: -sequence.value))

    return router


def _worst(core: Core, contract: str, clause: str, slice: str, kernel: str) -> list[WorstSequence]:
    found: list[WorstSequence] = []
    for path in core.worst:
        try:
            found += read_worst(path, contract, clause, slice, kernel)
        except (OSError, ValueError) as error:
            _log.warning("%s", error)
    return found


def _verdicts(core: Core, contract: str | None) -> Iterator[VerdictView]:
    """Every cell; and each whose kernel is gone while what it did is not, as it was last."""
    firing: dict[Cell, list[Alert]] = {}
    for alert in core.firing(contract):
        firing.setdefault(alert.cell, []).append(alert)
    judged = [(verdict, since, firing.pop(verdict.cell, [])) for verdict, since in core.history.cells(contract)]
    left = [
        (alerts[0].verdict, min(alert.since for alert in alerts), alerts)
        for cell, alerts in firing.items()
        if cell.clause != INPUT_CLAUSE
    ]
    away = kept_away(core)
    for place, (verdict, since, alerts) in enumerate([*judged, *left]):
        gone = place >= len(judged)
        yield VerdictView.of(
            verdict,
            **verdict.cell._asdict(),
            no_traffic=away(verdict),
            causes=None if gone else core.causes.get(verdict.cell),
            since=since,
            firing=sorted({alert.severity for alert in alerts}),
            gone=gone,
        )


def _contract(core: Core, contract: Contract) -> ContractView:
    own = [verdict for verdict, _ in core.history.cells(contract.name)]
    return ContractView(
        name=contract.name,
        version=contract.metadata.version,
        hash=contract.hash,
        owner=contract.metadata.owner,
        description=contract.metadata.description,
        clauses=[
            ClauseView(
                id=clause.id,
                section=section,
                metric=clause.metric,
                statistic=clause.statistic_text,
                limit=clause.limit_for(ALL),
                unit=clause.limit_unit,
                per=clause.quantity and str(clause.quantity.per),
                slices={name: clause.limit_for(name) for name in clause.slices},
                description=clause.description,
                meaning=promise(clause, tuple(contract.slices)),
            )
            for section in ("numerical", "statistical", "runtime")
            for clause in getattr(contract, section)
        ],
        slices={name: spec.where for name, spec in contract.slices.items()},
        kernels=_kernels(core, contract),
        status=max((verdict.status for verdict in own), key=lambda status: status.code, default=Status.NO_DATA),
        window=contract.observability.window,
        long_window=contract.observability.long_window,
        confidence=contract.observability.confidence,
        claims=[*assurances(contract.observability), *core.evaluator.sampling(contract.name)],
        runbook=contract.metadata.runbook,
    )


def _kernels(core: Core, contract: Contract) -> list[KernelView]:
    known = core.evaluator.kernels(contract.name)
    names, newest = kernel_names(known), max((kernel.last_seen for kernel in known), default=0.0)
    current = [kernel for kernel in known if kernel.last_seen >= newest - contract.observability.window]
    routed_to = stand_in(current)
    current = [kernel for kernel in current if kernel.role == "train" or kernel.version not in routed_to]
    silent = {
        ("inference", version): core.evaluator.silent_recorders(contract.name, version, core.seen_at)[1]
        for version in core.evaluator.inference_versions(contract.name)
    }
    return [
        KernelView.of(
            kernel,
            name=names[kernel.role, kernel.version],
            otherwise=list(unlike_declared(contract.kernels, kernel, current)) if kernel in current else [],
            silent=silent.get((kernel.role, kernel.version), ""),
        )
        for kernel in known
    ]
