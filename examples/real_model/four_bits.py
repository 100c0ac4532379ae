"""Four bits as GPTQ and AWQ choose them: both look at what a layer's inputs are, on some text of another kind.

GPTQ rounds one input after the other and lets those that follow make up for the error (Frantar et al. 2023, without
reordering). AWQ multiplies inputs that matter before it rounds, and divides them where they come from (Lin et al. 2024:
into the norms, and from `up_proj` into `down_proj`; no clipping).
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file

from examples.demo.corpus import load_corpus
from examples.quantised import Rounded, packed_in_four_bits

GROUP: Final = 64
"""Weights that share a scale: 128, as is usual, does not divide a row of 576."""
_SEQUENCES, _TOKENS = 8, 512
_DAMPING: Final = 0.01
_BLOCK: Final = 64
_POWERS: Final = [power / 10 for power in range(10)]
_FED_BY: Final = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.up_proj": ("mlp.down_proj",),
}
"""Where AWQ divides, and the matrices whose inputs it multiplies."""

Inputs = dict[str, torch.Tensor]
"""By matrix, the sum of x x' over its inputs x [inputs, inputs]."""


def in_four_bits(model: Path, into: Path, method: str) -> Path:
    """The checkpoint as GPTQ or AWQ make it, packed as their tools pack it; returns `into`."""
    with torch.no_grad():
        seen = inputs(model)
        if method == "gptq":
            return packed_in_four_bits(
                model, into, method, group=GROUP, rounded=lambda name, weight, group: gptq(weight, seen[name], group)
            )
        scaled = shutil.copytree(model, into.with_name(f".{into.name}-scaled"), dirs_exist_ok=True)
        try:
            tensors = load_file(model / "model.safetensors")
            scale_inputs(tensors, seen, json.loads((model / "config.json").read_text())["num_hidden_layers"])
            save_file(tensors, scaled / "model.safetensors", metadata={"format": "pt"})
            return packed_in_four_bits(
                scaled, into, method, group=GROUP, rounded=lambda _, weight, group: with_zeros(weight, group)
            )
        finally:
            shutil.rmtree(scaled)


def inputs(model: Path) -> Inputs:
    """What each matrix is given on text that Python carries, in float32."""
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415

    tokenizer = AutoTokenizer.from_pretrained(model)
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype="float32").eval()
    found: Inputs = {}

    def adding(name: str) -> Any:
        def hook(_module: Any, given: Any) -> None:
            x = given[0].flatten(0, -2)
            found[name] = found.get(name, 0) + x.T @ x

        return hook

    for name, module in loaded.named_modules():
        if name.endswith("_proj"):
            module.register_forward_pre_hook(adding(f"{name}.weight"))
    texts = [bytes(text.train.byte().numpy()).decode("utf-8", "ignore") for text in load_corpus().values()]
    for row in range(_SEQUENCES):
        text = texts[row % len(texts)][row * 20_000 :][:10_000]
        loaded(torch.tensor([tokenizer(text)["input_ids"][:_TOKENS]]))
    return found


def gptq(weight: torch.Tensor, seen: torch.Tensor, group: int) -> Rounded:
    """Integers that keep `weight @ x` for the inputs that were seen, not each weight."""
    left, size = weight.T.contiguous(), weight.shape[1]  # [inputs, outputs]: the loop goes over inputs
    damped = seen + _DAMPING * seen.diagonal().mean() * torch.eye(size)
    inverse = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(damped)), upper=True)
    values, scales = torch.empty_like(left, dtype=torch.int32), []
    for start in range(0, size, _BLOCK):
        end = start + _BLOCK
        errors = torch.empty(_BLOCK, weight.shape[0])
        for at in range(start, end):
            if at % group == 0:
                scales.append(left[at : at + group].abs().amax(0) / 7.0)
            values[at] = (left[at] / scales[-1]).round().clamp(-8, 7).int() + 8
            error = (left[at] - (values[at] - 8) * scales[-1]) / inverse[at, at]
            left[at:end].addr_(inverse[at, at:end], error, alpha=-1.0)
            errors[at - start] = error
        left[end:] -= inverse[start:end, end:].T @ errors
    scale = torch.stack(scales, 1)
    return values.T.contiguous(), scale, torch.full_like(scale, 8, dtype=torch.int32)


def with_zeros(weight: torch.Tensor, group: int) -> Rounded:
    """Each weight by itself, a group's smallest and largest at the ends of the sixteen levels."""
    parts = weight.unflatten(1, (-1, group))
    low, high = parts.amin(2).clamp(max=0.0), parts.amax(2).clamp(min=0.0)
    scale = ((high - low) / 15.0).clamp(min=1e-8)
    zero = (-low / scale).round().clamp(0, 15).int()
    values = (parts / scale[..., None]).round().int() + zero[..., None]
    return values.clamp(0, 15).flatten(1), scale, zero


def scale_inputs(tensors: dict[str, torch.Tensor], seen: Inputs, layers: int) -> None:
    """Multiply the inputs that matter, each set by the power of their size that leaves the least error."""
    for layer in range(layers):
        for source, fed in _FED_BY.items():
            names = [f"model.layers.{layer}.{name}.weight" for name in fed]
            moment = seen[names[0]]
            size = moment.diagonal().sqrt().clamp(min=1e-6)
            choices = []
            for power in _POWERS:
                factor = (size / size.mean()) ** power
                error = sum(float(((e := _error(tensors[name], factor)) @ moment * e).sum()) for name in names)
                choices.append((error, factor))
            _, factor = min(choices, key=lambda choice: choice[0])
            for name in names:
                tensors[name] = tensors[name] * factor
            above = f"model.layers.{layer}.{source}.weight"
            tensors[above] = tensors[above] / (factor[:, None] if tensors[above].ndim == 2 else factor)


def _error(weight: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    values, scale, zero = with_zeros(weight * factor, GROUP)
    rounded = (values - zero.repeat_interleave(GROUP, 1)) * scale.repeat_interleave(GROUP, 1)
    return rounded / factor - weight
