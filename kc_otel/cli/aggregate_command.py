"""`kc-otel aggregate`: the recorders of a host as one stream."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kc_otel.cli.terminal import refuse, seconds
from kc_otel.serve.config import LogFormat

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("aggregate")(aggregate)


def aggregate(
    to: Annotated[
        str, typer.Option(help="OTLP over HTTP of the evaluator: http://judge:4318.", metavar="URL", show_default=False)
    ],
    state: Annotated[Path, typer.Option(help="SQLite file of what was taken and has to be sent.")] = Path(
        "kc-otel-aggregate.sqlite"
    ),
    interval: Annotated[str, typer.Option(help="Time between two messages to the evaluator.")] = "10s",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    grpc_port: Annotated[int, typer.Option(help="OTLP over gRPC; 0: any free port.")] = 4317,
    http_port: Annotated[int, typer.Option(help="OTLP over HTTP; 0: any free port.")] = 4318,
    metrics_port: Annotated[int, typer.Option(help="/metrics and /healthz; 0: any free port.")] = 4321,
    log_format: Annotated[
        LogFormat, typer.Option(help="Lines of the log as sentences, or as JSON objects.")
    ] = LogFormat.TEXT,
    allow_unauthenticated: Annotated[
        bool,
        typer.Option("--allow-unauthenticated", help="Listen where other machines reach it, and let all of them in."),
    ] = False,
) -> None:
    """Add up what the processes of this machine record, and send it to the evaluator as one stream.

    Headers for the evaluator, such as a token, are read from OTEL_EXPORTER_OTLP_HEADERS. What it says of itself is at
    /metrics, and goes by OTLP where OTEL_EXPORTER_OTLP_ENDPOINT says.
    """
    from kc_otel.serve.aggregator.aggregate import (  # noqa: PLC0415 - a quick --help
        AggregatorConfig,
        AggregatorError,
        run_aggregator,
    )

    try:
        run_aggregator(
            AggregatorConfig(
                to=to,
                state=state,
                host=host,
                grpc_port=grpc_port,
                http_port=http_port,
                metrics_port=metrics_port,
                interval=seconds("--interval", interval),
                allow_unauthenticated=allow_unauthenticated,
                log_format=log_format,
            )
        )
    except AggregatorError as error:
        refuse(error)
