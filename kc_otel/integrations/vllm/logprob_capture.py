"""Capture of log-probabilities from a vLLM engine: in the front end's output processor, for sampled requests only.

The engine's core is asked for the log-probability of the sampled token (`logprobs=0`) after the front end has made its
own state of the request, which still says that nobody asked. So nothing has to be taken out of a response again: vLLM
builds the same one as ever, for every kind of stream. The price is a number appended to a list per step and sampled
request, less than what vLLM itself does per token when log-probabilities are on.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any

from kc_otel.integrations.vllm.completion import Completion, baggage_of, headers_of, kept_of, traceparent_of
from kc_otel.record.kernel import Kernel


@dataclass(slots=True, eq=False)
class EngineCapture:
    """One engine, and the captures that received data in a step of it, and those of them that are done.

    Its kernel may still be asked for, and is waited for where a request is recorded; `logprobs_mode` is `raw` or
    `processed`, and None when the engine reports logits; requests get its watermark, if it has one, unless they say no.
    Once it is `closed`, nobody looks here any more; requests under way go on without being collected.
    """

    model: str
    logprobs_mode: str | None
    watermarks: bool = False
    kernel: Future[Kernel] = field(default_factory=Future)
    touched: list[RequestCapture] = field(default_factory=list)
    finished: list[RequestCapture] = field(default_factory=list)
    closed: bool = False


@dataclass(slots=True, eq=False)
class RequestCapture:
    """Data collected of one completion. It refers to lists that vLLM keeps anyway, and to copies once it is done."""

    request_id: str
    external_id: str
    prompt_ids: Sequence[int]
    detokenizer: Any
    params: Any
    versions: Sequence[tuple[str, int]]
    context: Mapping[str, Any]
    engine: EngineCapture
    token_ids: Sequence[int] = ()
    lora: str = ""
    asked: bool = False
    finish_reason: str = ""
    at: int = 0
    logprobs: list[float] = field(default_factory=list)
    masks: list[Any] = field(default_factory=list)

    def take(self, lists: Any, finish_reason: object | None, mask: Any = None) -> None:
        """Take one step's log-probabilities, vLLM's `LogprobsLists`, and why the core stopped, if it did.

        Where the engine runs with `return_sampling_mask`, `mask` is vLLM's `SamplingMaskLists` of the same tokens.
        """
        if self.engine.closed:
            return
        if lists is not None:
            # The sampled token comes first, whatever else was asked for. Nearly every step has one, for which an item
            # costs a fraction of a slice.
            found = lists.logprobs
            if len(found) == 1:
                self.logprobs.append(found.item(0))
            else:
                self.logprobs += found[:, 0].tolist()
        if mask is not None:
            self.masks.append(mask)
        self.engine.touched.append(self)
        if finish_reason is not None:
            self.finish(str(finish_reason))

    def finish(self, reason: str) -> None:
        """Finish the capture."""
        if not self.finish_reason:
            self.finish_reason = reason
            self.at = time.time_ns()
            self.engine.finished.append(self)

    @property
    def numbers(self) -> int:
        """Count of the numbers it holds, for the bound on the queue."""
        return len(self.prompt_ids) + 2 * len(self.token_ids) + sum(len(mask.token_ids) for mask in self.masks)

    @property
    def kernel(self) -> Future[Kernel]:
        """Kernel that sampled it."""
        return self.engine.kernel

    @property
    def logprobs_mode(self) -> str:
        """`raw` or `processed`."""
        return str(self.engine.logprobs_mode)

    def completion(self) -> Completion:
        """The completion, with the headers and the trace that its request came with."""
        headers, otel = headers_of(self.context.get("headers", ())), self.context.get("otel")
        return Completion(
            self.request_id,
            self.external_id,
            self.prompt_ids,
            self.token_ids,
            self.logprobs,
            self.params,
            finish_reason=self.finish_reason,
            model=self.engine.model,
            lora=self.lora,
            weight_versions=self.versions,
            headers=headers,
            baggage=baggage_of(otel, headers),
            traceparent=traceparent_of(otel, self.context.get("trace") or headers),
            at=self.at,
            kept=kept_of(self.masks, len(self.token_ids)),
            watermarked=self.engine.watermarks and getattr(self.params, "watermarking", None) is not False,
        )


def supported(request: Any) -> bool:
    """Return True if a request is one completion of a prompt of tokens, which can be scored again from its ids."""
    params = request.sampling_params
    return bool(
        params is not None
        and request.prompt_token_ids
        and not request.resumable
        and request.prompt_embeds is None
        and not request.mm_features
        and not getattr(params, "trace_decode_token_ids", None)
    )


def scores(request: Any) -> bool:
    """Return True if a request asks for its prompt's log-probabilities, as gates and rescorers do: it is no traffic."""
    params = request.sampling_params
    return params is not None and params.prompt_logprobs is not None and params.max_tokens == 1


def attach(request: Any, state: Any, context: Mapping[str, Any], engine: EngineCapture) -> None:
    """Ask the core for log-probabilities of a request that the front end has just registered.

    The `EngineCoreRequest` gets sampling parameters of its own; the front end's state was made from them as they were.

    Raises:
        TypeError: If something else has taken the place of vLLM's own processor of log-probabilities.
    """
    from vllm.v1.engine.logprobs import LogprobsProcessor  # noqa: PLC0415 - only where vLLM runs

    processor = state.logprobs_processor
    if type(processor) is not LogprobsProcessor:
        raise TypeError(f"{type(processor).__name__} takes the place of vLLM's LogprobsProcessor")
    params = request.sampling_params
    capture = RequestCapture(
        request.request_id,
        state.external_req_id,
        state.prompt_token_ids,
        state.detokenizer,
        params,
        getattr(state, "weight_version_starts", ()),
        context,
        engine,
        lora=state.lora_name or "",
        asked=params.num_logprobs is not None,
    )
    # The request's own state gets another processor: vLLM's, with what it was made of, and a look at what passes.
    state.logprobs_processor = capturing = _capturing_processor()(
        **{attribute.name: getattr(processor, attribute.name) for attribute in fields(processor)}
    )
    capturing.kc_otel_capture = capture
    if not capture.asked:
        # A copy: vLLM shares parameters between the completions of a request, and callers may reuse theirs. And last:
        # log-probabilities that nobody expects would be an error in vLLM.
        changed = copy.copy(params)
        changed.logprobs = 0
        request.sampling_params = changed


@lru_cache(maxsize=1)
def _capturing_processor() -> type:
    """The class of vLLM's processor of log-probabilities, with a look at what passes through."""
    from vllm.v1.engine.logprobs import LogprobsProcessor  # noqa: PLC0415

    class CapturingLogprobsProcessor(LogprobsProcessor):  # type: ignore[misc]  # vLLM is not typed here
        """Takes out what only the capture asked for."""

        def update_from_output(self, output: Any) -> None:
            capture = self.kc_otel_capture
            lists = output.new_logprobs
            if lists is not None and not capture.asked:
                output.new_logprobs = None
            try:  # noqa: SIM105 - `suppress` costs more than what it would guard
                capture.take(lists, output.finish_reason, output.new_sampling_mask)
            except Exception:  # noqa: BLE001, S110 - what is missing shows in the count of log-probabilities
                pass
            super().update_from_output(output)

    return CapturingLogprobsProcessor
