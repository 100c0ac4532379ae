"""The engines of this process: their kernels, and the log-probabilities of the requests that they sample.

The engine's core is asked for the log-probability of the sampled token (`logprobs=0`) after the front end has made its
own state of the request, which still says that nobody asked. So nothing has to be taken out of a response again: vLLM
builds the same one as ever, for every kind of stream. The price is a number appended to a list per step and sampled
request, less than what vLLM itself does per token when log-probabilities are on.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import logging
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache, partial
from typing import Any, Final
from weakref import WeakKeyDictionary

from opentelemetry import context

from kc_otel.contract.model import Contract
from kc_otel.integrations.vllm.delivery import (
    NOT_SCORABLE,
    Completion,
    RequestDelivery,
    baggage_of,
    headers_of,
    kept_of,
    traceparent_of,
)
from kc_otel.integrations.vllm.plugin import WORKER_METHOD
from kc_otel.integrations.vllm.settings import HEADERS
from kc_otel.record.kernel import Kernel, parallelism_of

_log = logging.getLogger(__name__)
_NO_FIELDS: Final[Mapping[str, Any]] = {}
_RPC_SECONDS: Final = 30.0


@dataclass(slots=True, eq=False)
class EngineCapture:
    """One engine, and the captures that received data in a step of it, and those of them that are done.

    Its kernel is known once its workers have said what they know. `logprobs_mode` is None when it reports logits.
    Requests get its watermark, if it has one, unless they say no. Once it is `closed`, requests under way go on
    without being collected.
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
    """A completion as far as it has come, of lists that vLLM keeps anyway, and of copies once it is done."""

    completion: Completion
    detokenizer: Any
    context: Mapping[str, Any]
    engine: EngineCapture
    asked: bool = False
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
        """Finish the capture, once."""
        if not self.completion.finish_reason:
            self.completion = replace(self.completion, finish_reason=reason, at=time.time_ns())
            self.engine.finished.append(self)

    def deliver(self, delivery: RequestDelivery) -> None:
        """Hand it over with copies of the lists, because the caller uses them, too."""
        prompt, tokens = list(self.completion.prompt_ids), list(self.detokenizer.output_token_ids)
        versions = tuple(self.completion.weight_versions)
        self.completion = replace(self.completion, prompt_ids=prompt, token_ids=tokens, weight_versions=versions)
        numbers = len(prompt) + 2 * len(tokens) + sum(len(mask.token_ids) for mask in self.masks)
        delivery.submit(self.whole, self.engine.kernel, str(self.engine.logprobs_mode), numbers)

    def whole(self) -> Completion:
        """The completion, with the headers and the trace that its request came with."""
        headers, otel = headers_of(self.context.get("headers", ())), self.context.get("otel")
        return replace(
            self.completion,
            logprobs=self.logprobs,
            headers=headers,
            baggage=baggage_of(otel, headers),
            traceparent=traceparent_of(otel, self.context.get("trace") or headers),
            kept=kept_of(self.masks, len(self.completion.token_ids)),
            watermarked=self.engine.watermarks and getattr(self.completion.params, "watermarking", None) is not False,
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
    completion = Completion(
        request.request_id,
        state.external_req_id,
        state.prompt_token_ids,
        (),
        (),
        params,
        model=engine.model,
        lora=state.lora_name or "",
        weight_versions=getattr(state, "weight_version_starts", ()),
    )
    capture = RequestCapture(completion, state.detokenizer, context, engine, asked=params.num_logprobs is not None)
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


class Engines:
    """Every engine of a process, by its output processor."""

    def __init__(self, delivery: RequestDelivery, contract: Contract) -> None:
        self.delivery: Final = delivery
        self._contract = contract
        self._engines: WeakKeyDictionary[Any, EngineCapture] = WeakKeyDictionary()
        self._context: ContextVar[Mapping[str, Any]] = ContextVar("kc_otel_vllm_request", default=_NO_FIELDS)
        self._asking: set[asyncio.Task[Any]] = set()

    def known(self, engine: Any) -> bool:
        """Return True if an engine has been seen before."""
        return engine.output_processor in self._engines

    def register(self, engine: Any) -> None:
        """Meet an engine, and ask its workers; a call of some milliseconds, once, or a task of its event loop."""
        config = engine.vllm_config
        watermarks = getattr(config, "watermark_config", None) is not None
        state = EngineCapture(str(config.model_config.served_model_name or ""), logprobs_mode_of(config), watermarks)
        self._engines[engine.output_processor] = state

        def answered(ask: Callable[[], Any]) -> None:
            try:
                workers = ask()
            except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - any failure of a worker
                _log.warning("kc-otel: the workers did not say which attention backend they use (%s)", error)
                workers = []
            self._set_kernel(state, config, workers)

        ask = partial(engine.collective_rpc, WORKER_METHOD, timeout=_RPC_SECONDS)
        if not inspect.iscoroutinefunction(engine.collective_rpc):
            answered(ask)
            return
        task = asyncio.get_running_loop().create_task(ask())
        self._asking.add(task)  # the loop has only a weak reference
        task.add_done_callback(self._asking.discard)
        task.add_done_callback(lambda done: answered(done.result))

    def _set_kernel(self, state: EngineCapture, config: Any, workers: list[Mapping[str, str]]) -> None:
        from vllm import __version__ as version  # noqa: PLC0415 - only where vLLM runs

        try:
            kernel = kernel_of(config, version, workers, os.environ)
        except Exception as error:  # noqa: BLE001 - a field that this version of vLLM has no more
            _log.warning("kc-otel: the engine's configuration could not be read (%s); its kernel is only 'vllm'", error)
            kernel = Kernel("vllm", version=version)
        state.kernel.set_result(kernel)
        _log.info("kc-otel: recording kernel %s: %s", kernel.fingerprint, kernel.attributes())
        kernel.log_otherwise(self._contract.name, self._contract.kernels.inference, _log)

    @contextmanager
    def request_context(self, trace_headers: Mapping[str, str] | None) -> Iterator[None]:
        """Remember where a request comes from while the engine registers its completions."""
        come = {"trace": trace_headers or {}, "headers": HEADERS.get(), "otel": context.get_current()}
        token = self._context.set(come)
        try:
            yield
        finally:
            with suppress(ValueError):  # a stream that nobody finished may be closed in another context
                self._context.reset(token)

    def registered(self, processor: Any, request: Any) -> None:
        """Note a completion that the front end has registered and hands to the core."""
        engine = self._engines.get(processor)
        state = processor.request_states.get(request.request_id)
        if engine is None or state is None or state.logprobs_processor is None:
            return
        if hasattr(state.logprobs_processor, "kc_otel_capture"):  # the next part of a request that streams its input
            return
        if scores(request):
            return
        unsupported = "" if supported(request) else NOT_SCORABLE
        if engine.logprobs_mode is None:
            unsupported = "its logprobs_mode reports logits; use processed_logprobs"
        if self.delivery.takes(state.external_req_id, unsupported):
            attach(request, state, self._context.get(), engine)

    def stepped(self, processor: Any, stopped: Collection[str]) -> None:
        """Note a step of the front end; `stopped` ended with a stop string, which the core does not see."""
        engine = self._engines.get(processor)
        if engine is None or not engine.touched:
            return
        if stopped:
            for capture in engine.touched:
                if capture.completion.request_id in stopped:
                    capture.finish("stop")
        engine.touched.clear()
        while engine.finished:
            self._deliver(engine.finished.pop())

    def detach(self) -> None:
        """Collect nothing more. Requests under way keep their captures, which let everything pass."""
        for engine in self._engines.values():
            engine.closed = True
            engine.touched.clear()
        self._engines.clear()

    def _deliver(self, capture: RequestCapture) -> None:
        reason = {"abort": "aborted", "error": "error"}.get(capture.completion.finish_reason)
        if reason is None:
            capture.deliver(self.delivery)
        else:
            self.delivery.drop(reason, "the engine did not finish it")


_PARALLEL_SIZES: Final = {
    "tp": "tensor_parallel_size",
    "pp": "pipeline_parallel_size",
    "dp": "data_parallel_size",
    "dcp": "decode_context_parallel_size",
}
_ENVIRONMENT: Final = ("VLLM_BATCH_INVARIANT", "VLLM_CPU_ATTN_SPLIT_KV", "VLLM_CPU_INT4_W4A8")
"""Variables that change what vLLM computes without appearing in its configuration."""
_MODES: Final = {"raw_logprobs": "raw", "processed_logprobs": "processed"}


def kernel_of(
    config: Any, version: str, workers: Sequence[Mapping[str, str]], environment: Mapping[str, str]
) -> Kernel:
    """The kernel version of an engine, by vLLM's `VllmConfig` and version, its workers' reports and the environment."""
    model, cache, parallel, compilation = (
        config.model_config, config.cache_config, config.parallel_config, config.compilation_config,
    )  # fmt: skip
    extra: dict[str, Any] = {name.lower(): environment[name] for name in _ENVIRONMENT if environment.get(name)}
    speculative = getattr(config, "speculative_config", None)
    if speculative is not None:
        extra["speculative"] = str(getattr(speculative, "method", "yes"))
    return Kernel(
        "vllm",
        version=version,
        dtype=model.dtype,
        quantization=model.quantization,
        kv_cache_dtype=cache.cache_dtype,
        attention=_joined(workers, "attention"),
        parallelism=parallelism_of(parallel, **_PARALLEL_SIZES),
        compile=_compilation(model, compilation),
        hardware=_joined(workers, "hardware"),
        extra=extra,
    )


def logprobs_mode_of(config: Any) -> str | None:
    """`raw` or `processed`; None when the engine reports logits in place of log-probabilities."""
    return _MODES.get(str(getattr(config.model_config, "logprobs_mode", "raw_logprobs")))


def _compilation(model: Any, compilation: Any) -> str:
    if model.enforce_eager:
        return "eager"
    graphs = getattr(compilation.cudagraph_mode, "name", compilation.cudagraph_mode)
    mode = getattr(compilation, "mode", None)
    return f"{getattr(mode, 'name', mode)},graphs={graphs}".lower()


def _joined(workers: Sequence[Mapping[str, str]], name: str) -> str:
    return "+".join(sorted({worker[name] for worker in workers if worker.get(name)}))
