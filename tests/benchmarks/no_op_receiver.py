"""A receiver that reads requests and does nothing with them: what the transport alone costs. `bench_ingest` starts it.

uvicorn and grpcio on the loop of `kc-otel serve`.
"""

from __future__ import annotations

from typing import Any

import grpc
import uvicorn

from kc_otel.judge.otlp.signals import METRICS


async def app(scope: Any, receive: Any, send: Any) -> None:
    more = scope["type"] == "http"
    while more:
        more = (await receive()).get("more_body", False)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


async def export(_messages: Any, context: Any) -> bytes:
    await context.read()
    return b""


async def serve(http_port: int, grpc_port: int) -> None:
    server = grpc.aio.server()
    handler = grpc.stream_unary_rpc_method_handler(export)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(METRICS.service, {"Export": handler}),))
    server.add_insecure_port(f"127.0.0.1:{grpc_port}")
    await server.start()
    config = uvicorn.Config(app, port=http_port, log_level="warning", access_log=False, lifespan="off")
    await uvicorn.Server(config).serve()
