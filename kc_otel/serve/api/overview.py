"""What is broken now, since when, for whom, and what was done about it: the first thing that a person has to see."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

from kc_otel.contract.words import listed, place
from kc_otel.judge.escalation.people import People
from kc_otel.judge.incidents.incidents import Incident, incidents
from kc_otel.judge.plain_json import to_plain
from kc_otel.judge.verdict import Cell, Status
from kc_otel.serve.api.views import IncidentView, InForceView, Overview, view_of
from kc_otel.serve.core import Core

__all__ = ["Overviews"]

_EVENTS: Final = 1000
_MOST_CELLS: Final = 20
_KERNELS: Final = {"train-kernel": "training kernel", "inference-kernel": "inference kernel"}


class Overviews:
    """Makes the overview, once per evaluation however many people look.

    Args:
        core: What is shown.
        version: Version of kc-otel.
    """

    def __init__(self, core: Core, version: str) -> None:
        self._core = core
        self._version = version
        self._made: tuple[tuple[float | None, int, People], Overview] | None = None

    def now(self) -> Overview:
        """The overview of the last evaluation."""
        state = (self._core.evaluated_at, self._core.decisions.version, self._core.people)
        if self._made is None or self._made[0] != state:
            self._made = (state, self._make())
        return self._made[1].model_copy(update={"now": time.time()})

    def _make(self) -> Overview:
        core = self._core
        counts: dict[str, Counter[Status]] = {name: Counter() for name in core.contracts}
        broken: list[dict[str, Any]] = []
        heard = False
        for verdict, since, _ in core.history.cells():
            counts.setdefault(verdict.cell.contract, Counter())[verdict.status] += 1
            reported = bool(verdict.cell.kernel_inference)
            heard = heard or reported
            # A cell that nobody has ever reported to is not broken: there is nothing yet.
            if verdict.status is Status.FAIL or (verdict.status is Status.NO_DATA and reported):
                broken.append({"verdict": view_of(verdict).model_dump(mode="json"), "since": since})
        decisions = to_plain(core.decisions)
        open_now: list[Incident] = []
        if broken:
            events = _events(core)
            waiting = {one.endpoint: one.oldest for one in core.outbox.status() if one.oldest is not None}
            found = incidents(broken, events, decisions, waiting=waiting)
            open_now = [one for one in found if one.until is None]
        return Overview(
            at=core.evaluated_at,
            now=time.time(),
            version=self._version,
            heard=heard,
            counts={name: dict(count) for name, count in counts.items()},
            incidents=[_incident(one) for one in open_now],
            in_force=_in_force(core, open_now),
        )


def _events(core: Core) -> list[dict[str, Any]]:
    """The newest verdicts, and as many alerts and decisions: these are few where verdicts change all the time."""
    found = {
        event.id: event for verdicts in (True, False) for event in core.events.newest(limit=_EVENTS, verdicts=verdicts)
    }
    return [dataclasses.asdict(event) for _, event in sorted(found.items())]


def _incident(one: Incident) -> IncidentView:
    lasting = [cell for cell in one.cells if cell.until is None]
    return IncidentView(
        id=one.id,
        contract=one.contract,
        status=Status(one.status),
        headline=one.headline,
        extents=list(one.extents),
        since=one.since,
        kernel_train=one.kernel_train,
        kernel_inference=one.kernel_inference,
        clauses=list(one.clauses),
        slices=list(one.slices),
        cells=lasting[:_MOST_CELLS],
        more=max(len(lasting) - _MOST_CELLS, 0),
        actions=list(one.actions),
    )


def _in_force(core: Core, open_now: list[Incident]) -> list[InForceView]:
    """Routes outlive their cause, until a person ends them; what people decided holds until they or a time end it."""
    return [*_routes(core, open_now), *_by_people(core)]


def _by_people(core: Core) -> Iterator[InForceView]:
    for name in sorted(core.dry_run & core.contracts.keys()):
        yield InForceView(
            contract=name, kind="dry-run", slice="all", since=core.started_at,
            text=f"{name} runs dry: what it would do is only recorded",
        )  # fmt: skip
    for pin in core.decisions.pins:
        yield InForceView(
            contract=pin.contract, kind="pin", slice=pin.slice, since=pin.at, until=pin.until,
            text=f"{place(pin.slice)} is pinned to the {_KERNELS.get(pin.kernel, pin.kernel)} by {pin.by} ({pin.why})",
        )  # fmt: skip
    for silence in core.people.silences:
        yield InForceView(
            contract=silence.contract, kind="silence", slice=silence.slice or "all", since=silence.at,
            until=silence.until, id=silence.id, text=f"{silence.where} is silenced by {silence.by} ({silence.why})",
        )  # fmt: skip
    firing = {alert.fingerprint: alert.cell for state in core.policies.values() for alert in state.firing}
    taken: dict[tuple[str, str, str, float], list[Cell]] = {}
    for one in core.people.acknowledgements:
        if one.fingerprint in firing:
            taken.setdefault((one.contract, one.by, one.why, one.at), []).append(firing[one.fingerprint])
    for (contract, by, why, at), cells in taken.items():
        places = dict.fromkeys(f"{cell.clause} on {place(cell.slice)}" for cell in cells)
        yield InForceView(
            contract=contract, kind="acknowledgement", slice=cells[0].slice, since=at,
            text=f"{by} is at work on {listed(list(places))} ({why})",
        )  # fmt: skip


def _routes(core: Core, open_now: list[Incident]) -> list[InForceView]:
    broken = {(one.contract, one.kernel_inference, cell.slice) for one in open_now for cell in one.cells}
    return [
        InForceView(
            contract=route.contract,
            kind="route",
            slice=route.slice,
            since=route.since,
            text=f"{place(route.slice)} avoids kernel {route.avoid} and uses the training kernel: {route.reason}",
        )
        for route in core.decisions.routes
        if (route.contract, route.avoid, route.slice) not in broken
    ]
