"""The Overview dashboard: what is broken, since when, for whom, and what was done about it.

The top answers that for everyone, and follows the variables. Below it are the verdicts, alerts and actions over time,
every cell with its numbers, and a panel for each contract with the margins of its clauses. Whether anything is measured
at all stands at the top too, for a green board that measures nothing is worse than a red one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from kc_otel.contract.prometheus_names import label
from kc_otel.contract.slices import ALL
from kc_otel.generate.files import GeneratedFile
from kc_otel.generate.grafana import queries
from kc_otel.generate.grafana.boards import board, board_file, scope
from kc_otel.generate.grafana.cell_tables import every_cell, not_holding
from kc_otel.generate.grafana.health_board import evaluator_panel
from kc_otel.generate.grafana.panels import (
    SAME_TIME,
    STATUS_COLOURS,
    Query,
    graph_panel,
    mapping,
    stat_panel,
    state_panel,
    status_mapping,
    thresholds,
    timeline_panel,
)
from kc_otel.generate.grafana.sdk import dashboard
from kc_otel.generate.links import HEALTH_UID, NOT_HOLDING_ID, OVERVIEW_UID, PROMOTION_UID, slice_link
from kc_otel.judge.verdict import Status

__all__ = ["overview_file"]

_NAMES: Final = "{{%s}} · {{%s}} · {{%s}}" % tuple(label(name) for name in queries.CELL[:3])  # noqa: UP031 - braces


def overview_file() -> GeneratedFile:
    """The dashboard; it is the same for all contracts."""
    made = board(OVERVIEW_UID, "What is broken, since when, for whom, and what was done about it.", scope())
    for panel in (*_counts(), not_holding(NOT_HOLDING_ID), *_over_time()):
        made = made.with_panel(panel)
    for id, title, panel in (
        (98, "Every cell, with its numbers", every_cell(11)),
        (99, "How near each contract is to its limits", _margins()),
    ):
        made = made.with_row(dashboard.Row(title).id(id).with_panel(panel))
    return board_file("overview", made)


def _counts() -> Iterator[Any]:
    yield evaluator_panel(15)
    stats = (
        (Status.FAIL, "Broken", "Cells (clause, slice, pair of kernel versions) whose lower bound is above the limit."),
        (Status.NO_DATA, "No data", "Cells whose kernels have been silent for longer than the contract's heartbeat."),
        (Status.INCONCLUSIVE, "Undecided", "Cells whose interval contains the limit, or with too few samples."),
        (Status.PASS, "Holding", "Cells whose upper bound is at or below the limit, with enough samples."),
    )
    for id, (status, title, description) in enumerate(stats, start=1):
        base = "#808080" if status is Status.PASS else "green"
        counted = stat_panel(id, title, description, queries.count_status(status), STATUS_COLOURS[status], base)
        yield counted.span(2) if status in {Status.INCONCLUSIVE, Status.PASS} else counted
    yield stat_panel(
        5,
        "Alerts firing",
        "Steps of the escalation policies that fire.",
        queries.count_alerts(),
        STATUS_COLOURS[Status.FAIL],
    )
    yield stat_panel(
        6,
        "Routed away",
        "Slices that the decision table sends to the training kernel instead of the inference kernel.",
        queries.count_routed(),
        "blue",
    ).data_links([dashboard.DashboardLink("Promotion and routing").url(f"/d/{PROMOTION_UID}")])
    yield (
        stat_panel(
            12,
            "Invalid input",
            "Sequences in the dashboard's range that were not measured because their two sides cannot be compared. "
            "They are no drift. The recorders count them; they reach this data source by way of the Collector.",
            queries.increase("kc.input.invalid"),
            "orange",
        )
        .span(2)
        .data_links([dashboard.DashboardLink("Health").url(f"/d/{HEALTH_UID}")])
    )
    received = queries.rate("kc.evaluator.points", (), f'{label("kc.outcome")}="accepted"')
    yield (
        state_panel(
            13,
            "Points received",
            "Data points per second that the evaluator takes into account. Zero means that nothing is measured, and "
            "then nothing above can be trusted to be green.",
            queries.now(received),
        )
        .thresholds(thresholds("red", (1e-9, "green")))
        .unit("cps")
        .data_links([dashboard.DashboardLink("Health").url(f"/d/{HEALTH_UID}")])
    )


def _over_time() -> Iterator[Any]:
    yield timeline_panel(
        8,
        "Verdicts over time",
        "Verdict of every clause on every slice, first of those that were broken at any time in the range; where "
        "several pairs of kernel versions report, the worst. A gap is a time in which no evaluator was scraped.",
        Query(queries.ever_broken(), _NAMES),
        status_mapping(),
        STATUS_COLOURS[Status.PASS],
        Query(queries.never_broken(), _NAMES),
    )
    yield (
        timeline_panel(
            9,
            "Alerts over time",
            "When each step of the escalation policy fired, by clause, slice and severity. Empty means quiet.",
            Query(queries.alerts(), f"{_NAMES} · {{{{{label('kc.severity')}}}}}"),
            mapping({"1": ("firing", STATUS_COLOURS[Status.FAIL])}),
            STATUS_COLOURS[Status.FAIL],
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
            Query(queries.actions(), f"{_NAMES} · {{{{{label('kc.action')}}}}}"),
            mapping({"1": ("in force", "blue")}),
            "blue",
        )
        .height(7)
        .span(12)
        .no_value("Nothing had to be done in this range")
    )


def _margins() -> Any:
    """One graph per contract. Shares of limits need no unit, so that clauses on different metrics fit into one."""
    contract, clause = (f"${{__field.labels.{label(name)}}}" for name in ("kc.contract", "kc.clause"))
    into = dashboard.DashboardLink("Look into this clause").url(f"{slice_link(contract, clause, ALL)}&{SAME_TIME}")
    return (
        graph_panel(
            14,
            "$contract: margin of each clause",
            "Distance from the bound that decides to the limit, as a share of the limit, of the slice and the pair of "
            "kernel versions that have least of it. At zero a clause is at its limit, below it is broken. Click a line "
            "for the clause's bounds, limit and distribution.",
            (Query(queries.by(queries.CELL[:2], queries.margin_share(), "min"), f"{{{{{label('kc.clause')}}}}}"),),
            "percentunit",
        )
        .thresholds(thresholds("red", (0.0, "green")))
        .repeat("contract")
        .max_per_row(3)
        .data_links([into])
    )
