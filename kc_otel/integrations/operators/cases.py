"""Cases for comparing operators: inputs of a shape, a dtype and a seed, with a name for reports."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from kc_otel.contract.fields import operator_name
from kc_otel.contract.slices import Scalar


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
    """One operator by two kernels, with its cases, as `kc-otel locate operators` reads it from a file.

    Attributes:
        operator: Name of the operator, as a contract's clauses have it.
        train: The training kernel's operator, or the reference.
        inference: The inference kernel's operator.
        cases: Cases to call them with.
        batch_sizes: Batches whose members are compared with the same members alone; see `compare_callables`.
        ulp_of: dtype whose units in the last place count; None for that of the inference kernel's output.

    Raises:
        ValueError: If the name cannot be an operator's, or there is no case.
    """

    operator: str
    train: Callable[..., Any]
    inference: Callable[..., Any]
    cases: Sequence[Case]
    batch_sizes: Sequence[int] = ()
    ulp_of: Any = None

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
            _Inputs(make, tuple(shape), dtype, seed),
            {"shape": _shape(shape), "dtype": _dtype(dtype), "seed": seed, **attributes},
            batched,
        )
        for shape in shapes
        for dtype in all_dtypes
        for seed in all_seeds
    ]


@dataclass(frozen=True, slots=True)
class _Inputs:
    make: Callable[[tuple[int, ...], Any, int], Sequence[Any]]
    shape: tuple[int, ...]
    dtype: Any
    seed: int

    def __call__(self) -> Sequence[Any]:
        return self.make(self.shape, self.dtype, self.seed)


def _shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def _dtype(dtype: Any) -> str:
    return str(getattr(dtype, "__name__", dtype)).removeprefix("torch.")
