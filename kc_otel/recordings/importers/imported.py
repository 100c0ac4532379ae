"""One sequence as every importer gives it, and the records that could not become one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kc_otel.contract.slices import Scalar
from kc_otel.recordings.recording import group_of, prompt_id
from kc_otel.recordings.table import Ragged, RaggedTable

_LONGEST_TEXT: Final = 200
"""Characters from which a text is content, not an attribute."""


@dataclass(frozen=True, slots=True, eq=False)
class Imported:
    """One sequence of T tokens; what a file does not say is None.

    `train` and `inference` are log P and log Q in nats. `weights` are the versions of both kernels' weights, and
    `versions` the step of those that sampled each token. `train_kept` is the log of P's mass on the tokens that
    truncation kept, over which both sides are renormalised. `processing` is of both sides alike.
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
    prompt_ids: NDArray[np.int64] | None = None

    @property
    def prompt(self) -> Hashable:
        """Name of the prompt: the one that the file gives it, or its tokens; None where it has neither."""
        named = group_of(self.attributes)
        return self.prompt_ids.tobytes() if named is None and self.prompt_ids is not None else named

    def only(self, kept: NDArray[np.bool_]) -> Imported | None:
        """The tokens that count, bool [T]; None for none. Ids and advantages of another shape are left out.

        Raises:
            ValueError: If the sides are not one number for each token.
        """
        if not self.train.shape == self.inference.shape == kept.shape:
            raise ValueError(
                f"log-probabilities and mask have {self.train.size}, {self.inference.size}, {kept.size} entries"
            )
        if not kept.any():
            return None
        ids, gains = (
            None if values is None or np.shape(values) != kept.shape else np.asarray(values)[kept]
            for values in (self.token_ids, self.advantages)
        )
        return replace(
            self,
            train=self.train[kept],
            inference=self.inference[kept],
            token_ids=None if ids is None else ids.astype(np.int64),
            advantages=None if gains is None else gains.astype(np.float64),
            prompt_ids=None if self.prompt_ids is None else np.asarray(self.prompt_ids, dtype=np.int64),
        )


Records = Iterator[tuple[str, Callable[[], Imported | None]]]
"""The place of each record of a file, and what makes its sequence: None if no token counts.

It raises KeyError for a column that is missing, and ValueError or TypeError for other numbers than one for each token.
"""


@dataclass(slots=True)
class Refusals:
    """Records that could not become sequences, by `contract.input_reasons`; the first of each with its place."""

    counts: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)

    def add(self, reason: str, why: str) -> None:
        """Count a record; `why` names the file, the line and the field."""
        self.counts[reason] += 1
        self.first.setdefault(reason, why)


def table_of(source: str, rows: Sequence[Imported]) -> RaggedTable:
    """Put sequences into one table; columns that only some of them have are left out.

    Weight versions and processing become attributes, as a recording's columns of these names are.
    """
    columns: dict[str, list[Any]] = {
        "train": [row.train if row.train_kept is None else row.train + row.train_kept for row in rows],
        "inference": [row.inference for row in rows],
    }
    for role in ("token_ids", "advantages", "train_kept", "versions"):
        values = [getattr(row, role) for row in rows]
        if rows and not any(value is None for value in values):
            columns[role] = values
    attributes = []
    for row in rows:
        weights = zip(("train_weights", "inference_weights"), row.weights, strict=True)
        known = {name: version for name, version in weights if version is not None}
        if row.prompt_ids is not None:
            known = {"prompt_id": prompt_id(row.prompt_ids), **known}
        attributes.append({**known, **(row.processing or {}), **row.attributes})
    names = {role: f"{role} log-probabilities" if role in ("train", "inference") else role for role in columns}
    ragged = {role: Ragged.of_rows(values) for role, values in columns.items()}
    return RaggedTable(source, ragged, names, tuple(attributes), lambda row: f"sequence {row}")


def plain(values: Mapping[str, Any]) -> dict[str, Scalar]:
    """The values that can be attributes: truth values, numbers, and texts that are names rather than content."""
    found: dict[str, Scalar] = {}
    for name, value in values.items():
        if isinstance(value, np.generic):
            value = value.item()  # noqa: PLW2901 - what NumPy keeps in an object array
        if isinstance(value, bool | int | float) or (isinstance(value, str) and len(value) <= _LONGEST_TEXT):
            found[str(name)] = value
    return found
