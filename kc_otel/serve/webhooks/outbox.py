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

import json
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
        state TEXT NOT NULL DEFAULT 'waiting' CHECK (state IN ('waiting', 'delivered', 'parked')),
        attempts INTEGER NOT NULL DEFAULT 0,
        tried REAL NOT NULL,
        pause REAL NOT NULL DEFAULT 0,
        error TEXT NOT NULL DEFAULT ''
    ) STRICT""",
    "CREATE INDEX IF NOT EXISTS outbox_waiting ON outbox (endpoint, contract, seq) WHERE state = 'waiting'",
    "CREATE INDEX IF NOT EXISTS outbox_finished ON outbox (state, seq) WHERE state <> 'waiting'",
)
_COLUMNS: Final = "id, endpoint, contract, body, attempts, error, state"
_REFUSED_STATUSES: Final = frozenset({400, 413, 415, 422})
"""Statuses with which a receiver judges a request, and not the moment."""
_GONE_STATUS: Final = 410
_THROTTLED_STATUSES: Final = frozenset({429, 503})
_SUPERSEDED: Final = "superseded: it was over before anything of it was delivered"
_IS_SUPERSEDED: Final = "(state = 'parked' AND error LIKE 'superseded: %')"
_IS_GIVEN_UP: Final = "(state = 'parked' AND error NOT LIKE 'superseded: %')"
MAY_HAVE_ARRIVED: Final = "; it may have been accepted"
"""End of the error of a message while it is sent, and after an attempt that was not answered or refused."""


class DeliveryState(StrEnum):
    """State of a message."""

    WAITING = "waiting"
    DELIVERED = "delivered"
    PARKED = "parked"


@dataclass(frozen=True, slots=True)
class WebhookMessage:
    """A webhook on its way; `id` is the same at every attempt, and contract and endpoint are its lane."""

    id: str
    endpoint: str
    contract: str
    body: bytes
    attempts: int
    error: str
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
    delivered and parked messages, `keep` of each are kept for people to look at.
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

    def enqueue(self, endpoint: str, contract: str, body: bytes, now: float, *, ends: str = "") -> str:
        """Write a message, which is due at once, and return its id.

        `ends` is the `groupKey` of a body that says that all of it is over.
        """
        message_id = f"msg_{secrets.token_hex(16)}"
        self._connection.execute(
            "INSERT INTO outbox (id, endpoint, contract, body, created, tried) VALUES (?, ?, ?, ?, ?, ?)",
            (message_id, endpoint, contract, body, now, now),
        )
        if ends:
            self._supersede(endpoint, contract, ends)
        return message_id

    def _supersede(self, endpoint: str, contract: str, group: str) -> None:
        """Park the end of a group, which was just written, with all that waits before it, if it is news of nothing."""
        rows = self._connection.execute(
            f"SELECT seq, state, error, body, {_IS_SUPERSEDED} FROM outbox"  # noqa: S608 - a constant
            " WHERE endpoint = ? AND contract = ? AND instr(body, CAST(? AS BLOB)) > 0 ORDER BY seq DESC",
            (endpoint, contract, json.dumps(group, ensure_ascii=False)),
        )
        unknown: list[int] = []
        for seq, state, error, body, superseded in rows:
            if state == DeliveryState.DELIVERED and _about(body)[1] == "resolved":
                break
            if state == DeliveryState.DELIVERED or error.endswith(MAY_HAVE_ARRIVED):
                return
            unknown += [seq] * (not superseded)
        if len(unknown) > 1:
            self._connection.executemany(
                "UPDATE outbox SET state = 'parked',"
                " error = ? || CASE error WHEN '' THEN '' ELSE '; last: ' || error END WHERE seq = ?",
                [(_SUPERSEDED, seq) for seq in unknown],
            )
            self._trim(DeliveryState.PARKED)

    def revive(self, endpoints: Iterable[str], now: float) -> None:
        """Let what was given up wait again, if it has not expired and nothing later says more or that it is over."""
        with unit_of_work(self._connection):
            for endpoint in endpoints:
                known = set[tuple[str, str]]()
                for seq, contract, state, body, given_up in self._connection.execute(
                    f"SELECT seq, contract, state, body, {_IS_GIVEN_UP} FROM outbox"  # noqa: S608 - a constant
                    " WHERE endpoint = ? AND created > ? ORDER BY seq DESC",
                    (endpoint, now - self._expire_after),
                ).fetchall():
                    group, status = _about(body)
                    if given_up and (contract, group) not in known:
                        self._connection.execute(
                            "UPDATE outbox SET state = 'waiting', tried = ?, pause = 0 WHERE seq = ?", (now, seq)
                        )
                    if state == DeliveryState.DELIVERED or status == "resolved":
                        known.add((contract, group))

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

    def begin(self, message_id: str) -> None:
        """Note that an attempt is made: whatever becomes of this process, the message may have been accepted."""
        with unit_of_work(self._connection):
            self._connection.execute(
                "UPDATE outbox SET error = error || ? WHERE id = ? AND error NOT LIKE ?",
                (MAY_HAVE_ARRIVED, message_id, f"%{MAY_HAVE_ARRIVED}"),
            )

    def answered(
        self, message_id: str, now: float, status: int | None, error: str = "", retry_after: float | None = None
    ) -> DeliveryState:
        """Note what an attempt came to, with no status where nothing answered; return the message's state.

        One that expired while the attempt was under way stays parked. `error` must hold no secret.
        """
        state = _state_after(status)
        asked = min(max(0.0, retry_after or 0.0), self._cap)
        with unit_of_work(self._connection):
            row = self._connection.execute(
                "SELECT endpoint, attempts FROM outbox WHERE id = ? AND state = 'waiting'", (message_id,)
            ).fetchone()
            if row is None:
                return DeliveryState.PARKED
            endpoint, attempts = row
            pause = max(asked, self._rng.uniform(0.0, min(self._cap, self._base * 2.0 ** min(attempts, 64))))
            self._connection.execute(
                "UPDATE outbox SET state = ?, attempts = attempts + 1, tried = ?, pause = ?, error = ? WHERE id = ?",
                (state.value, now, pause, error, message_id),
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
            f"SELECT o.endpoint, sum(o.state = 'waiting'), sum({_IS_GIVEN_UP}),"  # noqa: S608 - constants
            " min(CASE WHEN o.state = 'waiting' THEN o.created END),"
            " coalesce((SELECT error FROM outbox w WHERE w.endpoint = o.endpoint AND w.state = 'waiting'"
            " AND w.error <> '' ORDER BY w.tried DESC LIMIT 1), ''),"
            f" max(CASE WHEN {_IS_GIVEN_UP} THEN o.created END)"
            " FROM outbox o GROUP BY o.endpoint ORDER BY o.endpoint"
        )
        return tuple(EndpointStatus(*row, *self._disabled.get(row[0], ("", None))) for row in rows)

    def undelivered(self, contract: str, incident: str) -> dict[str, tuple[float, str]]:
        """Return the messages about an incident that endpoints have not accepted: the oldest's time, and a sentence."""
        rows = self._connection.execute(
            f"SELECT endpoint, min(created), sum(state = 'waiting'), sum({_IS_GIVEN_UP}),"  # noqa: S608 - constants
            f" min(CASE WHEN state = 'waiting' THEN created END), sum({_IS_SUPERSEDED})"
            " FROM outbox WHERE state IN ('waiting', 'parked') AND contract = ? AND instr(body, CAST(? AS BLOB)) > 0"
            " GROUP BY endpoint ORDER BY endpoint",
            (contract, f'"{incident}"'),
        )
        found: dict[str, tuple[float, str]] = {}
        for endpoint, oldest, waiting, parked, since, superseded in rows:
            parts = []
            if waiting:
                many = f"1 message to {endpoint} waits" if waiting == 1 else f"{waiting:,} messages to {endpoint} wait"
                parts.append(f"{many} since {moment(since)[11:16]} UTC")
            if waiting and endpoint in self._disabled:
                at = moment(self._disabled[endpoint][1])[11:16]
                parts.append(f"{endpoint} answered HTTP 410 at {at} UTC and is sent nothing more")
            if parked:
                many = "1 message to {} was" if parked == 1 else f"{parked:,} messages to {{}} were"
                parts.append(f"{many.format(endpoint)} given up: rejected or expired")
            if superseded:
                many = "1 message to {} was" if superseded == 1 else f"{superseded:,} messages to {{}} were"
                parts.append(f"{many.format(endpoint)} not sent: it was over before any of it was delivered")
            found[endpoint] = oldest, "; ".join(parts)
        return found

    def _trim(self, state: DeliveryState) -> None:
        self._connection.execute(
            "DELETE FROM outbox WHERE state = :state AND seq <="
            " (SELECT seq FROM outbox WHERE state = :state ORDER BY seq DESC LIMIT 1 OFFSET :keep)",
            {"state": state.value, "keep": self._keep},
        )


def _message(row: tuple[str, str, str, bytes, int, str, str]) -> WebhookMessage:
    return WebhookMessage(*row[:-1], DeliveryState(row[-1]))


def _about(body: bytes) -> tuple[str, str]:
    """Return a body's `groupKey` and `status`; nothing of one that is damaged, which its attempt will tell."""
    try:
        found = json.loads(body)
    except ValueError:
        return "", ""
    return str(found.get("groupKey", "")), str(found.get("status", ""))


def _state_after(status: int | None) -> DeliveryState:
    if status is not None and 200 <= status < 300:
        return DeliveryState.DELIVERED
    return DeliveryState.PARKED if status in _REFUSED_STATUSES else DeliveryState.WAITING
