"""Metrics of recorder and evaluator about themselves and about verdicts; drift quantities are elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kc_otel.contract.registry.sent_metrics import SENT_METRICS, Instrument, Metric

_CELL = ("kc.contract", "kc.clause", "kc.slice", "kc.kernel.train", "kc.kernel.inference")

_IN_WINDOW = (*_CELL, "kc.window")
_STATISTIC = (("estimate", "point estimate"), ("lower", "lower confidence bound"), ("upper", "upper confidence bound"))

_METRICS: Final = (
    *SENT_METRICS,
    Metric(
        "kc.clause.info", "1", Instrument.GAUGE,
        ("kc.contract", "kc.clause", "kc.clause.metric", "kc.clause.statistic", "kc.clause.unit",
         "kc.clause.histogram", "kc.clause.promise"),
        "Always 1; its attributes say what a clause limits.",
    ),
    Metric(
        "kc.contract.factor", "1", Instrument.GAUGE, ("kc.contract", "kc.clause.metric"),
        "Factor from the mean of a quantity to a metric derived from it, by the contract's assumptions.",
    ),
    Metric(
        "kc.contract.heartbeat", "s", Instrument.GAUGE, ("kc.contract",),
        "Silence after which the contract's cells have no data.",
    ),
    Metric(
        "kc.verdict", "1", Instrument.GAUGE, _CELL,
        "Verdict of a cell: 0 PASS, 1 INCONCLUSIVE, 2 NO_DATA, 3 FAIL, 4 INVALID_INPUT.",
    ),
    Metric("kc.verdict.since", "s", Instrument.GAUGE, _CELL, "Unix time since which a cell has had its verdict."),
    Metric(
        "kc.verdict.evidence", "1", Instrument.GAUGE, _CELL,
        "Evidence against a cell's limit, 0 to 1: chance alone reaches 1 in some cell of the contract on average at "
        "most once per observability.false_alarms.",
    ),
    *(
        Metric(f"kc.bound.{name}", "1", Instrument.GAUGE, _CELL, f"{meaning.capitalize()} of a clause's statistic.")
        for name, meaning in _STATISTIC
    ),
    Metric("kc.bound.limit", "1", Instrument.GAUGE, _CELL, "Limit that the contract sets."),
    Metric(
        "kc.bound.margin", "1", Instrument.GAUGE, _CELL,
        "Limit minus the bound that decided the verdict, the lower one on FAIL; negative beyond the limit.",
    ),
    Metric("kc.bound.samples", "1", Instrument.GAUGE, _CELL, "Observations that the verdict rests on."),
    Metric(
        "kc.rule.window.histogram", "1", Instrument.EXPONENTIAL_HISTOGRAM, _IN_WINDOW,
        "Recording rule: observations in a window, by cell.",
    ),
    Metric(
        "kc.rule.window.samples", "1", Instrument.GAUGE, _IN_WINDOW,
        "Recording rule: lower bound on the observations in a window.",
    ),
    *(
        Metric(
            f"kc.rule.window.{name}", "1", Instrument.GAUGE, _IN_WINDOW,
            f"Recording rule: {meaning} of a clause's statistic from one window.",
        )
        for name, meaning in _STATISTIC
    ),
    Metric(
        "kc.rule.window.status", "1", Instrument.GAUGE, _IN_WINDOW,
        "Recording rule: verdict of one window, with the codes of kc.verdict.",
    ),
    Metric(
        "kc.rule.status", "1", Instrument.GAUGE, _CELL,
        "Recording rule: verdict of a cell without the evaluator, with the codes of kc.verdict.",
    ),
    *(
        Metric(f"kc.rule.{name}", "1", Instrument.GAUGE, _CELL, f"Recording rule: {meaning} of a clause's statistic.")
        for name, meaning in _STATISTIC
    ),
    Metric("kc.rule.limit", "1", Instrument.GAUGE, _CELL, "Recording rule: limit that the contract sets."),
    Metric(
        "kc.rule.samples", "1", Instrument.GAUGE, _CELL,
        "Recording rule: lower bound on the observations that the verdict rests on.",
    ),
    Metric(
        "kc.alert.firing", "1", Instrument.GAUGE, ("kc.contract", "kc.clause", "kc.slice", "kc.severity"),
        "1 while a step of the escalation policy fires.",
    ),
    Metric(
        "kc.route", "1", Instrument.GAUGE, ("kc.contract", "kc.slice", "kc.kernel.inference", "kc.route.kernel"),
        "1 for the kernel that the decision table chooses for those requests of a slice that this version would serve.",
    ),
    Metric(
        "kc.action.active", "1", Instrument.GAUGE, ("kc.contract", "kc.clause", "kc.slice", "kc.action"),
        "1 for each action of a firing step of the escalation policy.",
    ),
    Metric(
        "kc.incident", "1", Instrument.GAUGE,
        ("kc.contract", "kc.incident", "kc.incident.on", "kc.kernel.train", "kc.kernel.inference"),
        "An open incident: 2 while it is broken, 1 while it is contained, 0 once it has gone away without proof of "
        "recovery.",
    ),
    *(
        Metric(
            f"kc.place.{name}", "1", Instrument.GAUGE,
            ("kc.contract", "kc.slice", "kc.kernel.train", "kc.kernel.inference"),
            f"{meaning.capitalize()} of the mean of kc.drift.tv_place, while an incident of these kernels is open.",
        )
        for name, meaning in _STATISTIC
    ),
    Metric(
        "kc.promotion.stage", "1", Instrument.GAUGE, ("kc.contract", "kc.kernel.inference"),
        "Stage of a kernel version: -2 rolled back and measured after that, -1 rolled back, 0 offline-ci, 1 shadow, "
        "2 canary, 3 full.",
    ),
    Metric(
        "kc.promotion.share", "1", Instrument.GAUGE, ("kc.contract", "kc.kernel.inference"),
        "Share of the requests that a kernel version may serve, 0 to 1.",
    ),
    Metric(
        "kc.promotion.windows", "{window}", Instrument.GAUGE, ("kc.contract", "kc.kernel.inference"),
        "Consecutive windows of PASS that a kernel version has shown in its stage.",
    ),
    Metric(
        "kc.evaluator.points", "{point}", Instrument.COUNTER, ("kc.outcome",),
        "Metric data points received, by outcome.",
    ),
    Metric(
        "kc.evaluator.missing", "{sender}", Instrument.GAUGE,
        ("kc.contract", "kc.outcome", "kc.kernel.train", "kc.kernel.inference"),
        "Senders whose points arrived within a window and are not judged, by outcome of the points.",
    ),
    Metric(
        "kc.evaluator.silent", "{recorder}", Instrument.GAUGE, ("kc.contract", "kc.kernel.inference"),
        "Recorders that fell silent without shutting down, within the long window, while other recorders of the "
        "kernel report.",
    ),
    Metric(
        "kc.evaluator.requests", "{request}", Instrument.COUNTER, ("kc.transport", "kc.outcome"),
        "OTLP requests received, by transport and outcome; with transport `api`, rejected actions.",
    ),
    Metric(
        "kc.evaluator.in_flight", "By", Instrument.GAUGE, (),
        "Bytes of OTLP requests that have arrived and are not answered yet.",
    ),
    Metric("kc.evaluator.series", "{series}", Instrument.GAUGE, (), "Streams that the evaluator keeps state for."),
    Metric(
        "kc.evaluator.series.limit", "{series}", Instrument.GAUGE, (),
        "Streams that the contracts together allow.",
    ),
    Metric(
        "kc.evaluator.tick.duration", "s", Instrument.GAUGE, (),
        "Time that the last evaluation of every cell took.",
    ),
    Metric(
        "kc.evaluator.sync.duration", "s", Instrument.GAUGE, (),
        "Time that the disk took for the last commit; acknowledgements, webhooks, decisions and answers to manual "
        "actions wait for it.",
    ),
    Metric(
        "kc.evaluator.inbox.size", "By", Instrument.GAUGE, (),
        "Bytes received that are not in a snapshot yet: they wait for the disk, or are in the state file's inbox.",
    ),
    Metric(
        "kc.evaluator.disk.free", "By", Instrument.GAUGE, (),
        "Free bytes on the disk of the state file.",
    ),
    Metric(
        "kc.evaluator.shard.streams", "{stream}", Instrument.GAUGE, ("kc.shard",),
        "Streams that a shard of a Ray cluster keeps state for.",
    ),
    Metric(
        "kc.evaluator.shard.lag", "By", Instrument.GAUGE, ("kc.shard",),
        "Bytes received that wait for a shard, its disk or the judge.",
    ),
    Metric(
        "kc.evaluator.last_evaluation", "s", Instrument.GAUGE, (),
        "Unix time of the last evaluation, at which every verdict was computed.",
    ),
    Metric(
        "kc.evaluator.failures", "{failure}", Instrument.COUNTER, ("kc.contract",),
        "Cells or contracts that the evaluator failed to judge; without `kc.contract` if all failed together.",
    ),
    Metric(
        "kc.outbox.pending", "{message}", Instrument.GAUGE, ("kc.endpoint",),
        "Webhook messages that wait to be delivered.",
    ),
    Metric(
        "kc.outbox.disabled", "s", Instrument.GAUGE, ("kc.endpoint",),
        "Unix time at which an endpoint answered HTTP 410; nothing is sent to it until its credential file "
        "changes or the evaluator restarts.",
    ),
    Metric(
        "kc.outbox.attempts", "{attempt}", Instrument.COUNTER, ("kc.endpoint", "kc.outcome"),
        "Webhook deliveries tried, by outcome.",
    ),
)  # fmt: skip

METRICS: Final[dict[str, Metric]] = {m.name: m for m in _METRICS}


@dataclass(frozen=True, slots=True)
class Attribute:
    """An attribute of metrics, spans or log records, of one of OpenTelemetry's types."""

    name: str
    meaning: str
    on: tuple[str, ...] = ("metric",)
    type: str = "string"


_ATTRIBUTES: Final = (
    Attribute("kc.contract", "metadata.name of the contract.", ("metric", "span", "log")),
    Attribute("kc.contract.version", "metadata.version of the contract.", ("span", "log", "scope"), "int"),
    Attribute(
        "kc.contract.slices",
        "Slices of the contract that a recorder applies, each with a digest of its conditions: `code=1f3a9c02`.",
        ("scope",),
        "string[]",
    ),
    Attribute(
        "kc.contract.quantities",
        "Digests of what the clauses of the contract measure that a recorder applies.",
        ("scope",),
        "string[]",
    ),
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
    Attribute(
        "kc.slice",
        "Name of a slice; `all` for every token, `other` for streams beyond max_series; on kc.drift.tv_place and "
        "kc.place.* the place in the responses, such as position:64 or turn:2.",
    ),
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
    Attribute(
        "kc.operator", "Name of an operator: attention, a norm, a matrix product, a router; on kc.drift.operator_* "
        "and kc.drift.route_disagreement.",
    ),
    Attribute(
        "kc.action", "Action of an escalation step as the contract writes it, such as hold-promotion, webhook:pager.",
    ),
    Attribute("kc.reason", "Reason for a rejection or a drop."),
    Attribute("kc.outcome", "Outcome, such as `accepted`, `whole` or `kept`."),
    Attribute("kc.transport", "`grpc` or `http`."),
    Attribute("kc.endpoint", "Name of a webhook endpoint."),
    Attribute("kc.shard", "Number of a shard, from 0."),
    Attribute("kc.route.kernel", "`train-kernel` or `inference-kernel`."),
    Attribute("kc.verdict.status", "PASS, FAIL, INCONCLUSIVE, NO_DATA or INVALID_INPUT.", ("log",)),
    Attribute("kc.compare.sequences", "Sequences in a measured batch.", ("span",), "int"),
    Attribute("kc.compare.tokens", "Tokens in a measured batch, after masks.", ("span",), "int"),
    Attribute("kc.compare.slices", "Slices that the batch has sequences of.", ("span",), "string[]"),
    Attribute(
        "kc.compare.straddling", "Sequences with tokens of several weight versions, where these are known.", ("span",),
        "int",
    ),
    Attribute("kc.compare.tv_token", "Mean (1-w)+ of the batch.", ("span",), "double"),
    Attribute("kc.compare.worst.abs_log_ratio", "Largest |l| of the batch.", ("span",), "double"),
    Attribute("kc.compare.worst.sequence", "Row of the token with the largest |l|.", ("span",), "int"),
    Attribute("kc.compare.worst.position", "Position of that token in its row.", ("span",), "int"),
    Attribute("kc.compare.worst.token_id", "Id of that token, when token ids are given.", ("span",), "int"),
    Attribute("kc.weights.train", "Weight version of the training kernel.", ("span",)),
    Attribute(
        "kc.weights.inference",
        "Weight version of the inference kernel; several, joined by commas, if an update arrived during "
        "sampling.", ("span",),
    ),
)  # fmt: skip

ATTRIBUTES: Final[dict[str, Attribute]] = {a.name: a for a in _ATTRIBUTES}
