"""`kc-otel status`, `watch` and `resume`: the evaluator, seen and told from a terminal."""

from __future__ import annotations

import getpass
import json
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kc_otel.cli.api_client import DEFAULT_URL, Url, get, post
from kc_otel.cli.lateness import lateness
from kc_otel.contract.words import listed, place
from kc_otel.judge.escalation.webhook_body import kernel_name

__all__ = ["register"]

_STYLE = {"PASS": "green", "INCONCLUSIVE": "yellow", "NO_DATA": "magenta", "FAIL": "bold red"}
_WORST_FIRST = ("FAIL", "NO_DATA", "INCONCLUSIVE", "PASS")
_BARS = "▁▂▃▄▅▆▇█"
_WIDE = 110
_REASONS = 12
_INCIDENTS = 6
_ROWS = 20
"""Cells of a contract that are shown where nobody asks for all: those that do not pass, the worst first."""
_DETAILED = 2
"""Incidents whose kernel and actions are shown, too."""
_DONE = 4
"""Actions of an incident that are shown: the newest of those that are not undone."""
_RECENT = 8
_ROUTES = 3
"""Routes away from a version that have a line each."""
_EVENTS = 400
"""Events that are asked for to show the newest: many are about cells of one incident."""
_STATE_STYLE = {"broken": "bold red", "contained": "yellow", "resolved": "green"}


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (status, watch, resume):
        app.command(command.__name__)(command)


def status(
    url: Url = DEFAULT_URL,
    contract: Annotated[str | None, typer.Option(help="Only this contract.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Every cell, also where that is long.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The API's own answer.")] = False,
) -> None:
    """What is broken, then the cells, the worst first.

    Exits with 1 when any cell is FAIL, 3 when any has no data or nothing has been judged for 30 s, else 0.
    """
    cells, late = _cells(url, contract), lateness(url)
    if as_json:
        typer.echo(json.dumps(cells, indent=2))
    else:
        console = Console()
        routes = _routes(get(url, "/api/v1/decisions"), contract)
        overview, now = get(url, "/api/v1/overview"), time.time()
        incidents = _incidents(overview, contract, now, get(url, "/api/v1/contracts")["contracts"])
        tables = _tables(cells, now, console.width, most=len(cells) if every else _ROWS)
        in_force, shards = _in_force(overview, contract), _shards(get(url, "/api/v1/shards"))
        old = [Text(late, style="bold red")] if late else []
        console.print(*old, *incidents, *tables, *_reasons(cells), *routes, *in_force, *shards, sep="\n")
    found = {cell["verdict"]["status"] for cell in cells}
    raise typer.Exit(1 if "FAIL" in found else 3 if late or "NO_DATA" in found else 0)


def watch(
    url: Url = DEFAULT_URL,
    contract: Annotated[str | None, typer.Option(help="Only this contract.")] = None,
    interval: Annotated[float, typer.Option(help="Seconds between looks.", min=0.2)] = 1.0,
    count: Annotated[int, typer.Option(help="Stop after so many looks; 0: until Ctrl-C.", min=0)] = 0,
) -> None:
    """The same, live, as far as the terminal has room, with the newest events below."""
    console = Console()
    looks = 0
    with Live(console=console, refresh_per_second=4, screen=console.is_terminal) as live:
        try:
            while True:
                cells, late = _cells(url, contract), lateness(url)
                events = get(url, "/api/v1/events", newest=_EVENTS, verdicts=False)["events"]
                recent = [_event_line(one) for one in _together(events) if contract in {None, one[0]["contract"]}]
                now, most = time.time(), max(5, console.height - 28)
                contracts = get(url, "/api/v1/contracts")["contracts"]
                incidents = _incidents(get(url, "/api/v1/overview"), contract, now, contracts)
                recent = recent[-_RECENT:]
                old = [Text(late, style="bold red")] if late else []
                live.update(Group(*old, *incidents, *_tables(cells, now, console.width, most=most), Text(), *recent))
                looks += 1
                if looks == count:
                    break
                time.sleep(interval)
        except KeyboardInterrupt:
            pass


def resume(
    contract: Annotated[str, typer.Argument(help="Contract whose routes are lifted.")],
    why: Annotated[str, typer.Option(help="Why it is safe again; kept with the event.")],
    slice: Annotated[str | None, typer.Option(help="Only this slice.")] = None,
    by: Annotated[str | None, typer.Option(help="Who; the login name by default.")] = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Send a slice's traffic back to the kernel versions it was routed away from."""
    body = {"contract": contract, "slice": slice, "by": by or getpass.getuser(), "why": why}
    answer = post(url, "/api/v1/decisions/resume", body)
    typer.echo(f"{answer['lifted']} route(s) lifted; the decision table is now version {answer['version']}")


def _cells(url: str, contract: str | None) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = get(url, "/api/v1/cells", **({"contract": contract} if contract else {}))["cells"]
    return sorted(found, key=lambda cell: (_WORST_FIRST.index(cell["verdict"]["status"]), _name(cell["verdict"])))


def _name(verdict: dict[str, Any]) -> tuple[str, str, str]:
    return verdict["contract"], verdict["clause"], verdict["slice"]


def _incidents(
    overview: dict[str, Any], contract: str | None, now: float, contracts: Sequence[Mapping[str, Any]]
) -> list[Text]:
    """What is broken or contained, the most urgent first: what, since when, on which kernel, what was done."""
    named = {
        (one["name"], kernel["version"]): kernel_name(kernel["fields"], kernel["version"])
        for one in contracts
        for kernel in one["kernels"]
        if kernel["role"] == "inference"
    }
    found = [one for one in overview["incidents"] if contract in {None, one["contract"]}]
    lines: list[Text] = []
    for index, one in enumerate(found[:_INCIDENTS]):
        style = _STATE_STYLE[one["state"]] if one["status"] == "FAIL" else _STYLE[one["status"]]
        lines.append(Text.assemble((one["state"].capitalize(), style), f"  {one['contract']}: {one['headline']}"))
        facts = [f"for {_ago(now - one['since'])}", f"{len(one['slices'])} slice{'s' * (len(one['slices']) != 1)}"]
        facts += [one["grew"]] if one["grew"] else []
        lines.append(Text(f"  {', '.join(facts)}; incident {one['id']}", style="dim"))
        lines += [Text(f"  {each['kind']}: {each['text']}") for each in one["diagnoses"]]
        if index >= _DETAILED:
            continue
        version = one["kernel_inference"]
        lines += [Text(f"  on {named.get((one['contract'], version), version)}", style="dim")] if version else []
        done = [action for action in one["actions"] if action["in_force"] is not False]
        lines += [Text(f"  {_clock(action['at'])}  {action['text']}", style="dim") for action in done[-_DONE:]]
    if len(found) > _INCIDENTS:
        lines.append(Text(f"{len(found) - _INCIDENTS} more incidents", style="bold"))
    return [*lines, Text()] if lines else []


def _tables(cells: list[dict[str, Any]], now: float, width: int, *, most: int) -> list[Table | Text]:
    """A table per contract, with as many columns as the terminal has room for, and at most so many cells."""
    blocks: list[Table | Text] = []
    for contract in sorted({cell["verdict"]["contract"] for cell in cells}):
        own = [cell for cell in cells if cell["verdict"]["contract"] == contract]
        kernels = sorted({cell["verdict"]["kernel_inference"] for cell in own} - {""})
        blocks.append(Text(f"{contract}   inference kernel {', '.join(kernels) or 'not seen yet'}", style="bold"))
        blocks.append(_table(own[:most], now, width, several_kernels=len(kernels) > 1))
        if left := Counter(cell["verdict"]["status"] for cell in own[most:]):
            said = ", ".join(f"{left[status]} {status}" for status in _WORST_FIRST if left[status])
            blocks.append(Text(f"and {left.total()} more: {said} (kc-otel status --all shows them)", style="dim"))
    return blocks or [Text("no cells yet: the first evaluation is still to come")]


def _table(cells: list[dict[str, Any]], now: float, width: int, *, several_kernels: bool) -> Table:
    wide = width >= _WIDE
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
    for header in ("verdict", "for", "clause", "slice", *(["kernel"] if several_kernels else [])):
        table.add_column(header, no_wrap=True)
    for header in ("estimate", *(["interval"] if wide else []), "limit", *(["samples"] if wide else [])):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("trend", no_wrap=True)
    table.add_column("fires", no_wrap=True)
    for cell in cells:
        verdict = cell["verdict"]
        interval = f"[{_number(verdict['lower'])}, {_number(verdict['upper'])}]" if verdict["samples"] else "-"
        table.add_row(
            Text(verdict["status"], style=_STYLE[verdict["status"]]),
            _ago(now - cell["since"]),
            verdict["clause"],
            verdict["slice"],
            *([verdict["kernel_inference"]] if several_kernels else []),
            _number(verdict["estimate"]),
            *([Text(interval)] if wide else []),
            _number(verdict["limit"]),
            *([f"{verdict['samples']:,}"] if wide else []),
            _spark([point[1] for point in cell["history"]], verdict["limit"], 20 if wide else 8),
            Text(", ".join(cell["firing"]) or "-", style="bold red" if cell["firing"] else ""),
        )
    return table


def _reasons(cells: list[dict[str, Any]]) -> list[Text]:
    """Why the cells that are not PASS are not, each reason once."""
    found: dict[tuple[str, str], list[str]] = {}
    for cell in cells:
        verdict = cell["verdict"]
        if verdict["status"] != "PASS":
            where = f"{verdict['clause']} on {verdict['slice']}"
            found.setdefault((verdict["status"], verdict["reason"]), []).append(where)
    lines = []
    for (state, reason), places in list(found.items())[:_REASONS]:
        more = f" and {len(places) - 1} more" if len(places) > 1 else ""
        lines.append(Text.assemble((state, _STYLE[state]), f"  {places[0]}{more}: {reason}"))
    return lines


def _routes(decisions: dict[str, Any], contract: str | None) -> list[Text]:
    """What avoids a kernel version: slice by slice where there are few, else together."""
    by: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for route in decisions["routes"]:
        if contract in {None, route["contract"]}:
            by.setdefault((route["contract"], route["avoid"]), []).append(route)
    lines = []
    for (name, avoid), routes in by.items():
        if len(routes) > _ROUTES:
            slices = listed([place(one["slice"]) for one in routes])
            lines.append(
                f"  {name}: {slices} avoid {avoid}, use {routes[0]['kernel']}; "
                f"lift all of it with kc-otel resume {name} --why ..., or one with --slice NAME"
            )
            continue
        lines += [
            f"  {name}/{route['slice']} avoids {avoid}, uses {route['kernel']}: {route['reason']}; "
            f"lift it with kc-otel resume {name} --slice {route['slice']} --why ..."
            for route in routes
        ]
    return [Text.assemble(("route", "bold"), line) for line in lines]


def _in_force(overview: dict[str, Any], contract: str | None) -> list[Text]:
    """What people have decided, and contracts that run dry; routes have lines of their own."""
    return [
        Text.assemble((one["kind"], "bold"), f"  {one['contract']}: {one['text']}{_until(one.get('until'))}")
        for one in overview["in_force"]
        if one["kind"] != "route" and contract in {None, one["contract"]}
    ]


def _shards(found: list[dict[str, Any]]) -> list[Text]:
    """Whether streams are on shards, and which of these are not heard: what those were sent is in no verdict yet."""
    if not found:
        return []
    behind = sum(one["lag"] + one["waiting"] for one in found)
    streams = sum(one["streams"] for one in found)
    return [
        Text(f"{len(found)} shards, {streams:,} streams, {behind:,} bytes behind"),
        *(Text(f"shard {one['number']} {one['trouble']}", style="bold red") for one in found if one["trouble"]),
    ]


def _until(end: float | None) -> str:
    return "" if end is None else datetime.fromtimestamp(end, tz=UTC).astimezone().strftime(", until %Y-%m-%d %H:%M")


def _together(events: Iterable[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Events, oldest first; alerts that one step of the ladder fires or ends at one moment as one."""
    found: dict[Any, list[dict[str, Any]]] = {}
    for event in events:
        step = [event["data"].get(name) for name in ("severity", "on", "actions")]
        several = event["kind"] in {"firing", "resolved"}
        key = (event["contract"], event["kind"], event["at"], str(step)) if several else event["id"]
        found.setdefault(key, []).append(event)
    return list(found.values())


def _event_line(events: Sequence[dict[str, Any]]) -> Text:
    event = events[0]
    message = event["message"].removeprefix(f"{event['contract']}: ")
    if len(events) > 1:
        clauses = listed(list(dict.fromkeys(one["data"]["clause"] for one in events)))
        slices = listed(list(dict.fromkeys(place(one["data"]["slice"]) for one in events)))
        said = "no longer fire" if event["kind"] == "resolved" else f"fire ({event['data'].get('severity')})"
        message = f"{len(events)} alerts {said}: {clauses} on {slices}"
    return Text(f"{_clock(event['at'])}  {event['contract']}: {message}", overflow="ellipsis", no_wrap=True)


def _clock(at: float) -> str:
    return datetime.fromtimestamp(at, tz=UTC).astimezone().strftime("%H:%M:%S")


def _spark(estimates: list[float | None], limit: float, width: int) -> Text:
    """The last estimates as bars whose full height is twice the limit; above the limit they are red."""
    text = Text()
    for value in estimates[-width:]:
        if value is None:
            text.append("·")
            continue
        share = min(max(value / (2 * limit), 0.0), 1.0) if limit > 0 else float(value > 0)
        text.append(_BARS[round(share * (len(_BARS) - 1))], style="red" if value > limit else "green")
    return text


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _ago(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= size:
            return f"{int(seconds // size)}{unit}"
    return f"{max(0, int(seconds))}s"
