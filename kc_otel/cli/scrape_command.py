"""`kc-otel scrape`: an engine's own latency histograms, sent on to the evaluator."""

from __future__ import annotations

from typing import Annotated

import typer

from kc_otel.cli.terminal import stopped_by_signals, unusable
from kc_otel.client.engine_latency import EngineLatency
from kc_otel.record.telemetry.environment import export_timeout, metric_exporters, process_resource
from kc_otel.record.telemetry.export import ExportLoop


def scrape(
    url: Annotated[str, typer.Argument(metavar="URL", help="vLLM's metrics, such as http://127.0.0.1:8000/metrics.")],
    interval: Annotated[float, typer.Option(help="Seconds between scrapes.", min=1.0)] = 10.0,
) -> None:
    """Forward vLLM's own latency histograms as gen_ai.server.*, until Ctrl-C.

    The evaluator judges clauses on latency by these histograms. They are sent to OTEL_EXPORTER_OTLP_ENDPOINT; vLLM's
    other metrics are not.

    Examples:
      kc-otel scrape http://127.0.0.1:8000/metrics
    """
    with unusable(ImportError):
        source, exporters = EngineLatency(url), metric_exporters()
    loop = ExportLoop(
        source, exporters=lambda: exporters, resource=process_resource(), interval=interval, timeout=export_timeout()
    )
    with stopped_by_signals() as stop:
        loop.request()
        stop.wait()
    loop.shutdown(export_timeout())
