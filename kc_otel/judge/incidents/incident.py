"""An incident in plain values: its cells, its state, what was done, and the sentences that tell of it."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Final, Literal

from kc_otel.contract.slices import ALL
from kc_otel.contract.words import (
    MEASURED_LATER,
    NO_REPORT,
    RUN_ENDED,
    dilution,
    interval,
    listed,
    moment,
    number,
    place,
    rounded_down,
)
from kc_otel.judge.decisions import DecisionTable, Route
from kc_otel.judge.verdict import FAULTS, Status, Verdict

_RECEDED_FACTOR: Final = 1.25
"""Factor over the current value above which a breach is reported at its earlier size."""
CLAUSE_GONE: Final = "the contract no longer has this clause as it was"
NOT_PROVEN: Final = "not proven until each of its recorders has measured it again"
OF_RECORDERS: Final = frozenset({"fail", "invalid-input"})
"""Kinds of incidents of what recorders observed: silence, and what others observe, refutes nothing of them."""


class IncidentState(StrEnum):
    """State of an incident, most urgent first."""

    BROKEN = "broken"
    """Users of the kernel meet what is broken."""
    CONTAINED = "contained"
    """Users are kept from the kernel wherever it is broken, or was and nobody has given it back: a router that had sent
    requests to the kernel keeps them from it as ordered, each router that is known has taken the order, and each
    recorder that had reported the kernel says that it measured nothing of it for a heartbeat after that. Neither an
    order nor silence contains anything, nor does a router with another definition of the slice."""
    UNPROVEN = "unproven"
    """A breach or invalid input that went away without a verdict that refutes it: its kernel fell silent and may still
    serve. It lasts until such a verdict, a rollback that the routers apply or a clean shutdown of its last recorder, or
    until a person closes it."""
    RESOLVED = "resolved"
    """Nothing is broken, no alert fires, and no route is left of it."""


@dataclass(frozen=True, slots=True)
class BrokenCell:
    """A cell of an incident: where it was broken, and how badly when it was last seen; None for what is unknown."""

    clause: str
    slice: str
    since: float
    until: float | None
    limit: float | None = None
    estimate: float | None = None
    lower: float | None = None
    upper: float | None = None
    reason: str = ""
    peak: float | None = None
    peak_at: float | None = None
    cause: str = ""
    """What of it is the kernels' drift and what is the age of the weights, as a phrase; empty for not known."""
    against: str = ""
    """Another training kernel, against which the same version passed meanwhile, as a phrase; empty for none."""
    at: float | None = None
    held: bool = False
    """Whether only its alert says that it is broken: the last verdict does not."""
    doubted: bool = False
    """Whether the last verdict does not refute it either, or not for every recorder and limit that was broken."""
    refuted: bool = False
    """Whether a verdict has refuted it since it ended."""
    loosened_to: float | None = None
    """The changed limit without which the refuting verdict would not pass; None where the drift fell."""
    quantity: str = ""
    """`Contract.quantity_digests` of its clause; empty where no clause measured it."""
    changed: bool = False
    """Whether the contract in force measures nothing of it: it has no such clause, or another of that name."""
    stricter: float | None = None
    """Smallest limit that it broke, where `limit` was raised to another that it broke too; None where it was not."""
    again: float | None = None
    """Since when it is broken again, where a window in which nothing showed it came before; None where none did."""

    @property
    def over(self) -> bool:
        """True if it is over, as a verdict has shown, or is measured by no clause any more."""
        return self.until is not None and (self.refuted or self.changed)

    @property
    def strictest(self) -> float | None:
        """Smallest limit that it broke; None where that is unknown."""
        return self.limit if self.stricter is None else self.stricter

    def passes_by_change(self, verdict: Verdict) -> bool:
        """Return True if a verdict passes only because its limit is above the smallest one that was broken."""
        return self.strictest is not None and min(verdict.limit, verdict.upper) > self.strictest

    @property
    def badness(self) -> float:
        """Lower bound as a multiple of the limit; 0 when that is unknown."""
        return self.lower / self.limit if self.lower is not None and self.limit is not None and self.limit > 0 else 0.0


@dataclass(frozen=True, slots=True)
class IncidentAction:
    """Action of the policy because of an incident."""

    kind: str
    target: str
    """Kernel of `route`, endpoint of `webhook`; of `roll-back`, what was done, in words."""
    at: float
    slices: tuple[str, ...]
    dry_run: bool = False


@dataclass(frozen=True, slots=True)
class ActionTaken:
    """Something that the policy did, or that a person did or said, in words, with who and why."""

    at: float
    kind: str
    """Of the action; `would-fire` in a contract that runs dry; of a person: acknowledged, closed, silenced, unsilenced,
    pinned, unpinned, enabled or resumed."""
    text: str
    in_force: bool | None = None
    """True while it still holds; None for what is over once it is done."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Finding of a person or program about an incident, in one line."""

    at: float
    kind: Literal["locate", "remedy"]
    """`locate` names the operator, `remedy` the correction."""
    slice: str
    text: str
    by: str
    evidence: str
    """SHA-256 of the evidence, hexadecimal; it is kept apart, under this name."""


@dataclass(frozen=True, slots=True)
class Incident:
    """One breach for one reason on one pair of kernels; times are Unix seconds."""

    id: str
    """Twelve hex digits."""
    contract: str
    on: str
    kernel_train: str
    kernel_inference: str
    state: IncidentState
    cells: tuple[BrokenCell, ...]
    """Where it is or was broken, worst first; at least one. Each stays until the incident is over."""
    actions: tuple[IncidentAction, ...] = ()
    words: tuple[ActionTaken, ...] = ()
    contained_at: float | None = None
    resolved_at: float | None = None
    diagnoses: tuple[Diagnosis, ...] = ()
    ordered_at: float | None = None
    """Since when routes or pins ask that users be kept from all of it; later orders do not move it."""
    taken_at: float | None = None
    """When a router was first seen to have taken such an order."""
    unmet: str = ""
    """Why the orders do not contain it, as the end of a sentence; empty where they do, or nothing is ordered."""
    disobeyed_at: float | None = None
    """When a measurement of this kernel arrived last in spite of an order that was taken."""
    gone: bool = False
    """Whether its kernel version is known to serve nobody, or a person has closed what went away of it."""
    run_ended: bool = False
    """Whether its kernel version serves nobody because its last recorder shut down."""

    def cell(self, clause: str, slice: str) -> BrokenCell | None:
        """Its cell of a clause on a slice; None where that never was part of it."""
        return next((cell for cell in self.cells if (cell.clause, cell.slice) == (clause, slice)), None)

    def open_slices(self, clause: str) -> list[str]:
        """Slices that keep a breach of a clause on all traffic from being over."""
        return [cell.slice for cell in self.cells if cell.clause == clause and cell.slice != ALL and not cell.over]

    def unproven(self, clause: str, slice: str, *, held: bool = False) -> bool:
        """Return whether a breach of a cell goes on or went away without proof; of invalid input, one of any slice.

        What only an alert holds, and its last verdict refutes, goes on if `held`.
        """
        if self.on not in OF_RECORDERS or self.gone or self.state is IncidentState.RESOLVED:
            return False
        return any(
            held or cell.doubted or not cell.held if cell.until is None else not cell.refuted
            for cell in self.cells
            if cell.clause == clause and (cell.slice == slice or self.on == "invalid-input")
        )

    @property
    def went_away(self) -> bool:
        """True if no cell of it is broken any more, and neither a verdict nor an order says that users are safe."""
        over = self.gone or self.state in {IncidentState.CONTAINED, IncidentState.RESOLVED}
        return self.on in OF_RECORDERS and not over and not self.broken and not self.refuted

    def fell_silent(self, now: float, window: float) -> bool:
        """Return whether it went away a window ago without proof of recovery, whether or not a route remains."""
        return self.went_away and now - self.last_until >= window

    def text_at(self, now: float, window: float) -> str:
        """Return the state in words: `state_text`, or for a window after it went away what the proof waits for."""
        if self.state is not IncidentState.UNPROVEN or self.fell_silent(now, window):
            return self.state_text
        changed = any(cell.changed and not cell.refuted for cell in self.cells)
        return f"No longer measured as broken; {CLAUSE_GONE if changed else NOT_PROVEN}"

    def lapsed(self, now: float, window: float) -> bool:
        """Return whether for a window nothing has shown or refuted it: it fell silent, or an alert alone holds it."""
        over = self.refuted or self.gone or self.state in {IncidentState.CONTAINED, IncidentState.RESOLVED}
        held = self.on in OF_RECORDERS and all(cell.doubted for cell in self.broken)
        return held and not over and now - max(cell.until or cell.at or now for cell in self.cells) >= window

    @property
    def ended_unrefuted(self) -> bool:
        """True if it is closed because its run ended, and neither a verdict nor a person says that users are safe."""
        over = self.state is IncidentState.RESOLVED and self.on in OF_RECORDERS
        return over and self.run_ended and not (self.refuted or self.closing)

    @property
    def last_until(self) -> float:
        """Unix time in seconds at which the last of its cells ceased to be broken, of those that have."""
        return max((-math.inf if cell.until is None else cell.until for cell in self.cells), default=-math.inf)

    @property
    def refuted(self) -> bool:
        """True if verdicts refuted all of it; otherwise it only went away."""
        return all(cell.refuted for cell in self.cells)

    @property
    def loosened(self) -> bool:
        """True if a limit that was raised, and no lower value, refutes some of it."""
        return any(cell.loosened_to is not None for cell in self.cells)

    @property
    def recovered(self) -> bool:
        """True if verdicts refuted all of it, and only a route that was ordered is left."""
        return self.state is IncidentState.BROKEN and not self.broken and self.refuted

    @property
    def only_route_left(self) -> bool:
        """True if it is over, by proof or because a person closed it, and only a route that was ordered is left."""
        return self.state is IncidentState.BROKEN and not self.broken and not self.went_away

    @property
    def held(self) -> frozenset[str]:
        """Slices that were broken before it was contained: no later order opens them."""
        contained_at = -math.inf if self.contained_at is None else self.contained_at
        return frozenset(cell.slice for cell in self.cells if cell.since <= contained_at)

    @property
    def closing(self) -> str:
        """Sentence that says who closed what only went away, or rolled its version back; empty for nobody."""
        closed = [word.text for word in self.words if word.kind == "closed"]
        return (closed or [action.target for action in self.actions if action.kind == "roll-back"] or [""])[-1]

    @property
    def closed_at(self) -> float:
        """Unix time in seconds at which a person last closed it; -inf for never."""
        return max((word.at for word in self.words if word.kind == "closed"), default=-math.inf)

    def ended(self, at: float) -> Incident:
        """Return the incident of which nothing is broken any more since a Unix time in seconds."""
        cells = tuple(replace(cell, until=at if cell.until is None else cell.until) for cell in self.cells)
        return replace(self, cells=cells)

    @property
    def state_text(self) -> str:
        """State of the incident in words, as the beginning of a sentence."""
        if self.state is IncidentState.BROKEN:
            return self._open_text
        if self.state is not IncidentState.RESOLVED:
            contained = self.state is IncidentState.CONTAINED
            return "Contained" if contained else "Went away without proof of recovery"
        if self._waited_for:
            came = [cell.refuted for cell in self.cells]
            some = "Closed before all data arrived" if any(came) else "Closed before valid data arrived"
            return "First data arrived" if all(came) else some
        if not self.refuted:
            return "Ended" if self.run_ended else "Closed without proof of recovery"
        over = "Decided" if self.on == "inconclusive" else "Resolved"  # a FAIL decides, too
        return "Closed by a changed limit" if self.loosened else over

    @property
    def _open_text(self) -> str:
        if self._waited_for or self._ended or (self.run_ended and not self.shown and self.on in OF_RECORDERS):
            return "Waiting for first data" if self._waited_for else "Ended"
        now = FAULTS[self.on].word
        if self.on == "fail" and not self.shown:
            doubted = any(cell.doubted for cell in self.broken)
            now = f"Was broken; {'nothing has refuted it since' if doubted else 'its alert still fires'}"
        if self.ordered_at is None:
            return now
        at, unmet = moment(self.ordered_at)[:16], f", but {self.unmet}" * bool(self.unmet)
        now = now if self.broken else "No longer measured as broken"
        if self.recovered or (self.gone and not self.broken):
            over = "the breach is over" if self.refuted else "it was closed without proof of recovery"
            over = "it was closed by a changed limit" if self.refuted and self.loosened else over
            return f"{now}: {over}, and the route ordered at {at} UTC remains{unmet}"
        done = {action.kind: action.at for action in self.actions}
        if "roll-back" in done and "route" not in done:
            return f"{now}; its rollback was ordered at {moment(done['roll-back'])[:16]} UTC{unmet}"
        return f"{now}; routing to the training kernel was ordered at {at} UTC{unmet}"

    @property
    def _waited_for(self) -> bool:
        """True if no kernel has reported the cells yet, and no server that names none has fallen silent."""
        silent = any(cell.reason.startswith(NO_REPORT) for cell in self.cells)
        return self.on == "no-data" and not self.kernel_inference and not silent

    @property
    def pair(self) -> tuple[str, str]:
        """Versions of the (training, inference) kernel."""
        return self.kernel_train, self.kernel_inference

    @property
    def key(self) -> tuple[str, str, str]:
        """(on, kernel_train, kernel_inference): a contract has one incident of each at a time."""
        return self.on, *self.pair

    @property
    def status(self) -> Status:
        """FAIL, NO_DATA or INCONCLUSIVE."""
        return Status.FAIL if self.on in OF_RECORDERS else FAULTS[self.on].status

    @property
    def outline(self) -> Incident:
        """The incident without the numbers that change with every evaluation, except the largest estimate."""
        cells = tuple(
            replace(cell, limit=None, estimate=None, lower=None, upper=None, reason="", cause="", at=None)
            for cell in sorted(self.cells, key=lambda cell: (cell.clause, cell.slice))
        )
        return replace(self, cells=cells, disobeyed_at=None)

    @property
    def broken(self) -> tuple[BrokenCell, ...]:
        """The cells that are broken still."""
        return tuple(cell for cell in self.cells if cell.until is None)

    @property
    def shown(self) -> tuple[BrokenCell, ...]:
        """The cells that are broken by their last verdict, not by their alert alone."""
        return tuple(cell for cell in self.broken if not cell.held)

    @property
    def current(self) -> tuple[BrokenCell, ...]:
        """The cells that are broken still; all of them once none is."""
        return self.broken or self.cells

    @property
    def clauses(self) -> tuple[str, ...]:
        """The clauses that are broken still, by their ids; all of them once none is."""
        return tuple(dict.fromkeys(cell.clause for cell in self.current))

    @property
    def slices(self) -> tuple[str, ...]:
        """Slices where it is broken still, as they broke, for what is read must not move; `all` last."""
        onsets = sorted(self.current, key=lambda cell: (cell.slice == ALL, cell.since, cell.slice))
        return tuple(dict.fromkeys(onset.slice for onset in onsets))

    @property
    def shown_slices(self) -> tuple[str, ...]:
        """Those of its slices where the last verdict shows that it is broken; all of them where none does."""
        shown = {cell.slice for cell in self.shown or self.current}
        return tuple(name for name in self.slices if name in shown)

    @property
    def since(self) -> float:
        """Unix time at which the first cell broke, seconds."""
        return min(cell.since for cell in self.cells)

    def lasting_since(self, window: float) -> float:
        """Return the Unix time of its onset, seconds, or where nothing was broken for a window, of the one after."""
        spans = [(cell.until or math.inf, cell.again or cell.since) for cell in self.cells]
        start = math.inf
        for until, begun in sorted(spans, reverse=True):
            start = min(start, begun) if until > start - window or math.isinf(start) else start
        return start

    @property
    def growth(self) -> tuple[tuple[float, int], ...]:
        """(Unix time, slices that had broken by then, `all` among them), at the end of each minute that added some."""
        onsets: dict[str, float] = {}
        for cell in self.cells:
            onsets[cell.slice] = min(cell.since, onsets.get(cell.slice, cell.since))
        return tuple({at // 60: (at, count) for count, at in enumerate(sorted(onsets.values()), start=1)}.values())

    @property
    def growth_text(self) -> str:
        """Growth of the incident, as a phrase; empty if it never grew."""
        grown = self.growth
        if len(grown) < 2:
            return ""
        (begun, first), (at, last) = grown[0], grown[-1]
        many = f"{first} slice{'s' * (first != 1)}"
        return f"{many} at {moment(begun)[:16]}, {last} at {moment(at)[:16]} UTC"

    @property
    def headline(self) -> str:
        """Subject and scope of the incident, as a sentence; it names what of it alone is not shown and not refuted."""
        shown = self.shown
        over = [cell for cell in self.cells if (cell.doubted and cell.held if cell.until is None else not cell.refuted)]
        gone = [cell for cell in over if (shown or cell.until is not None) and self.unproven(cell.clause, cell.slice)]
        if not gone or len(gone) == len(self.cells):
            return self._what_broke
        where = dict.fromkeys(
            place(cell.slice) for cell in sorted(gone, key=lambda cell: (cell.slice == ALL, cell.since))
        )
        what = tuple(dict.fromkeys(cell.clause for cell in gone))
        of = f"{listed(what)} " * (what != tuple(dict.fromkeys(cell.clause for cell in self.shown or self.current)))
        return f"{self._what_broke}; {of}unproven on {listed(list(where))}"

    @property
    def _what_broke(self) -> str:
        clauses = tuple(dict.fromkeys(cell.clause for cell in self.shown or self.current))
        where, what = listed(list(map(place, self.shown_slices))), listed(clauses)
        over, several = not self.shown, len(clauses) > 1
        if self._waited_for:
            return f"No kernel {'had' if over else 'has'} reported {what} on {where} yet"
        if self._ended:
            return f"{RUN_ENDED.capitalize()}: no more data for {what} on {where}"
        if self.on == "no-data":
            return f"{'There were no' if over else 'No'} data for {what} on {where}"
        if self.on == "invalid-input":
            return f"Sequences {'failed' if over else 'fail'} the input checks"
        tense = ("were" if several else "was") if over else ("are" if several else "is")
        if self.on == "inconclusive":
            return f"{what} {tense} undecided on {where}"
        return f"{what} {tense} above {'their limits' if several else 'its limit'} on {where}"

    @property
    def _ended(self) -> bool:
        """True if every silent pair's recorder shut down cleanly."""
        return (
            self.on == "no-data" and bool(self.shown) and all(cell.reason.startswith(RUN_ENDED) for cell in self.shown)
        )

    @property
    def extents(self) -> tuple[tuple[str, str], ...]:
        """(clause, how bad it is where it is worst), the worst clause first."""
        rising = list(reversed(self.current))
        if self.on == "invalid-input":  # most sequences
            rising.sort(key=lambda cell: cell.estimate or 0.0)
        worst = {cell.clause: cell for cell in rising}
        causes = {cell.clause: cell.cause for cell in self.current if cell.cause}
        causes |= {
            cell.clause: f"{cell.cause}; {cell.against}".removeprefix("; ") for cell in self.current if cell.against
        }
        return tuple(
            (clause, "; ".join(filter(None, (_extent(worst[clause], self.on), causes.get(clause, "")))))
            for clause in self.clauses
        )


def _extent(worst: BrokenCell, on: str) -> str:
    changed = "" if worst.loosened_to is None else f"; the limit was then changed to {number(worst.loosened_to)}"
    if worst.stricter is not None:
        changed = f"; a limit of {number(worst.stricter)} was broken before it was changed{changed}"
    changed += f"; {CLAUSE_GONE}" * (worst.changed and not worst.refuted)
    return _as_it_was(worst, on) + changed


def _as_it_was(worst: BrokenCell, on: str) -> str:
    most = ""
    if worst.peak is not None and worst.peak_at is not None and worst.peak > _RECEDED_FACTOR * (worst.estimate or 0.0):
        size = f"{worst.peak:,.0f}" if on == "invalid-input" else number(worst.peak)
        most = f"{size} on {place(worst.slice)} at {moment(worst.peak_at)[:16]} UTC"
    if on in {"no-data", "invalid-input"} or worst.estimate is None:
        return f"{most}; " * bool(most and on == "invalid-input") + worst.reason
    when = f" at {moment(worst.at)[:16]} UTC" if worst.at is not None and (worst.held or worst.until) else ""
    diluted = dilution(worst.reason, past=bool(when)) if on == "fail" else ""
    said_of = f"(confidence interval {interval(worst.lower, worst.upper)})" + f"; {diluted}" * bool(diluted)
    if most:
        since = when.strip() if when else "in the window"
        return f"{most} against a limit of {number(worst.limit)}; {number(worst.estimate)} {since} {said_of}"
    times = f", at least {rounded_down(worst.badness, 2)} times the" if worst.badness >= 1.1 else " against a"
    return f"{number(worst.estimate)} on {place(worst.slice)}{when}{times} limit of {number(worst.limit)} {said_of}"


def actions_taken(
    incident: Incident, table: DecisionTable, undelivered: Mapping[str, tuple[float, str]] = MappingProxyType({})
) -> tuple[ActionTaken, ...]:
    """Return the actions taken, oldest first, and for each if it is in force.

    `undelivered` has the time of the oldest message about the incident that an endpoint has not accepted, and how many
    there are, in words, by endpoint.
    """
    actions = [*incident.words]
    for action in incident.actions:
        text, in_force = _in_words(incident, action, table, undelivered)
        actions.append(ActionTaken(action.at, "would-fire" if action.dry_run else action.kind, text, in_force))
    return tuple(sorted(actions, key=lambda action: (action.at, action.kind, action.text)))


def lifting_commands(incident: Incident, table: DecisionTable) -> tuple[str, ...]:
    """Return the commands that end the routes and pins left on an incident's slices."""
    slices = {cell.slice for cell in incident.cells}
    # A route is a breach's, whatever else ends of the same kernel.
    routed = [route.slice for route in routes_of(incident, slices, table) if incident.on == "fail"]
    pinned = [
        pin.slice
        for pin in table.pins
        if pin.contract == incident.contract and (pin.slice in {ALL, *slices} or any(map(pin.overrides, slices)))
    ]

    def only(names: list[str]) -> str:
        return f" --slice {names[0]}" if len(set(names)) == 1 else ""

    lift = f"kc-otel route resume {incident.contract}{only(routed)} --why '...'"
    free = f"kc-otel route unpin {incident.contract}{only(pinned)} --why '...'"
    return (*[lift] * bool(routed), *[free] * bool(pinned))


_DONE: Final = {
    "notify": "announced in the log",
    "serves": f"measured after its rollback: {MEASURED_LATER}",
    "sample-more": "recorders asked to sample more",
    "locate": "machines asked to locate the operator",
    "hold-promotion": "promotion of this version held",
    "quarantine-rollouts": "trainers asked to quarantine rollouts of {where}",
    "resync-weights": "trainers asked to send the weights again",
    "halt": "trainers asked to halt",
}
_DONE_ONCE: Final = frozenset({"notify", "roll-back", "serves"})
"""Actions that are over once they are done; the others last while a directive asks for them."""


def _in_words(
    incident: Incident, action: IncidentAction, table: DecisionTable, undelivered: Mapping[str, tuple[float, str]]
) -> tuple[str, bool | None]:
    """Return an action in words, and whether it is in force; None for what is over once it is done."""
    if action.dry_run:
        return f"dry run: it would {action.kind} {action.target}".rstrip(), None
    if action.kind == "webhook":
        since, lacking = undelivered.get(action.target, (math.inf, ""))
        accepted = [f"notified {action.target} by webhook"] if since > action.at else []
        return "; ".join([*accepted, *filter(None, [lacking])]), None
    where = listed([place(name) for name in action.slices])
    if action.kind == "route":
        routes = routes_of(incident, action.slices, table)
        held = any(not route.outdated for route in routes)
        text = f"routing {where} to the training kernel was ordered"
        if routes and not held:
            text += f", but {routes[0].outdated}"
        elif held and incident.state is IncidentState.BROKEN and incident.unmet:
            newest = all(other.at <= action.at for other in incident.actions if other.kind == "route")
            text += f", but {incident.unmet}" * (newest or not {*incident.shown_slices}.isdisjoint(action.slices))
        return text, held
    asked = {
        directive.kind
        for directive in table.directives
        if directive.contract == incident.contract and directive.version == incident.kernel_inference
    }
    text = _DONE.get(action.kind, action.target or action.kind).replace("{where}", where)
    return text, None if action.kind in _DONE_ONCE else action.kind in asked


def routes_of(incident: Incident, slices: Collection[str], table: DecisionTable) -> list[Route]:
    """Return the routes that keep some slices from an incident's kernel."""
    key = incident.contract, incident.kernel_inference
    return [
        route for route in table.routes if (route.contract, route.avoid) == key and all(key) and route.slice in slices
    ]
