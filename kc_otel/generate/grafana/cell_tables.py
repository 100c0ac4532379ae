"""The overview's tables of cells: a row is a clause on a slice between two kernel versions."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any, Final

from kc_otel.contract.model import Contract
from kc_otel.contract.prometheus_names import label, selector
from kc_otel.contract.sentences import limitation
from kc_otel.generate.grafana import queries
from kc_otel.generate.grafana.panels import (
    DATASOURCE,
    SAME_TIME,
    data_link,
    mapping,
    property_of,
    status_mapping,
    table_panel,
    thresholds,
)
from kc_otel.generate.links import meaning_link, panel_id, slice_link

__all__ = ["every_cell", "meanings", "not_holding"]

_TITLES: Final = dict(
    zip(
        (label(name) for name in queries.CELL),
        ("Contract", "Clause", "Slice", "Training kernel", "Inference kernel"),
        strict=True,
    )
)
_TO_SLICE: Final = slice_link("${__data.fields.Contract}", "${__data.fields.Clause}", "${__data.fields.Slice}")
_SEVERITY_COLOURS: Final = ("blue", "orange", "red")


def not_holding(id: int, contracts: Iterable[Contract]) -> Any:
    """The cells that are not PASS: what, for whom, since when, how far, and what was done."""
    known = tuple(contracts)
    columns = {
        "State": queries.cells("kc.verdict"),
        "Since": queries.since(),
        "Margin": queries.margin_share(),
        "Done about it": queries.action_bits(),
        "Alert": queries.severity(),
        "Promise": meanings(known),
    }
    panel = table_panel(
        id,
        "What does not hold: since when, for whom, and what was done about it",
        "Every clause on a slice that is not PASS, the worst first; empty when everything holds. FAIL: the limit is "
        "exceeded, with the contract's confidence. NO_DATA: nobody reports, which is not the same as holding. "
        "INCONCLUSIVE: the samples do not decide it yet. Margin is the distance from the bound that decides to the "
        "limit, as a share of the limit: negative is beyond it. Done about it: the actions of the policy's steps that "
        "fire now. Click a state, clause or slice to look into it, and a promise for what it means.",
        {title: queries.not_holding(query) for title, query in columns.items()},
        _TITLES,
        {
            **_columns(),
            "Done about it": (property_of("mappings", [_action_mapping()]), property_of("noValue", "nothing yet")),
            "Alert": (
                property_of("mappings", [_severity_mapping()]),
                property_of("custom.cellOptions", {"type": "color-text"}),
                property_of("custom.width", 90),
            ),
            "Promise": _promise_column(known),
        },
        sort=(("State", True), ("Margin", False)),
        order=(
            "State",
            "Contract",
            "Clause",
            "Slice",
            "Promise",
            "Since",
            "Done about it",
            "Alert",
            "Margin",
            "Training kernel",
            "Inference kernel",
        ),
    )
    return panel.height(10).no_value("Everything that is judged holds")


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
    }
    return table_panel(
        id,
        "Every cell: state, since when, margin",
        "The worst come first. Estimate, bounds and limit are in the unit of the clause.",
        columns,
        _TITLES,
        {**_columns(), "Samples": (property_of("unit", "short"),)},
        sort=(("State", True), ("Margin", False)),
    ).height(11)


def meanings(contracts: Iterable[Contract]) -> str:
    """For each cell the id of the panel that says what its clause means."""
    every = [
        f"0 * {queries.by(queries.CELL, selector('kc.verdict', own, *queries.picked(queries.CELL)))} "
        f"+ {panel_id(contract.name, clause.id)}"
        for contract in contracts
        for clause in contract.clauses
        if (own := {"kc.contract": contract.name, "kc.clause": clause.id})
    ]
    return " or ".join(every)


def _columns() -> dict[str, tuple[Any, ...]]:
    into = property_of(
        "links", [data_link("Look into this slice", f"{_TO_SLICE}&var-datasource={DATASOURCE}&{SAME_TIME}")]
    )
    margin = thresholds("red", (0.0, "yellow"), (0.2, "green")).build()
    return {
        "State": (
            property_of("custom.cellOptions", {"type": "color-background"}),
            property_of("mappings", [status_mapping()]),
            property_of("custom.width", 130),
            into,
        ),
        "Clause": (into,),
        "Slice": (into,),
        "Since": (property_of("unit", "dateTimeFromNow"),),
        "Margin": (
            property_of("unit", "percentunit"),
            property_of("decimals", 1),
            property_of("thresholds", margin),
            property_of("custom.cellOptions", {"type": "color-text"}),
            property_of("custom.width", 100),
        ),
    }


def _promise_column(contracts: Iterable[Contract]) -> tuple[Any, ...]:
    """The value is the id of the panel that explains the clause, and is shown as what the clause says."""
    texts = {
        str(panel_id(contract.name, clause.id)): (limitation(clause, tuple(contract.slices)), "text")
        for contract in contracts
        for clause in contract.clauses
    }
    return (
        property_of("mappings", [mapping(texts)] if texts else []),
        property_of("links", [data_link("What this clause means", meaning_link("${__value.raw}"))]),
        property_of("custom.cellOptions", {"type": "auto", "wrapText": True}),
        property_of("custom.width", 330),
    )


def _severity_mapping() -> Any:
    pairs = zip(queries.SEVERITIES, _SEVERITY_COLOURS, strict=True)
    return mapping({str(code): pair for code, pair in enumerate(pairs, start=1)})


def _action_mapping() -> Any:
    """Every combination of actions in words, the gravest first."""
    words = [text for _, _, text in queries.ACTION_BITS]
    combinations = itertools.product((0, 1), repeat=len(words))
    return mapping(
        {
            str(int("".join(map(str, bits)), 2)): (", ".join(itertools.compress(words, bits)) or "nothing yet", "text")
            for bits in combinations
        }
    )
