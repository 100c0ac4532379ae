"""Checkpoints with other weights: rounded, of another training, without a tensor."""

from __future__ import annotations

import shutil
from pathlib import Path


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
    held = {name: array for name, array in load_file(model / "model.safetensors").items() if not name.endswith(tensor)}
    save_file(held, into / "model.safetensors", metadata={"format": "pt"})
    return into
