"""What every importer reads a file into: sequences with both kernels' log-probabilities, and what else is known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kc_otel.contract.slices import Scalar

__all__ = ["ImportFileError", "Imported", "Refusals", "floats", "plain"]

_LONGEST_TEXT = 200
"""Characters from which a text is content, not an attribute."""


class ImportFileError(ValueError):
    """A file cannot be imported; the message names it, what was found, and what to do."""


@dataclass(frozen=True, slots=True, eq=False)
class Imported:
    """One sequence.

    Attributes:
        train: log P(y) of the sampled tokens under the training kernel, nats, float64 [T].
        inference: log Q(y) of the same tokens under the kernel that sampled them, float64 [T].
        token_ids: The tokens, int64 [T]; None where the file has none.
        advantages: float64 [T]; None where the file has none.
        attributes: What slices are made of.
        weights: Weight versions of the training and the inference kernel, as far as the file says.
        train_kept: log of P's mass on the tokens that truncation kept, nats, float64 [T]: both sides are renormalised
            over them; None where the file has none.
        versions: Step of the weights that sampled each token, int64 [T]; None where the file has none.
        processing: Temperature and the like of both sides alike; None where the file does not say.
    """

    train: NDArray[np.float64]
    inference: NDArray[np.float64]
    token_ids: NDArray[np.int64] | None = None
    advantages: NDArray[np.float64] | None = None
    attributes: Mapping[str, Scalar] = field(default_factory=dict)
    weights: tuple[int | str | None, int | str | None] = (None, None)
    processing: Mapping[str, Scalar] | None = None
    train_kept: NDArray[np.float64] | None = None
    versions: NDArray[np.int64] | None = None


@dataclass(slots=True)
class Refusals:
    """Records that could not become sequences, by reason of `measure.reasons`; the first of each with its place."""

    counts: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)

    def add(self, reason: str, why: str, count: int = 1) -> None:
        """Count records; `why` names the file, the line and the field."""
        self.counts[reason] += count
        self.first.setdefault(reason, why)


def floats(values: Any) -> NDArray[np.float64]:
    """A list of numbers; null is NaN, which is how a file without NaN writes it.

    Raises:
        ValueError: If it holds anything else than numbers, or lists of them.
    """
    if not isinstance(values, list):
        msg = f"{values!r:.60} is not a list of numbers"
        raise ValueError(msg)  # noqa: TRY004 - a wrong value in a file
    found = np.array([np.nan if value is None else value for value in values], dtype=np.float64)
    if found.ndim != 1:
        msg = f"has shape {found.shape}, not one number per token"
        raise ValueError(msg)
    return found


def plain(values: Mapping[str, Any]) -> dict[str, Scalar]:
    """The values that can be attributes: truth values, numbers, and texts that are names rather than content."""
    found: dict[str, Scalar] = {}
    for name, value in values.items():
        if isinstance(value, np.generic):
            value = value.item()  # noqa: PLW2901 - what NumPy keeps in an object array
        if isinstance(value, bool | int | float) or (isinstance(value, str) and len(value) <= _LONGEST_TEXT):
            found[str(name)] = value
    return found
