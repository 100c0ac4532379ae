"""Long polling of the evaluator for its decision table, on a daemon thread of its own."""

from __future__ import annotations

import http.client
import logging
import os
import random
import selectors
import socket
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from email.message import Message
from typing import Final
from urllib.parse import quote, unquote

from kc_otel.client.credentials import authorization, client_context, parts_of
from kc_otel.contract.plain_text import read_json_text
from kc_otel.judge.decisions import LATE_SECONDS, DecisionTable

_log = logging.getLogger(__name__)

_MAX_RESPONSE_BYTES: Final = 16 << 20
_REMEDIES: Final = {
    401: "; give token_file=, KC_OTEL_TOKEN_FILE or KC_OTEL_TOKEN",
    403: "; the token's entry needs may: [read]",
}
_UNCHANGED_STATUSES: Final = frozenset({204, 304})
_CLOSING_SECONDS: Final = 1.5  # time that the last request, which says that this process ends, may take
_NEWS_SECONDS: Final = 1.0  # after so long, a request that is held back gives way to one that has news
_LONGEST_PAUSE_SECONDS: Final = 30.0  # between two failed requests


def lateness(headers: Message) -> str:
    """Return a sentence if an evaluator answers but, by its header `Age`, does not evaluate; else an empty string."""
    age = float(headers.get("age") or 0.0)
    return f"nothing has been evaluated for {age:.0f} s" if age > LATE_SECONDS else ""


class Poller(threading.Thread):
    """Asks `GET {url}/api/v1/decisions?after=VERSION&tag=TAG&wait=SECONDS` repeatedly, and passes on each answer.

    `&instance=ID` tells this process from others, `&obeys=CONTRACT/DIRECTIVE` names the directives that it follows, and
    `&kept=CONTRACT/SLICE/VERSION` the versions that it keeps requests away from. Once it is stopped, `&closing=true`
    says that it ends.

    A table that differs from the current one is newer, even if its version is lower: the evaluator has then lost its
    state.

    200 carries a table, 204 and 304 say that nothing has changed. Any other outcome is logged once per outage, and the
    request is retried after a growing, random pause.

    `on_table` gets each new table, and whether the evaluator has evaluated lately; `on_contact`, after every answer of
    an evaluator that is not late, the contracts that this process follows and that are not judged. `report` gives names
    and values of the query; `has_news` whether they should be told before the answer that is held back. `wait` is how
    long an answer may be held back, `refresh` the least time between two requests, both in seconds.
    """

    def __init__(
        self,
        url: str,
        on_table: Callable[[DecisionTable, bool], None],
        on_contact: Callable[[Collection[str]], None],
        report: Callable[[], Sequence[tuple[str, str]]] = tuple,
        has_news: Callable[[], bool] = bool,
        *,
        wait: float,
        refresh: float,
        token_file: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__(name="kc-otel-router", daemon=True)
        parts = parts_of(url)
        self._host, self._port, self._tls = str(parts.hostname), parts.port, parts.scheme == "https"
        self._path = f"{parts.path.rstrip('/')}/api/v1/decisions"
        self._on_table, self._on_contact, self._report, self._has_news = on_table, on_contact, report, has_news
        self._token_file = token_file
        self._wait, self._refresh = wait, refresh
        self._table: DecisionTable | None = None
        self._tag = self._unserved = ""
        self._stopping = threading.Event()
        self._connection: http.client.HTTPConnection | None = None

    def run(self) -> None:
        """Poll until stopped."""
        failures = 0
        while not self._stopping.is_set():
            began = time.monotonic()
            try:
                self._ask()
            except (OSError, http.client.HTTPException, ValueError) as error:
                self._drop()
                if self._stopping.is_set():
                    break
                failures += 1
                if failures == 1:
                    kept = "" if self._table is None else ", the last one stays in force"
                    _log.warning("no decision table from %s%s: %r", self._host, kept, error)
                pause = random.uniform(0.1, min(_LONGEST_PAUSE_SECONDS, 0.5 * 2.0 ** min(failures, 16)))  # noqa: S311
            else:
                if failures:
                    _log.warning("decision tables arrive from %s", self._host)
                failures = 0
                pause = began + self._refresh - time.monotonic()
            self._stopping.wait(max(0.0, pause))
        self._drop()
        if self._table is not None:
            with suppress(OSError, http.client.HTTPException, ValueError):
                self._connection = self._connect(_CLOSING_SECONDS)
                self._request("&closing=true")
            self._drop()

    def stop(self) -> None:
        """End the thread, even during a request that the evaluator holds back."""
        self._stopping.set()
        connection = self._connection
        sock = None if connection is None else connection.sock
        if sock is not None:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _ask(self) -> None:
        reused = self._connection is not None
        try:
            answer = self._request()
        except ConnectionError:
            if not reused or self._stopping.is_set():
                raise
            self._drop()  # the evaluator closed a connection that was idle between two requests
            answer = self._request()
        raw = answer.read(_MAX_RESPONSE_BYTES + 1)
        if len(raw) > _MAX_RESPONSE_BYTES:
            raise ValueError(f"the answer is larger than {_MAX_RESPONSE_BYTES} bytes")
        late = lateness(answer.headers)
        if answer.status == http.client.OK:
            table = DecisionTable.from_plain(read_json_text(raw))
            if table != self._table:
                self._on_table(table, not late)
            self._table = table
            # The evaluator's own, not ours: a newer one has content that is ignored here.
            self._tag = (answer.getheader("etag") or "").strip('"')
        elif answer.status not in _UNCHANGED_STATUSES or self._table is None:
            hint = _REMEDIES.get(answer.status, "")
            raise ValueError(f"HTTP {answer.status}{hint}")
        if late:
            raise ValueError(late)
        unserved = unquote(answer.getheader("kc-unserved") or "")
        if unserved != self._unserved and unserved:
            _log.warning(
                "%s does not judge contract %s: of its kernels only versions that were promoted to full serve",
                self._host,
                unserved,
            )
        self._unserved = unserved
        self._on_contact(unserved.split())

    def _request(self, more: str = "") -> http.client.HTTPResponse:
        connection = self._connection or self._connect(self._wait + 10.0)
        self._connection = connection
        version = -1 if self._table is None else self._table.version
        path = f"{self._path}?after={version}&tag={quote(self._tag)}&wait={self._wait:g}"
        path += "".join(f"&{name}={quote(value)}" for name, value in self._report()) + more
        headers = {"accept": "application/json", "user-agent": "kc-otel", **authorization(self._token_file)}
        connection.request("GET", path, headers=headers)
        if not more and self._waits_in_vain(connection.sock):
            self._drop()
            return self._request()
        return connection.getresponse()

    def _waits_in_vain(self, answering: socket.socket) -> bool:
        """Wait for the answer to begin; return True as soon as there is news that the request does not have."""
        until = time.monotonic() + self._wait
        with selectors.DefaultSelector() as selector:
            selector.register(answering, selectors.EVENT_READ)
            while time.monotonic() < until and not selector.select(_NEWS_SECONDS):
                if self._has_news():
                    return True
        return False

    def _connect(self, timeout: float) -> http.client.HTTPConnection:
        if self._tls:
            return http.client.HTTPSConnection(self._host, self._port, timeout=timeout, context=client_context())
        return http.client.HTTPConnection(self._host, self._port, timeout=timeout)

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
