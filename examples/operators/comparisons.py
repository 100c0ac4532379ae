"""Four operators as a training and an inference kernel compute them.

`kc-otel locate operators` reads this file too, and needs no server:

    kc-otel locate operators examples/operators/comparisons.py:comparisons --contract examples/operators/contract.yaml
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from kc_otel.integrations.operators import OperatorPair, cases_over

Shape = tuple[int, ...]
WIDTH = 1024


def normal(shape: Shape, dtype: torch.dtype, seed: int) -> Tensor:
    """Standard normal numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def queries_keys_values(shape: Shape, dtype: torch.dtype, seed: int) -> Sequence[Tensor]:
    """Inputs of attention, [batch, heads, tokens, width]."""
    return [normal(shape, dtype, 3 * seed + number) for number in range(3)]


def math_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention that holds all scores at once."""
    with sdpa_kernel(SDPBackend.MATH):
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True)


def flash_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention that goes over the keys in blocks."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True)


def activations(shape: Shape, dtype: torch.dtype, seed: int) -> Sequence[Tensor]:
    """What a layer is given, [tokens, width]."""
    return [normal(shape, dtype, seed)]


def activations_with_outliers(shape: Shape, dtype: torch.dtype, seed: int) -> Sequence[Tensor]:
    """The same with four features a hundred times as large, as in the residual streams of large models."""
    (given,) = activations(shape, dtype, seed)
    given[:, :4] *= 100
    return [given]


def rms_norm(given: Tensor) -> Tensor:
    """RMSNorm that adds up in float32."""
    wide = given.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(given.dtype)


def rms_norm_in_own_dtype(given: Tensor) -> Tensor:
    """RMSNorm that stays in the input's own dtype."""
    return given * torch.rsqrt(given.square().mean(-1, keepdim=True) + 1e-6)


WEIGHT = normal((WIDTH, WIDTH), torch.bfloat16, seed=99) / WIDTH**0.5
SCALE = WEIGHT.float().abs().amax(1, keepdim=True) / 127
WEIGHT_INT8 = (WEIGHT.float() / SCALE).round().to(torch.int8)


def linear(given: Tensor) -> Tensor:
    """A matrix product in the input's dtype."""
    return functional.linear(given, WEIGHT.to(given.dtype))


def int8_linear(given: Tensor) -> Tensor:
    """W8A8: weights in 8 bits with a scale per channel, activations with a scale per token."""
    scale = given.float().abs().amax(-1, keepdim=True).clamp(min=1e-9) / 127
    product = torch._int_mm((given.float() / scale).round().to(torch.int8), WEIGHT_INT8.T)  # noqa: SLF001 - no public one
    return (product.float() * scale * SCALE.T).to(given.dtype)


def comparisons() -> list[OperatorPair]:
    """Everything that is compared."""
    bf16, tokens = [torch.bfloat16], (4096, WIDTH)
    short = cases_over(queries_keys_values, [(2, 8, 256, 64)], bf16, attributes={"tokens": 256})
    long = cases_over(queries_keys_values, [(2, 8, 1024, 64)], bf16, attributes={"tokens": 1024})
    plain = cases_over(activations, [tokens], bf16, attributes={"outliers": False})
    hard = cases_over(activations_with_outliers, [tokens], bf16, attributes={"outliers": True})
    single = cases_over(activations, [tokens], [torch.float32])
    return [
        OperatorPair("attention", math_attention, flash_attention, [*short, *long], batch_sizes=(2,)),
        OperatorPair("rms-norm", rms_norm, rms_norm_in_own_dtype, [*plain, *hard], batch_sizes=(8, 64)),
        OperatorPair("int8-linear", linear, int8_linear, [*plain, *hard]),
        OperatorPair("linear-f32", linear, linear, single, batch_sizes=(8, 64)),
    ]
