"""The programs that read directives, and the routers that obey orders: what no program reads has no effect.

One router that fell silent without saying that it ends may serve on by an older table, so an order counts as applied
only once each router that is known, by its id, has taken it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from kc_otel.contract.model import Contract
from kc_otel.contract.plain_text import plain
from kc_otel.contract.slices import ALL
from kc_otel.contract.words import moment
from kc_otel.judge.decisions import DirectiveKind
from kc_otel.judge.plain_json import not_later

_ROUTE: Final = "route"
_KINDS: Final = frozenset({_ROUTE, *DirectiveKind}) - {DirectiveKind.HOLD_PROMOTION}
"""Directives that programs carry out; the evaluator and its gates hold promotion."""
_PRESENT_SECONDS: Final = 90.0
"""Seconds since its last request for which a program counts as running: it asks once a minute or more often."""
_COUNTED_SECONDS: Final = 3600.0
"""A router counts for an order if it was heard of at most so long before it, or later."""
_FIRST_TABLE_SECONDS: Final = 10.0
"""Time that a router that has just begun may take to confirm its first table."""
_MAX_ROUTERS: Final = 1024
"""Routers that are told apart, of all contracts together: those that were heard last."""
_MORE_ROUTERS: Final = "\0"
"""Stands for those of a contract that are forgotten, of which nobody knows what they have taken."""
_NEVER: Final = -1.0
_MAX_NAMED: Final = 3
"""Routers that a sentence names."""
_ID_DIGITS: Final = 8


class RouterReport(NamedTuple):
    """Last report of a router about a contract; Unix times, seconds.

    `taken` is when the newest decision table that it has was made, below 0 for none; `slices` are `slice_ids` of the
    slices that this table names and that it defines as the contract does.
    """

    begun: float
    at: float
    taken: float = _NEVER
    slices: tuple[str, ...] = ()

    def has_taken(self, id: str | None, since: float, all_since: float | None) -> bool:
        """Return whether it has an order given at `since`, and applies it to the slice of this id; None for all."""
        covers = id is None or id in self.slices or (all_since is not None and self.taken >= all_since)
        return covers and self.taken >= since


class Listeners:
    """The times at which programs last reported to read directives, and the last report of each router.

    `now` is the time of the start: nobody was silent before it. `routers` have not said that they end, by contract and
    id; the one heard last is at the end.
    """

    def __init__(self, now: float = 0.0, routers: Mapping[str, Mapping[str, RouterReport]] | None = None) -> None:
        self.routers = {contract: dict(known) for contract, known in (routers or {}).items()}
        self._started_at = now
        self._heard: dict[tuple[str, str], float] = {}
        self._kept: dict[tuple[str, str, str], float] = {}

    def heard(
        self,
        told: Iterable[str],
        contracts: Mapping[str, Contract],
        now: float,
        *,
        instance: str = "",
        table_at: float | None = None,
        kept: Iterable[str] = (),
        versions: Callable[[str], Collection[str]] = lambda _: (),
    ) -> None:
        """Record the directives that a client reports to obey, `CONTRACT/DIRECTIVE` each; unknown names are ignored.

        Of routes it is `CONTRACT/route/IDS`, with the `slice_ids`, one after another, of the slices that its table
        names. Clients without an `instance` are one router that has never taken an order. `table_at` is when the table
        in force was made, if it has that; None for another one. `kept` are `CONTRACT/SLICE/VERSION` of requests that it
        keeps from a version; other slices than `all` count where it defines them as the contract does. `versions` are
        those of the inference kernel that a contract has; "" stands for one that is not named.
        """
        same: dict[str, tuple[str, ...]] = {}
        for subject in told:
            contract, kind, defined, *_ = *subject.split("/", 2), "", ""
            if contract not in contracts or kind not in _KINDS or (defined and kind != _ROUTE):
                continue
            if kind != _ROUTE or table_at is not None:
                self._heard[contract, kind] = now
            if kind == _ROUTE:
                ids = {defined[at : at + _ID_DIGITS] for at in range(0, len(defined), _ID_DIGITS)}
                same[contract] = tuple(id for id in contracts[contract].slice_ids.values() if id in ids)
                self._note(contract, instance, now, table_at if instance else None, same[contract])
        for subject in kept if table_at is not None else ():
            contract, slice, version, *_ = *subject.split("/", 2), "", ""
            found = contracts.get(contract)
            if found is None or not (slice == ALL or found.slice_ids.get(slice) in same.get(contract, ())):
                continue
            if version in versions(contract):
                self._kept[contract, slice, version] = now

    def _note(self, contract: str, instance: str, now: float, table_at: float | None, slices: tuple[str, ...]) -> None:
        known = self.routers.setdefault(contract, {})
        before = known.pop(instance, None)
        if before is None and sum(map(len, self.routers.values())) >= _MAX_ROUTERS:
            self._forget()
        report = (before or RouterReport(now, now))._replace(at=now)
        if table_at is not None:
            report = report._replace(taken=min(table_at, now), slices=slices)  # the clock may have been ahead
        known[instance] = report

    def _forget(self) -> None:
        """Tell the router that was heard longest ago no longer apart."""
        oldest = [
            (report.at, contract, instance)
            for contract, known in self.routers.items()
            for instance, report in known.items()
            if instance != _MORE_ROUTERS
        ]
        _, contract, instance = min(oldest)
        known = self.routers[contract]
        gone = known.pop(instance)
        more = known.get(_MORE_ROUTERS, gone)
        known[_MORE_ROUTERS] = gone._replace(
            taken=min(gone.taken, more.taken), slices=tuple(id for id in gone.slices if id in more.slices)
        )

    def set_back(self, now: float, ahead: float) -> None:
        """The clock was set back: nobody reported later than now."""
        self.routers, self._heard, self._kept = not_later((self.routers, self._heard, self._kept), now, ahead)
        self._started_at = min(self._started_at, now)

    def closed(self, instance: str) -> None:
        """Forget a router that says that it ends."""
        for known in self.routers.values():
            if instance:
                known.pop(instance, None)

    def behind(self, contract: Contract, slice: str, since: float, all_since: float | None, now: float) -> str:
        """Say which routers have not applied an order, or `all_since`, one for all traffic: the end of a sentence."""
        id = None if slice == ALL else contract.slice_ids.get(slice, "")
        counted = {
            instance: report
            for instance, report in self.routers.get(contract.name, {}).items()
            if report.at >= since - _COUNTED_SECONDS
            if report.taken >= 0.0 or now - report.begun > _FIRST_TABLE_SECONDS
        }
        left = {instance: report for instance, report in counted.items() if not report.has_taken(id, since, all_since)}
        silent = {
            instance: report
            for instance, report in left.items()
            if now - max(report.at, self._started_at) > _PRESENT_SECONDS
        }
        if silent:
            named = [f"{_name(instance)} since {moment(report.at)[:16]} UTC" for instance, report in silent.items()]
            may = f"{'it' if len(named) == 1 else 'they'} may still serve this kernel"
            return f"{_of(named, counted, 'has', 'have')} not polled: {_listed(named)}; {may}"
        older = [_name(instance) for instance, report in left.items() if report.taken < since]
        if older:
            return f"{_of(older, counted, 'has', 'have')} not applied it: {_listed(older)}"
        other = [_name(instance) for instance in left]
        how = f"the slice otherwise than this contract, or not at all: {_listed(other)}"
        return f"{_of(other, counted, 'defines', 'define')} {how}" if other else ""

    def kept(self, contract: str, slice: str, version: str) -> float:
        """Unix time when a program last said that it keeps requests of a slice from a version; -inf where none did."""
        return self._kept.get((contract, slice, version), -math.inf)

    def view(self, contracts: Iterable[str]) -> dict[str, dict[str, float | None]]:
        """Contract -> directive -> unix time when somebody last looked at it; None where nobody has."""
        return {name: {kind: self._heard.get((name, kind)) for kind in sorted(_KINDS)} for name in contracts}


def _name(instance: str) -> str:
    return plain({"": "one without an id", _MORE_ROUTERS: "others"}.get(instance, instance))


def _of(named: Sequence[str], counted: Collection[str], one: str, several: str) -> str:
    return f"{len(named)} of {len(counted)} router{'s' * (len(counted) != 1)} {one if len(named) == 1 else several}"


def _listed(named: Sequence[str]) -> str:
    return ", ".join([*named[:_MAX_NAMED], *([f"{len(named) - _MAX_NAMED} more"] if len(named) > _MAX_NAMED else [])])
