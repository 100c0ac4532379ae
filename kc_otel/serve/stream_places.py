"""Where streams are taken: in this process with a log beside its state, or on shards in front of it."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from typing import Final

from kc_otel import machine_code
from kc_otel.judge.otlp.request_limits import Limits
from kc_otel.judge.otlp.sink import TelemetrySink
from kc_otel.serve.config import ServeConfig, StreamEngine
from kc_otel.serve.core import Core
from kc_otel.serve.durable_sink import DurableSink, recover, tick_on_record
from kc_otel.serve.shards.sharded_sink import ShardedSink
from kc_otel.serve.store.write_ahead_log import WriteAheadLog

__all__ = ["EngineError", "engine", "sink_of", "tick_of"]

_log: Final = logging.getLogger(__name__)


class EngineError(Exception):
    """What an engine needs was not given; the message says what."""


@contextlib.contextmanager
def engine(config: ServeConfig) -> Iterator[None]:
    """The cluster that streams are spread over, where they are."""
    if config.engine is StreamEngine.PROCESS:
        yield
        return
    if config.state is None or config.shard_folder is None:
        raise EngineError(
            "--engine ray counts nothing twice because judge and shards write how far they are; give --state FILE, and "
            "--shard-folder DIR on storage that every node of the cluster reaches"
        )
    if config.record:
        raise EngineError("--record keeps one process's log, in the order of arrival; shards have a log each")
    from kc_otel.serve.shards.ray_shards import ray_cluster  # noqa: PLC0415 - an extra

    with ray_cluster(config.ray_address):
        yield


@contextlib.asynccontextmanager
async def sink_of(core: Core, config: ServeConfig, limits: Limits) -> AsyncIterator[TelemetrySink]:
    """What takes exports for the core: by way of the log beside the state file, or of shards.

    What a log has and the state has not is applied. Without a state file it is the core itself.

    Raises:
        EngineError: If the state file's streams are where the other engine has them: they would count twice.
        ShardError: If shards do not start.
        LogError: If the log cannot be written.
    """
    state, keep = config.state, config.record_limit if config.record else 0
    if state is None:
        yield core
        return
    folder = state.with_name(f"{state.name}-log")
    if core.merged and config.engine is StreamEngine.PROCESS:
        raise EngineError(
            f"{state}: its streams are on shards, and would count twice here; go on with --engine ray, or begin with "
            "another --state"
        )
    if not core.merged and config.engine is StreamEngine.RAY and (folder.exists() or core.evaluator.stream_count):
        raise EngineError(
            f"{state}: one process has written it, and its streams would count twice on shards; go on without --engine "
            "ray, or begin with another --state"
        )
    if config.engine is StreamEngine.RAY:
        from kc_otel.serve.shards.ray_shards import ray_start  # noqa: PLC0415 - an extra

        sharded = ShardedSink(core, ray_start(list(core.contracts.values()), config, limits))
        try:
            await sharded.resize(config.shards)
            yield sharded
        finally:
            sharded.close()
        return
    log = WriteAheadLog(folder, sync=config.sync, begin=core.position, keep=keep)
    core.evaluator.use_columns()
    if not machine_code.is_available():
        _log.warning("requests are read one point at a time, a fortieth as fast: %s", machine_code.ABSENT)
    try:
        if count := recover(core, log):
            _log.info("%s: %d requests that were received and not yet saved are applied", log.folder, count)
        core.log = log
        yield DurableSink(core, log)
    finally:
        log.close()


def tick_of(core: Core, config: ServeConfig, sink: TelemetrySink) -> Callable[[], Awaitable[None]]:
    """What evaluates every cell, once."""
    if isinstance(sink, ShardedSink):
        return sink.tick
    if config.record and core.log is not None:
        return partial(tick_on_record, core, core.log)

    async def tick() -> None:
        await core.evaluate(time.time())

    return tick
