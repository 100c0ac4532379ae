"""What an aggregator must not forget: the senders' streams, their sums, and what waits to be passed on.

A sender is answered when this is on disk, so that what was acknowledged is in the sums after kill -9, too. A sum is
sent until somebody takes it, and again whenever it grows: the newest contains the ones before.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping

from kc_otel.serve.aggregator.host_streams import HostStreams, Merged, Total, as_request
from kc_otel.serve.store.histogram_codec import check_observed, decode_histogram, encode_histogram
from kc_otel.serve.store.state_connection import StateConnection
from kc_otel.serve.store.state_disk import StateDisk
from kc_otel.serve.store.state_file import DamagedStateError, reading_state
from kc_otel.serve.store.stream_codec import check_stream, decode_stream, encode_stream
from kc_otel.serve.store.unit_of_work import unit_of_work
from kc_otel.stats import ExponentialHistogram

__all__ = ["AggregatorStore"]

_TABLES = """
CREATE TABLE IF NOT EXISTS aggregator (instance TEXT NOT NULL, began INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS sender_stream (id BLOB PRIMARY KEY, content BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS host_total
  (key TEXT PRIMARY KEY, start INTEGER NOT NULL, heard INTEGER NOT NULL, content BLOB NOT NULL, due INTEGER NOT NULL)
  WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS passed_on (number INTEGER PRIMARY KEY AUTOINCREMENT, path TEXT NOT NULL, body BLOB NOT NULL);
"""
_PATHS = ("/v1/metrics", "/v1/traces")
_OTHERS = """
SELECT 1 FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'
  AND name NOT IN ('aggregator', 'sender_stream', 'host_total', 'passed_on')
"""


class AggregatorStore:
    """The aggregator's state file, and in memory what is in it.

    Args:
        connection: The file, open and held.
        now: Unix time in ns.

    Attributes:
        instance: Names this aggregator for good; the streams that it sends are its own.
        host: Streams and sums.
        disk: Waits until what was written is on it.

    Raises:
        DamagedStateError: If the file holds what no aggregator has written.
        StateError: If it cannot be written.
    """

    def __init__(self, connection: StateConnection, now: int) -> None:
        self._connection = connection
        self.disk = StateDisk(connection)
        with unit_of_work(connection), reading_state(connection):
            if connection.execute(_OTHERS).fetchone():
                raise DamagedStateError("the state file is of something else")
            for statement in filter(str.strip, _TABLES.split(";")):
                connection.execute(statement)
            known = connection.execute("SELECT instance, began FROM aggregator").fetchone()
            if known is None:
                known = (str(uuid.uuid4()), now)
                connection.execute("INSERT INTO aggregator VALUES (?, ?)", known)
            self.instance: str = known[0]
            self.host = HostStreams(int(known[1]))
            for id, content in connection.execute("SELECT id, content FROM sender_stream"):
                self.host.streams[id] = check_stream(decode_stream(content))
            for key, start, heard, content in connection.execute("SELECT key, start, heard, content FROM host_total"):
                histogram = decode_histogram(content)
                if not isinstance(histogram, ExponentialHistogram):
                    raise DamagedStateError(f"the sum of {key} is of a kind that no aggregator keeps")
                check_observed(histogram)
                self.host.totals[key] = Total(start, heard, histogram)
            for _ in self.to_pass_on():  # also what is sent later is read now: damage is said before a port is open
                pass
            as_request(self.host.totals, {}, now)
            self.due = {key for (key,) in connection.execute("SELECT key FROM host_total WHERE due")}
            (self.waiting,) = connection.execute("SELECT COALESCE(SUM(LENGTH(body)), 0) FROM passed_on").fetchone()

    def keep(self, merged: Merged, rest: bytes) -> tuple[int, int] | None:
        """Write what a metrics request came to, then remember it.

        Returns:
            (number, bytes) of what of it is passed on as it is; None for nothing.

        Raises:
            StateError: If it cannot be written; then it is not remembered either.
        """
        with unit_of_work(self._connection) as unit:
            self._connection.executemany(
                "REPLACE INTO sender_stream VALUES (?, ?)",
                [(id, encode_stream(stream)) for id, stream in merged.streams.items()],
            )
            self._connection.executemany(
                "REPLACE INTO host_total VALUES (?, ?, ?, ?, 1)",
                [
                    (key, each.start, each.heard, encode_histogram(each.histogram))
                    for key, each in merged.totals.items()
                ],
            )
            row = self._pass_on("/v1/metrics", rest)
            unit.on_commit(lambda: self._adopt(merged, len(rest)))
        return row

    def keep_as_it_is(self, path: str, body: bytes) -> tuple[int, int] | None:
        """Write a request that is passed on.

        Returns:
            Its number and bytes; None for nothing.

        Raises:
            StateError: If it cannot be written.
        """
        with unit_of_work(self._connection):
            row = self._pass_on(path, body)
        self.waiting += len(body)
        return row

    def sent(self, totals: Mapping[str, Total]) -> None:
        """Somebody took these sums; those that grew meanwhile are due again."""
        taken = [key for key, total in totals.items() if self.host.totals[key] is total]
        with unit_of_work(self._connection):
            self._connection.executemany("UPDATE host_total SET due = 0 WHERE key = ?", [(key,) for key in taken])
        self.due.difference_update(taken)

    def to_pass_on(self) -> Iterator[tuple[int, str, bytes]]:
        """(number, path, body) of what waits, oldest first."""
        rows = self._connection.execute("SELECT number, path, body FROM passed_on ORDER BY number").fetchall()
        for number, path, body in rows:
            if path not in _PATHS or not isinstance(body, bytes):
                raise DamagedStateError(f"what waits for {path!r} is nothing that an aggregator passes on")
            yield number, path, body

    def passed(self, rows: Iterable[tuple[int, int]]) -> None:
        """These, (number, bytes), wait no longer."""
        rows = list(rows)
        with unit_of_work(self._connection):
            self._connection.executemany("DELETE FROM passed_on WHERE number = ?", [(number,) for number, _ in rows])
        self.waiting -= sum(size for _, size in rows)

    def tidy(self, now: int) -> None:
        """Forget what processes sent that are long gone, and what they came to, once it was taken."""
        streams, totals = self.host.silent(now)
        totals = tuple(key for key in totals if key not in self.due)
        with unit_of_work(self._connection) as unit:
            self._connection.executemany("DELETE FROM sender_stream WHERE id = ?", [(id,) for id in streams])
            self._connection.executemany("DELETE FROM host_total WHERE key = ?", [(key,) for key in totals])
            unit.on_commit(lambda: self.host.forget(streams, totals))

    def _pass_on(self, path: str, body: bytes) -> tuple[int, int] | None:
        if not body:
            return None
        number = self._connection.execute("INSERT INTO passed_on (path, body) VALUES (?, ?)", (path, body)).lastrowid
        return int(number or 0), len(body)

    def _adopt(self, merged: Merged, passed: int) -> None:
        self.host.adopt(merged)
        self.due.update(merged.totals)
        self.waiting += passed
