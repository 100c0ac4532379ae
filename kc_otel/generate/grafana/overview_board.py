"""The Overview dashboard: current faults, since when, for whom, and the actions taken."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, Final

from kc_otel.contract.registry.own_metrics import label
from kc_otel.contract.slices import ALL
from kc_otel.generate.files import HEALTH_UID, NOT_HOLDING_ID, OVERVIEW_UID, GeneratedFile, slice_link
from kc_otel.generate.grafana import panels, queries
from kc_otel.generate.grafana.boards import board_file, scope
from kc_otel.generate.grafana.health_board import evaluator_panel, invalid_panel, points_panel
from kc_otel.generate.grafana.panels import legend, mapping, target
from kc_otel.judge.verdict import Status

_NAMES: Final = legend(*queries.CELL[:3])


def overview_file() -> GeneratedFile:
    """The dashboard; it is the same for all contracts."""
    rows = (
        panels.row(98, "Every cell, with its numbers", every_cell(11)),
        panels.row(99, "How near each contract is to its limits", _margins()),
    )
    about = "What is broken, since when, for whom, and what was ordered."
    return board_file(OVERVIEW_UID, about, scope(), (*_counts(), not_holding(NOT_HOLDING_ID), *_over_time(), *rows))


def _counts() -> Iterator[Any]:
    yield evaluator_panel(15)
    stats = (
        (Status.FAIL, "Broken", "Cells (clause, slice, pair of kernel versions) whose lower bound is above the limit."),
        (
            Status.NO_DATA,
            "No data",
            "Cells whose kernels have been silent for a heartbeat, unless requests are kept away as ordered.",
        ),
        (Status.INCONCLUSIVE, "Undecided", "Cells whose interval contains the limit, or with too few samples."),
        (Status.PASS, "Holding", "Cells whose upper bound is at or below the limit, with enough samples."),
    )
    for id, (status, title, description) in enumerate(stats, start=1):
        base = "#808080" if status is Status.PASS else "green"
        span = 2 if status in {Status.INCONCLUSIVE, Status.PASS} else 3
        cells = f"{queries.cells('kc.verdict')} == {status.code}"
        if status is Status.NO_DATA:
            cells += f" unless {queries.cells('kc.verdict.no_traffic')}"
        query = queries.known(cells)
        yield panels.count(id, title, description, query, panels.STATUS_COLOURS[status], base, span)
    about = "Steps of the escalation policies that fire."
    yield panels.count(5, "Alerts firing", about, queries.known(queries.ALERTS), panels.STATUS_COLOURS[Status.FAIL])
    about = "Contained ones and breaches that went away without proof of recovery are among them."
    yield panels.count(
        6, "Open incidents", about, queries.known(queries.own("kc.incident")), panels.STATUS_COLOURS[Status.FAIL]
    )
    health = [panels.link("Health", f"/d/{HEALTH_UID}")]
    yield invalid_panel(12).span(2).data_links(health)
    yield points_panel(13).data_links(health)


def _over_time() -> Iterator[Any]:
    about = (
        "Verdict of every clause on every slice, first of those that were broken at any time in the range; where "
        "several pairs of kernel versions report, the worst. A gap is a time in which no evaluator was scraped."
    )
    shown = [target(queries.verdicts_broken(ever=True), _NAMES), target(queries.verdicts_broken(ever=False), _NAMES)]
    yield panels.verdicts(8, "Verdicts over time", about, shown)
    about = "When each step of the escalation policy fired, by clause, slice and severity."
    shown, red = [target(queries.ALERTS, legend(*queries.CELL[:3], "kc.severity"))], panels.STATUS_COLOURS[Status.FAIL]
    yield panels.timeline(
        9, "Alerts over time", about, shown, mapping({"1": ("firing", red)}), red, height=7, span=12
    ).no_value("No evaluator said in this range that a step fired")
    about = (
        "What the steps that fired order, for as long as they fired; `kc-otel status` says what was carried out. A "
        "route stays after its alert has resolved, until a person resumes the slice: see Promotion and routing."
    )
    shown = [target(queries.ACTIONS, legend(*queries.CELL[:3], "kc.action"))]
    yield panels.timeline(
        10, "What was ordered", about, shown, mapping({"1": ("ordered", "blue")}), "blue", height=7, span=12
    ).no_value("No evaluator ordered anything in this range")


def _margins() -> Any:
    """One graph per contract. Shares of limits need no unit, so that clauses on different metrics fit into one."""
    contract, clause = (f"${{__field.labels.{label(name)}}}" for name in ("kc.contract", "kc.clause"))
    into = panels.link("Look into this clause", f"{slice_link(contract, clause, ALL)}&{panels.SAME_TIME}")
    about = (
        "Distance from the bound that decides to the limit, as a share of the limit, of the slice and the pair of "
        "kernel versions that have least of it. Below zero it is broken, or not shown to be kept. Click a line "
        "for the clause's bounds, limit and distribution."
    )
    shown = [target(queries.by(queries.CELL[:2], queries.margin_share(), "min"), legend("kc.clause"))]
    graph = panels.graph(14, "$contract: margin of each clause", about, shown, "percentunit")
    return graph.repeat("contract").max_per_row(3).data_links([into])


_TITLES: Final = dict(
    zip(map(label, queries.CELL), ("Contract", "Clause", "Slice", "Training kernel", "Inference kernel"), strict=True)
)
_FIELDS: Final = tuple(f"${{__data.fields.{title}}}" for title in ("Contract", "Clause", "Slice"))
_SEVERITIES: Final = mapping(
    {
        str(code): pair
        for code, pair in enumerate(zip(queries.SEVERITIES, ("blue", "orange", "red"), strict=True), start=1)
    }
)


def not_holding(id: int) -> Any:
    """Table of the cells that are not PASS: clause, slice, onset, distance from the limit, and actions ordered."""
    columns = {
        "State": queries.cells("kc.verdict"),
        "Since": queries.since(),
        "Margin": queries.margin_share(),
        "Actions": queries.action_bits(),
        "Alert": queries.SEVERITY,
        "": queries.promises(),
    }
    of_cell, failing = queries.labels(queries.CELL), f"{queries.cells('kc.verdict')} > {Status.PASS.code}"
    return panels.table(
        id,
        "What does not hold: since when, for whom, and what was ordered",
        "Every clause on a slice that is not PASS, the worst first. FAIL: the limit is "
        "exceeded; the contract states the time between false alarms. NO_DATA: nothing reports, which is not a PASS. "
        "INVALID_INPUT: the data are not scores of the same tokens by two kernels. INCONCLUSIVE: the samples do not "
        "decide it yet. Margin is the distance from the bound that "
        "decides to the limit, as a share of the limit: negative where the limit is broken, or not shown to be kept. "
        "Actions: what the policy's steps that fire now order. Click a state, clause or slice to look into it, a "
        "promise for what it means.",
        {title: f"({query}) and on ({of_cell}) {failing}" for title, query in columns.items()},
        {**_TITLES, label("kc.clause.promise"): "Promise"},
        {
            **_columns(),
            "Actions": {"mappings": [_action_mapping()], "noValue": "nothing yet"},
            "Alert": {"mappings": [_SEVERITIES], "custom.cellOptions": {"type": "color-text"}, "custom.width": 90},
            "Promise": {"custom.cellOptions": {"type": "auto", "wrapText": True}, "custom.width": 330},
        },
        sort=(("State", True), ("Margin", False)),
        hide=(panels.value_field(len(columns) - 1),),
        order=(
            "State",
            "Contract",
            "Clause",
            "Slice",
            "Promise",
            "Since",
            "Actions",
            "Alert",
            "Margin",
            "Training kernel",
            "Inference kernel",
        ),
    ).no_value("Every cell is PASS, if the first tile shows a running evaluator; see the incidents, too")


def every_cell(id: int) -> Any:
    """Every cell with its numbers."""
    columns = {
        "State": queries.cells("kc.verdict"),
        "Since": queries.since(),
        "Margin": queries.margin_share(),
        "Estimate": queries.cells("kc.bound.estimate"),
        "Lower": queries.cells("kc.bound.lower"),
        "Upper": queries.cells("kc.bound.upper"),
        "Limit": queries.cells("kc.bound.limit"),
        "Samples": queries.cells("kc.bound.samples"),
        "Evidence": queries.cells("kc.verdict.evidence"),
    }
    return panels.table(
        id,
        "Every cell: state, since when, margin",
        "The worst come first. Estimate, bounds and limit are in the unit of the clause. At 100 % "
        "evidence a cell FAILs: chance alone reaches 100 % in any cell of a contract at most once per false_alarms, on "
        "average.",
        columns,
        _TITLES,
        {**_columns(), "Samples": {"unit": "short"}, "Evidence": {"unit": "percentunit", "decimals": 0}},
        sort=(("State", True), ("Margin", False)),
        height=11,
    )


def _columns() -> dict[str, dict[str, object]]:
    url = f"{slice_link(*_FIELDS)}&var-datasource={panels.DATASOURCE}&{panels.SAME_TIME}"
    into: dict[str, object] = {"links": [{"title": "Look into this slice", "url": url, "targetBlank": False}]}
    return {
        "State": {
            "custom.cellOptions": {"type": "color-background"},
            "mappings": [panels.status_mapping()],
            "custom.width": 130,
            **into,
        },
        "Clause": into,
        "Slice": into,
        "Since": {"unit": "dateTimeFromNow"},
        "Margin": {**panels.MARGIN, "custom.width": 100},
    }


def _action_mapping() -> Any:
    """Every combination of actions in words, the gravest first."""
    words = [text for _, text in queries.ACTION_BITS]
    combinations = itertools.product((0, 1), repeat=len(words))
    return mapping(
        {
            str(int("".join(map(str, bits)), 2)): (", ".join(itertools.compress(words, bits)) or "nothing yet", "text")
            for bits in combinations
        }
    )
