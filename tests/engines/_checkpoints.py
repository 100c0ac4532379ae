"""Tiny checkpoints with random weights, of several architectures, as transformers writes them; and changed copies."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

WIDTH, LAYERS, HEADS, VOCABULARY = 64, 3, 4, 128
_SIZES: Final[Mapping[str, Any]] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
_EXPERTS: Final[Mapping[str, Any]] = {
    "head_dim": WIDTH // HEADS,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": WIDTH,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
}


def checkpoint(into: str, kind: str = "Llama", *, seed: int = 0, gain: float = 2.0, **sizes: Any) -> Path:
    """A checkpoint of an architecture, Llama, Qwen2 or Qwen3Moe; the larger the gain, the more an error grows."""
    import torch
    import transformers

    torch.manual_seed(seed)
    more = _EXPERTS if kind.endswith("Moe") else {}
    config = getattr(transformers, f"{kind}Config")(**{**_SIZES, **more, **sizes})
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                weight.normal_(std=gain * weight.shape[-1] ** -0.5 if "proj" in name or "lm_head" in name else 0.5)
    model.save_pretrained(into)
    return Path(into)


def changed(
    checkpoint: Path,
    into: str | Path,
    tensors: Callable[[dict[str, Any]], object] | None = None,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """A copy of a checkpoint with some of its tensors and of its configuration changed; returns its folder."""
    from safetensors.torch import load_file, save_file

    copy = Path(into)
    shutil.copytree(checkpoint, copy)
    if tensors is not None:
        held = load_file(copy / "model.safetensors")
        tensors(held)
        save_file(held, copy / "model.safetensors", metadata={"format": "pt"})
    said = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**said, **(config or {})}))
    return copy


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
