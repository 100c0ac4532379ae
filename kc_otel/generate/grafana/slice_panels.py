"""What was recorded of a slice: its distribution over time, and the tokens behind it. Part of the Slice dashboard."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

from kc_otel.contract.model import Contract
from kc_otel.contract.prometheus_names import label
from kc_otel.generate.grafana import raw
from kc_otel.generate.grafana.panels import Query, grafana_unit, graph_panel
from kc_otel.generate.grafana.raw_panels import heatmap_panel, traces_panel

__all__ = ["distribution_panels", "example_panels"]

_FAN: Final = (0.001, 0.01, 0.25, 0.5, 0.75, 0.99, 0.999)
_SOURCE: Final = (
    "From the drift histograms that the recorders send by way of the Collector; Prometheus and Mimir keep them as "
    "native histograms."
)


def distribution_panels(contracts: Iterable[Contract]) -> Iterator[Any]:
    """Heatmaps and quantiles of the picked quantity and of the log ratio, from the recorders' histograms."""
    step = raw.minimum_step(contracts)
    chosen = raw.any_histogram("$quantity", (), f'{label("kc.operator")}=~"$operator"')
    yield heatmap_panel(
        20,
        "Distribution of $quantity",
        "How many observations fell into each bucket, over time: a shift moves the bright band, a new failure mode "
        f"draws a second one, outliers show at the edge. Dots are single tokens; click one for its trace. Grafana "
        f"draws the buckets on a logarithmic axis: of a signed quantity look at the quantiles beside it. {_SOURCE}",
        Query(chosen, exemplar=True, step=step),
    )
    ranks = ((0.5, "median"), (0.99, "99th percentile"), (0.999, "99.9th percentile"))
    yield (
        graph_panel(
            21,
            "$quantity: mean and quantiles",
            f"Of everything recorded within the interval, without confidence bounds. {_SOURCE}",
            (
                Query(f"histogram_avg({chosen})", "mean", exemplar=True, step=step),
                *(Query(raw.quantile(rank, chosen), name, step=step) for rank, name in ranks),
            ),
            "short",
        )
        .height(9)
        .span(12)
    )
    signed = raw.histogram("log_ratio", ())
    yield (
        graph_panel(
            22,
            "Signed log ratio: where the tokens lie",
            "Quantiles of l = log P(y) - log Q(y) of the sampled tokens, nats. A fan that is symmetric around zero is "
            "noise, a lopsided one is bias; a far lowest line is a kind of token that the inference kernel samples far "
            f"too often. {_SOURCE}",
            [Query(raw.quantile(rank, signed), f"p{rank * 100:g}", step=step) for rank in _FAN],
            grafana_unit("{nat}"),
        )
        .height(9)
        .span(12)
    )
    yield heatmap_panel(
        23,
        "Absolute log ratio, with the worst tokens",
        "|l| of the sampled tokens, nats. Each dot is the worst token of a slice since the export before; click it to "
        f"open the span of its batch. {_SOURCE}",
        Query(raw.histogram("abs_log_ratio", ()), exemplar=True, step=step),
    )


def example_panels() -> Iterator[Any]:
    """The spans of the worst batches, which lead to requests and training steps."""
    shown = ("abs_log_ratio", "sequence", "position", "token_id")
    fields = ", ".join((*(f"span.kc.compare.worst.{name}" for name in shown), "span.kc.compare.tokens"))
    yield traces_panel(
        30,
        "Worst examples",
        "Measured batches that touched the slice, the one with the largest |l| first, with the token's position and "
        "id. Open a trace for the request or training step that it belongs to. From the spans that the recorders send "
        "to Tempo by way of the Collector.",
        '{ name = "kc.compare" && span.kc.contract = "$contract" && span.kc.compare.slices = "$slice" } '
        f"| select({fields})",
        "kc.compare.worst.abs_log_ratio",
    )
