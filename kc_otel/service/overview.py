"""What is broken now, since when, for whom, and what was done about it: the first thing that a person has to see."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from typing import Any, Final

from kc_otel.evaluator.verdict import Status
from kc_otel.report.incidents import Incident, incidents
from kc_otel.report.words import place
from kc_otel.service.core import Core
from kc_otel.service.models import DeedView, IncidentView, Overview, PlaceView, StandingView, view_of

__all__ = ["Overviews"]

_EVENTS: Final = 1000
_PLACES: Final = 20


class Overviews:
    """Makes the overview, once per evaluation however many people look.

    Args:
        core: What is shown.
        version: Version of kc-otel.
    """

    def __init__(self, core: Core, version: str) -> None:
        self._core = core
        self._version = version
        self._made: tuple[tuple[float | None, int], Overview] | None = None

    def now(self) -> Overview:
        """The overview of the last evaluation."""
        state = (self._core.evaluated_at, self._core.decisions.version)
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
        decisions = core.decisions.to_json()
        open_now: list[Incident] = []
        if broken:
            events = [dataclasses.asdict(event) for event in core.events.newest(limit=_EVENTS)]
            for event in events:
                event["message"] = event["data"].get("message", "")
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
            standing=_standing(core, open_now),
        )


def _incident(one: Incident) -> IncidentView:
    lasting = [place for place in one.places if place.until is None]
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
        slices=[name for name in one.slices if any(place.slice == name for place in lasting)],
        places=[PlaceView(**dataclasses.asdict(place)) for place in lasting[:_PLACES]],
        more=max(len(lasting) - _PLACES, 0),
        deeds=[DeedView(**dataclasses.asdict(deed)) for deed in one.deeds],
    )


def _standing(core: Core, open_now: list[Incident]) -> list[StandingView]:
    """Routes outlive their cause, until a person ends them; directives end with the alert that asked."""
    broken = {(one.contract, one.kernel_inference, place.slice) for one in open_now for place in one.places}
    return [
        StandingView(
            contract=route.contract,
            kind="route",
            slice=route.slice,
            since=route.since,
            text=f"{place(route.slice)} avoids kernel {route.avoid} and uses the training kernel: {route.reason}",
        )
        for route in core.decisions.routes
        if (route.contract, route.avoid, route.slice) not in broken
    ]
