"""An evaluation of a contract and what is known of its traffic: alerts, incidents and messages are made of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from kc_otel.contract.input_reasons import ON_PURPOSE, remedy
from kc_otel.contract.model import Contract
from kc_otel.contract.slices import ALL
from kc_otel.contract.units import format_duration
from kc_otel.judge.decisions import DecisionTable, kept_since
from kc_otel.judge.incidents.incident import Incident
from kc_otel.judge.series import Pair
from kc_otel.judge.verdict import INPUT_CLAUSE, MEASURED, Cell, Evaluation, Status, Verdict
from kc_otel.judge.verdicts import selected


@dataclass(frozen=True, slots=True)
class TrafficSeen:
    """Known facts about a contract's traffic beside its verdicts; without them nothing counts as contained."""

    measured: Callable[[str, str], float] = lambda _slice, _version: -math.inf
    """When the newest observation of a slice and a version of the inference kernel was made; -inf for none."""
    arrived: Callable[[str, str], float] = lambda _slice, _version: -math.inf
    """When observations of them arrived last; a sender's clock may be wrong."""
    kept: Callable[[str, str], float] = lambda _slice, _version: -math.inf
    """When a router that had sent requests to a version of the inference kernel last said that the table keeps requests
    of a slice from it; -inf for never."""
    behind: Callable[[str, float, float | None], str] = lambda _slice, _since, _all_since: ""
    """Says which routers have not applied an order for a slice, given at a Unix time, where there may be an older or a
    newer one for all traffic, or why it has no effect; empty where each that is known has."""
    silent: bool = False
    """True once nobody reports any more: no silence is excused then."""
    heartbeat: float = 60.0
    """Seconds within which what was under way when an order was taken is measured, and every recorder exports."""
    late: float = 60.0
    """Seconds within which what was answered before a roll-back is measured: `Observability.late`."""
    listening: float = -math.inf
    """Since when the evaluator has listened without a gap, Unix seconds."""
    incidents: Sequence[Incident] = ()
    """The contract's, of the last evaluation: an evaluator that has just begun has heard of no router, and the windows
    forget what was measured in spite of an order."""
    ended: Callable[[str, str], bool] = lambda _train, _inference: False
    """Returns True if the last recorder of a kernel pair that reported said that it shuts down."""
    unheard: Callable[[Cell], bool] = lambda _cell: False
    """Returns True if a recorder that measured a cell while it was broken has not shown that it is over, or if points
    of its version arrive that are not judged."""
    unsliced: Callable[[Cell, Collection[str]], bool] = lambda _cell, _slices: False
    """Returns True if a recorder that broke a cell on all traffic, by requests of none of the slices, fell silent."""
    failing: Mapping[tuple[Pair, str], Mapping[str, int]] = field(default_factory=dict)
    """Sequences that failed an input check in the window, by kernel pair and slice, `all` among them, and by reason."""
    lost: Callable[[str, float, float], bool] = lambda _version, _since, _until: False
    """Returns True if a recorder that reported a version from a Unix time on is silent now, or has reported nothing
    after another: it may have died beside a kernel that serves."""

    def excuses(self, slice: str, version: str, ordered: Callable[[str, str], float | None]) -> bool:
        """Return whether an order explains silence: it was taken, also one for all traffic, and all report still."""
        if self.silent or ordered(slice, version) is None:
            return False
        incidents = [incident for incident in reversed(self.incidents) if incident.kernel_inference == version]
        taken_at = next((at for incident in incidents if (at := incident.taken_at) is not None), None)
        held = {slice for incident in incidents for slice in incident.held}
        all_since = ordered("", version)
        orders = {name: since for name in (slice, ALL) if (since := ordered(name, version)) is not None}
        if orders.get(ALL, -math.inf) > orders[slice]:  # it came later: what is ordered of the slice alone explains it
            del orders[ALL]
        disobeyed_at = next((at for incident in incidents if (at := incident.disobeyed_at) is not None), -math.inf)
        return all(
            (name in held or self.has_taken(name, version, since, taken_at))
            and not self.behind(name, since, all_since)
            and not self.was_measured(name, version, since, taken_at)
            and not self.lost(version, since, max(since, taken_at or since, disobeyed_at))
            for name, since in orders.items()
        )

    def has_taken(self, slice: str, version: str, since: float, taken_at: float | None) -> bool:
        """Return whether a router carries out an order given at `since`; the first was taken at `taken_at`."""
        kept = max(self.kept(slice, version), self.kept(ALL, version))
        return max(kept, -math.inf if taken_at is None else taken_at) >= since

    def was_measured(self, slice: str, version: str, since: float, taken_at: float | None) -> bool:
        """Return whether a version was measured after an order was taken, however long ago."""
        return self.measured(slice, version) > max(since, taken_at or since) + self.heartbeat


@dataclass(frozen=True)
class Tick:
    """An evaluation of a contract, as its policy sees it."""

    contract: Contract
    evaluation: Evaluation
    table: DecisionTable = field(default_factory=DecisionTable)
    traffic: TrafficSeen = TrafficSeen()

    @property
    def now(self) -> float:
        """Unix time of the evaluation, seconds."""
        return self.evaluation.at

    @property
    def verdicts(self) -> Sequence[Verdict]:
        """Every verdict on the contract."""
        return self.evaluation.verdicts

    @cached_property
    def failed(self) -> dict[Cell, Verdict]:
        """Verdicts on INPUT_CLAUSE, for each pair and slice of which sequences failed an input check.

        Those that are kept from being measured on purpose count for a pair that nothing else is measured of.
        """
        name, version, hash = self.contract.name, self.contract.metadata.version, self.contract.hash
        failing, found = self.traffic.failing, dict[Cell, Verdict]()
        window = format_duration(self.contract.observability.window)
        doubtful = any(not reasons.keys().isdisjoint(ON_PURPOSE) for reasons in failing.values())
        valid = {verdict.cell.pair for verdict in selected(self.verdicts, MEASURED)} if doubtful else set[Pair]()
        for (pair, slice), counted in failing.items():
            purposes = ON_PURPOSE if pair in valid else ()
            reasons = {reason: count for reason, count in counted.items() if reason not in purposes}
            if total := sum(reasons.values()):
                counts = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()) if count)
                some, were = ("1 sequence", "was") if total == 1 else (f"{total} sequences", "were")
                said = f"{some} failed an input check within {window} and {were} not measured ({counts})."
                cell, number = Cell(name, INPUT_CLAUSE, slice, *pair), float(total)
                found[cell] = Verdict(
                    cell, Status.INVALID_INPUT, self.now, 0.0, number, number, number, total, "short", "count",
                    f"{said} {remedy(max(reasons, key=reasons.__getitem__))}", version, hash, "traffic",
                )  # fmt: skip
        return found

    @cached_property
    def kept(self) -> Callable[[str, str], float | None]:
        """`kept_since` of the table."""
        return kept_since(self.table, self.contract.name)

    def excuses(self, slice: str, version: str) -> bool:
        """Return whether an order of the table explains the silence of a slice and a version."""
        return self.traffic.excuses(slice, version, self.kept)
