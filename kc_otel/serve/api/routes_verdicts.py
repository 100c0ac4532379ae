"""Routes for contracts, verdicts, events, and the worst sequences of a cell.

Numbers that are not finite are null: JSON has no NaN.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Annotated, Any, Final

from fastapi import APIRouter, HTTPException, Query, Response

from kc_otel.contract.clause import Clause
from kc_otel.contract.model import Contract
from kc_otel.contract.sentences import assurances, promise
from kc_otel.contract.slices import ALL
from kc_otel.judge.escalation.alerts import Alert
from kc_otel.judge.recorders import KernelInfo, kernel_names, stand_in, unlike_declared
from kc_otel.judge.verdict import INPUT_CLAUSE, Causes, Cell, OfLag, Part, Status, Verdict
from kc_otel.recordings.worst_sequences import WorstSequence, read_worst
from kc_otel.serve.api.shapes import MAY_READ_PROMPTS, SIGNER, ContractName, View, find_clause, served_or_all
from kc_otel.serve.core import Core
from kc_otel.serve.event_log import Event

_log: Final = logging.getLogger(__name__)


CELL: Final = "cell.contract cell.clause cell.slice cell.kernel_train cell.kernel_inference "


class PartView(View, of=Part, fields="estimate? lower? upper?"):
    """A part of a mean, with its confidence interval."""


class LagView(View, of=OfLag, fields="lag share estimate? lower? upper?"):
    """A mean over what weights of some lags sampled, with its confidence interval."""


class CausesView(View, of=Causes, fields="clause limit share text"):
    """Split of a mean over everything sampled into the kernels' drift and the age of the weights."""

    total: PartView
    kernel: PartView
    """The mean over what the training kernel's weights sampled; null where that is nothing."""
    staleness: PartView
    """Increase due to the age of the other weights."""
    by_lag: list[LagView]
    """The mean at each lag that was observed; a sequence's older tokens have the lag of the oldest."""


class VerdictView(
    View,
    of=Verdict,
    fields=CELL + "status at limit estimate? lower? upper? margin? samples window method reason contract_version "
    "contract_hash about evidence? observed",
):
    """A cell: its newest verdict with everything that decided it, and what fires."""

    no_traffic: bool
    """True where NO_DATA follows from an order that keeps the slice's requests from the kernel."""
    causes: CausesView | None
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


class ClauseView(View, of=Clause, fields="id metric statistic=statistic_text unit=limit_unit description"):
    """A clause as the contract states it."""

    section: str
    limit: float
    per: str | None
    slices: dict[str, float]
    meaning: str
    """The limit and the metric, explained in sentences."""


class KernelView(View, of=KernelInfo, fields="role version fields last_seen"):
    """A kernel version that has reported itself."""

    name: str
    """As people call it; with the fields in which it differs from others that would be called alike."""
    otherwise: list[str]
    """Differences from the contract's declaration, while the kernel is among those seen last; and recorders of it that
    fell silent without shutting down while others report."""


class ContractView(
    View,
    of=Contract,
    fields="name hash metadata.version metadata.owner metadata.description metadata.runbook observability.window "
    "observability.long_window observability.confidence",
):
    """A contract that this evaluator judges."""

    clauses: list[ClauseView]
    slices: dict[str, dict[str, Any]]
    kernels: list[KernelView]
    status: Status
    """Worst status of its cells: INVALID_INPUT, then FAIL, NO_DATA, INCONCLUSIVE, and PASS."""
    claims: list[str]
    """Claims of a PASS, an interval and a FAIL, as sentences."""


class ContractList(View):
    """Every contract."""

    contracts: list[ContractView]


class EventList(View):
    """Events, oldest first."""

    events: list[Event]


class WorstList(View):
    """The worst sequences of a cell, the worst first."""

    sequences: list[WorstSequence]


def verdict_routes(core: Core) -> APIRouter:
    """`/api/v1/contracts`, `verdicts`, `events` and `worst`."""
    router = APIRouter(prefix="/api/v1")

    @router.get("/contracts", tags=["contracts"])
    async def contracts() -> ContractList:
        """Return every contract, its clauses, and the kernel versions that have reported."""
        return ContractList(contracts=[_contract(core, contract) for contract in core.contracts.values()])

    @router.get("/verdicts", tags=["verdicts"])
    async def verdicts(
        response: Response,
        contract: ContractName = None,
        clause: str | None = None,
        slice: str | None = None,
        status: Status | None = None,
    ) -> VerdictList:
        """Return the newest verdict of every cell, since when it has its status, and firing alerts.

        The header `Age` has the seconds since the last evaluation.
        """
        response.headers["Age"] = f"{core.age:.0f}"
        served_or_all(core, contract)
        found = [
            view
            for verdict, view in _verdicts(core, contract)
            if clause in {None, verdict.cell.clause}
            and slice in {None, verdict.cell.slice}
            and status in {None, verdict.status}
        ]
        return VerdictList(at=core.evaluated_at, verdicts=found)

    @router.get("/events", tags=["events"])
    async def events(
        contract: ContractName = None,
        after: Annotated[int, Query(ge=0, lt=2**63, description="Only events with greater ids.")] = 0,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
        newest: Annotated[
            int | None, Query(ge=1, le=10_000, description="Only this many of the newest events.")
        ] = None,
        verdicts: Annotated[bool, Query(description="Include changes of verdicts; only with `newest`.")] = True,
    ) -> EventList:
        """Return changes: verdicts, alerts, routes, people's actions. Oldest first."""
        served_or_all(core, contract)
        if newest is not None:
            found = core.events.newest(contract, newest, verdicts=verdicts)
        else:
            found = core.events.events(contract, after, limit)
        return EventList(events=list(found))

    @router.get("/worst", tags=["worst sequences"])
    def worst(
        response: Response,
        contract: str,
        clause: str,
        slice: str = ALL,
        kernel_inference: Annotated[str, Query(description="Fingerprint; any when left out.")] = "",
    ) -> WorstList:
        """Return the sequences of a cell that the rescorer stored, the worst first."""
        find_clause(core, contract, clause, slice)
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


def _verdicts(core: Core, contract: str | None) -> Iterator[tuple[Verdict, VerdictView]]:
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
    kept_away = core.kept_away()
    for place, (verdict, since, alerts) in enumerate([*judged, *left]):
        gone = place >= len(judged)
        yield (
            verdict,
            VerdictView.of(
                verdict,
                no_traffic=kept_away(verdict),
                causes=None if gone else core.causes.get(verdict.cell),
                since=since,
                firing=sorted({alert.severity for alert in alerts}),
                gone=gone,
            ),
        )


def _contract(core: Core, contract: Contract) -> ContractView:
    own = [verdict for verdict, _ in core.history.cells(contract.name)]
    return ContractView.of(
        contract,
        clauses=[
            ClauseView.of(
                clause,
                section=section,
                limit=clause.limit_for(ALL),
                per=clause.quantity and str(clause.quantity.per),
                slices={name: clause.limit_for(name) for name in clause.slices},
                meaning=promise(clause, tuple(contract.slices)),
            )
            for section in ("numerical", "statistical", "runtime")
            for clause in getattr(contract, section)
        ],
        slices={name: spec.where for name, spec in contract.slices.items()},
        kernels=_kernels(core, contract),
        status=max((verdict.status for verdict in own), key=lambda status: status.code, default=Status.NO_DATA),
        claims=[*assurances(contract.observability), *core.evaluator.sampling(contract.name)],
    )


def _kernels(core: Core, contract: Contract) -> list[KernelView]:
    known = core.evaluator.kernels(contract.name)
    names, newest = kernel_names(known), max((kernel.last_seen for kernel in known), default=0.0)
    current = [kernel for kernel in known if kernel.last_seen >= newest - contract.observability.window]
    routed_to = stand_in(current)
    current = [kernel for kernel in current if kernel.role == "train" or kernel.version not in routed_to]
    silent = {
        kernel.version: said
        for kernel in known
        if kernel.role == "inference" and (said := core.silent_recorders(contract.name, kernel.version)[1])
    }
    return [
        KernelView.of(
            kernel,
            name=names[kernel.role, kernel.version],
            otherwise=[
                *(unlike_declared(contract.kernels, kernel, current) if kernel in current else ()),
                *([silent[kernel.version]] if kernel.role == "inference" and kernel.version in silent else ()),
            ],
        )
        for kernel in known
    ]
