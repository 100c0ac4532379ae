"""The evaluator's own metrics, read from the core when somebody asks: for `/metrics` and for OTLP alike.

Over OTLP go gauges, and transitions as log records, where OpenTelemetry's own environment variables name an endpoint.
"""

from __future__ import annotations

import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kc_otel._extras import extra
from kc_otel.contract.limits import scale_of
from kc_otel.contract.model import Contract
from kc_otel.contract.prometheus_names import label_name, prometheus_name
from kc_otel.contract.registry.clause_metrics import DERIVED
from kc_otel.contract.registry.own_metrics import METRICS, Instrument
from kc_otel.contract.sentences import limitation
from kc_otel.contract.slices import ALL
from kc_otel.judge.decisions import INFERENCE_KERNEL, TRAIN_KERNEL, kept_since
from kc_otel.judge.incidents.incident import Incident, IncidentState
from kc_otel.judge.promotion.machine import share_of
from kc_otel.judge.promotion.stages import PromotionStatus
from kc_otel.judge.verdict import Verdict
from kc_otel.record.telemetry.environment import checking_answers
from kc_otel.serve.core import Core
from kc_otel.serve.event_log import Announcement, cell_attributes

if TYPE_CHECKING:
    from collections import Counter

    from opentelemetry.metrics import CallbackOptions
    from prometheus_client import Metric

Series = list[tuple[Mapping[str, str], float]]
"""(Attributes, value) of each series of a metric."""

SelfMetrics = Mapping[str, Series]
"""Every metric by its name."""
_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT")
_SEVERITY: Final = {"info": "INFO", "warning": "WARN", "critical": "ERROR"}
_OF_VERDICT: Mapping[str, Callable[[Verdict], float]] = {
    "kc.verdict": lambda verdict: verdict.status.code,
    "kc.verdict.evidence": lambda verdict: verdict.evidence,
    "kc.bound.estimate": lambda verdict: verdict.estimate,
    "kc.bound.lower": lambda verdict: verdict.lower,
    "kc.bound.upper": lambda verdict: verdict.upper,
    "kc.bound.limit": lambda verdict: verdict.limit,
    "kc.bound.margin": lambda verdict: verdict.margin,
    "kc.bound.samples": lambda verdict: verdict.samples,
}


_STATE_CODES = {IncidentState.BROKEN: 2.0, IncidentState.CONTAINED: 1.0, IncidentState.UNPROVEN: 0.0}


def read(
    core: Core, requests: Counter[tuple[str, str]], attempts: Counter[tuple[str, str]], in_flight: int = 0
) -> SelfMetrics:
    """Every metric of the registry that the evaluator emits, with its series; a bound that is not known has none.

    `requests` counts (transport, outcome), `attempts` (endpoint, outcome); `in_flight` are bytes of requests.
    """
    now, state, evaluator = core.evaluated_at, core.connection.path, core.evaluator
    verdicts = [(cell_attributes(verdict.cell), verdict, since) for verdict, since in core.history.cells()]
    queues, kept_away = core.outbox.status(), core.kept_away()
    shards = [shard for shard in core.shards if shard.answered]
    failures = evaluator.faults.counts
    return {
        **{
            name: [(cell, value) for cell, verdict, _ in verdicts if not math.isnan(value := float(read_from(verdict)))]
            for name, read_from in _OF_VERDICT.items()
        },
        **_promises(core.contracts.values()),
        **_places(core),
        **_promotions(core),
        "kc.verdict.since": [(cell, since) for cell, _, since in verdicts],
        "kc.verdict.no_traffic": [(cell, 1.0) for cell, verdict, _ in verdicts if kept_away(verdict)],
        "kc.alert.firing": _series("contract clause slice severity", ((*firing, 1.0) for firing in core.firing())),
        "kc.action.active": _series("contract clause slice action", ((*acting, 1.0) for acting in core.acting())),
        "kc.incident": _series(
            "contract incident incident.on kernel.train kernel.inference",
            (
                (found.contract, found.id, found.on, found.kernel_train, found.kernel_inference, _state(core, found))
                for found in core.incidents()
            ),
        ),
        "kc.route": _series("contract slice kernel.inference route.kernel", _routes(core)),
        "kc.train.step": _series(
            "contract kernel.train kernel.inference",
            ((name, *pair, step) for name, steps in evaluator.steps.items() for pair, step in sorted(steps.items())),
        ),
        "kc.evaluator.points": _series("outcome", sorted(evaluator.counters.items())),
        "kc.evaluator.missing": _series(
            "contract outcome kernel.train kernel.inference",
            ((name, row.outcome, *row.pair, row.senders) for name in core.contracts for row in core.missing(name)),
        ),
        "kc.evaluator.silent": _series(
            "contract kernel.inference",
            (
                (name, kernel.version, core.silent_recorders(name, kernel.version)[0])
                for name in core.contracts
                for kernel in evaluator.kernels(name)
                if kernel.role == "inference"
            ),
        ),
        "kc.evaluator.requests": _series("transport outcome", ((*of, count) for of, count in sorted(requests.items()))),
        "kc.evaluator.in_flight": [({}, in_flight)],
        "kc.evaluator.series": [({}, evaluator.series_count)],
        "kc.evaluator.series.limit": [
            ({}, sum(contract.observability.max_series for contract in core.contracts.values()))
        ],
        "kc.evaluator.tick.duration": [({}, core.tick_seconds)],
        "kc.evaluator.sync.duration": [] if (took := core.connection.commit_seconds) is None else [({}, took)],
        "kc.evaluator.last_evaluation": _series("contract", ((of, now) for of in core.contracts if now is not None)),
        "kc.evaluator.inbox.size": [] if state is None else [({}, core.inbox.bytes)],
        "kc.evaluator.disk.free": [] if state is None else free_space(state.parent),
        "kc.evaluator.shard.streams": _series("shard", ((str(shard.number), shard.streams) for shard in shards)),
        "kc.evaluator.shard.lag": _series("shard", ((str(of.number), of.waiting + of.lag) for of in shards)),
        "kc.evaluator.failures": _series(
            "contract", ((name, failures[name]) for name in sorted({*core.contracts, *failures}))
        ),
        "kc.outbox.pending": _series("endpoint", ((queue.endpoint, queue.waiting) for queue in queues)),
        "kc.outbox.disabled": _series(
            "endpoint", ((queue.endpoint, at) for queue in queues if (at := queue.disabled_at) is not None)
        ),
        "kc.outbox.attempts": _series("endpoint outcome", ((*of, count) for of, count in sorted(attempts.items()))),
    }


def _series(names: str, rows: Iterable[Sequence[Any]]) -> Series:
    """Series of rows: values of `kc.` attributes of these names, then the number."""
    attributes = [f"kc.{name}" for name in names.split()]
    return [(dict(zip(attributes, row, strict=False)), row[-1]) for row in rows]


def _state(core: Core, incident: Incident) -> float:
    return _STATE_CODES[IncidentState.UNPROVEN if core.fell_silent(incident) else incident.state]


def exposition(metrics: SelfMetrics) -> bytes:
    """The Prometheus text format."""
    with extra("serve", "/metrics"):
        from prometheus_client import CollectorRegistry, core, generate_latest  # noqa: PLC0415 - only for /metrics
        from prometheus_client.registry import Collector  # noqa: PLC0415

    class _SelfMetrics(Collector):
        def collect(self) -> Iterable[Metric]:
            for name, series in metrics.items():
                metric = METRICS[name]
                counts = metric.instrument is Instrument.COUNTER
                kind: Any = core.CounterMetricFamily if counts else core.GaugeMetricFamily
                labels = [label_name(attribute) for attribute in metric.attributes]
                family = kind(prometheus_name(metric).removesuffix("_total"), metric.meaning, labels=labels)
                for attributes, value in series:
                    family.add_metric([attributes.get(attribute, "") for attribute in metric.attributes], value)
                yield family

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_SelfMetrics())
    return generate_latest(registry)


def free_space(folder: Path) -> Series:
    """Bytes that a folder's disk has left."""
    try:
        return [({}, shutil.disk_usage(folder).free)]
    except OSError:  # a folder that is gone has none
        return []


def _promises(contracts: Iterable[Contract]) -> dict[str, Series]:
    """Return the contracts' terms for boards that fit every contract: clauses in words, factors, heartbeats."""
    metrics: dict[str, Series] = {"kc.clause.info": [], "kc.contract.factor": [], "kc.contract.heartbeat": []}
    for contract in contracts:
        own = {"kc.contract": contract.name}
        metrics["kc.contract.heartbeat"].append((own, contract.observability.heartbeat))
        for clause in contract.clauses:
            said = {
                "kc.clause": clause.id,
                "kc.clause.metric": clause.metric,
                "kc.clause.statistic": clause.statistic_text,
                "kc.clause.unit": clause.limit_unit,
                "kc.clause.histogram": prometheus_name(clause.quantity) if clause.quantity else "",
                "kc.clause.promise": limitation(clause, tuple(contract.slices)),
            }
            metrics["kc.clause.info"].append(({**own, **said}, 1.0))
        factors = {name: scale_of(name, contract.assumptions) for name, metric in DERIVED.items() if metric.needs}
        metrics["kc.contract.factor"] += [
            ({**own, "kc.clause.metric": name}, factor) for name, factor in factors.items() if factor is not None
        ]
    return metrics


def _promotions(core: Core) -> dict[str, Series]:
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
    return {f"kc.promotion.{name}": _series("contract kernel.inference", found) for name, found in rows.items()}


def _places(core: Core) -> dict[str, Series]:
    """Return drift by position and turn of the kernels of incidents that last."""
    pairs = {
        (incident.contract, incident.kernel_train, incident.kernel_inference): core.by_place(incident)
        for incident in core.incidents()
        if incident.on == "fail"
    }
    return {
        f"kc.place.{name}": _series(
            "contract kernel.train kernel.inference slice",
            ((*of, place, getattr(interval, name)) for of, found in pairs.items() for place, interval in found.items()),
        )
        for name in ("estimate", "lower", "upper")
    }


def _routes(core: Core) -> Iterable[tuple[str, str, str, str, float]]:
    """Return where routers send each slice's requests instead of each version that has reported or is kept away."""
    for name, contract in core.contracts.items():
        kept = kept_since(core.decisions, name)
        versions = {kernel.version for kernel in core.evaluator.kernels(name) if kernel.role == "inference"}
        versions |= {route.avoid for route in core.decisions.routes if route.contract == name}
        versions |= {canary.version for canary in core.decisions.canaries if canary.contract == name}
        for slice in (ALL, *contract.slices):
            for version in sorted(versions or {""}):
                kernel = INFERENCE_KERNEL if kept(slice, version) is None else TRAIN_KERNEL
                yield name, slice, version, kernel, 1.0


class TelemetryExporter:
    """Exports the latest metrics once per export interval, and log records as they happen.

    The metrics at the start include every metric that there will ever be.
    """

    def __init__(self, metrics: SelfMetrics, *, environ: Mapping[str, str] = os.environ) -> None:
        self._latest = metrics
        self._stop: list[Callable[[], Any]] = []
        self._logger: Any = None
        configured = any(environ.get(name) for name in _ENDPOINTS)
        if configured and environ.get("OTEL_SDK_DISABLED", "").lower() != "true":
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
            return [Observation(value, dict(attributes)) for attributes, value in self._latest[name]]

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
