"""Pairing: the same sequence as the inference kernel sampled it and as the training kernel scored it, at other times.

Both sides are kept until their partner arrives, within a bound on tokens and on age. Pure: the clock is passed in.

From batches of one kernel's log-probabilities to sequences that wait for the other's, and back to batches.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kc_otel.contract.slices import Scalar
from kc_otel.record import capture
from kc_otel.record.telemetry.pair_streams import KernelPair
from kc_otel.record.work import Work

__all__ = ["Pair", "PairingBuffer", "Role", "Side", "content_key", "paired_batch", "sides_of", "versions_of"]


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


@dataclass(frozen=True, slots=True, eq=False)
class _Origin:
    """What a side brings along besides its numbers."""

    work: Work
    attributes: Mapping[str, Scalar]
    advantages: Any


def sides_of(work: Work, rows: capture.Rows) -> Iterator[tuple[Hashable, Side]]:
    """The valid tokens of each sequence, with its key; sequences without any are left out.

    Raises:
        ValueError: If there are keys or attributes for another number of sequences.
    """
    arrays = {name: capture.on_host(data) for name, data in rows.arrays.items() if data is not None}
    total = len(rows.kept) + sum(rows.invalid.values())
    for name, given in (("key", work.keys), ("attributes", work.attributes)):
        if (
            isinstance(given, list | tuple)
            and (name == "attributes" or isinstance(given, list))
            and len(given) != total
        ):
            raise ValueError(f"{name}: {len(given)} for {total} sequences; give one for each")
    light = work.without_arrays()
    for row, index in enumerate(rows.kept):
        inside = arrays["mask"][row] != 0 if "mask" in arrays else slice(None)
        ids = arrays["token_ids"][row][inside]
        if not ids.size:
            continue
        # Rows are copied out of the batch: a view would keep the whole of it while one sequence waits.
        advantages = _advantages(arrays, row)[inside].copy() if "advantages" in arrays else None
        origin = _Origin(light, _attributes(work, index), advantages)
        yield _key(work, ids, index, total), Side(ids.copy(), arrays["logprobs"][row][inside].copy(), origin)


def versions_of(pair: Pair) -> Hashable:
    """What pairs must have in common to be measured as one batch: both kernels, weight versions and processings."""
    sampled, scored = pair.sampled.origin.work, pair.scored.origin.work
    processing = [
        None if each is None else tuple(sorted(each.items())) for each in (scored.processing[0], sampled.processing[1])
    ]
    return scored.pair.train, sampled.pair.inference, scored.weights[0], sampled.weights[1], *processing


def paired_batch(work: Work, pairs: Sequence[Pair]) -> tuple[Work, capture.Rows]:
    """Pairs of the same versions as one batch, in the trace context of `work`, the side that came last.

    The spans of the sides that waited become links. Attributes of both sides count; the sampled side's win.
    """
    sampled, scored = pairs[0].sampled.origin.work, pairs[0].scored.origin.work
    advantages = [pair.scored.origin.advantages for pair in pairs]
    arrays = {
        "train": [pair.scored.logprobs for pair in pairs],
        "inference": [pair.sampled.logprobs for pair in pairs],
        "token_ids": [pair.sampled.token_ids for pair in pairs],
        "mask": None,
        "advantages": None if any(a is None for a in advantages) else advantages,
    }
    waited = [(pair.scored if work.kind == "sampled" else pair.sampled).origin.work for pair in pairs]
    spans = (*work.links, *(span for other in waited for span in other.spans))
    links = {(span.trace_id, span.span_id): span for span in spans}
    batch = replace(
        work.without_arrays(),
        kind="compare",
        pair=KernelPair(scored.pair.train, sampled.pair.inference),
        attributes=[{**pair.scored.origin.attributes, **pair.sampled.origin.attributes} for pair in pairs],
        processing=(scored.processing[0], sampled.processing[1]),
        weights=(scored.weights[0], sampled.weights[1]),
        links=tuple(links.values()),
    )
    return batch, capture.laid_out(arrays, like="train")


def _advantages(arrays: Mapping[str, Any], row: int) -> NDArray[np.floating]:
    return np.broadcast_to(arrays["advantages"][row], arrays["logprobs"][row].shape)


def _attributes(work: Work, index: int) -> Mapping[str, Scalar]:
    if work.attributes is None:
        return {}
    return work.attributes if isinstance(work.attributes, Mapping) else work.attributes[index]


def _key(work: Work, ids: NDArray[Any], index: int, total: int) -> Hashable:
    if isinstance(work.keys, list):
        return work.keys[index]  # type: ignore[no-any-return]
    if work.keys is not None:
        return work.keys if total == 1 else (work.keys, index)
    return content_key(ids, capture.row_of(work.prompts, index))
