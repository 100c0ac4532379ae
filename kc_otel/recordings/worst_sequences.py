"""The worst sequences of each cell, in a file beside the spool, for a person who examines a failing slice.

A few for each clause, slice and kernel version, and none for longer than is said: they are what people asked and were
answered. With redaction a prompt becomes a hash, by which two askings of it can be told to be one, and a completion
becomes the drift of its tokens alone. The salt of the hash stays in the file: without the file, nobody can test
guesses.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import sqlite3
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kc_otel.contract.clause import Clause
from kc_otel.contract.model import Contract
from kc_otel.contract.plain_text import read_json_text
from kc_otel.contract.registry.clause_metrics import DERIVED
from kc_otel.contract.slices import ALL
from kc_otel.record.measure.sampled import SEQUENCE, TOKEN, log_ratio
from kc_otel.recordings.request import SampledRequest
from kc_otel.recordings.spool import private_database

_TABLE: Final = """CREATE TABLE IF NOT EXISTS worst (
    contract TEXT NOT NULL,
    clause TEXT NOT NULL,
    slice TEXT NOT NULL,
    kernel TEXT NOT NULL,
    value REAL NOT NULL,
    at REAL NOT NULL,
    request_id TEXT NOT NULL,
    content TEXT NOT NULL
) STRICT"""
_APPLICATION_ID: Final = 0x6B63_5753  # "kcWS"
_NEUTRAL_VALUE: Final = {"ratio": 1.0, "geometric_ratio": 1.0}
_MAX_TOKENS: Final = 4096
"""Tokens of a completion, and characters of a prompt, that are kept: the first ones."""


@dataclass(frozen=True, slots=True)
class WorstSequence:
    """A sequence, its clause's value, when it was served, texts or ids unless redacted, log ratios in nats."""

    value: float
    at: float
    request_id: str
    trace_id: str
    prompt: str
    prompt_hash: str
    prompt_tokens: int
    tokens: tuple[str, ...]
    log_ratios: tuple[float, ...]


class WorstSequences:
    """Keeps the worst `most` of each clause, slice and kernel for `max_age` seconds, without `redacted` parts."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        contract: Contract,
        *,
        most: int = 5,
        max_age: float = 86400.0,
        redacted: Collection[str] = (),
        text: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        if most < 1 or not max_age > 0.0:
            raise ValueError(f"{most!r} sequences for {max_age!r} seconds keep nothing; write numbers above 0")
        self._contract = contract
        self._most = most
        self._max_age = max_age
        self._redacted = frozenset(redacted)
        self._text = text
        self._clauses = [(clause, value) for clause in contract.clauses if (value := _value_of(clause)) is not None]
        self._connection, self._salt = _opened(Path(path))

    def add(self, requests: Sequence[SampledRequest], train: Sequence[Any], now: float) -> None:
        """Keep those that are worse than what is kept, by log P [tokens] of each, nats, at a Unix time."""
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            with self._connection as worst:
                worst.execute("DELETE FROM worst WHERE at < ?", (now - self._max_age,))
                for request, scored in zip(requests, train, strict=True):
                    self._add(request, log_ratio(np.asarray(scored), request.logprobs), now)
        except sqlite3.Error as error:
            raise OSError(f"the worst sequences cannot be kept ({error})") from None

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    def _add(self, request: SampledRequest, ratios: NDArray[np.float64], now: float) -> None:
        at = request.at / 1e9 if request.at else now
        if not ratios.size or not np.isfinite(ratios).all() or at < now - self._max_age:
            return
        content = ""
        slices = (ALL, *(name for name in self._contract.slices_of(request.attributes) if name != ALL))
        for clause, value_of in self._clauses:
            value = value_of(ratios)
            for slice in slices:
                cell = (self._contract.name, clause.id, slice, request.kernel.fingerprint)
                self._connection.execute(  # a request that was not exported is scored again
                    "DELETE FROM worst WHERE (contract, clause, slice, kernel, request_id, at) = (?, ?, ?, ?, ?, ?)",
                    (*cell, request.request_id, at),
                )
                least = self._connection.execute(
                    "SELECT rowid, value FROM worst WHERE (contract, clause, slice, kernel) = (?, ?, ?, ?) "
                    "ORDER BY value DESC, rowid LIMIT 1 OFFSET ?",
                    (*cell, self._most - 1),
                ).fetchone()
                if least is not None and least[1] >= value:
                    continue
                if least is not None:
                    self._connection.execute("DELETE FROM worst WHERE rowid = ?", (least[0],))
                content = content or json.dumps(self._content(request, ratios))
                self._connection.execute(
                    "INSERT INTO worst VALUES (?, ?, ?, ?, ?, ?, ?, ?)", (*cell, value, at, request.request_id, content)
                )

    def _content(self, request: SampledRequest, ratios: NDArray[np.float64]) -> dict[str, Any]:
        kept = slice(_MAX_TOKENS)
        hashed = "prompts" in self._redacted
        prompt = request.prompt_ids.tolist()
        digest = hashlib.blake2b(request.prompt_ids.tobytes(), key=self._salt, digest_size=16).hexdigest()
        without = "completions" in self._redacted
        return {
            "trace_id": request.traceparent.split("-")[1] if request.traceparent.count("-") == 3 else "",
            "prompt": "" if hashed else self._said(prompt)[kept],
            "prompt_hash": digest if hashed else "",
            "prompt_tokens": len(prompt),
            "tokens": [] if without else [self._said([token]) for token in request.token_ids[kept].tolist()],
            "log_ratios": np.round(ratios[kept], 6).tolist(),
        }

    def _said(self, ids: list[int]) -> str:
        return " ".join(map(str, ids)) if self._text is None else self._text(ids)


def read_worst(path: Path, contract: str, clause: str, slice: str, kernel: str) -> tuple[WorstSequence, ...]:
    """Read the stored sequences of a cell, the worst first, of one inference kernel by its fingerprint, or of any."""
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=2.0)) as connection:
            if connection.execute("PRAGMA application_id").fetchone()[0] != _APPLICATION_ID:
                raise _other_file(path)
            rows = connection.execute(
                "SELECT value, at, request_id, content FROM worst WHERE (contract, clause, slice) = (?, ?, ?) "
                "AND ? IN ('', kernel) ORDER BY value DESC LIMIT 100",
                (contract, clause, slice, kernel),
            ).fetchall()
    except sqlite3.Error as error:
        raise OSError(f"{path}: cannot be read ({error})") from None
    return tuple(_read(path, rows))


def _read(path: Path, rows: Sequence[Any]) -> Iterator[WorstSequence]:
    for value, at, request_id, content in rows:
        try:
            found = read_json_text(content)
            found |= {name: tuple(found[name]) for name in ("tokens", "log_ratios")}
            yield WorstSequence(value, at, request_id, **found)
        except (TypeError, KeyError, ValueError) as error:
            raise ValueError(f"{path}: sequence {request_id!r} cannot be read ({error})") from None


def _opened(path: Path) -> tuple[sqlite3.Connection, bytes]:
    try:
        with private_database(path, _APPLICATION_ID, _TABLE, _other_file(path)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            with connection:
                connection.execute("CREATE TABLE IF NOT EXISTS salt (value BLOB NOT NULL) STRICT")
                if not (row := connection.execute("SELECT value FROM salt").fetchone()):
                    row = (secrets.token_bytes(32),)
                    connection.execute("INSERT INTO salt VALUES (?)", row)
    except sqlite3.Error as error:
        raise OSError(f"{path}: cannot be used ({error}); give a file of its own") from None
    return connection, row[0]


def _other_file(path: Path) -> ValueError:
    return ValueError(f"{path}: holds no worst sequences; give the file that kc-otel rescore --worst wrote")


def _value_of(clause: Clause) -> Callable[[NDArray[np.float64]], float] | None:
    """Return a function from log ratios [tokens] to a sequence's value for a clause; None if there is none."""
    key = DERIVED[clause.metric].base if clause.metric in DERIVED else clause.metric
    neutral = _NEUTRAL_VALUE.get(key, 0.0)
    if key in TOKEN:
        of_tokens = np.mean if clause.parsed_statistic.kind == "mean" else np.max
        signed = key in {"log_ratio", "ratio"}
        return lambda ratios: float(of_tokens(np.abs(TOKEN[key](ratios) - neutral) if signed else TOKEN[key](ratios)))
    if key in SEQUENCE:
        return lambda ratios: float(abs(SEQUENCE[key](ratios.sum(), ratios.size) - neutral))
    return None
