"""The engines of this process: their kernels, and the way of a sampled request through them."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, Final
from weakref import WeakKeyDictionary

from opentelemetry import context

from kc_otel.contract.model import Contract
from kc_otel.integrations.vllm.delivery import RequestDelivery
from kc_otel.integrations.vllm.logprob_capture import EngineCapture, RequestCapture, attach, scores, supported
from kc_otel.integrations.vllm.request_attributes import HEADERS
from kc_otel.integrations.vllm.worker_methods import WORKER_METHOD
from kc_otel.record.kernel import Kernel
from kc_otel.record.sampling import Sampler

_log = logging.getLogger(__name__)
_NO_FIELDS: Final[Mapping[str, Any]] = {}
_RPC_SECONDS: Final = 30.0


class _Engine(EngineCapture):
    """An engine, whose kernel version is known once its workers have said what they know."""

    def __init__(self, engine: Any, contract: Contract) -> None:
        self.config = config = engine.vllm_config
        watermarks = getattr(config, "watermark_config", None) is not None
        super().__init__(str(config.model_config.served_model_name or ""), logprobs_mode_of(config), watermarks)
        self._contract = contract

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
        kernel.log_otherwise(self._contract.name, self._contract.kernels.inference, _log)


class Engines:
    """Every engine of a process, by its output processor; a sampler decides by request id what is delivered."""

    def __init__(self, sampler: Sampler, delivery: RequestDelivery, contract: Contract) -> None:
        self.delivery: Final = delivery
        self._contract = contract
        self._sampler = sampler
        self._engines: WeakKeyDictionary[Any, _Engine] = WeakKeyDictionary()
        self._context: ContextVar[Mapping[str, Any]] = ContextVar("kc_otel_vllm_request", default=_NO_FIELDS)
        self._asking: set[asyncio.Task[None]] = set()

    def known(self, engine: Any) -> bool:
        """Return True if an engine has been seen before."""
        return engine.output_processor in self._engines

    def register(self, engine: Any) -> None:
        """Meet an engine that is driven by calls, and ask its workers; a call of some milliseconds, once."""
        state = self._engines[engine.output_processor] = _Engine(engine, self._contract)
        try:
            workers = engine.collective_rpc(WORKER_METHOD, timeout=_RPC_SECONDS)
        except Exception as error:  # noqa: BLE001 - any failure of a worker is a failure of the remote call
            workers = _unanswered(error)
        state.set_kernel(workers)

    def register_async(self, engine: Any) -> None:
        """Meet an engine that runs in an event loop, and have its workers asked there."""
        state = self._engines[engine.output_processor] = _Engine(engine, self._contract)

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
        """Note a completion that the front end has registered and hands to the core."""
        engine = self._engines.get(processor)
        state = processor.request_states.get(request.request_id)
        if engine is None or state is None or state.logprobs_processor is None:
            return
        if hasattr(state.logprobs_processor, "kc_otel_capture"):  # the next part of a request that streams its input
            return
        if scores(request):
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
            attach(request, state, self._context.get(), engine)

    def stepped(self, processor: Any, stopped: Collection[str]) -> None:
        """Note a step of the front end; `stopped` ended with a stop string, which the core does not see."""
        engine = self._engines.get(processor)
        if engine is None or not engine.touched:
            return
        if stopped:
            for capture in engine.touched:
                if capture.request_id in stopped:
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
        if capture.finish_reason in ("abort", "error"):
            reason = "aborted" if capture.finish_reason == "abort" else "error"
            self.delivery.drop(reason, "the engine did not finish it")
            return
        # Copies, because the caller uses these lists, too.
        capture.prompt_ids, capture.token_ids = list(capture.prompt_ids), list(capture.detokenizer.output_token_ids)
        capture.versions = tuple(capture.versions)
        self.delivery.submit(capture)


def _unanswered(error: Exception) -> list[Mapping[str, str]]:
    _log.warning("kc-otel: the workers did not say which attention backend they use (%s)", error)
    return []


_PARALLEL_SIZES: Final = (
    ("tp", "tensor_parallel_size"),
    ("pp", "pipeline_parallel_size"),
    ("dp", "data_parallel_size"),
    ("dcp", "decode_context_parallel_size"),
)
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
    splits = [f"{short}={size}" for short, name in _PARALLEL_SIZES if (size := getattr(parallel, name, 1)) != 1]
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
        parallelism=",".join(splits),
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
