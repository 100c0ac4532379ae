"""What people order is on the disk before they are told that it holds."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from fastapi.responses import JSONResponse

from kc_otel.serve.api.documented import PROBLEM
from kc_otel.serve.api.own_site import READING, Application, Message, Receive, Send
from kc_otel.serve.api.views import ProblemDetails
from kc_otel.serve.store.state_file import StateError

__all__ = ["OrdersOnDisk"]


class OrdersOnDisk:
    """Holds back what is answered to an order until the disk has it.

    Args:
        app: Carries orders out.
        on_disk: Waits for the disk.
    """

    def __init__(self, app: Application, on_disk: Callable[[], Awaitable[None]]) -> None:
        self._app, self._on_disk = app, on_disk

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http" or scope["method"] in READING:
            await self._app(scope, receive, send)
            return
        failed = False

        async def held(message: Message) -> None:
            nonlocal failed
            if message["type"] == "http.response.start" and message["status"] < 400:
                try:
                    await self._on_disk()
                except (StateError, asyncio.CancelledError) as error:
                    failed = True
                    why = str(error) or "the evaluator stops"
                    detail = f"what was ordered holds, and may be forgotten when the machine goes down: {why}"
                    body = ProblemDetails(title="state cannot be written", detail=detail, status=503)
                    await JSONResponse(body.model_dump(), 503, media_type=PROBLEM)(scope, receive, send)
            if not failed:
                await send(message)

        await self._app(scope, receive, held)
