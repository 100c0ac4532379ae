"""Panels on what was recorded itself: distributions as heatmaps, and the spans of the worst batches."""

from __future__ import annotations

from typing import Any, Final

from kc_otel.generate.grafana.panels import Query, common_panel, property_of, reference
from kc_otel.generate.grafana.sdk import (
    common,
    common_models,
    heatmap,
    heatmap_models,
    models,
    table,
    tempo,
    tempo_models,
)

__all__ = ["TRACES", "heatmap_panel", "traces_panel"]

TRACES: Final = "${traces}"


def heatmap_panel(id: int, title: str, description: str, query: Query) -> Any:
    """A native histogram over time: each column is an interval, each row a bucket, the colour how many fell in."""
    panel = common_panel(heatmap.Panel(), id, title, description, (query,))
    return (
        panel.height(9)
        .span(12)
        .calculate(False)
        .color(
            heatmap.HeatmapColorOptions()
            .mode(heatmap_models.HeatmapColorMode.SCHEME)
            .scheme("Turbo")
            .scale(heatmap_models.HeatmapColorScale.EXPONENTIAL)
            .exponent(0.5)
            .fill("dark-orange")
            .steps(64)
        )
        .y_axis(heatmap.YAxisConfig().unit("short").axis_placement(common_models.AxisPlacement.LEFT))
        .cell_gap(0)
        .show_value(common_models.VisibilityMode.NEVER)
        .exemplars_color("rgba(255,0,255,0.9)")
        .tooltip(heatmap.HeatmapTooltip().mode(common_models.TooltipDisplayMode.SINGLE).show_color_scale(True))
        .show_legend()
    )


def traces_panel(id: int, title: str, description: str, query: str, sort: str) -> Any:
    """A table of the spans that a TraceQL query finds, the largest `sort` first; ids in it open the trace."""
    target = (
        tempo.Dataquery()
        .ref_id("A")
        .query_type("traceql")
        .query(query)
        .filters([])
        .limit(100)
        .table_type(tempo_models.SearchTableType.SPANS)
        .datasource(reference("tempo", TRACES))
    )
    return (
        table.Panel()
        .id(id)
        .title(title)
        .description(description)
        .datasource(reference("tempo", TRACES))
        .with_target(target)
        .height(9)
        .span(24)
        .filterable(True)
        .sort_by([common.TableSortByFieldState().display_name(sort).desc(True)])
        .with_override(models.MatcherConfig("byRegexp", "/trace(ID|Id)|Trace ID/"), [property_of("custom.width", 260)])
    )
