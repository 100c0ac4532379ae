"""Panels as the dashboards use them: one function per kind, with the choices that all of its panels share.

Panels, queries and thresholds are builders of Grafana's SDK: a board sets on them what is peculiar to one panel.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from kc_otel.contract.registry.own_metrics import label
from kc_otel.generate.grafana import sdk
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


def target(expression: str, legend: str = "", *, exemplar: bool = False, step: str = "") -> Any:
    """One query of a panel; `step` is the smallest where data comes seldom, `exemplar` shows observations."""
    query = sdk.prometheus.Dataquery().expr(expression)
    if legend:
        query.legend_format(legend)
    if exemplar:
        query.exemplar(True)
    if step:
        query.interval(step)
    return query


def mapping(options: Mapping[str, tuple[str, str]]) -> Any:
    """A value mapping from value to text and colour."""
    return sdk.models.ValueMap(
        {
            value: sdk.models.ValueMappingResult(text=text, color=colour, index=index)
            for index, (value, (text, colour)) in enumerate(options.items())
        }
    )


def status_mapping() -> Any:
    """Codes of the metric `kc.verdict` to shapes, names and colours."""
    return mapping(
        {str(status.code): (f"{STATUS_SHAPES[status]} {status}", STATUS_COLOURS[status]) for status in Status}
    )


def _unknown() -> Any:
    """A mapping of no value to a word on grey: Grafana would show it on the colour of the lowest threshold."""
    shown = sdk.models.ValueMappingResult(text="unknown", color="#808080")
    options = sdk.models.DashboardSpecialValueMapOptions(match=sdk.models.SpecialValueMatch.NULL_AND_NAN, result=shown)
    return sdk.models.SpecialValueMap(options)


def thresholds(base: str, *steps: tuple[float, str]) -> Any:
    """Colours from `base` upwards: each step is the value at which its colour begins."""
    colours = [sdk.models.Threshold(value, colour) for value, colour in ((None, base), *steps)]
    return sdk.dashboard.ThresholdsConfig().mode(sdk.models.ThresholdsMode.ABSOLUTE).steps(colours)


def properties(values: Mapping[str, object]) -> list[Any]:
    """The properties of a field override."""
    return [sdk.models.DynamicConfigValue(name, value) for name, value in values.items()]


MARGIN_COLOURS: Final = thresholds("yellow", (0.2, "green"))
"""No red: below zero the limit is broken, or only not shown to be kept; the verdict beside it says which."""
MARGIN: Final[Mapping[str, object]] = {
    "unit": "percentunit",
    "decimals": 1,
    "thresholds": MARGIN_COLOURS.build(),
    "custom.cellOptions": {"type": "color-text"},
}
"""Column of a table with margins as shares of limits."""


def legend(*attributes: str) -> str:
    """Template of a series' name, or of a mark's text: the values of these attributes."""
    return " · ".join(f"{{{{{label(name)}}}}}" for name in attributes)


def link(title: str, url: str) -> Any:
    """A link of a board or of a panel's values."""
    return sdk.dashboard.DashboardLink(title).url(url)


def reference(kind: str = "prometheus", uid: str = DATASOURCE) -> Any:
    """A data source that a variable picks."""
    return sdk.common_models.DataSourceRef(kind, uid)


def count(id: int, title: str, about: str, query: str, colour: str, base: str = "green", span: int = 3) -> Any:
    """A count: `base` is the colour of zero, `colour` that of anything above it."""
    return state(id, title, about, query, span=span, colours=thresholds(base, (1e-9, colour))).decimals(0)


def state(
    id: int,
    title: str,
    about: str,
    query: str,
    *,
    legend: str = "",
    span: int = 3,
    unit: str = "none",
    colours: Any = None,
    coloured: bool = True,
    text: str = "value",
    mappings: Sequence[Any] = (),
) -> Any:
    """One value, large, on the colour of its threshold or mapping; where several series match, the largest."""
    models = sdk.common_models
    return (
        panel(sdk.stat.Panel(), id, title, about, [target(query, legend)], 4, span, instant=True)
        .unit(unit)
        .thresholds(colours or thresholds("text"))
        .color_scheme(_colours("thresholds"))
        .color_mode(models.BigValueColorMode.BACKGROUND if coloured else models.BigValueColorMode.NONE)
        .graph_mode(models.BigValueGraphMode.NONE)
        .text_mode(models.BigValueTextMode(text))
        .reduce_options(sdk.common.ReduceDataOptions().calcs(["lastNotNull"]))
        .mappings([*mappings, _unknown()])
        .no_value("unknown")
    )


def table(
    id: int,
    title: str,
    about: str,
    columns: Mapping[str, str],
    labels: Mapping[str, str],
    overrides: Mapping[str, Mapping[str, object]],
    *,
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
    asked = [target(expression).format("table") for expression in columns.values()]
    made = panel(sdk.table.Panel(), id, title, about, asked, height, 24, instant=True).filterable(True)
    for kind, options in (("merge", {}), ("organize", shown)):
        made.with_transformation(sdk.models.DataTransformerConfig(kind, options=options))
    for name, column in overrides.items():
        made.override_by_name(name, properties(column))
    return made.sort_by([sorting(title, down=down) for title, down in sort])


def sorting(title: str, *, down: bool) -> Any:
    """Sort a table by a column, the largest first where `down`."""
    return sdk.common.TableSortByFieldState().display_name(title).desc(down)


def value_field(index: int) -> str:
    """Grafana's name of the values of a table's query, by its place from 0, where it has several queries."""
    return f"Value #{_ref(index)}"


def timeline(
    id: int, title: str, about: str, targets: Iterable[Any], mappings: Any, base: str, height: int = 9, span: int = 24
) -> Any:
    """A band per series that changes colour with its state, and says it in words wherever there is room."""
    return (
        panel(sdk.statetimeline.Panel(), id, title, about, targets, height, span)
        .mappings([mappings])
        .thresholds(thresholds(base))
        .color_scheme(_colours("thresholds"))
        .merge_values(True)
        .show_value(sdk.common_models.VisibilityMode.AUTO)
        .row_height(0.85)
        .per_page(20)
        .fill_opacity(80)
        .line_width(0)
        .legend(_legend())
    )


def verdicts(id: int, title: str, about: str, targets: Iterable[Any], height: int = 9, span: int = 24) -> Any:
    """A timeline of verdicts, by the codes of `kc.verdict`."""
    return timeline(id, title, about, targets, status_mapping(), STATUS_COLOURS[Status.PASS], height, span)


def graph(id: int, title: str, about: str, targets: Iterable[Any], unit: str, height: int = 8, span: int = 8) -> Any:
    """Lines over time. A zero axis is not forced: drift is read against its limit."""
    return (
        panel(sdk.timeseries.Panel(), id, title, about, targets, height, span)
        .unit(unit)
        .line_width(1)
        .fill_opacity(0)
        .show_points(sdk.common_models.VisibilityMode.NEVER)
        .span_nulls(False)
        .color_scheme(_colours("palette-classic"))
        .thresholds(thresholds("green"))
        .tooltip(_tooltip("multi", "desc"))
        .legend(_legend())
    )


def graph_over(id: int, title: str, about: str, x: str, over: str, y: Any, unit: str) -> Any:
    """Lines over what the expression `over`, a single series, is at the same time; `x` is its title."""
    axis = sdk.xychart.XychartXYSeriesConfigX().matcher(sdk.xychart.MatcherConfig().id("byName").options(x))
    joined = {"byField": "Time", "mode": "outer"}
    return (
        panel(sdk.xychart.Panel(), id, title, about, (target(over, x), y), 8, 24)
        .with_transformation(sdk.models.DataTransformerConfig("joinByField", options=joined))
        .unit(unit)
        .mapping(sdk.xychart_models.SeriesMapping.AUTO)
        .series([sdk.xychart.XYSeriesConfig().x(axis)])
        .show(sdk.xychart_models.XYShowMode.POINTS_AND_LINES)
        .thresholds(thresholds("green"))
        .override_by_name(x, properties({"unit": "none", "custom.axisLabel": x}))
        .tooltip(_tooltip("single", "none"))
        .legend(_legend())
    )


def _colours(mode: str) -> Any:
    return sdk.dashboard.FieldColor().mode(sdk.models.FieldColorModeId(mode))


def _tooltip(mode: str, order: str) -> Any:
    options = sdk.common.VizTooltipOptions().mode(sdk.common_models.TooltipDisplayMode(mode))
    return options.sort(sdk.common_models.SortOrder(order))


def _legend() -> Any:
    legend = sdk.common.VizLegendOptions().display_mode(sdk.common_models.LegendDisplayMode.LIST)
    return legend.placement(sdk.common_models.LegendPlacement.BOTTOM).show_legend(True)


def with_limit(graph: Any, pattern: str = "/ limit$/") -> Any:
    """A graph whose series of these names are drawn as limits: dashed and red."""
    red = {"color": {"mode": "fixed", "fixedColor": "red"}}
    return graph.override_by_regexp(pattern, properties({**red, "custom.lineStyle": {"fill": "dash", "dash": [8, 6]}}))


def panel(
    builder: Any,
    id: int,
    title: str,
    about: str,
    targets: Iterable[Any],
    height: int,
    span: int,
    *,
    instant: bool = False,
) -> Any:
    """Set what panels of every kind have on their builder; the board places them."""
    builder.id(id).title(title).description(about).datasource(reference()).height(height).span(span)
    for index, query in enumerate(targets):
        query.ref_id(_ref(index))
        builder.with_target(query.instant() if instant else query.range())
    return builder


def row(id: int, title: str, *panels: Any) -> Any:
    """A heading; panels of its own are folded away."""
    made = sdk.dashboard.Row(title).id(id)
    for shown in panels:
        made.with_panel(shown)
    return made


def _ref(index: int) -> str:
    return chr(ord("A") + index)
