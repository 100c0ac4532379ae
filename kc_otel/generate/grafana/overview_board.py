"""The Overview dashboard: what is broken, since when, for whom, and what was done about it.

The top answers that for everyone, and follows the variables. Below it are the verdicts, alerts and actions over time,
every cell with its numbers, and a row for each contract with one panel per clause. Whether anything is measured at all
stands at the top too, for a green board that measures nothing is worse than a red one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

from kc_otel.contract.model import Contract
from kc_otel.contract.prometheus_names import label
from kc_otel.generate.files import GeneratedFile
from kc_otel.generate.grafana import queries
from kc_otel.generate.grafana.boards import board, board_file, scope
from kc_otel.generate.grafana.cell_tables import every_cell, not_holding
from kc_otel.generate.grafana.clauses import clause_row
from kc_otel.generate.grafana.panels import (
    STATUS_COLOURS,
    Query,
    mapping,
    stat_panel,
    state_panel,
    status_mapping,
    thresholds,
    timeline_panel,
)
from kc_otel.generate.grafana.sdk import dashboard
from kc_otel.generate.links import HEALTH_UID, OVERVIEW_UID, PROMOTION_UID
from kc_otel.judge.verdict import Status

__all__ = ["overview_file"]

_ROW_IDS: Final = 100


def overview_file(contracts: Iterable[Contract]) -> GeneratedFile:
    """The dashboard of all contracts."""
    known = tuple(contracts)
    made = board(OVERVIEW_UID, "What is broken, since when, for whom, and what was done about it.", scope())
    for panel in (*_counts(), not_holding(7, known), *_over_time()):
        made = made.with_panel(panel)
    made = made.with_row(dashboard.Row("Every cell, with its numbers").id(_ROW_IDS - 2).with_panel(every_cell(11)))
    for index, contract in enumerate(known):
        made = made.with_row(clause_row(_ROW_IDS + index, contract))
    return board_file("overview", made)


def _counts() -> Iterator[Any]:
    stats = (
        (Status.FAIL, "Broken", "Cells (clause, slice, pair of kernel versions) whose lower bound is above the limit."),
        (Status.NO_DATA, "No data", "Cells whose kernels have been silent for longer than the contract's heartbeat."),
        (Status.INCONCLUSIVE, "Undecided", "Cells whose interval contains the limit, or with too few samples."),
        (Status.PASS, "Holding", "Cells whose upper bound is at or below the limit, with enough samples."),
    )
    for id, (status, title, description) in enumerate(stats, start=1):
        base = "#808080" if status is Status.PASS else "green"
        yield stat_panel(id, title, description, queries.count_status(status), STATUS_COLOURS[status], base)
    yield stat_panel(5, "Alerts firing", "Steps of the escalation policies that fire.", queries.count_alerts(), "red")
    yield stat_panel(
        6,
        "Routed away",
        "Slices that the decision table sends to the training kernel instead of the inference kernel.",
        queries.count_routed(),
        "purple",
    ).data_links([dashboard.DashboardLink("Promotion and routing").url(f"/d/{PROMOTION_UID}")])
    yield stat_panel(
        12,
        "Invalid input",
        "Sequences in the dashboard's range that were not measured because their two sides cannot be compared. They "
        "are no drift. The recorders count them; they reach this data source by way of the Collector.",
        queries.increase("kc.input.invalid"),
        "orange",
    )
    received = queries.rate("kc.evaluator.points", (), f'{label("kc.outcome")}="accepted"')
    yield (
        state_panel(
            13,
            "Points received",
            "Data points per second that the evaluator takes into account. Zero means that nothing is measured, and "
            "then nothing above can be trusted to be green.",
            f"{received} or vector(0)",
        )
        .thresholds(thresholds("red", (1e-9, "green")))
        .unit("cps")
        .data_links([dashboard.DashboardLink("Health").url(f"/d/{HEALTH_UID}")])
    )


def _over_time() -> Iterator[Any]:
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
        .no_value("No step fired in this range")
    )
    yield (
        timeline_panel(
            10,
            "What was done",
            "The actions of the steps that fired, for as long as they did. A route stays after its alert has resolved, "
            "until a person resumes the slice: see Promotion and routing.",
            Query(queries.actions(), f"{names} · {{{{{label('kc.action')}}}}}"),
            mapping({"1": ("in force", "purple")}),
            "purple",
        )
        .height(7)
        .span(12)
        .no_value("Nothing had to be done in this range")
    )
