"""The evaluator's own metrics, read from the core when somebody asks: for `/metrics` and for OTLP alike."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from kc_otel._extras import extra
from kc_otel.contract.limits import scale_of
from kc_otel.contract.model import Contract
from kc_otel.contract.prometheus_names import label_name, prometheus_name
from kc_otel.contract.registry import DERIVED, METRICS, Instrument
from kc_otel.contract.registry import Metric as Described
from kc_otel.contract.sentences import limitation
from kc_otel.contract.slices import ALL
from kc_otel.judge.decisions.table import INFERENCE_KERNEL, TRAIN_KERNEL
from kc_otel.judge.incidents.incident import IncidentState
from kc_otel.judge.otlp.sink import DURATION_BOUNDS, Durations, RequestCounts
from kc_otel.judge.promotion.machine import share_of
from kc_otel.judge.promotion.promotion_state import PromotionStatus
from kc_otel.judge.verdict import Verdict
from kc_otel.serve.core import Core
from kc_otel.serve.otlp_out import SelfMetrics, Series

if TYPE_CHECKING:
    from collections import Counter

    from prometheus_client import Metric

__all__ = ["exposition", "free_space", "of_requests", "read"]


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


def read(core: Core, requests: RequestCounts, attempts: Counter[tuple[str, str]]) -> SelfMetrics:
    """Every metric of the registry that the evaluator emits, with its series; a bound that is not known has none."""
    verdicts = [verdict for verdict, _, _ in core.history.cells()]
    metrics: dict[str, Series] = {
        name: [(_cell(verdict), value) for verdict in verdicts if not math.isnan(value := float(of(verdict)))]
        for name, of in _OF_VERDICT.items()
    }
    metrics |= _promises(core.contracts.values())
    metrics["kc.verdict.since"] = [(_cell(verdict), since) for verdict, since, _ in core.history.cells()]
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
                "kc.contract": one.contract,
                "kc.incident": one.id,
                "kc.incident.on": one.on,
                "kc.kernel.train": one.kernel_train,
                "kc.kernel.inference": one.kernel_inference,
            },
            2.0 if one.state is IncidentState.BROKEN else 1.0,
        )
        for one in core.incidents()
    ]
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
    metrics |= of_requests("kc.evaluator", requests)
    metrics["kc.evaluator.series"] = [({}, core.evaluator.series_count)]
    metrics["kc.evaluator.series.limit"] = [
        ({}, sum(contract.observability.max_series for contract in core.contracts.values()))
    ]
    metrics["kc.evaluator.tick.duration"] = [({}, core.tick_seconds)]
    synced = core.sync_seconds
    metrics["kc.evaluator.sync.duration"] = [] if synced is None else [({}, synced)]
    evaluated = core.evaluated_at
    metrics["kc.evaluator.last_evaluation"] = [] if evaluated is None else [({}, evaluated)]
    log = core.log
    metrics["kc.evaluator.log.size"] = [] if log is None else [({}, log.end - log.first)]
    metrics["kc.evaluator.log.lag"] = [] if log is None else [({}, log.waiting + max(log.end - core.saved_position, 0))]
    metrics["kc.evaluator.disk.free"] = [] if log is None else free_space(log.folder)
    said = [({"kc.shard": str(one.number)}, one) for one in core.shards]
    metrics["kc.evaluator.shard.streams"] = [(of, one.health.streams) for of, one in said if one.health]
    metrics["kc.evaluator.shard.lag"] = [(of, one.waiting + one.health.lag) for of, one in said if one.health]
    failures = core.evaluator.faults.counts
    metrics["kc.evaluator.failures"] = [
        ({"kc.contract": name}, failures[name]) for name in sorted({*core.contracts, *failures})
    ]
    metrics["kc.outbox.pending"] = [({"kc.endpoint": one.endpoint}, one.waiting) for one in core.outbox.status()]
    metrics["kc.outbox.attempts"] = [
        ({"kc.endpoint": endpoint, "kc.outcome": outcome}, count)
        for (endpoint, outcome), count in sorted(attempts.items())
    ]
    return metrics


def of_requests(whose: str, requests: RequestCounts) -> dict[str, Series]:
    """Requests, how long they took, and what waits, under the names of who received them."""
    return {
        f"{whose}.requests": [
            ({"kc.transport": transport, "kc.outcome": outcome}, count)
            for (transport, outcome), count in sorted(requests.snapshot().items())
        ],
        f"{whose}.request.duration": [
            ({"kc.transport": transport, "kc.outcome": outcome}, found)
            for (transport, outcome), found in sorted(requests.durations().items())
        ],
        f"{whose}.waiting": [({}, requests.waiting())],
    }


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


def _family(name: str, series: Series) -> Metric:
    with extra("serve", "/metrics"):
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily  # noqa: PLC0415 - only for /metrics

    metric = METRICS[name]
    if metric.instrument is Instrument.HISTOGRAM:
        return _histogram(metric, series)
    kind = CounterMetricFamily if metric.instrument is Instrument.COUNTER else GaugeMetricFamily
    family: CounterMetricFamily | GaugeMetricFamily = kind(
        prometheus_name(metric).removesuffix("_total"),
        metric.meaning,
        labels=[label_name(attribute) for attribute in metric.attributes],
    )
    for attributes, value in series:
        if not isinstance(value, Durations):
            family.add_metric([attributes.get(attribute, "") for attribute in metric.attributes], value)
    return family


def _histogram(described: Described, series: Series) -> Metric:
    with extra("serve", "/metrics"):
        from prometheus_client.core import HistogramMetricFamily  # noqa: PLC0415 - only for /metrics

    names = [label_name(attribute) for attribute in described.attributes]
    family = HistogramMetricFamily(prometheus_name(described), described.meaning, labels=names)
    for attributes, value in series:
        if isinstance(value, Durations):
            counts = zip([*map(str, DURATION_BOUNDS), "+Inf"], accumulate(value.counts), strict=True)
            family.add_metric([attributes[one] for one in described.attributes], list(counts), value.sum)
    return family


def free_space(folder: Path) -> Series:
    """Bytes that a folder's disk has left."""
    try:
        return [({}, shutil.disk_usage(folder).free)]
    except OSError:  # a folder that is gone has none
        return []


def _cell(verdict: Verdict) -> Mapping[str, str]:
    cell = verdict.cell
    return {
        "kc.contract": cell.contract,
        "kc.clause": cell.clause,
        "kc.slice": cell.slice,
        "kc.kernel.train": cell.kernel_train,
        "kc.kernel.inference": cell.kernel_inference,
    }


def _promises(contracts: Iterable[Contract]) -> dict[str, Series]:
    """What contracts say, for boards that fit every contract: clauses in words, factors of bounds, heartbeats."""
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
    """Of versions that are on their way or were rolled back; one that was replaced has no stage any more."""
    metrics: dict[str, Series] = {"kc.promotion.stage": [], "kc.promotion.share": [], "kc.promotion.windows": []}
    for one in core.promotions.all():
        if one.status is PromotionStatus.REPLACED:
            continue
        where = {"kc.contract": one.contract, "kc.kernel.inference": one.version}
        share = share_of(one)
        back = one.status is PromotionStatus.ROLLED_BACK
        metrics["kc.promotion.stage"].append((where, -1 if back else one.position.rank[0]))
        metrics["kc.promotion.share"].append((where, 1.0 if share is None else share))
        metrics["kc.promotion.windows"].append((where, one.tally.passed))
    return metrics


def _routes(core: Core) -> Iterable[tuple[Mapping[str, str], float]]:
    for name, contract in core.contracts.items():
        avoided = {route.slice for route in core.decisions.routes if route.contract == name}
        for slice in (ALL, *contract.slices):
            kernel = TRAIN_KERNEL if {slice, ALL} & avoided else INFERENCE_KERNEL
            yield {"kc.contract": name, "kc.slice": slice, "kc.route.kernel": kernel}, 1.0
