"""One sequence as every importer gives it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kc_otel.contract.slices import Scalar
from kc_otel.recordings.recording import group_of, prompt_id

_LONGEST_TEXT: Final = 200
"""Characters from which a text is content, not an attribute."""


@dataclass(frozen=True, slots=True, eq=False)
class Imported:
    """One sequence of T tokens; what a file does not say is None.

    `train` and `inference` are log P and log Q in nats, `versions` the step of the weights that sampled each token.
    `train_kept` is the log of P's mass on the tokens that truncation kept, over which both sides are renormalised.
    """

    train: NDArray[np.float64]
    inference: NDArray[np.float64]
    attributes: Mapping[str, Scalar]
    token_ids: NDArray[np.int64] | None = None
    advantages: NDArray[np.float64] | None = None
    train_kept: NDArray[np.float64] | None = None
    versions: NDArray[np.int64] | None = None

    @property
    def weights(self) -> tuple[int | str | None, int | str | None]:
        """Versions of both kernels' weights, the training kernel's first."""
        return _version(self.attributes.get("train_weights")), _version(self.attributes.get("inference_weights"))

    @property
    def prompt(self) -> Scalar | None:
        """Name of the prompt."""
        return group_of(self.attributes)


def _version(value: object) -> int | str | None:
    return value if isinstance(value, int | str) and not isinstance(value, bool) else None


def imported(
    kept: NDArray[np.bool_],
    train: NDArray[np.float64],
    inference: NDArray[np.float64],
    attributes: Mapping[str, Scalar],
    *,
    weights: tuple[int | None, int | None] = (None, None),
    token_ids: Any = None,
    advantages: Any = None,
    prompt_ids: Any = None,
) -> Imported | None:
    """The tokens of a sequence that count, bool [T]; None for none. Ids and advantages of another shape are left out.

    A ValueError if the sides are not one number for each token.
    """
    if not train.shape == inference.shape == kept.shape:
        raise ValueError(f"log-probabilities and mask have {train.size}, {inference.size}, {kept.size} entries")
    if not kept.any():
        return None
    ids, gains = (
        None if values is None or np.shape(values) != kept.shape else np.asarray(values)[kept]
        for values in (token_ids, advantages)
    )
    named = zip(("train_weights", "inference_weights"), weights, strict=True)
    known: dict[str, Scalar] = {name: version for name, version in named if version is not None}
    if prompt_ids is not None:
        known["prompt_id"] = prompt_id(np.asarray(prompt_ids, dtype=np.int64))
    return Imported(
        train[kept],
        inference[kept],
        {**known, **attributes},
        None if ids is None else ids.astype(np.int64),
        None if gains is None else gains.astype(np.float64),
    )


Records = Iterator[tuple[str, Callable[[], Imported | None]]]
"""The place of each record of a file, and what makes its sequence: None if no token counts.

It raises KeyError for a column that is missing, and ValueError or TypeError for other numbers than one for each token.
"""


def plain(values: Mapping[str, Any]) -> dict[str, Scalar]:
    """The values that can be attributes: truth values, numbers, and texts that are names rather than content."""
    found: dict[str, Scalar] = {}
    for name, value in values.items():
        if isinstance(value, np.generic):
            value = value.item()  # noqa: PLW2901 - what NumPy keeps in an object array
        if isinstance(value, bool | int | float) or (isinstance(value, str) and len(value) <= _LONGEST_TEXT):
            found[str(name)] = value
    return found
