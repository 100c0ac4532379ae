"""Panels as the overview uses them: one function per kind, with the choices that all of its panels share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kc_otel.evaluator.verdict import Status
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
)

__all__ = [
    "DATASOURCE",
    "STATUS_COLOURS",
    "Query",
    "grafana_unit",
    "graph_panel",
    "mapping",
    "property_of",
    "stat_panel",
    "status_mapping",
    "table_panel",
    "thresholds",
    "timeline_panel",
]

DATASOURCE: Final = "${datasource}"
STATUS_COLOURS: Final = {
    Status.PASS: "green",
    Status.INCONCLUSIVE: "yellow",
    Status.NO_DATA: "orange",
    Status.FAIL: "red",
}
_UNITS: Final = {"1": "none", "s": "s", "By": "bytes", "%": "percent"}


@dataclass(frozen=True, slots=True)
class Query:
    """One query of a panel.

    Attributes:
        expression: PromQL.
        legend: Name of its series; labels in double braces.
    """

    expression: str
    legend: str = ""


def grafana_unit(unit: str) -> str:
    """Grafana's unit for a UCUM unit; what Grafana does not know is written behind the number."""
    return _UNITS.get(unit) or f"suffix: {unit.strip('{}')}"


def mapping(options: Mapping[str, tuple[str, str]]) -> Any:
    """A value mapping from value to text and colour."""
    return models.ValueMap(
        {
            value: models.ValueMappingResult(text=text, color=colour, index=index)
            for index, (value, (text, colour)) in enumerate(options.items())
        }
    )


def status_mapping() -> Any:
    """Codes of the metric `kc.verdict` to names and colours."""
    return mapping({str(status.code): (str(status), STATUS_COLOURS[status]) for status in Status})


def thresholds(base: str, *steps: tuple[float, str]) -> Any:
    """Colours from `base` upwards: each step is the value at which its colour begins."""
    return (
        dashboard.ThresholdsConfig()
        .mode(models.ThresholdsMode.ABSOLUTE)
        .steps([models.Threshold(None, base), *(models.Threshold(value, colour) for value, colour in steps)])
    )


def property_of(name: str, value: object) -> Any:
    """One property of a field override."""
    return models.DynamicConfigValue(name, value)


def stat_panel(id: int, title: str, description: str, query: str, colour: str, base: str = "green") -> Any:
    """A count: `base` is the colour of zero, `colour` that of anything above it."""
    panel = _common(stat.Panel(), id, title, description, (Query(query),), instant=True)
    return (
        panel.height(4)
        .span(4)
        .unit("none")
        .decimals(0)
        .thresholds(thresholds(base, (1, colour)))
        .color_scheme(dashboard.FieldColor().mode(models.FieldColorModeId.THRESHOLDS))
        .color_mode(common_models.BigValueColorMode.BACKGROUND)
        .graph_mode(common_models.BigValueGraphMode.NONE)
        .text_mode(common_models.BigValueTextMode.VALUE)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    )


def table_panel(
    id: int,
    title: str,
    description: str,
    columns: Mapping[str, str],
    labels: Mapping[str, str],
    overrides: Mapping[str, Sequence[Any]],
    sort: str = "",
    hide: Sequence[str] = (),
) -> Any:
    """A table with a row per set of labels.

    Args:
        id: Panel id.
        title: Panel title.
        description: Panel description.
        columns: Title of a value column to its PromQL; they are joined on the labels.
        labels: Label to the title of its column.
        overrides: Properties by column title.
        sort: Title of the column to sort by, largest first.
        hide: Fields that are left out, beside the time.
    """
    queries = tuple(Query(expression) for expression in columns.values())
    values = {f"Value #{_ref(index)}" if len(columns) > 1 else "Value": name for index, name in enumerate(columns)}
    order = [*list(values)[:1], *labels, *list(values)[1:]]
    shown = {
        "excludeByName": dict.fromkeys(("Time", *hide), True),
        "indexByName": {name: index for index, name in enumerate(order)},
        "renameByName": {**values, **labels},
    }
    panel = _common(table.Panel(), id, title, description, queries, instant=True, format=True)
    panel = (
        panel.height(10)
        .span(24)
        .with_transformation(models.DataTransformerConfig("merge", options={}))
        .with_transformation(models.DataTransformerConfig("organize", options=shown))
        .filterable(True)
    )
    for name, properties in overrides.items():
        panel = panel.override_by_name(name, list(properties))
    return panel.sort_by([common.TableSortByFieldState().display_name(sort).desc(True)]) if sort else panel


def timeline_panel(id: int, title: str, description: str, query: Query, mappings: Any, base: str) -> Any:
    """A band per series that changes colour with its state."""
    return (
        _common(statetimeline.Panel(), id, title, description, (query,))
        .height(9)
        .span(24)
        .mappings([mappings])
        .thresholds(thresholds(base))
        .color_scheme(dashboard.FieldColor().mode(models.FieldColorModeId.THRESHOLDS))
        .merge_values(True)
        .show_value(common_models.VisibilityMode.NEVER)
        .row_height(0.85)
        .per_page(20)
        .fill_opacity(80)
        .line_width(0)
        .legend(
            common.VizLegendOptions()
            .display_mode(common_models.LegendDisplayMode.LIST)
            .placement(common_models.LegendPlacement.BOTTOM)
            .show_legend(False)
        )
    )


def graph_panel(id: int, title: str, description: str, queries: Iterable[Query], unit: str) -> Any:
    """Lines over time. A zero axis is not forced: drift is read against its limit."""
    return (
        _common(timeseries.Panel(), id, title, description, queries)
        .height(8)
        .span(8)
        .unit(unit)
        .line_width(1)
        .fill_opacity(0)
        .show_points(common_models.VisibilityMode.NEVER)
        .span_nulls(False)
        .thresholds(thresholds("green"))
        .tooltip(
            common.VizTooltipOptions()
            .mode(common_models.TooltipDisplayMode.MULTI)
            .sort(common_models.SortOrder.DESCENDING)
        )
        .legend(
            common.VizLegendOptions()
            .display_mode(common_models.LegendDisplayMode.LIST)
            .placement(common_models.LegendPlacement.BOTTOM)
            .show_legend(True)
            .calcs([])
        )
    )


def _common(
    panel: Any,
    id: int,
    title: str,
    description: str,
    queries: Iterable[Query],
    *,
    instant: bool = False,
    format: bool = False,
) -> Any:
    panel = panel.id(id).title(title).description(description)
    panel = panel.datasource(common_models.DataSourceRef("prometheus", DATASOURCE))
    for index, query in enumerate(queries):
        target = prometheus.Dataquery().ref_id(_ref(index)).expr(query.expression)
        target = target.instant() if instant else target.range()
        if format:
            target = target.format("table")
        if query.legend:
            target = target.legend_format(query.legend)
        panel = panel.with_target(target)
    return panel


def _ref(index: int) -> str:
    return chr(ord("A") + index)
