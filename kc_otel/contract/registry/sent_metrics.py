"""Metrics that recorders and engines send beside the drift quantities."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final


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


SENT_METRICS: Final = (
    Metric(
        "kc.input.invalid", "{sequence}", Instrument.COUNTER,
        ("kc.contract", "kc.reason", "kc.slice", "kc.kernel.train", "kc.kernel.inference"),
        "Sequences that failed an input check and were not measured; with the reason `reward_out_of_range`, only the "
        "reward was ignored. Without `kc.slice` if their slices are unknown.",
    ),
    Metric(
        "kc.recorder.tokens", "{token}", Instrument.COUNTER, ("kc.contract",),
        "Tokens measured and recorded.",
    ),
    Metric(
        "kc.recorder.prompts", "{prompt}", Instrument.COUNTER, ("kc.contract", "kc.outcome"),
        "Prompts counted: `whole`; `part`, if rollouts arrived after the prompt had been counted, or too late; "
        "`assumed`, "
        "sequences that count as prompts because their prompts are unknown.",
    ),
    Metric(
        "kc.recorder.dropped", "{batch}", Instrument.COUNTER, ("kc.contract", "kc.reason"),
        "Batches not measured: the queue was full, or measuring failed.",
    ),
    Metric(
        "kc.recorder.export.failures", "{export}", Instrument.COUNTER, ("kc.contract",),
        "Exports that the endpoint did not accept, or of which it rejected points.",
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
        "Sum of (1-w)+ over those tokens: divided by kc.quarantine.tokens, it is tv_token of the kept or of the "
        "quarantined ones. Drift metrics include both.",
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
        "1, and 0 once its recorder has shut down or records another version; its attributes are the fields of the "
        "kernel version's fingerprint.",
    ),
    Metric(
        "kc.train.step", "{step}", Instrument.GAUGE, ("kc.contract", "kc.kernel.train", "kc.kernel.inference"),
        "Training step of a pair's newest measurement, if weight versions are counted in steps; the horizontal axis of "
        "charts over steps.",
    ),
)  # fmt: skip
