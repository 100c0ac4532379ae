"""Two callables on the same inputs, case by case: how far their outputs are apart, and whether the batch matters.

A callable is a function, a `torch.nn.Module`, or an operator of `torch.ops`, such as one that `torch.library` defines.
This is for tests, notebooks and `kc-otel locate operators`: unlike a recorder it lets errors through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from kc_otel.contract.fields import operator_name
from kc_otel.contract.slices import Scalar
from kc_otel.record.measure.arrays import is_tensor
from kc_otel.record.operator_drift import OperatorDrift, compare_outputs, output_of, values_of
from kc_otel.record.work import measuring

if TYPE_CHECKING:
    from kc_otel.record.recorder import Recorder

__all__ = ["Case", "CaseReport", "OperatorPair", "cases_over", "compare_callables"]

_MEMBERS_ALONE: Final = 8  # members of a batch that are computed alone as well: each takes a call


@dataclass(frozen=True, slots=True)
class Case:
    """Inputs that two operators are called with.

    Attributes:
        name: Name in a report.
        inputs: Makes the positional arguments; called once per comparison. Each operator gets a copy of its own.
        attributes: Attributes that decide the slices of a contract.
        batched: Positions of the arguments whose first axis is the batch, if others (weights, a shared mask) belong to
            every member; None if all have it.
        mask: Returns which rows of the output count, over its first axes; None if all do.
    """

    name: str
    inputs: Callable[[], Sequence[Any]]
    attributes: Mapping[str, Scalar] = field(default_factory=dict)
    batched: tuple[int, ...] | None = None
    mask: Callable[[], Any] | None = None


@dataclass(frozen=True, slots=True)
class OperatorPair:
    """One operator by two kernels, with its cases, as a program or the file of `kc-otel locate operators` has it.

    Attributes:
        operator: Name of the operator, as a contract's clauses have it.
        train: The training kernel's operator, or the reference.
        inference: The inference kernel's operator.
        cases: Cases to call them with.
        batch_sizes: For each size n, the first n members of the case's batch are given to the inference kernel
            together, and each of the first 8 of them alone.

    Raises:
        ValueError: If the name cannot be an operator's, or there is no case.
    """

    operator: str
    train: Callable[..., Any]
    inference: Callable[..., Any]
    cases: Sequence[Case]
    batch_sizes: Sequence[int] = ()

    def __post_init__(self) -> None:
        operator_name(self.operator)
        if not self.cases:
            raise ValueError(f"cases: there is none for {self.operator}; give at least one Case")


def cases_over(
    make: Callable[[tuple[int, ...], Any, int], Sequence[Any]],
    shapes: Iterable[Sequence[int]],
    dtypes: Iterable[Any],
    *,
    seeds: Iterable[int] = (0,),
    attributes: Mapping[str, Scalar] = MappingProxyType({}),
    batched: tuple[int, ...] | None = None,
) -> list[Case]:
    """A case for each shape, dtype and seed, with these three as attributes.

    >>> import numpy as np
    >>> def make(shape, dtype, seed):
    ...     return (np.random.default_rng(seed).normal(size=shape).astype(dtype),)
    >>> [case.name for case in cases_over(make, [(4, 8)], ["float32", "float16"])]
    ['4x8 float32 seed 0', '4x8 float16 seed 0']

    Args:
        make: Called as `make(shape, dtype, seed)` for the positional arguments.
        shapes: Shapes, in the terms of `make`.
        dtypes: dtypes of NumPy or torch, or their names.
        seeds: Seeds of the random numbers.
        attributes: Further attributes of every case.
        batched: As in `Case`.
    """
    all_dtypes, all_seeds = list(dtypes), list(seeds)
    return [
        Case(
            " ".join([_shape(shape), _dtype(dtype), f"seed {seed}", *(f"{k}={v}" for k, v in attributes.items())]),
            partial(make, tuple(shape), dtype, seed),
            {"shape": _shape(shape), "dtype": _dtype(dtype), "seed": seed, **attributes},
            batched,
        )
        for shape in shapes
        for dtype in all_dtypes
        for seed in all_seeds
    ]


def _shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def _dtype(dtype: Any) -> str:
    return str(getattr(dtype, "__name__", dtype)).removeprefix("torch.")


@dataclass(frozen=True, slots=True, eq=False)
class CaseReport:
    """Result of one case.

    Attributes:
        operator: Name of the operator.
        case: Name of the case.
        attributes: The case's attributes.
        dtype: dtype of the inference kernel's output.
        drift: The two outputs, row by row.
        batches: By batch size, the inference kernel's rows alone against the same rows in such a batch.
    """

    operator: str
    case: str
    attributes: Mapping[str, Scalar]
    dtype: str
    drift: OperatorDrift
    batches: Mapping[int, OperatorDrift]

    def values(self) -> dict[str, NDArray[np.float64]]:
        """Every observation, by the registry's key; of `operator_batch_dependence` only where it was measured."""
        found = values_of(self.drift)
        of_batches = [values_of(batch, of_batches=True)["operator_batch_dependence"] for batch in self.batches.values()]
        if of_batches:
            found["operator_batch_dependence"] = np.concatenate(of_batches)
        return found

    @property
    def not_finite(self) -> int:
        """Rows that are NaN, or infinite on one side alone, or alone and not in a batch; they are no observations."""
        return self.drift.not_finite + sum(batch.not_finite for batch in self.batches.values())

    def summary(self) -> dict[str, float]:
        """The numbers of a table: counts, largest values and order statistics; nan where there are no rows.

        `p50` and `p99.9` are observed values that at least that share of the rows does not exceed.
        """
        values = self.values()
        ulp, relative = values["operator_ulp"], values["operator_relative"]
        return {
            "rows": float(ulp.size),
            "not_finite": float(self.drift.not_finite),
            "max_abs": _largest(values["operator_max_abs"]),
            "relative_p50": _quantile(relative, 0.5),
            "relative_p99.9": _quantile(relative, 0.999),
            "relative_max": _largest(relative),
            "ulp_p50": _quantile(ulp, 0.5),
            "ulp_p99.9": _quantile(ulp, 0.999),
            "ulp_max": _largest(ulp),
            "cosine_max": _largest(values["operator_cosine"]),
            "batch_dependence_max": _largest(values.get("operator_batch_dependence", np.zeros(0))),
        }


def compare_callables(pair: OperatorPair, recorder: Recorder | None = None) -> list[CaseReport]:
    """Call both operators of a pair on every case and compare what they return.

    >>> import numpy as np
    >>> case = Case("ones", lambda: [np.ones((2, 4), np.float32)])
    >>> pair = OperatorPair("copy", lambda x: x, lambda x: np.nextafter(x, np.float32(2)), [case])
    >>> (report,) = compare_callables(pair)
    >>> report.summary()["ulp_max"]
    1.0

    Each gets its own copy of the inputs, so that operators that work in place do not disturb the other. Where one
    returns a tuple, its first array counts. torch runs without autograd. A recorder records the observations too,
    without sampling, under the cases' attributes.

    Raises:
        ValueError: If outputs cannot be compared, or a batch is larger than a case's.
    """
    return [_report(pair, case, recorder) for case in pair.cases]


def _report(pair: OperatorPair, case: Case, recorder: Recorder | None) -> CaseReport:
    operator = pair.operator
    try:
        with measuring(None):
            inputs = list(case.inputs())
            outputs = [output_of(kernel(*_copies(inputs))) for kernel in (pair.train, pair.inference)]
            mask = None if case.mask is None else case.mask()
            drift = compare_outputs(*outputs, mask=mask)
            if recorder is not None:
                recorder.compare_operator(operator, *outputs, mask=mask, attributes=case.attributes, presampled=True)
            batches = {}
            for size in pair.batch_sizes:
                alone, together = _in_batch(pair.inference, inputs, case.batched, size)
                batches[size] = compare_outputs(alone, together)
                if recorder is not None:
                    recorder.compare_operator(
                        operator, alone, together, attributes=case.attributes, of_batches=True, presampled=True
                    )
    except Exception as error:
        error.add_note(f"while comparing {operator} on case {case.name!r}")
        raise
    dtype = str(outputs[1].dtype).removeprefix("torch.")
    return CaseReport(operator, case.name, dict(case.attributes), dtype, drift, batches)


def _in_batch(
    operator: Callable[..., Any], inputs: Sequence[Any], batched: Sequence[int] | None, size: int
) -> tuple[Any, Any]:
    """Outputs of the first members of a batch of so many, computed alone and in the batch, [members, ...] each.

    A kernel whose reductions are laid out by batch size gives different numbers.
    """
    batched = range(len(inputs)) if batched is None else batched
    lengths = {len(inputs[position]) for position in batched}
    if len(lengths) != 1:
        raise ValueError(
            f"batched: arguments {list(batched)} have first axes of {sorted(lengths)}; name those that hold the batch"
        )
    (room,) = lengths
    if not 1 <= size <= room:
        raise ValueError(f"batch_sizes: {size} is not within 1..{room}, the members of the case's batch")

    def of(members: slice) -> Any:
        arguments = [given[members] if position in batched else given for position, given in enumerate(inputs)]
        return output_of(operator(*_copies(arguments)))

    together = of(slice(size))
    alone = [of(slice(member, member + 1)) for member in range(min(_MEMBERS_ALONE, size))]
    if is_tensor(together):
        import torch  # noqa: PLC0415 - a caller with a tensor has loaded it

        return torch.cat(alone), together[: len(alone)]
    return np.concatenate(alone), np.asarray(together)[: len(alone)]


def _copies(inputs: Sequence[Any]) -> list[Any]:
    return [
        item.clone() if is_tensor(item) else item.copy() if isinstance(item, np.ndarray) else item for item in inputs
    ]


def _largest(values: NDArray[np.float64]) -> float:
    return float(values.max()) if values.size else float("nan")


def _quantile(values: NDArray[np.float64], rank: float) -> float:
    return float(np.quantile(values, rank, method="inverted_cdf")) if values.size else float("nan")
