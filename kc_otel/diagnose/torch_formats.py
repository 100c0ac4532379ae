"""Weights as an inference kernel would keep them, rounded in torch: what a number format alone does to a model.

Integers are symmetric and rounded to the nearest, with one scale for an output channel or for a group of inputs; FP8
has one scale for a tensor. That is what `torchao`, `llm-compressor` and vLLM's own `quantization="fp8"` do without
calibration. What is calibrated (GPTQ, AWQ, SmoothQuant) cannot be made here: give the checkpoint that its tool wrote.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from kc_otel._extras import extra

with extra("torch", "rounding the weights of a torch module"):
    import torch

__all__ = [
    "FORMATS",
    "KV_FORMATS",
    "WeightFormat",
    "rounded_activations",
    "rounded_to_fp8",
    "rounded_weight",
    "rounding_cache",
]

_SCALE_BYTES: Final = 2
_E4M3, _E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How a matrix is kept.

    Attributes:
        bits: Of a weight.
        group: Inputs that share a scale; 0 for all of an output channel.
        fp8: The floating format; None for integers.
        activations: Whether inputs are rounded to as many bits, too, with a scale for each token.
    """

    bits: int
    group: int = 0
    fp8: torch.dtype | None = None
    activations: bool = False

    def bytes(self, weight: torch.Tensor) -> int:
        """Memory that a matrix takes, its scales included."""
        outputs, inputs = (int(each) for each in weight.shape)
        scales = 1 if self.fp8 else outputs * (-(-inputs // self.group) if self.group else 1)
        return outputs * inputs * self.bits // 8 + scales * _SCALE_BYTES


FORMATS: Final = {
    "int8": WeightFormat(8),
    "int8-g128": WeightFormat(8, group=128),
    "w8a8": WeightFormat(8, activations=True),
    "int4": WeightFormat(4),
    "int4-g128": WeightFormat(4, group=128),
    "int4-g32": WeightFormat(4, group=32),
    "fp8-e4m3": WeightFormat(8, fp8=_E4M3),
    "fp8-e5m2": WeightFormat(8, fp8=_E5M2),
}
"""By the names of the command line."""
KV_FORMATS: Final = {"fp8-e4m3": _E4M3, "fp8-e5m2": _E5M2}


def rounded_weight(weight: torch.Tensor, format: WeightFormat) -> torch.Tensor:
    """What a kernel multiplies by that keeps a matrix [outputs, inputs] in a format; in its own dtype.

    >>> rounded_weight(torch.tensor([[1.0, 0.5, 0.26], [4.0, 0.1, 0.0]]), WeightFormat(4)).tolist()[1]
    [4.0, 0.0, 0.0]
    """
    if format.fp8 is not None:
        return rounded_to_fp8(weight, format.fp8, scaled=True)
    values = weight.detach().float()
    outputs, inputs = values.shape
    group = format.group or inputs
    padded = torch.nn.functional.pad(values, (0, -inputs % group)).view(outputs, -1, group)
    return _to_integers(padded, format.bits).view(outputs, -1)[:, :inputs].to(weight.dtype)


def rounded_activations(bits: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Rounds [..., features] to integers with one scale for each token, as W8A8 kernels do while they run."""
    return lambda values: _to_integers(values.float(), bits).to(values.dtype)


def rounded_to_fp8(values: torch.Tensor, fp8: torch.dtype, *, scaled: bool = False) -> torch.Tensor:
    """Values through FP8 and back, saturated; `scaled` with the scale that uses its whole range."""
    most = torch.finfo(fp8).max
    scale = values.detach().float().abs().amax().clamp(min=1e-12) / most if scaled else torch.tensor(1.0)
    return ((values.float() / scale).clamp(-most, most).to(fp8).float() * scale).to(values.dtype)


def _to_integers(values: torch.Tensor, bits: int) -> torch.Tensor:
    most = 2 ** (bits - 1) - 1
    scale = values.abs().amax(-1, keepdim=True).clamp(min=1e-12) / most
    return (values / scale).round().clamp(-most, most) * scale


def rounding_cache(kv: torch.dtype | None) -> Any:
    """A cache of Transformers that rounds what is written into it, with a scale of one, as vLLM's does by default.

    Args:
        kv: The format; None to keep what is written as it is.
    """
    with extra("transformers", "a checkpoint's cache"):
        from transformers import DynamicCache  # noqa: PLC0415 - only for checkpoints, which need it anyway

    class Rounded(DynamicCache):  # type: ignore[misc]
        def update(self, key_states: Any, value_states: Any, *args: Any, **options: Any) -> Any:
            written = (rounded_to_fp8(each, kv) for each in (key_states, value_states)) if kv else None
            return super().update(*(written or (key_states, value_states)), *args, **options)

    return Rounded()
