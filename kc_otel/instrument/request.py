"""A served request as it is kept for rescoring: what was sampled, by which kernel, under which processing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kc_otel.contract.slices import Scalar
from kc_otel.telemetry.kernel import Kernel

__all__ = ["SampledRequest"]


@dataclass(frozen=True, slots=True, eq=False)
class SampledRequest:
    """One sampled completion of one request. An engine's instrumentation makes it, `kc-otel rescore` reads it.

    Attributes:
        request_id: The engine's own name of the request, with the index of the completion where there are several.
        prompt_ids: Prompt tokens, int64 [prompt].
        token_ids: Sampled tokens, int64 [tokens].
        logprobs: log Q(y) of the sampled tokens, nats, float32 [tokens].
        kernel: The inference kernel that sampled them.
        processing: What was done to the logits before sampling and is part of the distribution that `logprobs` are
            from: temperature, top_p, top_k, min_p, repetition_penalty, ... by name; empty for none. Together with
            `logprobs_mode`, since an engine may report log-probabilities from before it.
        logprobs_mode: `raw` when `logprobs` are from before processing, `processed` when from after it.
        attributes: What slices are made of.
        weights: Weight version that sampled it; None when the engine does not say.
        traceparent: W3C trace context of the request's span; empty when there is none.
        at: When it was finished, unix nanoseconds.
    """

    request_id: str
    prompt_ids: NDArray[np.int64]
    token_ids: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    kernel: Kernel
    processing: Mapping[str, Scalar] = field(default_factory=dict)
    logprobs_mode: str = "raw"
    attributes: Mapping[str, Scalar] = field(default_factory=dict)
    weights: int | str | None = None
    traceparent: str = ""
    at: int = 0
