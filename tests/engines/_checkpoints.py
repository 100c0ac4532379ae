"""Checkpoints in fewer bits: int8 weights and activations as compressed-tensors writes them, and weights rounded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

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
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, into)
    tensors = load_file(model / "model.safetensors")
    ends = tuple(f"{each}.weight" for each in products)
    for name in [name for name in tensors if name.endswith(ends)]:
        weight = tensors[name].float()
        scale = weight.abs().amax(1, keepdim=True) / 127.0
        tensors[name] = (weight / scale).round().clamp(-127, 127).to(torch.int8)
        tensors[f"{name}_scale"] = scale
    save_file(tensors, into / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((into / "config.json").read_text())
    left = sorted(
        name.removesuffix(".weight")
        for name, each in tensors.items()
        if each.ndim == 2 and each.dtype != torch.int8 and not name.endswith("_scale")
    )
    scheme = _SCHEME | {"ignore": left}
    (into / "config.json").write_text(json.dumps(config | {"quantization_config": scheme}))
    return into


def in_three_bits(model: Path, into: Path) -> Path:
    """The checkpoint with every linear layer but the head rounded to seven levels an output channel; returns `into`.

    Any engine and processor can run it, unlike an fp8 KV cache.
    """
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, into)
    tensors = load_file(model / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        scale = tensors[name].abs().amax(1, keepdim=True) / 3.0
        tensors[name] = torch.round(tensors[name] / scale) * scale
    save_file(tensors, into / "model.safetensors", metadata={"format": "pt"})
    return into


def other_embeddings(model: Path, into: Path) -> Path:
    """The checkpoint with the embeddings of another training; returns `into`."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, into)
    tensors = load_file(model / "model.safetensors")
    for name in [name for name in tensors if "embed_tokens" in name]:
        tensors[name] = torch.randn(tensors[name].shape).to(tensors[name].dtype)
    save_file(tensors, into / "model.safetensors", metadata={"format": "pt"})
    return into


def without(model: Path, into: Path, tensor: str) -> Path:
    """The checkpoint without a tensor, by the end of its name; returns `into`."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, into)
    held = {name: each for name, each in load_file(model / "model.safetensors").items() if not name.endswith(tensor)}
    save_file(held, into / "model.safetensors", metadata={"format": "pt"})
    return into


def packed_in_four_bits(model: Path, into: Path, method: str, *, group: int = 32, kept: Sequence[int] = ()) -> Path:
    """The checkpoint with the linear layers but the head as GPTQ's or AWQ's tools pack it; returns `into`.

    Rounded to the nearest with a symmetric scale for `group` inputs: what is tested is how it is read. Layers that are
    kept stay as they are.
    """
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, into)
    tensors = load_file(model / "model.safetensors")
    whole = tuple(f"model.layers.{layer}." for layer in kept)
    for name in [name for name in tensors if name.endswith("_proj.weight") and not name.startswith(whole)]:
        weight = tensors.pop(name).float()
        scale = weight.unflatten(1, (-1, group)).abs().amax(2) / 7.0  # [outputs, groups]
        values = (weight / scale.repeat_interleave(group, 1)).round().int().T + 8  # [inputs, outputs]
        zeros = torch.full((scale.shape[1], scale.shape[0]), 8, dtype=torch.int32)
        stem = name.removesuffix(".weight")
        tensors[f"{stem}.scales"] = scale.T.contiguous()
        tensors[f"{stem}.qweight"] = (
            _in_words(values) if method == "awq" else _in_words(values.T, awq=False).T.contiguous()
        )
        tensors[f"{stem}.qzeros"] = _in_words(zeros) if method == "awq" else _in_words(zeros - 1, awq=False)
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
    import torch

    words = torch.zeros(values.shape[0], values.shape[1] // 8, dtype=torch.int64)
    for place, which in enumerate((0, 2, 4, 6, 1, 3, 5, 7) if awq else range(8)):
        words |= values[:, which::8].long() << (4 * place)
    return words.to(torch.int32)
