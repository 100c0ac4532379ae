"""The Slice dashboard: one clause on one slice, from the verdict down to the tokens behind it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

from kc_otel.contract.model import Contract
from kc_otel.contract.prometheus_names import label, metric, selector
from kc_otel.contract.slices import ALL
from kc_otel.generate.files import GeneratedFile
from kc_otel.generate.grafana import queries, raw
from kc_otel.generate.grafana.boards import board, board_file, choice, scope
from kc_otel.generate.grafana.cell_tables import meanings
from kc_otel.generate.grafana.panels import (
    STATUS_COLOURS,
    Query,
    data_link,
    graph_panel,
    limit_line,
    mapping,
    property_of,
    state_panel,
    status_mapping,
    thresholds,
    timeline_panel,
)
from kc_otel.generate.grafana.sdk import common_models, dashboard
from kc_otel.generate.grafana.slice_panels import distribution_panels, example_panels
from kc_otel.generate.links import SLICE_UID, meaning_link
from kc_otel.judge.verdict import Status

__all__ = ["slice_file"]

_OF_CONTRACT: Final = f'{label("kc.contract")}=~"$contract"'
_CLAUSE: Final = f'{label("kc.clause")}="$clause"'
_PLAIN: Final = common_models.BigValueColorMode.NONE


def slice_file(contracts: Iterable[Contract]) -> GeneratedFile:
    """The dashboard; it names the contracts only to know the quantity behind each clause."""
    known = tuple(contracts)
    first = known[0] if known else None
    picked = scope(one=("contract", "slice"))
    if first is not None:
        picked[0] = choice(
            "contract",
            "Contract",
            "The contract.",
            f"label_values({metric('kc.verdict')}, {label('kc.contract')})",
            first=first.name,
        )
    clause = choice(
        "clause",
        "Clause",
        "The promise that is looked at.",
        f"label_values({metric('kc.verdict')}{{{_OF_CONTRACT}}}, {label('kc.clause')})",
        first=first.clauses[0].id if first is not None and first.clauses else ALL,
    )
    quantity = choice(
        "quantity",
        "Quantity",
        "The drift histogram behind the clause, found from contract and clause. Any other `kc_drift_...` can be typed.",
        f"query_result({raw.quantity_of(known)})",
        regex='/quantity="([^"]+)"/',
        first="kc_drift_abs_log_ratio",
    )
    operator = choice(
        "operator",
        "Operator",
        "The operator, where the quantity is observed of single operators.",
        f"label_values($quantity{{{_OF_CONTRACT}}}, {label('kc.operator')})",
    )
    traces = (
        dashboard.DatasourceVariable("traces")
        .label("Traces")
        .type("tempo")
        .description("The Tempo that keeps the recorders' spans.")
    )
    variables = [picked[0], clause, *picked[1:], quantity, operator, traces]
    made = board(
        SLICE_UID, "One clause on one slice: verdict, band, distribution, and the tokens behind it.", variables
    )
    for panel in (*_now(known), *_bands(), *distribution_panels(known), *example_panels(), *_around(), *_by_rules()):
        made = made.with_panel(panel)
    return board_file("slice", made)


def _now(contracts: tuple[Contract, ...]) -> Iterator[Any]:
    yield state_panel(
        1, "State", "Verdict now, the worst of the picked kernel versions.", _cells("kc.verdict")
    ).mappings([status_mapping()])
    yield (
        state_panel(
            2,
            "Since",
            "When it got this verdict; the latest of the picked kernel versions.",
            f"max({queries.since(_CLAUSE)})",
        )
        .unit("dateTimeFromNow")
        .color_mode(_PLAIN)
    )
    for id, title, name, about in (
        (3, "Estimate", "kc.bound.estimate", "The statistic that the clause limits, in the clause's unit."),
        (4, "Limit", "kc.bound.limit", "The most that the contract allows on this slice, in the clause's unit."),
    ):
        yield state_panel(id, title, about, _cells(name)).color_mode(_PLAIN).decimals(4)
    yield (
        state_panel(
            5,
            "Margin",
            "Distance from the bound that decides to the limit, as a share of the limit; negative is beyond it.",
            f"min({queries.margin_share(_CLAUSE)})",
        )
        .unit("percentunit")
        .decimals(1)
        .thresholds(thresholds("red", (0.0, "yellow"), (0.2, "green")))
    )
    about = "Observations that the verdict rests on: tokens, sequences, batches or rows, as the clause counts."
    yield state_panel(6, "Samples", about, _cells("kc.bound.samples")).unit("short").color_mode(_PLAIN)
    yield (
        state_panel(7, "Kernel that serves it", "Where the decision table sends this slice now.", queries.routes())
        .mappings([mapping({"0": ("inference", "blue"), "1": ("training", "purple")})])
        .thresholds(thresholds("blue"))
    )
    shown = {"type": "range", "options": {"from": 0, "to": None, "result": {"text": "read", "index": 0}}}
    panel = state_panel(
        8,
        "What it means",
        "What the clause promises, why its limit has its value, and what follows from it. Click to read.",
        f"max(({meanings(contracts)}) and {queries.cells('kc.verdict', _CLAUSE)})",
    )
    yield panel.color_mode(_PLAIN).override_by_regexp(
        "/.*/",
        [
            property_of("mappings", [shown]),
            property_of("links", [data_link("What this clause means", meaning_link("${__value.raw}"))]),
        ],
    )


def _bands() -> Iterator[Any]:
    band = _band(
        10,
        "$clause on $slice: value with its confidence band, against the limit",
        "The rolling value of the clause's statistic over the contract's window, its confidence interval as a band "
        "over all picked kernel versions, and the limit. Broken when the whole band is above the limit; holding when "
        "the whole band is at or below it; undecided while the limit lies inside. Purple and blue marks: a kernel "
        "version came. In the clause's unit.",
        "kc.bound",
    )
    yield band.height(10).span(16)
    pair = f"{{{{{label('kc.kernel.train')}}}}} → {{{{{label('kc.kernel.inference')}}}}}"
    versions = graph_panel(
        11,
        "By kernel version",
        "The same estimate for each pair of kernel versions, training → inference: which version brought the drift.",
        (
            Query(queries.cells("kc.bound.estimate", _CLAUSE, attributes=queries.CELL[3:]), pair),
            Query(_cells("kc.bound.limit"), "limit"),
        ),
        "short",
    )
    yield limit_line(versions, "/^limit$/").height(10).span(8)


def _around() -> Iterator[Any]:
    others = queries.by(("kc.slice",), selector("kc.verdict", None, _OF_CONTRACT, _CLAUSE))
    yield _verdicts(40, "This clause on every slice", "Is it this slice alone?", others, "kc.slice")
    clauses = queries.cells("kc.verdict", attributes=("kc.clause",))
    yield _verdicts(41, "Every clause on this slice", "Does anything else not hold here?", clauses, "kc.clause")
    samples = queries.cells("kc.bound.samples", _CLAUSE, attributes=queries.CELL[3:])
    pair = f"{{{{{label('kc.kernel.train')}}}}} → {{{{{label('kc.kernel.inference')}}}}}"
    yield graph_panel(
        42,
        "Samples behind the verdict",
        "Observations within the window, by pair of kernel versions. Few samples make a wide band. Rules: what the "
        "generated recording rules are sure of, where they are loaded.",
        (Query(samples, pair), Query(_cells("kc.rule.samples"), "rules")),
        "short",
    )


def _by_rules() -> Iterator[Any]:
    yield _band(
        43,
        "The same from Prometheus' own rules",
        "What the generated recording rules compute from the raw histograms without the evaluator: the bounds are a "
        "little wider. Empty unless the rules of `kc-otel generate prometheus` are loaded.",
        "kc.rule",
    ).span(12)
    yield (
        timeline_panel(
            44,
            "Evaluator and rules",
            "Both verdicts over time; they may differ by an evaluation or two around a change, and where the rules' "
            "wider bounds leave open what the evaluator decides.",
            Query(f"max({queries.cells('kc.verdict', _CLAUSE)})", "evaluator"),
            status_mapping(),
            STATUS_COLOURS[Status.PASS],
            Query(f"max({queries.cells('kc.rule.status', _CLAUSE)})", "rules"),
        )
        .height(8)
        .span(12)
    )


def _band(id: int, title: str, about: str, prefix: str) -> Any:
    """Estimate, band and limit of the picked clause and slice, from the metrics of a prefix."""
    panel = graph_panel(
        id,
        title,
        about,
        (
            Query(_cells(f"{prefix}.upper"), "upper"),
            Query(_cells(f"{prefix}.lower", "min"), "lower"),
            Query(_cells(f"{prefix}.estimate"), "estimate"),
            Query(_cells(f"{prefix}.limit"), "limit"),
        ),
        "short",
    )
    colour = property_of("color", {"mode": "fixed", "fixedColor": "#5794F2"})
    edge = [colour, property_of("custom.lineWidth", 0)]
    fill = [property_of("custom.fillBelowTo", "lower"), property_of("custom.fillOpacity", 25)]
    panel = panel.override_by_name("upper", [*edge, *fill]).override_by_name("lower", edge)
    panel = panel.override_by_name("estimate", [colour, property_of("custom.lineWidth", 2)])
    return limit_line(panel, "/^limit$/")


def _verdicts(id: int, title: str, about: str, query: str, name: str) -> Any:
    panel = timeline_panel(
        id,
        title,
        f"{about} Verdicts over time, the worst where several pairs of kernel versions report.",
        Query(query, f"{{{{{label(name)}}}}}"),
        status_mapping(),
        STATUS_COLOURS[Status.PASS],
    )
    return panel.height(8).span(8)


def _cells(name: str, how: str = "max") -> str:
    """One number for the picked clause and slice, over the picked kernel versions."""
    return f"{how}({queries.cells(name, _CLAUSE, how=how)})"
