"""Matrices of a checkpoint as GPTQ's and AWQ's tools pack them, in floating point.

Several integers of a column stand in an int32, the lowest bits first: GPTQ packs along the inputs, AWQ along the
outputs and in another order. A group of inputs has a scale and a zero for each output; GPTQ's first form stores zeros
less one.
Source: AutoGPTQ, `qlinear_cuda_old.QuantLinear.pack`; GPTQModel, `checkpoint_format`; AutoAWQ,
`WQLinear_GEMM.from_linear`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from kc_otel._extras import extra
from kc_otel.diagnose.torch_formats import WeightFormat

with extra("torch", "reading a quantised checkpoint"):
    import torch

__all__ = ["PACKED", "packed_matrices"]

PACKED: Final = frozenset({"gptq", "awq"})
"""Quantisation methods of a config.json whose matrices are read here."""
_AWQ_ORDER: Final = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight outputs each four bits of an int32 are."""


def packed_matrices(folder: Path, said: Mapping[str, Any]) -> tuple[WeightFormat, dict[str, torch.Tensor]]:
    """The matrices [outputs, inputs] of a checkpoint by module, and their format.

    Args:
        folder: The checkpoint's.
        said: Its `quantization_config`.

    Raises:
        ValueError: If the number of bits, or AWQ's version, is one that is not read here, or nothing is packed.
        MissingExtraError: If transformers, which brings safetensors, is not installed.
    """
    bits, is_awq = int(said.get("bits", 4)), said["quant_method"] == "awq"
    if bits not in ({4} if is_awq else {2, 4, 8}) or str(said.get("version", "gemm")).lower() != "gemm":
        raise ValueError(
            f"{folder}: {said['quant_method']} with {bits} bits is not read here; let its tool dequantise it"
        )
    with extra("transformers", "a quantised checkpoint"):
        from safetensors.torch import load_file  # noqa: PLC0415

    held = {name: each for file in sorted(folder.glob("*.safetensors")) for name, each in load_file(file).items()}
    offset = 0 if is_awq or said.get("checkpoint_format") == "gptq_v2" else 1
    found = {}
    for name in [name.removesuffix(".qweight") for name in held if name.endswith(".qweight")]:
        packed, zeros, scales = (held[f"{name}.{part}"] for part in ("qweight", "qzeros", "scales"))
        values = _unpacked(packed, bits, _AWQ_ORDER) if is_awq else _unpacked(packed.T, bits).T
        zero = _unpacked(zeros, bits, _AWQ_ORDER if is_awq else None) + offset
        groups = held.get(f"{name}.g_idx", torch.arange(len(values)) // -(-len(values) // len(scales))).long()
        found[name] = ((values - zero[groups]).float() * scales.float()[groups]).T.contiguous()
    if not found:
        raise ValueError(f"{folder}: has no packed matrix, though its config.json says {said['quant_method']}")
    return WeightFormat(bits, max(int(said.get("group_size") or 0), 0)), found


def _unpacked(packed: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Integers [rows, columns * 32 / bits] from int32 [rows, columns]."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    values = (packed[..., None] >> shifts) & ((1 << bits) - 1)
    if order is not None:
        values = values[..., torch.argsort(torch.tensor(order))]
    return values.flatten(-2)
