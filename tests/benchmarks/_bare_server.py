"""A receiver that throws away what comes: the cost of the libraries alone. `_bare_server.py http|grpc PORT`."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import grpc
import uvicorn


async def discard(scope: Any, receive: Any, send: Any) -> None:
    """Read a request's body whole, and answer an empty success."""
    while scope["method"] == "POST" and (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body"})


class Discard(grpc.GenericRpcHandler):
    """Takes any call's message as bytes, and answers an empty success."""

    def service(self, _: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        return grpc.unary_unary_rpc_method_handler(self._answer)

    async def _answer(self, _: bytes, __: Any) -> bytes:
        return b""


async def serve_grpc(address: str) -> None:
    server = grpc.aio.server(handlers=[Discard()])
    server.add_insecure_port(address)
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    transport, port = sys.argv[1], int(sys.argv[2])
    if transport == "http":
        uvicorn.run(discard, host="127.0.0.1", port=port, lifespan="off", access_log=False, timeout_keep_alive=60)
    else:
        asyncio.run(serve_grpc(f"127.0.0.1:{port}"))
