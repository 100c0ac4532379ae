"""The cheapest components to keep in higher precision so that an inference kernel passes its gate.

What a set of components gives back is measured by running the kernel with it, never predicted: contributions interact.
All runs of the search use the same requests, so that sets are compared by what differs between them; the set that is
found is run once more on requests that the search has not seen, and only that decides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from kc_otel.judge.verdict import Cell, Verdict

__all__ = ["Component", "PrecisionRemedy", "PrecisionTrial", "RunKept", "cheapest"]


@dataclass(frozen=True, slots=True)
class Component:
    """A part of the kernel that can be kept in higher precision.

    Attributes:
        name: Its name, such as `blocks.2.down`.
        bytes: Memory that keeping it costs.
    """

    name: str
    bytes: int


RunKept = Callable[[frozenset[str], bool], Sequence[Verdict]]
"""(names of what is kept, whether requests are new) -> the gate's verdicts on every clause and slice."""


@dataclass(frozen=True, slots=True)
class PrecisionTrial:
    """A run with some components kept.

    Attributes:
        kept: Their names.
        bytes: What they cost together.
        verdicts: What the gate said of each clause on each slice.
    """

    kept: frozenset[str]
    bytes: int
    verdicts: tuple[Verdict, ...]

    @property
    def passes(self) -> bool:
        """Whether every clause is PASS on every slice."""
        return bool(self.verdicts) and all(each.status == "PASS" for each in self.verdicts)

    @property
    def excess(self) -> float:
        """The largest upper bound in limits: at most 1 where everything passes."""
        return max((_in_limits(each, each.upper) for each in self.verdicts), default=math.inf)

    def of(self, cell: Cell) -> Verdict:
        """The verdict of a cell."""
        return next(each for each in self.verdicts if (each.cell.clause, each.cell.slice) == (cell.clause, cell.slice))


@dataclass(frozen=True, slots=True)
class PrecisionRemedy:
    """What was tried, and what it comes to.

    Attributes:
        plain: With nothing kept.
        alone: With each component kept alone, in the order given.
        found: The cheapest set that passed, on new requests too; None where none did.
        verified: The run of `found` on new requests; None without one.
        proven: Whether every cheaper set has been run, and did not pass.
        runs: How many runs it took.
    """

    plain: PrecisionTrial
    alone: tuple[PrecisionTrial, ...]
    found: PrecisionTrial | None
    verified: PrecisionTrial | None
    proven: bool
    runs: int

    @property
    def worst(self) -> Verdict:
        """The cell that is farthest beyond its limit with nothing kept."""
        return max(self.plain.verdicts, key=lambda each: _in_limits(each, each.estimate))

    def gives_back(self, trial: PrecisionTrial) -> float:
        """How much lower the worst cell's estimate is with some components kept, in its metric's unit."""
        return self.worst.estimate - trial.of(self.worst.cell).estimate


def cheapest(components: Sequence[Component], run: RunKept, *, most: int = 200) -> PrecisionRemedy:
    """Find the cheapest set of components that makes the kernel pass.

    Each component is run alone. Then they are added, first what lowers the largest bound most per byte, until the gate
    passes; then those that it passes without are dropped, the dearest first; then cheaper sets are run, the cheapest
    first, as far as runs are left. What is found has to pass on new requests; where it does not, the search goes on as
    if it had failed.

    Args:
        components: What can be kept.
        run: Runs the kernel and its gate.
        most: Runs that are allowed; the one that verifies is on top.

    Raises:
        ValueError: If there are no components, two have one name, one costs nothing, or fewer runs are allowed than it
            takes to run each component alone.
    """
    names = [each.name for each in components]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"components: {', '.join(names) or 'none'}; name at least one, and each once")
    if any(each.bytes <= 0 for each in components):
        raise ValueError("components: one costs no bytes; keep it in higher precision anyway, and leave it out")
    if most < len(names) + 1:
        raise ValueError(f"most: {most} runs are too few for {len(names)} components; allow {len(names) + 1} or more")
    search = _Search(components, run, most)
    plain = search.trial(frozenset())
    alone = tuple(search.trial(frozenset({name})) for name in names)
    found = verified = None
    while (best := search.best()) is not None:
        verified = PrecisionTrial(best.kept, best.bytes, tuple(run(best.kept, True)))
        if verified.passes:
            found = best
            break
        search.refused.add(best.kept)
        verified = None
    proven = found is not None and all(
        kept in search.trials for kept in search.cheaper_than(found.bytes, len(search.trials) + 1)
    )
    return PrecisionRemedy(plain, alone, found, verified, proven, len(search.trials))


class _Search:
    """What has been run, and what is worth running."""

    def __init__(self, components: Sequence[Component], run: RunKept, most: int) -> None:
        self.cost = {each.name: each.bytes for each in components}
        self.trials: dict[frozenset[str], PrecisionTrial] = {}
        self.refused: set[frozenset[str]] = set()
        self._run, self._most = run, most

    def trial(self, kept: frozenset[str]) -> PrecisionTrial:
        """The run with some components kept, made once."""
        if kept not in self.trials:
            self.trials[kept] = PrecisionTrial(
                kept, sum(self.cost[name] for name in kept), tuple(self._run(kept, False))
            )
        return self.trials[kept]

    def passing(self) -> PrecisionTrial | None:
        """The cheapest that passed and was not refused on new requests."""
        able = (each for each in self.trials.values() if self._passes(each))
        return min(able, key=lambda each: (each.bytes, sorted(each.kept)), default=None)

    def best(self) -> PrecisionTrial | None:
        """The cheapest that can be found in the runs that are left."""
        if self.passing() is None:
            self._grow()
        found = self.passing()
        if found is None:
            return None
        for name in sorted(found.kept, key=lambda name: -self.cost[name]):
            less = found.kept - {name}
            if self._left() and self._passes(self.trial(less)):
                found = self.trial(less)
        for kept in self.cheaper_than(found.bytes, self._most):
            if kept not in self.trials:
                if not self._left():
                    break
                self.trial(kept)
            if self._passes(self.trials[kept]):  # they come cheapest first
                break
        return self.passing()

    def cheaper_than(self, bytes: int, most: int) -> Iterator[frozenset[str]]:
        """Sets that cost less, the cheapest first; no more than so many of them."""
        found: list[tuple[int, frozenset[str]]] = []
        affordable = sorted((name for name in self.cost if self.cost[name] < bytes), key=self.cost.__getitem__)
        for size in range(len(affordable) + 1):
            if sum(self.cost[name] for name in affordable[:size]) >= bytes:
                break
            costs = ((sum(self.cost[name] for name in kept), kept) for kept in combinations(affordable, size))
            found += [(cost, frozenset(kept)) for cost, kept in costs if cost < bytes]
            if len(found) > 20 * most:
                break  # more than could ever be run
        yield from (kept for _, kept in sorted(found, key=lambda one: (one[0], sorted(one[1])))[:most])

    def _grow(self) -> None:
        """Add components, the best alone per byte first, until it passes: one run each, however they interact."""
        plain = self.trial(frozenset()).excess
        rate = {name: (plain - self.trial(frozenset({name})).excess) / self.cost[name] for name in self.cost}
        kept: frozenset[str] = frozenset()
        for name in sorted(rate, key=lambda name: -rate[name]):
            kept |= {name}
            if (kept not in self.trials and not self._left()) or self._passes(self.trial(kept)):
                return

    def _passes(self, trial: PrecisionTrial) -> bool:
        return trial.passes and trial.kept not in self.refused

    def _left(self) -> bool:
        return len(self.trials) < self._most


def _in_limits(verdict: Verdict, value: float) -> float:
    if math.isnan(value):
        return math.inf
    if verdict.limit > 0.0:
        return value / verdict.limit
    return math.inf if value > verdict.limit else 0.0
