"""Charts as SVG text, the same for the page and for a report: a cell's past, what was observed, an interval.

A drawing has no width of its own: lines stretch with the place they are put in while texts keep their size, so that one
drawing is read on a phone, on a wide screen and on paper. Colours are classes that `charts.css` gives for light and
dark. No library, no randomness: equal data give equal bytes.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from kc_otel.charts.chart import Chart, escaped, unit_word
from kc_otel.charts.depth_chart import draw_depth
from kc_otel.charts.distribution_chart import draw_distribution
from kc_otel.charts.evidence_chart import draw_evidence
from kc_otel.charts.history_chart import draw_history, draw_sparkline
from kc_otel.charts.interval_chart import draw_interval
from kc_otel.charts.markers import Marker, markers_of
from kc_otel.charts.matrix_chart import draw_matrix
from kc_otel.charts.tradeoff_chart import TradeoffPoint, draw_tradeoff

__all__ = [
    "Chart",
    "Marker",
    "TradeoffPoint",
    "chart_style",
    "draw_depth",
    "draw_distribution",
    "draw_evidence",
    "draw_history",
    "draw_interval",
    "draw_matrix",
    "draw_sparkline",
    "draw_tradeoff",
    "escaped",
    "markers_of",
    "unit_word",
]


@cache
def chart_style() -> str:
    """The style sheet of charts: the palette, light and dark, and what each class of a drawing looks like."""
    return (files(__package__) / "charts.css").read_text(encoding="utf-8")
