"""Sequences that occur before, in a recording or in another one: they are no further evidence.

Two sequences that were sampled differ in their tokens or their prompts, and then in the log-probability of every token
that is not certain. One is another one again where both sides are the same; where they have the same tokens, too
improbable to be sampled twice; or where the sampling side's numbers, rounded to a small part of themselves, occur
before along nearly the whole sequence: a copy with small changes, a part of a longer sequence, or a rotation.

The last one compares windows of tokens so long that hardly any of independent tokens occurs twice. Rollouts that begin
alike differ from where they part; short answers and certain text tell too little; what a named prompt makes probable
may be sampled for it again. Not found are copies that are changed by much more than the rounding, and parts of less
than eight tokens.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kc_otel.record.measure.checks import swapped
from kc_otel.record.measure.rounding import EQUAL_SIDES, coarse_side
from kc_otel.record.measure.sampled import saturated
from kc_otel.recordings.recording import Recording, prompt_of

_MIN_TELLING_TOKENS: Final = 8
"""Fewest tokens that are no certainties, from which on a sequence that occurs again was not sampled again by chance."""
_CERTAIN_NATS: Final = 0.01
"""A token's -log-probability, nats, up to which many sequences have the same number."""
_UNREPEATED_NATS: Final = 30.0
"""-log-probability of tokens that are not sampled twice: once in 10^13."""
_RELATIVE_RESOLUTION: Final = 5e-3
"""Part of itself to which a log-probability is rounded, about the drift of good kernels."""
_ROUNDED_BELOW_NATS: Final = 0.05
"""-log-probability, nats, far below which numbers are rounded to the same part of this."""
_REPEATED_SHARE: Final = 0.9
"""Part of a sequence's telling tokens that occur before, from which on all of it does."""
_MIN_WINDOW_TOKENS: Final = 4
"""Fewest tokens of a window, and fewest different tokens of a sequence whose tokens are compared."""
_MIN_BITS: Final = 2.5
"""Bits that a number tells, below which nothing is said: a model with some six different numbers repeats itself."""
_CONTINUED_SHARE: Final = 0.7
"""Part of the windows that occur before after which the next number is the same too. Where it is less, sequences have
windows in common from which they part, as rollouts of one prompt and those of a model with a short memory do, and
windows have to be longer."""
_SPARE_BITS: Final = 10
"""A window of independent tokens occurs again anywhere with probability 2^-10 at most."""


def distinct(recording: Recording) -> Recording:
    """The recording without sequences that repeat others, for whatever is concluded from it; it has their number."""
    return without_repeats(recording, *first_of_each(recording))


def without_repeats(recording: Recording, first: NDArray[np.bool_]) -> Recording:
    """The sequences that `first_of_each` marks, with the number of the others."""
    return replace(recording.only(first), repeated=recording.repeated + int((~first).sum()))


def recording_notes(recording: Recording) -> Iterator[str]:
    """Yield sentences about sides that are equal, swapped or rounded otherwise, and about repeated sequences."""
    if recording.identical:
        yield EQUAL_SIDES
    if not recording.density and (said := swapped(saturated(recording.train - recording.inference))):
        yield said
    if coarse := coarse_side(recording.train, recording.inference):
        yield coarse
    if recording.repeated:
        sequences = recording.lengths.size
        yield (
            f"{recording.repeated:,} of {recording.repeated + sequences:,} sequences repeat others, in whole or in "
            f"part: the same tokens or nearly the same log-probabilities; each counts once, which leaves {sequences:,}"
        )


def repeats_notes(recording: Recording) -> Iterator[str]:
    """Yield how many repeat others where all count, for what is rarely sampled would weigh more without them."""
    if repeated := distinct(recording).repeated:
        yield (
            f"{repeated:,} of {recording.lengths.size:,} sequences repeat others, in whole or in part, and count all "
            "the same: if they are copies and were not sampled again, the intervals are too narrow"
        )


def first_of_each(*recordings: Recording) -> list[NDArray[np.bool_]]:
    """Mark the sequences that count, bool [S] for each recording: the first, or longest, of each set of copies."""
    prompts = _repeating_prompts(recordings)
    first = _by_content(recordings, prompts)
    inference = np.concatenate([recording.inference for recording in recordings])
    lengths = np.concatenate([recording.lengths for recording in recordings])
    tokens = np.repeat(first, lengths)
    first[first] = ~_occurs_before(inference[tokens], lengths[first], prompts[first])
    return np.split(first, np.cumsum([recording.lengths.size for recording in recordings])[:-1])


def _repeating_prompts(recordings: Sequence[Recording]) -> NDArray[np.int64]:
    """Number of the prompt of each sequence that is probable enough to be sampled again for it, int64 [S]; -1 for none.

    A prompt is one observation of its step, however many rollouts it has, so that these repeats make no evidence.
    """
    numbers: dict[Hashable, int] = {}
    return np.array([
        -1 if total <= -_UNREPEATED_NATS or (name := prompt_of(row)) is None
        else numbers.setdefault((file, name), len(numbers))
        for file, recording in enumerate(recordings)
        for row, total in zip(recording.attributes, np.add.reduceat(recording.inference, recording.starts), strict=True)
    ], dtype=np.int64)  # fmt: skip


def _by_content(recordings: Sequence[Recording], prompts: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Mark the first sequence with its numbers on both sides, and with its tokens where these identify it."""
    first: list[bool] = []
    seen: dict[bytes, int] = {}
    for recording in recordings:
        ids = recording.token_ids
        for start, length in zip(recording.starts.tolist(), recording.lengths.tolist(), strict=True):
            part = slice(start, start + length)
            inference, keys = recording.inference[part], list[bytes]()
            if np.count_nonzero(inference) >= _MIN_TELLING_TOKENS:
                keys.append(_digest(recording.train[part], inference))
                if (
                    ids is not None
                    and inference.sum() <= -_UNREPEATED_NATS
                    and np.unique(ids[part]).size >= _MIN_WINDOW_TOKENS
                ):
                    keys.append(_digest(ids[part]))
            prompt = int(prompts[len(first)])
            first.append(all(key not in seen or seen[key] == prompt >= 0 for key in keys))
            for key in keys:
                seen.setdefault(key, prompt)
    return np.array(first, dtype=np.bool_)


def _digest(*numbers: NDArray[np.generic]) -> bytes:
    return blake2b(b"".join(number.tobytes() for number in numbers), digest_size=16).digest()


def _occurs_before(
    inference: NDArray[np.float64], lengths: NDArray[np.int64], prompts: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Mark sequences of which nearly all telling tokens lie in windows that longer or earlier ones have, bool [S]."""
    telling = np.isfinite(inference) & (inference < -_CERTAIN_NATS)
    owner = np.repeat(np.arange(lengths.size), lengths)[telling]
    size = np.bincount(owner, minlength=lengths.size)
    rounded = (
        np.floor(np.log(_ROUNDED_BELOW_NATS - inference[telling]) / _RELATIVE_RESOLUTION)
        .astype(np.int64)
        .view(np.uint64)
    )
    rank = np.empty(lengths.size, dtype=np.int64)
    rank[np.argsort(-size, kind="stable")] = np.arange(lengths.size)
    window, again = _recurring(rounded, owner, rank, prompts)
    covered = np.zeros(owner.size, dtype=np.bool_)
    for step in range(window):
        covered[again + step] = True
    found = np.bincount(owner[covered], minlength=lengths.size)
    return (size >= _MIN_TELLING_TOKENS) & (found >= _REPEATED_SHARE * size)


def _recurring(
    rounded: NDArray[np.uint64], owner: NDArray[np.int64], rank: NDArray[np.int64], prompts: NDArray[np.int64]
) -> tuple[int, NDArray[np.int64]]:
    """Tokens of a window, and where the windows begin that a sequence of a lower rank has, int64."""
    window = _window(rounded)
    rounded, owner = np.append(rounded, np.uint64(0)), np.append(owner, -1)  # entry after the last window
    while True:
        at = np.arange(max(owner.size - window, 0))
        at = at[owner[at] == owner[at + window - 1]]
        _, content = np.unique(_hashed(rounded, at, window), return_inverse=True)
        earliest = np.full(at.size, np.iinfo(np.int64).max)
        np.minimum.at(earliest, content, rank[owner[at]] * owner.size + at)
        before = earliest[content] % owner.size
        again = owner[before] != owner[at]
        at, before = at[again], before[again]
        on = (owner[at] == owner[at + window]) & (owner[before] == owner[before + window])
        if (rounded[at + window] == rounded[before + window])[on].sum() >= _CONTINUED_SHARE * on.sum():
            of, of_before = prompts[owner[at]], prompts[owner[before]]
            return window, at[(of < 0) | (of != of_before)]
        window *= 2


def _window(rounded: NDArray[np.uint64]) -> int:
    """Tokens after which chance alone makes hardly any window occur twice; the more, the fewer values there are."""
    _, counts = np.unique(rounded, return_counts=True)
    bits = -math.log2(np.square(counts / max(rounded.size, 1)).sum()) if rounded.size else 0.0
    needed = math.log2(max(rounded.size, 1)) + _SPARE_BITS
    return max(_MIN_WINDOW_TOKENS, math.ceil(needed / bits)) if bits >= _MIN_BITS else rounded.size + 1


def _hashed(rounded: NDArray[np.uint64], at: NDArray[np.int64], window: int) -> NDArray[np.uint64]:
    found = np.zeros(at.size, dtype=np.uint64)
    for step in range(window):
        found = (found ^ rounded[at + step]) * np.uint64(0x9E3779B97F4A7C15)
        found ^= found >> np.uint64(29)
    return found
