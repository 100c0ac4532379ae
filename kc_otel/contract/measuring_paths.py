"""Clauses that a way of measuring can fill, and those that stay NO_DATA on it forever."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from kc_otel.contract.clause import Clause
from kc_otel.contract.model import Contract
from kc_otel.contract.registry.clause_metrics import Origin
from kc_otel.contract.slices import LAG, LENGTH, OF_TOKENS


class MeasuringPath(StrEnum):
    """A way from the kernels to the evaluator or the gate."""

    VLLM = "vllm"
    """vLLM's requests, kept in a file and scored again by `kc-otel rescore`."""
    TRL = "trl"
    """`kc_otel.integrations.trl.instrument`."""
    TRAINER = "trainer"
    """`KernelContractCallback` of Hugging Face's Trainer."""
    VERL = "verl"
    """The plugin of verl, `kc_otel.integrations.verl`."""
    LOOP = "loop"
    """A `Recorder` that is called with everything that it takes."""
    GATE = "gate"
    """Recordings that `kc-otel gate run` judges."""


TRAINERS: Final = frozenset({MeasuringPath.TRL, MeasuringPath.TRAINER, MeasuringPath.VERL, MeasuringPath.LOOP})
"""Paths on which a trainer obeys directives and no router asks for routes."""

_ALWAYS_SENT: Final = OF_TOKENS | {LENGTH}
AUTOMATIC: Final[Mapping[MeasuringPath, frozenset[str]]] = {
    MeasuringPath.VLLM: _ALWAYS_SENT | {"prompt_tokens", "temperature", "finish_reason", "lora", "model"},
    MeasuringPath.TRL: _ALWAYS_SENT | {"prompt_tokens", "advantage", "mode", LAG},
    MeasuringPath.TRAINER: _ALWAYS_SENT | {"prompt_tokens", LAG},
    MeasuringPath.VERL: _ALWAYS_SENT | {"prompt_tokens", "data_source", LAG},
    MeasuringPath.LOOP: _ALWAYS_SENT | {LAG},
    MeasuringPath.GATE: _ALWAYS_SENT,
}

_ATTRIBUTES: Final[Mapping[MeasuringPath, str]] = {
    MeasuringPath.VLLM: "clients send it in vllm_xargs or as baggage, or KC_OTEL_ATTRIBUTES names a header",
    MeasuringPath.TRL: "a column of the dataset",
    MeasuringPath.TRAINER: "attributes of each Sample",
    MeasuringPath.VERL: "a column of the dataset",
    MeasuringPath.LOOP: "attributes= of compare",
    MeasuringPath.GATE: "a column of the recording",
}
_LOGITS: Final = (
    "{} log-probabilities of {} tokens, not full logits; judge the clause in a gate, or call Recorder.compare_logits "
    "where you have both kernels' logits"
)
_REASON_UNMEASURED: Final[Mapping[MeasuringPath, Mapping[Origin, str]]] = {
    MeasuringPath.VLLM: {
        Origin.LOGITS: _LOGITS.format("vLLM gives", "sampled"),
        Origin.ADVANTAGES: "served requests have no advantages; measure the clause in a trainer",
        Origin.REWARDS: "served requests have no rewards; measure the clause in a trainer, or in your own loop "
        "that scores them",
        Origin.RUNTIME: "vLLM does not report the step of its weights; measure the clause in a trainer",
    },
    MeasuringPath.TRL: {
        Origin.TRUNCATION: "TRL does not report which tokens truncation kept; sample with top_p=1",
        Origin.LOGITS: _LOGITS.format("TRL keeps", "sampled"),
    },
    MeasuringPath.TRAINER: {
        Origin.LOGITS: _LOGITS.format("the callback compares", "a sample's"),
        Origin.ADVANTAGES: "samples have no advantages; pass them to Recorder.compare",
        Origin.REWARDS: "samples have no rewards; pass them to Recorder.compare",
        Origin.TRUNCATION: "samples do not report which tokens truncation kept; sample with top_p=1",
    },
    MeasuringPath.VERL: {Origin.LOGITS: _LOGITS.format("verl keeps", "sampled")},
    MeasuringPath.GATE: {
        Origin.RUNTIME: "a recording has no weight versions; measure the clause where the kernels run"
    },
}
_OPERATORS: Final = "pass outputs of operators to Recorder.compare_operator, or use `kc-otel locate operators`"
_WEIGHT_METRICS: Final = frozenset({"weights_mismatch", "updates_rounded_away"})
_WEIGHTS: Final = "compare the weights where they are sent, and pass the result to Recorder.observe"
_ROUTES: Final = "pass the experts' routes to Recorder.compare_routes"
_ARGUMENTS: Final[Mapping[str, str]] = {
    "weights_lag": "weights= of compare",
    "advantage_drift_positive": "advantages= of compare",
    "advantage_drift_negative": "advantages= of compare",
    "reward_drift": "rewards= of compare",
}
"""Arguments that a loop of its own has to pass for a metric, beside log-probabilities."""
_TRAINING: Final = frozenset({"quarantine-rollouts", "resync-weights", "halt"})
_GEN_AI: Final = "latencies come from the server: `kc-otel scrape` sends vLLM's, other servers send their own telemetry"


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that a person should know: an `error` if no verdicts can arrive, a `warning` if they may be wrong."""

    level: str
    what: str
    remedy: str = ""


def left_open(contract: Contract, path: MeasuringPath) -> Iterator[Finding]:
    """Report clauses and actions that a path leaves open while everything works, and the sources of its attributes."""
    for clause in contract.clauses:
        if why := why_not(clause, path):
            yield Finding("warning", f"{contract.name}: {path} never measures clause {clause.id}", why)
        if path is MeasuringPath.LOOP and clause.metric in _ARGUMENTS:
            yield Finding("ok", f"{contract.name}: clause {clause.id} needs {_ARGUMENTS[clause.metric]}")
    asked = {name for spec in contract.slices.values() for name in spec.conditions}
    if path is MeasuringPath.LOOP and LAG in asked:
        yield Finding("ok", f"{contract.name}: slices by `{LAG}` need {_ARGUMENTS['weights_lag']}")
    for name in sorted(asked - AUTOMATIC[path]):
        where = f"slices need the attribute `{name}` of every sequence: {_ATTRIBUTES[path]}"
        yield Finding("ok", f"{contract.name}: {where}")
    actions = {str(action): action.kind for step in contract.escalation for action in step.do}
    for action, kind in actions.items():
        if why := _unobeyed(kind, path):
            yield Finding("warning", f"{contract.name}: no process carries out {action}", why)


def _unobeyed(action: str, path: MeasuringPath) -> str:
    if action == "route" and path in TRAINERS:
        return (
            "a trainer has no router, so the route would have no effect; write quarantine-rollouts, resync-weights or "
            "halt"
        )
    if action in _TRAINING and path is MeasuringPath.VLLM:
        return "served requests have no trainer that could act; write {route: train-kernel}, and ask a Router"
    return ""


def why_not(clause: Clause, path: MeasuringPath) -> str:
    """Return the reason why a path can never measure a clause, and an alternative; empty if it can."""
    quantity = clause.quantity
    if quantity is None:
        return _GEN_AI
    if quantity.source is Origin.OPERATORS and path is not MeasuringPath.LOOP:
        return _ROUTES if quantity.key == "route_disagreement" else _OPERATORS
    if quantity.key in _WEIGHT_METRICS and path is not MeasuringPath.LOOP:
        return _WEIGHTS
    return _REASON_UNMEASURED.get(path, {}).get(quantity.source, "")
