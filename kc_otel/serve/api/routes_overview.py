"""Overview of current faults: since when, for whom, and the actions taken; the first view a person needs."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

from fastapi import APIRouter

from kc_otel.contract.words import listed, place
from kc_otel.judge.decisions import without_slice
from kc_otel.judge.escalation.notices import People
from kc_otel.judge.incidents.incident import Incident
from kc_otel.judge.verdict import Cell, Status
from kc_otel.serve.api.people_input import View
from kc_otel.serve.api.routes_incidents import IncidentView, incident_views
from kc_otel.serve.api.views import kept_away
from kc_otel.serve.core import Core

_KERNELS: Final = {"train-kernel": "training kernel", "inference-kernel": "inference kernel"}


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


def overview_routes(core: Core, version: str) -> APIRouter:
    """`/api/v1/overview`, made once per evaluation however many people look."""
    router = APIRouter(prefix="/api/v1", tags=["verdicts"])
    made: tuple[tuple[float | None, int, People], Overview] | None = None

    @router.get("/overview")
    async def overview() -> Overview:
        """Return current faults: since when, for whom, and the actions taken; worst first."""
        nonlocal made
        state = (core.evaluated_at, core.decisions.version, core.people)
        if made is None or made[0] != state:
            made = state, _overview(core, version)
        return made[1].model_copy(update={"now": time.time()})

    return router


def _overview(core: Core, version: str) -> Overview:
    counts: dict[str, Counter[Status]] = {name: Counter() for name in core.contracts}
    silent: Counter[str] = Counter()
    heard, away = False, kept_away(core)
    for verdict, _, _ in core.history.cells():
        counts.setdefault(verdict.cell.contract, Counter())[verdict.status] += 1
        silent[verdict.cell.contract] += away(verdict)
        heard = heard or bool(verdict.cell.kernel_inference)
    lasting = core.incidents()
    return Overview(
        at=core.evaluated_at,
        started_at=core.started_at,
        now=time.time(),
        version=version,
        heard=heard,
        otlp_port=core.otlp_port,
        counts={name: dict(count) for name, count in counts.items()},
        no_traffic=dict(silent),
        incidents=incident_views(core, lasting),
        missing=list(_missing(core)),
        in_force=[*_routes(core, lasting), *_by_people(core)],
    )


def _missing(core: Core) -> Iterator[MissingView]:
    """Points that no verdict is about, by contract, kernel pair and reason."""
    for name in core.contracts:
        for row in core.missing(name):
            yield MissingView.of(row, contract=name, kernel_train=row.pair[0], kernel_inference=row.pair[1])


def _by_people(core: Core) -> Iterator[InForceView]:
    for name in sorted(core.dry_run & core.contracts.keys()):
        yield InForceView(
            contract=name, kind="dry-run", slice="all", since=core.started_at,
            text=f"{name} is in dry run: its actions are only recorded",
        )  # fmt: skip
    for pin in core.decisions.pins:
        yield InForceView(
            contract=pin.contract, kind="pin", slice=pin.slice, since=pin.at, until=pin.until,
            text=f"{place(pin.slice)} is pinned to the {_KERNELS.get(pin.kernel, pin.kernel)} by {pin.by} ({pin.why})"
            + (f"; but {without}" if (without := without_slice(core.contracts[pin.contract], pin.slice)) else ""),
        )  # fmt: skip
    for silence in core.people.silences:
        yield InForceView(
            contract=silence.contract, kind="silence", slice=silence.slice or "all", since=silence.at,
            until=silence.until, id=silence.id, text=f"{silence.where} is silenced by {silence.by} ({silence.why})",
        )  # fmt: skip
    firing = {alert.fingerprint: alert.cell for state in core.policies.values() for alert in state.firing}
    taken: dict[tuple[str, str, str, float], list[Cell]] = {}
    for ack in core.people.acknowledgements:
        if ack.fingerprint in firing:
            taken.setdefault((ack.contract, ack.by, ack.why, ack.at), []).append(firing[ack.fingerprint])
    for (contract, by, why, at), cells in taken.items():
        places = dict.fromkeys(f"{cell.clause} on {place(cell.slice)}" for cell in cells)
        yield InForceView(
            contract=contract, kind="acknowledgement", slice=cells[0].slice, since=at,
            text=f"{by} is at work on {listed(list(places))} ({why})",
        )  # fmt: skip


def _routes(core: Core, lasting: Sequence[Incident]) -> list[InForceView]:
    """Routes in force whose cause is over: they outlive it until a person ends them."""
    now = core.evaluated_at or core.started_at
    broken = {
        (incident.contract, incident.kernel_inference, cell.slice) for incident in lasting for cell in incident.broken
    }
    left = [route for route in core.decisions.routes if (route.contract, route.avoid, route.slice) not in broken]
    traffic = {name: core.traffic(name, core.escalation, now) for name in {route.contract for route in left}}
    return [
        InForceView(
            contract=route.contract,
            kind="route",
            slice=route.slice,
            since=route.since,
            text=f"{place(route.slice)} is to be routed from kernel {route.avoid} to the training kernel: "
            f"{route.reason}{f'; but {behind}' if behind else ''}",
        )
        for route in left
        for behind in [traffic[route.contract].behind(route.slice, route.since, None)]
    ]
