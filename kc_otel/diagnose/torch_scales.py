"""Static scales of a quantised kernel's inputs, and what lies beyond them: values that calibration has not seen.

A kernel that quantises activations with scales that were fixed beforehand cuts off what is larger. The scale is a
tensor `input_scale` of the operator, as compressed-tensors writes and vLLM reads it, one for all inputs or for each
channel.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kc_otel._extras import extra
from kc_otel.contract.words import number
from kc_otel.diagnose.token_sequences import TokenSequence
from kc_otel.diagnose.torch_kernel import TorchKernel
from kc_otel.diagnose.watched_kernel import WatchedKernel

with extra("torch", "locating in a torch module"):
    import torch

__all__ = ["Saturated", "saturated_scales"]

_NAME = "input_scale"
_SEQUENCES = 8
"""Sequences that are looked at."""


@dataclass(frozen=True, slots=True)
class Saturated:
    """A scale that is too small for some of its operator's inputs.

    Attributes:
        tensor: Its name in the kernel.
        share: Share of the inputs that are cut off.
        channel: The channel whose largest input is farthest beyond.
        times: How many times what the scale can hold that input is.
    """

    tensor: str
    share: float
    channel: int
    times: float

    def __str__(self) -> str:
        return (
            f"tensor {self.tensor} cuts off {number(100 * self.share)} % of its inputs, "
            f"in channel {self.channel} up to {number(self.times)} times what it holds"
        )


def saturated_scales(
    train: TorchKernel, inference: WatchedKernel, modules: Iterable[str], sequences: Sequence[TokenSequence]
) -> dict[str, Saturated]:
    """By module of the inference kernel, its scale where inputs lie beyond it.

    Args:
        train: Gives the inputs.
        inference: Has the scales.
        modules: Which of its modules are looked at.
        sequences: What both are run on; the first eight are.
    """
    scales = {
        name: (module, scale)
        for name in modules
        if isinstance(scale := getattr(module := inference.module.get_submodule(name), _NAME, None), torch.Tensor)
    }
    if not scales:
        return {}
    some = sequences[:_SEQUENCES]
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
            largest = times.amax(0)
            channel = int(largest.argmax())
            share = float((times > 1.0).float().mean())
            found[name] = Saturated(f"{name}.{_NAME}", share, channel, float(largest[channel]))
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
