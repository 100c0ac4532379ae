"""A recorder's counts of itself: failures are never raised, so all of them are counted here."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from opentelemetry.sdk.metrics.export import Metric

from kc_otel.contract.input_reasons import remedy
from kc_otel.contract.slices import Scalar
from kc_otel.record.kernel import KernelPair
from kc_otel.record.telemetry.pair_streams import counter
from kc_otel.record.worker import ReasonCounts

_PROMPTS_UNKNOWN_WARNING: Final = (
    "prompts are unknown, so each sequence counts as independent; if a prompt has several rollouts, pass groups= or "
    "prompt_ids= to compare, or intervals are too narrow"
)
_SPLIT_PROMPT_WARNING: Final = (
    "some rollouts of a prompt arrived after it had counted, or too late, so it counts in parts; pass compare "
    "group_size= and all rollouts of a prompt to one process"
)
_ROLLOUTS: Final = ("kc.quarantine.sequences", "kc.quarantine.tokens", "kc.quarantine.tv")
_ATTRIBUTES: Final = {
    "kc.recorder.dropped": ("kc.reason",),
    "kc.input.invalid": ("kc.reason", "kc.slice", "kc.kernel.train", "kc.kernel.inference"),
    "kc.recorder.prompts": ("kc.outcome",),
    **dict.fromkeys(_ROLLOUTS, ("kc.outcome",)),
}
"""Metric -> attributes by which it counts."""


@dataclass(frozen=True, slots=True)
class RecorderStats:
    """Counts of a recorder's work and failures in this process, and its current backlog."""

    batches: int = 0
    sequences: int = 0
    tokens: int = 0  # after masks
    untraced: int = 0  # batches measured whose span could not be made
    unsampled: int = 0  # batches, or sequences waiting for their other side, left out by sampling
    dropped: dict[str, int] = field(default_factory=dict)  # batches by reason; sequences for `pair-...`
    invalid: dict[str, int] = field(default_factory=dict)  # sequences that failed an input check, by reason
    quarantined: int = 0  # sequences that were kept out of training
    exports: int = 0  # that every endpoint accepted
    exports_in_part: int = 0  # accepted, but for points that an endpoint rejected
    export_failures: int = 0  # that an endpoint did not accept
    rejected: str = ""  # what an endpoint said of the last export that it accepted in part
    queued_batches: int = 0  # that wait to be measured
    queued_bytes: int = 0
    unpaired: int = 0  # sequences that wait for their other side
    unpaired_tokens: int = 0
    slices_as_other: tuple[str, ...] = ()  # that `max_series` leaves no room for; they are counted as `other`


class Counters:
    """Thread-safe counts; the first trouble of each kind is logged, the rest is only counted."""

    def __init__(self, contract: str) -> None:
        self._contract = contract
        self._lock = threading.Lock()
        self._plain: Counter[str] = Counter()
        self._dropped = ReasonCounts(f"contract {contract}: dropped (%s)")
        self.dropped: Final = self._dropped.add
        """Count batches (sequences, for pairs) that were not measured: the reason, why, and how many."""
        self._invalid = ReasonCounts(f"contract {contract}: input invalid (%s)")
        self.noted: Final = ReasonCounts(f"contract {contract}: input doubtful (%s)").add
        """Note a peculiarity of a measured batch: its kind, and what it is, which is logged the first time."""
        self._failures = ReasonCounts(f"contract {contract}: %s failed")
        self._rejected = self._last_rejected = ""
        self._by: defaultdict[tuple[str, ...], float] = defaultdict(int)
        """Counts of a metric by its attributes' values; an empty one is left out."""

    def count(self, **counts: int) -> None:
        """Add to counts of `RecorderStats`."""
        with self._lock:
            self._plain.update(counts)

    def untraced(self, why: object) -> None:
        """Count a measured batch whose span could not be made."""
        self.count(untraced=1)
        self._failures.add("span", why)

    def invalid(
        self,
        reason: str,
        count: int,
        pair: KernelPair,
        why: object | None = None,
        slices: Mapping[str, int] | None = None,
    ) -> None:
        """Count sequences of a pair that failed an input check; the first is logged with `why` or the reason's words.

        `slices` says how many of them are on each slice; None where nobody knows their slices.
        """
        with self._lock:
            for slice, some in ({"": count} if slices is None else slices).items():
                if some:
                    of = reason, slice, pair.train.fingerprint, pair.inference.fingerprint
                    self._by["kc.input.invalid", *of] += some
        self._invalid.add(reason, remedy(reason) if why is None else why, count)

    def rollouts(self, outcome: Literal["kept", "quarantined"], sequences: int, tokens: int, tv_sum: float) -> None:
        """Count sequences by their outcome in quarantine: how many, their tokens, and the sum of (1-w)+ over these."""
        with self._lock:
            for name, value in zip(_ROLLOUTS, (sequences, tokens, tv_sum), strict=True):
                self._by[name, outcome] += value
            if outcome == "quarantined":
                self._plain["quarantined"] += sequences

    def prompts(self, outcomes: Mapping[str, int]) -> None:
        """Prompts counted, by how."""
        with self._lock:
            for outcome, count in outcomes.items():
                self._by["kc.recorder.prompts", outcome] += count
        if outcomes.get("part"):
            self.noted("prompt-parts", _SPLIT_PROMPT_WARNING)
        if outcomes.get("assumed"):
            self.noted("prompts", _PROMPTS_UNKNOWN_WARNING)

    def exported(self) -> None:
        """Every endpoint accepted an export, up to the points that `export_rejected` was told of."""
        with self._lock:
            rejected, self._rejected = self._rejected, ""
            self._plain["exports_in_part" if rejected else "exports"] += 1
            self._last_rejected = rejected or self._last_rejected
        if rejected:
            self._failures.add("export", rejected)
        else:
            self._failures.clear("export")  # the next outage is news again

    def export_rejected(self, why: str) -> None:
        """The endpoint rejected points of the export that is under way; it must not be repeated."""
        with self._lock:
            self._rejected = why

    def export_failed(self, why: object) -> None:
        """An endpoint did not accept an export."""
        self.count(export_failures=1)
        self._rejected = ""
        self._failures.add("export", why)

    def values(self) -> RecorderStats:
        """Return the current counts, without the backlog."""
        with self._lock:
            plain: dict[str, Any] = {**self._plain, "rejected": self._last_rejected}
        return RecorderStats(dropped=self._dropped.values(), invalid=self._invalid.values(), **plain)

    def metrics(self, start: int, now: int) -> list[Metric]:
        """The counts as cumulative sums from `start` to `now`, unix nanoseconds."""
        values = self.values()
        with self._lock:
            by = dict(self._by)
        by |= {("kc.recorder.dropped", reason): count for reason, count in values.dropped.items()}
        contract: dict[str, Scalar] = {"kc.contract": self._contract}
        points: dict[str, list[tuple[Mapping[str, Scalar], float]]] = {
            "kc.recorder.tokens": [(contract, values.tokens)],
            "kc.recorder.export.failures": [(contract, values.export_failures + values.exports_in_part)],
        }
        for (name, *said), count in sorted(by.items()):
            of = {attribute: text for attribute, text in zip(_ATTRIBUTES[name], said, strict=True) if text}
            points.setdefault(name, []).append(({**contract, **of}, count))
        return [counter(name, found, start, now) for name, found in points.items()]
