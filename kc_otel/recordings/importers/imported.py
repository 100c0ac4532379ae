"""Common result of every importer: sequences with both kernels' log-probabilities, and their other data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kc_otel.contract.slices import Scalar
from kc_otel.recordings.read_table import records
from kc_otel.recordings.recording import RecordingError, group_of, prompt_id
from kc_otel.recordings.table import Ragged, RaggedTable

_LONGEST_TEXT = 200
"""Characters from which a text is content, not an attribute."""


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
        prompt_ids: Prompt tokens, int64, padded as the others of the file; None where the file has none.
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


@dataclass(slots=True)
class Refusals:
    """Records that could not become sequences, by `contract.input_reasons`; the first of each with its place."""

    counts: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)

    def add(self, reason: str, why: str, count: int = 1) -> None:
        """Count records; `why` names the file, the line and the field."""
        self.counts[reason] += count
        self.first.setdefault(reason, why)


def needed(path: Path, batch: Mapping[str, NDArray[Any]], names: Sequence[str], hint: str) -> list[NDArray[Any]]:
    """Return tensors of a batch; a RecordingError names those that are missing, and says how to have them."""
    if missing := [name for name in names if name not in batch]:
        raise RecordingError(f"{path}: has no {' and no '.join(missing)}, only {', '.join(sorted(batch))}; {hint}")
    return [batch[name] for name in names]


def batch_rows(
    path: Path,
    refusals: Refusals,
    sides: Mapping[str, NDArray[Any]],
    masks: Mapping[str, NDArray[Any]],
    about: Callable[[int], tuple[Mapping[str, Scalar], tuple[int | None, int | None]]],
    *,
    token_ids: NDArray[Any] | None = None,
    advantages: NDArray[Any] | None = None,
    prompt_ids: NDArray[Any] | Sequence[NDArray[Any]] | None = None,
    processing: Mapping[str, Scalar] | None = None,
) -> Iterator[Imported]:
    """Cut a padded batch into its sequences; a token counts where none of the masks is 0.

    Sides, masks, ids and advantages are [sequences, tokens]; `about` gives attributes and weight versions of a row.

    Raises:
        RecordingError: If shapes do not fit.
    """
    train, inference = (side.astype(np.float64) for side in sides.values())
    shapes = [array.shape for array in (train, inference, *masks.values())]
    if train.ndim != 2 or len(set(shapes)) > 1:
        said = ", ".join(map(str, shapes))
        raise RecordingError(f"{path}: {', '.join((*sides, *masks))} have shapes {said}, not one [sequences, tokens]")
    for row, kept in enumerate(np.logical_and.reduce([mask != 0 for mask in masks.values()])):
        ids, gains, prompt = (None if values is None else values[row] for values in (token_ids, advantages, prompt_ids))
        found = cut(kept, train[row], inference[row], ids, gains, prompt, *about(row), processing=processing)
        if found is None:
            refusals.add("no_tokens", f"{path}: row {row}: {' and '.join(masks)} leave no token")
        else:
            yield found


def line_rows(
    path: Path, refusals: Refusals, sequence: Callable[[dict[str, Any], str], Imported | None], masks: str
) -> Iterator[Imported]:
    """Make a sequence of each line's object and place; those that cannot be one are counted.

    `sequence` raises KeyError for a column that is missing, and returns None where the masks leave no token.

    Raises:
        RecordingError: If a line is no JSON object, or `sequence` raises it.
    """
    for place, record in records(path):
        try:
            found = sequence(record, place)
        except RecordingError:
            raise
        except KeyError as error:
            refusals.add("no_logprobs", f"{place}: has no {error}")
        except (ValueError, TypeError) as error:
            refusals.add("shape_mismatch", f"{place}: {error}")
        else:
            if found is None:
                refusals.add("no_tokens", f"{place}: {masks} leave no token")
            else:
                yield found


def cut(
    kept: NDArray[np.bool_],
    train: NDArray[np.float64],
    inference: NDArray[np.float64],
    token_ids: Any,
    advantages: NDArray[Any] | None,
    prompt_ids: Any,
    attributes: Mapping[str, Scalar],
    weights: tuple[int | None, int | None],
    *,
    processing: Mapping[str, Scalar] | None = None,
) -> Imported | None:
    """Take the tokens of a row that count, [T]; None for none. Ids and advantages of another shape are left out.

    Raises:
        ValueError: If the sides are not one number for each token.
    """
    if not train.shape == inference.shape == kept.shape:
        raise ValueError(f"log-probabilities and mask have {train.size}, {inference.size}, {kept.size} entries")
    if not kept.any():
        return None
    ids, gains = (
        None if values is None or np.shape(values) != kept.shape else np.asarray(values)[kept]
        for values in (token_ids, advantages)
    )
    return Imported(
        train[kept],
        inference[kept],
        None if ids is None else ids.astype(np.int64),
        None if gains is None else gains.astype(np.float64),
        attributes,
        weights,
        processing,
        prompt_ids=None if prompt_ids is None else np.asarray(prompt_ids, dtype=np.int64),
    )


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


def floats(values: Any) -> NDArray[np.float64]:
    """A list of numbers; null is NaN, which is how a file without NaN writes it.

    Raises:
        ValueError: If it holds anything else than numbers, or lists of them.
    """
    if not isinstance(values, list):
        raise ValueError(f"{values!r:.60} is not a list of numbers")  # noqa: TRY004 - a wrong value in a file
    found = np.array([np.nan if value is None else value for value in values], dtype=np.float64)
    if found.ndim != 1:
        raise ValueError(f"has shape {found.shape}, not one number per token")
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
