"""Points of a contract that are not judged: for which reason, of whom, and since when.

Sequences are told in the same way, where too many of a kernel pair fail the input checks.

A point that is refused leaves no verdict behind, and others of its kernels may pass: that it is missing has to be said
beside them. It is said until a window has passed in which no such point came.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from kc_otel.contract.units import format_duration
from kc_otel.contract.words import FAILS_CHECKS
from kc_otel.judge.point_streams import REMEMBERED_TIMES
from kc_otel.judge.series import PAIRS, Pair

OUTCOME_SENTENCES: Final = {
    "malformed": "points count more observations than there can be",
    "future": "points are from the future; check the sender's clock",
    "late": "points are older than the long window; check the sender's clock",
    "behind": "points are older than the short window when they arrive; check the sender's clock and what delays it, "
    "or make observability.window longer, unless it is resending points that could not be delivered earlier",
    "other_buckets": "points have other bucket bounds than those in use for their series; give all senders of a "
    "metric the same bounds, or wait for one short window after the last point with the old bounds",
    "contradictory": "cumulative points contradict those before them; later ones decide which of them count",
    "unordered": f"delta points are older than the {REMEMBERED_TIMES} newest of their stream, so they cannot be told "
    "from repeated ones; send them in the order of their times",
    "two_writers": "cumulative points go back and forth between the counts of two senders that share one stream; give "
    "each its own service.instance.id",
    "unjudged": "points of new series are counted as slice `other` and not judged: their contract already has its "
    f"maximum of series, or of {PAIRS} kernel pairs; give kernels fewer versions, or raise observability.max_series",
    "over_cap": "too many streams; raise observability.max_series, or give the senders fewer identities",
}
"""Sentences for a sender about its points, by outcome."""
OF_CLOCKS: Final = frozenset({"future", "late", "behind"})
"""Outcomes of points whose time cannot be right."""
_MAX_KEPT: Final = 64
"""Senders, kernel pairs and outcomes of a contract that are told apart; further senders have no name."""
_MAX_NAMED: Final = 3
"""Senders that a sentence names."""


@dataclass(frozen=True, slots=True)
class RefusedSender:
    """Points of one sender that are not judged for one reason: arrivals from `since` to `last`, Unix seconds.

    `pair` and `sender` are empty where they are not known. The last point was `age` seconds older than its arrival, or
    ahead if that is negative; `said` is what the sender was told beyond the outcome.
    """

    outcome: str
    pair: Pair
    sender: str
    since: float
    last: float
    age: float
    said: str = ""


@dataclass(frozen=True, slots=True)
class Missing:
    """Points of a kernel pair that are not judged for one reason, since a Unix time.

    The pair is empty where the points do not say. `text` has reason, remedy and senders, as the end of a sentence.
    """

    outcome: str
    pair: Pair
    senders: int
    since: float
    text: str

    @property
    def what(self) -> str:
        """Subject of a sentence about them: sequences or points."""
        return "sequences" if self.outcome == FAILS_CHECKS else "points"


@dataclass(slots=True)
class RefusedPoints:
    """Points of one contract that are not judged, by outcome, kernel pair and sender.

    They are missing until `lasting` seconds after the last of them: the window that they belong to.
    """

    lasting: float
    found: dict[tuple[str, Pair, str], RefusedSender] = field(default_factory=dict)

    def add(self, outcome: str, pair: Pair, sender: str, age: float, now: float, said: str = "") -> None:
        """Note a point that arrived at `now`, Unix seconds."""
        key = outcome, pair, sender
        if key not in self.found and len(self.found) >= _MAX_KEPT:
            self.found = {key: known for key, known in self.found.items() if self._lasts(known, now)}
            if len(self.found) >= _MAX_KEPT:
                key = outcome, ("", ""), ""
        known = self.found.get(key)
        since = known.since if known is not None and self._lasts(known, now) else now
        self.found[key] = RefusedSender(*key, since, now, age, said)

    def keep_only(self, outcome: str, said: Mapping[Pair, str], now: float) -> None:
        """Note what is known of kernel pairs at `now`, Unix seconds, and forget the others of this outcome."""
        for key in [key for key in self.found if key[0] == outcome and key[1] not in said]:
            del self.found[key]
        for pair, sentence in said.items():
            self.add(outcome, pair, "", 0.0, now, sentence)

    def merge(self, refused: RefusedSender) -> None:
        """Note what another process has noted."""
        self.add(refused.outcome, refused.pair, refused.sender, refused.age, refused.last, refused.said)

    def present(self, now: float) -> list[RefusedSender]:
        """Return those that are missing at a Unix time, seconds; the oldest first."""
        lasting = (known for known in self.found.values() if self._lasts(known, now))
        return sorted(lasting, key=lambda known: known.since)

    def _lasts(self, known: RefusedSender, now: float) -> bool:
        return now - known.last <= self.lasting


def missing(refused: Iterable[RefusedSender]) -> list[Missing]:
    """Return the points that are missing, one row for all senders of a kernel pair with one reason."""
    rows: dict[tuple[str, Pair], list[RefusedSender]] = {}
    for found in refused:
        rows.setdefault((found.outcome, found.pair), []).append(found)
    return [
        Missing(outcome, pair, len(found), min(sender.since for sender in found), _text(outcome, found))
        for (outcome, pair), found in rows.items()
    ]


def _text(outcome: str, found: Sequence[RefusedSender]) -> str:
    worst = max(found, key=lambda refused: abs(refused.age))
    said = worst.said or OUTCOME_SENTENCES[outcome]
    if outcome in OF_CLOCKS:
        said = f"{said} ({format_duration(round(abs(worst.age)))} {'ahead' if worst.age < 0.0 else 'old'})"
    senders = [refused.sender for refused in found if refused.sender]
    names = [*senders[:_MAX_NAMED], *([f"{len(senders) - _MAX_NAMED} more"] if len(senders) > _MAX_NAMED else [])]
    return f"{said}; from {'; '.join(names)}" if names else said
