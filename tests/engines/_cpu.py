"""What vLLM cannot do on every processor: asked of vLLM itself, when a test is about to run that needs it."""

from __future__ import annotations

from functools import cache

import pytest

FP8_CACHE = "keys and values in fp8"
AVX512_SUMS = "its kernels for AVX-512"

needs_fp8_cache = pytest.mark.engine_has(FP8_CACHE)
avx512_arithmetic = pytest.mark.engine_has(AVX512_SUMS)
"""For limits that were measured with these kernels: others add up int8 products, and bf16, in another order."""


@cache
def lacking(what: str) -> str | None:
    """Say why vLLM has none of something here; None where it has."""
    import torch
    import vllm._custom_ops  # noqa: F401 - loads the library for this processor

    if what == FP8_CACHE:
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        try:
            _get_attn_isa(torch.bfloat16, 128, 64, "fp8")
        except NotImplementedError as error:
            return str(error)
    if what == AVX512_SUMS and not torch.cpu._is_avx512_supported():
        return "the limits are for vLLM's kernels with AVX-512"
    return None


def reads_back() -> bool:
    """Whether what stands in vLLM's KV cache can be read back: with AMX it has a layout of its own."""
    import torch

    return not torch.cpu.get_capabilities().get("amx_tile") or not torch.cpu._is_avx512_supported()
