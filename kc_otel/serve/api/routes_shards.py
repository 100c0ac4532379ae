"""The shards that streams are on: how they are, and how many there are to be."""

from __future__ import annotations

from fastapi import APIRouter, HTTPException

from kc_otel.serve.api.views import ResizeRequest, ShardView
from kc_otel.serve.core import Core
from kc_otel.serve.shards.shard_health import ShardHealth
from kc_otel.serve.shards.sharded_sink import ShardError

__all__ = ["shard_routes", "shard_views"]

_UNHEARD = ShardHealth(name="", node="", pid=0, started=0.0, recovered=0, streams=0, taken=0, lag=0, cpu=0.0)


def shard_routes(core: Core) -> APIRouter:
    """`/api/v1/shards`."""
    router = APIRouter(prefix="/api/v1", tags=["health"])

    @router.get("/shards")
    async def shards() -> list[ShardView]:
        """Every shard, as it was at the last evaluation; none where streams are in the evaluator's process."""
        return shard_views(core)

    @router.post("/shards")
    async def resize(request: ResizeRequest) -> list[ShardView]:
        """Have another number of shards. Streams move with their senders, who are asked to wait for that."""
        if core.resize is None:
            raise HTTPException(409, "streams are in the evaluator's process; kc-otel serve --engine ray has shards")
        try:
            await core.resize(request.shards)
        except ShardError as error:
            raise HTTPException(503, str(error)) from None
        return shard_views(core)

    return router


def shard_views(core: Core) -> list[ShardView]:
    """Every shard."""
    found = []
    for one in core.shards:
        said = one.health or _UNHEARD
        found.append(
            ShardView(
                number=one.number,
                node=said.node,
                pid=said.pid,
                started=said.started,
                recovered=said.recovered,
                streams=said.streams,
                points=said.taken,
                lag=said.lag,
                waiting=one.waiting,
                cpu_seconds=said.cpu,
                answered=one.answered,
                trouble=one.trouble,
            )
        )
    return found
