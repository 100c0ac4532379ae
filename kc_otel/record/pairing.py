"""Pairing: the same sequence as the inference kernel sampled it and as the training kernel scored it, at other times.

A batch of one kernel's log-probabilities is cut into sequences; each waits for the other kernel's, within a bound on
tokens and on age, and those that found each other become batches again. Pure: the clock is passed in.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, takewhile
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kc_otel.contract.slices import Scalar
from kc_otel.record.kernel import KernelPair
from kc_otel.record.measure.arrays import as_bool, is_tensor, on_host
from kc_otel.record.work import QueuedBatch, Role, Rows, Tree, per_sequence, row_of


def content_key(token_ids: ArrayLike, prompt_ids: ArrayLike = ()) -> str:
    """Return a key for an unnamed sequence: a hash of its prompt and its tokens, 32 hex digits."""
    digest = hashlib.blake2b(digest_size=16)
    for ids in (np.asarray(prompt_ids, dtype=np.int64).ravel(), np.asarray(token_ids, dtype=np.int64).ravel()):
        digest.update(ids.size.to_bytes(8, "little"))
        digest.update(ids.astype("<i8", copy=False).tobytes())
    return digest.hexdigest()


@dataclass(frozen=True, slots=True, eq=False)
class Pair:
    """Both sides of a sequence, as `sides_of` gives them."""

    key: Hashable
    sampled: QueuedBatch
    scored: QueuedBatch

    @property
    def comparable(self) -> bool:
        """True if both sides are about the same tokens."""
        return bool(np.array_equal(self.sampled.arrays["token_ids"], self.scored.arrays["token_ids"]))

    @property
    def attributes(self) -> dict[str, Scalar]:
        """Attributes of both sides; the sampled side's win."""
        return {**self.scored.attributes, **self.sampled.attributes}

    def either(self, name: str) -> Any:
        """Setting of the scored side, or else of the sampled one."""
        said = self.scored.settings[name]
        return self.sampled.settings[name] if said is None else said


class PairingBuffer:
    """Sides that wait for their partner: at most `max_tokens` tokens, each for at most `max_age` seconds.

    Sides with equal keys (a prompt that was answered twice in the same words) are paired first come, first served.
    """

    def __init__(self, *, max_tokens: int, max_age: float) -> None:
        self._max_tokens = max_tokens
        self._max_age = max_age
        self._tokens = 0
        self._numbers = count()
        self._order: dict[int, tuple[tuple[Role, Hashable], QueuedBatch, float]] = {}
        """Role and key of what waits, and since when, by number; the oldest comes first, here and by key."""
        self._by_key: dict[tuple[Role, Hashable], deque[int]] = {}

    def __len__(self) -> int:
        return len(self._order)

    @property
    def tokens(self) -> int:
        """Tokens that wait."""
        return self._tokens

    def add(self, key: Hashable, side: QueuedBatch, now: float) -> tuple[Pair | None, int]:
        """The pair that `side` completes, if any, and how many sides had to make room.

        A side that is larger than the whole buffer makes room by not being kept.
        """
        role: Role = side.settings["role"]
        partner: Role = "scored" if role == "sampled" else "sampled"
        waiting = self._by_key.get((partner, key))
        if waiting:
            other = self._remove(waiting[0])
            return (Pair(key, side, other) if role == "sampled" else Pair(key, other, side)), 0
        if (tokens := side.arrays["token_ids"].size) > self._max_tokens:
            return None, 1
        number = next(self._numbers)
        self._order[number] = (role, key), side, now
        self._by_key.setdefault((role, key), deque()).append(number)
        self._tokens += tokens
        evicted = 0
        while self._tokens > self._max_tokens:
            self._remove(next(iter(self._order)))
            evicted += 1
        return None, evicted

    def expire(self, now: float) -> int:
        """Drop the sides that waited too long; return their number."""
        late = list(takewhile(lambda number: now - self._order[number][2] > self._max_age, self._order))
        for number in late:
            self._remove(number)
        return len(late)

    def _remove(self, number: int) -> QueuedBatch:
        """Remove the oldest of a key, be it paired or evicted: it is the first of its queue."""
        name, side, _ = self._order.pop(number)
        self._by_key[name].popleft()
        if not self._by_key[name]:
            del self._by_key[name]
        self._tokens -= side.arrays["token_ids"].size
        return side


def sides_of(work: QueuedBatch, rows: Rows) -> Iterator[tuple[Hashable, QueuedBatch]]:
    """The valid tokens of each sequence as a batch of its own, with its key; sequences without any are left out.

    Its arrays are of these tokens, [tokens] each: `token_ids` and `logprobs`, and what was given of `advantages`,
    `versions` and `kept`; `positions` in the response, where something between the tokens is left out; and `rewards`,
    one number. Its setting `group` is the name of its prompt, None where it is not known.
    """
    arrays = {name: on_host(data) for name, data in rows.arrays.items() if data is not None}
    total, said = rows.given, work.settings
    keys, attributes, named = said["key"], work.attributes or {}, prompt_names(said["groups"], None)
    for name, given in (("key", keys), ("attributes", attributes), ("group", named)):
        if isinstance(given, list) and len(given) != total:
            raise ValueError(f"{name}: {len(given)} for {total} sequences; give one for each")
    spans, prompts, rewards = work.spans, work.arrays["prompts"], work.arrays.get("rewards")
    rewards = None if rewards is None else per_sequence("rewards", rewards, total)
    for row, index in enumerate(rows.kept):
        inside = as_bool(arrays["mask"][row]) if "mask" in arrays else slice(None)
        ids = arrays["token_ids"][row][inside]
        if not ids.size:
            continue
        # Rows are copied out of the batch: a view would keep the whole of it while one sequence waits.
        own = {
            name: np.broadcast_to(data[row], arrays["logprobs"][row].shape)[inside].copy()
            for name, data in arrays.items()
            if name != "mask"
        }
        if "mask" in arrays and np.ptp(at := np.flatnonzero(arrays["mask"][row])) + 1 != at.size:
            own["positions"] = at - at[0]
        if rewards is not None:
            own["rewards"] = rewards[index]
        prompt = row_of(prompts, index)
        unnamed = content_key((), prompt) if np.size(prompt) else None
        settings = {name: said[name] for name in ("role", "weights", "processing", "group_size")}
        settings["group"] = unnamed if named is None else _one_of(named, index)
        side = QueuedBatch("side", work.pair, own, settings, _one_of(attributes, index), links=spans)
        key = _one_of(keys, index)
        if key is None:
            key = content_key(ids, prompt)
        elif total > 1 and not isinstance(keys, list):
            key = (key, index)
        yield key, side


def versions_of(pair: Pair) -> Hashable:
    """Return the key shared by pairs of one batch: kernels, weight versions, processings, and the arrays present."""
    sides = (pair.scored, pair.sampled)
    said = [side.settings["processing"] for side in sides]
    processing = [None if declared is None else tuple(sorted(declared.items())) for declared in said]
    given = "versions" in pair.sampled.arrays, pair.either("group_size"), *("kept" in side.arrays for side in sides)
    return _kernels(pair), *(side.settings["weights"] for side in sides), *given, *processing


def _kernels(pair: Pair) -> KernelPair:
    return KernelPair(pair.scored.pair.train, pair.sampled.pair.inference)


def paired_batch(last: QueuedBatch, pairs: Sequence[Pair]) -> QueuedBatch:
    """Pairs of the same versions as one batch, in the trace context of `last`, the side that came last.

    The spans of the sides that waited become links.
    """
    sides: dict[Role, list[QueuedBatch]] = {
        "scored": [pair.scored for pair in pairs],
        "sampled": [pair.sampled for pair in pairs],
    }

    def of_all(role: Role, name: str) -> list[NDArray[Any]] | None:
        found = [side.arrays[name] for side in sides[role] if name in side.arrays]
        return found if len(found) == len(pairs) else None

    rewards = np.array([side.arrays.get("rewards", np.nan) for side in sides["scored"]])
    arrays: dict[str, Tree] = {
        "train": of_all("scored", "logprobs"),
        "inference": of_all("sampled", "logprobs"),
        "token_ids": of_all("sampled", "token_ids"),
        "train_kept": of_all("scored", "kept"),
        "inference_kept": of_all("sampled", "kept"),
        "advantages": of_all("scored", "advantages"),
        "versions": of_all("sampled", "versions"),
        "rewards": None if np.isnan(rewards).all() else rewards,
    }
    if any("positions" in side.arrays for side in (*sides["scored"], *sides["sampled"])):
        arrays["positions"] = [
            {
                "positions": np.arange(pair.sampled.arrays["token_ids"].size),
                **pair.scored.arrays,
                **pair.sampled.arrays,
            }["positions"]
            for pair in pairs
        ]
    waited = sides["scored" if last.settings["role"] == "sampled" else "sampled"]
    spans = (*last.links, *(span for side in waited for span in side.links))
    links = {(span.trace_id, span.span_id): span for span in spans}
    scored, sampled = pairs[0].scored.settings, pairs[0].sampled.settings
    declared = scored["processing"], sampled["processing"]
    return replace(
        last,
        kind="sampled",
        pair=_kernels(pairs[0]),
        arrays=arrays,
        settings={
            "processing": None if None in declared else declared,
            "weights": (scored["weights"], sampled["weights"]),
            "groups": _groups(pairs),
            "group_size": pairs[0].either("group_size"),
            "density": None,
        },
        attributes=[pair.attributes for pair in pairs],
        links=tuple(links.values()),
    )


def _groups(pairs: Sequence[Pair]) -> list[Hashable] | None:
    """Return the names of the pairs' prompts; an unknown one is named after its sequence. None if all are unknown."""
    known = [pair.either("group") for pair in pairs]
    if all(name is None for name in known):
        return None
    return [("sequence", pair.key) if name is None else name for name, pair in zip(known, pairs, strict=True)]


def prompt_names(groups: Any, prompts: Tree) -> Any:
    """Names of prompts, one for each sequence, or one for all of them; None where nobody knows them."""
    if groups is not None:
        if is_tensor(groups):
            return groups.tolist()
        # Tensors of one number each are equal by identity alone.
        return [name.item() if is_tensor(name) else name for name in groups] if isinstance(groups, list) else groups
    if prompts is None:
        return None
    rows = on_host(prompts) if is_tensor(prompts) else prompts
    return [content_key((), on_host(prompt)) for prompt in rows]


def _one_of(given: Any, index: int) -> Any:
    """Value for a sequence: its own of a list, or the one that all have."""
    return given[index] if isinstance(given, list) else given
