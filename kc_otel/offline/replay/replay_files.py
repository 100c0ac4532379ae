"""A recording under one contract, or under two to see what differs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

from kc_otel.contract.model import Contract
from kc_otel.judge.escalation.message_groups import GroupTiming
from kc_otel.offline.replay.coverage import unmeasured
from kc_otel.offline.replay.differences import TimelineDifferences, differences
from kc_otel.offline.replay.replay_run import replay
from kc_otel.offline.replay.timeline import ReplayTimeline
from kc_otel.offline.replay.traffic_reading import (
    TrafficFileError,
    evaluations_recorded,
    read_recordings,
    recorded_files,
)

__all__ = ["EVERY", "Replayed", "as_data", "replay_recordings"]

EVERY: Final = 10.0
"""Seconds between evaluations where neither the recording nor a person says."""
_LARGE: Final = 8 * 1024 * 1024
"""Bytes of recordings from which a second process is worth its start."""

_Found = tuple[ReplayTimeline, tuple[str, ...]]
"""A timeline, and what had to be left out for it."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a replay found.

    Attributes:
        new: The timeline under the contract that was asked about.
        old: The timeline under the contract it was compared with; None when there was none.
        changed: How they differ; None when there was nothing to compare with.
        not_recorded: What the new contract asks for and the recording does not have, as sentences.
        damage: What of the recording had to be left out, as sentences with file and line or message.
    """

    new: ReplayTimeline
    old: ReplayTimeline | None
    changed: TimelineDifferences | None
    not_recorded: tuple[str, ...]
    damage: tuple[str, ...]


def replay_recordings(
    paths: Sequence[Path],
    new: Contract,
    old: Contract | None = None,
    every: float | None = None,
    timing: GroupTiming | None = None,
) -> Replayed:
    """Replay recordings through a contract and, if given, through the one in force.

    Args:
        paths: Recordings, in any order.
        new: The contract that is considered.
        old: The contract in force; None to see only what the new one does.
        every: Seconds between evaluations; None for the recording's own, or every `EVERY` where it has none.
        timing: How long webhooks wait for what belongs to them; None for what `kc-otel serve` does by default.

    Raises:
        RecordingError: If a recording cannot be used, or is one of another contract.
        ValueError: If the contracts are not of one name, `every` is not positive, or one cannot be evaluated.
    """
    if old is not None and old.name != new.name:
        raise ValueError(
            f"metadata.name: {old.name!r} and {new.name!r} are two contracts; streams carry the name of theirs, "
            "so that only versions of one contract can be compared"
        )
    if every is None and not evaluations_recorded(paths):
        every = EVERY
    waits = timing or GroupTiming()
    if old is None:
        timeline, damage = _timeline(paths, new, every, waits)
        return Replayed(timeline, None, None, timeline.not_recorded, damage)
    (timeline, damage), (before, _) = _both(paths, new, old, every, waits)
    changed = differences(before, timeline, apart=max(old.observability.window, new.observability.window))
    return Replayed(timeline, before, changed, (*timeline.not_recorded, *unmeasured(old, new)), damage)


def as_data(found: Replayed) -> dict[str, Any]:
    """A replay as JSON data: the dataclasses' fields under their names, and by how many seconds what moved is later."""
    plain = asdict(found)
    if found.changed is not None:
        plain["changed"] |= {
            name: [asdict(one) | _shift(one.later, one.ends_later) for one in getattr(found.changed, name)]
            for name in ("alerts_moved", "decisions_moved")
        }
        plain["changed"]["messages"] = [
            {"endpoint": endpoint, "reason": reason, "old": before, "new": after}
            for (endpoint, reason), (before, after) in found.changed.messages.items()
        ]
    return plain


def _shift(later: float, ends_later: float) -> dict[str, float | None]:
    """Seconds; `ends_later` is null where only one of the two ends at all."""
    return {"later": later, "ends_later": ends_later if math.isfinite(ends_later) else None}


def _both(
    paths: Sequence[Path], new: Contract, old: Contract, every: float | None, waits: GroupTiming
) -> tuple[_Found, _Found]:
    if sum(file.stat().st_size for path in paths for file in recorded_files(path) if file.exists()) < _LARGE:
        return _timeline(paths, new, every, waits), _timeline(paths, old, every, waits)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:  # each reads for itself
        waiting = pool.submit(_timeline, paths, old, every, waits)
        return _timeline(paths, new, every, waits), waiting.result()


def _timeline(paths: Sequence[Path], contract: Contract, every: float | None, waits: GroupTiming) -> _Found:
    damage: list[str] = []
    timeline = replay(contract, read_recordings(paths, damage), every, waits)
    if not timeline.requests:
        more = f" ({damage[0]})" if damage else ""
        raise TrafficFileError(f"{paths[0]}: holds no metrics{more}; give the recording of a pipeline of metrics")
    if timeline.points.get("unknown_contract") and not timeline.points.get("accepted"):
        names = ", ".join(sorted(_names(paths)))
        raise TrafficFileError(
            f"{paths[0]}: is a recording of {names}, not of {contract.name}; streams carry the name of their contract, "
            "so metadata.name has to be the same"
        )
    return timeline, tuple(damage)


def _names(paths: Sequence[Path]) -> set[str]:
    return {
        pair.value.string_value
        for entry in read_recordings(paths, [])
        if not entry.is_evaluation
        for resource in entry.read().resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
        for point in getattr(metric, metric.WhichOneof("data") or "gauge").data_points
        for pair in point.attributes
        if pair.key == "kc.contract"
    }
