"""Observations from two outputs of an operator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kc_otel.contract.input_reasons import remedy
from kc_otel.record import capture
from kc_otel.record.measure.arrays import as_bool, is_tensor
from kc_otel.record.measure.operator_drift import OperatorDrift, compare_outputs
from kc_otel.record.work import OperatorComparison, RouteComparison

_MAX_FLOAT32: Final = float(np.finfo(np.float32).max)
_COMPARISONS_PER_BLOCK: Final = 1 << 22
"""Comparisons of two experts' ids at a time."""
_MIN_CHOICES: Final = 256
"""Choices from which a share of them is told from chance."""
_CHANCE_DISAGREEMENT: Final = 0.5
"""Disagreement of unrelated routes from which it is told from that of kernels, which is about 0.1."""
_ALMOST_CHANCE: Final = 0.8
"""Share of that from which it is chance: neighbouring tokens have more experts in common than any two."""


@dataclass(frozen=True, slots=True, eq=False)
class Observed:
    """Observations of operators in one batch.

    Attributes:
        members: Members of the outputs' first axis: sequences, as a rule.
        operators: Of each operator its name, the member that each observation is of, [n], and the observations by the
            registry's key, float64 [n] each.
        invalid: Failed input checks: the reason, members and how many there are of them, one where nobody knows which
            they are, and the finding in words.
    """

    members: int
    operators: Sequence[tuple[str, NDArray[np.intp], Mapping[str, NDArray[np.float64]]]]
    invalid: list[tuple[str, Sequence[int], int, str | None]]


def observed(work: OperatorComparison) -> Observed:
    """Compare the rows of two outputs, [..., features]; one axis alone is one row.

    Raises:
        ValueError: If they cannot be compared.
    """
    train, inference = work.train, work.inference
    members = train.shape[0] if train.ndim > 1 else 1
    if train.shape != inference.shape:
        shapes = " and ".join(str(tuple(output.shape)) for output in (train, inference))
        return Observed(
            1, [], [("shape_mismatch", [0], 1, f"the outputs of operator {work.operator} have shapes {shapes}")]
        )
    if is_tensor(train) != is_tensor(inference):
        train, inference = capture.on_host(train), capture.on_host(inference)
    drift = compare_outputs(train, inference, mask=work.mask, ulp_of=work.ulp_of)
    member = drift.rows // int(np.prod(train.shape[1:-1], dtype=np.int64))
    why = f"rows of {work.operator} are not finite on one side"
    found = [(work.operator, member, values_of(drift, of_batches=work.of_batches))] if member.size else []
    return Observed(members, found, [("operator_not_finite", [0] * drift.not_finite, 1, why)])


def observed_routes(work: RouteComparison) -> Observed:
    """Compare the routes of a batch's tokens, of all layers' routers together and of each.

    Raises:
        ValueError: If they cannot be compared.
    """
    train, inference = capture.on_host(work.train), capture.on_host(work.inference)
    if train.shape != inference.shape or train.ndim not in (3, 4):
        raise ValueError(f"routes {train.shape} and {inference.shape} are not both [sequences, tokens, layers, k]")
    if train.ndim == 3:
        train, inference = train[None], inference[None]
    counts = np.ones(train.shape[:2], np.bool_) if work.mask is None else as_bool(capture.on_host(work.mask))
    sequence, token = np.nonzero(counts.reshape(train.shape[:2]))
    ours, theirs = train[sequence, token], inference[sequence, token]
    apart = route_disagreement(ours, theirs)
    absent = [(side.astype(np.int64) < 0).any(-1) for side in (ours, theirs)]
    missing = (absent[0] != absent[1]).any(1) | (absent[0] & absent[1]).all(1)
    unrelated = as_unrelated(ours, theirs, apart)
    apart[:, unrelated] = np.nan
    known = ~np.isnan(apart)
    routers = [("router", sequence[np.nonzero(known)[0]], {"route_disagreement": apart[known]})]
    for layer in np.flatnonzero(known.any(0)):
        here = known[:, layer]
        routers.append((f"router.{layer}", sequence[here], {"route_disagreement": apart[here, layer]}))
    lacking = [0] * np.unique(sequence[missing]).size
    invalid: list[tuple[str, Sequence[int], int, str | None]] = [("no_routes", lacking, 1, None)]
    if unrelated.any():
        layers = np.flatnonzero(unrelated)
        said = ", ".join(map(str, layers[:8])) + ("..." if layers.size > 8 else "")
        every = range(train.shape[0])
        invalid.append(("unrelated_routes", every, len(every), f"layers {said}: {remedy('unrelated_routes')}"))
    return Observed(train.shape[0], routers, invalid)


def values_of(drift: OperatorDrift, *, of_batches: bool = False) -> dict[str, NDArray[np.float64]]:
    """Observations by the registry's key, float64 [rows] each.

    An error without end, of a row where only the second output is not zero, is the largest float32.

    Args:
        drift: Two outputs, row by row.
        of_batches: Whether they are of one kernel, alone and in a batch.
    """
    relative = np.minimum(drift.relative, _MAX_FLOAT32)
    if of_batches:
        return {"operator_batch_dependence": relative}
    return {
        "operator_max_abs": np.minimum(drift.max_abs, _MAX_FLOAT32),
        "operator_relative": relative,
        "operator_ulp": np.minimum(drift.ulp, _MAX_FLOAT32),
        "operator_cosine": np.minimum(drift.cosine, 2.0),
    }


def output_of(returned: Any) -> Any:
    """The array of what an operator or module returned: itself, or the first of a tuple, a list or a model's output.

    Raises:
        ValueError: If there is none.
    """
    if isinstance(returned, Mapping):
        returned = tuple(returned.values())
    if isinstance(returned, tuple | list):
        returned = next((item for item in returned if _is_array(item)), None)
    if not _is_array(returned):
        raise ValueError(f"the operator returned {type(returned).__name__}, not an array or a tuple with one")
    return returned


def _is_array(data: Any) -> bool:
    return is_tensor(data) or isinstance(data, np.ndarray)


def route_disagreement(train: Any, inference: Any) -> NDArray[np.float64]:
    """Share of a token's experts that the other kernel did not choose, by token and layer.

    >>> route_disagreement([[[0, 3]], [[1, 2]]], [[[3, 0]], [[1, 5]]])
    array([[0. ],
           [0.5]])

    Args:
        train: Ids of the experts that the training kernel chose, integers [tokens, layers, k], in any order.
        inference: Those of the inference kernel, same shape. A negative id is a place where nothing was chosen.

    Returns:
        float64 [tokens, layers]; nan where either kernel chose nothing.

    Raises:
        ValueError: If they are not such arrays; one that says of each expert whether it was chosen is none.
    """
    ours, theirs = np.asarray(train), np.asarray(inference)
    for name, ids in (("train", ours), ("inference", theirs)):
        if ids.dtype.kind not in "iu" or ids.ndim != 3 or ids.shape != ours.shape or not ids.shape[2]:
            raise ValueError(
                f"{name}: {ids.dtype} {ids.shape} are no experts' ids [tokens, layers, k]; train has {ours.shape}"
            )
    tokens, layers, k = ours.shape
    found = np.empty((tokens, layers))
    step = max(_COMPARISONS_PER_BLOCK // max(layers * k * k, 1), 1)
    for start in range(0, tokens, step):
        a, b = ours[start : start + step], theirs[start : start + step]
        for name, ids in (("train", a), ("inference", b)):
            ordered = np.sort(ids, axis=-1)
            if ((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).any():
                raise ValueError(f"{name}: names an expert twice for one token; give the ids of the k that were chosen")
        agreed = (a[..., :, None] == b[..., None, :]).any(-1).mean(-1)
        nothing = (a.astype(np.int64) < 0).any(-1) | (b.astype(np.int64) < 0).any(-1)
        found[start : start + step] = np.where(nothing, np.nan, 1.0 - agreed)
    return found


def as_unrelated(train: Any, inference: Any, disagreement: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return the layers whose routes differ as often as those of unrelated tokens or layers.

    The chance of it comes from how busy each expert is: of k draws without regard to the other side, expert e is among
    them as often as it is chosen at all, so that two sides share sum_e f_e g_e of their k experts, k/E where all are
    equally busy.

    Args:
        train: Ids of the experts that the training kernel chose, integers [tokens, layers, k].
        inference: Those of the inference kernel.
        disagreement: Their `route_disagreement`, [tokens, layers].

    Returns:
        bool [layers].
    """
    ours, theirs = np.asarray(train), np.asarray(inference)
    found = np.zeros(ours.shape[1], dtype=np.bool_)
    for layer in range(ours.shape[1]):
        known = ~np.isnan(disagreement[:, layer])
        tokens, k = int(np.count_nonzero(known)), ours.shape[2]
        if tokens * k < _MIN_CHOICES:
            continue
        sides = [side[known, layer].astype(np.int64).ravel() for side in (ours, theirs)]
        experts = max(int(side.max()) for side in sides) + 1
        busy = [np.bincount(side, minlength=experts) / tokens for side in sides]
        chance = 1.0 - float(busy[0] @ busy[1]) / k
        apart = float(disagreement[known, layer].mean())
        found[layer] = chance >= _CHANCE_DISAGREEMENT and apart >= _ALMOST_CHANCE * chance
    return found
