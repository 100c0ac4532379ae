"""Delivering what the outbox holds: asyncio and httpx at the edge, every decision in the outbox.

One request per lane (contract and endpoint) is in flight at a time, so order is kept; each endpoint has a client of
its own, so that one that hangs takes no connection from another. Redirects are not followed, TLS is verified, and
private addresses are only connected to where the endpoint allows it. Body and id are the same at every attempt;
timestamp and signature are fresh.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import Final

import httpx

from kc_otel.serve.store.state_disk import StateDisk
from kc_otel.serve.store.state_file import StateError
from kc_otel.serve.webhooks.addresses import AddressError, pinned
from kc_otel.serve.webhooks.endpoints import WebhookEndpoint
from kc_otel.serve.webhooks.formats import Outgoing, render
from kc_otel.serve.webhooks.outbox import REFUSED, DeliveryState, Outbox, WebhookMessage

__all__ = ["Dispatcher", "retry_after_seconds"]

_log = logging.getLogger(__name__)
_SET: Final = 60.0
"""Seconds between two looks at the outbox by which two clocks do not come apart unless one is set."""


def _default_client() -> httpx.AsyncClient:
    return httpx.AsyncClient(follow_redirects=False, timeout=httpx.Timeout(15.0, connect=5.0))


class Dispatcher:
    """Sends due messages until it is cancelled.

    Everything runs on the event loop of the caller, which owns the outbox's connection: a transaction on it must not be
    held open across an `await`.

    Args:
        outbox: Where messages wait.
        endpoints: Endpoints by name. Messages to others stay in the outbox, and are logged once.
        client_factory: Makes the client of one endpoint.
        clock: Unix time, seconds.
        steady: Seconds of a clock that nobody sets.
        disk: What the outbox is on: nothing is sent that a crash could take back.
        timeout: Longest time for one request from connecting to the answer's headers, seconds.
        poll: Longest pause between looks at the outbox, seconds; `wake` ends it.
    """

    def __init__(
        self,
        outbox: Outbox,
        endpoints: Mapping[str, WebhookEndpoint],
        *,
        client_factory: Callable[[], httpx.AsyncClient] = _default_client,
        clock: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
        disk: StateDisk | None = None,
        timeout: float = 20.0,
        poll: float = 1.0,
    ) -> None:
        self.attempts: Counter[tuple[str, str]] = Counter()
        """Attempts by endpoint and outcome (`delivered`, `waiting`, `parked`), for metrics."""
        self._outbox = outbox
        self._endpoints = dict(endpoints)
        self._client_factory = client_factory
        self._clock, self._steady, self._disk = clock, steady, disk
        self._ahead = clock() - steady()
        self._timeout = timeout
        self._poll = poll
        self._wake = asyncio.Event()
        self._clients: dict[str, httpx.AsyncClient] = {}
        self._lanes: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._unknown: set[str] = set()

    def wake(self) -> None:
        """Look at the outbox now; call it on the event loop after enqueueing."""
        self._wake.set()

    def configure(self, endpoints: Mapping[str, WebhookEndpoint]) -> None:
        """Go on with these endpoints, as after a rotation; attempts in flight end as they began."""
        self._endpoints = dict(endpoints)
        self._unknown.clear()
        self.wake()

    async def run(self) -> None:
        """Deliver until cancelled; attempts in flight are then dropped and made again after the next start."""
        try:
            while True:
                self._wake.clear()
                self._start_due()
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._poll):
                        await self._wake.wait()
        finally:
            await self.aclose()

    async def aclose(self) -> None:
        """Drop attempts in flight and close connections."""
        lanes = tuple(self._lanes.values())
        for task in lanes:
            task.cancel()
        await asyncio.gather(*lanes, return_exceptions=True)
        self._lanes.clear()
        for client in self._clients.values():
            await client.aclose()
        self._clients.clear()

    def _start_due(self) -> int:
        started = 0
        try:
            self._follow_clock()
            self._outbox.expire(self._clock())
            due = self._outbox.due(self._clock())
        except sqlite3.OperationalError as error:  # a locked or full disk: the messages are still there
            _log.warning("webhooks wait, the outbox cannot be read: %s", error)
            return 0
        for message in due:
            lane = (message.endpoint, message.contract)
            endpoint = self._endpoints.get(message.endpoint)
            if endpoint is None:
                if message.endpoint not in self._unknown:
                    _log.warning("webhooks to %r wait: no such endpoint is configured", message.endpoint)
                    self._unknown.add(message.endpoint)
            elif lane not in self._lanes:
                self._lanes[lane] = asyncio.create_task(self._attempt(lane, endpoint, message))
                started += 1
        return started

    def _follow_clock(self) -> None:
        """Where the clock was set by a day, nothing that has waited for a second is too old for it."""
        ahead = (now := self._clock()) - self._steady()
        if abs(ahead - self._ahead) > _SET:
            self._outbox.clock_moved(ahead - self._ahead, now)
            self._ahead = ahead

    async def _attempt(self, lane: tuple[str, str], endpoint: WebhookEndpoint, message: WebhookMessage) -> None:
        try:
            if self._disk is not None:
                await self._disk.synced()
            await self._deliver(endpoint, message)
        except StateError as error:
            _log.warning("webhook %s waits: %s", message.id, error)
        except sqlite3.OperationalError as error:
            _log.warning("webhook %s will be sent again, the outbox cannot be written: %s", message.id, error)
        else:
            self._wake.set()  # the lane's next message may be due
        finally:
            self._lanes.pop(lane, None)

    async def _deliver(self, endpoint: WebhookEndpoint, message: WebhookMessage) -> None:
        """Send the requests that have no answer yet, one after the other, up to the first that has to be sent again."""
        try:
            requests = self._rendered(endpoint, message)
        except Exception as unfit:  # noqa: BLE001 - a body that cannot be rendered is a failed attempt, never a lost lane
            self._failed(endpoint, message, f"{type(unfit).__name__}: {unfit}")
            return
        for request in requests[message.answered :]:
            status, retry_after, error = await self._post(endpoint, request)
            if self._disk is not None:
                await self._disk.room()
            if status is not None and 200 <= status < 300:
                state = self._outbox.accepted(message.id, len(requests))
                if state is not DeliveryState.WAITING:
                    self.attempts[endpoint.name, state.value] += 1
                continue
            answered = self._failed(
                endpoint, message, error, status=status, retry_after=retry_after, requests=len(requests)
            )
            if not answered:
                return

    def _failed(
        self,
        endpoint: WebhookEndpoint,
        message: WebhookMessage,
        error: str,
        *,
        status: int | None = None,
        retry_after: float | None = None,
        requests: int = 1,
    ) -> bool:
        """Write down what went wrong; returns whether the endpoint has judged the request, so that the next follows."""
        state = self._outbox.failed(
            message.id, self._clock(), error, status=status, retry_after=retry_after, requests=requests
        )
        self.attempts[endpoint.name, state.value] += 1
        _log.warning("webhook %s to %r is %s: %s", message.id, endpoint.name, state.value, error)
        return status in REFUSED

    def _rendered(self, endpoint: WebhookEndpoint, message: WebhookMessage) -> tuple[Outgoing, ...]:
        return render(
            endpoint.format,
            endpoint.url,
            message.body,
            message.id,
            now=self._clock(),
            secrets=endpoint.secrets,
            key=endpoint.key,
        )

    async def _post(self, endpoint: WebhookEndpoint, request: Outgoing) -> tuple[int | None, float | None, str]:
        """Status and `Retry-After` of the answer, and what went wrong."""
        now = self._clock()
        client = self._clients.get(endpoint.name)
        if client is None:
            client = self._clients[endpoint.name] = self._client_factory()
        try:
            async with asyncio.timeout(self._timeout):
                status, asked = await _sent(client, endpoint, request)
        except TimeoutError:
            return None, None, f"no answer within {self._timeout:g} s"
        except AddressError as error:
            return None, None, str(error)
        except Exception as error:  # noqa: BLE001 - whatever a client raises is a failed attempt, never a lost lane
            said = str(error).replace(endpoint.url, "the endpoint")
            return None, None, f"{type(error).__name__}: {said}" if said else type(error).__name__
        return status, retry_after_seconds(asked, now), f"HTTP {status}"


async def _sent(client: httpx.AsyncClient, endpoint: WebhookEndpoint, request: Outgoing) -> tuple[int, str | None]:
    """Status of the answer, and its `Retry-After`."""
    url, headers, extensions = (request.url, {}, {}) if endpoint.allow_private else await pinned(request.url)
    headers |= {"content-type": "application/json", "user-agent": "kc-otel", **request.headers}
    if endpoint.authorization:
        headers["authorization"] = endpoint.authorization
    # The answer's body is never read: an endless one must not hold the lane.
    async with client.stream("POST", url, content=request.body, headers=headers, extensions=extensions) as answer:
        return answer.status_code, answer.headers.get("retry-after")


def retry_after_seconds(value: str | None, now: float) -> float | None:
    """Seconds that a `Retry-After` header asks for, from a number or an HTTP date; None when there is none."""
    if value is None:
        return None
    text = value.strip()
    if text.isascii() and text.isdigit():
        return float(text[:9])
    try:
        at = parsedate_to_datetime(text)
    except ValueError:
        return None
    return max(0.0, (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() - now)
