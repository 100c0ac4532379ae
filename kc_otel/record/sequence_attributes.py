"""Attributes of sequences in the forms that callers have them: for all alike, for each, or as columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kc_otel.contract.slices import Scalar

Attributes = Mapping[str, Scalar | Sequence[Scalar]] | Sequence[Mapping[str, Scalar]] | None
"""One mapping for each sequence, or one for all, in which a list has a value for each sequence."""
OwnAttributes = Mapping[str, Scalar] | Sequence[Mapping[str, Scalar]] | None
"""One mapping for each sequence, or one for all alike."""


def own_attributes(given: Attributes) -> OwnAttributes:
    """A copy that the caller cannot change any more, with columns as a mapping for each sequence.

    Raises:
        ValueError: If it is neither, or columns differ in length.
    """
    if given is None:
        return None
    if not isinstance(given, Mapping):
        rows = list(given)
        if not all(isinstance(row, Mapping) for row in rows):
            raise ValueError(f"attributes: {type(given).__name__} is no mapping, nor a list with one for each sequence")
        return [dict(row) for row in rows]
    columns = {name: _values(value) for name, value in given.items()}
    lengths = {name: len(values) for name, values in columns.items() if values is not None}
    if not lengths:
        return dict(given)  # type: ignore[arg-type]  # no value is a list
    if len(set(lengths.values())) > 1:
        said = ", ".join(f"{name} has {many}" for name, many in lengths.items())
        raise ValueError(f"attributes: {said} values; give as many as there are sequences")
    return [
        {name: given[name] if values is None else values[row] for name, values in columns.items()}  # type: ignore[misc]
        for row in range(next(iter(lengths.values())))
    ]


def _values(value: Any) -> list[Any] | None:
    """The values of a column; None where there is one value for all."""
    if isinstance(value, np.ndarray) and value.ndim == 1:
        return list(value.tolist())
    return list(value) if isinstance(value, list | tuple) else None
