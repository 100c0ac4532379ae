"""A durable outbox of webhooks: at least once, in order per contract and endpoint, visible when stuck.

A message is written in the transaction that caused it and leaves only when its endpoint has answered 2xx, so a crash at
any point can send it twice, under the same id, but never lose it. A lane is one contract's messages to one endpoint:
only the oldest waiting message of a lane is ever due, and lanes do not wait for each other.

Meaning of an answer (Standard Webhooks 1.0.0, "Delivery success and failure", except where noted):

| answer              | outcome                                                                                       |
| ------------------- | --------------------------------------------------------------------------------------------- |
| 2xx                 | delivered                                                                                     |
| 410                 | the endpoint is disabled until its configuration changes or the evaluator restarts            |
| 400, 413, 415, 422  | parked: the receiver judged this request, not the moment, and it must not block the lane      |
| 429, 503            | retried; a `Retry-After` holds every lane of the endpoint                                     |
| anything else       | retried: 3xx, 401, 403 and 404 are often a deployment or a rotation under way                 |

The third line is ours: the specification retries every failure, but with messages in order one that can never be
accepted would hold back every later page. Retries wait a random time up to `base * 2^attempts`, at most `cap` (full
jitter). A message that is not delivered within `expire_after` is parked too. Parked messages stay visible, and those of
what still lasts wait again when their endpoint's configuration changes or the evaluator restarts.

An endpoint that was told nothing of an incident is not told of its end: the end is superseded, with all that waits
before it, unless an attempt at one of those may have been accepted.
"""

from __future__ import annotations

import random
import secrets
import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from kc_otel.contract.words import moment
from kc_otel.serve.store.state_file import unit_of_work

_TABLES = (
    """CREATE TABLE IF NOT EXISTS outbox (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,
        id TEXT NOT NULL UNIQUE,
        endpoint TEXT NOT NULL,
        contract TEXT NOT NULL,
        body BLOB NOT NULL,
        created REAL NOT NULL,
        group_key TEXT NOT NULL,
        ends INTEGER NOT NULL,
        state TEXT NOT NULL DEFAULT 'waiting' CHECK (state IN ('waiting', 'delivered', 'parked', 'superseded')),
        arrived INTEGER NOT NULL DEFAULT 0,
        attempts INTEGER NOT NULL DEFAULT 0,
        tried REAL NOT NULL,
        pause REAL NOT NULL DEFAULT 0,
        error TEXT NOT NULL DEFAULT ''
    ) STRICT""",
    "CREATE INDEX IF NOT EXISTS outbox_waiting ON outbox (endpoint, contract, seq) WHERE state = 'waiting'",
    "CREATE INDEX IF NOT EXISTS outbox_finished ON outbox (state, seq) WHERE state <> 'waiting'",
)
_COLUMNS: Final = "id, endpoint, contract, body, attempts, error, arrived, state"
_REFUSED_STATUSES: Final = frozenset({400, 413, 415, 422})
"""Statuses with which a receiver judges a request, and not the moment."""
_GONE_STATUS: Final = 410
_THROTTLED_STATUSES: Final = frozenset({429, 503})


class DeliveryState(StrEnum):
    """State of a message."""

    WAITING = "waiting"
    DELIVERED = "delivered"
    PARKED = "parked"
    """Given up: rejected, or expired."""
    SUPERSEDED = "superseded"
    """Not sent, for all that it is about was over before anything of it was delivered."""


@dataclass(frozen=True, slots=True)
class WebhookMessage:
    """A webhook on its way; `id` is the same at every attempt, and contract and endpoint are its lane."""

    id: str
    endpoint: str
    contract: str
    body: bytes
    attempts: int
    error: str
    arrived: bool
    """True if an attempt may have been accepted, though no answer said so."""
    state: DeliveryState


@dataclass(frozen=True, slots=True)
class EndpointStatus:
    """Delivery status of an endpoint; Unix times, None where there is nothing of the kind.

    `given_up` is the time of the newest message that was parked, `error` that of a waiting message's last attempt.
    """

    endpoint: str
    waiting: int
    parked: int
    oldest: float | None
    error: str
    given_up: float | None
    disabled: str
    disabled_at: float | None


class Outbox:
    """Messages that wait for their endpoints.

    Enqueue inside the transaction of what caused the message. The rest are transactions of their own, or
    parts of a turn. `cap` is the longest pause of all, and the longest `Retry-After` that is believed, seconds; of
    messages that do not wait, `keep` in each state are kept for people to look at.
    """

    def __init__(
        self,
        connection: sqlite3.Connection,
        *,
        base: float = 1.0,
        cap: float = 300.0,
        expire_after: float = 86_400.0,
        keep: int = 10_000,
        rng: random.Random | None = None,
    ) -> None:
        self._connection = connection
        self._base, self._cap, self._expire_after, self._keep = base, cap, expire_after, keep
        self._rng = rng or random.Random()  # noqa: S311 - jitter, not a secret
        self._held: dict[str, tuple[float, float]] = {}
        """Endpoint -> since when it is sent nothing, and for how many seconds: its `Retry-After`."""
        self._disabled: dict[str, tuple[str, float]] = {}
        """Endpoint -> its answer 410, and when it came."""
        for statement in _TABLES:
            connection.execute(statement)

    def enqueue(
        self, endpoint: str, contract: str, body: bytes, now: float, *, group: str = "", ends: bool = False
    ) -> str:
        """Write a message, which is due at once, and return its id.

        `group` names what it is about, and `ends` says that all of that is over.
        """
        message_id = f"msg_{secrets.token_hex(16)}"
        self._connection.execute(
            "INSERT INTO outbox (id, endpoint, contract, body, group_key, ends, created, tried)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (message_id, endpoint, contract, body, group, ends, now, now),
        )
        if ends:
            self._supersede(endpoint, contract, group)
        return message_id

    def _supersede(self, endpoint: str, contract: str, group: str) -> None:
        """Send nothing of a group whose end was just written if its endpoint knows nothing of it since the last end."""
        of_group = {"endpoint": endpoint, "contract": contract, "group": group}
        where = (
            " WHERE endpoint = :endpoint AND contract = :contract AND group_key = :group AND seq > (SELECT"
            " coalesce(max(seq), 0) FROM outbox WHERE endpoint = :endpoint AND contract = :contract"
            " AND group_key = :group AND ends AND state = 'delivered')"
        )
        count, known = self._connection.execute(
            f"SELECT count(*), max(state = 'delivered' OR arrived) FROM outbox{where}",  # noqa: S608 - a constant
            of_group,
        ).fetchone()
        if count > 1 and not known:
            self._connection.execute(f"UPDATE outbox SET state = 'superseded'{where}", of_group)  # noqa: S608
            self._trim(DeliveryState.SUPERSEDED)

    def revive(self, endpoints: Iterable[str], now: float) -> None:
        """Let what was given up wait again, if it has not expired and nothing later says more or that it is over."""
        with unit_of_work(self._connection):
            self._connection.executemany(
                "UPDATE outbox SET state = 'waiting', tried = :now, pause = 0"
                " WHERE state = 'parked' AND endpoint = :endpoint AND created > :oldest AND NOT EXISTS (SELECT 1"
                " FROM outbox later WHERE later.endpoint = outbox.endpoint AND later.contract = outbox.contract"
                " AND later.group_key = outbox.group_key AND later.seq > outbox.seq"
                " AND (later.state = 'delivered' OR later.ends))",
                [{"now": now, "endpoint": endpoint, "oldest": now - self._expire_after} for endpoint in endpoints],
            )

    def due(self, now: float) -> tuple[WebhookMessage, ...]:
        """The oldest waiting message of every lane that may be tried now; of a clock that was set back, early."""
        rows = self._connection.execute(
            f"SELECT {_COLUMNS} FROM outbox WHERE seq IN"  # noqa: S608 - a constant
            " (SELECT min(seq) FROM outbox WHERE state = 'waiting' GROUP BY endpoint, contract)"
            " AND (:now >= tried + pause OR :now < tried) ORDER BY seq",
            {"now": now},
        )
        held = {endpoint for endpoint, (since, seconds) in self._held.items() if since <= now < since + seconds}
        return tuple(message for message in map(_message, rows) if message.endpoint not in held | self._disabled.keys())

    def begin(self, message_id: str) -> bool:
        """Note that an attempt is made: whatever becomes of this process, the message may have been accepted.

        Returns False for one that no longer waits: it expired or was superseded meanwhile, and is not to be sent.
        """
        with unit_of_work(self._connection):
            begun = self._connection.execute(
                "UPDATE outbox SET arrived = 1 WHERE id = ? AND state = 'waiting'", (message_id,)
            )
        return begun.rowcount == 1

    def answered(
        self,
        message_id: str,
        now: float,
        status: int | None,
        error: str = "",
        retry_after: float | None = None,
        *,
        arrived: bool = False,
    ) -> DeliveryState:
        """Note what an attempt came to, with no status where nothing answered; return the message's state.

        `arrived` says whether this attempt or an earlier one may have been accepted all the same. One that expired
        while the attempt was under way stays parked, also where it is not kept any more. `error` must hold no secret.
        """
        state = _state_after(status)
        asked = min(max(0.0, retry_after or 0.0), self._cap)
        with unit_of_work(self._connection):
            row = self._connection.execute(
                "SELECT endpoint, attempts, state FROM outbox WHERE id = ?", (message_id,)
            ).fetchone()
            endpoint, attempts, before = row or ("", 0, DeliveryState.PARKED)
            if before != DeliveryState.WAITING:
                return DeliveryState(before)
            pause = max(asked, self._rng.uniform(0.0, min(self._cap, self._base * 2.0 ** min(attempts, 64))))
            self._connection.execute(
                "UPDATE outbox SET state = ?, attempts = attempts + 1, tried = ?, pause = ?, error = ?, arrived = ?"
                " WHERE id = ?",
                (state.value, now, pause, error, arrived, message_id),
            )
            if state is not DeliveryState.WAITING:
                self._trim(state)
        if status == _GONE_STATUS:
            self._disabled.setdefault(endpoint, (error, now))
        elif status in _THROTTLED_STATUSES:
            self._held[endpoint] = now, asked
        return state

    def any_expired(self, now: float) -> bool:
        """Return True if a message has waited too long."""
        oldest = self._connection.execute("SELECT min(created) FROM outbox WHERE state = 'waiting'").fetchone()[0]
        return oldest is not None and oldest <= now - self._expire_after

    def expire(self, now: float) -> int:
        """Park every message that has waited too long; returns how many."""
        with unit_of_work(self._connection):
            expired = self._connection.execute(
                "UPDATE outbox SET state = 'parked',"
                " error = 'expired undelivered' || CASE error WHEN '' THEN '' ELSE '; last: ' || error END"
                " WHERE state = 'waiting' AND created <= ?",
                (now - self._expire_after,),
            ).rowcount
            self._trim(DeliveryState.PARKED)
        return expired

    def enable(self, endpoint: str) -> None:
        """Send to an endpoint again, whatever it has answered."""
        self._disabled.pop(endpoint, None)
        self._held.pop(endpoint, None)

    def messages(self, state: DeliveryState | None = None, limit: int = 100) -> tuple[WebhookMessage, ...]:
        """The latest messages, newest first; in one state, or in all when None."""
        rows = self._connection.execute(
            f"SELECT {_COLUMNS} FROM outbox WHERE :state IS NULL OR state = :state"  # noqa: S608 - a constant
            " ORDER BY seq DESC LIMIT :limit",
            {"state": state, "limit": limit},
        )
        return tuple(_message(row) for row in rows)

    def status(self) -> tuple[EndpointStatus, ...]:
        """Return the delivery status of every endpoint that ever had a message, by name."""
        rows = self._connection.execute(
            "SELECT o.endpoint, sum(o.state = 'waiting'), sum(o.state = 'parked'),"
            " min(CASE WHEN o.state = 'waiting' THEN o.created END),"
            " coalesce((SELECT error FROM outbox w WHERE w.endpoint = o.endpoint AND w.state = 'waiting'"
            " AND w.error <> '' ORDER BY w.tried DESC LIMIT 1), ''),"
            " max(CASE WHEN o.state = 'parked' THEN o.created END)"
            " FROM outbox o GROUP BY o.endpoint ORDER BY o.endpoint"
        )
        return tuple(EndpointStatus(*row, *self._disabled.get(row[0], ("", None))) for row in rows)

    def undelivered(self, contract: str, incident: str) -> dict[str, tuple[float, str]]:
        """Return the messages about an incident that endpoints have not accepted: the oldest's time, and a sentence."""
        rows = self._connection.execute(
            "SELECT endpoint, min(CASE WHEN state <> 'delivered' THEN created END) AS oldest, sum(state = 'waiting'),"
            " sum(state = 'parked'), min(CASE WHEN state = 'waiting' THEN created END), sum(state = 'superseded'),"
            " max(CASE WHEN state = 'delivered' THEN tried END)"
            " FROM outbox WHERE contract = ? AND instr(body, CAST(? AS BLOB)) > 0"
            " GROUP BY endpoint HAVING oldest IS NOT NULL ORDER BY endpoint",
            (contract, f'"{incident}"'),
        )
        found: dict[str, tuple[float, str]] = {}
        for endpoint, oldest, waiting, parked, since, superseded, accepted in rows:
            parts = []
            if waiting:
                parts.append(f"{_messages(waiting, endpoint, 'waits', 'wait')} since {moment(since)[:16]} UTC")
            if waiting and endpoint in self._disabled:
                at = moment(self._disabled[endpoint][1])[:16]
                parts.append(f"{endpoint} answered HTTP 410 at {at} UTC and is sent nothing more")
            if parked:
                parts.append(f"{_messages(parked, endpoint, 'was', 'were')} given up: rejected or expired")
            if superseded:
                said = _messages(superseded, endpoint, "was", "were")
                later = f"; a later one was accepted at {moment(accepted)[:16]} UTC" if accepted is not None else ""
                parts.append(f"{said} not sent: it was over before any of it was delivered{later}")
            found[endpoint] = oldest, "; ".join(parts)
        return found

    def _trim(self, state: DeliveryState) -> None:
        self._connection.execute(
            "DELETE FROM outbox WHERE state = :state AND seq <="
            " (SELECT seq FROM outbox WHERE state = :state ORDER BY seq DESC LIMIT 1 OFFSET :keep)",
            {"state": state.value, "keep": self._keep},
        )


def _message(row: tuple[str, str, str, bytes, int, str, int, str]) -> WebhookMessage:
    return WebhookMessage(*row[:-2], bool(row[-2]), DeliveryState(row[-1]))


def _messages(count: int, endpoint: str, verb: str, plural: str) -> str:
    return f"1 message to {endpoint} {verb}" if count == 1 else f"{count:,} messages to {endpoint} {plural}"


def _state_after(status: int | None) -> DeliveryState:
    if status is not None and 200 <= status < 300:
        return DeliveryState.DELIVERED
    return DeliveryState.PARKED if status in _REFUSED_STATUSES else DeliveryState.WAITING
