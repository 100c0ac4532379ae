"""The standard OTEL_* environment variables, read as the OpenTelemetry SDK reads them.

Endpoints, headers, certificates, compression and request timeouts are read by the exporters themselves.
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Container, Mapping
from importlib.metadata import entry_points
from typing import Final

from opentelemetry.sdk.metrics.export import MetricExporter
from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, Resource

from kc_otel.record.telemetry.config_file import (
    configured,
    file_exporters,
    file_readers,
    file_resource,
    file_seconds,
)

__all__ = [
    "export_interval",
    "export_timeout",
    "exporter_names",
    "metric_exporters",
    "process_resource",
    "sdk_disabled",
]

_log: Final = logging.getLogger("kc_otel")
_OTLP: Final = {"grpc": "otlp_proto_grpc", "http/protobuf": "otlp_proto_http"}
_DEFAULT_TIMEOUT: Final = 30.0


def sdk_disabled() -> bool:
    """Whether OTEL_SDK_DISABLED turns everything off."""
    return os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"


def process_resource(taken: Container[str] = (), own: Mapping[str, str] | None = None) -> Resource:
    """The resource that OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES and detectors describe, or OTEL_CONFIG_FILE.

    What they say goes before what the program itself knows (`own`).

    A stream has one writer, so every writer needs its own `service.instance.id`: one is made up where there is none,
    and where the one there is `taken`, by another recorder or by the process that this one was forked from.
    """
    resource = Resource(dict(own or {})).merge(file_resource() if configured() else Resource.create())
    instance = resource.attributes.get(SERVICE_INSTANCE_ID)
    if not instance or str(instance) in taken:
        resource = resource.merge(Resource({SERVICE_INSTANCE_ID: str(uuid.uuid4())}))
    return resource


def export_interval(default: float) -> float:
    """Seconds between exports: OTEL_METRIC_EXPORT_INTERVAL (milliseconds), or `default`."""
    return file_seconds("interval", default) if configured() else _seconds("OTEL_METRIC_EXPORT_INTERVAL", default)


def export_timeout() -> float:
    """Seconds that one export may take: OTEL_METRIC_EXPORT_TIMEOUT (milliseconds), or 30."""
    if configured():
        return file_seconds("timeout", _DEFAULT_TIMEOUT)
    return _seconds("OTEL_METRIC_EXPORT_TIMEOUT", _DEFAULT_TIMEOUT)


def exporter_names() -> tuple[str, ...]:
    """The exporters that OTEL_METRICS_EXPORTER names; none for `none`, OTLP when it is not set.

    Of OTEL_CONFIG_FILE a name for each reader that pushes.

    Raises:
        ValueError: If that file cannot be used.
    """
    if configured():
        return ("configured",) * len(file_readers())
    names = [name.strip() for name in os.environ.get("OTEL_METRICS_EXPORTER", "").split(",") if name.strip()]
    return tuple(name for name in names or ["otlp"] if name != "none")


def metric_exporters() -> tuple[MetricExporter, ...]:
    """New exporters as the environment asks for them; the libraries they need are imported here and not before.

    Raises:
        ValueError: If the environment names an exporter or a protocol that is not installed.
    """
    if configured():
        return file_exporters()
    exporters = []
    for name in exporter_names():
        known = entry_points(group="opentelemetry_metrics_exporter", name=_resolved(name))
        if not known:
            raise ValueError(f"OTEL_METRICS_EXPORTER: no exporter {name!r} is installed; write otlp, console or none")
        factory = next(iter(known)).load()
        if not (isinstance(factory, type) and issubclass(factory, MetricExporter)):
            # A pull exporter such as prometheus belongs to the program's own meter provider; it is not an error here.
            _log.warning("OTEL_METRICS_EXPORTER: %s does not push; drift is not exported through it", name)
            continue
        exporters.append(factory())
    return tuple(exporters)


def _resolved(name: str) -> str:
    if name != "otlp":
        return name
    protocol = os.environ.get("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL") or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
    protocol = (protocol or "grpc").strip()
    if protocol not in _OTLP:
        raise ValueError(f"OTEL_EXPORTER_OTLP_PROTOCOL: {protocol!r} is not supported; write {' or '.join(_OTLP)}")
    return _OTLP[protocol]


def _seconds(variable: str, default: float) -> float:
    text = os.environ.get(variable, "").strip()
    if not text:
        return default
    try:
        seconds = float(text) / 1000.0
    except ValueError:
        seconds = 0.0
    if not seconds > 0.0:
        _log.warning("%s: %r is not a number of milliseconds above 0; using %g s", variable, text, default)
        return default
    return seconds
