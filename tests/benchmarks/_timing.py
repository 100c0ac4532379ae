"""Timing programs side by side: interleaved, so that whatever else the machine does falls on all of them alike.

Times are seconds of the thread's own CPU, so that being interrupted does not count; sharing caches with others does.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from opentelemetry.sdk.metrics.export import MetricExporter, MetricExportResult

__all__ = ["Accept", "interleaved", "resident", "spread"]


class Accept(MetricExporter):
    """An endpoint that is always up."""

    def export(self, *_, **__):
        return MetricExportResult.SUCCESS

    def force_flush(self, *_, **__):
        return True

    def shutdown(self, *_, **__):
        pass


def interleaved(programs: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """CPU seconds that each run of each program took, ascending, after one run of each that is not counted."""
    for program in programs.values():
        program()
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(rounds):
        for name, program in programs.items():
            start = time.thread_time()
            program()
            seconds[name].append(time.thread_time() - start)
    return {name: sorted(times) for name, times in seconds.items()}


def resident() -> int:
    """Bytes of the process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def spread(seconds: list[float], work: float) -> tuple[float, float, float]:
    """Work per second in the best, the median and the worst run; the best is the one that nothing disturbed."""
    return work / seconds[0], work / seconds[len(seconds) // 2], work / seconds[-1]
