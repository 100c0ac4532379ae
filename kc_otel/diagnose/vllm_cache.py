"""Keys and values as they stand in vLLM's KV cache: what attention reads, in whatever format it was written."""

from __future__ import annotations

from typing import Any

from kc_otel._extras import extra

with extra("torch", "locating in an engine"):
    import torch

__all__ = ["read_back"]


def read_back(attention: Any, request: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Keys and values of a request, float32 [tokens, heads * features] each; None where the layout is another.

    Known is the one of vLLM's attention on CPUs: a block has all keys of a head as [features, tokens], and then all
    values as [tokens, features].

    Args:
        attention: The layer's attention.
        request: Its place in the batch of the forward that runs.
        tokens: How many it has.
    """
    with extra("vllm", "an engine"):
        from vllm.forward_context import get_forward_context  # noqa: PLC0415 - only where vLLM runs

    cache = attention.kv_cache
    known = get_forward_context().attn_metadata
    if getattr(attention, "isa", None) != "vec" or not isinstance(known, dict) or cache.ndim != 4:
        return None
    _, heads, size, _ = cache.shape
    table = known[attention.layer_name].block_table[request]
    held = cache[table[: -(-tokens // size)].long()]
    if held.dtype == torch.uint8:
        held = held.view(torch.float8_e5m2 if "e5m2" in attention.kv_cache_dtype else torch.float8_e4m3fn)
    keys, values = held.float().view(len(held), heads, 2 * size, -1).chunk(2, dim=2)
    keys = keys.reshape(len(held), heads, -1, size).permute(0, 3, 1, 2) * attention._k_scale_float  # noqa: SLF001
    values = values.permute(0, 2, 1, 3) * attention._v_scale_float  # noqa: SLF001 - no other name
    return keys.flatten(0, 1)[:tokens].flatten(1), values.flatten(0, 1)[:tokens].flatten(1)
