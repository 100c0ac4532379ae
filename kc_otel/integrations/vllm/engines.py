"""What is known of each engine of this process, and the way of a sampled request through it."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, Final
from weakref import WeakKeyDictionary

from opentelemetry import context

from kc_otel.integrations.vllm.completion import FinishedCapture
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
        self.delivery.submit(
            FinishedCapture(
                capture,
                list(capture.prompt_ids),
                list(capture.detokenizer.output_token_ids),
                tuple(capture.versions),
                engine.model,
                engine.kernel,
                str(engine.logprobs_mode),
                getattr(engine.config, "watermark_config", None) is not None,
            )
        )


def _unanswered(error: Exception) -> list[Mapping[str, str]]:
    _log.warning("kc-otel: the workers did not say which attention backend they use (%s)", error)
    return []
