"""What recorder and evaluator say of themselves and of verdicts, in other metrics than drift quantities."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

__all__ = ["METRICS", "Instrument", "Metric"]


class Instrument(StrEnum):
    """OpenTelemetry instrument that carries a metric."""

    EXPONENTIAL_HISTOGRAM = "exponential histogram"
    HISTOGRAM = "histogram"
    COUNTER = "counter"
    GAUGE = "gauge"


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric that is not a drift quantity: what the exporter and the evaluator say of themselves and of verdicts."""

    name: str
    unit: str
    instrument: Instrument
    attributes: tuple[str, ...]
    meaning: str


_CELL = ("kc.contract", "kc.clause", "kc.slice", "kc.kernel.train", "kc.kernel.inference")

_IN_WINDOW = (*_CELL, "kc.window")

_METRICS: Final = (
    Metric(
        "kc.input.invalid", "{sequence}", Instrument.COUNTER, ("kc.contract", "kc.reason"),
        "Sequences that failed an input check and were therefore not measured; of those with the reason "
        "`reward_out_of_range` the reward alone was not used.",
    ),
    Metric(
        "kc.recorder.tokens", "{token}", Instrument.COUNTER, ("kc.contract",),
        "Tokens measured and recorded.",
    ),
    Metric(
        "kc.recorder.dropped", "{batch}", Instrument.COUNTER, ("kc.contract", "kc.reason"),
        "Batches not measured: the queue was full, or measuring failed.",
    ),
    Metric(
        "kc.recorder.export.failures", "{export}", Instrument.COUNTER, ("kc.contract",),
        "Exports that the endpoint did not accept.",
    ),
    Metric(
        "kc.recorder.sampling", "1", Instrument.GAUGE, ("kc.contract",),
        "Share of comparisons that are measured.",
    ),
    Metric(
        "kc.quarantine.sequences", "{sequence}", Instrument.COUNTER, ("kc.contract", "kc.outcome"),
        "Sequences that went through quarantine: `kept` for training, or `quarantined`.",
    ),
    Metric(
        "kc.quarantine.tokens", "{token}", Instrument.COUNTER, ("kc.contract", "kc.outcome"),
        "Tokens of those sequences, after masks.",
    ),
    Metric(
        "kc.quarantine.tv", "1", Instrument.COUNTER, ("kc.contract", "kc.outcome"),
        "Sum of (1-w)+ over those tokens: divided by kc.quarantine.tokens, tv_token of what is trained on and of what "
        "is not. Drift metrics are of both together.",
    ),
    Metric(
        "kc.capture.recorded", "{request}", Instrument.COUNTER, ("kc.contract",),
        "Sampled requests that an engine's instrumentation has written to its spool or handed to its recorder.",
    ),
    Metric(
        "kc.capture.dropped", "{request}", Instrument.COUNTER, ("kc.contract", "kc.reason"),
        "Sampled requests that an engine's instrumentation or its spool did not keep.",
    ),
    Metric(
        "kc.kernel.info", "1", Instrument.GAUGE, ("kc.contract", "kc.kernel.role", "kc.kernel.version"),
        "Always 1; its attributes spell out the kernel version's fingerprint.",
    ),
    Metric(
        "kc.train.step", "{step}", Instrument.GAUGE, ("kc.contract", "kc.kernel.train", "kc.kernel.inference"),
        "Trainer's step of what a pair of kernels was measured on last, where weight versions are counted in steps: "
        "what the history of a training run is drawn against in the place of time.",
    ),
    Metric(
        "kc.clause.info", "1", Instrument.GAUGE,
        ("kc.contract", "kc.clause", "kc.clause.metric", "kc.clause.statistic", "kc.clause.unit",
         "kc.clause.histogram", "kc.clause.promise"),
        "Always 1; its attributes say what a clause limits.",
    ),
    Metric(
        "kc.contract.factor", "1", Instrument.GAUGE, ("kc.contract", "kc.clause.metric"),
        "What the mean of a quantity is multiplied by for a metric that is derived from it, by the contract's "
        "assumptions.",
    ),
    Metric(
        "kc.contract.heartbeat", "s", Instrument.GAUGE, ("kc.contract",),
        "Silence after which the contract's cells have no data.",
    ),
    Metric(
        "kc.verdict", "1", Instrument.GAUGE, _CELL,
        "Verdict of a cell: 0 PASS, 1 INCONCLUSIVE, 2 NO_DATA, 3 FAIL.",
    ),
    Metric("kc.verdict.since", "s", Instrument.GAUGE, _CELL, "Unix time since when a cell has had its verdict."),
    Metric(
        "kc.verdict.evidence", "1", Instrument.GAUGE, _CELL,
        "What is held against a cell's limit, 0 to 1: chance alone reaches 1 in any cell of the contract no more often "
        "than once per observability.false_alarms.",
    ),
    Metric("kc.bound.estimate", "1", Instrument.GAUGE, _CELL, "Point estimate of a clause's statistic."),
    Metric("kc.bound.lower", "1", Instrument.GAUGE, _CELL, "Lower confidence bound of a clause's statistic."),
    Metric("kc.bound.upper", "1", Instrument.GAUGE, _CELL, "Upper confidence bound of a clause's statistic."),
    Metric("kc.bound.limit", "1", Instrument.GAUGE, _CELL, "Limit that the contract sets."),
    Metric(
        "kc.bound.margin", "1", Instrument.GAUGE, _CELL,
        "Limit minus the bound that decided the verdict, the lower one on FAIL; negative beyond the limit.",
    ),
    Metric("kc.bound.samples", "1", Instrument.GAUGE, _CELL, "Observations that the verdict rests on."),
    Metric(
        "kc.rule.window.histogram", "1", Instrument.EXPONENTIAL_HISTOGRAM, _IN_WINDOW,
        "Recording rule: what was observed in a window, by cell.",
    ),
    Metric(
        "kc.rule.window.samples", "1", Instrument.GAUGE, _IN_WINDOW,
        "Recording rule: observations that a window is sure to hold.",
    ),
    Metric(
        "kc.rule.window.total", "1", Instrument.GAUGE, _IN_WINDOW,
        "Recording rule: sum of the observations of a window, where the store keeps it apart from their buckets.",
    ),
    Metric(
        "kc.rule.window.estimate", "1", Instrument.GAUGE, _IN_WINDOW,
        "Recording rule: point estimate of a clause's statistic from one window.",
    ),
    Metric(
        "kc.rule.window.lower", "1", Instrument.GAUGE, _IN_WINDOW,
        "Recording rule: lower confidence bound of a clause's statistic from one window.",
    ),
    Metric(
        "kc.rule.window.upper", "1", Instrument.GAUGE, _IN_WINDOW,
        "Recording rule: upper confidence bound of a clause's statistic from one window.",
    ),
    Metric(
        "kc.rule.window.status", "1", Instrument.GAUGE, _IN_WINDOW,
        "Recording rule: verdict of one window, with the codes of kc.verdict.",
    ),
    Metric(
        "kc.rule.status", "1", Instrument.GAUGE, _CELL,
        "Recording rule: verdict of a cell without the evaluator, with the codes of kc.verdict.",
    ),
    Metric("kc.rule.estimate", "1", Instrument.GAUGE, _CELL, "Recording rule: what kc.bound.estimate is."),
    Metric("kc.rule.lower", "1", Instrument.GAUGE, _CELL, "Recording rule: what kc.bound.lower is, by a wider one."),
    Metric("kc.rule.upper", "1", Instrument.GAUGE, _CELL, "Recording rule: what kc.bound.upper is, by a wider one."),
    Metric("kc.rule.limit", "1", Instrument.GAUGE, _CELL, "Recording rule: limit that the contract sets."),
    Metric(
        "kc.rule.samples", "1", Instrument.GAUGE, _CELL,
        "Recording rule: observations that the verdict is sure to rest on.",
    ),
    Metric(
        "kc.alert.firing", "1", Instrument.GAUGE, ("kc.contract", "kc.clause", "kc.slice", "kc.severity"),
        "1 while a step of the escalation policy fires.",
    ),
    Metric(
        "kc.route", "1", Instrument.GAUGE, ("kc.contract", "kc.slice", "kc.route.kernel"),
        "1 for the kernel that the decision table sends a slice to.",
    ),
    Metric(
        "kc.action.active", "1", Instrument.GAUGE, ("kc.contract", "kc.clause", "kc.slice", "kc.action"),
        "1 for each action of the steps of the escalation policy that fire.",
    ),
    Metric(
        "kc.incident", "1", Instrument.GAUGE,
        ("kc.contract", "kc.incident", "kc.incident.on", "kc.kernel.train", "kc.kernel.inference"),
        "An incident that lasts: 2 while it is broken, 1 while it is contained.",
    ),
    Metric(
        "kc.promotion.stage", "1", Instrument.GAUGE, ("kc.contract", "kc.kernel.inference"),
        "Stage of a kernel version: -1 rolled back, 0 offline-ci, 1 shadow, 2 canary, 3 full.",
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
        "Metric data points received, by what became of them.",
    ),
    Metric(
        "kc.evaluator.requests", "{request}", Instrument.COUNTER, ("kc.transport", "kc.outcome"),
        "OTLP requests received, by transport and outcome; of transport `api`, those that were refused for who asked.",
    ),
    Metric(
        "kc.evaluator.request.duration", "s", Instrument.HISTOGRAM, ("kc.transport", "kc.outcome"),
        "Time until OTLP requests were answered.",
    ),
    Metric(
        "kc.evaluator.waiting", "By", Instrument.GAUGE, (),
        "Bytes of OTLP requests that have arrived and wait for their turn.",
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
        "Time that the disk took for the state file at last; webhooks, new decisions and the answers to orders wait.",
    ),
    Metric(
        "kc.evaluator.log.size", "By", Instrument.GAUGE, (),
        "Bytes on disk of the log of what was received, with what `serve --record` keeps of it.",
    ),
    Metric(
        "kc.evaluator.disk.free", "By", Instrument.GAUGE, (),
        "Bytes that the disk of the log of what was received has left.",
    ),
    Metric(
        "kc.evaluator.log.lag", "By", Instrument.GAUGE, (),
        "Bytes received that wait for the disk, or are in the log and not yet in the state file.",
    ),
    Metric(
        "kc.evaluator.shard.streams", "{stream}", Instrument.GAUGE, ("kc.shard",),
        "Streams that a shard of a Ray cluster keeps state for.",
    ),
    Metric(
        "kc.evaluator.shard.lag", "By", Instrument.GAUGE, ("kc.shard",),
        "Bytes received that wait for a shard or its disk, or that the judge has not been told of.",
    ),
    Metric(
        "kc.evaluator.last_evaluation", "s", Instrument.GAUGE, (),
        "Unix time of the last evaluation; what the evaluator says is as old as that.",
    ),
    Metric(
        "kc.evaluator.failures", "{failure}", Instrument.COUNTER, ("kc.contract",),
        "Cells or contracts that the evaluator failed to judge; no contract where all failed together.",
    ),
    Metric(
        "kc.aggregator.points", "{point}", Instrument.COUNTER, ("kc.outcome",),
        "Metric data points that an aggregator received, by what became of them.",
    ),
    Metric(
        "kc.aggregator.requests", "{request}", Instrument.COUNTER, ("kc.transport", "kc.outcome"),
        "OTLP requests that an aggregator received, by transport and outcome.",
    ),
    Metric(
        "kc.aggregator.request.duration", "s", Instrument.HISTOGRAM, ("kc.transport", "kc.outcome"),
        "Time until an aggregator answered OTLP requests.",
    ),
    Metric(
        "kc.aggregator.waiting", "By", Instrument.GAUGE, (),
        "Bytes of OTLP requests that have arrived at an aggregator and wait for their turn.",
    ),
    Metric("kc.aggregator.streams", "{stream}", Instrument.GAUGE, (), "Streams of senders that an aggregator keeps."),
    Metric("kc.aggregator.sums", "{stream}", Instrument.GAUGE, (), "Streams that an aggregator makes of them."),
    Metric(
        "kc.aggregator.due", "{stream}", Instrument.GAUGE, (),
        "Streams of an aggregator that have grown since the evaluator took them last.",
    ),
    Metric(
        "kc.aggregator.held", "By", Instrument.GAUGE, (),
        "Bytes on an aggregator's disk that are passed on as they are and that nobody has taken.",
    ),
    Metric(
        "kc.aggregator.messages", "{message}", Instrument.COUNTER, ("kc.outcome",),
        "Messages of an aggregator: `taken`, `refused` for good, `failed` and sent again.",
    ),
    Metric(
        "kc.aggregator.last_message", "s", Instrument.GAUGE, (),
        "Unix time at which a message of an aggregator was taken last.",
    ),
    Metric(
        "kc.aggregator.disk.free", "By", Instrument.GAUGE, (),
        "Bytes that the disk of an aggregator's state file has left.",
    ),
    Metric(
        "kc.outbox.pending", "{message}", Instrument.GAUGE, ("kc.endpoint",),
        "Webhook messages that wait to be delivered.",
    ),
    Metric(
        "kc.outbox.attempts", "{attempt}", Instrument.COUNTER, ("kc.endpoint", "kc.outcome"),
        "Webhook deliveries tried, by outcome.",
    ),
)  # fmt: skip

METRICS: Final[dict[str, Metric]] = {m.name: m for m in _METRICS}
