"""The report of a period: what broke, when, for whom, what was done, and the state of every cell at its end."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from kc_otel.charts import draw_distribution, draw_evidence, draw_history, markers_of, unit_word
from kc_otel.contract.clause import About
from kc_otel.contract.sentences import scopes
from kc_otel.contract.words import duration, interval, listed, moment, number, place, shown
from kc_otel.diagnose.depth_picture import depth_chart
from kc_otel.report.document import Block, Bullets, Figure, Heading, Table, Text

__all__ = ["Period", "located_last", "period_blocks", "wanted_cells"]

_DRAWN: Final = 6
"""Cells of an incident whose past is drawn: the worst."""
_LISTED: Final = 200
"""Events that are listed: the newest of those that matter."""
_WORST_FIRST: Final = ("FAIL", "NO_DATA", "INCONCLUSIVE", "PASS")
_ASKED: Final = {
    "sample-more": "recorders are asked to sample more",
    "locate": "machines are asked to locate the operator",
    "hold-promotion": "promotions are held",
    "quarantine-rollouts": "rollouts are quarantined",
    "resync-weights": "trainers are asked to send the weights again",
    "halt": "trainers are told to halt",
}

Json = Mapping[str, Any]
CellKey = tuple[str, str, str, str, str]
"""(contract, clause, slice, kernel_train, kernel_inference)."""


@dataclass(frozen=True, slots=True)
class Period:
    """What the API of an evaluator said.

    Attributes:
        start: Unix time, seconds.
        end: Unix time, seconds.
        source: Where the evaluator answers.
        version: Version of kc-otel.
        contracts: As `/api/v1/contracts`.
        cells: As `/api/v1/cells`.
        events: As `/api/v1/events`, oldest first; also from before the start.
        decisions: As `/api/v1/decisions`.
        in_force: As `in_force` of `/api/v1/overview`.
        incidents: As `/api/v1/incidents/{id}`, of those that lasted in the period: the most urgent first.
        health: As `/api/v1/health`.
        complete: Whether no event of the period is missing.
        steps: `step` of `/api/v1/history`, by contract.
        histories: Points of `/api/v1/history`, by cell.
        distributions: Answers of `/api/v1/distribution`, by cell.
        evidence: What locate's diagnoses rest on, by its SHA-256.
    """

    start: float
    end: float
    source: str
    version: str
    contracts: Sequence[Json]
    cells: Sequence[Json]
    events: Sequence[Json]
    decisions: Json
    in_force: Sequence[Json]
    health: Json
    incidents: Sequence[Json] = ()
    complete: bool = True
    steps: Mapping[str, float] = field(default_factory=dict)
    histories: Mapping[CellKey, Sequence[Sequence[Any]]] = field(default_factory=dict)
    distributions: Mapping[CellKey, Json] = field(default_factory=dict)
    evidence: Mapping[str, Json] = field(default_factory=dict)


def wanted_cells(period: Period) -> tuple[CellKey, ...]:
    """Cells whose past and distribution the report shows: the worst of every incident."""
    return tuple(
        dict.fromkeys(
            _cell_key(one, spot)
            for one in period.incidents
            if one["status"] == "FAIL" and one["kernel_inference"]
            for spot in one["cells"][:_DRAWN]
        )
    )


def period_blocks(period: Period) -> tuple[Block, ...]:
    """The report as blocks."""
    names = listed([f"{one['name']} v{one['version']}" for one in period.contracts], most=8)
    blocks: list[Block] = [
        Heading(1, _title(period.incidents)),
        Text(
            f"{names or 'No contract'}, from {moment(period.start)} to {moment(period.end)} "
            f"({duration(period.end - period.start)}). Written by kc-otel {period.version} from {period.source}."
        ),
    ]
    if not period.complete:
        blocks.append(Text("The evaluator had more events than it gave: the beginning of the period is missing."))
    for one in period.incidents:
        blocks += _incident(period, one)
    blocks += _in_force(period)
    blocks += _promised(period)
    blocks += _cells(period)
    blocks += _kernels(period)
    blocks += _log(period)
    return tuple(blocks)


def _title(found: Sequence[Json]) -> str:
    broken = [one for one in found if one["status"] == "FAIL"]
    worst = [one for one in broken if one["state"] == "broken"] or broken
    if not worst:
        return "A kernel was silent" if found else "No promise was broken"
    state = worst[0]["state"]
    promises = len({(one["contract"], clause) for one in worst for clause in one["clauses"]})
    named = dict.fromkeys(name for one in worst for name in one["slices"] if name != "all")
    now, then, again = (
        ("promise is", "promise was", "holds") if promises == 1 else ("promises are", "promises were", "hold")
    )
    lasting = state == "broken" or any(spot["until"] is None for one in worst for spot in one["cells"])
    said = f"{promises} {now if lasting else then} broken on {listed(list(named) or ['all traffic'])}"
    if state == "contained":
        return f"{said}, and contained"
    return said if lasting else f"{said}, and {again} again"


def _cell_key(one: Json, spot: Json) -> CellKey:
    return one["contract"], spot["clause"], spot["slice"], one["kernel_train"], one["kernel_inference"]


def _incident(period: Period, one: Json) -> list[Block]:
    until = "it is not over" if one["until"] is None else f"until {moment(one['until'])}"
    span = duration((period.end if one["until"] is None else one["until"]) - one["since"])
    state = one["state"].capitalize()
    if one["state"] == "contained":
        state += f" since {moment(one['contained'])}"
    blocks: list[Block] = [
        Heading(2, one["headline"]),
        Text(
            f"{state}. Since {moment(one['since'])}, {until} ({span}); contract {one['contract']}, "
            f"incident {one['id']}.",
            one["status"],
        ),
        Bullets(tuple(f"{clause}: {text}" for clause, text in one["extents"])),
        Text(
            f"For whom: {listed([place(name) for name in one['slices']], most=20)}{_earlier(one)}. On inference kernel "
            f"{_spelled(period, one['contract'], 'inference', one['kernel_inference'])}, against training kernel "
            f"{_spelled(period, one['contract'], 'train', one['kernel_train'])}."
        ),
        *([Text(f"It grew: {one['grew']}.")] if one["grew"] else []),
        Heading(3, "Where, and since when"),
        _onsets(one),
        Heading(3, "What was done"),
        Bullets(tuple(_action(action["at"], action["text"], action["in_force"]) for action in one["actions"]))
        if one["actions"]
        else Text("Nothing: no step of the escalation policy fired."),
    ]
    if one["diagnoses"]:
        blocks += [
            Heading(3, "What was found"),
            Bullets(
                tuple(
                    f"{moment(each['at'])}, {each['kind']} on {place(each['slice'])} by {each['by']}: {each['text']} "
                    f"(evidence {each['evidence'][:12]})"
                    for each in one["diagnoses"]
                )
            ),
        ]
        if located := located_last(one):
            blocks += _depth(period.evidence.get(located))
    for key in wanted_cells(replace(period, incidents=[one])):
        blocks += _figures(period, key)
    return blocks


def located_last(one: Json) -> str | None:
    """Digest of the evidence of what locate found last about an incident; None where it found nothing."""
    return next((each["evidence"] for each in reversed(one["diagnoses"]) if each["kind"] == "locate"), None)


def _depth(evidence: Json | None) -> list[Block]:
    """The picture, where the evidence is what this program's locate gives."""
    try:
        chart = depth_chart(evidence or {})
    except ValueError:
        return []
    return [Figure(chart, f"Drift along depth: {chart.text}")]


def _earlier(one: Json) -> str:
    """Slices where it is over already."""
    past = dict.fromkeys(place(spot["slice"]) for spot in one["cells"] if spot["slice"] not in one["slices"])
    return f"; for a time also {listed(list(past), most=20)}" if past else ""


def _onsets(one: Json) -> Table:
    """Every slice with its first onset; those that broke first, first."""
    by: dict[str, list[Json]] = {}
    for spot in sorted(one["cells"], key=lambda spot: (spot["since"], spot["slice"] == "all", spot["slice"])):
        by.setdefault(spot["slice"], []).append(spot)
    rows = []
    for slice, spots in by.items():
        ends = [spot["until"] for spot in spots]
        end = "still" if None in ends else moment(max(ends)).removesuffix(" UTC")
        clauses = listed(list(dict.fromkeys(spot["clause"] for spot in spots)), most=8)
        rows.append((place(slice), moment(spots[0]["since"]).removesuffix(" UTC"), end, clauses))
    return Table(("Slice", "Since (UTC)", "Until (UTC)", "Clauses"), tuple(rows))


def _action(at: float, text: str, in_force: bool | None) -> str:
    held = {True: " (in force)", False: " (no longer in force)", None: ""}[in_force]
    return f"{moment(at)}: {text}{held}"


def _figures(period: Period, key: CellKey) -> list[Block]:
    contract, clause, slice = key[:3]
    title = f"{clause} on {place(slice)}"
    points = [point for point in period.histories.get(key, ()) if period.start <= point[0] <= period.end]
    seen, step = period.distributions.get(key), period.steps.get(contract, math.inf)
    charts = (
        draw_history(
            f"{title} over time",
            points,
            kernel=key[4],
            markers=markers_of(period.events, contract, clause, slice),
            unit=_unit(period, contract, clause),
            step=step,
        ),
        draw_evidence(f"Evidence against {title}", points, step=step),
        draw_distribution(f"{seen['metric']} on {place(slice)} by size", seen, place(slice)) if seen else None,
    )
    figures = [Figure(chart, f"{title}: {chart.text}") for chart in charts if chart is not None]
    return [Heading(3, title), *figures] if figures else []


def _unit(period: Period, contract: str, clause: str) -> str:
    found = (each for one in period.contracts if one["name"] == contract for each in one["clauses"])
    return next((unit_word(each["unit"]) for each in found if each["id"] == clause), "")


def _in_force(period: Period) -> list[Block]:
    lines = [
        f"{one['contract']}: {place(one['slice'])} avoids kernel {one['avoid']} and uses the training kernel since "
        f"{moment(one['since'])}: {one['reason']}"
        for one in period.decisions["routes"]
    ]
    asked: dict[tuple[str, str], list[Json]] = {}
    for one in period.decisions["directives"]:
        asked.setdefault((one["contract"], one["kind"]), []).append(one)
    for (contract, kind), causes in asked.items():
        slices = list(dict.fromkeys(place(one["slice"]) for one in causes))
        since = moment(min(one["since"] for one in causes))
        lines.append(f"{contract}: {_ASKED.get(kind, kind)} since {since}, because of {listed(slices, most=8)}")
    for one in period.in_force:
        if one["kind"] != "route":  # every route is above
            end = "" if one["until"] is None else f", until {moment(one['until'])}"
            lines.append(f"{one['contract']}: {one['text']}, since {moment(one['since'])}{end}")
    text = Text("No route, no directive, and nothing that a person decided.")
    return [Heading(2, "In force at the end"), Bullets(tuple(lines)) if lines else text]


def _promised(period: Period) -> list[Block]:
    """What the clauses mean, for a reader who never saw the contract."""
    blocks: list[Block] = []
    for one in period.contracts:
        said = [
            one["description"],
            f"Owner: {one['owner']}." if one["owner"] else "",
            f"Runbook: {one['runbook']}." if one["runbook"] else "",
            f"Judged over {duration(one['window'])} and {duration(one['long_window'])}.",
            f"Confidence {100 * one['confidence']:.4g} %. Hash {one['hash'][:12]}.",
        ]
        rows = tuple((clause["id"], clause["meaning"]) for clause in one["clauses"])
        blocks += [
            Heading(2, f"What {one['name']} v{one['version']} promises"),
            Text(" ".join(part if part.endswith(".") else f"{part}." for part in said if part)),
            Table(("Clause", "Meaning"), rows),
        ]
    return blocks


def _cells(period: Period) -> list[Block]:
    rows: dict[str, list[tuple[str, ...]]] = {}
    kernels: dict[str, set[str]] = {}
    for cell in period.cells:
        kernels.setdefault(cell["verdict"]["contract"], set()).add(cell["verdict"]["kernel_inference"])
    several = {name: len(found) > 1 for name, found in kernels.items()}
    abouts: dict[str, dict[str, About]] = {}
    for one in sorted((cell["verdict"] | {"since": cell["since"]} for cell in period.cells), key=_worst_first):
        abouts.setdefault(one["contract"], {})[one["clause"]] = one["about"]
        rows.setdefault(one["contract"], []).append(
            (
                one["status"],
                one["clause"],
                place(one["slice"]),
                *((shown(one["kernel_inference"]),) if several[one["contract"]] else ()),
                number(one["estimate"]),
                interval(one["lower"], one["upper"]),
                number(one["limit"]),
                moment(one["since"]).removesuffix(" UTC"),
                one["reason"],
            )
        )
    if not rows:
        return [Heading(2, "Every cell at the end"), Text("No cell has been judged yet.")]
    blocks: list[Block] = []
    for name, found in rows.items():
        kernel = ("Kernel",) if several[name] else ()
        header = ("Verdict", "Clause", "Slice", *kernel, "Estimate", "Interval", "Limit", "Since (UTC)", "Reason")
        said = "; ".join(scopes(abouts[name]))
        blocks += [
            Heading(2, f"Every cell of {name} at the end"),
            Table(header, tuple(found)),
            Text(f"Verdicts {said}."),
        ]
        if not kernel:
            blocks.append(Text(f"Inference kernel of all of them: {shown(*kernels[name])}."))
    return blocks


def _worst_first(one: Json) -> tuple[Any, ...]:
    status = _WORST_FIRST.index(one["status"])
    return one["contract"], status, one["clause"], one["slice"], one["kernel_inference"]


def _kernels(period: Period) -> list[Block]:
    rows = tuple(
        (
            one["name"],
            kernel["role"],
            kernel["version"],
            ", ".join(f"{k}={v}" for k, v in sorted(kernel["fields"].items())),
        )
        for one in period.contracts
        for kernel in sorted(one["kernels"], key=lambda kernel: (kernel["role"], kernel["version"]))
    )
    return [Heading(2, "Kernel versions"), Table(("Contract", "Role", "Version", "Fields"), rows)] if rows else []


def _log(period: Period) -> list[Block]:
    within = [event for event in period.events if period.start <= event["at"] <= period.end]
    important = [event for event in within if _matters(event)]
    blocks: list[Block] = [Heading(2, "Events")]
    if important:
        rows = tuple((moment(one["at"]), one["contract"], one["kind"], one["message"]) for one in important[-_LISTED:])
        blocks.append(Table(("Time", "Contract", "Kind", "What"), rows))
    elif not within:
        blocks.append(Text("None."))
    left = [
        (len(important) - _LISTED, "earlier ones of these"),
        (len(within) - len(important), "changes between PASS and INCONCLUSIVE"),
    ]
    blocks += [Text(f"Not listed: {many:,} {what}.") for many, what in left if many > 0]
    return blocks


def _matters(event: Json) -> bool:
    """Alerts, what people did, and verdicts that break or mend something; near a limit the others come and go."""
    change = {event["data"].get("status"), event["data"].get("before")}
    return event["kind"] != "verdict" or not change <= {"PASS", "INCONCLUSIVE", None}


def _spelled(period: Period, contract: str, role: str, version: str) -> str:
    for one in period.contracts:
        for kernel in one["kernels"] if one["name"] == contract else ():
            if (kernel["role"], kernel["version"]) == (role, version):
                fields = kernel["fields"]
                known = [
                    fields[name] for name in ("engine", "engine.version", "dtype", "quantization") if name in fields
                ]
                return f"{' '.join(known)} ({version})" if known else version
    return shown(version)
