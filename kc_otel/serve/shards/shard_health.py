"""How shards are: what each says of itself, and what the judge sees of it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ShardHealth", "ShardSeen"]


@dataclass(frozen=True, slots=True)
class ShardHealth:
    """What a shard says of itself.

    Attributes:
        name: Of its folder; another folder begins with numbers of its own.
        node: Host that it runs on.
        pid: Its process.
        started: Unix time in seconds at which it began.
        recovered: Exports that it took from its log then.
        streams: Streams that it has.
        taken: Points that it took since then.
        lag: Bytes that wait for the disk, or are in its log and in no batch.
        cpu: Seconds of CPU time that its process used.
    """

    name: str
    node: str
    pid: int
    started: float
    recovered: int
    streams: int
    taken: int
    lag: int
    cpu: float


@dataclass(frozen=True, slots=True)
class ShardSeen:
    """What the judge sees of a shard.

    Attributes:
        number: From 0.
        health: What it said last; None before it said anything.
        answered: Unix time in seconds at which it did.
        waiting: Bytes of exports that wait for it.
        trouble: Why it is not heard; empty where it is.
    """

    number: int
    health: ShardHealth | None = None
    answered: float = 0.0
    waiting: int = 0
    trouble: str = ""
