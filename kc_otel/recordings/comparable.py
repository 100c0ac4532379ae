"""Requests that can be compared at all: both log-probabilities must be of the same distribution.

TV(P, Q) = E_Q[(1-w)+] holds for tokens drawn from the very Q whose log-probabilities were kept. An engine that reports
log-probabilities from before temperature and top-p has drawn from another distribution than it reports, and one that
decodes greedily has drawn nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

from kc_otel.contract.slices import Scalar
from kc_otel.recordings.request import SampledRequest

_REMEDY: Final = {
    "sglang": "sample with return_sampling_mask, or without truncation and SGLANG_RETURN_ORIGINAL_LOGPROB"
}
"""Remedy for log-probabilities from before processing, by engine."""

SUPPORTED: Final = ("temperature", "top_k", "top_p", "min_p")
"""Processing that a score function has to apply to the training kernel's logits, in this order."""

NEUTRAL: Final[Mapping[str, tuple[Scalar, ...]]] = MappingProxyType(
    {
        "temperature": (1.0,),
        "top_p": (1.0,),
        "top_k": (0, -1),
        "min_p": (0.0,),
        "repetition_penalty": (1.0,),
        "presence_penalty": (0.0,),
        "frequency_penalty": (0.0,),
    }
)
"""Values of sampling parameters at which tokens are drawn from the softmax of the logits, the usual one first."""


def effective(processing: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """The processing that changes anything: without top_p = 1 and the like."""
    return {name: value for name, value in processing.items() if value not in NEUTRAL.get(name, ())}


def refusal(
    request: SampledRequest, weights: int | str | None = None, adapter: str = "", supported: Sequence[str] = SUPPORTED
) -> tuple[str, str] | None:
    """Return the counter's reason and a sentence with the remedy if a request cannot be compared; else None.

    Of the training kernel there are its weight version, None where nobody says, the name of its LoRA adapter, empty for
    none, and the processing that its score function applies.
    """
    processing = effective(request.processing)
    if not request.token_ids.size:
        return "no_tokens", f"request {request.request_id} has no sampled tokens"
    if processing.get("temperature") == 0:
        return "greedy", "temperature is 0: nothing was sampled, so (1-w)+ estimates nothing; sample, or look at logits"
    if request.logprobs_mode == "raw" and processing:
        said = ", ".join(f"{name}={value}" for name, value in sorted(processing.items()))
        remedy = _REMEDY.get(request.kernel.engine, "start vLLM with --logprobs-mode processed_logprobs")
        return "raw_logprobs", f"drawn with {said}, but the log-probabilities are from before it; {remedy}"
    other = sorted(set(processing) - set(supported))
    if other:
        only = f"only {', '.join(supported)} can" if supported else "score it with `rescore --model`"
        return "unsupported_processing", f"{', '.join(other)} cannot be applied to the training kernel; {only}"
    if said := _wrong_weights(request, weights, adapter):
        return "wrong_weights", said
    return None


def _wrong_weights(request: SampledRequest, weights: int | str | None, adapter: str) -> str:
    if (served := str(request.attributes.get("lora", ""))) != adapter:
        sides = (f"the LoRA adapter {name!r}" if name else "no LoRA adapter" for name in (served, adapter))
        said = "sampled with {}, scored with {}".format(*sides)
        return f"{said}; score it with that adapter, and say its name (rescore --adapter)"
    if weights is not None and request.weights is not None and _other_weights(request.weights, weights):
        said = f"sampled with weights {request.weights!r}, scored with {weights!r}"
        return f"{said}; rescore with the checkpoint that served"
    return ""


def _other_weights(sampled: int | str | tuple[tuple[int, int], ...], scored: int | str) -> bool:
    """Return True if two versions differ and are not both steps, whose difference would be measured as a lag."""
    if isinstance(sampled, tuple):
        return any(_other_weights(step, scored) for step, _ in sampled)
    both_steps = isinstance(sampled, int) and isinstance(scored, int)
    return not both_steps and str(sampled) != str(scored)
