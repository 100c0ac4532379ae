"""What the evaluator knows of a contract's traffic: what is measured, and what routers keep away from whom."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

from kc_otel.contract.slices import ALL
from kc_otel.judge.decisions import kept_since, without_slice
from kc_otel.judge.escalation.escalate import EscalationState
from kc_otel.judge.escalation.tick import TrafficSeen
from kc_otel.judge.verdict import Status, Verdict

if TYPE_CHECKING:
    from kc_otel.serve.core import Core


def traffic_seen(core: Core, name: str, before: EscalationState, now: float) -> TrafficSeen:
    """Return what is known of a contract's traffic; it is looked at where something is broken or ordered."""
    contract, judge = core.contracts[name], core.evaluator
    decided, lasting = before.decisions, before.incidents.get(name, ())
    ordered = {route.contract for route in decided.routes} | {pin.contract for pin in decided.pins}
    ordered |= {canary.contract for canary in decided.canaries}
    newest = judge.newest(name) if name in ordered or lasting else {}
    never = (-math.inf, -math.inf)
    changed = {(route.slice, route.since): route.outdated for route in decided.routes if route.contract == name}
    changed |= {(pin.slice, pin.at): pin.outdated for pin in decided.pins if pin.contract == name}

    def behind(slice: str, since: float, all_since: float | None) -> str:
        lacking = without_slice(contract, slice) or changed.get((slice, since), "")
        if not lacking:
            return core.listeners.behind(contract, slice, since, all_since, now)
        return lacking if all_since is None else behind(ALL, all_since, None)

    def kept(slice: str, version: str) -> float:
        names = {version, ""} & core.inference_versions(name)  # of one that a router did not name, too
        return max((core.listeners.kept(name, slice, known) for known in names), default=-math.inf)

    return TrafficSeen(
        measured=lambda *where: newest.get(where, never)[0],
        arrived=lambda *where: newest.get(where, never)[1],
        kept=kept,
        behind=cache(behind),
        silent=judge.silent(name, now),
        heartbeat=contract.observability.heartbeat,
        late=contract.observability.late,
        listening=judge.listening(now).since,
        incidents=lasting,
        ended=lambda train, inference: judge.states[name].has_ended((train, inference)),
        failing=judge.failing(name, now),
        unheard=lambda cell: judge.unheard(cell, now),
        unsliced=judge.unsliced,
        lost=lambda version, since, until: judge.lost(name, version, since, until, now),
    )


def kept_away(core: Core) -> Callable[[Verdict], bool]:
    """Return what says of a verdict if it is NO_DATA because requests are kept from its kernel, as ordered."""
    now = core.evaluated_at
    orders = cache(lambda name: kept_since(core.decisions, name))
    traffic = cache(lambda name: traffic_seen(core, name, core.escalation, core.evaluated_at or 0.0))

    def away(verdict: Verdict) -> bool:
        name, _, slice, _, version = verdict.cell
        if verdict.status is not Status.NO_DATA or not version or now is None or name not in core.contracts:
            return False
        ordered = orders(name)
        return ordered(slice, version) is not None and traffic(name).excuses(slice, version, ordered)

    return away
