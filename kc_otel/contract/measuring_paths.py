"""Clauses that a way of measuring can fill, and those that stay NO_DATA on it forever."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from kc_otel.contract.clause import Clause
from kc_otel.contract.model import Contract
from kc_otel.contract.registry.clause_metrics import QUANTITIES, Origin
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


TRAINING: Final = ("quarantine-rollouts", "resync-weights", "halt")
OBEYED: Final[Mapping[MeasuringPath, tuple[str, ...]]] = {
    MeasuringPath.TRL: ("sample-more", *TRAINING),
    MeasuringPath.LOOP: ("sample-more", *TRAINING),
    MeasuringPath.TRAINER: ("resync-weights", "halt"),
    MeasuringPath.VERL: (),
}
"""Actions that each path of a trainer can carry out; none of these paths has a router that asks for routes."""

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
        if why := _unobeyed(kind, path, contract):
            yield Finding("warning", f"{contract.name}: no process carries out {action}", why)


def judgeable(clause: Clause) -> bool:
    """Return True if a single sequence has a value of its own for a clause: its metric needs log-probabilities only."""
    return clause.metric in QUANTITIES and QUANTITIES[clause.metric].source is Origin.LOGPROBS


def _unobeyed(action: str, path: MeasuringPath, contract: Contract) -> str:
    if path is MeasuringPath.VLLM and action in TRAINING:
        return "served requests have no trainer that could act; write {route: train-kernel}, and ask a Router"
    if path is MeasuringPath.VLLM and action == "sample-more":
        return "an engine keeps the share of requests that observability.sampling or KC_OTEL_SAMPLING says"
    if path not in OBEYED or action not in {"route", "sample-more", *TRAINING}:
        return ""
    if action not in (able := OBEYED[path]):
        instead = ", ".join(able) or "notify, or call a webhook"
        return f"{'a trainer has no router' if action == 'route' else f'{path} does not follow it'}; write {instead}"
    if action == "quarantine-rollouts" and not any(map(judgeable, contract.clauses)):
        return "no clause can judge a single sequence; add one on log-probabilities, such as tv_token"
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
