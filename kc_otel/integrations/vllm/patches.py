"""Changes to vLLM while it is instrumented, undone afterwards.

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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from kc_otel._extras import extra
from kc_otel.integrations.vllm.engines import Engines
from kc_otel.integrations.vllm.plugin import WORKER_METHODS, WORKER_MODULE
from kc_otel.integrations.vllm.settings import RequestHeaders

_log = logging.getLogger(__name__)


class Patches:
    """The wrappers of one instrumentation; `serving` is called where an HTTP server is made, before it answers."""

    def __init__(self, engines: Engines, serving: Callable[[], None]) -> None:
        self._engines = engines
        self._serving = serving
        self._undo: list[tuple[Any, str, Any]] = []
        self._active = False

    def apply(self) -> None:
        """Wrap loaded modules now and the others when they are imported."""
        with extra("vllm", "the instrumentation of vLLM"):
            from wrapt import register_post_import_hook  # noqa: PLC0415 - comes with opentelemetry-instrumentation

        self._active = True
        for module, wrap in self._targets().items():
            # Called at once for a module that is loaded already.
            register_post_import_hook(functools.partial(self._loaded, wrap), module)

    def revert(self) -> None:
        """Restore the originals; where another wrapper surrounds ours, ours passes calls through."""
        self._active = False
        for owner, name, ours in reversed(self._undo):
            if owner.__dict__.get(name) is not ours:
                _log.warning("kc-otel: %s.%s has been wrapped again and stays", owner.__name__, name)
            elif hasattr(ours, "__wrapped__"):
                setattr(owner, name, ours.__wrapped__)
            else:
                delattr(owner, name)
        self._undo.clear()

    def _targets(self) -> Mapping[str, Callable[[Any], None]]:
        return {
            "vllm.v1.engine.output_processor": self._output_processor,
            "vllm.v1.engine.llm_engine": lambda module: self._engine(module.LLMEngine, self._engines.register),
            "vllm.v1.engine.async_llm": lambda module: self._engine(module.AsyncLLM, self._engines.register_async),
            "vllm.entrypoints.launchers.app": self._server,
            WORKER_MODULE: self._workers,
        }

    def _loaded(self, wrap: Callable[[Any], None], module: Any) -> None:
        if not self._active:
            return
        try:
            wrap(module)
        except Exception as error:  # noqa: BLE001 - another version of vLLM; it has to start all the same
            _log.warning("kc-otel: %s is not as expected (%r); it is not instrumented", module.__name__, error)

    def _workers(self, module: Any) -> None:
        # The plugin may have given them, in which case they stay.
        for name, method in WORKER_METHODS.items() - module.WorkerBase.__dict__.items():
            self._put(module.WorkerBase, name, method)

    def _output_processor(self, module: Any) -> None:
        engines, processor_class = self._engines, module.OutputProcessor
        request = _argument(processor_class.add_request, "request")

        def added(processor: Any, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            engines.registered(processor, request(args, kwargs))

        def processed(processor: Any, result: Any, *_: Any) -> None:
            engines.stepped(processor, result.reqs_to_abort)

        for name, then in (("add_request", added), ("process_outputs", processed)):
            self._wrap(processor_class, name, functools.partial(self._after, then))

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

    def _engine(self, engine_class: Any, register: Callable[[Any], None]) -> None:
        def make(wrapped: Any) -> Any:
            trace_headers = _argument(wrapped, "trace_headers")

            def add_request(engine: Any, *args: Any, **kwargs: Any) -> Any:
                with self._request(engine, register, trace_headers(args, kwargs)):
                    return wrapped(engine, *args, **kwargs)

            async def awaited(engine: Any, *args: Any, **kwargs: Any) -> Any:
                with self._request(engine, register, trace_headers(args, kwargs)):
                    return await wrapped(engine, *args, **kwargs)

            return awaited if inspect.iscoroutinefunction(wrapped) else add_request

        self._wrap(engine_class, "add_request", make)

    @contextmanager
    def _request(self, engine: Any, register: Callable[[Any], None], trace_headers: Any) -> Iterator[None]:
        """Meet the engine of a request, and remember where that comes from while its completions are registered."""
        if not self._active:
            yield
            return
        try:
            if not self._engines.known(engine):
                register(engine)
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

        self._wrap(module, "init_entrypoints_middleware", make)

    def _fail(self, error: Exception) -> None:
        self._engines.delivery.drop("failed", error)

    def _wrap(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        wrapped = owner.__dict__[name]
        self._put(owner, name, functools.wraps(wrapped)(make(wrapped)))

    def _put(self, owner: Any, name: str, ours: Any) -> None:
        setattr(owner, name, ours)
        self._undo.append((owner, name, ours))


def _argument(function: Any, name: str) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
    """Return a reader of a method's argument from its call, `self` left out."""
    position = list(inspect.signature(function).parameters).index(name) - 1

    def read(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args[position] if len(args) > position else kwargs.get(name)

    return read
