"""From two outputs of an operator to the observations that are recorded of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kc_otel.record import capture
from kc_otel.record.measure.arrays import as_bool, is_tensor
from kc_otel.record.measure.operator_drift import OperatorDrift, compare_outputs
from kc_otel.record.measure.routes import route_disagreement
from kc_otel.record.work import OperatorComparison, RouteComparison

__all__ = ["Observed", "observed", "observed_routes", "output_of", "values_of"]

_LARGEST: Final = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True, eq=False)
class Observed:
    """What was observed of an operator in one batch.

    Attributes:
        members: Members of the outputs' first axis: sequences, as a rule.
        member: Member that each observation is of, [n].
        values: Observations by the registry's key, float64 [n] each.
        not_finite: Rows that are NaN or infinite on one side only.
    """

    members: int
    member: NDArray[np.intp]
    values: Mapping[str, NDArray[np.float64]]
    not_finite: int


def observed(work: OperatorComparison) -> Observed:
    """Compare the rows of two outputs, [..., features]; one axis alone is one row.

    Raises:
        ValueError: If they cannot be compared.
    """
    train, inference = work.train, work.inference
    if is_tensor(train) != is_tensor(inference):
        train, inference = capture.on_host(train), capture.on_host(inference)
    drift = compare_outputs(train, inference, mask=work.mask, ulp_of=work.ulp_of)
    members = train.shape[0] if train.ndim > 1 else 1
    per_member = int(np.prod(train.shape[1:-1], dtype=np.int64))
    values = values_of(drift, of_batches=work.of_batches)
    return Observed(members, drift.rows // per_member, values, drift.not_finite)


def observed_routes(work: RouteComparison) -> tuple[int, list[tuple[str, NDArray[np.intp], NDArray[np.float64]]]]:
    """How many sequences there are; and of all layers' routers together, then of each, its name and observations.

    Observations are the sequence that each is of, [n], and `route_disagreement`, [n].

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
    apart = route_disagreement(train[sequence, token], inference[sequence, token])
    known = ~np.isnan(apart)
    found = [("router", sequence[np.nonzero(known)[0]], apart[known])]
    found += [
        (f"router.{each}", sequence[known[:, each]], apart[known[:, each], each])
        for each in range(apart.shape[1])
        if known[:, each].any()
    ]
    return train.shape[0], found


def values_of(drift: OperatorDrift, *, of_batches: bool = False) -> dict[str, NDArray[np.float64]]:
    """Observations by the registry's key, float64 [rows] each.

    An error without end, of a row where only the second output is not zero, is the largest float32.

    Args:
        drift: Two outputs, row by row.
        of_batches: Whether they are of one kernel, alone and in a batch.
    """
    relative = np.minimum(drift.relative, _LARGEST)
    if of_batches:
        return {"operator_batch_dependence": relative}
    return {
        "operator_max_abs": np.minimum(drift.max_abs, _LARGEST),
        "operator_relative": relative,
        "operator_ulp": np.minimum(drift.ulp, _LARGEST),
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
        returned = next((each for each in returned if _is_array(each)), None)
    if not _is_array(returned):
        raise ValueError(f"the operator returned {type(returned).__name__}, not an array or a tuple with one")
    return returned


def _is_array(data: Any) -> bool:
    return is_tensor(data) or isinstance(data, np.ndarray)
