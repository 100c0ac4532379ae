"""Health of shards: their own reports, and the judge's view of them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ShardHealth:
    """A shard's own report; a shard owns the streams of its share of senders.

    Attributes:
        name: Of its folder; another folder begins with numbers of its own.
        node: Host that it runs on; empty before it answered.
        pid: Its process.
        started: Unix time in seconds at which it began; later than the evaluator's where it was started again.
        recovered: Exports that it took from its log then.
        streams: Streams that it has.
        points: Points that it took since then.
        lag: Bytes that wait for the disk, or are in its log and in no batch.
        cpu_seconds: CPU time that its process used.
    """

    name: str = ""
    node: str = ""
    pid: int = 0
    started: float = 0.0
    recovered: int = 0
    streams: int = 0
    points: int = 0
    lag: int = 0
    cpu_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class ShardSeen(ShardHealth):
    """The judge's view of a shard: its last report, as the API shows it.

    Attributes:
        number: From 0; senders are divided over the numbers by their resource attributes.
        answered: Unix time in seconds of that report; 0 before the first one.
        waiting: Bytes of exports that wait for it in the evaluator.
        trouble: Reason why it does not answer; empty if it does.
    """

    number: int = 0
    answered: float = 0.0
    waiting: int = 0
    trouble: str = ""
