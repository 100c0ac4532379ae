"""One panel per clause: the estimate of every slice, its confidence interval as a band, and the limit."""

from __future__ import annotations

from typing import Any, Final

from kc_otel.contract.clause import Clause
from kc_otel.contract.model import Contract
from kc_otel.contract.prometheus_names import label
from kc_otel.contract.sentences import number, promise
from kc_otel.contract.slices import ALL, OTHER
from kc_otel.generate.grafana import queries, raw
from kc_otel.generate.grafana.panels import (
    SAME_TIME,
    Query,
    grafana_unit,
    graph_panel,
    limit_line,
    property_of,
    thresholds,
)
from kc_otel.generate.grafana.sdk import dashboard
from kc_otel.generate.links import meaning_link, panel_id, slice_link
from kc_otel.judge.escalation.alert_lifecycle import INPUT_CLAUSE

__all__ = ["clause_row"]

_PALETTE: Final = ("#5794F2", "#B877D9", "#FF9830", "#8AB8FF", "#CA95E5", "#FFCB7D", "#3274D9", "#8F3BB8")


def clause_row(id: int, contract: Contract) -> Any:
    """A contract's row: its clauses in their order, and the sequences that could not be compared."""
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
    id = panel_id(contract.name, clause.id)
    panel = graph_panel(
        id,
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
    links = [
        ("What this clause means", meaning_link(id)),
        ("Slice", f"{slice_link(contract.name, clause.id, ALL)}&{SAME_TIME}"),
    ]
    if contract.metadata.runbook:
        links.append(("Runbook", contract.metadata.runbook))
    return limit_line(panel).links([dashboard.DashboardLink(title).url(url).target_blank(True) for title, url in links])


def _input_panel(contract: Contract) -> Any:
    reason = label("kc.reason")
    invalid = queries.of_contract("kc.input.invalid", contract.name, ("kc.reason",))
    return graph_panel(
        panel_id(contract.name, INPUT_CLAUSE),
        "Sequences that failed an input check",
        "Sequences that were not measured, by reason: other token ids on the two sides, a one-token shift, NaN or "
        "zero-filled log-probabilities. They are no drift; they say that the comparison itself is wrong. The "
        "recorders count them; they reach this data source by way of the Collector.",
        (Query(invalid, f"{{{{{reason}}}}}", step=raw.minimum_step((contract,))),),
        grafana_unit("{sequence}"),
    )


def _named(kind: str) -> str:
    return f"{{{{{label('kc.slice')}}}}} {kind}"
