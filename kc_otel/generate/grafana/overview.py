"""The Overview dashboard: what is broken, since when, for whom, and what was done about it.

The top is the same for everyone and follows the variables. Below it each contract has a row with one panel per
clause: the estimate of every slice, its confidence interval as a band, and its limit. The last row is the health of
the evaluator and the recorders, for a green board that measures nothing is worse than a red one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import PurePosixPath
from typing import Any, Final

from kc_otel.contract.clause import Clause
from kc_otel.contract.model import Contract
from kc_otel.contract.slices import ALL, OTHER
from kc_otel.escalation.policy import INPUT_CLAUSE
from kc_otel.evaluator.verdict import Status
from kc_otel.generate.describe import number, promise
from kc_otel.generate.files import NOTICE, GeneratedFile
from kc_otel.generate.grafana import queries
from kc_otel.generate.grafana.health import health_panels
from kc_otel.generate.grafana.panels import (
    DATASOURCE,
    STATUS_COLOURS,
    Query,
    grafana_unit,
    graph_panel,
    mapping,
    property_of,
    stat_panel,
    status_mapping,
    table_panel,
    thresholds,
    timeline_panel,
)
from kc_otel.generate.grafana.sdk import JSONEncoder, common_models, dashboard, models
from kc_otel.generate.links import OVERVIEW_UID, panel_id
from kc_otel.generate.names import label, metric

__all__ = ["overview", "overview_file"]

_PALETTE: Final = ("#5794F2", "#B877D9", "#FF9830", "#8AB8FF", "#CA95E5", "#FFCB7D", "#3274D9", "#8F3BB8")
_ROW_IDS: Final = 100


def overview_file(contracts: Iterable[Contract]) -> GeneratedFile:
    """The dashboard as a classic dashboard's JSON; equal contracts give equal bytes."""
    text = json.dumps(overview(contracts), cls=JSONEncoder, indent=2, ensure_ascii=False)
    return GeneratedFile(PurePosixPath("grafana", "dashboards", "overview.json"), f"{text}\n")


def overview(contracts: Iterable[Contract]) -> Any:
    """The dashboard as an object of the Grafana SDK."""
    board = (
        dashboard.Dashboard("Kernel contracts: overview")
        .uid(OVERVIEW_UID)
        .description(f"What is broken, since when, for whom, and what was done about it. {NOTICE}")
        .tags(["kernel-contract"])
        .timezone("browser")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .time("now-6h", "now")
        .refresh("30s")
        .readonly()
    )
    for variable in _variables():
        board = board.with_variable(variable)
    for panel in _top():
        board = board.with_panel(panel)
    for index, contract in enumerate(contracts):
        board = board.with_row(_contract_row(_ROW_IDS + index, contract))
    board = board.with_row(dashboard.Row("Health of the evaluator and the recorders").id(_ROW_IDS - 1))
    for panel in health_panels():
        board = board.with_panel(panel)
    return board.build()


def _variables() -> Iterator[Any]:
    yield (
        dashboard.DatasourceVariable("datasource")
        .label("Data source")
        .type("prometheus")
        .description("The Prometheus that scrapes the evaluator.")
    )
    for name, title, description, query in (
        (
            "contract",
            "Contract",
            "Kernel contracts that the evaluator judges.",
            f"label_values({metric('kc.verdict')}, {label('kc.contract')})",
        ),
        (
            "slice",
            "Slice",
            f"Parts of the traffic that are judged on their own; `{ALL}` is the whole of it.",
            f'label_values({metric("kc.verdict")}{{{label("kc.contract")}=~"$contract"}}, {label("kc.slice")})',
        ),
    ):
        yield (
            dashboard.QueryVariable(name)
            .label(title)
            .description(description)
            .datasource(common_models.DataSourceRef("prometheus", DATASOURCE))
            .query({"query": query, "refId": f"{name}-values"})
            .definition(query)
            .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
            .sort(models.VariableSort.ALPHABETICAL_ASC)
            .multi(True)
            .include_all(True)
            .all_value(".+")
            .current(models.VariableOption(selected=True, text=["All"], value=["$__all"]))
        )


def _top() -> Iterator[Any]:
    stats = (
        (Status.FAIL, "Broken", "Cells (clause, slice, pair of kernel versions) whose lower bound is above the limit."),
        (Status.NO_DATA, "No data", "Cells whose kernels have been silent for longer than the contract's heartbeat."),
        (Status.INCONCLUSIVE, "Undecided", "Cells whose interval contains the limit, or with too few samples."),
        (Status.PASS, "Holding", "Cells whose upper bound is at or below the limit, with enough samples."),
    )
    for id, (status, title, description) in enumerate(stats, start=1):
        base = "#808080" if status is Status.PASS else "green"
        yield stat_panel(id, title, description, queries.count_status(status), STATUS_COLOURS[status], base)
    yield stat_panel(
        5,
        "Alerts firing",
        "Steps of the escalation policies that fire.",
        f"count({queries.alerts()}) or vector(0)",
        "red",
    )
    yield stat_panel(
        6,
        "Routed away",
        "Slices that the decision table sends to the training kernel instead of the inference kernel.",
        queries.count_routed(),
        "purple",
    )
    yield _cell_table()
    names = "{{%s}} · {{%s}} · {{%s}}" % tuple(label(name) for name in queries.CELL[:3])  # noqa: UP031 - braces
    yield timeline_panel(
        8,
        "Verdicts over time",
        "Verdict of every clause on every slice; where several pairs of kernel versions report, the worst.",
        Query(queries.verdicts(), names),
        status_mapping(),
        STATUS_COLOURS[Status.PASS],
    )
    yield (
        timeline_panel(
            9,
            "Alerts over time",
            "When each step of the escalation policy fired, by clause, slice and severity. Empty means quiet.",
            Query(queries.alerts(), f"{names} · {{{{{label('kc.severity')}}}}}"),
            mapping({"1": ("firing", "red")}),
            "red",
        )
        .height(7)
        .span(12)
    )
    yield (
        timeline_panel(
            10,
            "Routes over time",
            "Which kernel the decision table sends each slice to. A route stays after its alert has resolved, until a "
            "person resumes the slice.",
            Query(queries.routes(), f"{{{{{label('kc.contract')}}}}} · {{{{{label('kc.slice')}}}}}"),
            mapping({"0": ("inference kernel", "blue"), "1": ("training kernel", "purple")}),
            "blue",
        )
        .height(7)
        .span(12)
    )


def _cell_table() -> Any:
    columns = {
        "State": queries.cells("kc.verdict"),
        "Since": queries.since(),
        "Margin": queries.margin_share(),
        "Estimate": queries.cells("kc.bound.estimate"),
        "Lower": queries.cells("kc.bound.lower"),
        "Upper": queries.cells("kc.bound.upper"),
        "Limit": queries.cells("kc.bound.limit"),
        "Samples": queries.cells("kc.bound.samples"),
    }
    titles = ("Contract", "Clause", "Slice", "Training kernel", "Inference kernel")
    labels = {label(name): title for name, title in zip(queries.CELL, titles, strict=True)}
    background = property_of("custom.cellOptions", {"type": "color-background"})
    margin = thresholds("red", (0.0, "yellow"), (0.2, "green")).build()
    return table_panel(
        7,
        "Every cell: state, since when, margin",
        "The worst come first. Margin is the distance from the bound that decides to the limit, as a share of the "
        "limit: negative is beyond it. Estimate, bounds and limit are in the unit of the clause. Since is exact to "
        "the minute and reaches back to the start of the dashboard's range.",
        columns,
        labels,
        {
            "State": (background, property_of("mappings", [status_mapping()]), property_of("custom.width", 130)),
            "Since": (property_of("unit", "dateTimeFromNow"),),
            "Margin": (
                property_of("unit", "percentunit"),
                property_of("decimals", 1),
                property_of("thresholds", margin),
                property_of("custom.cellOptions", {"type": "color-text"}),
            ),
            "Samples": (property_of("unit", "short"),),
        },
        sort="State",
    ).height(11)


def _contract_row(id: int, contract: Contract) -> Any:
    about = f": {contract.metadata.description}" if contract.metadata.description else ""
    row = dashboard.Row(f"{contract.name}{about}").id(id)
    for clause in contract.clauses:
        row = row.with_panel(_clause_panel(contract, clause))
    return row.with_panel(_input_panel(contract))


def _clause_panel(contract: Contract, clause: Clause) -> Any:
    series = (
        Query(queries.bound("kc.bound.upper", contract.name, clause.id), _named("upper")),
        Query(queries.bound("kc.bound.lower", contract.name, clause.id, "min"), _named("lower")),
        Query(queries.bound("kc.bound.estimate", contract.name, clause.id), _named("estimate")),
        Query(queries.bound("kc.bound.limit", contract.name, clause.id), _named("limit")),
    )
    confidence = f"{contract.observability.confidence * 100:g}%"
    panel = graph_panel(
        panel_id(contract.name, clause.id),
        f"{clause.id}: at most {number(clause.limit_for(ALL), clause.limit_unit)}",
        f"{promise(clause, tuple(contract.slices))} The band is the {confidence} confidence interval, over all pairs "
        "of kernel versions that report; the clause is broken when the whole band is above the dashed limit, and "
        "holds when the whole band is at or below it.",
        series,
        grafana_unit(clause.limit_unit),
    ).thresholds(thresholds("green", (clause.limit_for(ALL), "red")))
    for index, slice in enumerate((ALL, *contract.slices, OTHER)):
        colour = property_of("color", {"mode": "fixed", "fixedColor": _PALETTE[index % len(_PALETTE)]})
        unlisted = property_of("custom.hideFrom", {"legend": True, "tooltip": False, "viz": False})
        band = (colour, unlisted, property_of("custom.lineWidth", 0))
        panel = (
            panel.override_by_name(f"{slice} lower", list(band))
            .override_by_name(
                f"{slice} upper",
                [*band, property_of("custom.fillBelowTo", f"{slice} lower"), property_of("custom.fillOpacity", 20)],
            )
            .override_by_name(f"{slice} estimate", [colour, property_of("custom.lineWidth", 2)])
        )
    panel = panel.override_by_regexp(
        "/ limit$/",
        [
            property_of("color", {"mode": "fixed", "fixedColor": "red"}),
            property_of("custom.lineStyle", {"fill": "dash", "dash": [8, 6]}),
        ],
    )
    if contract.metadata.runbook:
        panel = panel.links([dashboard.DashboardLink("Runbook").url(contract.metadata.runbook).target_blank(True)])
    return panel


def _input_panel(contract: Contract) -> Any:
    reason = label("kc.reason")
    return graph_panel(
        panel_id(contract.name, INPUT_CLAUSE),
        "Sequences that failed an input check",
        "Sequences that were not measured, by reason: other token ids on the two sides, a one-token shift, NaN or "
        "zero-filled log-probabilities. They are no drift; they say that the comparison itself is wrong.",
        (Query(queries.of_contract("kc.input.invalid", contract.name, ("kc.reason",)), f"{{{{{reason}}}}}"),),
        grafana_unit("{sequence}"),
    )


def _named(kind: str) -> str:
    return f"{{{{{label('kc.slice')}}}}} {kind}"
