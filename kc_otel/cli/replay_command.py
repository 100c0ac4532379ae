"""`kc-otel replay`: what a contract would have said and done about what was recorded."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Final

import typer

from kc_otel.cli.terminal import PrintJson, show, unusable
from kc_otel.contract.load import load
from kc_otel.contract.plain_text import plain_lines
from kc_otel.contract.units import format_duration
from kc_otel.contract.words import moment
from kc_otel.offline.replay import (
    MovedSpan,
    Replayed,
    ReplayTimeline,
    Span,
    TimelineDifferences,
    TrafficFileError,
    as_data,
    replay_recordings,
)

_MAX_NAMED_DAMAGES: Final = 5


def replay(
    recordings: Annotated[
        list[Path],
        typer.Argument(metavar="RECORDING...", help="Folders STATE-recording, or files of the Collector (proto)."),
    ],
    contract: Annotated[Path, typer.Option(help="The new contract.", metavar="FILE")],
    against: Annotated[
        Path | None, typer.Option(help="The contract in force, to compare with.", metavar="FILE")
    ] = None,
    as_json: PrintJson = False,
) -> None:
    """Run recorded telemetry through a changed contract, and print what would have differed.

    Prints alerts, routes, directives and webhooks. Evaluations are those of the recording, or every 10 s. Exits with 0
    when nothing differs (or there is nothing to compare with), 1 when something does, 2 on bad input, 3 when nothing
    differs and the recording cannot tell of every change. Measurements are those of the recording: a route in a replay
    moves no traffic, and people's decisions are not replayed.

    Examples:
      kc-otel replay kc-otel.sqlite-recording --contract policy.yaml
      kc-otel replay kc-otel.sqlite-recording --contract policy.yaml --against in-force.yaml
    """
    with unusable(TrafficFileError):
        new, old = load(contract), None if against is None else load(against)
        found = replay_recordings(recordings, new, old)
    for sentence in found.damage[:_MAX_NAMED_DAMAGES]:
        print(plain_lines(sentence), file=sys.stderr)
    if len(found.damage) > _MAX_NAMED_DAMAGES:
        print(f"and {len(found.damage) - _MAX_NAMED_DAMAGES:,} more messages that could not be read", file=sys.stderr)
    show(replay_lines(found), as_data(found), as_json=as_json)
    raise typer.Exit(1 if found.changed else 3 if found.old is not None and found.not_recorded else 0)


def replay_lines(found: Replayed) -> Iterator[str]:
    """Yield lines about the outcome of a recording, and how two contracts differ on it."""
    new = found.new
    points = ", ".join(f"{count:,} {outcome.replace('_', ' ')}" for outcome, count in new.points.items())
    yield f"recording: {moment(new.start)} to {moment(new.end)}; {new.requests:,} requests, points: {points}"
    yield f"replayed:  {new.evaluations:,} evaluations of {new.cells:,} cells"
    yield ""
    yield _totals(new)
    yield from _spans(" ", (*new.alerts, *new.decisions))
    sent = Counter((message.endpoint, message.reason) for message in new.messages)
    yield from (f"  webhook {endpoint}: {count} {reason}" for (endpoint, reason), count in sorted(sent.items()))
    if found.old is not None and found.changed is not None:
        yield ""
        yield _totals(found.old)
        yield from _differences(found.changed, " in what was recorded" * bool(found.not_recorded))
    if found.not_recorded:
        yield ""
        yield "the recording cannot tell:"
        yield from (f"  {sentence}" for sentence in found.not_recorded)


def _differences(changed: TimelineDifferences, where: str) -> Iterator[str]:
    if not changed:
        yield f"no difference{where}"
        return
    for version, sign, spans in (("old", "-", changed.dropped), ("new", "+", changed.added)):
        if spans:
            yield f"only with the {version} contract:"
            yield from _spans(sign, spans)
    if changed.moved:
        yield "with both, but differently:"
    for pair in changed.moved:
        yield f"~ {_named(pair.new)}: {', '.join(_how(pair))}"
    for (endpoint, reason), (before, after) in changed.messages.items():
        yield f"webhook {endpoint}: {after} {reason} instead of {before}"


def _spans(sign: str, spans: Iterable[Span]) -> Iterator[str]:
    for span in spans:
        end = "still at the end" if span.end is None else moment(span.end)
        does = f" -> {', '.join(span.actions)}" if span.actions else ""
        yield f"{sign} {moment(span.start)} - {end}  {_named(span)}{does}"
        if span.reason:
            yield f"    {span.reason}"


def _named(span: Span) -> str:
    if not span.clause:
        return f"{span.what} on {span.slice}" + f" away from {span.kernel_inference}" * bool(span.kernel_inference)
    kernels = f" ({span.kernel_train} / {span.kernel_inference})" if span.kernel_inference else ""
    return f"{span.severity} {span.what}: {span.clause} on {span.slice}{kernels}"


def _how(pair: MovedSpan) -> Iterator[str]:
    old, new = pair.old, pair.new
    begins, ends = ("fires", "resolves") if new.clause else ("begins", "ends")
    for verb, later, before, after in (
        (begins, pair.later, old.start, new.start),
        (ends, pair.ends_later, old.until, new.until),
    ):
        if math.isinf(later):
            yield f"no longer {verb}" if later > 0 else f"now {verb} at {moment(after)}"
        elif later:
            word = "later" if later > 0 else "earlier"
            lasting = float(round(abs(later))) if abs(later) >= 1 else round(abs(later), 3)
            yield f"{verb} {format_duration(lasting)} {word} ({moment(after)} instead of {moment(before)})"
    if old.severity != new.severity:
        yield f"{new.severity} instead of {old.severity}"
    for word, actions in (
        ("no longer", set(old.actions) - set(new.actions)),
        ("also", set(new.actions) - set(old.actions)),
    ):
        if actions:
            yield f"{word} {', '.join(sorted(actions))}"


def _totals(timeline: ReplayTimeline) -> str:
    counts = (
        (len(timeline.alerts), "alert", "alerts"),
        (len(timeline.decisions), "route or directive", "routes and directives"),
        (len(timeline.messages), "webhook", "webhooks"),
    )
    said = ", ".join(f"{count:,} {single if count == 1 else many}" for count, single, many in counts)
    return f"{timeline.name} v{timeline.version} ({timeline.hash[:12]}): {said}"
