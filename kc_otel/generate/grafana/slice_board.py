"""The Slice dashboard: one clause on one slice, from the verdict down to the tokens behind it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from kc_otel.contract.prometheus_names import label, selector
from kc_otel.generate.files import GeneratedFile
from kc_otel.generate.grafana import queries
from kc_otel.generate.grafana.boards import board, board_file, choice, scope, step
from kc_otel.generate.grafana.distributions import distribution_panels, example_panels
from kc_otel.generate.grafana.panels import (
    STATUS_COLOURS,
    Query,
    graph_panel,
    in_unit,
    limit_line,
    mapping,
    property_of,
    state_panel,
    status_mapping,
    thresholds,
    timeline_panel,
)
from kc_otel.generate.grafana.sdk import common_models, dashboard
from kc_otel.generate.links import SLICE_UID, meaning_link
from kc_otel.judge.verdict import Status

__all__ = ["slice_file"]

_OF_CONTRACT: Final = f'{label("kc.contract")}=~"$contract"'
_CLAUSE: Final = f'{label("kc.clause")}="$clause"'
_UNIT: Final = queries.in_units(_OF_CONTRACT, _CLAUSE)
_PLAIN: Final = common_models.BigValueColorMode.NONE


def slice_file() -> GeneratedFile:
    """The dashboard; it is the same for all contracts."""
    contract, slice, *kernels = scope(one=("contract", "slice"))
    clauses = f"label_values({selector('kc.verdict', None, _OF_CONTRACT)}, {label('kc.clause')})"
    slices = f"label_values({selector('kc.verdict', None, _OF_CONTRACT)}, {label('kc.slice')})"
    quantity = (
        f"label_values({selector('kc.clause.info', None, _OF_CONTRACT, _CLAUSE)}, {label('kc.clause.histogram')})"
    )
    operators = f'label_values({{__name__="$quantity", {_OF_CONTRACT}}}, {label("kc.operator")})'
    traces = (
        dashboard.DatasourceVariable("traces")
        .label("Traces")
        .type("tempo")
        .description("The Tempo that keeps the recorders' spans.")
    )
    variables = [
        contract,
        choice("clause", "Clause", "The promise that is looked at.", clauses, one=True),
        slice,
        *kernels,
        choice(
            "quantity", "Quantity", "The drift histogram behind the clause. Any other can be typed.", quantity, one=True
        ),
        choice("operator", "Operator", "Of a quantity that is observed of single operators, the operator.", operators),
        choice("clauses", "Bands of clauses", "The clauses that have a band of their own below.", clauses),
        choice("slices", "Bands of slices", "The slices that have a band of their own below.", slices),
        traces,
        step(),
    ]
    made = board(
        SLICE_UID, "One clause on one slice: verdict, band, distribution, and the tokens behind it.", variables
    )
    for panel in (*_now(), *_bands(), *distribution_panels(), *example_panels(), *_around(), *_by_rules()):
        made = made.with_panel(panel)
    for row in _repeated():
        made = made.with_row(row)
    return board_file("slice", made)


def _now() -> Iterator[Any]:
    yield (
        state_panel(1, "State", "Verdict now, the worst of the picked kernel versions.", _cells("kc.verdict"))
        .span(6)
        .mappings([status_mapping()])
    )
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
        yield in_unit(state_panel(id, title, about, _cells(name)).color_mode(_PLAIN).decimals(4), _UNIT)
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
    said = label("kc.clause.promise")
    promise = queries.by(("kc.clause.promise",), selector("kc.clause.info", None, _OF_CONTRACT, _CLAUSE))
    yield (
        state_panel(
            8, "What it promises", "What the clause allows. Click for what that means.", promise, f"{{{{{said}}}}}"
        )
        .span(24)
        .color_mode(_PLAIN)
        .text_mode(common_models.BigValueTextMode.NAME)
        .data_links([dashboard.DashboardLink("What this clause means").url(meaning_link("${contract}", "${clause}"))])
    )


def _bands() -> Iterator[Any]:
    band = _band(
        10,
        "$clause on $slice: value with its confidence band, against the limit",
        "The rolling value of the clause's statistic over the contract's window, its confidence interval as a band "
        "over all picked kernel versions, and the limit. Broken when the whole band is above the limit; holding when "
        "the whole band is at or below it; undecided while the limit lies inside. Purple and blue marks: a kernel "
        "version came.",
        "kc.bound",
        unit=_UNIT,
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
    yield in_unit(limit_line(versions, "/^limit$/"), _UNIT).height(10).span(8)
    evidence = graph_panel(
        12,
        "Evidence against the limit",
        "What speaks against the clause since it was last kept, by pair of kernel versions, training → inference. At "
        "100 %, the dashed line, the verdict is FAIL: chance alone gets there in any cell of a contract no more often "
        "than once per false_alarms of the contract. It grows while the limit is exceeded, slowly where it is only "
        "just so, and falls again once what is observed is within it.",
        (
            Query(queries.cells("kc.verdict.evidence", _CLAUSE, attributes=queries.CELL[3:]), pair),
            Query("vector(1)", "limit"),
        ),
        "percentunit",
    )
    yield limit_line(evidence, "/^limit$/").min(0.0).height(7).span(24)


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
        unit=_UNIT,
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


def _repeated() -> Iterator[Any]:
    """Rows of bands that Grafana repeats, on one slice for every clause and for one clause on every slice."""
    clause = f'{label("kc.clause")}=~"$clauses"'
    bands = _band(
        51,
        "$clauses on $slice",
        "The value of the clause's statistic on this slice with its confidence band, and the limit; the clause is "
        "broken while the whole band is above the dashed line.",
        "kc.bound",
        matchers=(*queries.picked(queries.CELL), clause),
        unit=queries.in_units(_OF_CONTRACT, clause),
    )
    yield _row(50, "Every clause on this slice", bands.repeat("clauses"))
    slice = f'{label("kc.slice")}=~"$slices"'
    kernels = queries.picked(("kc.contract", *queries.CELL[3:]))
    bands = _band(
        61,
        "$clause on $slices",
        "The value of this clause's statistic on the slice with its confidence band, and the slice's limit; the "
        "clause is broken there while the whole band is above the dashed line.",
        "kc.bound",
        matchers=(*kernels, _CLAUSE, slice),
        unit=_UNIT,
    )
    yield _row(60, "This clause on every slice", bands.repeat("slices"))


def _row(id: int, title: str, panel: Any) -> Any:
    return dashboard.Row(title).id(id).with_panel(panel.max_per_row(3))


def _band(
    id: int,
    title: str,
    about: str,
    prefix: str,
    *,
    matchers: Sequence[str] = (*queries.picked(queries.CELL), _CLAUSE),
    unit: str,
) -> Any:
    """Estimate, band and limit, from the metrics of a prefix, over all series that match."""
    series = tuple(
        Query(f"{how}({selector(f'{prefix}.{name}', None, *matchers)})", name)
        for name, how in (("upper", "max"), ("lower", "min"), ("estimate", "max"), ("limit", "max"))
    )
    panel = graph_panel(id, title, about, series, "short")
    colour = property_of("color", {"mode": "fixed", "fixedColor": "#5794F2"})
    edge = [colour, property_of("custom.lineWidth", 0)]
    fill = [property_of("custom.fillBelowTo", "lower"), property_of("custom.fillOpacity", 25)]
    panel = panel.override_by_name("upper", [*edge, *fill]).override_by_name("lower", edge)
    panel = panel.override_by_name("estimate", [colour, property_of("custom.lineWidth", 2)])
    return in_unit(limit_line(panel, "/^limit$/"), unit)


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
