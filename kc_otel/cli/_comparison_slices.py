"""How a recording is cut into slices by attributes that no contract names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kc_otel.contract.slices import ALL
from kc_otel.instrument.recordings import Recording
from kc_otel.promotion.samples import Part

__all__ = ["by_attributes"]

_MOST: Final = 20
"""Values of an attribute that become slices of their own."""
_RANGES: Final = 4


def by_attributes(recording: Recording, names: Sequence[str]) -> list[Part]:
    """`all`, and a slice for each value of each attribute; of numbers with many values, for each quarter of them.

    Raises:
        ValueError: If no sequence has one of the attributes.
    """
    parts = [Part(ALL, recording)]
    for name in names:
        values = [attributes.get(name) for attributes in recording.attributes]
        if all(value is None for value in values):
            known = sorted({each for attributes in recording.attributes for each in attributes})
            msg = f"{recording.source}: no sequence has an attribute {name!r}; there are {', '.join(known) or 'none'}"
            raise ValueError(msg)
        given = [value for value in values if value is not None]
        counts = Counter(map(str, given))
        if len(counts) > _MOST and all(isinstance(value, int | float) for value in given):
            parts += _ranges(recording, name, np.array([np.nan if v is None else v for v in values], dtype=np.float64))
            continue
        of = np.array([None if value is None else str(value) for value in values], dtype=object)
        kept = sorted(value for value, _ in counts.most_common(_MOST))
        parts += [_part(recording, f"{name}={value}", of == value) for value in kept]
        rest = np.array([value is not None and value not in kept for value in of])
        if rest.any():
            parts.append(_part(recording, f"{name}=other", rest))
    return parts


def _part(recording: Recording, name: str, kept: NDArray[np.bool_]) -> Part:
    return Part(name, recording.only(kept.astype(np.bool_)) if kept.any() else None)


def _ranges(recording: Recording, name: str, values: NDArray[np.float64]) -> list[Part]:
    edges = np.unique(np.nanquantile(values, np.linspace(0.0, 1.0, _RANGES + 1), method="lower"))
    parts = []
    for place, (low, high) in enumerate(pairwise(edges)):
        last = place == edges.size - 2
        inside = (values >= low) & ((values <= high) if last else (values < high))
        parts.append(_part(recording, f"{name} in [{low:g}, {high:g}{']' if last else ')'}", inside))
    return parts
