"""Drift of one operator: how far two kernels' outputs of an attention, a norm, a matrix product are apart, per row.

A row is one output vector, the last axis of the output: a token's, as a rule. The difference is taken in float64. Both
outputs are NumPy arrays or both torch tensors, on any device, of any floating dtype.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kc_otel.contract.input_reasons import remedy
from kc_otel.contract.registry.clause_metrics import RECORDED
from kc_otel.record.measure.arrays import as_bool, is_tensor, on_gpu, on_host
from kc_otel.record.work import QueuedBatch

_BLOCK: Final = 1 << 17  # elements worked on at a time on a CPU: four float64 copies of them stay in cache
_DEVICE_BLOCK: Final = 1 << 22  # the same on a GPU: four float64 copies are 128 MiB
_MAX_FLOAT32: Final = float(np.finfo(np.float32).max)
_COMPARISONS_PER_BLOCK: Final = 1 << 22  # comparisons of two experts' ids at a time
_MIN_CHOICES: Final = 256  # choices from which a share of them is told from chance
_CHANCE_DISAGREEMENT: Final = 0.5
"""Disagreement of unrelated routes from which it is told from that of kernels, which is about 0.1."""
_ALMOST_CHANCE: Final = 0.8
"""Share of that from which it is chance: neighbouring tokens have more experts in common than any two."""


@dataclass(frozen=True, slots=True, eq=False)
class OperatorDrift:
    """Difference of two outputs, one number per row, float64 [rows] in host memory; rounding alone costs 0.5 ulp."""

    max_abs: NDArray[np.float64]  # largest |a - b| of the row, in the output's own unit
    relative: NDArray[np.float64]  # ||a - b|| / ||a||, Euclidean; 0 where both are zero, inf where only a is
    ulp: NDArray[np.float64]  # largest |a - b| in units in the last place; inf where a is zero throughout and b is not
    cosine: NDArray[np.float64]  # 1 - cos(a, b), in [0, 2]; 0 where both are zero, 1 where one of them is
    not_finite: int  # rows left out, as an output is NaN, or infinite and the other is not the same
    rows: NDArray[np.intp]  # which row of the output each number is about, all axes but the last flattened


def compare_outputs(train: Any, inference: Any, *, mask: Any = None) -> OperatorDrift:
    """Compare two outputs of one operator, [..., features].

    >>> import numpy as np
    >>> output = np.float32([[1.0, 2.0], [3.0, 4.0]])
    >>> compare_outputs(output, np.nextafter(output, np.float32(9))).ulp
    array([1., 1.])

    Units in the last place: Goldberg 1991, "What Every Computer Scientist Should Know About Floating-Point Arithmetic",
    1.2; norms and normwise errors: Higham 2002, "Accuracy and Stability of Numerical Algorithms", chapter 6.

    `mask` says which rows count, of the output's first axes: [batch, tokens] for an output [batch, tokens, heads,
    features]. The units in the last place are those of the dtype of `inference`. ValueError if the outputs cannot be
    compared.
    """
    if tuple(train.shape) != tuple(inference.shape):
        raise ValueError(f"inference: shape {tuple(inference.shape)} is not that of train, {tuple(train.shape)}")
    if not train.shape or 0 in train.shape:
        raise ValueError(f"train: shape {tuple(train.shape)} has no rows to compare")
    if is_tensor(train) != is_tensor(inference):
        raise ValueError("train, inference: one is a torch tensor and the other is not; convert one of them")
    for name, values in (("train", train), ("inference", inference)):
        if not (values.dtype.is_floating_point if is_tensor(values) else values.dtype.kind == "f"):
            raise ValueError(f"{name}: dtype {values.dtype} does not hold floating numbers")
    rows = _counted(mask, tuple(train.shape[:-1]))
    train, inference = (side.reshape(-1, train.shape[-1]) for side in (train, inference))
    if rows.size < train.shape[0]:
        train, inference = (_picked(side, rows) for side in (train, inference))
    if not rows.size:
        nothing = np.zeros(0)
        return OperatorDrift(nothing, nothing, nothing, nothing, 0, rows)
    step = max((_DEVICE_BLOCK if on_gpu(train) else _BLOCK) // train.shape[1], 1)
    starts = range(0, train.shape[0], step)
    with np.errstate(all="ignore"):
        parts = [_rows(train[start : start + step], inference[start : start + step]) for start in starts]
    found = np.concatenate([part for part, _ in parts], axis=1)
    kept = np.concatenate([fine for _, fine in parts])
    max_abs, relative, cosine, most = found[:, kept]
    ulp = _in_ulps(max_abs, most, *_format(inference.dtype))
    return OperatorDrift(max_abs, relative, ulp, cosine, int(kept.size - kept.sum()), rows[kept])


def _counted(mask: Any, shape: tuple[int, ...]) -> NDArray[np.intp]:
    """Flat indices of the rows that count, of an output whose axes but the last are `shape`."""
    if mask is None:
        return np.arange(int(np.prod(shape, dtype=np.int64)))
    kept = as_bool(mask)
    if kept.shape != shape[: kept.ndim]:
        raise ValueError(f"mask: shape {kept.shape} is not that of the output's first axes, of {shape}")
    spread = kept.reshape(kept.shape + (1,) * (len(shape) - kept.ndim))
    return np.flatnonzero(np.broadcast_to(spread, shape))


def _picked(rows: Any, wanted: NDArray[np.intp]) -> Any:
    if not is_tensor(rows):
        return rows[wanted]
    import torch  # noqa: PLC0415 - a caller with a tensor has loaded it

    return rows.index_select(0, torch.from_numpy(wanted).to(rows.device))


def _format(dtype: Any) -> tuple[float, float]:
    """Distance from 1 to the next number, and the smallest normal number, of a floating dtype of NumPy or torch."""
    if type(dtype).__module__ == "torch":
        import torch  # noqa: PLC0415 - a caller with a dtype of torch has loaded it

        info = torch.finfo(dtype)
        return float(info.eps), float(info.tiny)
    known = np.finfo(dtype)
    return float(known.eps), float(known.tiny)


def _in_ulps(
    distance: NDArray[np.float64], largest: NDArray[np.float64], eps: float, tiny: float
) -> NDArray[np.float64]:
    """Distances in units in the last place of the largest magnitudes."""
    _, exponent = np.frexp(np.maximum(largest, tiny))
    with np.errstate(over="ignore"):
        found = np.where(distance > 0.0, distance / eps / np.ldexp(1.0, exponent - 1), 0.0)
    return np.where((largest == 0.0) & (distance > 0.0), np.inf, found)


def _rows(train: Any, inference: Any) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """[4, rows] of max_abs, relative, cosine and the largest |a|, and which rows are finite, in host memory."""
    if not is_tensor(train):
        return _reduced(train.astype(np.float64), inference.astype(np.float64), np)
    import torch  # noqa: PLC0415 - a caller with a tensor has loaded it

    with torch.no_grad():
        a, b = (side.detach().to(train.device, torch.float64) for side in (train, inference))
        found, fine = _reduced(a, b, torch)
        return on_host(found), on_host(fine)


def _reduced(a: Any, b: Any, library: Any) -> tuple[Any, Any]:
    finite = library.isfinite(a) & library.isfinite(b)
    # Both -inf, as in masked attention scores, is agreement.
    same = (a == b) | finite
    fine = same.all(-1)
    a, b = (library.where(finite, values, library.zeros_like(values)) for values in (a, b))
    difference = abs(a - b)
    apart, left, right = ((values * values).sum(-1) ** 0.5 for values in (difference, a, b))
    tiny = np.finfo(np.float64).tiny
    product = (a * b).sum(-1) / (left * right).clip(min=tiny)
    both, none = (left > 0) & (right > 0), (left == 0) & (right == 0)
    cosine = library.where(both, (1.0 - product).clip(min=0.0), 1.0 - library.where(none, product + 1.0, product * 0.0))
    relative = library.where(
        left > 0, apart / left.clip(min=tiny), library.where(apart > 0, apart * np.inf, apart * 0.0)
    )
    stack = library.stack([library.amax(difference, -1), relative, cosine, library.amax(abs(a), -1)])
    return stack, fine


class Observed(NamedTuple):
    """Observations in one batch, of operators or of none.

    Of each failed input check `invalid` has the reason, members, how many of them there are (one where nobody knows
    which they are), and the finding in words.
    """

    members: int  # of the outputs' first axis: sequences, as a rule
    # operator, the member that each observation is of [n], and observations by the registry's key, float64 [n] each
    observations: Sequence[tuple[str, NDArray[np.intp], Mapping[str, NDArray[np.float64]]]]
    invalid: list[tuple[str, Sequence[int], int, str | None]]


def observed(work: QueuedBatch) -> Observed:
    """Take a program's own observations, or make those of two outputs or of two kernels' routes."""
    return {"operator": _of_outputs, "routes": _of_routes, "value": _of_program}[work.kind](work)


def _of_program(work: QueuedBatch) -> Observed:
    quantity, values = work.settings["quantity"], np.atleast_1d(on_host(work.arrays["value"])).astype(np.float64)
    known = RECORDED[quantity]
    inside = (values >= known.low) & (values <= known.high) & np.isfinite(values)
    if values.ndim != 1 or not inside.all():
        raise ValueError(f"{quantity}: {values} are not numbers from {known.low:g} to {known.high:g}")
    return Observed(values.size, [("", np.arange(values.size), {quantity: values})], [])


def _of_outputs(work: QueuedBatch) -> Observed:
    """Compare the rows of two outputs, [..., features]; one axis alone is one row."""
    train, inference, operator = work.arrays["train"], work.arrays["inference"], work.settings["operator"]
    members = train.shape[0] if train.ndim > 1 else 1
    if train.shape != inference.shape:
        shapes = " and ".join(str(tuple(output.shape)) for output in (train, inference))
        return Observed(1, [], [("shape_mismatch", [0], 1, f"the outputs of operator {operator} have shapes {shapes}")])
    if is_tensor(train) != is_tensor(inference):
        train, inference = on_host(train), on_host(inference)
    drift = compare_outputs(train, inference, mask=work.arrays["mask"])
    member = drift.rows // int(np.prod(train.shape[1:-1], dtype=np.int64))
    why = f"rows of {operator} are NaN, or infinite on one side"
    values = values_of(drift, of_batches=work.settings["of_batches"])
    found = [(operator, member, values)] if member.size else []
    return Observed(members, found, [("operator_not_finite", [0] * drift.not_finite, 1, why)])


def _of_routes(work: QueuedBatch) -> Observed:
    """Compare the routes of a batch's tokens, of all layers' routers together and of each."""
    train, inference, mask = on_host(work.arrays["train"]), on_host(work.arrays["inference"]), work.arrays["mask"]
    if train.shape != inference.shape or train.ndim not in (3, 4):
        raise ValueError(f"routes {train.shape} and {inference.shape} are not both [sequences, tokens, layers, k]")
    if train.ndim == 3:
        train, inference = train[None], inference[None]
    counts = np.ones(train.shape[:2], np.bool_) if mask is None else as_bool(on_host(mask))
    sequence, token = np.nonzero(counts.reshape(train.shape[:2]))
    ours, theirs = train[sequence, token], inference[sequence, token]
    apart = route_disagreement(ours, theirs)
    absent = [(side.astype(np.int64) < 0).any(-1) for side in (ours, theirs)]
    missing = (absent[0] != absent[1]).any(1) | np.all(absent[0] & absent[1], axis=1)
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

    An error without end, of a row where only the second output is not zero, is the largest float32. With `of_batches`
    the outputs are of one kernel, alone and in a batch.
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
    """The array of what an operator or module returned: itself, or the first of a tuple, a list or a model's output."""
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
    """Share of a token's experts that the other kernel did not choose, [tokens, layers]; nan where one chose nothing.

    >>> route_disagreement([[[0, 3]], [[1, 2]]], [[[3, 0]], [[1, 5]]])
    array([[0. ],
           [0.5]])

    Ids of the experts are integers [tokens, layers, k], in any order; a negative one is a place where nothing was
    chosen. ValueError for others, such as an array that says of each expert whether it was chosen.
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
    """Return the layers whose routes differ as often as those of unrelated tokens or layers, bool [layers].

    The chance of it comes from how busy each expert is: of k draws without regard to the other side, expert e is among
    them as often as it is chosen at all, so that two sides share sum_e f_e g_e of their k experts, k/E where all are
    equally busy. `disagreement` is their `route_disagreement`.
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
