"""The Slice dashboard: one clause on one slice, from the verdict down to the tokens behind it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from kc_otel.contract.registry.own_metrics import label, selector
from kc_otel.generate.files import SLICE_UID, GeneratedFile
from kc_otel.generate.grafana import panels, queries, sdk
from kc_otel.generate.grafana.boards import STEP, board_file, choice, scope, source, step
from kc_otel.generate.grafana.panels import legend, mapping, target, thresholds

_OF_CONTRACT: Final = f'{label("kc.contract")}=~"$contract"'
_CLAUSE: Final = f'{label("kc.clause")}="$clause"'
_PAIR_LEGEND: Final = f"{legend('kc.kernel.train')} → {legend('kc.kernel.inference')}"


def _in_unit(shown: Any) -> Any:
    """A panel whose numbers are in the clause's unit, as Grafana names it: none, s, or a suffix."""
    unit = label("kc.clause.unit")
    info = queries.by(("kc.clause.unit",), selector("kc.clause.info", None, _OF_CONTRACT, _CLAUSE), "group")
    plain = f'label_replace(topk(1, {info}), "{unit}", "none", "{unit}", "1")'
    asked = target(f'label_replace({plain}, "{unit}", "suffix: $1", "{unit}", "[{{](.*)[}}]")')
    found = {"configRefId": "Unit", "mappings": [{"fieldName": unit, "handlerKey": "unit"}]}
    shown.with_target(asked.ref_id("Unit").instant().format("table"))
    return shown.with_transformation(sdk.models.DataTransformerConfig("configFromData", options=found))


def slice_file() -> GeneratedFile:
    """The dashboard; it is the same for all contracts."""
    contract, slice, *kernels = scope(single=("contract", "slice"))
    clauses = f"label_values({selector('kc.verdict', None, _OF_CONTRACT)}, {label('kc.clause')})"
    info = selector("kc.clause.info", None, _OF_CONTRACT, _CLAUSE)
    quantity = f"label_values({info}, {label('kc.clause.histogram')})"
    any_other = "The drift histogram behind the clause. Any other can be typed."
    operators = f'label_values({{__name__="$quantity", {_OF_CONTRACT}}}, {label("kc.operator")})'
    variables = [
        contract,
        choice("clause", "Clause", "The promise that is looked at.", clauses, single=True),
        slice,
        *kernels,
        choice("quantity", "Quantity", any_other, quantity, single=True),
        choice("operator", "Operator", "Of a quantity that is observed of single operators, the operator.", operators),
        source("traces", "Traces", "tempo", "The Tempo that keeps the recorders' spans."),
        step(),
    ]
    contents = (*_now(), *_bands(), *distribution_panels(), example_panel(), *_around(), _places())
    about = "One clause on one slice: verdict, band, distribution, and the tokens behind it."
    return board_file(SLICE_UID, about, variables, contents)


def _now() -> Iterator[Any]:
    worst = "Verdict now, the worst of the picked kernel versions."
    yield panels.state(1, "State", worst, _cells("kc.verdict"), span=6, mappings=[panels.status_mapping()])
    about = "When it got this verdict; the latest of the picked kernel versions."
    since = f"max({queries.since(_CLAUSE)})"
    yield panels.state(2, "Since", about, since, unit="dateTimeFromNow", coloured=False)
    for id, title, name, about in (
        (3, "Estimate", "kc.bound.estimate", "The statistic that the clause limits, in the clause's unit."),
        (4, "Limit", "kc.bound.limit", "The most that the contract allows on this slice, in the clause's unit."),
    ):
        yield _in_unit(panels.state(id, title, about, _cells(name), coloured=False).decimals(4))
    about = "Distance from the bound that decides to the limit, as a share of it; negative if the limit may be broken."
    query = f"min({queries.margin_share(_CLAUSE)})"
    yield panels.state(5, "Margin", about, query, unit="percentunit", colours=panels.MARGIN_COLOURS).decimals(1)
    about = "Observations that the verdict rests on: tokens, sequences, batches or rows, as the clause counts."
    yield panels.state(6, "Samples", about, _cells("kc.bound.samples"), unit="short", coloured=False)
    about = (
        "Where the decision table sends this slice's requests instead of each version of the inference kernel. "
        "`kc-otel status` says if a router has applied it."
    )
    of, kernels = legend("kc.kernel.inference"), mapping({"0": ("inference", "blue"), "1": ("training", "purple")})
    yield panels.state(
        7, "Kernel ordered", about, queries.ROUTES, colours=thresholds("blue"), legend=of, text="value_and_name",
        mappings=[kernels],
    )  # fmt: skip
    said = "kc.clause.promise"
    promise = queries.by((said,), selector("kc.clause.info", None, _OF_CONTRACT, _CLAUSE))
    about = "What the clause allows."
    yield panels.state(8, "What it promises", about, promise, legend=legend(said), span=24, coloured=False, text="name")


def _bands() -> Iterator[Any]:
    matchers = (*queries.picked(queries.CELL), _CLAUSE)
    series = tuple(
        target(f"{how}({selector(f'kc.bound.{name}', None, *matchers)})", name)
        for name, how in (("upper", "max"), ("lower", "min"), ("estimate", "max"), ("limit", "max"))
    )
    band = panels.graph(
        10,
        "$clause on $slice: value with its confidence band, against the limit",
        "The rolling value of the clause's statistic over the contract's window, its confidence interval as a band "
        "over all picked kernel versions, and the limit. Broken when the whole band is above the limit; holding when "
        "the whole band is at or below it; undecided while the limit lies inside. Purple and blue marks: a kernel "
        "version came.",
        series,
        "short",
        height=10,
        span=16,
    )
    colour: dict[str, object] = {"color": {"mode": "fixed", "fixedColor": "#5794F2"}}
    edge = {**colour, "custom.lineWidth": 0}
    fill = {"custom.fillBelowTo": "lower", "custom.fillOpacity": 25}
    for name, values in (("upper", {**edge, **fill}), ("lower", edge), ("estimate", {**colour, "custom.lineWidth": 2})):
        band.override_by_name(name, panels.properties(values))
    yield _in_unit(panels.with_limit(band, "/^limit$/"))
    about = "The same estimate for each pair of kernel versions, training → inference: which version brought the drift."
    shown = [
        target(queries.cells("kc.bound.estimate", _CLAUSE, attributes=queries.CELL[3:]), _PAIR_LEGEND),
        target(_cells("kc.bound.limit"), "limit"),
    ]
    versions = panels.graph(11, "By kernel version", about, shown, "short", height=10)
    yield _in_unit(panels.with_limit(versions, "/^limit$/"))
    about = (
        "What speaks against the clause since it was last kept, by pair of kernel versions, training → inference. At "
        "100 %, the dashed line, the verdict is FAIL: chance alone gets there in any cell of a contract no more often "
        "than once per false_alarms of the contract. It grows while the limit is exceeded, slowly where it is only "
        "just so, and falls again once what is observed is within it."
    )
    shown = [
        target(queries.cells("kc.verdict.evidence", _CLAUSE, attributes=queries.CELL[3:]), _PAIR_LEGEND),
        target("vector(1)", "limit"),
    ]
    evidence = panels.graph(12, "Evidence against the limit", about, shown, "percentunit", height=7, span=24)
    yield panels.with_limit(evidence, "/^limit$/").min(0.0)


def _around() -> Iterator[Any]:
    others = queries.by(("kc.slice",), selector("kc.verdict", None, _OF_CONTRACT, _CLAUSE))
    yield _verdicts(40, "This clause on every slice", "Is it this slice alone?", others, "kc.slice")
    clauses = queries.cells("kc.verdict", attributes=("kc.clause",))
    yield _verdicts(41, "Every clause on this slice", "Does anything else not hold here?", clauses, "kc.clause")
    samples = queries.cells("kc.bound.samples", _CLAUSE, attributes=queries.CELL[3:])
    about = "Observations within the window, by pair of kernel versions. Few samples make a wide band."
    yield panels.graph(42, "Samples behind the verdict", about, (target(samples, _PAIR_LEGEND),), "short")


def _places() -> Any:
    kernels = queries.picked(("kc.contract", *queries.CELL[3:]))
    columns = {
        title: queries.by(("kc.slice",), selector(f"kc.place.{name}", None, *kernels))
        for title, name in (("Mean of (1-w)+", "estimate"), ("At least", "lower"), ("At most", "upper"))
    }
    return panels.table(
        45,
        "Drift by position and turn",
        "While an incident of the picked kernels lasts: the mean of (1-w)+ over a prompt's tokens in one part of the "
        "responses, with its confidence interval by prompt. position:64 are tokens 64 to 255, and so on by powers of "
        "four from 16; turn:2 is the second run of tokens that count. All traffic of the contract, whatever the slice.",
        columns,
        {label("kc.slice"): "Part of the responses"},
        {title: {"decimals": 5} for title in columns},
    )


def _verdicts(id: int, title: str, about: str, query: str, name: str) -> Any:
    about = f"{about} Verdicts over time, the worst where several pairs of kernel versions report."
    return panels.verdicts(id, title, about, (target(query, legend(name)),), height=8, span=8)


def _cells(name: str) -> str:
    return f"max({queries.cells(name, _CLAUSE)})"


_TRACES: Final = "${traces}"
_FAN_QUANTILES: Final = (0.001, 0.01, 0.25, 0.5, 0.75, 0.99, 0.999)
_SOURCE: Final = (
    "From the drift histograms that the recorders send by way of the Collector; Prometheus and Mimir keep them as "
    "native histograms."
)


def distribution_panels() -> Iterator[Any]:
    """Heatmaps and quantiles of the picked quantity and of the log ratio, from the recorders' histograms."""
    matchers = ('__name__="$quantity"', *queries.picked(queries.STREAM), f'{label("kc.operator")}=~"$operator"')
    chosen = f"sum(rate({{{', '.join(matchers)}}}[$__rate_interval]))"  # nothing, of a quantity that does not exist
    about = (
        "How many observations fell into each bucket, over time: a shift moves the bright band, a new failure mode "
        f"draws a second one, outliers show at the edge. Dots are single tokens; click one for its trace. Grafana "
        f"draws the buckets on a logarithmic axis: of a signed quantity look at the quantiles beside it. {_SOURCE}"
    )
    yield _heatmap_panel(20, "Distribution of $quantity", about, target(chosen, exemplar=True, step=STEP))
    ranks = ((0.5, "median"), (0.99, "99th percentile"), (0.999, "99.9th percentile"))
    about = f"Of everything recorded within the interval, without confidence bounds. {_SOURCE}"
    shown = [
        target(f"histogram_avg({chosen})", "mean", exemplar=True, step=STEP),
        *(target(queries.quantile(rank, chosen), name, step=STEP) for rank, name in ranks),
    ]
    yield panels.graph(21, "$quantity: mean and quantiles", about, shown, "short", height=9, span=12)
    signed = queries.histogram("log_ratio", ())
    about = (
        "Quantiles of l = log P(y) - log Q(y) of the sampled tokens, nats. A fan that is symmetric around zero is "
        "noise, a lopsided one is bias; a far lowest line is a kind of token that the inference kernel samples far "
        f"too often. {_SOURCE}"
    )
    shown = [target(queries.quantile(rank, signed), f"p{rank * 100:g}", step=STEP) for rank in _FAN_QUANTILES]
    yield panels.graph(
        22, "Signed log ratio: where the tokens lie", about, shown, "suffix: nat", height=9, span=12
    ).no_value("Recorders send it where a clause is on log_ratio or k1")
    about = (
        "|l| of the sampled tokens, nats. Each dot is the worst token of a slice since the export before; click it to "
        f"open the span of its batch. {_SOURCE}"
    )
    query = target(queries.histogram("abs_log_ratio", ()), exemplar=True, step=STEP)
    yield _heatmap_panel(23, "Absolute log ratio, with the worst tokens", about, query)


def _heatmap_panel(id: int, title: str, about: str, query: Any) -> Any:
    """A native histogram over time: each column is an interval, each row a bucket, the colour how many fell in."""
    colours = (
        sdk.heatmap.HeatmapColorOptions()
        .mode(sdk.heatmap_models.HeatmapColorMode.SCHEME)
        .scheme("Turbo")
        .scale(sdk.heatmap_models.HeatmapColorScale.EXPONENTIAL)
        .exponent(0.5)
        .fill("dark-orange")
        .steps(64)
    )
    tooltip = sdk.heatmap.HeatmapTooltip().mode(sdk.common_models.TooltipDisplayMode.SINGLE).show_color_scale(True)
    return (
        panels.panel(sdk.heatmap.Panel(), id, title, about, (query,), 9, 12)
        .calculate(False)
        .color(colours)
        .y_axis(sdk.heatmap.YAxisConfig().unit("short").axis_placement(sdk.common_models.AxisPlacement.LEFT))
        .cell_gap(0)
        .show_value(sdk.common_models.VisibilityMode.NEVER)
        .exemplars_color("rgba(255,0,255,0.9)")
        .tooltip(tooltip)
        .show_legend()
    )


def example_panel() -> Any:
    """The spans of the worst batches, which lead to requests and training steps; ids in the table open the trace."""
    shown = ("abs_log_ratio", "sequence", "position", "token_id")
    fields = ", ".join((*(f"span.kc.compare.worst.{name}" for name in shown), "span.kc.compare.tokens"))
    spans = '{ name = "kc.compare" && span.kc.contract = "$contract" && span.kc.compare.slices = "$slice" }'
    about = (
        "Measured batches that touched the slice, the one with the largest |l| first, with the token's position and "
        "id. Open a trace for the request or training step that it belongs to. From the spans that the recorders send "
        "to Tempo by way of the Collector."
    )
    traces = panels.reference("tempo", _TRACES)
    query = (
        sdk.tempo.Dataquery()
        .ref_id("A")
        .query_type("traceql")
        .query(f"{spans} | select({fields})")
        .filters([])
        .limit(100)
        .table_type(sdk.tempo_models.SearchTableType.SPANS)
        .datasource(traces)
    )
    ids = sdk.models.MatcherConfig("byRegexp", "/trace(ID|Id)|Trace ID/")
    return (
        panels.panel(sdk.table.Panel(), 30, "Worst examples", about, (), 9, 24)
        .datasource(traces)
        .with_target(query)
        .filterable(True)
        .sort_by([panels.sorting("kc.compare.worst.abs_log_ratio", down=True)])
        .with_override(ids, panels.properties({"custom.width": 260}))
    )
