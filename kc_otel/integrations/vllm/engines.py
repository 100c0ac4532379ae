"""What is known of each engine of this process, and the way of a sampled request through it."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, Final
from weakref import WeakKeyDictionary

from opentelemetry import baggage, context, trace

from kc_otel.integrations.vllm.completion import Completion
from kc_otel.integrations.vllm.delivery import RequestDelivery
from kc_otel.integrations.vllm.fingerprint import WORKER_METHOD, kernel_of, logprobs_mode_of
from kc_otel.integrations.vllm.logprob_capture import RequestCapture, StepCapture, attach, supported
from kc_otel.integrations.vllm.request_attributes import HEADERS
from kc_otel.record.kernel import Kernel
from kc_otel.record.sampling import Sampler

__all__ = ["Engines"]

_log = logging.getLogger(__name__)
_NOTHING: Final[Mapping[str, Any]] = {}
_RPC_SECONDS: Final = 30.0
_SECRET: Final = frozenset({"authorization", "proxy-authorization", "cookie", "x-api-key"})


class _Engine:
    """One engine: its kernel version, and what its steps brought."""

    def __init__(self, engine: Any) -> None:
        config = engine.vllm_config
        self.config: Final = config
        self.model: Final = str(config.model_config.served_model_name or "")
        self.logprobs_mode: Final = logprobs_mode_of(config)
        self.kernel: Final[Future[Kernel]] = Future()
        self.step: Final = StepCapture()

    def set_kernel(self, workers: list[Mapping[str, str]]) -> None:
        """The kernel version, now that the workers have said what they know."""
        from vllm import __version__ as version  # noqa: PLC0415 - only where vLLM runs

        try:
            kernel = kernel_of(self.config, version, workers, os.environ)
        except Exception as error:  # noqa: BLE001 - a field that this version of vLLM has no more
            _log.warning("kc-otel: the engine's configuration could not be read (%s); its kernel is only 'vllm'", error)
            kernel = Kernel("vllm", version=version)
        self.kernel.set_result(kernel)
        _log.info("kc-otel: recording kernel %s: %s", kernel.fingerprint, kernel.attributes())


class Engines:
    """Every engine of a process, by its output processor.

    Args:
        sampler: Decides by request id.
        delivery: Takes what is finished.
    """

    def __init__(self, sampler: Sampler, delivery: RequestDelivery) -> None:
        self.delivery: Final = delivery
        self._sampler = sampler
        self._engines: WeakKeyDictionary[Any, _Engine] = WeakKeyDictionary()
        self._context: ContextVar[Mapping[str, Any]] = ContextVar("kc_otel_vllm_request", default=_NOTHING)
        self._asking: set[asyncio.Task[None]] = set()

    def known(self, engine: Any) -> bool:
        """Whether an engine has been seen before."""
        return engine.output_processor in self._engines

    def register(self, engine: Any) -> None:
        """Meet an engine that is driven by calls, and ask its workers; a call of some milliseconds, once."""
        state = self._engines[engine.output_processor] = _Engine(engine)
        try:
            workers = engine.collective_rpc(WORKER_METHOD, timeout=_RPC_SECONDS)
        except Exception as error:  # noqa: BLE001 - any failure of a worker is a failure of the remote call
            workers = _unanswered(error)
        state.set_kernel(workers)

    def register_async(self, engine: Any) -> None:
        """Meet an engine that runs in an event loop, and have its workers asked there."""
        state = self._engines[engine.output_processor] = _Engine(engine)

        async def ask() -> None:
            try:
                workers = await engine.collective_rpc(WORKER_METHOD, timeout=_RPC_SECONDS)
            except Exception as error:  # noqa: BLE001
                workers = _unanswered(error)
            state.set_kernel(workers)

        task = asyncio.get_running_loop().create_task(ask())
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)

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
        """A completion has been registered in the front end and goes to the core next."""
        engine = self._engines.get(processor)
        state = processor.request_states.get(request.request_id)
        if engine is None or state is None or state.logprobs_processor is None:
            return
        if hasattr(state.logprobs_processor, "kc_otel_capture"):  # the next part of a request that streams its input
            return
        self.delivery.count("seen")
        if not self._sampler.takes(state.external_req_id):
            return
        self.delivery.count("sampled")
        if engine.logprobs_mode is None:
            mode = engine.config.model_config.logprobs_mode
            self.delivery.drop("unsupported", f"logprobs_mode {mode} reports logits; use processed_logprobs")
        elif not supported(request):
            self.delivery.drop("unsupported", "only whole prompts of text tokens can be scored again")
        else:
            attach(request, state, self._context.get(), engine.step)

    def stepped(self, processor: Any, stopped: Collection[str]) -> None:
        """The front end has processed a step; `stopped` ended with a stop string, of which the core knows nothing."""
        engine = self._engines.get(processor)
        if engine is None or not engine.step.touched:
            return
        if stopped:
            for capture in engine.step.touched:
                if capture.request_id in stopped:
                    capture.finish("stop")
        engine.step.touched.clear()
        while engine.step.finished:
            self._deliver(engine, engine.step.finished.pop())

    def detach(self) -> None:
        """Collect nothing more. Requests under way keep their captures, which let everything pass."""
        for engine in self._engines.values():
            engine.step.closed = True
            engine.step.touched.clear()
        self._engines.clear()

    def _deliver(self, engine: _Engine, capture: RequestCapture) -> None:
        if capture.finish_reason in ("abort", "error"):
            reason = "aborted" if capture.finish_reason == "abort" else "error"
            self.delivery.drop(reason, "the engine did not finish it")
            return
        # Copies, because the caller has these lists in hand, too.
        prompt_ids, token_ids = list(capture.prompt_ids), list(capture.detokenizer.output_token_ids)
        versions = tuple(version for version, _ in capture.versions)

        def make() -> Completion:
            headers = _headers(capture.context.get("headers", ()))
            return Completion(
                capture.request_id,
                capture.external_id,
                prompt_ids,
                token_ids,
                capture.logprobs,
                capture.params,
                finish_reason=capture.finish_reason,
                model=engine.model,
                lora=capture.lora,
                weight_versions=versions,
                headers=headers,
                baggage=_baggage(capture.context.get("otel"), headers),
                traceparent=_traceparent(capture.context.get("otel"), capture.context.get("trace") or headers),
                at=capture.at,
            )

        tokens = len(prompt_ids) + 2 * len(token_ids)
        self.delivery.submit(make, tokens, engine.kernel, str(engine.logprobs_mode))


def _unanswered(error: Exception) -> list[Mapping[str, str]]:
    _log.warning("kc-otel: the workers did not say which attention backend they use (%s)", error)
    return []


def _headers(raw: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """Headers as text, without those that are secrets."""
    found = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in raw}
    return {name: value for name, value in found.items() if name not in _SECRET}


def _baggage(current: Any, headers: Mapping[str, str]) -> dict[str, str]:
    """Baggage of the OpenTelemetry context where a program's own instrumentation has put it, else of the request."""
    found = baggage.get_all(current) if current is not None else {}
    if not found and "baggage" in headers:
        from opentelemetry.baggage.propagation import W3CBaggagePropagator  # noqa: PLC0415 - few requests have any

        found = baggage.get_all(W3CBaggagePropagator().extract({"baggage": headers["baggage"]}))
    return {name: str(value) for name, value in found.items()}


def _traceparent(current: Any, headers: Mapping[str, str]) -> str:
    """The span that was current, else what the sender said."""
    span = trace.get_current_span(current).get_span_context() if current is not None else trace.INVALID_SPAN_CONTEXT
    if span.is_valid:
        return f"00-{span.trace_id:032x}-{span.span_id:016x}-{int(span.trace_flags):02x}"
    return headers.get("traceparent", "")
