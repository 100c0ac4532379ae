"""The dashboard of what clauses mean: what each promises, on which quantity, with which limits, and what to do.

What follows from a limit, and how many samples it needs, `kc-otel explain` works out from the contract.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from kc_otel.contract.prometheus_names import label, selector
from kc_otel.contract.registry import DERIVED, QUANTITIES
from kc_otel.contract.slices import ALL
from kc_otel.generate.files import GeneratedFile
from kc_otel.generate.grafana import queries
from kc_otel.generate.grafana.boards import board, board_file, choice
from kc_otel.generate.grafana.panels import (
    SAME_TIME,
    data_link,
    mapping,
    property_of,
    status_mapping,
    table_panel,
    text_panel,
)
from kc_otel.generate.links import MEANING_UID, slice_link
from kc_otel.generate.runbook import FIRST_STEPS

__all__ = ["meaning_file"]

_GUIDE: Final = """\
A **kernel contract** says how far a training kernel (P) and an inference kernel (Q) of the same policy may differ. A
*clause* limits one statistic of one metric on every *slice* of the traffic. The evaluator keeps a confidence interval
for it: `PASS` when all of the interval is within the limit. What is observed is held against the limit as it arrives:
`FAIL` when that speaks more strongly than chance does once per `false_alarms` of the contract. `INCONCLUSIVE` while
neither is so, `NO_DATA` when the kernels are silent. w = P(y)/Q(y) is the importance ratio of a sampled token y,
and l = log w. What a limit guarantees for rewards and gradients, and how many samples it needs, is what
`kc-otel explain CONTRACT` answers; what was done about a cell, and by whom, stands on the evaluator's own page.
"""
_STATES: Final = {
    "fail": "FAIL: broken",
    "no-data": "NO_DATA: nobody reports",
    "inconclusive": "INCONCLUSIVE: undecided",
    "invalid-input": "Invalid input: the sides cannot be compared",
}
_DEFINITION: Final = "definition"
_CLAUSE: Final = ("kc.contract", "kc.clause")
_PICKED: Final = tuple(f'{label(f"kc.{name}")}=~"${name}"' for name in ("contract", "clause"))


def meaning_file() -> GeneratedFile:
    """The dashboard; it is the same for all contracts."""
    verdict, info = (
        f"label_values({selector('kc.verdict')}",
        f"label_values({selector('kc.clause.info', None, _PICKED[0])}",
    )
    variables = (
        choice(
            "contract", "Contract", "Kernel contracts that the evaluator judges.", f"{verdict}, {label('kc.contract')})"
        ),
        choice("clause", "Clause", "Their promises.", f"{info}, {label('kc.clause')})"),
    )
    made = board(MEANING_UID, "What each clause promises, and what to do when it breaks.", variables)
    for panel in _panels():
        made = made.with_panel(panel)
    return board_file("meaning", made)


def _panels() -> Iterator[Any]:
    yield text_panel(1, "How to read a contract", _GUIDE, 5)
    said = ("kc.clause.promise", "kc.clause.metric", "kc.clause.statistic")
    every = queries.by((*_CLAUSE, *said), selector("kc.clause.info", None, *_PICKED))
    metric = label("kc.clause.metric")
    titles = {
        label("kc.contract"): "Contract",
        label("kc.clause"): "Clause",
        label("kc.clause.promise"): "Promise",
        _DEFINITION: "What the metric is",
        metric: "Metric",
        label("kc.clause.statistic"): "Statistic",
    }
    wrapped = (property_of("custom.cellOptions", {"type": "auto", "wrapText": True}), property_of("custom.width", 380))
    definitions = {key: (one.meaning, "text") for key, one in (QUANTITIES | DERIVED).items()}
    yield table_panel(
        2,
        "What each clause promises",
        "The statistic of the metric stays at or below the limit; slices with a limit of their own are named. A metric "
        "that is not spelled out is an OpenTelemetry histogram of that name, in seconds.",
        {"One": f'label_replace({every}, "{_DEFINITION}", "$1", "{metric}", "(.*)")'},
        titles,
        {
            "Clause": (_into(slice_link("${__data.fields.Contract}", "${__data.fields.Clause}", ALL)),),
            "Promise": wrapped,
            "What the metric is": (*wrapped, property_of("mappings", [mapping(definitions)])),
        },
        sort=(("Contract", False), ("Clause", False)),
        hide=("Value",),
    ).height(12)
    of_slice = (*_CLAUSE, "kc.slice")
    yield table_panel(
        3,
        "Limits by slice",
        "The limit in force on each slice, in the clause's unit, and the worst verdict of the kernel versions there.",
        {
            name: queries.by(of_slice, selector(metric, None, *_PICKED))
            for name, metric in (("State", "kc.verdict"), ("Limit", "kc.bound.limit"))
        },
        dict(zip(map(label, of_slice), ("Contract", "Clause", "Slice"), strict=True)),
        {
            "State": (
                property_of("custom.cellOptions", {"type": "color-background"}),
                property_of("mappings", [status_mapping()]),
                property_of("custom.width", 130),
            ),
            "Slice": (_into(slice_link(*(f"${{__data.fields.{name}}}" for name in ("Contract", "Clause", "Slice")))),),
        },
        sort=(("Contract", False), ("Clause", False)),
    )
    sections = (
        f"#### {title}\n\n" + "\n".join(f"1. {step}" for step in FIRST_STEPS[on]) for on, title in _STATES.items()
    )
    yield text_panel(4, "What to do when a clause does not hold", "\n\n".join(sections) + "\n", 14)


def _into(path: str) -> Any:
    return property_of("links", [data_link("Look into it", f"{path}&{SAME_TIME}")])
