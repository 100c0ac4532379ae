"""Place where streams are processed: this process, with an inbox in its state, or shards in front of it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Final

from kc_otel import machine_code
from kc_otel.judge.otlp.requests import Limits, TelemetrySink
from kc_otel.serve.config import ServeConfig, StreamEngine
from kc_otel.serve.core import Core
from kc_otel.serve.durable_sink import DurableSink, TrafficRecording, recover
from kc_otel.serve.shards.sharded_sink import ShardedSink

_log: Final = logging.getLogger(__name__)
Tick = Callable[[], Awaitable[None]]
"""Evaluates every cell once."""


class EngineError(Exception):
    """A requirement of an engine that was not given; the message names it."""


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
        raise EngineError("--record keeps what one process takes, in that order; shards take each for itself")
    from kc_otel.serve.shards.ray_shards import ray_cluster  # noqa: PLC0415 - an extra

    with ray_cluster(config.ray_address):
        yield


@contextlib.asynccontextmanager
async def sink_of(core: Core, config: ServeConfig, limits: Limits) -> AsyncIterator[tuple[TelemetrySink, Tick]]:
    """Return the core's sink for exports (the inbox in the state file, or the shards), and what evaluates every cell.

    Requests that are in the inbox and not in the snapshot are applied. Without a state file it is the core. An
    EngineError if the state file's streams are where the other engine has them: they would count twice.
    """
    state = config.state
    if state is None:
        yield core, core.evaluate
        return
    if core.merged and config.engine is StreamEngine.PROCESS:
        raise EngineError(
            f"{state}: its streams are on shards, and would count twice here; go on with --engine ray, or begin with "
            "another --state"
        )
    if not core.merged and config.engine is StreamEngine.RAY and (len(core.inbox) or core.evaluator.stream_count):
        raise EngineError(
            f"{state}: one process has written it, and its streams would count twice on shards; go on without --engine "
            "ray, or begin with another --state"
        )
    if config.engine is StreamEngine.RAY:
        from kc_otel.serve.shards.ray_shards import ray_start  # noqa: PLC0415 - an extra

        sharded = ShardedSink(core, ray_start(list(core.contracts.values()), config, limits))
        try:
            await sharded.start(config.shards)
            yield sharded, sharded.tick
        finally:
            sharded.close()
        return
    core.evaluator.use_columns()
    if not machine_code.is_available():
        _log.warning("messages take several times as long to process: %s", machine_code.ABSENT)
    if count := recover(core):
        _log.info("%s: %d requests that were received and not yet in the snapshot are applied", state, count)
    if not config.record:
        yield DurableSink(core), core.evaluate
        return
    folder = state.with_name(f"{state.name}-recording")
    with contextlib.closing(TrafficRecording(folder, config.record_limit)) as recording:
        core.recording = recording
        yield DurableSink(core, recording.received), core.evaluate
