"""The standard OTEL_* environment variables, read as the OpenTelemetry SDK reads them.

Endpoints, headers, certificates, compression and request timeouts are read by the exporters themselves.

Exports over HTTP count as successful only where an OTLP receiver has said so. OpenTelemetry's exporters take any status
from 200 to 399 for a success and read no body. A 302 of a proxy that wants a login, or its page with 200, would then be
telemetry that was delivered, and is lost. An answer that OTLP/HTTP does not have is therefore an error of the request,
which the exporter reports as a failed export.

A receiver may accept an export and reject some of its points. OpenTelemetry's exporters do not report that; the
recorder is told by its own look at the answer.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import uuid
from collections.abc import Callable, Container, Mapping
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

from opentelemetry.sdk.metrics.export import MetricExporter, MetricExportResult, MetricsData
from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, OTELResourceDetector, Resource

_log: Final = logging.getLogger("kc_otel")
_OTLP: Final = {"grpc": "otlp_proto_grpc", "http/protobuf": "otlp_proto_http"}
_DEFAULT_TIMEOUT: Final = 30.0
_MAX_INTERVAL_SECONDS: Final = 60.0
_TRY_SECONDS: Final = 10.0


def sdk_disabled() -> bool:
    """Return True if OTEL_SDK_DISABLED turns everything off."""
    return os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"


def process_resource(taken: Container[str] = (), own: Mapping[str, str] | None = None) -> Resource:
    """The resource that the two variables OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES and the detectors describe.

    What the variables say goes before what the program itself knows (`own`), and that before what is detected.

    A stream has one writer, so every writer needs its own `service.instance.id`: one is made up where there is none,
    and where the one there is `taken`, by another recorder or by the process that this one was forked from.
    """
    said = OTELResourceDetector().detect().attributes
    known = {name: value for name, value in (own or {}).items() if name not in said}
    resource = Resource.create().merge(Resource(known))
    instance = resource.attributes.get(SERVICE_INSTANCE_ID)
    if not instance or str(instance) in taken:
        resource = resource.merge(Resource({SERVICE_INSTANCE_ID: str(uuid.uuid4())}))
    return resource


def instance_of(source: Path | str) -> dict[str, str]:
    """Return the identity of the one reader of a file, or of a page's URL: after a restart it is the same recorder.

    The URL's credentials and query stay out of it.
    """
    if isinstance(source, Path):
        return {SERVICE_INSTANCE_ID: f"{socket.gethostname()}{source.resolve()}"}
    parts = urlsplit(source)
    page = parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()
    return {SERVICE_INSTANCE_ID: f"{socket.gethostname()} {page}"}


def resource_of_run(system: str, algorithm: str | None, model: str | None) -> dict[str, str]:
    """Attributes of a training run, by the proposed names (open-telemetry/semantic-conventions-genai#88)."""
    run = os.environ.get("WANDB_RUN_ID") or os.environ.get("MLFLOW_RUN_ID")
    said = {"rl.system": system, "rl.algorithm": algorithm, "rl.model.name": model, "rl.run.id": run}
    return {name: str(value) for name, value in said.items() if value}


def export_interval(heartbeat: float) -> float:
    """Seconds between exports: OTEL_METRIC_EXPORT_INTERVAL (milliseconds), or a third of the heartbeat."""
    interval = _seconds("OTEL_METRIC_EXPORT_INTERVAL", min(heartbeat / 3.0, _MAX_INTERVAL_SECONDS))
    if interval > heartbeat:
        said = "every %g s is slower than the contract's heartbeat of %g s, which will be taken for silence"
        _log.warning(f"OTEL_METRIC_EXPORT_INTERVAL: {said}", interval, heartbeat)
    return interval


def export_timeout() -> float:
    """Seconds that one export may take: OTEL_METRIC_EXPORT_TIMEOUT (milliseconds), or 30."""
    return _seconds("OTEL_METRIC_EXPORT_TIMEOUT", _DEFAULT_TIMEOUT)


def exporter_names() -> tuple[str, ...]:
    """The exporters that OTEL_METRICS_EXPORTER names; none for `none`, OTLP when it is not set."""
    names = [name.strip() for name in os.environ.get("OTEL_METRICS_EXPORTER", "").split(",") if name.strip()]
    return tuple(name for name in names or ["otlp"] if name != "none")


def metric_exporters(rejected: Callable[[str, int], None] | None = None) -> tuple[MetricExporter, ...]:
    """New exporters as the environment asks for them; the libraries they need are imported here and not before.

    `rejected` is called with a sentence and a count when points of an export are rejected. ValueError if the
    environment names an exporter or a protocol that is not installed.
    """
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
        exporters.append(checking_answers(factory(), rejected))
    return tuple(exporters)


def try_export() -> str:
    """Send one export without metrics; return what came back where it was not accepted at once, else an empty text."""
    answer: SimpleQueue[str] = SimpleQueue()
    threading.Thread(target=lambda: answer.put(_refusal()), name="kc-otel-try", daemon=True).start()
    try:
        return answer.get(timeout=_TRY_SECONDS)
    except Empty:
        return f"no answer in {_TRY_SECONDS:g} s"


def _refusal() -> str:
    heard = _FirstComplaint()
    log = logging.getLogger("opentelemetry.exporter")
    known = {name: found for name, found in logging.Logger.manager.loggerDict.items() if name.startswith(log.name)}
    filtered = [(found, found.filters) for found in known.values() if isinstance(found, logging.Logger)]
    for found, _ in filtered:  # an exporter says the same thing once a minute only
        found.filters = []
    try:
        for exporter in metric_exporters():
            if not hasattr(exporter, "_endpoint"):  # a console has nothing to accept
                continue
            heard.stop = exporter.shutdown
            log.addHandler(heard)
            if exporter.export(MetricsData([])) is not MetricExportResult.SUCCESS:
                return heard.said or "the exporter does not say why"
            exporter.shutdown()
    except Exception as error:  # noqa: BLE001 - an exporter is foreign code
        return str(error) or type(error).__name__
    finally:
        log.removeHandler(heard)
        for found, filters in filtered:
            found.filters = filters
    return ""


class _FirstComplaint(logging.Handler):
    """A log handler that keeps the first failure of an exporter, and stops its further attempts."""

    said = ""
    stop: Callable[[], None]

    def emit(self, record: logging.LogRecord) -> None:
        if not self.said:
            self.said = record.getMessage()
            self.stop()


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


_SAMPLE_CHARACTERS: Final = 80
_MAX_MESSAGE_CHARACTERS: Final = 500
_Exporter = TypeVar("_Exporter")


class UnknownAnswerError(Exception):
    """The answer to an export does not come from an OTLP receiver; the message quotes it."""


def checking_answers(exporter: _Exporter, rejected: Callable[[str, int], None] | None = None) -> _Exporter:
    """An exporter of metrics or logs, with its HTTP answers checked, and those of gRPC where `rejected` is given."""
    session = getattr(exporter, "_session", None)  # to OpenTelemetry 1.42
    if session is None:
        session = getattr(getattr(getattr(exporter, "_client", None), "_transport", None), "_session", None)
    hooks = getattr(session, "hooks", None)
    if isinstance(hooks, dict):
        hooks.setdefault("response", []).append(partial(_check, rejected))
    elif rejected is not None and hasattr(exporter, "_stub") and hasattr(exporter, "_channel"):
        make = exporter._stub  # noqa: SLF001 - called again when the channel is made anew

        def watched(channel: Any) -> Any:
            client = make(channel)
            export = client.Export

            def call(*args: Any, **options: Any) -> Any:
                answer = export(*args, **options)
                _tell_rejected(answer, rejected)
                return answer

            client.Export = call
            return client

        exporter._stub = watched  # noqa: SLF001
        exporter._client = watched(exporter._channel)  # type: ignore[attr-defined]  # noqa: SLF001
    return exporter


def _tell_rejected(answer: Any, rejected: Callable[[str, int], None]) -> None:
    partial_success = answer.partial_success
    if (count := getattr(partial_success, "rejected_data_points", 0)) > 0:
        said = f": {partial_success.error_message[:_MAX_MESSAGE_CHARACTERS]!a}" if partial_success.error_message else ""
        rejected(f"the endpoint rejected {count:,} data points{said}", count)


def _check(rejected: Callable[[str, int], None] | None, answer: Any, *_: Any, **__: Any) -> None:
    """A hook of `requests`, called before it follows a redirect."""
    if 300 <= answer.status_code < 400:
        to = answer.headers.get("location", "nowhere")
        answer.close()
        raise UnknownAnswerError(f"{answer.url} redirects to {to[:_SAMPLE_CHARACTERS]!a}; OTLP has no redirects")
    if not 200 <= answer.status_code < 300:
        return
    response = _response(answer.content, answer.headers.get("content-type", ""))
    if response is None:
        sample = answer.content[:_SAMPLE_CHARACTERS]
        answer.close()
        raise UnknownAnswerError(f"{answer.url} answered {answer.status_code} with what is not OTLP: {sample!a}")
    if rejected is not None:
        _tell_rejected(response, rejected)


def _response(body: bytes, media: str) -> Any:
    """The response message of a success, which some receivers send empty; None for a body that is none."""
    from google.protobuf import json_format  # noqa: PLC0415 - who exports has it by now
    from google.protobuf.message import DecodeError  # noqa: PLC0415
    from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2  # noqa: PLC0415

    response = metrics_service_pb2.ExportMetricsServiceResponse()  # that of logs has the same fields
    try:
        if media.partition(";")[0].strip().lower() == "application/json":
            json_format.Parse(body or b"{}", response, ignore_unknown_fields=True)
        else:
            response.ParseFromString(body)
    except (json_format.ParseError, DecodeError):
        return None
    return response
