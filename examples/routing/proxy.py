"""The proxy: asks the router on each request which engine serves it, and passes the request on."""

from __future__ import annotations

import socket
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kc_otel.client.router import Router


class Proxy:
    """`POST /v1/completions`, before an engine for each kernel.

    Args:
        router: Decides.
        contract: metadata.name.
        engines: Base URL of the engine that is `train-kernel`, and of the one that is `inference-kernel`.

    Attributes:
        served: Requests by (slice, engine).
    """

    def __init__(self, router: Router, contract: str, engines: Mapping[str, str]) -> None:
        self.served: Counter[tuple[str, str]] = Counter()
        self._router, self._contract, self._engines = router, contract, engines
        self._client = httpx.AsyncClient(timeout=120.0, trust_env=False)
        self.app = Starlette(routes=[Route("/v1/completions", self.complete, methods=["POST"])], lifespan=self._life)

    async def complete(self, request: Request) -> Response:
        """What the request is about is in its body; the user's name keeps their requests on one side of a canary."""
        body = await request.json()
        attributes = body.get("vllm_xargs", {})
        kernel = self._router.choose(self._contract, attributes, key=request.headers.get("x-user"))
        try:
            answer = await self._client.post(f"{self._engines[kernel]}/v1/completions", json=body)
        except httpx.TransportError as error:
            return JSONResponse({"error": f"{kernel} does not answer: {error}"}, status_code=502)
        self.served[attributes.get("task", "all"), kernel] += 1
        headers = {"content-type": answer.headers["content-type"], "x-served-by": kernel}
        return Response(answer.content, answer.status_code, headers=headers)

    @asynccontextmanager
    async def _life(self, _: Starlette) -> AsyncIterator[None]:
        yield
        await self._client.aclose()


@contextmanager
def proxying(proxy: Proxy) -> Iterator[str]:
    """The proxy on a free port of this machine, until the block ends; yields its base URL."""
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    listening.listen()  # whoever connects before the server has started waits
    server = uvicorn.Server(uvicorn.Config(proxy.app, log_level="warning"))
    thread = threading.Thread(target=server.run, args=([listening],), name="proxy")
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listening.close()
