"""The overview's tables of cells: a row is a clause on a slice between two kernel versions."""

from __future__ import annotations

import itertools
from typing import Any, Final

from kc_otel.contract.prometheus_names import label
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
    value_field,
)
from kc_otel.generate.links import meaning_link, slice_link

__all__ = ["every_cell", "not_holding"]

_TITLES: Final = dict(
    zip(
        (label(name) for name in queries.CELL),
        ("Contract", "Clause", "Slice", "Training kernel", "Inference kernel"),
        strict=True,
    )
)
_FIELDS: Final = tuple(f"${{__data.fields.{title}}}" for title in ("Contract", "Clause", "Slice"))
_SEVERITY_COLOURS: Final = ("blue", "orange", "red")


def not_holding(id: int) -> Any:
    """The cells that are not PASS: what, for whom, since when, how far, and what was done."""
    columns = {
        "State": queries.cells("kc.verdict"),
        "Since": queries.since(),
        "Margin": queries.margin_share(),
        "Done about it": queries.action_bits(),
        "Alert": queries.severity(),
        "": queries.promises(),
    }
    panel = table_panel(
        id,
        "What does not hold: since when, for whom, and what was done about it",
        "Every clause on a slice that is not PASS, the worst first; empty when everything holds. FAIL: the limit is "
        "exceeded; false alarms are as far apart as the contract says. NO_DATA: nobody reports, which is not the "
        "same as holding. INCONCLUSIVE: the samples do not decide it yet. Margin is the distance from the bound that "
        "decides to the limit, as a share of the limit: negative is beyond it. Done about it: the actions of the "
        "policy's steps that fire now. Click a state, clause or slice to look into it, a promise for what it means.",
        {title: queries.not_holding(query) for title, query in columns.items()},
        {**_TITLES, label("kc.clause.promise"): "Promise"},
        {
            **_columns(),
            "Done about it": (property_of("mappings", [_action_mapping()]), property_of("noValue", "nothing yet")),
            "Alert": (
                property_of("mappings", [_severity_mapping()]),
                property_of("custom.cellOptions", {"type": "color-text"}),
                property_of("custom.width", 90),
            ),
            "Promise": _promise_column(),
        },
        sort=(("State", True), ("Margin", False)),
        hide=(value_field(len(columns) - 1),),
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
    return panel.height(10).no_value("Everything that is judged holds, if the first tile says that an evaluator lives")


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
    return table_panel(
        id,
        "Every cell: state, since when, margin",
        "The worst come first. Estimate, bounds and limit are in the unit of the clause. Evidence is what is held "
        "against the limit since it was last kept: chance alone reaches 100 % in any cell of a contract no more often "
        "than once per false_alarms of the contract.",
        columns,
        _TITLES,
        {
            **_columns(),
            "Samples": (property_of("unit", "short"),),
            "Evidence": (property_of("unit", "percentunit"), property_of("decimals", 0)),
        },
        sort=(("State", True), ("Margin", False)),
    ).height(11)


def _columns() -> dict[str, tuple[Any, ...]]:
    into = property_of(
        "links", [data_link("Look into this slice", f"{slice_link(*_FIELDS)}&var-datasource={DATASOURCE}&{SAME_TIME}")]
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


def _promise_column() -> tuple[Any, ...]:
    return (
        property_of("links", [data_link("What this clause means", meaning_link(*_FIELDS[:2]))]),
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
