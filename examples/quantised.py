"""Checkpoints in fewer bits: int8 as compressed-tensors writes it, four bits as GPTQ's and AWQ's tools pack them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file

_SCHEME: Final[dict[str, Any]] = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False},
            "input_activations": {
                "num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True,
            },
        }
    },
}  # fmt: skip


def in_int8(model: Path, into: Path, *, products: tuple[str, ...] = ("_proj",)) -> Path:
    """The checkpoint with these linear layers in int8, one scale per output channel; returns `into`.

    Activations are quantised by the engine, one scale per token.
    """
    shutil.copytree(model, into)
    tensors = load_file(model / "model.safetensors")
    ends = tuple(f"{product}.weight" for product in products)
    for name in [name for name in tensors if name.endswith(ends)]:
        weight = tensors[name].float()
        scale = weight.abs().amax(1, keepdim=True) / 127.0
        tensors[name] = (weight / scale).round().clamp(-127, 127).to(torch.int8)
        tensors[f"{name}_scale"] = scale
    save_file(tensors, into / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((into / "config.json").read_text())
    # A head that is tied to the embeddings has no tensor of its own.
    left = {"lm_head"} | {
        name.removesuffix(".weight")
        for name, tensor in tensors.items()
        if tensor.ndim == 2 and tensor.dtype != torch.int8 and not name.endswith("_scale")
    }
    scheme = _SCHEME | {"ignore": sorted(left)}
    (into / "config.json").write_text(json.dumps(config | {"quantization_config": scheme}))
    return into


Rounded = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Integers 0..15 [outputs, inputs], and the scale and the zero [outputs, groups] of each group of inputs."""


def to_the_nearest(_name: str, weight: torch.Tensor, group: int) -> Rounded:
    """Each weight by itself, with a symmetric scale for `group` inputs."""
    scale = weight.unflatten(1, (-1, group)).abs().amax(2) / 7.0
    values = (weight / scale.repeat_interleave(group, 1)).round().int() + 8
    return values, scale, torch.full_like(scale, 8, dtype=torch.int32)


def packed_in_four_bits(
    model: Path,
    into: Path,
    method: str,
    *,
    group: int = 32,
    kept: Sequence[int] = (),
    rounded: Callable[[str, torch.Tensor, int], Rounded] = to_the_nearest,
) -> Path:
    """The checkpoint with the linear layers but the head as GPTQ's or AWQ's tools pack it; returns `into`.

    Layers that are kept stay as they are. GPTQ's zeros are 8: the format is told that it is symmetric.
    """
    shutil.copytree(model, into)
    tensors = load_file(model / "model.safetensors")
    whole = tuple(f"model.layers.{layer}." for layer in kept)
    for name in [name for name in tensors if name.endswith("_proj.weight") and not name.startswith(whole)]:
        values, scale, zeros = rounded(name, tensors.pop(name).float(), group)
        stem = name.removesuffix(".weight")
        tensors[f"{stem}.scales"] = scale.T.contiguous()
        tensors[f"{stem}.qweight"] = (
            _in_words(values.T) if method == "awq" else _in_words(values, awq=False).T.contiguous()
        )
        tensors[f"{stem}.qzeros"] = _in_words(zeros.T) if method == "awq" else _in_words(zeros.T - 1, awq=False)
    save_file(tensors, into / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((into / "config.json").read_text())
    said = {"quant_method": method, "bits": 4, "group_size": group, "version": "gemm"}
    if method == "gptq":
        said |= {"desc_act": False, "sym": True, "lm_head": False, "dynamic": {rf"-:.*\.{i}\..*": {} for i in kept}}
    else:
        said |= {"zero_point": True, "modules_to_not_convert": [f"layers.{i}." for i in kept] or None}
    (into / "config.json").write_text(json.dumps(config | {"quantization_config": said}))
    return into


def _in_words(values: Any, *, awq: bool = True) -> Any:
    """Eight integers of four bits [rows, columns] in an int32, in AWQ's order or in their own."""
    words = torch.zeros(values.shape[0], values.shape[1] // 8, dtype=torch.int64)
    for place, which in enumerate((0, 2, 4, 6, 1, 3, 5, 7) if awq else range(8)):
        words |= values[:, which::8].long() << (4 * place)
    return words.to(torch.int32)
