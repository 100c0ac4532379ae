"""Tensors in which two torch kernels' checkpoints differ by more than rounding, and inputs beyond static scales.

Values beyond static scales are ones that calibration has not seen. A kernel that quantises activations with scales that
were fixed beforehand cuts off what is larger. The scale is a tensor `input_scale` of the operator, as
compressed-tensors writes and vLLM reads it, one for all inputs or for each channel.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kc_otel._extras import extra
from kc_otel.contract.words import number
from kc_otel.diagnose.boundaries import Boundary
from kc_otel.diagnose.located import NotComparableError, same_layers
from kc_otel.diagnose.token_sequences import TokenSequence
from kc_otel.diagnose.torch_kernel import TorchKernel
from kc_otel.diagnose.watched_kernel import WatchedKernel

with extra("torch", "locating in a torch module"):
    import torch

_SCALE_NAME = "input_scale"
_MAX_SEQUENCES = 8
"""Sequences that are looked at."""


def saturated_scales(
    train: TorchKernel, inference: WatchedKernel, modules: Iterable[str], sequences: Sequence[TokenSequence]
) -> dict[str, tuple[str, str]]:
    """Return the scales of the inference kernel's modules that cut off inputs that the training kernel gives.

    By module, the tensor's name and a sentence, of the first eight sequences.
    """
    scales = {
        name: (module, scale)
        for name in modules
        if isinstance(scale := getattr(module := inference.module.get_submodule(name), _SCALE_NAME, None), torch.Tensor)
    }
    if not scales:
        return {}
    some = sequences[:_MAX_SEQUENCES]
    alone = [[row] for row in range(len(some))]  # without padding
    own, _ = train.run(some, alone)
    beyond: dict[str, list[torch.Tensor]] = {name: [] for name in scales}
    handles = [
        module.register_forward_pre_hook(_times(beyond[name], scale, _most(module)))
        for name, (module, scale) in scales.items()
    ]
    try:
        inference.run(some, alone, replaced=own, taken=False)
    finally:
        for handle in handles:
            handle.remove()
    found = {}
    for name, parts in beyond.items():
        times = torch.cat(parts)
        if bool((times > 1.0).any()):
            tensor, largest = f"{name}.{_SCALE_NAME}", times.amax(0)
            share, channel = float((times > 1.0).float().mean()), int(largest.argmax())
            held = f"{number(float(largest[channel]))} times what it can hold"
            cut = f"cuts off {number(100 * share)} % of its inputs, in channel {channel} up to {held}"
            found[name] = tensor, f"tensor {tensor} {cut}"
    return found


def _times(found: list[torch.Tensor], scale: torch.Tensor, most: float) -> Any:
    """A hook that keeps inputs [tokens, channels] as multiples of what a scale can hold."""

    def hook(_: torch.nn.Module, args: tuple[Any, ...]) -> None:
        if args and isinstance(args[0], torch.Tensor):
            inputs = args[0].detach().float().abs().flatten(0, -2)
            # A value that rounds to the last step is held.
            found.append((inputs / (scale.float() * (most + 0.5))).cpu())

    return hook


def _most(module: torch.nn.Module) -> float:
    """The largest value of the format that inputs are kept in: FP8's where the weights are, int8's otherwise."""
    weight = getattr(module, "weight", None)
    if isinstance(weight, torch.Tensor) and weight.dtype.is_floating_point and weight.dtype.itemsize == 1:
        return float(torch.finfo(weight.dtype).max)
    return 127.0


_MIN_COSINE: Final = 0.5
"""Cosine below which two matrices have nothing to do with each other; of quantised ones it is above 0.9."""


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """A parameter of both kernels, by its name in the inference kernel.

    `relative` is the root mean square of the difference, in shares of the training kernel's, inf where that is zero;
    `rounding` the largest one that the inference kernel's number format explains.
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
    ours, theirs = ({boundary: name for name, boundary in side.named.items()} for side in (train, inference))
    same_layers(ours, theirs)
    found = {key: _of_module(train, ours[key], inference, theirs[key]) for key in ours if key in theirs}
    matrices = [difference for differences in found.values() for difference in differences if difference.is_matrix]
    unrelated = [matrix.name for matrix in matrices if matrix.cosine < _MIN_COSINE]
    if len(unrelated) > max(1, len(matrices) // 2):
        raise NotComparableError(
            f"{len(unrelated)} of {len(matrices)} tensors have nothing to do with each other (cosine below "
            f"{_MIN_COSINE:g}), such as {unrelated[0]}: the kernels have not the same checkpoint; give both the same"
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
    return tuple(sorted(found, key=lambda entry: -entry.relative))
