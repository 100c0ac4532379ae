"""The evaluator's own metrics, read from the core when somebody asks: for `/metrics` and for OTLP alike."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kc_otel._extras import extra
from kc_otel.contract.limits import scale_of
from kc_otel.contract.model import Contract
from kc_otel.contract.prometheus_names import label_name, prometheus_name
from kc_otel.contract.registry.clause_metrics import DERIVED
from kc_otel.contract.registry.own_metrics import METRICS
from kc_otel.contract.registry.sent_metrics import Instrument
from kc_otel.contract.sentences import limitation
from kc_otel.contract.slices import ALL
from kc_otel.judge.decisions import INFERENCE_KERNEL, TRAIN_KERNEL, kept_since
from kc_otel.judge.incidents.incident import IncidentState
from kc_otel.judge.otlp.sink import DURATION_BOUNDS, Durations, RequestCounts
from kc_otel.judge.promotion.machine import share_of
from kc_otel.judge.promotion.stages import PromotionStatus
from kc_otel.judge.verdict import Verdict
from kc_otel.serve.core import Core
from kc_otel.serve.otlp_out import SelfMetrics, Series

if TYPE_CHECKING:
    from collections import Counter

    from prometheus_client import Metric

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
    metrics["kc.evaluator.requests"] = [(_of_request(*of), count) for of, count in sorted(requests.snapshot().items())]
    metrics["kc.evaluator.request.duration"] = [
        (_of_request(*of), found) for of, found in sorted(requests.durations().items())
    ]
    metrics["kc.evaluator.in_flight"] = [({}, requests.in_flight())]
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
    kind: Any = {
        Instrument.HISTOGRAM: families.HistogramMetricFamily,
        Instrument.COUNTER: families.CounterMetricFamily,
    }.get(metric.instrument, families.GaugeMetricFamily)
    names = [label_name(attribute) for attribute in metric.attributes]
    family = kind(prometheus_name(metric).removesuffix("_total"), metric.meaning, labels=names)
    for attributes, value in series:
        labels: list[str] = [attributes.get(attribute, "") for attribute in metric.attributes]
        if isinstance(value, Durations):
            counts = zip([*map(str, DURATION_BOUNDS), "+Inf"], accumulate(value.counts), strict=True)
            family.add_metric(labels, list(counts), value.sum)
        else:
            family.add_metric(labels, value)
    return family


def free_space(folder: Path) -> Series:
    """Bytes that a folder's disk has left."""
    try:
        return [({}, shutil.disk_usage(folder).free)]
    except OSError:  # a folder that is gone has none
        return []


def _of_request(transport: str, outcome: str) -> Mapping[str, str]:
    return {"kc.transport": transport, "kc.outcome": outcome}


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
