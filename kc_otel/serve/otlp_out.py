"""The evaluator's output over OTLP: verdicts as gauges, transitions as log records.

Only when an endpoint is configured by OpenTelemetry's own environment variables, so that an evaluator on a laptop does
not call a Collector that is not there. This is the plain SDK: a few hundred series, once per export interval.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from kc_otel.contract.registry.own_metrics import METRICS
from kc_otel.contract.registry.sent_metrics import Instrument
from kc_otel.record.telemetry.environment import checking_answers
from kc_otel.serve.announcements import Announcement

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, Observation

Series = list[tuple[Mapping[str, str], float]]
"""(Attributes, value) of each series of a metric."""

SelfMetrics = Mapping[str, Series]
"""Every metric by its name."""

_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT")
_SEVERITY: Final = {"info": "INFO", "warning": "WARN", "critical": "ERROR"}


class TelemetryExporter:
    """Exports the latest metrics once per export interval, and log records as they happen.

    The metrics at the start include every metric that there will ever be.
    """

    def __init__(self, metrics: SelfMetrics, *, environ: Mapping[str, str] = os.environ) -> None:
        self._latest = metrics
        self._stop: list[Callable[[], Any]] = []
        self._logger: Any = None
        configured = any(environ.get(name) for name in _ENDPOINTS)
        if not configured or environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
            return
        protocol = "grpc" if environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc") == "grpc" else "http"
        self._start_metrics(protocol)
        self._start_logs(protocol)

    @property
    def speaks(self) -> bool:
        """True if an endpoint is configured."""
        return bool(self._stop)

    def publish(self, metrics: SelfMetrics) -> None:
        """Set the metrics of the next export; the exporter's thread only sees finished ones."""
        self._latest = metrics

    def transition(self, change: Announcement) -> None:
        """A log record of something that changed; nothing without an endpoint."""
        if self._logger is None:
            return
        from opentelemetry._logs import LogRecord, SeverityNumber  # noqa: PLC0415 - only where logs are sent

        level = _SEVERITY.get(change.severity, "INFO")
        self._logger.emit(
            LogRecord(
                timestamp=time.time_ns(),
                severity_number=SeverityNumber[level],
                severity_text=level,
                body=change.message,
                attributes=dict(change.attributes),
                event_name=change.event,
            )
        )

    def shutdown(self, timeout: float = 3.0) -> None:
        """Send what is left and stop; an endpoint that is gone holds this up for at most `timeout` seconds."""
        stops, self._stop, self._logger = self._stop, [], None
        last_words = threading.Thread(target=lambda: [stop() for stop in stops], daemon=True)
        last_words.start()
        last_words.join(timeout)

    def _start_metrics(self, protocol: str) -> None:
        from opentelemetry.sdk.metrics import MeterProvider  # noqa: PLC0415 - only with an endpoint
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader  # noqa: PLC0415

        exporter = _exporter(protocol, "metric_exporter", "OTLPMetricExporter")
        provider = MeterProvider([PeriodicExportingMetricReader(exporter)], shutdown_on_exit=False)
        meter = provider.get_meter("kc_otel.judge")
        for metric in (METRICS[name] for name in self._latest):
            callback = self._reader_of(metric.name)
            counts = metric.instrument is Instrument.COUNTER
            create = meter.create_observable_counter if counts else meter.create_observable_gauge
            create(metric.name, [callback], metric.unit, metric.meaning)
        self._stop.append(provider.shutdown)

    def _start_logs(self, protocol: str) -> None:
        from opentelemetry.sdk._logs import LoggerProvider  # noqa: PLC0415 - only with an endpoint
        from opentelemetry.sdk._logs.export import BatchLogRecordProcessor  # noqa: PLC0415

        exporter = _exporter(protocol, "_log_exporter", "OTLPLogExporter")
        provider = LoggerProvider(shutdown_on_exit=False)
        provider.add_log_record_processor(BatchLogRecordProcessor(exporter))
        self._logger = provider.get_logger("kc_otel.judge")
        self._stop.append(provider.shutdown)

    def _reader_of(self, name: str) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def observe(_: CallbackOptions) -> Iterable[Observation]:
            from opentelemetry.metrics import Observation  # noqa: PLC0415 - only with an endpoint

            return [Observation(value, dict(attributes)) for attributes, value in self._latest[name]]

        return observe


def _exporter(protocol: str, module: str, name: str) -> Any:
    found = getattr(import_module(f"opentelemetry.exporter.otlp.proto.{protocol}.{module}"), name)()
    return checking_answers(found) if protocol == "http" else found
