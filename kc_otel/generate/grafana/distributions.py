"""What was recorded of a slice: its distribution over time, and the tokens behind it. Part of the Slice dashboard."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from kc_otel.generate.grafana import drift_queries
from kc_otel.generate.grafana.boards import STEP
from kc_otel.generate.grafana.panels import Query, common_panel, graph_panel, property_of, reference
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

__all__ = ["distribution_panels", "example_panels"]

_TRACES: Final = "${traces}"
_FAN: Final = (0.001, 0.01, 0.25, 0.5, 0.75, 0.99, 0.999)
_SOURCE: Final = (
    "From the drift histograms that the recorders send by way of the Collector; Prometheus and Mimir keep them as "
    "native histograms."
)


def distribution_panels() -> Iterator[Any]:
    """Heatmaps and quantiles of the picked quantity and of the log ratio, from the recorders' histograms."""
    chosen = drift_queries.chosen_histogram()
    yield _heatmap_panel(
        20,
        "Distribution of $quantity",
        "How many observations fell into each bucket, over time: a shift moves the bright band, a new failure mode "
        f"draws a second one, outliers show at the edge. Dots are single tokens; click one for its trace. Grafana "
        f"draws the buckets on a logarithmic axis: of a signed quantity look at the quantiles beside it. {_SOURCE}",
        Query(chosen, exemplar=True, step=STEP),
    )
    ranks = ((0.5, "median"), (0.99, "99th percentile"), (0.999, "99.9th percentile"))
    yield (
        graph_panel(
            21,
            "$quantity: mean and quantiles",
            f"Of everything recorded within the interval, without confidence bounds. {_SOURCE}",
            (
                Query(f"histogram_avg({chosen})", "mean", exemplar=True, step=STEP),
                *(Query(drift_queries.quantile(rank, chosen), name, step=STEP) for rank, name in ranks),
            ),
            "short",
        )
        .height(9)
        .span(12)
    )
    signed = drift_queries.histogram("log_ratio", ())
    yield (
        graph_panel(
            22,
            "Signed log ratio: where the tokens lie",
            "Quantiles of l = log P(y) - log Q(y) of the sampled tokens, nats. A fan that is symmetric around zero is "
            "noise, a lopsided one is bias; a far lowest line is a kind of token that the inference kernel samples far "
            f"too often. {_SOURCE}",
            [Query(drift_queries.quantile(rank, signed), f"p{rank * 100:g}", step=STEP) for rank in _FAN],
            "suffix: nat",
        )
        .height(9)
        .span(12)
    )
    yield _heatmap_panel(
        23,
        "Absolute log ratio, with the worst tokens",
        "|l| of the sampled tokens, nats. Each dot is the worst token of a slice since the export before; click it to "
        f"open the span of its batch. {_SOURCE}",
        Query(drift_queries.histogram("abs_log_ratio", ()), exemplar=True, step=STEP),
    )


def example_panels() -> Iterator[Any]:
    """The spans of the worst batches, which lead to requests and training steps."""
    shown = ("abs_log_ratio", "sequence", "position", "token_id")
    fields = ", ".join((*(f"span.kc.compare.worst.{name}" for name in shown), "span.kc.compare.tokens"))
    yield _traces_panel(
        30,
        "Worst examples",
        "Measured batches that touched the slice, the one with the largest |l| first, with the token's position and "
        "id. Open a trace for the request or training step that it belongs to. From the spans that the recorders send "
        "to Tempo by way of the Collector.",
        '{ name = "kc.compare" && span.kc.contract = "$contract" && span.kc.compare.slices = "$slice" } '
        f"| select({fields})",
        "kc.compare.worst.abs_log_ratio",
    )


def _heatmap_panel(id: int, title: str, description: str, query: Query) -> Any:
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


def _traces_panel(id: int, title: str, description: str, query: str, sort: str) -> Any:
    """A table of the spans that a TraceQL query finds, the largest `sort` first; ids in it open the trace."""
    target = (
        tempo.Dataquery()
        .ref_id("A")
        .query_type("traceql")
        .query(query)
        .filters([])
        .limit(100)
        .table_type(tempo_models.SearchTableType.SPANS)
        .datasource(reference("tempo", _TRACES))
    )
    return (
        table.Panel()
        .id(id)
        .title(title)
        .description(description)
        .datasource(reference("tempo", _TRACES))
        .with_target(target)
        .height(9)
        .span(24)
        .filterable(True)
        .sort_by([common.TableSortByFieldState().display_name(sort).desc(True)])
        .with_override(models.MatcherConfig("byRegexp", "/trace(ID|Id)|Trace ID/"), [property_of("custom.width", 260)])
    )
