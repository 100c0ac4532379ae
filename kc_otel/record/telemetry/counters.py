"""What a recorder counts of itself: nothing that goes wrong is raised, so everything that goes wrong is here."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Final, Literal

from opentelemetry.sdk.metrics.export import Metric

from kc_otel.record.measure.reasons import remedy
from kc_otel.record.telemetry.sdk_points import counter
from kc_otel.record.worker import ReasonCounts

__all__ = ["Counters", "RecorderCounts"]

_ROLLOUTS: Final = ("kc.quarantine.sequences", "kc.quarantine.tokens", "kc.quarantine.tv")


@dataclass(frozen=True, slots=True)
class RecorderCounts:
    """Counts since the recorder started in this process.

    Attributes:
        batches: Batches measured.
        sequences: Sequences measured.
        tokens: Tokens measured, after masks.
        untraced: Batches measured whose span could not be made.
        unsampled: Batches, or sequences waiting for their other side, left out by sampling.
        dropped: Batches not measured, by reason; sequences for the reasons that start with `pair-`.
        invalid: Sequences that failed an input check, by reason.
        quarantined: Sequences that were kept out of training.
        exports: Exports that every endpoint accepted.
        export_failures: Exports that an endpoint did not accept.
    """

    batches: int = 0
    sequences: int = 0
    tokens: int = 0
    untraced: int = 0
    unsampled: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    invalid: dict[str, int] = field(default_factory=dict)
    quarantined: int = 0
    exports: int = 0
    export_failures: int = 0


class Counters:
    """Thread-safe counts; the first trouble of each kind is logged, the rest is only counted."""

    def __init__(self, contract: str) -> None:
        self._contract = contract
        self._lock = threading.Lock()
        self._plain: Counter[str] = Counter()
        self._dropped = ReasonCounts(f"contract {contract}: dropped (%s)")
        self._invalid = ReasonCounts(f"contract {contract}: input invalid (%s)")
        self._noted = ReasonCounts(f"contract {contract}: input doubtful (%s)")
        self._failures = ReasonCounts(f"contract {contract}: %s failed")
        self._rollouts: dict[str, tuple[int, int, float]] = {}

    def measured(self, sequences: int, tokens: int) -> None:
        """One batch was measured."""
        with self._lock:
            self._plain.update(batches=1, sequences=sequences, tokens=tokens)

    def unsampled(self) -> None:
        """One batch or sequence was left out by sampling."""
        with self._lock:
            self._plain["unsampled"] += 1

    def untraced(self, why: object) -> None:
        """A batch was measured, but its span could not be made."""
        with self._lock:
            self._plain["untraced"] += 1
        self._failures.add("span", why)

    def dropped(self, reason: str, why: object, count: int = 1) -> None:
        """`count` batches (sequences, for pairs) were not measured; `why` is logged the first time."""
        self._dropped.add(reason, why, count)

    def invalid(self, reason: str, count: int, why: object | None = None) -> None:
        """`count` sequences failed an input check; the first time `why` is logged, else the reason's own words."""
        self._invalid.add(reason, remedy(reason) if why is None else why, count)

    def noted(self, kind: str, what: object) -> None:
        """A batch was measured of which something should be known; the first of each kind is logged."""
        self._noted.add(kind, what)

    def rollouts(self, outcome: Literal["kept", "quarantined"], sequences: int, tokens: int, tv_sum: float) -> None:
        """What became of sequences in quarantine: how many, their tokens, and the sum of (1-w)+ over these."""
        with self._lock:
            before = self._rollouts.get(outcome, (0, 0, 0.0))
            self._rollouts[outcome] = (before[0] + sequences, before[1] + tokens, before[2] + tv_sum)
            if outcome == "quarantined":
                self._plain["quarantined"] += sequences

    def exported(self) -> None:
        """Every endpoint accepted an export."""
        with self._lock:
            self._plain["exports"] += 1
        self._failures.clear("export")  # the next outage is news again

    def export_failed(self, why: object) -> None:
        """An endpoint did not accept an export."""
        with self._lock:
            self._plain["export_failures"] += 1
        self._failures.add("export", why)

    def values(self) -> RecorderCounts:
        """The counts now."""
        with self._lock:
            return RecorderCounts(dropped=self._dropped.values(), invalid=self._invalid.values(), **self._plain)

    def metrics(self, start: int, now: int) -> list[Metric]:
        """The counts as cumulative sums from `start` to `now`, unix nanoseconds."""
        values = self.values()
        contract = {"kc.contract": self._contract}

        def by_reason(counts: dict[str, int]) -> list[tuple[dict[str, str], int]]:
            return [({**contract, "kc.reason": reason}, count) for reason, count in sorted(counts.items())]

        metrics = [
            counter("kc.recorder.tokens", [(contract, values.tokens)], start, now),
            counter("kc.recorder.export.failures", [(contract, values.export_failures)], start, now),
        ]
        if values.dropped:
            metrics.append(counter("kc.recorder.dropped", by_reason(values.dropped), start, now))
        if values.invalid:
            metrics.append(counter("kc.input.invalid", by_reason(values.invalid), start, now))
        with self._lock:
            rollouts = sorted(self._rollouts.items())
        for place, name in enumerate(_ROLLOUTS if rollouts else ()):
            points = [({**contract, "kc.outcome": outcome}, totals[place]) for outcome, totals in rollouts]
            metrics.append(counter(name, points, start, now))
        return metrics
