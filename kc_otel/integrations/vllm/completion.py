"""A finished completion as the engine left it, and the request to be kept that is made of it.

This module runs on the delivery's thread, never on the engine's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from opentelemetry import baggage, trace

from kc_otel.contract.slices import Scalar
from kc_otel.record.kernel import Kernel
from kc_otel.recordings.request import NEUTRAL, KeptTokens, SampledRequest, effective

# What restricts the tokens in ways that a number does not say; only that it was there is kept.
_RESTRICTIONS: Final = (
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "structured_outputs",
    "thinking_token_budget",
)
_SECRET_HEADERS: Final = frozenset({"authorization", "proxy-authorization", "cookie", "x-api-key"})
_DEFAULT_WEIGHTS_VERSION: Final = "default"
"""vLLM's version of weights for which no version was set."""


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """One finished completion. Argument of a function given as `attributes=`.

    Attributes:
        request_id: The engine's own name of it, unique.
        external_id: The name that the client or the server gave the request.
        prompt_ids: Prompt tokens.
        token_ids: Sampled tokens.
        logprobs: Their log-probabilities, nats.
        params: vLLM's SamplingParams as they were used.
        finish_reason: `stop`, `length` or `repetition`.
        model: Name under which the model is served.
        lora: Name of the LoRA adapter; empty for none.
        weight_versions: Versions that sampled it, each with the index of its first token, in order; mostly one.
        headers: Headers of the HTTP request by lower-case name; empty outside of the server.
        baggage: W3C baggage of the request.
        traceparent: W3C trace context of the request.
        at: When it finished, unix nanoseconds.
        kept: The tokens that top-p, top-k or min-p kept; None where the engine does not say.
        watermarked: Whether the engine drew the tokens with its watermark.
    """

    request_id: str
    external_id: str
    prompt_ids: Sequence[int]
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    params: Any
    finish_reason: str = ""
    model: str = ""
    lora: str = ""
    weight_versions: Sequence[tuple[str, int]] = ()
    headers: Mapping[str, str] = field(default_factory=dict)
    baggage: Mapping[str, str] = field(default_factory=dict)
    traceparent: str = ""
    at: int = 0
    kept: KeptTokens | None = None
    watermarked: bool = False

    @property
    def extra(self) -> Mapping[str, Any]:
        """Arguments that the client sent as `vllm_xargs`, or the program as `SamplingParams.extra_args`."""
        return getattr(self.params, "extra_args", None) or {}


def request_of(
    completion: Completion, kernel: Kernel, logprobs_mode: str, attributes: Mapping[str, Scalar]
) -> SampledRequest:
    """The request to be kept; attributes that every completion has are added, and give way to the user's.

    Raises:
        ValueError: If there is not exactly one log-probability per token.
    """
    tokens = np.asarray(completion.token_ids, dtype=np.int64)
    logprobs = np.asarray(completion.logprobs, dtype=np.float32)
    if tokens.shape != logprobs.shape:
        raise ValueError(f"{completion.request_id}: {logprobs.size} log-probabilities for {tokens.size} tokens")
    return SampledRequest(
        completion.request_id,
        np.asarray(completion.prompt_ids, dtype=np.int64),
        tokens,
        logprobs,
        kernel,
        processing=processing_of(completion.params) | ({"watermarking": True} if completion.watermarked else {}),
        logprobs_mode=logprobs_mode,
        attributes={**_automatic(completion), **attributes},
        weights=weights_of(completion.weight_versions),
        traceparent=completion.traceparent,
        at=completion.at,
        kept=completion.kept,
    )


def processing_of(params: Any) -> dict[str, Scalar]:
    """Return the effect of vLLM's sampling parameters on the distribution, by their own names; empty for none."""
    changes = effective({name: value for name in NEUTRAL if (value := getattr(params, name, None)) is not None})
    if least := getattr(params, "min_tokens", 0):
        changes["min_tokens"] = least
    return changes | dict.fromkeys((name for name in _RESTRICTIONS if getattr(params, name, None)), True)


def kept_of(masks: Sequence[Any], tokens: int) -> KeptTokens | None:
    """The tokens that truncation kept, from vLLM's `SamplingMaskLists` of each step; None unless there is one a token.

    A mask has the ids of one token, or of several with `offsets` that say where each one's begin.
    """
    if not masks:
        return None
    counts = [[len(mask.token_ids)] if mask.offsets is None else np.diff(mask.offsets) for mask in masks]
    found = KeptTokens(
        np.concatenate([mask.token_ids for mask in masks]).astype(np.int64), np.concatenate(counts).astype(np.int64)
    )
    return found if found.counts.size == tokens and found.counts.sum() == found.ids.size else None


def weights_of(versions: Sequence[tuple[str, int]]) -> int | str | tuple[tuple[int, int], ...] | None:
    """Return the weight version, as a number if it is one; several, as in `SampledRequest`, after a change under way.

    Names that are no steps are joined by commas: no lag follows from them.
    """
    names = [version for version, _ in versions]
    if all(name == _DEFAULT_WEIGHTS_VERSION for name in names):
        return None
    if not all(name.isdecimal() for name in names):
        return ",".join(names)
    return int(names[0]) if len(names) == 1 else tuple((int(name), start) for name, start in versions)


def _automatic(completion: Completion) -> dict[str, Scalar]:
    named = {"model": completion.model, "lora": completion.lora, "finish_reason": completion.finish_reason}
    return {
        "prompt_tokens": len(completion.prompt_ids),
        "completion_tokens": len(completion.token_ids),
        "temperature": float(getattr(completion.params, "temperature", 1.0)),
        **{name: value for name, value in named.items() if value},
    }


def headers_of(raw: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """Headers as text, without those that are secrets."""
    found = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in raw}
    return {name: value for name, value in found.items() if name not in _SECRET_HEADERS}


def baggage_of(current: Any, headers: Mapping[str, str]) -> dict[str, str]:
    """Baggage of the OpenTelemetry context where a program's own instrumentation has put it, else of the request."""
    found = baggage.get_all(current) if current is not None else {}
    if not found and "baggage" in headers:
        from opentelemetry.baggage.propagation import W3CBaggagePropagator  # noqa: PLC0415 - few requests have any

        found = baggage.get_all(W3CBaggagePropagator().extract({"baggage": headers["baggage"]}))
    return {name: str(value) for name, value in found.items()}


def traceparent_of(current: Any, headers: Mapping[str, str]) -> str:
    """The span that was current, else what the sender said."""
    span = trace.get_current_span(current).get_span_context() if current is not None else trace.INVALID_SPAN_CONTEXT
    if span.is_valid:
        return f"00-{span.trace_id:032x}-{span.span_id:016x}-{int(span.trace_flags):02x}"
    return headers.get("traceparent", "")
