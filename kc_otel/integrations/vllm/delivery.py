"""A finished completion, the request to be kept that is made of it, and its way from the engine's thread to a sink."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import numpy as np
from opentelemetry import baggage, trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kc_otel.contract.slices import Scalar
from kc_otel.record.kernel import Kernel
from kc_otel.record.sampling import Sampler
from kc_otel.record.worker import BoundedWorker, PerProcess, ReasonCounts
from kc_otel.recordings.request import NEUTRAL, KeptTokens, SampledRequest, effective

_QUEUE_BYTES: Final = 64 << 20  # most bytes, by estimate, that wait
_TOKEN_BYTES: Final = 32  # a reference and a number; prompts and completions wait as lists
_REQUEST_BYTES: Final = 2048
NOT_SCORABLE: Final = "only whole prompts of text tokens can be scored again"
_WORKER_WAIT_SECONDS: Final = 60.0
_RESTRICTIONS: Final = ("logit_bias", "allowed_token_ids", "bad_words", "structured_outputs", "thinking_token_budget")
"""Parameters that restrict the tokens in ways that no number says; only that they were set is kept."""
_SECRET_HEADERS: Final = frozenset({"authorization", "proxy-authorization", "cookie", "x-api-key"})
_DEFAULT_WEIGHTS_VERSION: Final = "default"  # vLLM's version of weights for which no version was set


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


AttributeFunction = Callable[[Completion], Mapping[str, Scalar]]
_Finished = tuple[Callable[[], Completion], Future[Kernel], str]


@dataclass(frozen=True, slots=True)
class CaptureStats:
    """Completions of this process: those started, those in the sample, those handed to the sink and their tokens.

    Reasons of `dropped`: `queue-full`, `too-large`, `closed`, `sink-failed`, `invalid`, `aborted`, `error` (the
    engine's), `unsupported` (sessions, embeddings, images, replayed tokens), `failed` (ours). `attributes_failed` are
    recorded without the attributes of the function that failed.
    """

    seen: int = 0
    sampled: int = 0
    recorded: int = 0
    tokens: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    attributes_failed: int = 0


class RequestDelivery(PerProcess):
    """Takes finished completions without waiting, and gives them to the sink on a thread of its own."""

    _lock: threading.Lock
    _counts: Counter[str]

    def __init__(self, sink: RequestSink, attributes: AttributeFunction, sampler: Sampler) -> None:
        self.sink: Final = sink
        self._attributes = attributes
        self._sampler = sampler
        self._dropped = ReasonCounts("kc-otel: a sampled request is not recorded (%s)")
        self._without_attributes = ReasonCounts("kc-otel: the %s function failed")
        self._worker: BoundedWorker[_Finished] = BoundedWorker(
            self._record, self._dropped.add, name="kc-otel-vllm", max_bytes=_QUEUE_BYTES
        )
        super().__init__()

    def takes(self, request_id: str, unsupported: str = "") -> bool:
        """Count a request; return True if it is in the sample, and nothing is `unsupported` about it."""
        self.count("seen")
        if not self._sampler.takes(request_id):
            return False
        self.count("sampled")
        if unsupported:
            self.drop("unsupported", unsupported)
        return not unsupported

    def count(self, name: str, number: int = 1) -> None:
        """Count something that `stats` reports."""
        with self._lock:
            self._counts[name] += number

    def drop(self, reason: str, why: object) -> None:
        """Count a completion that is not recorded; `why` is logged the first time."""
        self._dropped.add(reason, why)

    def submit(
        self, completion: Callable[[], Completion], kernel: Future[Kernel], logprobs_mode: str, numbers: int
    ) -> None:
        """Queue what makes a finished completion, of so many numbers; its kernel is awaited on the other thread."""
        finished = completion, kernel, logprobs_mode
        self._worker.put(lambda: finished, _REQUEST_BYTES + _TOKEN_BYTES * numbers)

    def flush(self, timeout: float = 10.0) -> bool:
        """Hand everything submitted to the sink; return True if that was done within `timeout` seconds."""
        return self._worker.flush(timeout)

    def close(self, timeout: float = 10.0) -> bool:
        """Flush, and take no more."""
        return self._worker.close(timeout)

    def stats(self) -> CaptureStats:
        """Return the current counts."""
        with self._lock:
            counts = dict(self._counts)
        failed = self._without_attributes.values().get("attributes", 0)
        return CaptureStats(**counts, dropped=self._dropped.values(), attributes_failed=failed)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._counts = Counter()

    def _record(self, waiting: Sequence[_Finished]) -> None:
        for make, asked, logprobs_mode in waiting:
            completion, kernel = make(), asked.result(_WORKER_WAIT_SECONDS)
            try:
                request = request_of(completion, kernel, logprobs_mode, self._own(completion))
            except ValueError as error:
                self.drop("invalid", error)
                continue
            try:
                self.sink.put(request)
            except Exception as error:  # noqa: BLE001 - sinks may be foreign code
                self.drop("sink-failed", error)
                continue
            self.count("recorded")
            self.count("tokens", request.token_ids.size)

    def _own(self, completion: Completion) -> Mapping[str, Scalar]:
        try:
            return dict(self._attributes(completion))
        except Exception as error:  # noqa: BLE001 - the user's function; the request still counts as traffic
            self._without_attributes.add("attributes", error)
            return {}


class RequestSink(Protocol):
    """Takes recorded requests; `kc_otel.recordings.spool.Spool` is one."""

    def put(self, request: SampledRequest) -> None:
        """Take a request. Called from one thread of the instrumentation; should neither raise nor wait."""


def request_of(
    completion: Completion, kernel: Kernel, logprobs_mode: str, attributes: Mapping[str, Scalar]
) -> SampledRequest:
    """The request to be kept; attributes that every completion has are added, and give way to the user's."""
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
    carrier = {"traceparent": headers.get("traceparent", "")}
    if current is not None and trace.get_current_span(current).get_span_context().is_valid:
        TraceContextTextMapPropagator().inject(carrier, current)
    return carrier["traceparent"]
