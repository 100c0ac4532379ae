"""Weight versions per token: an update that comes while a sequence is sampled leaves it with tokens of several steps.

Drift needs nothing of it: every token has the probability that it was sampled with, and a sequence is drawn from what
these make together. What is claimed about versions is made version by version: `weights_lag` has an observation for
each step that sampled any token of a batch, in the slices of the sequences that hold such tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kc_otel.record import capture
from kc_otel.record.measure.arrays import as_bool, on_gpu

__all__ = ["BatchVersions", "as_version", "batch_versions", "split"]

_NAMED = 8
"""Versions that are spelled out; more are counted."""


@dataclass(frozen=True, slots=True, eq=False)
class BatchVersions:
    """Which steps sampled which sequences.

    Attributes:
        steps: The steps, rising, int64 [steps].
        members: Slices of the sequences that hold tokens of each step, bool array [steps, slices].
        straddling: Sequences that hold tokens of several.
    """

    steps: NDArray[np.int64]
    members: Any
    straddling: int

    def lags(self, train: int) -> NDArray[np.float64]:
        """How far each step is behind that of the training kernel, which none is ahead of, [steps]."""
        return (train - self.steps).astype(np.float64)

    def __str__(self) -> str:
        named = ",".join(str(step) for step in self.steps[-_NAMED:].tolist())
        return named if self.steps.size <= _NAMED else f"{self.steps.size} versions, the last {named}"


def as_version(weights: Any) -> int | str | None:
    """A weight version as it was given, or as a number of NumPy or torch.

    Raises:
        ValueError: If it is neither a whole number nor a name, or lies on a device, from where it would be waited for.
    """
    given = weights.item() if getattr(weights, "ndim", None) == 0 and not on_gpu(weights) else weights
    if isinstance(given, float) and given.is_integer():
        given = int(given)
    if given is None or isinstance(given, str | int):
        return given
    raise ValueError(f"weights: {type(weights).__name__} is no weight version; give an optimizer step, an int")


def split(weights: Any) -> tuple[int | str | None, Any]:
    """One version of all tokens, and versions of each: one of the two is None.

    Raises:
        ValueError: If there is one version, and it is neither a whole number nor a name.
    """
    if weights is None or isinstance(weights, str | int | float) or getattr(weights, "ndim", None) == 0:
        return as_version(weights), None
    return None, weights


def batch_versions(
    version: int | str | None, per_token: Any, mask: Any, shape: tuple[int, ...], membership: NDArray[np.bool_]
) -> BatchVersions | None:
    """The versions of a batch; None where they are not known as steps.

    Args:
        version: That of all tokens, where they have one.
        per_token: The step that sampled each token, integers [sequences, tokens]; None where one sampled all.
        mask: Which tokens count; None for all.
        shape: Sequences and tokens.
        membership: Slices of each sequence, bool [sequences, slices].

    Raises:
        ValueError: If they are not integers, or not one for each token.
    """
    if per_token is None:
        known = isinstance(version, int)
        return BatchVersions(np.array([version]), membership.any(axis=0, keepdims=True), 0) if known else None
    given = np.asarray(capture.on_host(per_token))
    counts = np.ones(shape, dtype=np.bool_) if mask is None else as_bool(capture.on_host(mask))
    if given.dtype.kind not in "iu" or counts.shape != given.shape:
        msg = f"weights: versions of tokens are {given.dtype} {given.shape}; give an integer step for each token"
        raise ValueError(msg)
    rows, places = np.nonzero(counts)
    steps, which = np.unique(given[rows, places].astype(np.int64), return_inverse=True)
    held = np.unique(rows * steps.size + which)  # one for each step of each sequence
    rows, which = np.divmod(held, max(steps.size, 1))
    members = np.zeros((steps.size, membership.shape[1]), dtype=np.bool_)
    np.logical_or.at(members, which, membership[rows])
    return BatchVersions(steps, members, int((np.bincount(rows, minlength=1) > 1).sum()))
