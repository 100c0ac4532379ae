"""`kc-otel scrape`: an engine's own latency histograms, sent on to the evaluator."""

from __future__ import annotations

import signal
import threading
from typing import Annotated

import typer

from kc_otel.cli.terminal import refuse
from kc_otel.client.engine_latency import EngineLatency
from kc_otel.record.telemetry.environment import export_timeout, metric_exporters, process_resource
from kc_otel.record.telemetry.export import ExportLoop

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("scrape")(scrape)


def scrape(
    url: Annotated[str, typer.Argument(help="vLLM's metrics, such as http://127.0.0.1:8000/metrics.")],
    interval: Annotated[float, typer.Option(help="Seconds between two looks.", min=1.0)] = 10.0,
) -> None:
    """Send vLLM's own latency histograms on as gen_ai.server.*, for clauses on latency, until Ctrl-C.

    Where to is what OTEL_EXPORTER_OTLP_ENDPOINT says. Nothing else of the page is sent.
    """
    try:
        source = EngineLatency(url)
        exporters = metric_exporters()
    except (ValueError, ImportError) as error:
        refuse(error)
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    loop = ExportLoop(
        source, exporters=lambda: exporters, resource=process_resource(), interval=interval, timeout=export_timeout()
    )
    loop.request()
    stop.wait()
    loop.shutdown(export_timeout())
