"""`kc-otel replay`: what a contract would have said and done about what was recorded."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn

import typer

if TYPE_CHECKING:
    from kc_otel.offline.replay.replay_files import Replayed

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
            help="What `kc-otel serve --record` or the OpenTelemetry Collector's file exporter wrote, in any order.",
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
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")] = False,
) -> None:
    """Run recorded telemetry through a changed contract: alerts, routes, directives and webhooks, and what differs.

    Exits with 0 when nothing differs (or there is nothing to compare with), 1 when something does, 2 on bad input.
    What was measured stays as it was: a route in a replay moves no traffic, and people's decisions are not replayed.
    """
    from kc_otel.contract import ContractError, load  # noqa: PLC0415 - a quick --help
    from kc_otel.contract.units import parse_duration  # noqa: PLC0415
    from kc_otel.offline.replay.replay_files import replay_recordings  # noqa: PLC0415
    from kc_otel.offline.replay.replay_text import replay_lines  # noqa: PLC0415
    from kc_otel.offline.replay.traffic_reading import RecordingError  # noqa: PLC0415

    try:
        every = None if tick is None else parse_duration(tick)
    except ValueError as error:
        _fail(f"--tick: {error}")
    try:
        new, old = load(contract), None if against is None else load(against)
        found = replay_recordings(recordings, new, old, every)
    except (ContractError, RecordingError, ValueError) as error:
        _fail(str(error))
    for sentence in found.damage[:_NAMED]:
        print(sentence, file=sys.stderr)
    if len(found.damage) > _NAMED:
        print(f"and {len(found.damage) - _NAMED:,} more messages that could not be read", file=sys.stderr)
    typer.echo(json.dumps(_plain(found), indent=2) if as_json else "\n".join(replay_lines(found)))
    raise typer.Exit(1 if found.changed else 0)


def _plain(found: Replayed) -> dict[str, Any]:
    plain = asdict(found)
    if found.changed is not None:
        plain["changed"] |= {
            "alerts_moved": [asdict(one) | _shift(one.later, one.ends_later) for one in found.changed.alerts_moved],
            "forces_moved": [asdict(one) | _shift(one.later, one.ends_later) for one in found.changed.forces_moved],
            "messages": [
                {"endpoint": endpoint, "reason": reason, "old": before, "new": after}
                for (endpoint, reason), (before, after) in found.changed.messages.items()
            ],
        }
    return plain


def _shift(later: float, ends_later: float) -> dict[str, float | None]:
    """Seconds; `ends_later` is null where only one of the two ends at all."""
    return {"later": later, "ends_later": ends_later if abs(ends_later) != float("inf") else None}


def _fail(message: str) -> NoReturn:
    print(message, file=sys.stderr)
    raise typer.Exit(2)
