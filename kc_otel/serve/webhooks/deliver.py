"""Deliver the outbox's messages: asyncio and httpx are here, every decision is in the outbox.

One request per lane (contract and endpoint) is in flight at a time, so order is kept; each endpoint has a client of
its own, so that one that hangs takes no connection from another. Redirects are not followed, TLS is verified, and
private addresses are only connected to where the endpoint allows it. Body and id are the same at every attempt;
timestamp and signature are fresh.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from typing import Any, Final
from urllib.parse import urlsplit, urlunsplit

import httpx

from kc_otel.serve.store.state_file import StateError
from kc_otel.serve.webhooks.endpoints import WebhookEndpoint
from kc_otel.serve.webhooks.outbox import DeliveryState, Outbox, WebhookMessage

_log = logging.getLogger(__name__)
_PORTS: Final = {"http": 80, "https": 443}
_UNICAST: Final = ipaddress.IPv6Network("2000::/3")
_6TO4: Final = ipaddress.IPv6Network("2002::/16")
"""A relay sends what goes there to the IPv4 address within. So does Teredo's, which is not global by itself."""
_NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")
_ISATAP: Final = frozenset({0x0000_5EFE, 0x0200_5EFE})
"""The third quarter of an address whose last one is an IPv4 address that the site's router sends to."""


def _default_client() -> httpx.AsyncClient:
    return httpx.AsyncClient(follow_redirects=False, timeout=httpx.Timeout(15.0, connect=5.0))


class Dispatcher:
    """Sends due messages until it is cancelled.

    Everything runs on the event loop of the caller, which owns the outbox's connection: a transaction on it must not be
    held open across an `await`; it is written in a `turn`. Messages to endpoints that are not configured stay in the
    outbox. `timeout` is the longest time for one request from connecting to the answer's headers,
    `poll` the longest pause between looks at the outbox, seconds.
    """

    def __init__(
        self,
        outbox: Outbox,
        endpoints: Mapping[str, WebhookEndpoint],
        *,
        client_factory: Callable[[], httpx.AsyncClient] = _default_client,
        clock: Callable[[], float] = time.time,
        turn: Callable[[], AbstractAsyncContextManager[object]] = nullcontext,
        timeout: float = 20.0,
        poll: float = 1.0,
    ) -> None:
        self.attempts: Counter[tuple[str, str]] = Counter()
        """Attempts by endpoint and outcome (`delivered`, `waiting`, `parked`), for metrics."""
        self._outbox = outbox
        self._endpoints = dict(endpoints)
        self._anew = set(endpoints)
        """Endpoints whose configuration is new: what they have rejected may be accepted now."""
        self._client_factory = client_factory
        self._clock, self._turn = clock, turn
        self._timeout = timeout
        self._poll = poll
        self._wake = asyncio.Event()
        self._clients: dict[str, httpx.AsyncClient] = {}
        self._lanes: dict[tuple[str, str], asyncio.Task[None]] = {}

    def wake(self) -> None:
        """Look at the outbox now; call it on the event loop after enqueueing."""
        self._wake.set()

    def configure(self, endpoints: Mapping[str, WebhookEndpoint]) -> None:
        """Replace the endpoints, as after a rotation; one that has changed is sent again what it did not accept."""
        for name, endpoint in endpoints.items():
            if endpoint != self._endpoints.get(name):
                self._outbox.enable(name)
                self._anew.add(name)
        self._endpoints = dict(endpoints)
        self.wake()

    async def run(self) -> None:
        """Deliver until cancelled; attempts in flight are then dropped and made again after the next start."""
        try:
            while True:
                self._wake.clear()
                await self._start_due()
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

    async def _start_due(self) -> int:
        started = 0
        try:
            if self._outbox.any_expired(self._clock()):
                async with self._turn():
                    self._outbox.expire(self._clock())
            if self._anew:
                async with self._turn():
                    self._outbox.revive(self._anew, self._clock())
                    self._anew = set()
            due = self._outbox.due(self._clock())
        except (StateError, sqlite3.OperationalError) as error:  # a locked or full disk: the messages are still there
            _log.warning("webhooks wait, the outbox cannot be read or written: %s", error)
            return 0
        for message in due:
            lane = (message.endpoint, message.contract)
            endpoint = self._endpoints.get(message.endpoint)
            if endpoint is not None and lane not in self._lanes:
                self._lanes[lane] = asyncio.create_task(self._attempt(lane, endpoint, message))
                started += 1
        return started

    async def _attempt(self, lane: tuple[str, str], endpoint: WebhookEndpoint, message: WebhookMessage) -> None:
        try:
            async with self._turn():
                begun = self._outbox.begin(message.id)
            if begun:
                status, asked, error, arrived = await self._post(endpoint, message)
                arrived = arrived or message.arrived
                async with self._turn():
                    state = self._outbox.answered(message.id, self._clock(), status, error, asked, arrived=arrived)
                self.attempts[endpoint.name, state.value] += 1
                if state is not DeliveryState.DELIVERED:
                    _log.warning("webhook %s to %r is %s: %s", message.id, endpoint.name, state.value, error)
        except (StateError, sqlite3.OperationalError) as error:
            _log.warning("webhook %s will be sent again, the outbox cannot be written: %s", message.id, error)
        else:
            self._wake.set()  # the lane's next message may be due
        finally:
            self._lanes.pop(lane, None)

    async def _post(
        self, endpoint: WebhookEndpoint, message: WebhookMessage
    ) -> tuple[int | None, float | None, str, bool]:
        """Make one attempt; return the answer's status and `Retry-After`, what went wrong, and if it may have arrived.

        What went wrong is empty for nothing.
        """
        client = self._clients.get(endpoint.name)
        if client is None:
            client = self._clients[endpoint.name] = self._client_factory()
        try:
            signed, body = endpoint.request(message.body, message.id, self._clock())
            async with asyncio.timeout(self._timeout):
                address = (endpoint.url, {}, {}) if endpoint.allow_private else await pinned(endpoint.url)
                url, headers, extensions = address
                headers |= {"content-type": "application/json", "user-agent": "kc-otel", **signed}
                if endpoint.authorization:
                    headers["authorization"] = endpoint.authorization
                # The answer's body is never read: an endless one must not hold the lane.
                async with client.stream("POST", url, content=body, headers=headers, extensions=extensions) as answer:
                    status, asked = answer.status_code, answer.headers.get("retry-after", "")
        except TimeoutError:
            return None, None, f"no answer within {self._timeout:g} s", True
        except AddressError as error:
            return None, None, str(error), False
        except Exception as error:  # noqa: BLE001 - whatever is raised is a failed attempt, never a lost lane
            said = str(error).replace(endpoint.url, "the endpoint")
            arrived = not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
            return None, None, f"{type(error).__name__}: {said}" if said else type(error).__name__, arrived
        accepted = 200 <= status < 300
        seconds = float(asked[:9]) if asked.isascii() and asked.isdigit() else None
        return status, seconds, "" if accepted else f"HTTP {status}", accepted


class AddressError(Exception):
    """The address may not be connected to; the message names no URL."""


async def pinned(url: str) -> tuple[str, dict[str, str], dict[str, Any]]:
    """Return a URL with a public address of its host, and headers and extensions for httpx, or raise AddressError."""
    parts = urlsplit(url)
    host = str(parts.hostname)
    port = parts.port or _PORTS[parts.scheme]
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise AddressError(f"the host's name cannot be resolved ({error.strerror or error})") from None
    addresses = [ipaddress.ip_address(str(where[0]).partition("%")[0]) for *_, where in found]
    public = [address for address in addresses if _is_public(address)]
    if not public:
        said = ", ".join(sorted({str(address) for address in addresses}))
        raise AddressError(f"{said} is not a public address; set ..._ALLOW_PRIVATE=1 if that is intended")
    address = public[0]
    literal = f"[{address}]" if address.version == 6 else str(address)
    userinfo, _, _ = parts.netloc.rpartition("@")
    netloc = f"{userinfo}@" * bool(userinfo) + f"{literal}:{port}"
    shown = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=netloc)), {"host": shown}, {"sni_hostname": host}


def _is_public(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """Return whether an address is public, also by an IPv4 address inside it.

    Sources: RFC 4291 (2000::/3 is what is assigned as global unicast), RFC 6052 (NAT64), RFC 3056, RFC 4380, RFC 5214.
    """
    if isinstance(address, ipaddress.IPv6Address):
        if address in _NAT64:  # what networks without IPv4 reach all of IPv4 by
            return _is_public(ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF))
        if address not in _UNICAST or address in _6TO4:
            return False
        if (int(address) >> 32) & 0xFFFF_FFFF in _ISATAP:
            return False
    return address.is_global and not address.is_multicast
