"""The training kernel: a small causal transformer over bytes, evaluated in fp32 through autograd.

Pre-norm blocks, rotary positions, squared-ReLU MLP, as current small language models have them. It sees the whole
sequence at once and keeps no cache, as training does; what generates quickly from the same weights is `sampler.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - the name that torch's users know


@dataclass(frozen=True)
class Config:
    """Sizes of the model."""

    vocabulary: int = 256
    width: int = 128
    layers: int = 4
    heads: int = 4
    context: int = 128


def rotary(positions: torch.Tensor, head_width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [len(positions), head_width / 2] for rotary positions."""
    frequencies = 1000.0 ** (-torch.arange(0, head_width, 2) / head_width)
    angles = positions[:, None] * frequencies
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn the two halves of the last axis of [..., T, head_width] by their positions' angles."""
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, left * sin + right * cos), dim=-1)


class Block(nn.Module):
    """Attention and MLP, each behind its norm."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.norm_attention = nn.RMSNorm(config.width, eps=1e-6)
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)
        self.norm_mlp = nn.RMSNorm(config.width, eps=1e-6)
        self.up = nn.Linear(config.width, 4 * config.width, bias=False)
        self.down = nn.Linear(4 * config.width, config.width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """[B, T, width] to the same."""
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm_attention(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.relu(self.up(self.norm_mlp(x))).square())


class Model(nn.Module):
    """Next-byte logits from bytes."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=1e-6)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=0.5 * weight.shape[1] ** -0.5)
            if name.endswith(("out.weight", "down.weight", "head.weight")):
                nn.init.zeros_(weight)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits [B, T, vocabulary] for ids [B, T]; position t has seen ids up to t."""
        positions = torch.arange(ids.shape[1], device=ids.device)
        cos, sin = rotary(positions, self.config.width // self.config.heads)
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))
