"""Both kernels of the demo as modules whose operators have names, which `kc-otel locate run` runs one by one.

```sh
make demo
kc-otel locate run examples/demo/contract.yaml --train examples/demo/located.py:train
    --infer examples/demo/located.py:int8 --sequences examples/demo/located.py:sequences --slice tables
```
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - the name that torch's users know

from examples.demo.corpus import SLICES, load_corpus
from examples.demo.model import Config, Model, rotate
from examples.demo.sampler import Sampler, normalize
from examples.demo.train import windows

WEIGHTS = Path(__file__).resolve().parents[2] / ".cache" / "demo.pt"
"""Where the demo leaves what it trained."""
CALIBRATION_ROWS = 64
PROMPT, COMPLETION = 48, 48


class Operator(nn.Module):
    """A function as a module, so that it has a name and can be watched."""

    def __init__(self, apply: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.apply_to = apply
        if (scale := getattr(apply, "input_scale", None)) is not None:
            self.register_buffer("input_scale", scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What the function makes of it."""
        return self.apply_to(x)


class SamplerBlock(nn.Module):
    """One layer of a sampler, by the names of the training kernel; the norms' gains are in the products."""

    def __init__(self, qkv: Callable, out: Callable, up: Callable, down: Callable, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out, self.up, self.down = Operator(qkv), Operator(out), Operator(up), Operator(down)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """[B, T, width] to the same, in bf16."""
        batch, length, width = x.shape
        q, k, v = self.qkv(normalize(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        factors = (rotate(q, cos, sin), rotate(k, cos, sin), v)
        mixed = F.scaled_dot_product_attention(*(factor.float() for factor in factors), is_causal=True).to(x.dtype)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.relu(self.up(normalize(x))).square())


class SamplerModel(nn.Module):
    """A sampler's kernel over whole sequences: the same products, scales and roundings as in its `_step`."""

    def __init__(self, sampler: Sampler) -> None:
        super().__init__()
        self.cos, self.sin = sampler.cos, sampler.sin
        self.embed = nn.Embedding.from_pretrained(sampler.embed)
        self.blocks = nn.ModuleList(SamplerBlock(*layer, heads=sampler.config.heads) for layer in sampler.layers)
        self.head = Operator(sampler.head)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits [B, T, vocabulary] for ids [B, T]."""
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(normalize(x)).float()


def train() -> Model:
    """The training kernel that the demo trained last; $DEMO_WEIGHTS to keep it elsewhere it is."""
    file = Path(os.environ.get("DEMO_WEIGHTS", WEIGHTS))
    if not file.is_file():
        raise ValueError(f"{file}: there is no trained model; run `make demo` first")
    model = Model(Config())
    model.load_state_dict(torch.load(file, weights_only=True))
    return model.eval()


def int8(slices: tuple[str, ...] = ("code", "prose")) -> SamplerModel:
    """The int8 kernel of the demo's fourth act: its scales have seen code and prose, and no tables."""
    corpus, model = load_corpus(), train()
    rows = [corpus[name].train for name in slices for _ in range(CALIBRATION_ROWS // len(slices))]
    calibration = windows(rows, model.config.context, torch.Generator().manual_seed(0))
    return SamplerModel(Sampler(model, calibration=calibration)).eval()


def int8_sound() -> SamplerModel:
    """The same with scales that have seen every slice."""
    return int8(SLICES)


def bf16() -> SamplerModel:
    """The bf16 kernel of the third act."""
    return SamplerModel(Sampler(train())).eval()


def sequences(slice: str, count: int = 32) -> list[dict]:
    """Held-out text of a slice, or of each of them for `all`, continued by the int8 kernel."""
    names = [slice] if slice in SLICES else list(SLICES)
    tasks = [names[index % len(names)] for index in range(count)]
    corpus, model = load_corpus(), train()
    prompts = windows([corpus[task].held_out for task in tasks], PROMPT, torch.Generator().manual_seed(1))
    torch.manual_seed(2)
    rows = [corpus[name].train for name in ("code", "prose") for _ in range(CALIBRATION_ROWS // 2)]
    calibration = windows(rows, model.config.context, torch.Generator().manual_seed(0))
    sampled, _ = Sampler(model, calibration=calibration).generate(prompts, COMPLETION)
    return [
        {"prompt_ids": prompt, "token_ids": tokens, "attributes": {"task": task}}
        for prompt, tokens, task in zip(prompts.tolist(), sampled.tolist(), tasks, strict=True)
    ]
