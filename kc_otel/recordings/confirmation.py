"""Confirmation that a recording is exported: files are done, and requests leave a spool, only then."""

from __future__ import annotations

import os
from typing import Final

from kc_otel.record.recorder import Recorder
from kc_otel.record.telemetry.environment import sdk_disabled
from kc_otel.record.telemetry.recorder_points import RecorderStats

NO_ENDPOINT: Final = "measured, not exported: no endpoint took the export"
"""The one reason that may pass by itself."""


def why_unexported(recorder: Recorder, before: RecorderStats, timeout: float) -> str:
    """Export; return "" if every exporter accepted all since `before`, the recorder's earlier counts, or the reason."""
    last = recorder.stats()
    flushed = recorder.force_flush(timeout)
    now = recorder.stats()
    if now.exports_in_part > before.exports_in_part:
        return f"measured, not exported: {now.rejected}"
    if not flushed or now.export_failures > last.export_failures:
        return NO_ENDPOINT
    if now.exports > last.exports:
        return ""
    if sdk_disabled():
        return "not measured: OTEL_SDK_DISABLED=true turns the recorder off; unset it"
    if name := os.environ.get("OTEL_METRICS_EXPORTER", "").strip():
        return f"measured, not exported: OTEL_METRICS_EXPORTER={name} sends nothing; set it to otlp"
    return "not measured: the recorder is off; the log says why"
