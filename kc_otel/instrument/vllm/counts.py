"""What became of sampled requests, as metrics of the program's own pipeline: whatever meter provider it has set.

Instruments cannot be taken back from a provider, and it asks the first one of a name for its numbers. So there is one
set of them in a process, which goes on from where the instrumentation before left off.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Final

from opentelemetry import metrics

from kc_otel.contract.registry import METRICS
from kc_otel.instrument.spool import Spool
from kc_otel.instrument.vllm.handover import Handover
from kc_otel.telemetry.export import VERSION

__all__ = ["RECORDED", "Counts", "outcomes"]

RECORDED: Final = ""
"""The reason of what was not dropped."""


class Counts:
    """Observes `kc.capture.recorded` and `kc.capture.dropped`.

    Counts of instrumentations that have ended stay, because counters must not go down.
    """

    def __init__(self) -> None:
        self._ended: Counter[tuple[str, str]] = Counter()
        self._now: tuple[str, Callable[[], Counter[str]]] | None = None

    def start(self, contract: str, read: Callable[[], Counter[str]], meter_provider: Any = None) -> None:
        """Observe what `read` returns: requests by the reason for which they were dropped, RECORDED for none.

        Args:
            contract: metadata.name.
            read: Returns the counts so far; called on the thread of the program's exporter.
            meter_provider: Whose meter; None for the global one.
        """
        self._now = contract, read
        meter = metrics.get_meter("kc_otel", VERSION, meter_provider)
        for name, callback in (("kc.capture.recorded", self._recorded), ("kc.capture.dropped", self._dropped)):
            metric = METRICS[name]
            meter.create_observable_counter(name, [callback], metric.unit, metric.meaning)

    def end(self) -> None:
        """Keep the counts as they are."""
        self._ended, self._now = self._totals(), None

    def _totals(self) -> Counter[tuple[str, str]]:
        totals = self._ended.copy()
        if self._now is not None:
            contract, read = self._now
            totals.update({(contract, reason): count for reason, count in read().items()})
        return totals

    def _recorded(self, _: metrics.CallbackOptions) -> Iterator[metrics.Observation]:
        for (contract, reason), count in self._totals().items():
            if reason == RECORDED:
                yield metrics.Observation(count, {"kc.contract": contract})

    def _dropped(self, _: metrics.CallbackOptions) -> Iterator[metrics.Observation]:
        for (contract, reason), count in self._totals().items():
            if reason != RECORDED:
                yield metrics.Observation(count, {"kc.contract": contract, "kc.reason": reason})


def outcomes(handover: Handover) -> Counter[str]:
    """Sampled requests by what became of them: with a spool, recorded are those that are in its file."""
    stats = handover.stats()
    found = Counter(stats.dropped)
    found[RECORDED] = stats.recorded
    if isinstance(handover.sink, Spool):
        spool = handover.sink.stats()
        found.update(spool.dropped)
        found[RECORDED] = spool.written
    return found
