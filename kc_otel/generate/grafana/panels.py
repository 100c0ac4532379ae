"""Panels as the dashboards use them: one function per kind, with the choices that all of its panels share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kc_otel.contract.prometheus_names import label
from kc_otel.generate.grafana.sdk import (
    common,
    common_models,
    dashboard,
    models,
    prometheus,
    stat,
    statetimeline,
    table,
    timeseries,
    xychart,
    xychart_models,
)
from kc_otel.judge.verdict import Status

DATASOURCE: Final = "${datasource}"
SAME_TIME: Final = "${__url_time_range}"
"""Grafana's name for the time range that is looked at, in an address."""
STATUS_COLOURS: Final = {
    Status.PASS: "#1a7340",
    Status.INCONCLUSIVE: "#8a5a00",
    Status.NO_DATA: "#7a3ea8",
    Status.FAIL: "#c01c28",
    Status.INVALID_INPUT: "#7a3ea8",
}
"""Those of the evaluator's page, on which white can be read."""
STATUS_SHAPES: Final = {
    Status.PASS: "✓",
    Status.INCONCLUSIVE: "?",
    Status.NO_DATA: "○",
    Status.FAIL: "✕",
    Status.INVALID_INPUT: "⊘",
}
"""Those of the evaluator's page: a state is never told by its colour alone."""


@dataclass(frozen=True, slots=True)
class Query:
    """One query of a panel; `step` is the smallest where data comes seldom, `exemplar` shows observations."""

    expression: str
    legend: str = ""
    exemplar: bool = False
    step: str = ""


def mapping(options: Mapping[str, tuple[str, str]]) -> Any:
    """A value mapping from value to text and colour."""
    return models.ValueMap(
        {
            value: models.ValueMappingResult(text=text, color=colour, index=index)
            for index, (value, (text, colour)) in enumerate(options.items())
        }
    )


def status_mapping() -> Any:
    """Codes of the metric `kc.verdict` to shapes, names and colours."""
    return mapping(
        {str(status.code): (f"{STATUS_SHAPES[status]} {status}", STATUS_COLOURS[status]) for status in Status}
    )


def thresholds(base: str, *steps: tuple[float, str]) -> Any:
    """Colours from `base` upwards: each step is the value at which its colour begins."""
    return (
        dashboard.ThresholdsConfig()
        .mode(models.ThresholdsMode.ABSOLUTE)
        .steps([models.Threshold(None, base), *(models.Threshold(value, colour) for value, colour in steps)])
    )


def properties(values: Mapping[str, object]) -> list[Any]:
    """The properties of a field override."""
    return [models.DynamicConfigValue(name, value) for name, value in values.items()]


MARGIN: Final[Mapping[str, object]] = {
    "unit": "percentunit",
    "decimals": 1,
    "thresholds": thresholds("red", (0.0, "yellow"), (0.2, "green")).build(),
    "custom.cellOptions": {"type": "color-text"},
}
"""Column of a table with margins as shares of limits: red beyond the limit, yellow near it."""


def legend(*attributes: str) -> str:
    """Template of a series' name, or of a mark's text: the values of these attributes."""
    return " · ".join(f"{{{{{label(name)}}}}}" for name in attributes)


def reference(kind: str = "prometheus", uid: str = DATASOURCE) -> Any:
    """A data source that a variable picks."""
    return common_models.DataSourceRef(kind, uid)


def stat_panel(
    id: int, title: str, description: str, query: str, colour: str, base: str = "green", span: int = 3
) -> Any:
    """A count: `base` is the colour of zero, `colour` that of anything above it."""
    colours = thresholds(base, (1e-9, colour))
    return state_panel(id, title, description, query, span=span, colours=colours).decimals(0)


def state_panel(
    id: int,
    title: str,
    description: str,
    query: str,
    *,
    legend: str = "",
    span: int = 3,
    unit: str = "none",
    colours: Any = None,
) -> Any:
    """One value, large, on the colour of its threshold or mapping; where several series match, the largest."""
    panel = common_panel(stat.Panel(), id, title, description, (Query(query, legend),), instant=True)
    return (
        panel.height(4)
        .span(span)
        .unit(unit)
        .thresholds(colours or thresholds("text"))
        .color_scheme(dashboard.FieldColor().mode(models.FieldColorModeId.THRESHOLDS))
        .color_mode(common_models.BigValueColorMode.BACKGROUND)
        .graph_mode(common_models.BigValueGraphMode.NONE)
        .text_mode(common_models.BigValueTextMode.VALUE)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .no_value("unknown")
    )


def table_panel(
    id: int,
    title: str,
    description: str,
    columns: Mapping[str, str],
    labels: Mapping[str, str],
    overrides: Mapping[str, Mapping[str, object]],
    sort: Sequence[tuple[str, bool]] = (),
    hide: Sequence[str] = (),
    order: Sequence[str] = (),
    height: int = 10,
) -> Any:
    """A table with a row per set of labels.

    Value columns, by title, are PromQL joined on the labels; `labels` are the titles of their columns, and `overrides`
    properties by column title. Rows are sorted by titles, and by whether the largest come first; fields of `hide` are
    left out. The first value column stands left of the labels, unless `order` says otherwise.
    """
    queries = tuple(Query(expression) for expression in columns.values())
    values = {value_field(index) if len(columns) > 1 else "Value": name for index, name in enumerate(columns)}
    values = {field: name for field, name in values.items() if field not in hide}
    titles = {**values, **labels}
    places = [*list(values)[:1], *labels, *list(values)[1:]]
    if order:
        places.sort(key=lambda name: order.index(titles[name]))
    shown = {
        "excludeByName": dict.fromkeys(("Time", *hide), True),
        "indexByName": {name: index for index, name in enumerate(places)},
        "renameByName": titles,
    }
    panel = common_panel(table.Panel(), id, title, description, queries, instant=True, format=True)
    panel = (
        panel.height(height)
        .span(24)
        .with_transformation(models.DataTransformerConfig("merge", options={}))
        .with_transformation(models.DataTransformerConfig("organize", options=shown))
        .filterable(True)
    )
    for name, values_of in overrides.items():
        panel = panel.override_by_name(name, properties(values_of))
    return panel.sort_by([common.TableSortByFieldState().display_name(title).desc(down) for title, down in sort])


def value_field(index: int) -> str:
    """Grafana's name of the values of a table's query, by its place from 0, where it has several queries."""
    return f"Value #{_ref(index)}"


def timeline_panel(
    id: int,
    title: str,
    description: str,
    queries: Iterable[Query],
    mappings: Any,
    base: str,
    height: int = 9,
    span: int = 24,
) -> Any:
    """A band per series that changes colour with its state, and says it in words wherever there is room."""
    return (
        common_panel(statetimeline.Panel(), id, title, description, queries)
        .height(height)
        .span(span)
        .mappings([mappings])
        .thresholds(thresholds(base))
        .color_scheme(dashboard.FieldColor().mode(models.FieldColorModeId.THRESHOLDS))
        .merge_values(True)
        .show_value(common_models.VisibilityMode.AUTO)
        .row_height(0.85)
        .per_page(20)
        .fill_opacity(80)
        .line_width(0)
        .legend(_legend())
    )


def verdict_panel(
    id: int, title: str, description: str, queries: Iterable[Query], height: int = 9, span: int = 24
) -> Any:
    """A timeline of verdicts, by the codes of `kc.verdict`."""
    return timeline_panel(id, title, description, queries, status_mapping(), STATUS_COLOURS[Status.PASS], height, span)


def graph_panel(
    id: int, title: str, description: str, queries: Iterable[Query], unit: str, height: int = 8, span: int = 8
) -> Any:
    """Lines over time. A zero axis is not forced: drift is read against its limit."""
    return (
        common_panel(timeseries.Panel(), id, title, description, queries)
        .height(height)
        .span(span)
        .unit(unit)
        .line_width(1)
        .fill_opacity(0)
        .show_points(common_models.VisibilityMode.NEVER)
        .span_nulls(False)
        .color_scheme(dashboard.FieldColor().mode(models.FieldColorModeId.PALETTE_CLASSIC))
        .thresholds(thresholds("green"))
        .tooltip(
            common.VizTooltipOptions()
            .mode(common_models.TooltipDisplayMode.MULTI)
            .sort(common_models.SortOrder.DESCENDING)
        )
        .legend(_legend())
    )


def xy_panel(id: int, title: str, description: str, x: Query, y: Query, unit: str) -> Any:
    """Lines over what `x` is at the same time, in the place of time. `x` is one series, and has a legend."""
    over = xychart.XychartXYSeriesConfigX().matcher(xychart.MatcherConfig().id("byName").options(x.legend))
    return (
        common_panel(xychart.Panel(), id, title, description, (x, y))
        .with_transformation(models.DataTransformerConfig("joinByField", options={"byField": "Time", "mode": "outer"}))
        .height(8)
        .span(24)
        .unit(unit)
        .mapping(xychart_models.SeriesMapping.AUTO)
        .series([xychart.XYSeriesConfig().x(over)])
        .show(xychart_models.XYShowMode.POINTS_AND_LINES)
        .thresholds(thresholds("green"))
        .override_by_name(x.legend, properties({"unit": "none", "custom.axisLabel": x.legend}))
        .tooltip(
            common.VizTooltipOptions().mode(common_models.TooltipDisplayMode.SINGLE).sort(common_models.SortOrder.NONE)
        )
        .legend(_legend())
    )


def _legend() -> Any:
    legend = common.VizLegendOptions().display_mode(common_models.LegendDisplayMode.LIST)
    return legend.placement(common_models.LegendPlacement.BOTTOM).show_legend(True)


def limit_line(panel: Any, pattern: str = "/ limit$/") -> Any:
    """A graph whose series of these names are drawn as limits: dashed and red."""
    red = {"color": {"mode": "fixed", "fixedColor": "red"}}
    return panel.override_by_regexp(pattern, properties({**red, "custom.lineStyle": {"fill": "dash", "dash": [8, 6]}}))


def in_unit(panel: Any, units: str) -> Any:
    """A panel whose numbers are in the unit that a query finds, under the label `kc_clause_unit`."""
    target = prometheus.Dataquery().ref_id("Unit").expr(units).instant().format("table")
    mapped = {"fieldName": label("kc.clause.unit"), "handlerKey": "unit"}
    found = {"configRefId": "Unit", "mappings": [mapped]}
    return panel.with_target(target).with_transformation(models.DataTransformerConfig("configFromData", options=found))


def common_panel(
    panel: Any,
    id: int,
    title: str,
    description: str,
    queries: Iterable[Query],
    *,
    instant: bool = False,
    format: bool = False,
) -> Any:
    """Set the properties that panels of every kind share: identity, words, data source and queries."""
    panel = panel.id(id).title(title).description(description).datasource(reference())
    for index, query in enumerate(queries):
        target = prometheus.Dataquery().ref_id(_ref(index)).expr(query.expression)
        target = target.instant() if instant else target.range()
        if format:
            target = target.format("table")
        if query.legend:
            target = target.legend_format(query.legend)
        if query.exemplar:
            target = target.exemplar(True)
        if query.step:
            target = target.interval(query.step)
        panel = panel.with_target(target)
    return panel


def _ref(index: int) -> str:
    return chr(ord("A") + index)
