"""A served request as it waits for rescoring: the sampled tokens, their kernel and their processing.

On disk it is a row: three arrays as little-endian bytes, everything else as JSON that a person can read.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kc_otel.contract.plain_text import read_json_text
from kc_otel.contract.slices import Scalar
from kc_otel.record.kernel import Kernel

Row = tuple[str, bytes, bytes, bytes, str]
"""request_id, prompt_ids, token_ids, logprobs, about."""
COLUMNS: Final = "request_id, prompt_ids, token_ids, logprobs, about"
SUPPORTED: Final = ("temperature", "top_k", "top_p", "min_p")
"""Processing that a score function has to apply to the training kernel's logits, in this order."""

NEUTRAL: Final[Mapping[str, tuple[Scalar, ...]]] = {
    "temperature": (1.0,),
    "top_p": (1.0,),
    "top_k": (0, -1),
    "min_p": (0.0,),
    "repetition_penalty": (1.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
}
"""Values of sampling parameters at which tokens are drawn from the softmax of the logits, the usual one first."""
_IDS: Final = "<i4"
_LOGPROBS: Final = "<f4"


@dataclass(frozen=True, slots=True, eq=False)
class KeptTokens:
    """The tokens that top-p, top-k or min-p kept, token after token, and how many there are for each sampled one."""

    ids: NDArray[np.int64]
    counts: NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class SampledRequest:
    """One sampled completion of one request. An engine's instrumentation makes it, `kc-otel rescore` reads it.

    `logprobs` are log Q of the sampled tokens, nats: from before `processing` where `logprobs_mode` is `raw`, from
    after it where `processed`, and renormalised over what truncation kept where the engine says which. `weights`
    sampled it; where an update came between its tokens, each step with the index of its first token. `traceparent` is
    the W3C context of its span, `at` its end, unix nanoseconds. The id has the index of the completion where there are
    several.
    """

    request_id: str
    prompt_ids: NDArray[np.int64]
    token_ids: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    kernel: Kernel
    processing: Mapping[str, Scalar] = field(default_factory=dict)
    logprobs_mode: str = "raw"
    attributes: Mapping[str, Scalar] = field(default_factory=dict)
    weights: int | str | tuple[tuple[int, int], ...] | None = None
    traceparent: str = ""
    at: int = 0
    kept: KeptTokens | None = None


def effective(processing: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """The processing that changes anything: without top_p = 1 and the like."""
    return {name: value for name, value in processing.items() if value not in NEUTRAL.get(name, ())}


def size_of(request: SampledRequest) -> int:
    """About the bytes that a request takes in memory and on disk; too many rather than too few."""
    kept = 0 if request.kept is None else 16 * (request.kept.ids.size + request.kept.counts.size)
    return 8 * (request.prompt_ids.size + request.token_ids.size) + 4 * request.logprobs.size + kept + 2048


def versions_per_token(request: SampledRequest) -> NDArray[np.int64] | None:
    """The step of the weights that sampled each token, int64 [tokens]; None where there were not several."""
    if not isinstance(request.weights, tuple):
        return None
    steps, starts = np.array(request.weights, dtype=np.int64).T
    return np.repeat(steps, np.diff(starts, append=request.token_ids.size))


def encode(request: SampledRequest) -> Row:
    """The row of a request; ValueError for ids beyond 32 bits, or other numbers of log-probabilities and tokens."""
    if request.token_ids.shape != request.logprobs.shape or request.token_ids.ndim != 1:
        raise ValueError(
            f"logprobs: shape {request.logprobs.shape} is not that of token_ids, {request.token_ids.shape}"
        )
    about: dict[str, Any] = {name: getattr(request, name) for name in ("logprobs_mode", "weights", "traceparent", "at")}
    about |= {name: dict(getattr(request, name)) for name in ("processing", "attributes")}
    about["kernel"] = request.kernel.to_plain()
    if request.kept is not None:
        about["kept"] = [base64.b64encode(_ids(array)).decode() for array in (request.kept.ids, request.kept.counts)]
    return (
        request.request_id,
        _ids(request.prompt_ids),
        _ids(request.token_ids),
        np.ascontiguousarray(request.logprobs, dtype=_LOGPROBS).tobytes(),
        json.dumps(about, separators=(",", ":"), default=str),
    )


def decode(row: Row) -> SampledRequest:
    """The request of a row; ValueError if it is none that `encode` wrote."""
    request_id, prompt_ids, token_ids, logprobs, about = row
    try:
        plain: dict[str, Any] = read_json_text(about)
        if isinstance(plain["weights"], list):
            plain["weights"] = tuple((int(step), int(start)) for step, start in plain["weights"])
        if "kept" in plain:
            ids, counts = (base64.b64decode(text, validate=True) for text in plain["kept"])
            plain["kept"] = KeptTokens(*(np.frombuffer(raw, dtype=_IDS).astype(np.int64) for raw in (ids, counts)))
        return SampledRequest(
            request_id=request_id,
            prompt_ids=np.frombuffer(prompt_ids, dtype=_IDS).astype(np.int64),
            token_ids=np.frombuffer(token_ids, dtype=_IDS).astype(np.int64),
            logprobs=np.frombuffer(logprobs, dtype=_LOGPROBS).astype(np.float32),
            **{**plain, "kernel": Kernel(**plain["kernel"])},
        )
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(f"request {request_id!r} cannot be read ({error})") from None


def _ids(ids: np.ndarray[Any, np.dtype[np.int64]]) -> bytes:
    if ids.size and (ids.min() < 0 or ids.max() > np.iinfo(np.int32).max):
        raise ValueError(f"token ids: {int(ids.min())}..{int(ids.max())} do not fit 0..2^31-1")
    return np.ascontiguousarray(ids, dtype=_IDS).tobytes()
