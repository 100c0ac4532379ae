"""The evaluator's own metrics, read from the core when somebody asks: for `/metrics` and for OTLP alike.

Over OTLP go verdicts as gauges and transitions as log records, only when an endpoint is configured by OpenTelemetry's
own environment variables, so that an evaluator on a laptop does not call a Collector that is not there.
"""

from __future__ import annotations

import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping
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
from kc_otel.judge.incidents.incident import IncidentState
from kc_otel.judge.promotion.machine import share_of
from kc_otel.judge.promotion.stages import PromotionStatus
from kc_otel.judge.verdict import Verdict
from kc_otel.record.telemetry.environment import checking_answers
from kc_otel.serve.core import Core
from kc_otel.serve.event_log import Announcement, cell_attributes

if TYPE_CHECKING:
    from collections import Counter

    from opentelemetry.metrics import CallbackOptions, Observation
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
    verdicts = [(cell_attributes(verdict.cell), verdict, since) for verdict, since, _ in core.history.cells()]
    metrics: dict[str, Series] = {
        name: [(cell, value) for cell, verdict, _ in verdicts if not math.isnan(value := float(read_from(verdict)))]
        for name, read_from in _OF_VERDICT.items()
    }
    metrics |= _promises(core.contracts.values())
    metrics["kc.verdict.since"] = [(cell, since) for cell, _, since in verdicts]
    metrics["kc.alert.firing"] = [
        ({"kc.contract": contract, "kc.clause": clause, "kc.slice": slice, "kc.severity": severity}, 1.0)
        for contract, clause, slice, severity in core.firing()
    ]
    metrics["kc.action.active"] = [
        ({"kc.contract": contract, "kc.clause": clause, "kc.slice": slice, "kc.action": action}, 1.0)
        for contract, clause, slice, action in core.acting()
    ]
    metrics["kc.incident"] = [
        (
            {
                "kc.contract": incident.contract,
                "kc.incident": incident.id,
                "kc.incident.on": incident.on,
                "kc.kernel.train": incident.kernel_train,
                "kc.kernel.inference": incident.kernel_inference,
            },
            _STATE_CODES[IncidentState.UNPROVEN if core.fell_silent(incident) else incident.state],
        )
        for incident in core.incidents()
    ]
    metrics |= _places(core)
    metrics["kc.route"] = list(_routes(core))
    metrics |= _promotions(core)
    metrics["kc.train.step"] = [
        ({"kc.contract": contract, "kc.kernel.train": train, "kc.kernel.inference": inference}, step)
        for contract, steps in core.evaluator.steps.items()
        for (train, inference), step in sorted(steps.items())
    ]
    metrics["kc.evaluator.points"] = [
        ({"kc.outcome": outcome}, count) for outcome, count in sorted(core.evaluator.counters.items())
    ]
    metrics["kc.evaluator.missing"] = [
        (
            {
                "kc.contract": name,
                "kc.outcome": row.outcome,
                "kc.kernel.train": row.pair[0],
                "kc.kernel.inference": row.pair[1],
            },
            row.senders,
        )
        for name in core.contracts
        for row in core.missing(name)
    ]
    metrics["kc.evaluator.silent"] = [
        (
            {"kc.contract": name, "kc.kernel.inference": kernel.version},
            core.silent_recorders(name, kernel.version)[0],
        )
        for name in core.contracts
        for kernel in core.evaluator.kernels(name)
        if kernel.role == "inference"
    ]
    metrics["kc.evaluator.requests"] = [
        ({"kc.transport": transport, "kc.outcome": outcome}, count)
        for (transport, outcome), count in sorted(requests.items())
    ]
    metrics["kc.evaluator.in_flight"] = [({}, in_flight)]
    metrics["kc.evaluator.series"] = [({}, core.evaluator.series_count)]
    metrics["kc.evaluator.series.limit"] = [
        ({}, sum(contract.observability.max_series for contract in core.contracts.values()))
    ]
    metrics["kc.evaluator.tick.duration"] = [({}, core.tick_seconds)]
    committed = core.commit_seconds
    metrics["kc.evaluator.sync.duration"] = [] if committed is None else [({}, committed)]
    evaluated = core.evaluated_at
    metrics["kc.evaluator.last_evaluation"] = [] if evaluated is None else [({}, evaluated)]
    state = core.state_path
    metrics["kc.evaluator.inbox.size"] = [] if state is None else [({}, core.inbox.bytes)]
    metrics["kc.evaluator.disk.free"] = [] if state is None else free_space(state.parent)
    said = [({"kc.shard": str(shard.number)}, shard) for shard in core.shards if shard.answered]
    metrics["kc.evaluator.shard.streams"] = [(of, shard.streams) for of, shard in said]
    metrics["kc.evaluator.shard.lag"] = [(of, shard.waiting + shard.lag) for of, shard in said]
    failures = core.evaluator.faults.counts
    metrics["kc.evaluator.failures"] = [
        ({"kc.contract": name}, failures[name]) for name in sorted({*core.contracts, *failures})
    ]
    queues = [({"kc.endpoint": queue.endpoint}, queue) for queue in core.outbox.status()]
    metrics["kc.outbox.pending"] = [(of, queue.waiting) for of, queue in queues]
    metrics["kc.outbox.disabled"] = [(of, at) for of, queue in queues if (at := queue.disabled_at) is not None]
    metrics["kc.outbox.attempts"] = [
        ({"kc.endpoint": endpoint, "kc.outcome": outcome}, count)
        for (endpoint, outcome), count in sorted(attempts.items())
    ]
    return metrics


def exposition(metrics: SelfMetrics) -> bytes:
    """The Prometheus text format."""
    with extra("serve", "/metrics"):
        from prometheus_client import CollectorRegistry, generate_latest  # noqa: PLC0415 - only for /metrics
        from prometheus_client.registry import Collector  # noqa: PLC0415

    class _SelfMetrics(Collector):
        def collect(self) -> Iterable[Metric]:
            return [_family(name, series) for name, series in metrics.items()]

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_SelfMetrics())
    return generate_latest(registry)


def _family(name: str, series: Series) -> Any:
    with extra("serve", "/metrics"):
        from prometheus_client import core as families  # noqa: PLC0415 - only for /metrics

    metric = METRICS[name]
    counts = metric.instrument is Instrument.COUNTER
    kind: Any = families.CounterMetricFamily if counts else families.GaugeMetricFamily
    names = [label_name(attribute) for attribute in metric.attributes]
    family = kind(prometheus_name(metric).removesuffix("_total"), metric.meaning, labels=names)
    for attributes, value in series:
        family.add_metric([attributes.get(attribute, "") for attribute in metric.attributes], value)
    return family


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
    metrics: dict[str, Series] = {"kc.promotion.stage": [], "kc.promotion.share": [], "kc.promotion.windows": []}
    for promotion in core.promotions.all():
        if promotion.status is PromotionStatus.REPLACED:
            continue
        where = {"kc.contract": promotion.contract, "kc.kernel.inference": promotion.version}
        share = share_of(promotion)
        back = -1 if promotion.seen_serving is None else -2
        rolled = promotion.status is PromotionStatus.ROLLED_BACK
        metrics["kc.promotion.stage"].append((where, back if rolled else promotion.position.rank[0]))
        metrics["kc.promotion.share"].append((where, 1.0 if share is None else share))
        metrics["kc.promotion.windows"].append((where, promotion.tally.passed))
    return metrics


def _places(core: Core) -> dict[str, Series]:
    """Return drift by position and turn of the kernels of incidents that last."""
    metrics: dict[str, Series] = {f"kc.place.{name}": [] for name in ("estimate", "lower", "upper")}
    pairs = {
        (incident.contract, incident.kernel_train, incident.kernel_inference): incident
        for incident in core.incidents()
        if incident.on == "fail"
    }
    for (contract, train, inference), incident in pairs.items():
        pair = {"kc.contract": contract, "kc.kernel.train": train, "kc.kernel.inference": inference}
        for place, interval in core.by_place(incident).items():
            for name in ("estimate", "lower", "upper"):
                metrics[f"kc.place.{name}"].append(({**pair, "kc.slice": place}, getattr(interval, name)))
    return metrics


def _routes(core: Core) -> Iterable[tuple[Mapping[str, str], float]]:
    """Return where routers send each slice's requests instead of each version that has reported or is kept away."""
    for name, contract in core.contracts.items():
        kept = kept_since(core.decisions, name)
        versions = {kernel.version for kernel in core.evaluator.kernels(name) if kernel.role == "inference"}
        versions |= {route.avoid for route in core.decisions.routes if route.contract == name}
        versions |= {canary.version for canary in core.decisions.canaries if canary.contract == name}
        for slice in (ALL, *contract.slices):
            for version in sorted(versions or {""}):
                kernel = INFERENCE_KERNEL if kept(slice, version) is None else TRAIN_KERNEL
                where = {"kc.contract": name, "kc.slice": slice, "kc.kernel.inference": version}
                yield {**where, "kc.route.kernel": kernel}, 1.0


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
