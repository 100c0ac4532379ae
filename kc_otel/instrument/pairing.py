"""Pairing: the same sequence as the inference kernel sampled it and as the training kernel scored it, at other times.

Both sides are kept until their partner arrives, within a bound on tokens and on age. Pure: the clock is passed in.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["Pair", "PairingBuffer", "Role", "Side", "content_key"]

Role = Literal["sampled", "scored"]


def content_key(token_ids: ArrayLike, prompt_ids: ArrayLike = ()) -> str:
    """A key for a sequence that nobody named: a hash of its prompt and its tokens, 32 hex digits."""
    digest = hashlib.blake2b(digest_size=16)
    for ids in (np.asarray(prompt_ids, dtype=np.int64).ravel(), np.asarray(token_ids, dtype=np.int64).ravel()):
        digest.update(ids.size.to_bytes(8, "little"))
        digest.update(ids.astype("<i8", copy=False).tobytes())
    return digest.hexdigest()


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """One sequence as one kernel saw it.

    Attributes:
        token_ids: Sampled tokens, [tokens].
        logprobs: Their log-probabilities under the kernel, nats, [tokens].
        origin: Whatever the caller wants to have back with the pair: kernel, weights, attributes, trace context.
    """

    token_ids: NDArray[np.integer]
    logprobs: NDArray[np.floating]
    origin: Any = None


@dataclass(frozen=True, slots=True, eq=False)
class Pair:
    """Both sides of a sequence."""

    key: Hashable
    sampled: Side
    scored: Side

    @property
    def comparable(self) -> bool:
        """Whether both sides are about the same tokens."""
        return bool(np.array_equal(self.sampled.token_ids, self.scored.token_ids))


@dataclass(slots=True)
class _Waiting:
    role: Role
    key: Hashable
    side: Side
    since: float = field(compare=False)


class PairingBuffer:
    """Sides that wait for their partner: at most `max_tokens` tokens, each for at most `max_age` seconds.

    Sides with equal keys (a prompt that was answered twice in the same words) are paired first come, first served.
    """

    def __init__(self, *, max_tokens: int, max_age: float) -> None:
        self._max_tokens = max_tokens
        self._max_age = max_age
        self._tokens = 0
        self._next = 0
        self._order: OrderedDict[int, _Waiting] = OrderedDict()
        self._by_key: dict[tuple[Role, Hashable], deque[int]] = {}

    def __len__(self) -> int:
        return len(self._order)

    @property
    def tokens(self) -> int:
        """Tokens that wait."""
        return self._tokens

    def add(self, role: Role, key: Hashable, side: Side, now: float) -> tuple[Pair | None, int]:
        """The pair that `side` completes, if any, and how many sides had to make room.

        A side that is larger than the whole buffer makes room by not being kept.
        """
        partner: Role = "scored" if role == "sampled" else "sampled"
        waiting = self._by_key.get((partner, key))
        if waiting:
            other = self._remove(waiting[0]).side
            return (Pair(key, side, other) if role == "sampled" else Pair(key, other, side)), 0
        if side.token_ids.size > self._max_tokens:
            return None, 1
        number = self._next
        self._next += 1
        self._order[number] = _Waiting(role, key, side, now)
        self._by_key.setdefault((role, key), deque()).append(number)
        self._tokens += side.token_ids.size
        evicted = 0
        while self._tokens > self._max_tokens:
            self._remove(next(iter(self._order)))
            evicted += 1
        return None, evicted

    def expire(self, now: float) -> int:
        """Let go of the sides that waited too long, and say how many."""
        expired = 0
        while self._order:
            oldest = next(iter(self._order))
            if now - self._order[oldest].since <= self._max_age:
                break
            self._remove(oldest)
            expired += 1
        return expired

    def _remove(self, number: int) -> _Waiting:
        gone = self._order.pop(number)
        # Only the oldest of a key is ever removed, be it paired or evicted, so it is the first of its queue.
        queue = self._by_key[gone.role, gone.key]
        queue.popleft()
        if not queue:
            del self._by_key[gone.role, gone.key]
        self._tokens -= gone.side.token_ids.size
        return gone
