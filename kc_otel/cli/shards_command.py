"""`kc-otel shards`: where streams are, and how many shards there are to be."""

from __future__ import annotations

import json
import time
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from kc_otel.cli.api_client import DEFAULT_URL, Url, get, post

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("shards")(shards)


def shards(
    count: Annotated[
        int | None, typer.Argument(help="Have so many from now on; streams move with their senders.", min=1)
    ] = None,
    url: Url = DEFAULT_URL,
    as_json: Annotated[bool, typer.Option("--json", help="The API's own answer.")] = False,
) -> None:
    """Shards of `kc-otel serve --engine ray`: where they run, what they own, how far behind they are.

    Exits with 1 when any is not heard, else 0.
    """
    if count is None:
        found = get(url, "/api/v1/shards")
    else:
        found = post(url, "/api/v1/shards", {"shards": count}, seconds=120.0)
    typer.echo(json.dumps(found, indent=2)) if as_json else Console().print(_table(found, time.time()))
    raise typer.Exit(1 if any(one["trouble"] for one in found) else 0)


def _table(found: list[dict[str, Any]], now: float) -> Table | str:
    if not found:
        return "streams are in the evaluator's process; `kc-otel serve --engine ray` spreads them over shards"
    table = Table("shard", "on", "streams", "points", "bytes behind", "answered", box=None)
    for one in found:
        said = one["trouble"] or f"{max(now - one['answered'], 0.0):.0f} s ago"
        where = f"{one['node']} ({one['pid']})" if one["node"] else ""
        numbers = (f"{one['streams']:,}", f"{one['points']:,}", f"{one['lag'] + one['waiting']:,}")
        table.add_row(str(one["number"]), where, *numbers, said, style="red" if one["trouble"] else "")
    return table
