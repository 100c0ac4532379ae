"""`kc-otel status`: what is broken, and what decides which kernel serves."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kc_otel.cli.api_client import DEFAULT_URL, Url, get, troubles
from kc_otel.cli.terminal import STATUS_STYLE, ApiJson, OnlyContract, local_time
from kc_otel.contract.words import (
    FAILS_CHECKS,
    MEASURED_LATER,
    NEXT_DUE,
    NOTIFYING,
    RUN_ENDED,
    listed,
    number,
    place,
    together,
)

_WORST_FIRST = ("FAIL", "INVALID_INPUT", "NO_DATA", "INCONCLUSIVE", "PASS")
_MEASURED = frozenset({"PASS", "INCONCLUSIVE", "FAIL"})
_PAIR = ("contract", "kernel_train", "kernel_inference")
_WIDE_TERMINAL, _ROOMY_TERMINAL = 110, 72
_MAX_REASONS = 12
_MAX_INCIDENTS = 6
_MAX_ROWS = 20
_MAX_DETAILED = 2
_MAX_ACTIONS = 4
_STATE_STYLE = {"broken": "bold red", "contained": "yellow", "unproven": "magenta"}


def status(
    url: Url = DEFAULT_URL,
    contract: OnlyContract = None,
    every: Annotated[bool, typer.Option("--all", help="Print every cell, however many.")] = False,
    as_json: ApiJson = False,
) -> None:
    """Print incidents, then the cells, the worst first.

    Exits with 1 if a cell FAILs, if an incident of a FAIL is broken, or if a version was measured after its rollback.
    Otherwise exits with 3 if a cell does not PASS (unless its next report is not due yet), if another incident is
    broken, if a breach is unproven (it went away, or its run ended, without proof of recovery), if points arrive
    that are not judged, if a shard does not answer, if the evaluator fails, has judged nothing yet or nothing for 30 s,
    or if a webhook endpoint is disabled. Exits with 0 otherwise. An incident of which only a route remains is over.

    Examples:
      kc-otel status
      kc-otel status --contract policy-7b --all
    """
    only = {"contract": contract} if contract else {}
    cells = sorted(get(url, "/api/v1/verdicts", **only)["verdicts"], key=_worst_first)
    health, overview = get(url, "/api/v1/health"), get(url, "/api/v1/overview")

    def of(rows: Iterable[dict[str, Any]], key: str = "contract") -> list[dict[str, Any]]:
        return [row for row in rows if contract in {None, row[key]}]

    warned = [Text(said, style="bold red") for said in troubles(health, overview["now"])]
    promotions = get(url, "/api/v1/promotions", **only)["promotions"]
    stray, missing, incidents = _stray(promotions), of(overview["missing"]), of(overview["incidents"])
    past = get(url, "/api/v1/incidents", state="resolved", limit=1000, **only)["incidents"]
    ended = _ended_broken(past, cells)
    if as_json:
        typer.echo(json.dumps(cells, indent=2))
    else:
        console, now = Console(), time.time()
        routes = _routes(of(get(url, "/api/v1/decisions")["routes"]))
        contracts = of(get(url, "/api/v1/contracts")["contracts"], "name")
        broken = [*_incidents(incidents, cells, now, contracts), *ended, *stray, *_missing(missing)]
        broken += [
            Text(f"{entry['name']}, {kernel['name']}: {said}", style="bold yellow")
            for entry in contracts
            for kernel in entry["kernels"]
            for said in filter(None, [*kernel["otherwise"], kernel["silent"]])
        ]
        tables = _tables(cells, now, console.width, most=len(cells) if every else _MAX_ROWS)
        in_force, behind = [*_on_their_way(promotions), *_in_force(of(overview["in_force"]))], _shards(health["shards"])
        console.print(*warned, *broken, *tables, *_reasons(cells), *routes, *in_force, *behind, sep="\n")
    unknown = bool(warned or missing or ended) or any(shard["trouble"] for shard in health["shards"])
    raise typer.Exit(_exit_code(cells, incidents, stray, unknown=unknown))


def _ended_broken(past: Iterable[Mapping[str, Any]], cells: Iterable[Mapping[str, Any]]) -> list[Text]:
    """Lines for kernels without a run, whose last incident ended with one; the newest of `past` is first."""
    pair = itemgetter(*_PAIR)
    ended = {pair(cell) for cell in cells if _word(cell) in {"ENDED", "NOT DUE"}}
    newest = {pair(incident): incident for incident in reversed([*past])}
    return [
        Text(
            f"Ended without proof of recovery ({_time_of(one['until'], time.time())})  {one['contract']}: "
            f"{one['headline']}; incident {one['id']}",
            style="bold magenta",
        )
        for key, one in sorted(newest.items())
        if key in ended and one["status"] == "FAIL" and one["state_text"] == "Ended"
    ]


def _missing(rows: Sequence[Mapping[str, Any]]) -> list[Text]:
    """Lines for points that arrive and are not judged."""
    lines = []
    for row in rows[:_MAX_INCIDENTS]:
        pair = [row[side] for side in ("kernel_inference", "kernel_train") if row[side]]
        of = f" of {' against '.join(pair)}" if pair else ""
        what = "sequences" if row["outcome"] == FAILS_CHECKS else "points"
        since = _time_of(row["since"], time.time())
        lines.append(f"{row['contract']}: {what}{of} are not judged, since {since}: {row['text']}")
    if len(rows) > _MAX_INCIDENTS:
        lines.append(f"points of {len(rows) - _MAX_INCIDENTS} more kernel pairs are not judged")
    return [Text(line, style="bold magenta") for line in lines]


def _exit_code(
    cells: list[dict[str, Any]], incidents: list[dict[str, Any]], stray: Sequence[object], *, unknown: bool
) -> int:
    """Return the exit code: a broken kernel that fell silent beside others has no cell any more, but its incident."""
    found = {cell["status"] for cell in cells if not cell.get("reason", "").startswith(NEXT_DUE)}
    unproven = any(incident["state"] == "unproven" or incident["went_away"] for incident in incidents)
    broken = {
        incident["on"]
        for incident in incidents
        if incident["state"] == "broken" and not (incident["only_route_left"] or incident["went_away"])
    }
    if "FAIL" in found or "fail" in broken or stray:
        return 1
    return 3 if not cells or unknown or broken or unproven or found - {"PASS"} else 0


def _stray(promotions: Sequence[Mapping[str, Any]]) -> list[Text]:
    """Lines for versions that were measured after their rollback, whatever their verdicts are."""
    return [
        Text(
            f"{entry['contract']}: {entry['kernel']} was rolled back, and was measured after that "
            f"({_time_of(at, time.time())}): {MEASURED_LATER}; "
            f"see kc-otel promote {entry['contract']} {entry['kernel']}",
            style="bold red",
        )
        for entry in promotions
        if (at := entry["seen_serving"])
    ]


def _on_their_way(promotions: Sequence[Mapping[str, Any]]) -> list[Text]:
    """A line for each version that may serve only a share of the requests."""
    return [
        Text.assemble(
            ("promotion", "bold"),
            f"  {entry['contract']}: {entry['kernel']} is in {entry['position']}: it may serve "
            f"{100 * entry['share']:g}% of the requests; see kc-otel promote {entry['contract']} {entry['kernel']}",
        )
        for entry in promotions
        if entry["status"] == "running" and entry["share"] < 1
    ]


def _worst_first(cell: Mapping[str, Any]) -> tuple[Any, ...]:
    return _WORST_FIRST.index(cell["status"]), cell["contract"], cell["clause"], cell["slice"]


def _word(verdict: Mapping[str, Any]) -> str:
    """NO TRAFFIC if requests are kept from the kernel, ENDED after a clean end, NOT DUE between jobs; or the status."""
    words = {RUN_ENDED: "ENDED", NEXT_DUE: "NOT DUE"}
    silent = next((word for first, word in words.items() if verdict["reason"].startswith(first)), verdict["status"])
    return "NO TRAFFIC" if verdict["no_traffic"] else silent


def _incidents(
    found: Sequence[dict[str, Any]],
    cells: Iterable[Mapping[str, Any]],
    now: float,
    contracts: Sequence[Mapping[str, Any]],
) -> list[Text]:
    """Lines for the incidents, the most urgent first: headline, onset, kernel and actions taken."""
    measured = {(*itemgetter(*_PAIR)(cell), cell["slice"]) for cell in cells if cell["status"] in _MEASURED}
    named = {(entry["name"], kernel["version"]): kernel["name"] for entry in contracts for kernel in entry["kernels"]}
    lines: list[Text] = []
    for index, incident in enumerate(found[:_MAX_INCIDENTS]):
        style = _STATE_STYLE[incident["state"]] if incident["status"] == "FAIL" else STATUS_STYLE[incident["status"]]
        lines.append(
            Text.assemble((incident["state_text"], style), f"  {incident['contract']}: {incident['headline']}")
        )
        slices = f"{len(incident['slices'])} slice{'s' * (len(incident['slices']) != 1)}"
        facts = ", ".join(filter(None, (f"for {_ago(now - incident['since'])}", slices, incident["grew"])))
        lines.append(Text(f"  {facts}; incident {incident['id']}", style="dim"))
        if incident["status"] != "FAIL" or incident["on"] == "invalid-input":
            extents = list(dict.fromkeys(text for _, text in incident["extents"]))
            lines += [Text(f"  {text}") for text in extents[:_MAX_DETAILED]]
        here = {(*itemgetter(*_PAIR)(incident), slice) for slice in incident["slices"]}
        held = incident["state_text"].startswith("Was broken") and measured.isdisjoint(here)
        if held or incident["went_away"]:
            close = f"kc-otel alerts ack {incident['contract']} --close --why ..."
            why = "its traffic has ended" if held else "the kernel serves nobody"
            lines.append(Text(f"  if {why}, close the incident with {close}"))
        lines += [Text(f"  {diagnosis['kind']}: {diagnosis['text']}") for diagnosis in incident["diagnoses"]]
        sides = (incident["kernel_inference"], incident["kernel_train"])
        kernels = [named.get((incident["contract"], side), side) for side in sides]
        if any(kernels):
            lines.append(Text(f"  on {' against '.join(filter(None, kernels))}", style="dim"))
        if index >= _MAX_DETAILED:
            continue
        # Where there is no room for all, what was done matters more than who was told.
        told = sorted(incident["actions"], key=lambda action: action["kind"] not in NOTIFYING)
        done = [action for action in told if action["in_force"] is not False][-_MAX_ACTIONS:]
        done.sort(key=itemgetter("at"))
        lines += [Text(f"  {_time_of(action['at'], now)}  {action['text']}", style="dim") for action in done]
    if len(found) > _MAX_INCIDENTS:
        lines.append(Text(f"{len(found) - _MAX_INCIDENTS} more incidents", style="bold"))
    return [*lines, Text()] if lines else []


def _time_of(at: float, now: float) -> str:
    """A Unix time by this machine's clock, with its zone, and with its date unless it is today's."""
    today = local_time(at, "%Y-%m-%d") == local_time(now, "%Y-%m-%d")
    return local_time(at, "%H:%M:%S %Z" if today else "%Y-%m-%d %H:%M:%S %Z")


def _tables(cells: list[dict[str, Any]], now: float, width: int, *, most: int) -> list[Table | Text]:
    """A table per contract, with as many columns as the terminal has room for, and at most so many cells."""
    blocks: list[Table | Text] = []
    for contract in sorted({cell["contract"] for cell in cells}):
        own = [cell for cell in cells if cell["contract"] == contract]
        kernels = sorted({cell["kernel_inference"] for cell in own} - {""})
        trains = {cell["kernel_train"] for cell in own} - {""}
        blocks.append(Text(f"{contract}   inference kernel {', '.join(kernels) or 'not seen yet'}", style="bold"))
        blocks.append(_table(own[:most], now, width, kernels=(len(kernels) > 1, len(trains) > 1)))
        if left := Counter(cell["status"] for cell in own[most:]):
            said = ", ".join(f"{left[status]} {status}" for status in _WORST_FIRST if left[status])
            blocks.append(Text(f"and {left.total()} more: {said} (kc-otel status --all shows them)", style="dim"))
    return blocks or [Text("no cells yet: the first evaluation has not run")]


def _table(cells: list[dict[str, Any]], now: float, width: int, *, kernels: tuple[bool, bool]) -> Table:
    """A table of cells, with a column for the inference kernel, and for the training kernel, where it has several."""
    wide, roomy = width >= _WIDE_TERMINAL, width >= _ROOMY_TERMINAL
    sides = [name for name, several in zip(("kernel_inference", "kernel_train"), kernels, strict=True) if several]
    titles = {"kernel_inference": "kernel", "kernel_train": "against"}
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
    for header in ("verdict", "for", "clause", "slice", *(titles[side] for side in sides)):
        table.add_column(header, no_wrap=roomy and header not in {"clause", "slice"}, overflow="fold")  # these are long
    for header in ("estimate", *(["interval"] if wide else []), "limit", *(["samples"] if wide else [])):
        table.add_column(header, justify="right", no_wrap=roomy, overflow="fold")
    table.add_column("fires", no_wrap=roomy, overflow="fold")
    for cell in cells:
        interval = f"[{number(cell['lower'])}, {number(cell['upper'])}]" if cell["samples"] else "-"
        table.add_row(
            Text(_word(cell), style=STATUS_STYLE[cell["status"]]),
            _ago(now - cell["since"]),
            cell["clause"],
            cell["slice"],
            *(cell[side] for side in sides),
            number(cell["estimate"]),
            *([Text(interval)] if wide else []),
            number(cell["limit"]),
            *([f"{cell['samples']:,}"] if wide else []),
            Text(", ".join(cell["firing"]) or "-", style="bold red" if cell["firing"] else ""),
        )
    return table


def _reasons(cells: list[dict[str, Any]]) -> list[Text]:
    held = [cell for cell in cells if cell["status"] != "PASS"]
    rows = (((v["status"], _word(v), v["reason"]), f"{v['clause']} on {v['slice']}") for v in held)
    lines = []
    for (state, word, reason), places in list(together(rows).items())[:_MAX_REASONS]:
        more = f" and {len(places) - 1} more" if len(places) > 1 else ""
        lines.append(Text.assemble((word, STATUS_STYLE[state]), f"  {places[0]}{more}: {reason}"))
    return lines


def _routes(found: Iterable[dict[str, Any]]) -> list[Text]:
    """A line for the routes that avoid a kernel version, with the reason where they have one."""
    by: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for route in found:
        by.setdefault((route["contract"], route["avoid"], route["kernel"]), []).append(route)
    lines = []
    for (name, avoid, kernel), routes in by.items():
        one, reasons = len(routes) == 1, {route["reason"] for route in routes}
        where = f"{listed([place(route['slice']) for route in routes])} {'is' if one else 'are'} to avoid {avoid}"
        why = f": {reasons.pop()}" if len(reasons) == 1 else ""
        only, more = (f" --slice {routes[0]['slice']}", "") if one else ("", ", or one with --slice NAME")
        but = together((route["outdated"], place(route["slice"])) for route in routes if route["outdated"])
        outdated = "".join(f"; but of {listed(slices)}: {said}" for said, slices in but.items())
        end = f"end {'it' if one else 'them'} with kc-otel route resume {name}{only} --why ...{more}"
        lines.append(f"  {name}: {where} and use {kernel}{why}{outdated}; {end}")
    return [Text.assemble(("route", "bold"), line) for line in lines]


def _in_force(found: Iterable[Mapping[str, Any]]) -> list[Text]:
    return [
        Text.assemble(
            (entry["kind"], "bold"),
            f"  {entry['contract']}: {entry['text']}",
            local_time(entry["until"], ", until %Y-%m-%d %H:%M %Z") if entry["until"] is not None else "",
        )
        for entry in found
        if entry["kind"] != "route"
    ]


def _shards(found: list[dict[str, Any]]) -> list[Text]:
    """Lines for all shards together, and for those that do not answer: no verdict includes their exports yet."""
    if not found:
        return []
    behind = sum(shard["lag"] + shard["waiting"] for shard in found)
    streams = sum(shard["streams"] for shard in found)
    return [
        Text(f"{len(found)} shards, {streams:,} streams, {behind:,} bytes behind"),
        *(Text(f"shard {shard['number']} {shard['trouble']}", style="bold red") for shard in found if shard["trouble"]),
    ]


def _ago(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= size:
            return f"{int(seconds // size)}{unit}"
    return f"{max(0, int(seconds))}s"
