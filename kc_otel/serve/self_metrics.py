"""The evaluator's own metrics, read from the core when somebody asks: for `/metrics` and for OTLP alike.

Over OTLP go gauges, and transitions as log records, where OpenTelemetry's own environment variables name an endpoint.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from kc_otel._extras import extra
from kc_otel.contract.limits import scale_of
from kc_otel.contract.model import Contract
from kc_otel.contract.registry.clause_metrics import DERIVED
from kc_otel.contract.registry.own_metrics import METRICS, Instrument, label, prometheus_name
from kc_otel.contract.sentences import limitation
from kc_otel.contract.slices import ALL
from kc_otel.judge.decisions import INFERENCE_KERNEL, TRAIN_KERNEL, kept_since
from kc_otel.judge.incidents.incident import Incident, IncidentState
from kc_otel.judge.promotion.machine import share_of
from kc_otel.judge.promotion.stages import PromotionStatus
from kc_otel.judge.verdict import Verdict
from kc_otel.record.telemetry.environment import checking_answers
from kc_otel.serve.core import Core
from kc_otel.serve.history import Announcement
from kc_otel.serve.traffic import kept_away

if TYPE_CHECKING:
    from collections import Counter

    from opentelemetry.metrics import CallbackOptions
    from prometheus_client import Metric

_log: Final = logging.getLogger(__name__)
_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_SEVERITY: Final = {"info": "INFO", "warning": "WARN", "critical": "ERROR"}
Rows = Iterable[Sequence[Any]]
"""A row for each series of a metric: values of its attributes, in the registry's order, then the number."""
SelfMetrics = Mapping[str, Sequence[Sequence[Any]]]
"""Every metric's rows by its name."""
_OF_VERDICT: Final[Mapping[str, Callable[[Verdict], float]]] = {
    "kc.verdict": attrgetter("status.code"),
    "kc.verdict.evidence": attrgetter("evidence"),
    **{f"kc.bound.{name}": attrgetter(name) for name in ("estimate", "lower", "upper", "limit", "margin", "samples")},
}
_UNPROVEN, _CONTAINED, _BROKEN = 0.0, 1.0, 2.0
"""Values of `kc.incident`."""


def read(
    core: Core, requests: Counter[tuple[str, str]], attempts: Counter[tuple[str, str]], in_flight: int = 0
) -> SelfMetrics:
    """Every metric of the registry that the evaluator emits, with its series; a bound that is not known has none.

    `requests` counts (transport, outcome), `attempts` (endpoint, outcome); `in_flight` are bytes of requests.
    """
    now, state, evaluator = core.evaluated_at, core.connection.path, core.evaluator
    cells, queues, away = core.history.cells(), core.outbox.status(), kept_away(core)
    shards = [shard for shard in core.shards if shard.answered]
    contracts, failures = core.contracts, evaluator.faults.counts
    most_series = sum(contract.observability.max_series for contract in contracts.values())
    rows: dict[str, Rows] = {
        **{
            name: [(*of.cell, value) for of, _ in cells if not math.isnan(value := float(read_from(of)))]
            for name, read_from in _OF_VERDICT.items()
        },
        **_promises(contracts.values()),
        **_places(core),
        **_promotions(core),
        "kc.verdict.since": [(*verdict.cell, since) for verdict, since in cells],
        "kc.verdict.no_traffic": [
            (*verdict.cell, 1.0) for verdict, _ in cells if verdict.wakes_nobody or away(verdict)
        ],
        "kc.alert.firing": sorted({(*alert.cell[:3], alert.severity, 1.0) for alert in core.firing()}),
        "kc.action.active": sorted(
            {
                (*alert.cell[:3], action, 1.0)
                for alert in core.firing()
                if alert.cell.contract not in core.dry_run
                for action in core.actions(alert)
            }
        ),
        "kc.incident": [
            (found.contract, found.id, found.on, found.kernel_train, found.kernel_inference, _state(core, found))
            for found in core.incidents()
            if not found.only_route_left
        ],
        "kc.route": _routes(core),
        "kc.train.step": [
            (name, *pair, step) for name, steps in evaluator.steps.items() for pair, step in sorted(steps.items())
        ],
        "kc.evaluator.points": sorted(evaluator.counters.items()),
        "kc.evaluator.missing": [
            (name, row.outcome, row.kernel_train, row.kernel_inference, row.senders)
            for name in contracts
            for row in evaluator.missing(name, core.seen_at)
        ],
        "kc.evaluator.silent": [
            (name, version, evaluator.silent_recorders(name, version, core.seen_at)[0])
            for name in contracts
            for version in evaluator.inference_versions(name)
        ],
        "kc.evaluator.requests": [(*of, count) for of, count in sorted(requests.items())],
        "kc.evaluator.in_flight": [(in_flight,)],
        "kc.evaluator.series": [(evaluator.series_count,)],
        "kc.evaluator.series.limit": [(most_series,)],
        "kc.evaluator.tick.duration": [(core.tick_seconds,)],
        "kc.evaluator.sync.duration": [] if (took := core.connection.commit_seconds) is None else [(took,)],
        "kc.evaluator.last_evaluation": [(name, now) for name in contracts if now is not None],
        "kc.evaluator.inbox.size": [] if state is None else [(core.inbox.size,)],
        "kc.evaluator.disk.free": [] if state is None else _free_space(state.parent),
        "kc.evaluator.shard.streams": [(str(shard.number), shard.streams) for shard in shards],
        "kc.evaluator.shard.lag": [(str(shard.number), shard.waiting + shard.lag) for shard in shards],
        "kc.evaluator.failures": [(name, failures[name]) for name in sorted({*contracts, *failures})],
        "kc.outbox.pending": [(queue.endpoint, queue.waiting) for queue in queues],
        "kc.outbox.disabled": [(queue.endpoint, at) for queue in queues if (at := queue.disabled_at) is not None],
        "kc.outbox.attempts": [(*of, count) for of, count in sorted(attempts.items())],
    }
    return {name: [*found] for name, found in rows.items()}


def _state(core: Core, incident: Incident) -> float:
    if incident.fell_silent(core.seen_at, core.window(incident.contract)):
        return _UNPROVEN
    return _CONTAINED if incident.state is IncidentState.CONTAINED else _BROKEN


def exposition(metrics: SelfMetrics) -> bytes:
    """The Prometheus text format."""
    with extra("serve", "/metrics"):
        from prometheus_client import core, generate_latest  # noqa: PLC0415 - only for /metrics
        from prometheus_client.registry import Collector  # noqa: PLC0415

    class _SelfMetrics(Collector):
        def collect(self) -> Iterable[Metric]:
            for name, rows in metrics.items():
                metric = METRICS[name]
                counts = metric.instrument is Instrument.COUNTER
                kind: Any = core.CounterMetricFamily if counts else core.GaugeMetricFamily
                labels = [label(attribute) for attribute in metric.attributes]
                family = kind(prometheus_name(metric).removesuffix("_total"), metric.meaning, labels=labels)
                for *values, number in rows:
                    family.add_metric(values, number)
                yield family

    return generate_latest(_SelfMetrics())


def _free_space(folder: Path) -> Rows:
    """Bytes that a folder's disk has left."""
    try:
        return [(shutil.disk_usage(folder).free,)]
    except OSError:  # a folder that is gone has none
        return []


def _promises(contracts: Iterable[Contract]) -> dict[str, Rows]:
    """Return the contracts' terms for boards that fit every contract: clauses in words, factors, heartbeats."""
    info: list[tuple[Any, ...]] = []
    factors: list[tuple[str, str, float]] = []
    for contract in contracts:
        for clause in contract.clauses:
            histogram = prometheus_name(clause.quantity) if clause.quantity else ""
            said = limitation(clause, tuple(contract.slices))
            what = clause.metric, clause.statistic_text, clause.limit_unit
            info.append((contract.name, clause.id, *what, histogram, said, 1.0))
        for name, metric in DERIVED.items():
            if metric.needs and (factor := scale_of(name, contract.assumptions)) is not None:
                factors.append((contract.name, name, factor))
    heartbeats = [(contract.name, contract.observability.heartbeat) for contract in contracts]
    return {"kc.clause.info": info, "kc.contract.factor": factors, "kc.contract.heartbeat": heartbeats}


def _promotions(core: Core) -> dict[str, Rows]:
    """Return the series of versions in promotion or rolled back; a replaced version has no stage."""
    rows: dict[str, list[tuple[str, str, float]]] = {"stage": [], "since": [], "share": [], "windows": []}
    for promotion in core.promotions.all():
        if promotion.status is PromotionStatus.REPLACED:
            continue
        where = promotion.contract, promotion.version
        share = share_of(promotion)
        back = -1 if promotion.seen_serving is None else -2
        rolled = promotion.status is PromotionStatus.ROLLED_BACK
        rows["stage"].append((*where, back if rolled else promotion.position.rank[0]))
        rows["since"].append((*where, promotion.entered))
        rows["share"].append((*where, 1.0 if share is None else share))
        rows["windows"].append((*where, promotion.tally.passed))
    return {f"kc.promotion.{name}": found for name, found in rows.items()}


def _places(core: Core) -> dict[str, Rows]:
    """Return drift by position and turn of the kernels of incidents that last."""
    found = {
        (incident.contract, place, incident.kernel_train, incident.kernel_inference): interval
        for incident in core.incidents()
        if incident.on == "fail"
        for place, interval in core.evaluator.by_place(incident.contract, incident.pair, core.seen_at).items()
    }
    return {
        f"kc.place.{name}": [(*where, getattr(interval, name)) for where, interval in found.items()]
        for name in ("estimate", "lower", "upper")
    }


def _routes(core: Core) -> Iterable[tuple[str, str, str, str, float]]:
    """Return where routers send each slice's requests instead of each version that has reported or is kept away."""
    for name, contract in core.contracts.items():
        kept = kept_since(core.decisions, name)
        versions = {*core.evaluator.inference_versions(name)}
        versions |= {route.avoid for route in core.decisions.routes if route.contract == name}
        versions |= {canary.version for canary in core.decisions.canaries if canary.contract == name}
        for slice in (ALL, *contract.slices):
            for version in sorted(versions or {""}):
                kernel = INFERENCE_KERNEL if kept(slice, version) is None else TRAIN_KERNEL
                yield name, slice, version, kernel, 1.0


def _is_own(endpoint: str, ports: Collection[int]) -> bool:
    """Return whether an OTLP endpoint is a port of this process."""
    host, _, port = urlsplit(endpoint if "//" in endpoint else f"//{endpoint}").netloc.rpartition(":")
    return port in map(str, ports) and host in {"localhost", "127.0.0.1", "[::1]"}


class TelemetryExporter:
    """Exports the latest metrics once per interval, and log records; `metrics` has all that there will ever be."""

    def __init__(
        self, metrics: SelfMetrics, *, own_ports: Collection[int] = (), environ: Mapping[str, str] = os.environ
    ) -> None:
        self._latest = metrics
        self._stop: list[Callable[[], Any]] = []
        self._logger: Any = None
        endpoint = next((environ[name] for name in _ENDPOINTS if environ.get(name)), "")
        if endpoint and _is_own(endpoint, own_ports):
            _log.warning("own metrics are not exported: %s is this evaluator, which needs none of them", endpoint)
        elif endpoint and environ.get("OTEL_SDK_DISABLED", "").lower() != "true":
            self._start("grpc" if environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc") == "grpc" else "http")

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

    def _start(self, protocol: str) -> None:
        from opentelemetry.metrics import Observation  # noqa: PLC0415 - only with an endpoint
        from opentelemetry.sdk._logs import LoggerProvider  # noqa: PLC0415
        from opentelemetry.sdk._logs.export import BatchLogRecordProcessor  # noqa: PLC0415
        from opentelemetry.sdk.metrics import MeterProvider  # noqa: PLC0415
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader  # noqa: PLC0415

        exporter = _exporter(protocol, "metric_exporter", "OTLPMetricExporter")
        metrics = MeterProvider([PeriodicExportingMetricReader(exporter)], shutdown_on_exit=False)
        meter = metrics.get_meter("kc_otel.judge")

        def observe(name: str, _: CallbackOptions) -> Iterable[Observation]:
            attributes = METRICS[name].attributes
            return [
                Observation(number, dict(zip(attributes, values, strict=True)))
                for *values, number in self._latest[name]
            ]

        for metric in (METRICS[name] for name in self._latest):
            counts = metric.instrument is Instrument.COUNTER
            create = meter.create_observable_counter if counts else meter.create_observable_gauge
            create(metric.name, [partial(observe, metric.name)], metric.unit, metric.meaning)
        logs = LoggerProvider(shutdown_on_exit=False)
        logs.add_log_record_processor(BatchLogRecordProcessor(_exporter(protocol, "_log_exporter", "OTLPLogExporter")))
        self._logger = logs.get_logger("kc_otel.judge")
        self._stop += [metrics.shutdown, logs.shutdown]


def _exporter(protocol: str, module: str, name: str) -> Any:
    found = getattr(import_module(f"opentelemetry.exporter.otlp.proto.{protocol}.{module}"), name)()
    return checking_answers(found) if protocol == "http" else found
