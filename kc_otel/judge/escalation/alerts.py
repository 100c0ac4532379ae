"""Alerts: the escalation policy Pi as a pure function of verdicts and a clock that is passed in.

Every step of a contract's ladder watches every cell on its own:

              matching verdict             `for` served
    (quiet) ------------------> pending ------------------> firing
       ^      clearing verdict     |                           |
       '---------------------------'<------ `clear_for` served-'

| step's `on`   | matches                       | clears                        | holds                 |
| ------------- | ----------------------------- | ----------------------------- | --------------------- |
| fail          | FAIL                          | PASS, fault or run ended,     | any other             |
|               |                               | cell gone                     |                       |
| no-data       | NO_DATA                       | any other verdict, cell gone  |                       |
| inconclusive  | INCONCLUSIVE                  | any other, cell gone          | NO_DATA               |
| invalid-input | sequences failed input checks | all measured pass, pair gone  | nothing is measured   |
| the same      | INVALID_INPUT, without those  | PASS, FAIL, cell gone         | any other             |

A cell that has gone clears what fires while another pair of kernels is measured in its place; where none is, it holds.
A verdict that holds stops the count without undoing it: doubt and silence are no proof that a breach is over, and no
proof that it goes on. A matching verdict sets the count towards clearing back to zero, a clearing one drops what is
pending.

Silence is long when it lasts for the contract's long window, or as soon as requests are kept from the kernel, as
ordered. An alert, but one of silence, that fires and matches after a long silence fires again at once, which is an edge
on which its step acts as on the first one.

Durations are counted, not subtracted: each evaluation adds the time since the one before, never less than zero (the
clock may jump back) and never more than the contract's window, for which alone a verdict speaks. Nothing is added to
what is pending of a run that has ended, and a cell is not missed before the evaluator has listened for a heartbeat
again. Firing and resolving are edges: what has fired resolves once.

A silence mutes: webhooks and log records of the alerts that it covers are held back until it ends. It does not affect
routes, quarantines, holds and halts, which act on kernels and not on notifications. An acknowledgement says that
somebody is at work on an alert: it goes on firing, its reminders stop, and it ends with the alert. Source: Prometheus
documentation, "Alertmanager", silences; PagerDuty, "Incidents", acknowledge.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from kc_otel.contract.model import Contract
from kc_otel.contract.policy import Action, EscalationStep
from kc_otel.contract.slices import ALL
from kc_otel.contract.words import NEXT_DUE, RUN_ENDED
from kc_otel.judge.escalation.tick import Tick
from kc_otel.judge.incidents.incident import IncidentState
from kc_otel.judge.verdict import FAULTS, INPUT_CLAUSE, MEASURED, Cell, Status, Verdict
from kc_otel.judge.verdicts import selected

ROLLED_BACK: Final = "rolled-back"
"""Step of what is said of a version that was rolled back: no contract writes it, for every roll-back is told."""
CHANGED: Final = "are no longer asked for: the contract has changed"
"""End of an alert whose step left the contract, and of missing data that it asks for no more."""
UNFOLLOWED: Final = "is no longer watched: the contract was removed, or a dry run of it began or ended"
"""End of an alert that no evaluation ends."""
WENT_AWAY: Final = "went away without proof of recovery"
"""End of an alert that is over while its breach is unproven: an endpoint that was told this is told that it fires."""


@dataclass(frozen=True, slots=True)
class Silence:
    """No messages about some alerts for some time."""

    id: str
    contract: str
    clause: str | None
    """None for every clause."""
    slice: str | None
    """`all` for the cells of all traffic; None for every slice."""
    by: str
    why: str
    at: float
    until: float

    def covers(self, cell: Cell) -> bool:
        """Return True if alerts about a cell are muted."""
        asked = (self.contract, self.clause or cell.clause, self.slice or cell.slice)
        return asked == (cell.contract, cell.clause, cell.slice)

    @property
    def where(self) -> str:
        """Scope of the silence, in words."""
        return f"{self.clause or 'every clause'} on {f'slice {self.slice}' if self.slice else 'every slice'}"


@dataclass(frozen=True, slots=True)
class Acknowledgement:
    """A person's acknowledgement of an alert, with what they found or do."""

    contract: str
    fingerprint: str
    by: str
    why: str
    at: float


@dataclass(frozen=True, slots=True)
class People:
    """Silences and acknowledgements in force, oldest first; of these one for each alert at most."""

    silences: tuple[Silence, ...] = ()
    acknowledgements: tuple[Acknowledgement, ...] = ()

    def silencing(self, cell: Cell, now: float) -> tuple[Silence, ...]:
        """The silences that mute a cell at a unix time."""
        return tuple(muting for muting in self.silences if now < muting.until and muting.covers(cell))

    def acknowledged(self, fingerprint: str) -> Acknowledgement | None:
        """Return the acknowledgement of an alert; None if there is none."""
        return next((ack for ack in self.acknowledgements if ack.fingerprint == fingerprint), None)


def current(people: People, contract: str, firing: Collection[str], now: float) -> tuple[People, tuple[Silence, ...]]:
    """Return the decisions still in force, and a contract's silences that have ended; `firing` are fingerprints."""
    ended = tuple(muting for muting in people.silences if muting.contract == contract and now >= muting.until)
    silences = tuple(muting for muting in people.silences if muting not in ended)
    kept = (ack for ack in people.acknowledgements if ack.contract != contract or ack.fingerprint in firing)
    return People(silences, tuple(kept)), ended


class Phase(StrEnum):
    """Phase of an alert."""

    PENDING = "pending"
    FIRING = "firing"
    RESOLVED = "resolved"


@dataclass(frozen=True, slots=True)
class Alert:
    """A step's state for one cell. Where it has just fired or resolved it is an edge: routes and messages act on it."""

    step: str
    """Key of the step, stable under reordering and under changes of its durations."""
    on: str
    severity: str
    actions: tuple[Action, ...]
    """Stored, so that a step that left the contract can still be resolved."""
    cell: Cell
    verdict: Verdict
    """Last verdict of the cell; when the cell has gone, the last one it had."""
    since: float
    """Time of the first matching verdict."""
    fingerprint: str
    """16 hex digits of contract, step and cell; the same for a firing and its resolve."""
    phase: Phase = Phase.PENDING
    started_at: float = 0.0
    """Unix time of firing, seconds; 0 while pending."""
    at: float = 0.0
    """Unix time of the last edge, seconds; never before `started_at`."""
    counting: bool = False
    """Whether the last evaluation counted towards `for` (pending) or `clear_for` (firing)."""
    held: float = 0.0
    """Seconds counted so far towards `for` (pending) or `clear_for` (firing)."""
    told: int = 0
    """Times people were told that it fires, reminders included."""
    waited: float = 0.0
    """Seconds counted so far towards the next reminder."""
    silent: float = 0.0
    """Seconds of silence, one that is as ordered counting as a long one; a long silence lasts until it matches. Below
    zero while what was measured before a containment is in the short window."""
    again: bool = False
    """True if it fires again, after a long silence."""
    end: str = ""
    """Why missing data that still have no verdict are missed no more, as the end of a sentence; or WENT_AWAY."""

    @property
    def run_ended(self) -> bool:
        """True if data are missing because the last recorder of the kernel shut down cleanly."""
        return self.on == "no-data" and self.verdict.reason.startswith(RUN_ENDED)

    @property
    def fires(self) -> bool:
        """True once it has served the step's `for`, until it resolves."""
        return self.phase is Phase.FIRING

    @property
    def incident(self) -> tuple[str, str, str]:
        """Key of its incident: `Incident.key`."""
        return self.on, *self.cell.pair

    def resolved(self, now: float, verdict: Verdict | None = None, end: str = "") -> Alert:
        """Return its resolve at a Unix time, with the verdict given or else its last, and why it ended."""
        at = max(now, self.started_at)
        return replace(self, phase=Phase.RESOLVED, at=at, verdict=verdict or self.verdict, end=end)


def fingerprint(step: str, cell: Cell) -> str:
    """Return the 16 hex digits that identify an alert, by the key of its step."""
    identity = [cell.contract, step, cell.clause, cell.slice, cell.kernel_train, cell.kernel_inference]
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class PolicyState:
    """Alerts of one contract, as of its last evaluation."""

    contract: str
    alerts: tuple[Alert, ...] = ()
    at: float = 0.0

    @property
    def firing(self) -> tuple[Alert, ...]:
        """The alerts that fire."""
        return tuple(alert for alert in self.alerts if alert.fires)

    def passed(self, now: float, window: float) -> float:
        """Seconds since then, as every duration of the policy counts them."""
        return min(max(0.0, now - self.at), window)


_TOLERANCE_SECONDS: Final = 1e-6
"""Seconds by which a count may fall short: sums of differences of unix times are not exact."""


def step_keys(contract: Contract) -> tuple[str, ...]:
    """A key for each step of the ladder, made of what it waits for and does: steps that are alike in this are numbered.

    So a contract whose `for` was tuned or whose steps were reordered keeps its alerts.
    """
    seen: dict[str, int] = {}
    keys = []
    for step in contract.escalation:
        key = "/".join((step.on, step.severity, ",".join(map(str, step.do)), ",".join(sorted(step.clauses)) or "*"))
        seen[key] = seen.get(key, 0) + 1
        keys.append(key if seen[key] == 1 else f"{key}#{seen[key]}")
    return tuple(keys)


def advance(tick: Tick, state: PolicyState) -> tuple[PolicyState, tuple[Alert, ...]]:
    """Evaluate the ladder once; return the new state, and what fired or resolved, in the order of the ladder.

    The contract may differ from the one before: alerts of steps that left it resolve at once. A cell without a verdict
    has gone. The silence of a slice whose requests are kept from a version of the inference kernel, as ordered, or not
    to be measured, is no alert. Of incidents that a person has closed since the last evaluation, those alerts end that
    nothing has been measured of.
    """
    contract, verdicts, now = tick.contract, tick.verdicts, tick.now
    incidents = {incident.key: incident for incident in tick.traffic.incidents}
    matching, keys = {FAULTS[step.on].status for step in contract.escalation}, step_keys(contract)
    concerned = selected(verdicts, matching, (alert.cell for alert in state.alerts))
    by_cell = {verdict.cell: verdict for verdict in concerned}
    known = {(alert.step, alert.cell): alert for alert in state.alerts}
    passed, long = state.passed(now, contract.observability.window), contract.observability.long_window
    heard = min(passed, now - tick.traffic.listening)  # an outage clears nothing, and is no silence
    edges = [alert.resolved(now, end=CHANGED) for alert in state.firing if alert.step not in keys]
    kept: list[Alert] = []
    for key, step in zip(keys, contract.escalation, strict=True):
        watched = _watched(tick, step, by_cell)
        deaf = step.on == "no-data" and now - tick.traffic.listening < tick.traffic.heartbeat
        cells = {cell for cell, verdict in watched.items() if verdict.status is FAULTS[step.on].status and not deaf}
        cells |= {cell for at_step, cell in known if at_step == key}
        for cell in sorted(cells):
            before, verdict = known.get((key, cell)), watched.get(cell)
            alert = before or Alert(
                key, step.on, step.severity, step.do, cell, watched[cell], now, fingerprint(key, cell)
            )
            unmeasured, incident = verdict is None or verdict.status is Status.NO_DATA, incidents.get(alert.incident)
            if unmeasured and alert.fires and incident is not None and incident.closed_at >= state.at:
                edges.append(alert.resolved(now, verdict))
                continue
            away = alert.fires and step.on != "no-data" and tick.excuses(cell.slice, cell.kernel_inference)
            if alert.fires and step.on != "no-data" and alert.silent < long:
                contained = incident is not None and incident.state is IncidentState.CONTAINED
                silent = _silence(contract, alert, verdict, passed, away=away, contained=contained)
                alert = replace(alert, silent=silent)
            waits = cell.clause == INPUT_CLAUSE or step.on == "fail"
            if waits and verdict is None and not _measures(verdicts, cell):
                # That none fails where none comes is no news, and nobody has replaced a kernel where none is measured.
                kept.append(replace(alert, counting=False))
                continue
            lasts = any(action.kind in {"route", "hold-promotion"} for action in step.do)  # the kernel may serve on
            ended = step.on == "fail" and not (alert.fires or lasts) and tick.traffic.ended(*cell.pair)
            more = heard if alert.fires else 0.0 if ended or deaf else passed
            after, is_edge = _after_verdict(alert, step, verdict, more, math.inf if away else long, now)
            if after is not None and is_edge:
                gone = step.on == "no-data" and not after.fires and verdict is None
                edges.append(replace(after, end=_why_gone(tick, alert)) if gone else after)
            if after is not None and after.phase is not Phase.RESOLVED:
                kept.append(after)
    kept.sort(key=lambda alert: (alert.step, alert.cell))
    return PolicyState(contract.name, tuple(kept), now), tuple(edges)


def retire(state: PolicyState, now: float) -> tuple[Alert, ...]:
    """Resolve every alert of a contract that is no longer evaluated."""
    return tuple(alert.resolved(now, end=UNFOLLOWED) for alert in state.firing)


def _watched(tick: Tick, step: EscalationStep, by_cell: Mapping[Cell, Verdict]) -> dict[Cell, Verdict]:
    """Verdicts that a step watches, by cell."""
    if step.on != "invalid-input":
        silent = step.on == "no-data"
        return {
            cell: verdict
            for cell, verdict in by_cell.items()
            if not step.clauses or cell.clause in step.clauses
            if not (silent and (verdict.wakes_nobody or tick.excuses(cell.slice, cell.kernel_inference)))
        }
    failed = {cell: verdict for cell, verdict in tick.failed.items() if cell.slice == ALL}
    pairs = {cell.pair for cell in failed}
    return {cell: verdict for cell, verdict in by_cell.items() if cell.pair not in pairs} | failed


def _measures(verdicts: Sequence[Verdict], of: Cell) -> bool:
    """Return whether a cell's pair is measured, or replaced by one that is; for no pair, whether any is."""
    pair, others = of.pair, False
    for verdict in selected(verdicts, MEASURED):
        if not any(pair) or verdict.cell.pair == pair:
            return True
        others = True
    return others and not any(verdict.cell.pair == pair for verdict in selected(verdicts, set(Status) - MEASURED))


def _why_gone(tick: Tick, alert: Alert) -> str:
    """Say why data that an alert misses are missed no more although they have no verdict, as the end of a sentence."""
    contract, verdicts, cell = tick.contract, tick.verdicts, alert.cell
    clause = next((clause for clause in contract.clauses if clause.id == cell.clause), None)
    if clause is None or cell.slice not in contract.slices_for(clause):
        return CHANGED
    why = ""
    if tick.excuses(cell.slice, cell.kernel_inference):
        why = "requests are kept from this kernel, as ordered"
    elif any(verdict.has_nothing_to_measure for verdict in selected(verdicts, (), [cell])):
        why = "there is nothing to measure"
    elif any(verdict.wakes_nobody for verdict in selected(verdicts, (), [cell])):
        why = "the next report is not due yet"
    elif alert.run_ended:
        why = "its run ended cleanly"
    if why:
        return f"are no longer expected: {why}"
    others = selected(verdicts, set(Status) - {Status.NO_DATA})
    if not any(cell.pair):
        here = {verdict.status for verdict in others if verdict.cell.place == cell.place}
        if here - {Status.INVALID_INPUT}:
            return "have arrived for the first time"
        return "arrive, but are invalid" if here else "have not arrived yet, but a kernel reports and is watched"
    in_place = ": other kernels report in its place" * any(verdict.cell.pair != cell.pair for verdict in others)
    return f"have not arrived again, and this kernel is no longer watched{in_place}"


def _silence(
    contract: Contract, alert: Alert, verdict: Verdict | None, passed: float, *, away: bool, contained: bool
) -> float:
    """Return the seconds of silence of an alert that fires; below zero until the short window is of later data alone.

    Requests are kept `away` from the kernel as ordered, and its incident is `contained`.
    """
    seen, unmeasured = contract.observability, verdict is None or verdict.status is Status.NO_DATA
    # A FAIL of the long window alone is of what was measured before.
    fresh = verdict is not None and verdict.status is FAULTS[alert.on].status and verdict.window != "long"
    if away and not fresh:
        return seen.long_window
    if away:
        return -seen.window if contained else alert.silent
    if alert.silent < 0.0:
        return alert.silent + passed if alert.silent + passed < 0.0 else seen.long_window
    return (alert.silent + passed) * unmeasured


def _after_verdict(
    alert: Alert, step: EscalationStep, verdict: Verdict | None, passed: float, long: float, now: float
) -> tuple[Alert | None, bool]:
    """Return an alert after an evaluation, None where it has stopped waiting, and whether it is an edge."""
    held = alert.held + (passed if alert.counting else 0.0)
    fresh = verdict is not None and (verdict.window != "long" or alert.verdict.status is not verdict.status)
    if verdict is not None and step.on == "fail":  # what has held since before a silence is no new breach
        back = verdict.window == "long" and alert.verdict.status is Status.NO_DATA
        fresh = fresh and verdict.estimate > verdict.limit and not back
    alert = replace(alert, verdict=verdict or alert.verdict)
    gone = verdict is not None and (verdict.ended or verdict.reason.startswith((RUN_ENDED, NEXT_DUE)))
    over = gone and step.on == "fail"
    if verdict is not None and verdict.status in FAULTS[step.on].held_by and not over:
        return replace(alert, counting=False), False
    matches = verdict is not None and verdict.status is FAULTS[step.on].status
    pending = not alert.fires
    fires = replace(alert, phase=Phase.FIRING, started_at=now, at=now, held=0.0, counting=False)
    if matches and fresh and alert.silent >= long:
        return replace(fires, told=0, waited=0.0, silent=0.0, again=True), True
    if matches is not pending:  # it stops waiting, or goes on firing
        return (None if pending else replace(alert, held=0.0, counting=False)), False
    if held + _TOLERANCE_SECONDS < (step.after if pending else step.clear_for):
        return replace(alert, held=held, counting=True), False
    return fires if pending else alert.resolved(now), True
