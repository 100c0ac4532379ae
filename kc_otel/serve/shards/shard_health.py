"""Health of shards: their own reports, and the judge's view of them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ShardHealth:
    """A shard's own report.

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
    """The judge's view of a shard.

    Attributes:
        number: From 0.
        health: Its last report; None before the first one.
        answered: Unix time in seconds of that report.
        waiting: Bytes of exports that wait for it.
        trouble: Reason why it does not answer; empty if it does.
    """

    number: int
    health: ShardHealth | None = None
    answered: float = 0.0
    waiting: int = 0
    trouble: str = ""
