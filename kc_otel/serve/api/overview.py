"""Overview of current faults: since when, for whom, and the actions taken; the first view a person needs."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

from kc_otel.contract.words import listed, place
from kc_otel.judge.decisions.table import without_slice
from kc_otel.judge.escalation.people import People
from kc_otel.judge.incidents.incident import Incident
from kc_otel.judge.verdict import Cell, Status
from kc_otel.serve.api.routes_incidents import incident_views
from kc_otel.serve.api.views import InForceView, MissingView, Overview, kept_away
from kc_otel.serve.core import Core

_KERNELS: Final = {"train-kernel": "training kernel", "inference-kernel": "inference kernel"}


class Overviews:
    """Makes the overview, once per evaluation however many people look.

    Args:
        core: The evaluator to show.
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
            version=self._version,
            heard=heard,
            otlp_port=core.otlp_port,
            counts={name: dict(count) for name, count in counts.items()},
            no_traffic=dict(silent),
            incidents=incident_views(core, lasting),
            missing=list(_missing(core)),
            in_force=_in_force(core, lasting),
        )


def _missing(core: Core) -> Iterator[MissingView]:
    """Points that no verdict is about, by contract, kernel pair and reason."""
    for name in core.contracts:
        for row in core.missing(name):
            yield MissingView(
                contract=name, kernel_train=row.pair[0], kernel_inference=row.pair[1], outcome=row.outcome,
                senders=row.senders, since=row.since, text=row.text,
            )  # fmt: skip


def _in_force(core: Core, lasting: Sequence[Incident]) -> list[InForceView]:
    """Routes and people's decisions in force; routes outlive their cause until a person ends them."""
    return [*_routes(core, lasting), *_by_people(core)]


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
