"""Sampling of comparisons: a share of them is measured, the same ones on both sides of a pair."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Hashable
from typing import Any, Final

import numpy as np

_HASH_RANGE: Final = float(1 << 64)


def position_of(key: Hashable) -> float:
    """Return a key's position in [0, 1): the same in every process and at every time, uniform over keys.

    Keys that are equal fall on one place, also where one is a number or text of NumPy's.

    >>> position_of(np.int64(7)) == position_of(7), position_of((np.str_("a"), 7.0)) == position_of(("a", 7))
    (True, True)
    """
    digest = hashlib.blake2b(repr(_plain(key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") / _HASH_RANGE


def _plain(key: Any) -> Any:
    """The key with Python's own text and numbers in it."""
    if isinstance(key, tuple):
        return tuple(map(_plain, key))
    if isinstance(key, str):
        return str.__str__(key)
    given = key.item() if isinstance(key, np.generic) else key
    if isinstance(given, int) or (isinstance(given, float) and given.is_integer()):
        return int(given)
    return given


class Sampler:
    """Takes a share of comparisons: by hash where a comparison has a key, else at random.

    A `rate` that is a function is asked anew for every comparison, so that it can follow what the evaluator asks for.
    """

    def __init__(self, rate: float | Callable[[], float]) -> None:
        if not callable(rate) and not 0.0 <= rate <= 1.0:
            raise ValueError(f"sampling: {rate!r} is not a share; write a number from 0 to 1")
        self._rate = rate
        self._asked: Callable[[float], float] | None = None
        # Its own generator: drawing from the global one would change what the caller's program draws next.
        self._random = random.Random()  # noqa: S311 - a share, not a secret

    def share(self) -> float:
        """The share now; ValueError if the function returned something that is none."""
        share = float(self._rate() if callable(self._rate) else self._rate)
        if 0.0 <= share <= 1.0 and self._asked is not None:
            share = float(self._asked(share))
        if not 0.0 <= share <= 1.0:
            raise ValueError(f"sampling: the function returned {share!r}; it must return a number from 0 to 1")
        return share

    def ask(self, asked: Callable[[float], float]) -> None:
        """Set a function that turns the configured share into the one in use."""
        self._asked = asked

    def takes(self, key: Hashable | None = None) -> bool:
        """Return True if a comparison is measured."""
        share = self.share()
        if share >= 1.0:
            return True
        return (self._random.random() if key is None else position_of(key)) < share
