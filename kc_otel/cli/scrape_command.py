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
