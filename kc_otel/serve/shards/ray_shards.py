"""Shards as Ray actors: a node that is lost takes none of them with it, for each is started again on another.

An actor is a `Shard` and nothing more; its folder is on storage that every node reaches. The process that serves owns
the actors: they end with it, and are there again when it is.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from kc_otel._extras import extra
from kc_otel.contract.model import Contract
from kc_otel.judge.otlp.requests import ExportResult, Limits
from kc_otel.serve.config import ServeConfig
from kc_otel.serve.shards.shard import Refused, Shard, ShardReport, Stream
from kc_otel.serve.shards.sharded_sink import ShardError

_log: Final = logging.getLogger(__name__)
_LOCAL_STORE: Final = 80 * 1024 * 1024


@contextmanager
def ray_cluster(address: str) -> Iterator[None]:
    """Be connected to a Ray cluster, whose usage statistics this process never sends.

    `address` is `auto` for the one that RAY_ADDRESS or this machine knows, `local` for one that begins and ends with
    this process, or `host:port` of its head.
    """
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    with extra("ray", "kc-otel serve --engine ray"):
        import ray  # noqa: PLC0415 - an extra
    if (mine := not ray.is_initialized()) and address == "local":
        ray.init(
            address="local",
            include_dashboard=False,
            object_store_memory=_LOCAL_STORE,
            log_to_driver=False,
            configure_logging=False,
        )
    elif mine:
        try:
            ray.init(address=address, log_to_driver=False, configure_logging=False)
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


def ray_start(contracts: Sequence[Contract], config: ServeConfig, limits: Limits) -> Callable[[int], RayShard]:
    """Return a function that starts the shard of a given number."""
    folder = config.shard_folder
    assert folder is not None

    def start(number: int) -> RayShard:
        place = folder.absolute() / f"shard-{number:03d}"
        return RayShard(config.shard_cpus, contracts, place, limits)

    return start


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
