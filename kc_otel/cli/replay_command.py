"""`kc-otel replay`: what a contract would have said and done about what was recorded."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Final

import typer

from kc_otel.cli.terminal import PrintJson, refuse, seconds, unusable
from kc_otel.contract.plain_text import plain, plain_lines

__all__ = ["register"]

_NAMED: Final = 5
"""Pieces of damage that are named; the others are counted."""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("replay")(replay)


def replay(
    recordings: Annotated[
        list[Path],
        typer.Argument(
            metavar="RECORDING...",
            help="Logs of `kc-otel serve` (STATE-log), or files of the OpenTelemetry Collector's file exporter.",
        ),
    ],
    contract: Annotated[Path, typer.Option(help="The contract to try.", metavar="FILE")],
    against: Annotated[Path | None, typer.Option(help="The one in force, to see what differs.", metavar="FILE")] = None,
    tick: Annotated[
        str | None,
        typer.Option(
            help="Time between evaluations, such as 10s. By default as recorded, or 10s.",
            metavar="DURATION",
        ),
    ] = None,
    group_wait: Annotated[
        str, typer.Option(help="How long the first webhook about an incident waits, as `kc-otel serve` has it.")
    ] = "30s",
    group_interval: Annotated[
        str, typer.Option(help="Time between a webhook about an incident and an update, likewise.")
    ] = "5m",
    as_json: PrintJson = False,
) -> None:
    """Run recorded telemetry through a changed contract: alerts, routes, directives and webhooks, and what differs.

    Exits with 0 when nothing differs (or there is nothing to compare with), 1 when something does, 2 on bad input.
    What was measured stays as it was: a route in a replay moves no traffic, and people's decisions are not replayed.
    """
    from kc_otel.contract import load  # noqa: PLC0415 - a quick --help
    from kc_otel.judge.escalation.message_groups import GroupTiming  # noqa: PLC0415
    from kc_otel.offline.replay.replay_files import as_data, replay_recordings  # noqa: PLC0415
    from kc_otel.offline.replay.replay_text import replay_lines  # noqa: PLC0415
    from kc_otel.offline.replay.traffic_reading import TrafficFileError  # noqa: PLC0415

    every = None if tick is None else seconds("--tick", tick)
    if every is not None and every <= 0.0:
        refuse(f"--tick {tick}: give more than 0 s, such as 10s")
    timing = GroupTiming(seconds("--group-wait", group_wait), seconds("--group-interval", group_interval))
    with unusable(TrafficFileError):
        new, old = load(contract), None if against is None else load(against)
        found = replay_recordings(recordings, new, old, every, timing)
    for sentence in found.damage[:_NAMED]:
        print(plain_lines(sentence), file=sys.stderr)
    if len(found.damage) > _NAMED:
        print(f"and {len(found.damage) - _NAMED:,} more messages that could not be read", file=sys.stderr)
    typer.echo(json.dumps(as_data(found), indent=2) if as_json else "\n".join(map(plain, replay_lines(found))))
    raise typer.Exit(1 if found.changed else 0)
