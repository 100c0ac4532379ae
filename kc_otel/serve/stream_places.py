"""Place where streams are processed: this process, with an inbox in its state, or Ray actors in front of it.

An actor is a `Shard` and nothing more: a node that is lost takes none of them with it, for each is started again on
another, and its folder is on storage that every node reaches. The process that serves owns the actors: they end with
it, and are there again when it is.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any, Final

from kc_otel import machine_code
from kc_otel._extras import extra
from kc_otel.judge.otlp.requests import ExportResult, Limits, TelemetrySink
from kc_otel.serve.config import ServeConfig, StreamEngine
from kc_otel.serve.core import Core
from kc_otel.serve.durable_sink import DurableSink, TrafficRecording, recover
from kc_otel.serve.shards.shard import Refused, Shard, ShardReport, Stream
from kc_otel.serve.shards.sharded_sink import ShardedSink, ShardError

_log: Final = logging.getLogger(__name__)
_LOCAL_STORE_BYTES: Final = 80 * 1024 * 1024
Tick = Callable[[], Awaitable[None]]
"""Evaluates every cell once."""


@contextlib.contextmanager
def engine(config: ServeConfig) -> Iterator[None]:
    """Be connected to the Ray cluster that streams are spread over, whose usage statistics are never sent.

    `--ray-address` is `auto` for the one that RAY_ADDRESS or this machine knows, `local` for one that begins and ends
    with this process, or `host:port` of its head.
    """
    if config.engine is StreamEngine.PROCESS:
        yield
        return
    if config.state is None or config.shard_folder is None:
        raise ShardError(
            "--engine ray counts nothing twice because judge and shards write how far they are; give --state FILE, and "
            "--shard-folder DIR on storage that every node of the cluster reaches"
        )
    if config.record:
        raise ShardError("--record keeps what one process takes, in that order; shards take each for itself")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    with extra("ray", "kc-otel serve --engine ray"):
        import ray  # noqa: PLC0415 - an extra
    address, local = config.ray_address, dict[str, Any]()
    if address == "local":
        local = {"include_dashboard": False, "object_store_memory": _LOCAL_STORE_BYTES, "configure_logging": False}
    if mine := not ray.is_initialized():
        try:
            ray.init(address=address, log_to_driver=False, **local)
        except (ConnectionError, RuntimeError, ValueError) as error:
            said = str(error).partition("\n")[0]
            raise ShardError(
                f"--ray-address {address}: no Ray cluster answers ({said}); start one with `ray start --head`, name "
                "its head as HOST:6379, or say --ray-address local for one of this machine alone"
            ) from None
    try:
        yield
    finally:
        if mine:
            ray.shutdown()


@contextlib.asynccontextmanager
async def sink_of(core: Core, config: ServeConfig, limits: Limits) -> AsyncIterator[tuple[TelemetrySink, Tick]]:
    """Return the core's sink for exports (the inbox in the state file, or the shards), and what evaluates every cell.

    Requests that are in the inbox and not in the snapshot are applied. Without a state file it is the core. A
    ShardError if the state file's streams are where the other engine has them: they would count twice.
    """
    state = config.state
    if state is None:
        yield core, core.evaluate
        return
    if core.merged and config.engine is StreamEngine.PROCESS:
        raise ShardError(
            f"{state}: its streams are on shards, and would count twice here; go on with --engine ray, or begin with "
            "another --state"
        )
    if not core.merged and config.engine is StreamEngine.RAY and (len(core.inbox) or core.evaluator.stream_count):
        raise ShardError(
            f"{state}: one process has written it, and its streams would count twice on shards; go on without --engine "
            "ray, or begin with another --state"
        )
    if config.engine is StreamEngine.RAY:
        assert config.shard_folder is not None
        folder, contracts = config.shard_folder.absolute(), list(core.contracts.values())

        def begin(number: int) -> RayShard:
            return RayShard(config.shard_cpus, contracts, folder / f"shard-{number:03d}", limits)

        sharded = ShardedSink(core, begin)
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


class RayShard:
    """A shard as an actor, which Ray starts again when its process or its node ends; the rest is that of `Shard`."""

    def __init__(self, cpus: float, *arguments: Any) -> None:
        self._cpus, self._arguments = cpus, arguments
        self._actor = self._begun()

    async def take(self, exports: Sequence[tuple[bytes, float]]) -> list[ExportResult | Refused]:
        """See `Shard`."""
        return await self._asked("take", exports)  # type: ignore[no-any-return]

    async def report(self, settled: int, now: float) -> ShardReport:
        """See `Shard`."""
        return await self._asked("report", settled, now)  # type: ignore[no-any-return]

    async def streams(self) -> list[Stream]:
        """See `Shard`."""
        return await self._asked("streams")  # type: ignore[no-any-return]

    async def adopt(self, streams: Iterable[Stream], settled: int) -> None:
        """See `Shard`."""
        await self._asked("adopt", streams, settled)

    def stop(self) -> None:
        """End the actor's process; its exports are on disk."""
        import ray  # noqa: PLC0415 - an extra

        ray.kill(self._actor)

    async def _asked(self, method: str, *arguments: Any) -> Any:
        from ray.exceptions import ActorDiedError, ActorUnavailableError  # noqa: PLC0415 - an extra

        actor = self._actor
        try:
            answer: Awaitable[Any] = getattr(actor, method).remote(*arguments)
            return await answer
        except ActorDiedError as error:
            # Ray has given it up, as one that could not begin: its folder may still have been held by the one before.
            if isinstance(error, ActorUnavailableError) or actor is not self._actor:
                raise
            _log.warning("a shard has ended and is started anew: %s", str(error).strip().rpartition("\n")[2])
            self._actor = self._begun()
            raise

    def _begun(self) -> Any:
        import ray  # noqa: PLC0415 - an extra

        remote = ray.remote(Shard).options(
            num_cpus=self._cpus,
            max_restarts=-1,
            max_task_retries=0,  # a sender sends again, and is known
            scheduling_strategy="SPREAD",
        )
        return remote.remote(*self._arguments)
