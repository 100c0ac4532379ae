"""Whether two torch kernels have the same checkpoint, and which tensors differ by more than rounding."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kc_otel._extras import extra
from kc_otel.diagnose.boundaries import Boundary
from kc_otel.diagnose.located import NotComparableError
from kc_otel.diagnose.torch_kernel import TorchKernel
from kc_otel.diagnose.watched_kernel import WatchedKernel

with extra("torch", "locating in a torch module"):
    import torch

__all__ = ["TensorDifference", "tensor_differences"]

_UNRELATED: Final = 0.5
"""Cosine below which two matrices have nothing to do with each other; of quantised ones it is above 0.9."""


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """A parameter of both kernels.

    Attributes:
        name: Its name in the inference kernel.
        relative: Root mean square of the difference, in shares of the training kernel's; inf where that is zero.
        cosine: Between the two, as vectors.
        is_matrix: Whether it has two axes or more.
        rounding: What rounding to the inference kernel's number format would make it at most.
    """

    name: str
    relative: float
    cosine: float
    is_matrix: bool
    rounding: float


@torch.no_grad()  # type: ignore[untyped-decorator]
def tensor_differences(train: TorchKernel, inference: WatchedKernel) -> Mapping[Boundary, tuple[TensorDifference, ...]]:
    """Parameters of operators that both have, by boundary, compared where they are floating and of one shape.

    Raises:
        NotComparableError: If the kernels have different numbers of layers, or most matrices have nothing to do with
            each other.
    """
    ours, theirs = ({each: name for name, each in side.named.items()} for side in (train, inference))
    layers = [sorted({each.layer for each in side if each.layer is not None}) for side in (ours, theirs)]
    if layers[0] != layers[1]:
        raise NotComparableError(
            f"the training kernel has {len(layers[0])} layers and the inference kernel {len(layers[1])}: "
            "they are not the same checkpoint, or layers of one are not recognised"
        )
    found = {key: _of_module(train, ours[key], inference, theirs[key]) for key in ours if key in theirs}
    matrices = [each for differences in found.values() for each in differences if each.is_matrix]
    unrelated = [each.name for each in matrices if each.cosine < _UNRELATED]
    if len(unrelated) > max(1, len(matrices) // 2):
        raise NotComparableError(
            f"{len(unrelated)} of {len(matrices)} tensors have nothing to do with each other (cosine below "
            f"{_UNRELATED:g}), such as {unrelated[0]}: the kernels have not the same checkpoint; give both the same"
        )
    return found


def _of_module(
    train: TorchKernel, train_name: str, inference: WatchedKernel, inference_name: str
) -> tuple[TensorDifference, ...]:
    ours = dict(train.module.get_submodule(train_name).named_parameters(recurse=False))
    found = []
    for name, theirs in inference.module.get_submodule(inference_name).named_parameters(recurse=False):
        own = ours.get(name)
        if own is None or own.shape != theirs.shape or not theirs.is_floating_point():
            continue
        a, b = own.detach().double().flatten().cpu(), theirs.detach().double().flatten().cpu()
        size, error = float(a.norm()), float((b - a).norm())
        cosine = float(a @ b / (a.norm() * b.norm()).clamp_min(1e-300)) if error else 1.0
        difference = error / size if size else (math.inf if error else 0.0)
        rounding = float(torch.finfo(theirs.dtype).eps) / 2
        found.append(TensorDifference(f"{inference_name}.{name}", difference, cosine, own.ndim > 1, rounding))
    return tuple(sorted(found, key=lambda each: -each.relative))
