"""Digests of weights, which two programs compare instead of the tensors: 64 numbers each, on the tensor's device.

`places` is the sum, modulo 2^64, of a hash of each element's bits and its index; `values` the same without the index,
which does not change where a program stores a tensor in another order, and of the parts of a fused or a split tensor
adds up to that of the whole. Equal tensors have equal digests, others with a chance of about 2^-64: they find accidents
and are no defence against people. `sketch` holds 61 signed sums: of two tensors, the sum of the squares of their
differences is, on average over the signs, the squared distance of the tensors, with a relative error of about 18 %
(Alon, Matias and Szegedy 1999, "The Space Complexity of Approximating the Frequency Moments", 2.2).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Self

from kc_otel._extras import extra

with extra("torch", "a digest of weights"):
    import torch


_SUMS: Final = 61
"""A prime, so that rows and columns of a matrix do not fall into one of the sums."""
_BLOCK: Final = _SUMS << 16
"""Elements worked on at a time: four int64 copies of them are 128 MB."""
_STEP: Final = -7046029254386353131
"""The golden ratio in 64 bits, as a signed integer: Steele, Lea and Flood 2014, SplitMix64."""
_FIRST_MULTIPLIER: Final = -4658895280553007687
_SECOND_MULTIPLIER: Final = -7723592293110705685


@dataclass(frozen=True, slots=True)
class TensorDigest:
    """Digest of a tensor.

    Attributes:
        shape: Its shape.
        dtype: Number format of its elements, without `torch.`.
        places: Digest of its elements and their places, a signed integer of 64 bits.
        values: Digest of its elements, wherever they are; zeros do not count.
        squares: Sum of the elements' squares.
        sketch: Signed sums, 61 of them.
    """

    shape: tuple[int, ...]
    dtype: str
    places: int
    values: int
    squares: float
    sketch: tuple[float, ...]

    @property
    def norm(self) -> float:
        """Euclidean norm."""
        return math.sqrt(self.squares)

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def apart(self, other: Self) -> float:
        """Estimate of ||a - b|| / ||a||; of tensors of the same shape."""
        distance = math.dist(self.sketch, other.sketch)
        return distance / self.norm if self.squares else math.inf if distance else 0.0

    def to_plain(self) -> dict[str, Any]:
        """Return a mapping of plain values, for JSON."""
        return asdict(self)

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Self:
        """Return the digest that `to_plain` encoded.

        Raises:
            TypeError: If it is not that.
        """
        return cls(**{**plain, "shape": tuple(plain["shape"]), "sketch": tuple(plain["sketch"])})


@torch.no_grad()  # type: ignore[untyped-decorator]
def digest_of(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> TensorDigest:
    """The digest of a tensor.

    >>> weights = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> digest_of(weights) == digest_of(weights.clone()), digest_of(weights).places == digest_of(weights.T).places
    (True, False)
    >>> digest_of(weights).values == digest_of(weights.T).values
    True

    Args:
        tensor: Of any shape, on any device.
        dtype: Number format that it is rounded to first; None for its own.

    Raises:
        ValueError: If it has no elements to look at: a meta tensor, or one that is split over processes.
    """
    if tensor.is_meta:
        raise ValueError("the tensor is on the meta device: it has no values")
    if hasattr(tensor, "full_tensor"):
        raise ValueError("the tensor is split over processes (DTensor); give its full_tensor()")
    kind = dtype or tensor.dtype
    flat = tensor.detach().reshape(-1)
    totals = torch.zeros(2, dtype=torch.int64, device=flat.device)
    sums = torch.zeros(_SUMS + 1, dtype=torch.float64, device=flat.device)
    for start in range(0, flat.numel(), _BLOCK):
        part = flat[start : start + _BLOCK].to(kind)
        bits = _bits(part)
        places = _mixed(torch.arange(start + 1, start + part.numel() + 1, device=flat.device) * _STEP)
        totals[0] += _mixed(bits ^ places).sum()
        totals[1] += (_mixed(bits) * (bits != 0)).sum()
        numbers = part.double()
        sums[-1] += numbers.square().sum()
        signed = torch.where(places < 0, -numbers, numbers)
        sums[:-1] += torch.nn.functional.pad(signed, (0, -signed.numel() % _SUMS)).view(-1, _SUMS).sum(0)
    found: Sequence[float] = sums.tolist()
    places_total, values_total = totals.tolist()
    name = str(kind).removeprefix("torch.")
    return TensorDigest(tuple(tensor.shape), name, places_total, values_total, found[-1], tuple(found[:-1]))


def _bits(part: torch.Tensor) -> torch.Tensor:
    """The elements' bits as integers, int64 [n]."""
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return part.contiguous().view(sizes[part.element_size()]).to(torch.int64)


def _mixed(numbers: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finaliser, one to one on 64 bits, 0 to 0."""
    for shift, factor in ((30, _FIRST_MULTIPLIER), (27, _SECOND_MULTIPLIER)):
        numbers = (numbers ^ _shifted(numbers, shift)) * factor
    return numbers ^ _shifted(numbers, 31)


def _shifted(numbers: torch.Tensor, by: int) -> torch.Tensor:
    """Shifted to the right with zeros coming in, which signed integers do not have by themselves."""
    return (numbers >> by) & ((1 << (64 - by)) - 1)
