"""Grouping of related breaches into one incident, from the first breach until nothing of it is left.

    a cell breaks ---> BROKEN ---- users are seen to be kept from all of it ----> CONTAINED
                        ^  |                                                      |   |
                        |  '-- nothing broken, no alert, no route --> RESOLVED <--+   |
                        |                                   '-> UNPROVEN -^           |
                        '------------- a cell that users reach breaks ----------------'

The kind of breach (a step's `on`) and the pair of kernels determine which cells belong together: they share one cause,
a version of a kernel. A cell is broken while its verdict is FAIL, or NO_DATA after data, and while an alert about it
fires. A route or a pin is an order, and contains nothing by itself, nor does silence: see `_contained`. A FAIL or
invalid input that only went away is UNPROVEN until verdicts refute it (`_refuted`), until its kernel version is known
to serve nobody (`_gone`), or until a person closes it. Each cell is a row that `_row` takes from one evaluation to the
next; every row stays until the incident is over. The id is made when the incident begins, and never changes.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from kc_otel.contract.slices import ALL
from kc_otel.contract.words import place
from kc_otel.judge.decisions import DecisionTable, overriding_pin
from kc_otel.judge.escalation.alerts import Alert, People
from kc_otel.judge.escalation.tick import Tick
from kc_otel.judge.incidents.incident import (
    OF_RECORDERS,
    ActionTaken,
    BrokenCell,
    Diagnosis,
    Incident,
    IncidentAction,
    IncidentState,
    routes_of,
)
from kc_otel.judge.plain_json import finite_or_none
from kc_otel.judge.promotion.stages import Promotion
from kc_otel.judge.verdict import FAULTS, INPUT_CLAUSE, Cell, Status, Verdict
from kc_otel.judge.verdicts import selected

_BREAKING_STATUSES: Final = {Status.FAIL: "fail", Status.NO_DATA: "no-data"}
_SEVERAL: Final = "several"
"""Quantity of a cell whose clause was broken before and after it changed: no verdict is about both."""
_ROUTED: Final = frozenset({"fail"})
"""Incidents that last until somebody lifts their routes; a contract cannot order one for anything else."""
_NO_ORDER: Final[Mapping[str, Any]] = {
    **dict.fromkeys(("contained_at", "ordered_at", "taken_at", "disobeyed_at")),
    "unmet": "",
}
_UNTAKEN: Final = "no router that sent requests to this kernel has kept any away from it yet"
_RECENT: Final = "this kernel has not been silent for a heartbeat since a router applied it"
_LOST: Final = "a recorder of this kernel has not been heard of since"
_DISOBEYED: Final = "this kernel was measured after a router applied it"
_MOST_WORDS: Final = 200
_MOST_DIAGNOSES: Final = 10
_MOST_UNPROVEN: Final = 100
"""Incidents of a contract that wait for proof or a person; older ones are closed."""

Key = tuple[str, str, str]
Place = tuple[str, str]
"""(clause, slice)."""
_Broken = tuple[Verdict, float, Alert | None]
"""Verdict of a place that is broken, since when it is, and the alert that alone says so, if one does."""


def follow(tick: Tick, before: Sequence[Incident], firing: Iterable[Alert]) -> tuple[Incident, ...]:
    """The incidents after an evaluation, with those that it has ended."""
    broken, by_key = _broken(before, firing, tick), {incident.key: incident for incident in before}
    after = [
        _settled(_refuted(_measured(by_key.get(key), key, broken.get(key, {}), tick), tick), tick)
        for key in by_key | broken
    ]
    unproven = [incident for incident in after if incident.state is IncidentState.UNPROVEN]
    for oldest in sorted(unproven, key=lambda incident: incident.since)[:-_MOST_UNPROVEN]:
        after[after.index(oldest)] = replace(oldest, state=IncidentState.RESOLVED, resolved_at=tick.now)
    return tuple(sorted(after, key=by_urgency))


def _refuted(incident: Incident, tick: Tick) -> Incident:
    """The incident, whose cells are marked as refuted where a verdict shows that they are over.

    What others measure refutes nothing while a recorder that reported during a breach has not been heard of since.
    """
    on, pair = incident.on, incident.pair
    over = {
        Cell(incident.contract, cell.clause, cell.slice, *pair)
        for cell in incident.cells
        if cell.until is not None and not cell.refuted and not cell.changed
    }
    if on in OF_RECORDERS:
        over = {cell for cell in over if not tick.traffic.unheard(cell)}
    if not over:
        return incident
    showing = FAULTS[on].refuted_by
    # What became of sequences that failed their checks shows in every cell of their slice; first data, in any's.
    of_input, of_any = any(cell.clause == INPUT_CLAUSE for cell in over), not any(pair)
    refuting: dict[Place, Verdict | None] = {
        verdict.cell.place: verdict
        for verdict in selected(tick.verdicts, showing if of_input or of_any else (), over)
        if (of_any or verdict.cell.pair == pair) and verdict.status in showing
        if on != "fail" or verdict.status is Status.PASS or verdict.ended
    }
    if of_input and refuting:
        valid = {ALL, *(slice for _, slice in refuting)}
        refuting |= {(INPUT_CLAUSE, cell.slice): None for cell in over if cell.slice in valid}
    whole_last = sorted(incident.cells, key=lambda cell: cell.slice == ALL)
    open_clauses: set[str] = set()  # that are not over on a slice: all traffic is made of the slices
    after = []
    for cell in whole_last:
        where = cell.clause, cell.slice
        decided = cell.refuted or cell.changed
        waits = on != "no-data" and cell.slice == ALL and cell.clause in open_clauses
        if cell.until is not None and where in refuting and not (decided or waits):
            verdict = refuting[where]
            by_change = on == "fail" and verdict is not None and cell.passes_by_change(verdict)
            loosened_to = verdict.limit if by_change and verdict is not None else cell.loosened_to
            cell = replace(cell, refuted=True, loosened_to=loosened_to)  # noqa: PLW2901 - the same cell
        if not cell.over:
            open_clauses.add(cell.clause)
        after.append(cell)
    return replace(incident, cells=tuple(after))


def by_urgency(incident: Incident) -> tuple[Any, ...]:
    """Sort key of incidents: those that users meet, FAIL before silence, worst first; ended ones last, newest first."""
    left = incident.state is IncidentState.BROKEN and (incident.only_route_left or incident.state_text == "Ended")
    return (
        list(IncidentState).index(IncidentState.UNPROVEN if left else incident.state),
        -(incident.resolved_at or 0.0),
        list(FAULTS).index(incident.on),
        -max(cell.badness for cell in incident.cells),
        incident.since,
        incident.contract,
        incident.key,
    )


def with_actions(
    incidents: Sequence[Incident], fired: Iterable[Alert], people: People, table: DecisionTable, *, dry_run: bool
) -> tuple[Incident, ...]:
    """The incidents with what the alerts that fired in this evaluation do; webhooks only where nothing is done.

    A route that the table had before is not ordered again.
    """
    ordered = {
        (route.contract, route.avoid, route.slice): route.since
        for route in table.routes
        if not (dry_run or route.outdated)
    }

    def at(edge: Alert, kind: str) -> float:
        place = edge.cell.contract, edge.cell.kernel_inference, edge.cell.slice
        return ordered.get(place, edge.at) if kind == "route" else edge.at

    done = (
        (
            edge.incident,
            IncidentAction(action.kind, action.target or "", at(edge, action.kind), (edge.cell.slice,), dry_run),
        )
        for edge in fired
        for action in edge.actions
        if dry_run or action.kind != "webhook"
        if dry_run or action.kind != "notify" or not people.silencing(edge.cell, edge.at)
    )
    return with_done(incidents, done)


def with_roll_backs(incidents: Sequence[Incident], rolled: Iterable[Promotion]) -> tuple[Incident, ...]:
    """The incidents of versions that were rolled back, with that, and with whether they were measured later."""
    by_version = {(promotion.contract, promotion.version): promotion for promotion in rolled}
    earlier: list[Incident] = []
    done: list[tuple[Key, IncidentAction]] = []
    for incident in incidents:
        promotion, own = by_version.get((incident.contract, incident.kernel_inference)), list[IncidentAction]()
        if promotion is not None and incident.on in OF_RECORDERS:
            own.append(IncidentAction("roll-back", promotion.reason.partition(": ")[0], promotion.entered, (ALL,)))
            if promotion.seen_serving is not None:
                own.append(IncidentAction("serves", "", promotion.seen_serving, (ALL,)))
        # What is done once more, in the same words, is done at the later time.
        at = {(action.kind, action.target): action.at for action in own}
        kept = (action for action in incident.actions if at.get((action.kind, action.target), action.at) == action.at)
        earlier.append(replace(incident, actions=tuple(kept)))
        done += [(incident.key, action) for action in own]
    return with_done(earlier, done)


def with_done(incidents: Sequence[Incident], done: Iterable[tuple[Key, IncidentAction]]) -> tuple[Incident, ...]:
    """The incidents with actions, by key: each is there once, at its first time, with all of its slices.

    A slice's route is there at its last time: a person may have ended the one before.
    """
    by_key = {incident.key: {_identity(action): action for action in incident.actions} for incident in incidents}
    for key, action in done:
        actions, which = by_key.get(key, {}), _identity(action)
        for other in [other for other in actions if other[:3] == which[:3] and other != which]:
            left = tuple(slice for slice in actions[other].slices if slice not in action.slices)
            actions[other] = replace(actions[other], slices=left)
        first = actions.get(which, action)
        actions[which] = replace(first, slices=tuple(dict.fromkeys((*first.slices, *action.slices))))
    kept = {key: tuple(action for action in actions.values() if action.slices) for key, actions in by_key.items()}
    return tuple(replace(incident, actions=kept[incident.key]) for incident in incidents)


def _identity(action: IncidentAction) -> tuple[Any, ...]:
    return action.kind, action.target, action.dry_run, action.at if action.kind == "route" else None


def with_word(incidents: Sequence[Incident], kind: str, said: Mapping[str, Any], now: float) -> tuple[Incident, ...]:
    """The incidents with what a person did to them, or to a slice or a clause of theirs; the newest words are kept."""
    slice, clause, ids = said.get("slice"), said.get("clause"), said.get("incidents")
    word = ActionTaken(now, kind, str(said["message"]))

    def concerns(incident: Incident) -> bool:
        slices, clauses = {cell.slice for cell in incident.cells}, {cell.clause for cell in incident.cells}
        return slice in {None, ALL, *slices} and clause in {None, *clauses} and (ids is None or incident.id in ids)

    return tuple(
        replace(incident, words=(*incident.words, word)[-_MOST_WORDS:]) if concerns(incident) else incident
        for incident in incidents
    )


def with_diagnosis(incident: Incident, found: Diagnosis) -> Incident:
    """Return the incident with a diagnosis added once; only the newest are kept."""
    same = (found.kind, found.slice, found.evidence)
    others = [
        diagnosis for diagnosis in incident.diagnoses if (diagnosis.kind, diagnosis.slice, diagnosis.evidence) != same
    ]
    return replace(incident, diagnoses=(*others, found)[-_MOST_DIAGNOSES:])


def _broken(before: Sequence[Incident], firing: Iterable[Alert], tick: Tick) -> dict[Key, dict[Place, _Broken]]:
    """Return what is broken now, by incident and place. Invalid input is so on each slice where it comes."""
    broken_before = {(incident.key, (cell.clause, cell.slice)) for incident in before for cell in incident.broken}
    broken: dict[Key, dict[Place, _Broken]] = {}
    for verdict in selected(tick.verdicts, _BREAKING_STATUSES):
        cell, place = verdict.cell, verdict.cell.place
        key = (_BREAKING_STATUSES[verdict.status], *cell.pair)
        # A cell that nobody has reported to is not broken: there is nothing yet, or the evaluator was away.
        told = verdict.observed and tick.now - tick.traffic.listening >= tick.traffic.heartbeat
        heard = cell.kernel_inference and (told or (key, place) in broken_before)
        if verdict.status is Status.FAIL or (
            heard and not verdict.wakes_nobody and not tick.excuses(cell.slice, cell.kernel_inference)
        ):
            broken.setdefault(key, {})[place] = verdict, tick.now, None
    for alert in firing:
        mine, place = broken.setdefault((alert.on, *alert.cell.pair), {}), alert.cell.place
        verdict, since, only = mine.get(place, (alert.verdict, tick.now, alert))
        mine[place] = verdict, min(alert.since, since), only
        if alert.cell.clause == INPUT_CLAUSE:
            for cell, failed in tick.failed.items():
                if cell.pair == alert.cell.pair and cell.slice != ALL:
                    mine[cell.place] = failed, tick.now, None
    return broken


def _measured(before: Incident | None, key: Key, broken: Mapping[Place, _Broken], tick: Tick) -> Incident:
    """An incident with what is broken of it now and what was, or a new one."""
    by_place = {(cell.clause, cell.slice): cell for cell in before.cells} if before is not None else {}
    cells = tuple(
        _row(by_place.get(place), key, place, broken.get(place), tick) for place in dict.fromkeys((*broken, *by_place))
    )
    if before is not None:
        return replace(before, cells=cells)
    since = min(cell.since for cell in cells)
    name = tick.contract.name
    id = hashlib.sha256("\0".join((name, *key, repr(since))).encode()).hexdigest()[:12]
    return Incident(id, name, *key, IncidentState.BROKEN, cells)


def _row(before: BrokenCell | None, key: Key, place: Place, broken: _Broken | None, tick: Tick) -> BrokenCell:
    """A cell, and whether the contract measures anything of it, and what is to blame for it."""
    quantities = tick.contract.quantity_digests
    quantity = quantities.get(place, "")
    if broken is not None:
        unheard = tick.traffic.unheard(Cell(tick.contract.name, *place, *key[1:]))
        row = _broken_row(before, place, *broken, quantity, unheard=unheard)
        shown_until = before and (before.at if before.until is None and before.held else before.until)
        quiet = tick.now - max(shown_until or tick.now, tick.traffic.listening)  # an outage of the evaluator is none
        row = replace(row, again=tick.now) if not row.held and quiet >= tick.contract.observability.window else row
    else:
        assert before is not None
        row = before if before.until is not None else replace(before, until=tick.now)
    changed = bool(row.quantity) and quantity != row.quantity
    if row.clause == INPUT_CLAUSE:
        changed = row.slice != ALL and all(slice != row.slice for _, slice in quantities)
    cell = Cell(tick.contract.name, *place, *key[1:])
    cause = tick.evaluation.causes.get(cell) if key[0] == "fail" and row.until is None else None
    lasts = before is not None and (broken is None or before.until is None)
    against = before.against if before is not None and lasts else ""
    if key[0] == "fail":
        against = tick.evaluation.passes_against.get(cell, against)
    if (changed, against) == (row.changed, row.against) and cause is None:
        return row
    return replace(row, changed=changed, against=against, cause=row.cause if cause is None else cause.text)


def _broken_row(
    before: BrokenCell | None, place: Place, verdict: Verdict, since: float, alert: Alert | None, quantity: str,
    *, unheard: bool,
) -> BrokenCell:  # fmt: skip
    held = alert is not None and (alert.counting or alert.on == "fail" or FAULTS[alert.on].status is not verdict.status)
    by_change = before is not None and before.passes_by_change(verdict)
    refutes = (verdict.status is Status.PASS or verdict.ended) and not (unheard or by_change)
    doubted = alert is not None and not refutes
    limit, estimate, lower, upper = map(finite_or_none, (verdict.limit, verdict.estimate, verdict.lower, verdict.upper))
    peak, peak_at, stricter = estimate, verdict.at if estimate is not None else None, None
    if before is not None:
        since = min(before.since, since)
        other = bool(before.quantity) and before.quantity != quantity
        if held:
            return replace(before, since=since, until=None, held=True, doubted=doubted or other, refuted=False)
        if other and not before.refuted:
            quantity = _SEVERAL
        if not other and (not before.refuted or before.loosened_to is not None):
            strictest = before.strictest
            stricter = strictest if strictest is not None and strictest < verdict.limit else None
        if not other and before.peak is not None and (estimate is None or estimate <= before.peak):
            peak, peak_at = before.peak, before.peak_at
    return BrokenCell(
        *place, since, None, limit, estimate, lower, upper, verdict.reason, peak, peak_at, at=verdict.at, held=held,
        doubted=doubted, quantity=quantity, stricter=stricter, again=None if before is None else before.again,
    )  # fmt: skip


def _settled(incident: Incident, tick: Tick) -> Incident:
    """The incident with its cells in order, in the state that they, the decision table and the traffic put it into."""
    cells = sorted(
        incident.cells,
        key=lambda cell: (cell.until is not None, -cell.badness, cell.slice == ALL, cell.slice, cell.clause),
    )
    incident = replace(incident, cells=tuple(cells))
    incident = replace(incident, run_ended=tick.traffic.ended(*incident.pair))
    incident = replace(incident, gone=_gone(incident, tick))
    slices = {cell.slice for cell in incident.broken}
    if incident.on == "no-data" and slices:  # no order mends that nobody sees
        return replace(incident, state=IncidentState.BROKEN, **_NO_ORDER)
    routed = set[str]()
    if not slices and incident.on in _ROUTED:
        routed = {route.slice for route in routes_of(incident, {cell.slice for cell in cells}, tick.table)}
    concerned = _concerned(incident, slices, routed, tick)
    if not concerned:
        return _resolved_or_unproven(incident, tick.now)
    orders = {slice: tick.kept(slice, incident.kernel_inference) for slice in sorted(concerned)}
    given = {slice: since for slice, since in orders.items() if since is not None}
    if len(given) < len(orders):
        why, ordered_at = _overridden(tick.table, incident, orders.keys() - given)
        incident = replace(incident, state=IncidentState.BROKEN, **_NO_ORDER)
        why = why or (_contained(incident, given, tick).unmet if given else "")
        return replace(incident, ordered_at=ordered_at, unmet=why)
    incident = _contained(incident, given, tick)
    unheld = incident.state is not IncidentState.CONTAINED and not (slices or routed)
    return _resolved_or_unproven(incident, tick.now) if unheld else incident


def _contained(incident: Incident, given: Mapping[str, float], tick: Tick) -> Incident:
    """The incident, CONTAINED where the orders `given` at these times, by slice, keep users from it, else BROKEN."""
    now, traffic, version, taken_at = tick.now, tick.traffic, incident.kernel_inference, incident.taken_at
    newest, arrived = max(given.values()), max(traffic.arrived(slice, version) for slice in given)
    behind = (traffic.behind(slice, since, tick.kept("", version)) for slice, since in given.items())
    unmet = next(filter(None, behind), "")
    orders = {slice: since for slice, since in given.items() if slice not in incident.held}
    if not unmet and not all(traffic.has_taken(slice, version, since, taken_at) for slice, since in orders.items()):
        unmet = _UNTAKEN
    if not unmet:
        kept = (max(traffic.kept(slice, version), traffic.kept(ALL, version)) for slice in given)
        taken_at = min(now, *kept) if taken_at is None else taken_at
        if any(traffic.was_measured(slice, version, since, taken_at) for slice, since in given.items()):
            unmet = _DISOBEYED
    incident = replace(
        incident,
        taken_at=taken_at,
        ordered_at=newest if incident.ordered_at is None else incident.ordered_at,
        disobeyed_at=arrived if unmet == _DISOBEYED else incident.disobeyed_at,
    )
    if not unmet and taken_at is not None:
        heard_from = traffic.listening if incident.contained_at is None else -math.inf
        begun = max(taken_at, arrived, incident.disobeyed_at or -math.inf, heard_from, *orders.values())
        quiet_from = begun + traffic.heartbeat
        if now <= quiet_from:
            unmet = _RECENT
        elif traffic.lost(version, incident.since, quiet_from):
            unmet = _LOST if incident.disobeyed_at is None else _DISOBEYED
    if unmet:
        return replace(incident, state=IncidentState.BROKEN, contained_at=None, unmet=unmet)
    at = now if incident.contained_at is None else incident.contained_at
    return replace(incident, state=IncidentState.CONTAINED, contained_at=at, unmet="")


def _concerned(incident: Incident, slices: set[str], routed: set[str], tick: Tick) -> set[str]:
    """Return the slices that orders have to keep from a kernel for it to be contained; none where the incident is over.

    They are all that is broken or unproven; once nothing is broken, what is routed, and without a route what a pin
    contained.
    """
    pair, version = incident.pair, incident.kernel_inference
    lasting = [cell for cell in incident.cells if not cell.over]
    unproven = {cell.slice for cell in lasting} - {ALL}
    of_all = (Cell(incident.contract, cell.clause, ALL, *pair) for cell in lasting if cell.slice == ALL)
    if any(tick.traffic.unsliced(cell, unproven) for cell in of_all):
        unproven = unproven | {ALL}
    if slices:
        return slices | unproven
    if routed or any(tick.kept(slice, version) is None for slice in unproven):
        return routed if all(tick.kept(slice, version) is not None for slice in unproven - routed) else set()
    contained = incident.contained_at is not None and incident.on in OF_RECORDERS
    return unproven if contained and not (incident.refuted or incident.gone) else set()


def _overridden(table: DecisionTable, incident: Incident, slices: Iterable[str]) -> tuple[str, float | None]:
    """Return which pin wins over what was ordered of slices, as the end of a sentence, and when that was ordered."""
    pins = {
        slice: overriding_pin(table, incident.contract, slice, incident.kernel_inference) for slice in sorted(slices)
    }
    over = [(slice, *pin_and_since) for slice, pin_and_since in pins.items() if pin_and_since is not None]
    if not over or len(over) < len(pins):
        return "", None
    slice, pin, _ = over[0]
    part = "" if pin.slice in {ALL, slice} else " in part"
    sentence = f"the pin of {place(pin.slice)} to the inference kernel by {pin.by} overrides it{part}"
    return sentence, max(since for _, _, since in over)


def _resolved_or_unproven(incident: Incident, now: float) -> Incident:
    if incident.on not in OF_RECORDERS or incident.refuted or incident.gone:
        return replace(incident, state=IncidentState.RESOLVED, resolved_at=now, ordered_at=None)
    return replace(incident, state=IncidentState.UNPROVEN, **_NO_ORDER)


def _gone(incident: Incident, tick: Tick) -> bool:
    """Return whether a kernel version is known to serve nobody, or a person has closed what went away.

    A roll-back is an order: it counts once a router that had sent requests to the version keeps all of them from it,
    and each router that is known has taken it, and until the version is started again or is measured later.
    """
    traffic, version = tick.traffic, incident.kernel_inference
    ended = max(cell.until or tick.now for cell in incident.cells)
    last = {action.kind: action.at for action in sorted(incident.actions, key=lambda action: action.at)}
    rolled_back = last.get("roll-back", -math.inf)
    obeyed = (
        rolled_back > last.get("serves", -math.inf)
        and any(
            (share.contract, share.version, share.weight, share.since) == (incident.contract, version, 0.0, rolled_back)
            for share in tick.table.canaries
        )
        and traffic.kept(ALL, version) >= rolled_back
        and traffic.measured(ALL, version) <= rolled_back + traffic.late
    )
    return incident.run_ended or (obeyed and not traffic.behind(ALL, rolled_back, None)) or incident.closed_at >= ended
