"""A replay in words, for a terminal; times are UTC."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from kc_otel.contract.units import format_duration
from kc_otel.offline.replay.differences import MovedSpan, TimelineDifferences
from kc_otel.offline.replay.replay_files import Replayed
from kc_otel.offline.replay.timeline import AlertSpan, DecisionSpan, ReplayTimeline

__all__ = ["replay_lines"]


def replay_lines(found: Replayed) -> Iterator[str]:
    """What came of a recording, and how two contracts differ on it, line by line."""
    new = found.new
    points = ", ".join(f"{count:,} {outcome.replace('_', ' ')}" for outcome, count in new.points.items())
    yield f"recording: {_at(new.start)} to {_at(new.end)}; {new.requests:,} requests, points: {points}"
    yield f"replayed:  {new.evaluations:,} evaluations of {new.cells:,} cells"
    yield ""
    yield f"{_named(new)}: {_counts(new)}"
    for alert in new.alerts:
        yield from _alert_lines(" ", alert)
    for decision in new.decisions:
        yield f"  {_decision(decision)}"
    yield from _webhooks(new)
    if found.old is not None and found.changed is not None:
        yield ""
        yield f"{_named(found.old)}: {_counts(found.old)}"
        yield from _differences(found.changed)
    if found.not_recorded:
        yield ""
        yield "the recording cannot tell:"
        yield from (f"  {sentence}" for sentence in found.not_recorded)


def _differences(changed: TimelineDifferences) -> Iterator[str]:
    if not changed:
        yield "no difference"
        return
    yield from _listed("only with the old contract:", "-", changed.alerts_dropped, changed.decisions_dropped)
    yield from _listed("only with the new contract:", "+", changed.alerts_added, changed.decisions_added)
    if changed.alerts_moved or changed.decisions_moved:
        yield "with both, but differently:"
    for pair in changed.alerts_moved:
        yield f"~ {_alert(pair.new)}: {', '.join(_how(pair))}"
    for moved in changed.decisions_moved:
        yield f"~ {_thing(moved.new)}: {', '.join(_when(moved, 'begins', 'ends'))}"
    for (endpoint, reason), (before, after) in changed.messages.items():
        yield f"webhook {endpoint}: {after} {reason} instead of {before}"


def _listed(title: str, sign: str, alerts: Sequence[AlertSpan], decisions: Sequence[DecisionSpan]) -> Iterator[str]:
    if alerts or decisions:
        yield title
    for alert in alerts:
        yield from _alert_lines(sign, alert)
    for decision in decisions:
        yield f"{sign} {_decision(decision)}"


def _how(pair: MovedSpan[AlertSpan]) -> Iterator[str]:
    yield from _when(pair, "fires", "resolves")
    if pair.old.severity != pair.new.severity:
        yield f"{pair.new.severity} instead of {pair.old.severity}"
    before, after = set(pair.old.actions), set(pair.new.actions)
    if before != after:
        yield "; ".join(
            f"{word} {', '.join(sorted(actions))}"
            for word, actions in (("no longer", before - after), ("also", after - before))
            if actions
        )


def _when(pair: MovedSpan[AlertSpan] | MovedSpan[DecisionSpan], begins: str, ends: str) -> Iterator[str]:
    if pair.later:
        word = "later" if pair.later > 0 else "earlier"
        yield f"{begins} {_span(abs(pair.later))} {word} ({_at(pair.new.start)} instead of {_at(pair.old.start)})"
    if math.isinf(pair.ends_later):
        yield f"no longer {ends}" if pair.ends_later > 0 else f"now {ends} at {_at(pair.new.end)}"
    elif pair.ends_later:
        word = "later" if pair.ends_later > 0 else "earlier"
        yield f"{ends} {_span(abs(pair.ends_later))} {word} ({_at(pair.new.end)} instead of {_at(pair.old.end)})"


def _alert_lines(sign: str, one: AlertSpan) -> Iterator[str]:
    yield f"{sign} {_from_to(one)}  {_alert(one)} -> {', '.join(one.actions)}"
    yield f"    {one.reason}"


def _alert(one: AlertSpan) -> str:
    kernels = f" ({one.kernel_train} / {one.kernel_inference})" if one.kernel_inference else ""
    return f"{one.severity} {one.on}: {one.clause} on {one.slice}{kernels}"


def _decision(one: DecisionSpan) -> str:
    return f"{_from_to(one)}  {_thing(one)}"


def _thing(one: DecisionSpan) -> str:
    return f"{one.what} on {one.slice}" + (f" away from {one.avoid}" if one.avoid else "")


def _webhooks(timeline: ReplayTimeline) -> Iterator[str]:
    sent = Counter((message.endpoint, message.reason) for message in timeline.messages)
    for (endpoint, reason), count in sorted(sent.items()):
        yield f"  webhook {endpoint}: {count} {reason}"


def _counts(timeline: ReplayTimeline) -> str:
    alerts, decisions, messages = len(timeline.alerts), len(timeline.decisions), len(timeline.messages)
    return f"{_many(alerts, 'alert')}, {_many(decisions, 'route or directive')}, {_many(messages, 'webhook')}"


def _many(number: int, noun: str) -> str:
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {'routes and directives' if noun == 'route or directive' else noun + 's'}"


def _named(timeline: ReplayTimeline) -> str:
    return f"{timeline.name} v{timeline.version} ({timeline.hash[:12]})"


def _from_to(one: AlertSpan | DecisionSpan) -> str:
    return f"{_at(one.start)} - {'still at the end' if one.end is None else _at(one.end)}"


def _at(time: float | None) -> str:
    return "-" if time is None else datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def _span(seconds: float) -> str:
    return format_duration(float(round(seconds)) if seconds >= 1 else round(seconds, 3))
