"""Checkpoints with other weights: rounded, of another training, without a tensor."""

from __future__ import annotations

from pathlib import Path

from tests.engines._random_checkpoints import changed


def in_three_bits(model: Path, into: Path) -> Path:
    """The checkpoint with every linear layer but the head rounded to seven levels an output channel; returns `into`.

    Any engine and processor can run it, unlike an fp8 KV cache.
    """

    def rounded(tensors):
        for name in [name for name in tensors if name.endswith("_proj.weight")]:
            scale = tensors[name].abs().amax(1, keepdim=True) / 3.0
            tensors[name] = (tensors[name] / scale).round() * scale

    return changed(model, into, rounded)


def other_embeddings(model: Path, into: Path) -> Path:
    """The checkpoint with the embeddings of another training; returns `into`."""

    def drawn(tensors):
        for name in [name for name in tensors if "embed_tokens" in name]:
            tensors[name].normal_()

    return changed(model, into, drawn)


def without(model: Path, into: Path, tensor: str) -> Path:
    """The checkpoint without a tensor, by the end of its name; returns `into`."""
    return changed(model, into, lambda held: [held.pop(name) for name in list(held) if name.endswith(tensor)])
