"""Metrics of recorders, engines and evaluator beside the drift quantities, attributes, and all their Prometheus names.

A name in Prometheus, for `/metrics`, dashboards and rules alike, is OpenTelemetry's translation, except that unit `1`
adds no suffix: `_ratio` says nothing about a verdict.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from kc_otel.contract.registry.clause_metrics import Quantity
from kc_otel.contract.slices import ALL


class Instrument(StrEnum):
    """OpenTelemetry instrument that carries a metric."""

    EXPONENTIAL_HISTOGRAM = "exponential histogram"
    COUNTER = "counter"
    GAUGE = "gauge"


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric that is not a drift quantity: about the exporter, the evaluator or verdicts."""

    name: str
    unit: str
    instrument: Instrument
    attributes: tuple[str, ...]
    meaning: str


def _gauge(name: str, unit: str, attributes: tuple[str, ...], meaning: str) -> Metric:
    return Metric(name, unit, Instrument.GAUGE, attributes, meaning)


def _counter(name: str, unit: str, attributes: tuple[str, ...], meaning: str) -> Metric:
    return Metric(name, unit, Instrument.COUNTER, attributes, meaning)


_PAIR = ("kc.kernel.train", "kc.kernel.inference")
_CELL = ("kc.contract", "kc.clause", "kc.slice", *_PAIR)
_IN_WINDOW = (*_CELL, "kc.window")
_OF_CLAUSE = tuple(f"kc.clause.{name}" for name in ("metric", "statistic", "unit", "histogram", "promise"))
_STATISTIC = (("estimate", "point estimate"), ("lower", "lower confidence bound"), ("upper", "upper confidence bound"))

SENT_METRICS: Final = (
    _counter("kc.input.invalid", "{sequence}", ("kc.contract", "kc.reason", "kc.slice", *_PAIR),
        "Sequences that failed an input check and were not measured; with the reason `reward_out_of_range`, only the "
        "reward was ignored. Without `kc.slice` if their slices are unknown."),
    _counter("kc.recorder.tokens", "{token}", ("kc.contract",), "Tokens measured and recorded."),
    _counter("kc.recorder.prompts", "{prompt}", ("kc.contract", "kc.outcome"),
        "Prompts counted: `whole`; `part`, if rollouts arrived after the prompt had been counted, or too late; "
        "`assumed`, sequences that count as prompts because their prompts are unknown."),
    _counter("kc.recorder.dropped", "{batch}", ("kc.contract", "kc.reason"),
        "Batches not measured: the queue was full, or measuring failed."),
    _counter("kc.recorder.export.failures", "{export}", ("kc.contract",),
        "Exports that the endpoint did not accept, or of which it rejected points."),
    _gauge("kc.recorder.sampling", "1", ("kc.contract",), "Share of comparisons that are measured."),
    _counter("kc.quarantine.sequences", "{sequence}", ("kc.contract", "kc.outcome"),
        "Sequences that went through quarantine: `kept` for training, or `quarantined`."),
    _counter("kc.quarantine.tokens", "{token}", ("kc.contract", "kc.outcome"),
        "Tokens of those sequences, after masks."),
    _counter("kc.quarantine.tv", "1", ("kc.contract", "kc.outcome"),
        "Sum of (1-w)+ over those tokens: divided by kc.quarantine.tokens, it is tv_token of the kept or of the "
        "quarantined ones. Drift metrics include both."),
    _counter("kc.capture.recorded", "{request}", ("kc.contract",),
        "Sampled requests that an engine's instrumentation has written to its spool or handed to its recorder."),
    _counter("kc.capture.dropped", "{request}", ("kc.contract", "kc.reason"),
        "Sampled requests that an engine's instrumentation or its spool did not keep."),
    _gauge("kc.kernel.info", "1", ("kc.contract", "kc.kernel.role", "kc.kernel.version"),
        "1, and 0 once its recorder has shut down or records another version; its attributes are the fields of the "
        "kernel version's fingerprint."),
    _gauge("kc.train.step", "{step}", ("kc.contract", *_PAIR),
        "Training step of a pair's newest measurement, if weight versions are counted in steps; the horizontal axis of "
        "charts over steps."),
)  # fmt: skip
_METRICS: Final = (
    *SENT_METRICS,
    _gauge("kc.clause.info", "1", ("kc.contract", "kc.clause", *_OF_CLAUSE),
        "Always 1; its attributes say what a clause limits."),
    _gauge("kc.contract.factor", "1", ("kc.contract", "kc.clause.metric"),
        "Factor from the mean of a quantity to a metric derived from it, by the contract's assumptions."),
    _gauge("kc.contract.heartbeat", "s", ("kc.contract",), "Silence after which the contract's cells have no data."),
    _gauge("kc.verdict", "1", _CELL, "Verdict of a cell: 0 PASS, 1 INCONCLUSIVE, 2 NO_DATA, 3 FAIL, 4 INVALID_INPUT."),
    _gauge("kc.verdict.since", "s", _CELL, "Unix time since which a cell has had its verdict."),
    _gauge("kc.verdict.no_traffic", "1", _CELL,
        "1 for a cell without data whose requests are kept from the kernel, as ordered, or are all greedy or masked: "
        "its silence is no alert."),
    _gauge("kc.verdict.evidence", "1", _CELL,
        "Evidence against a cell's limit, 0 to 1: chance alone reaches 1 in some cell of the contract on average at "
        "most once per observability.false_alarms."),
    *(
        _gauge(f"kc.bound.{name}", "1", _CELL, f"{meaning.capitalize()} of a clause's statistic.")
        for name, meaning in _STATISTIC
    ),
    _gauge("kc.bound.limit", "1", _CELL, "Limit that the contract sets."),
    _gauge("kc.bound.margin", "1", _CELL,
        "Limit minus the bound that decided the verdict, the lower one on FAIL; negative beyond the limit."),
    _gauge("kc.bound.samples", "1", _CELL, "Observations that the verdict rests on."),
    Metric("kc.rule.window.histogram", "1", Instrument.EXPONENTIAL_HISTOGRAM, _IN_WINDOW,
        "Recording rule: observations in a window, by cell."),
    _gauge("kc.rule.window.samples", "1", _IN_WINDOW, "Recording rule: lower bound on the observations in a window."),
    *(
        _gauge(f"kc.rule.window.{name}", "1", _IN_WINDOW,
            f"Recording rule: {meaning} of a clause's statistic from one window.")
        for name, meaning in _STATISTIC
    ),
    _gauge("kc.rule.window.status", "1", _IN_WINDOW,
        "Recording rule: verdict of one window, with the codes of kc.verdict."),
    _gauge("kc.rule.status", "1", _CELL,
        "Recording rule: verdict of a cell without the evaluator, with the codes of kc.verdict."),
    *(
        _gauge(f"kc.rule.{name}", "1", _CELL, f"Recording rule: {meaning} of a clause's statistic.")
        for name, meaning in _STATISTIC
    ),
    _gauge("kc.rule.limit", "1", _CELL, "Recording rule: limit that the contract sets."),
    _gauge("kc.rule.samples", "1", _CELL, "Recording rule: lower bound on the observations that the verdict rests on."),
    _gauge("kc.alert.firing", "1", ("kc.contract", "kc.clause", "kc.slice", "kc.severity"),
        "1 while a step of the escalation policy fires."),
    _gauge("kc.route", "1", ("kc.contract", "kc.slice", "kc.kernel.inference", "kc.route.kernel"),
        "1 for the kernel that the decision table chooses for those requests of a slice that this version would "
        "serve."),
    _gauge("kc.action.active", "1", ("kc.contract", "kc.clause", "kc.slice", "kc.action"),
        "1 for each action of a firing step of the escalation policy; none for a route that a person has lifted."),
    _gauge("kc.incident", "1", ("kc.contract", "kc.incident", "kc.incident.on", *_PAIR),
        "An open incident: 2 while it is broken, 1 while it is contained, 0 a window after it went away without proof "
        "of recovery; no value once it is over and only its route remains."),
    *(
        _gauge(f"kc.place.{name}", "1", ("kc.contract", "kc.slice", *_PAIR),
            f"{meaning.capitalize()} of the mean of kc.drift.tv_place, while an incident of these kernels is open.")
        for name, meaning in _STATISTIC
    ),
    _gauge("kc.promotion.stage", "1", ("kc.contract", "kc.kernel.inference"),
        "Stage of a kernel version: -2 rolled back and measured after that, -1 rolled back, 0 offline-ci, 1 shadow, 2 "
        "canary, 3 full."),
    _gauge("kc.promotion.since", "s", ("kc.contract", "kc.kernel.inference"),
        "Unix time since which a version of the inference kernel is in its stage, or rolled back."),
    _gauge("kc.promotion.share", "1", ("kc.contract", "kc.kernel.inference"),
        "Share of the requests that a kernel version may serve, 0 to 1."),
    _gauge("kc.promotion.windows", "{window}", ("kc.contract", "kc.kernel.inference"),
        "Consecutive windows of PASS that a kernel version has shown in its stage."),
    _counter("kc.evaluator.points", "{point}", ("kc.outcome",), "Metric data points received, by outcome."),
    _gauge("kc.evaluator.missing", "{sender}", ("kc.contract", "kc.outcome", *_PAIR),
        "Senders whose points arrived within a window and are not judged, by outcome of the points."),
    _gauge("kc.evaluator.silent", "{recorder}", ("kc.contract", "kc.kernel.inference"),
        "Recorders that fell silent without shutting down, within the long window, while other recorders of the kernel "
        "report."),
    _counter("kc.evaluator.requests", "{request}", ("kc.transport", "kc.outcome"),
        "OTLP requests received, by transport and outcome; with transport `api`, rejected actions."),
    _gauge("kc.evaluator.in_flight", "By", (), "Bytes of OTLP requests that have arrived and are not answered yet."),
    _gauge("kc.evaluator.series", "{series}", (), "Streams that the evaluator keeps state for."),
    _gauge("kc.evaluator.series.limit", "{series}", (), "Streams that the contracts together allow."),
    _gauge("kc.evaluator.tick.duration", "s", (), "Time that the last evaluation of every cell took."),
    _gauge("kc.evaluator.sync.duration", "s", (),
        "Time that the disk took for the last commit; acknowledgements, webhooks, decisions and answers to manual "
        "actions wait for it."),
    _gauge("kc.evaluator.inbox.size", "By", (),
        "Bytes received that are not in a snapshot yet: they wait for the disk, or are in the state file's inbox."),
    _gauge("kc.evaluator.disk.free", "By", (), "Free bytes on the disk of the state file."),
    _gauge("kc.evaluator.shard.streams", "{stream}", ("kc.shard",),
        "Streams that a shard of a Ray cluster keeps state for."),
    _gauge("kc.evaluator.shard.lag", "By", ("kc.shard",),
        "Bytes received that wait for a shard, its disk or the judge."),
    _gauge("kc.evaluator.last_evaluation", "s", ("kc.contract",),
        "Unix time of the last evaluation of a contract, at which its verdicts were computed."),
    _counter("kc.evaluator.failures", "{failure}", ("kc.contract",),
        "Cells or contracts that the evaluator failed to judge; without `kc.contract` if all failed together."),
    _gauge("kc.outbox.pending", "{message}", ("kc.endpoint",), "Webhook messages that wait to be delivered."),
    _gauge("kc.outbox.disabled", "s", ("kc.endpoint",),
        "Unix time at which an endpoint answered HTTP 410; nothing is sent to it until its credential file "
        "changes or the evaluator restarts."),
    _counter("kc.outbox.attempts", "{attempt}", ("kc.endpoint", "kc.outcome"), "Webhook deliveries tried, by outcome."),
)  # fmt: skip

METRICS: Final[dict[str, Metric]] = {m.name: m for m in _METRICS}


@dataclass(frozen=True, slots=True)
class Attribute:
    """An attribute of metrics, spans or log records."""

    name: str
    meaning: str
    on: tuple[str, ...] = ("metric",)


_ATTRIBUTES: Final = (
    Attribute("kc.contract", "metadata.name of the contract.", ("metric", "span", "log")),
    Attribute("kc.contract.version", "metadata.version of the contract.", ("span", "log", "scope")),
    Attribute("kc.contract.slices",
        "Slices of the contract that a recorder applies, each with a digest of its conditions: `code=1f3a9c02`.",
        ("scope",)),
    Attribute("kc.contract.quantities", "Digests of what the clauses of the contract measure that a recorder applies.",
        ("scope",)),
    Attribute("kc.contract.hash", "Content hash of the contract.", ("span", "log")),
    Attribute("kc.clause", "id of a clause.", ("metric", "log")),
    Attribute("kc.clause.metric", "Metric that a clause limits, as the contract writes it."),
    Attribute("kc.clause.statistic", "Statistic of that metric, such as mean or p99.9."),
    Attribute("kc.clause.unit", "UCUM unit of the clause's limit and bounds."),
    Attribute("kc.clause.histogram", "Name in Prometheus of the drift histogram that a clause is judged by."),
    Attribute("kc.clause.promise", "What a clause allows, in words."),
    Attribute("kc.incident", "id of an incident, twelve hex digits."),
    Attribute("kc.incident.on", "Kind of the incident: `fail`, `no-data`, `inconclusive` or `invalid-input`."),
    Attribute("kc.window", "`short` or `long`: the window that a recording rule covers."),
    Attribute("kc.slice",
        "Name of a slice; `all` for every token, `other` for streams beyond max_series; on kc.drift.tv_place and "
        "kc.place.* the place in the responses, such as position:64 or turn:2."),
    Attribute("kc.kernel.train", "Short fingerprint of the training kernel's version.", ("metric", "span", "log")),
    Attribute("kc.kernel.inference", "Short fingerprint of the inference kernel's version.", ("metric", "span", "log")),
    Attribute("kc.kernel.role", "`train` or `inference`."),
    Attribute("kc.kernel.version", "Short fingerprint of a kernel version."),
    Attribute("kc.kernel.engine", "Program that evaluates the policy, on kc.kernel.info."),
    Attribute("kc.kernel.engine.version", "Version of that program, on kc.kernel.info."),
    Attribute("kc.kernel.dtype", "Number format of weights and activations, on kc.kernel.info."),
    Attribute("kc.kernel.quantization", "Quantisation method, on kc.kernel.info."),
    Attribute("kc.kernel.kv_cache_dtype", "Number format of the KV cache, on kc.kernel.info."),
    Attribute("kc.kernel.attention", "Attention backend, on kc.kernel.info."),
    Attribute("kc.kernel.parallelism", "How the model is split over devices, on kc.kernel.info."),
    Attribute("kc.kernel.compile", "Compilation mode or flags, on kc.kernel.info."),
    Attribute("kc.kernel.hardware", "Device that the kernel runs on, on kc.kernel.info."),
    Attribute("kc.severity", "Severity of an escalation step.", ("metric", "log")),
    Attribute("kc.operator",
        "Name of an operator: attention, a norm, a matrix product, a router; on kc.drift.operator_* and "
        "kc.drift.route_disagreement."),
    Attribute("kc.action",
        "Action of an escalation step as the contract writes it, such as hold-promotion, webhook:pager."),
    Attribute("kc.reason", "Reason for a rejection or a drop."),
    Attribute("kc.outcome", "Outcome, such as `accepted`, `whole` or `kept`."),
    Attribute("kc.transport", "`grpc` or `http`."),
    Attribute("kc.endpoint", "Name of a webhook endpoint."),
    Attribute("kc.shard", "Number of a shard, from 0."),
    Attribute("kc.route.kernel", "`train-kernel` or `inference-kernel`."),
    Attribute("kc.verdict.status", "PASS, FAIL, INCONCLUSIVE, NO_DATA or INVALID_INPUT.", ("log",)),
    Attribute("kc.compare.sequences", "Sequences in a measured batch.", ("span",)),
    Attribute("kc.compare.tokens", "Tokens in a measured batch, after masks.", ("span",)),
    Attribute("kc.compare.slices", "Slices that the batch has sequences of.", ("span",)),
    Attribute("kc.compare.tv_token", "Mean (1-w)+ of the batch.", ("span",)),
    Attribute("kc.compare.worst.abs_log_ratio", "Largest |l| of the batch.", ("span",)),
    Attribute("kc.compare.worst.sequence", "Row of the token with the largest |l|.", ("span",)),
    Attribute("kc.compare.worst.position", "Position of that token in its row.", ("span",)),
    Attribute("kc.compare.worst.token_id", "Id of that token, when token ids are given.", ("span",)),
    Attribute("kc.weights.train", "Weight version of the training kernel.", ("span",)),
    Attribute("kc.weights.inference",
        "Weight version of the inference kernel; several, joined by commas, if an update arrived during sampling.",
        ("span",)),
)  # fmt: skip

ATTRIBUTES: Final[dict[str, Attribute]] = {a.name: a for a in _ATTRIBUTES}


_SUFFIXES: Final = {"s": "_seconds", "By": "_bytes"}


def prometheus_name(metric: Metric | Quantity) -> str:
    """Prometheus name of a metric: dots to underscores, the unit's suffix, `_total` for counters."""
    total = "_total" * (isinstance(metric, Metric) and metric.instrument is Instrument.COUNTER)
    return f"{metric.name.replace('.', '_')}{_SUFFIXES.get(metric.unit, '')}{total}"


def metric(name: str) -> str:
    """Prometheus name of the registry's metric of this OpenTelemetry name; KeyError if there is none."""
    return prometheus_name(METRICS[name])


def label(name: str) -> str:
    """Prometheus label of the registry's attribute of this name, `kc_slice` for kc.slice; KeyError if there is none."""
    return ATTRIBUTES[name].name.replace(".", "_")


def selector(name: str, matchers: Mapping[str, str] | None = None, *more: str) -> str:
    """A PromQL selector of a registry metric: attributes with their values, and further matchers in PromQL."""
    parts = [f'{label(attribute)}="{value}"' for attribute, value in (matchers or {}).items()]
    return f"{metric(name)}{{{', '.join((*parts, *more))}}}"


INVALID_ONCE: Final = f'{label("kc.slice")}=~"{ALL}|"'
"""Matcher of `kc.input.invalid` that counts each sequence once: on all traffic, or where nobody knows its slices."""
