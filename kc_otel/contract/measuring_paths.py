"""Which clauses a way of measuring can ever fill, and which it never does, before anybody waits for them.

A clause that the way in use cannot measure is NO_DATA for ever, on a server that is perfectly healthy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from kc_otel.contract.clause import Clause
from kc_otel.contract.model import Contract
from kc_otel.contract.registry import Origin
from kc_otel.contract.slices import ALL

__all__ = ["AUTOMATIC", "Coverage", "MeasuringPath", "coverage", "why_not"]


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


AUTOMATIC: Final[Mapping[MeasuringPath, frozenset[str]]] = MappingProxyType(
    {
        MeasuringPath.VLLM: frozenset(
            {"prompt_tokens", "completion_tokens", "response_tokens", "temperature", "finish_reason", "lora", "model"}
        ),
        MeasuringPath.TRL: frozenset({"prompt_tokens", "completion_tokens", "advantage", "mode"}),
        MeasuringPath.TRAINER: frozenset({"prompt_tokens"}),
        MeasuringPath.VERL: frozenset({"prompt_tokens", "completion_tokens", "data_source"}),
        MeasuringPath.LOOP: frozenset(),
        MeasuringPath.GATE: frozenset(),
    }
)
"""Attributes that sequences have without anybody's doing."""

_ATTRIBUTES: Final[Mapping[MeasuringPath, str]] = MappingProxyType(
    {
        MeasuringPath.VLLM: "clients send it in vllm_xargs or as baggage, or KC_OTEL_ATTRIBUTES names a header",
        MeasuringPath.TRL: "a column of the dataset",
        MeasuringPath.TRAINER: "attributes of each Sample",
        MeasuringPath.VERL: "a column of the dataset",
        MeasuringPath.LOOP: "attributes= of compare",
        MeasuringPath.GATE: "a column of the recording",
    }
)
_WHY: Final[Mapping[tuple[MeasuringPath, Origin], str]] = MappingProxyType(
    {
        (MeasuringPath.VLLM, Origin.LOGITS): "vLLM gives log-probabilities of sampled tokens and no full logits; "
        "judge it at a gate, or with Recorder.compare_logits where both kernels' logits are at hand",
        (MeasuringPath.VLLM, Origin.ADVANTAGES): "served requests have no advantages; a trainer measures it",
        (MeasuringPath.TRL, Origin.TRUNCATION): "TRL does not say which tokens truncation kept; sample with top_p=1",
        (
            MeasuringPath.VLLM,
            Origin.REWARDS,
        ): "served requests have no rewards; a trainer measures it, or a loop of your own that scores them",
        (MeasuringPath.VLLM, Origin.RUNTIME): "a plain vLLM does not say which step its weights are of; a trainer "
        "measures it",
        (MeasuringPath.TRL, Origin.LOGITS): "TRL keeps log-probabilities of sampled tokens and no full logits; judge "
        "it at a gate, or with Recorder.compare_logits",
        (MeasuringPath.TRAINER, Origin.LOGITS): "the callback compares log-probabilities of tokens and no full logits; "
        "judge it at a gate, or with Recorder.compare_logits",
        (MeasuringPath.TRAINER, Origin.ADVANTAGES): "samples have no advantages; Recorder.compare takes them",
        (MeasuringPath.TRAINER, Origin.REWARDS): "samples have no rewards; Recorder.compare takes them",
        (MeasuringPath.TRAINER, Origin.TRUNCATION): "samples do not say which tokens truncation kept; sample with "
        "top_p=1",
        (MeasuringPath.VERL, Origin.LOGITS): "verl keeps log-probabilities of sampled tokens and no full logits; judge "
        "it at a gate, or with Recorder.compare_logits",
        (
            MeasuringPath.GATE,
            Origin.RUNTIME,
        ): "a recording has no weight versions; where the kernels run it is measured",
    }
)
_OPERATORS: Final = "outputs of operators come from Recorder.compare_operator, watch_modules or `kc-otel operators`"
_COMPARED: Final = frozenset({"weights_mismatch", "updates_rounded_away"})
_WEIGHTS: Final = "whoever sends the weights compares them and gives the result to Recorder.observe"
_ROUTES: Final = "routes of experts come from Recorder.compare_routes"
_GEN_AI: Final = "it is no drift: `kc-otel scrape` sends vLLM's own latencies, others come from your server's telemetry"


@dataclass(frozen=True, slots=True)
class Coverage:
    """What a path fills of a contract.

    Attributes:
        measured: Clauses that it can measure.
        unmeasured: Ids of the others, and why, with what measures them.
        attributes: Attributes that slices ask for and that the path does not have by itself, and where they come from.
        cells: Pairs of a clause and a slice.
        reachable: Of these, the ones whose clause is measured.
        automatic: Of these, the ones whose slice needs nothing from anybody.
    """

    measured: tuple[str, ...]
    unmeasured: Mapping[str, str]
    attributes: Mapping[str, str]
    cells: int
    reachable: int
    automatic: int


def coverage(contract: Contract, path: MeasuringPath) -> Coverage:
    """What a path can fill of a contract, as long as everything works."""
    unmeasured = {clause.id: why for clause in contract.clauses if (why := why_not(clause, path))}
    measured = tuple(clause.id for clause in contract.clauses if clause.id not in unmeasured)
    wanted = {ALL: set[str]()}
    wanted |= {name: spec.conditions.keys() - AUTOMATIC[path] for name, spec in contract.slices.items()}
    return Coverage(
        measured,
        unmeasured,
        dict.fromkeys(sorted(set().union(*wanted.values())), _ATTRIBUTES[path]),
        cells=len(contract.clauses) * len(wanted),
        reachable=len(measured) * len(wanted),
        automatic=len(measured) * sum(not attributes for attributes in wanted.values()),
    )


def why_not(clause: Clause, path: MeasuringPath) -> str:
    """Why a path can never measure a clause, and what can; empty where it can."""
    quantity = clause.quantity
    if quantity is None:
        return _GEN_AI
    if quantity.source is Origin.OPERATORS and path is not MeasuringPath.LOOP:
        return _ROUTES if quantity.key == "route_disagreement" else _OPERATORS
    if quantity.key in _COMPARED and path is not MeasuringPath.LOOP:
        return _WEIGHTS
    return _WHY.get((path, quantity.source), "")
