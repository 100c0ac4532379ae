"""Weight versions of the tokens of a batch, and the parts of its sequences by their age.

An update that comes while a sequence is sampled leaves it with tokens of several steps. Every token has the probability
that it was sampled with. Where its weights are the training kernel's, the ratio of the two is the kernels' drift; where
they are older, it is that and the change of the policy together. A sequence that holds tokens of both is measured in
two parts, each by its own tokens; what is said of sequences is said of the whole one, which is not the kernels' alone.
`weights_lag` has an observation for each step that sampled any token of a batch, in the slices of the sequences that
hold such tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kc_otel.record.measure.arrays import on_gpu, on_host

_MAX_NAMED_VERSIONS = 8  # versions that are spelled out; more are counted
_STEP_DIGITS = 7  # digits of a step, at most; a longer text of digits is a name


class BatchVersions(NamedTuple):
    """Training steps that sampled a batch, and the sequences of each."""

    steps: NDArray[np.int64]  # rising
    members: Any  # slices of the sequences that hold tokens of each step, bool [steps, slices]

    def __str__(self) -> str:
        named = ",".join(str(step) for step in self.steps[-_MAX_NAMED_VERSIONS:].tolist())
        return named if self.steps.size <= _MAX_NAMED_VERSIONS else f"{self.steps.size} versions, the last {named}"


def as_version(weights: Any) -> int | str | None:
    """A weight version as it was given, or as a number of NumPy or torch; engines report a step as text.

    ValueError if it is neither a whole number nor a name, or lies on a device, from where it would be waited for.
    """
    given = weights.item() if getattr(weights, "ndim", None) == 0 and not on_gpu(weights) else weights
    if isinstance(given, float) and given.is_integer():
        given = int(given)
    if isinstance(given, str) and given.isdecimal() and len(given) <= _STEP_DIGITS:
        given = int(given)
    if given is None or isinstance(given, str | int):
        return given
    raise ValueError(f"weights: {type(weights).__name__} is no weight version; give an optimizer step, an int")


def split(weights: Any) -> tuple[int | str | None, Any]:
    """Return the version of all tokens, or the versions of each; the other is None."""
    if weights is None or isinstance(weights, str | int | float) or getattr(weights, "ndim", None) == 0:
        return as_version(weights), None
    return None, weights


def batch_versions(
    version: int | str | None, per_token: Any, counts: NDArray[np.bool_], membership: NDArray[np.bool_]
) -> BatchVersions | None:
    """The versions of the tokens that count, [sequences, tokens]; None where they are not known as steps.

    All tokens have one `version`, or `per_token` has the step that sampled each. ValueError if these are not integers,
    or not one for each token.
    """
    if per_token is None:
        known = isinstance(version, int)
        return BatchVersions(np.array([version]), membership.any(axis=0, keepdims=True)) if known else None
    given = on_host(per_token)
    if given.dtype.kind not in "iu" or counts.shape != given.shape:
        raise ValueError(
            f"weights: versions of tokens are {given.dtype} {given.shape}; give an integer step for each token"
        )
    rows, places = np.nonzero(counts)
    steps, which = np.unique(given[rows, places].astype(np.int64), return_inverse=True)
    held = np.unique(rows * steps.size + which)  # one for each step of each sequence
    rows, which = np.divmod(held, max(steps.size, 1))
    members = np.zeros((steps.size, membership.shape[1]), dtype=np.bool_)
    np.logical_or.at(members, which, membership[rows])
    return BatchVersions(steps, members)


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """Sequences of a batch by the age of the weights that sampled them: the first part of each, then the others."""

    row: NDArray[np.int64]  # sequence that each part is of [parts]
    lag: list[int]  # versions that its weights are behind the training kernel's, those of its oldest token
    mask: NDArray[np.bool_] | None = None  # which tokens each part holds, bool [parts, tokens]; None for all

    @property
    def again(self) -> NDArray[np.bool_]:
        """Mask of the parts whose sequence has an earlier part, bool [parts]."""
        return np.not_equal(np.arange(self.row.size), self.row)

    @property
    def whole(self) -> NDArray[np.intp]:
        """Part that each part's whole sequence counts at, which is the older of two, [parts]."""
        found = np.arange(self.row.size)
        found[self.row[self.again]] = np.flatnonzero(self.again)
        return found


def parts_by_lag(
    train: int | str | None, version: int | str | None, per_token: Any, counts: NDArray[np.bool_]
) -> Parts | None:
    """Split each sequence into the part that the training kernel's weights sampled and older parts; None if unknown.

    `train` is the training kernel's version; the others are as in `batch_versions`, which has found them to be right.
    """
    rows = np.arange(counts.shape[0], dtype=np.int64)
    if not isinstance(train, int):
        return None
    if per_token is None:
        return Parts(rows, [max(train - version, 0)] * rows.size) if isinstance(version, int) else None
    lag = np.where(counts, np.maximum(train - on_host(per_token).astype(np.int64), 0), 0)
    oldest, stale = lag.max(axis=1, initial=0), lag > 0
    both = np.logical_and(stale.any(axis=1), (counts & ~stale).any(axis=1))
    if not both.any():
        return Parts(rows, oldest.tolist())
    first = np.where(both[:, None], counts & ~stale, counts)
    return Parts(
        np.concatenate([rows, rows[both]]),
        [*np.where(both, 0, oldest).tolist(), *oldest[both].tolist()],
        np.concatenate([first, stale[both]]),
    )
