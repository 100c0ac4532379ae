"""Differences between a kernel and its contract's declaration, and the compatibility of two declarations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kc_otel.contract.model import KernelSpec, KernelSpecs

OTHERWISE_REMEDY: Final = "start the engine as the contract declares it, or correct the contract"

_DECLARED: Final = ("engine", "dtype", "quantization", "attention", "kv_cache_dtype")


def declared_otherwise(spec: KernelSpec, fields: Mapping[str, str]) -> tuple[str, ...]:
    """Return the fields a kernel reports differently than its contract declares; unreported fields are ignored.

    >>> declared_otherwise(KernelSpec(engine="vllm", kv_cache_dtype="fp8"), {"kv_cache_dtype": "auto"})
    ('kv_cache_dtype fp8 is declared, and auto reported',)
    """
    found = []
    for name in _DECLARED:
        declared, reported = getattr(spec, name), fields.get(name)
        if declared is None or reported is None or _same(declared, reported):
            continue
        # `auto` is the format that the model computes in.
        if name == "kv_cache_dtype" and reported == "auto" and _same(declared, fields.get("dtype", "")):
            continue
        # Quantised kernels compute in another format than that of their stored weights.
        if name == "dtype" and _same(declared, fields.get("quantization", "")):
            continue
        found.append(f"{name} {declared} is declared, and {reported} reported")
    return tuple(found)


def declared_apart(specs: KernelSpecs) -> bool:
    """Return whether the two declarations exclude each other; a field that one leaves open excludes nothing."""
    sides = ((getattr(specs.train, name), getattr(specs.inference, name)) for name in _DECLARED)
    return any(train and inference and not _same(train, inference) for train, inference in sides)


def _same(declared: str, reported: str) -> bool:
    ours, theirs = (_SHORT_DTYPES.get(name, name) for name in (_plain(declared), _plain(reported)))
    return theirs.startswith(ours)


_SHORT_DTYPES: Final = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}


def _plain(name: str) -> str:
    return name.lower().removeprefix("torch.").replace("-", "_")
