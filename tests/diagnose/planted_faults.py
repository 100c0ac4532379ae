"""A small language model in which every operator is a module, and the ten faults that are planted in it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from kc_otel.diagnose.token_sequences import TokenSequence
from kc_otel.diagnose.torch_kernel import TorchKernel

VOCABULARY, WIDTH, HEADS, LAYERS, EXPERTS, PAGE = 128, 64, 4, 4, 4, 8
"""PAGE: tokens of a page of the KV cache."""


class Rotary(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = 10000.0

    def forward(self, q, k):
        positions = torch.arange(q.shape[2], dtype=torch.float32)
        half = q.shape[-1] // 2
        angles = positions[:, None] * self.base ** (-torch.arange(half) / half)
        cos, sin = angles.cos().to(q.dtype), angles.sin().to(q.dtype)

        def turned(x):
            left, right = x.chunk(2, dim=-1)
            return torch.cat((left * cos - right * sin, left * sin + right * cos), dim=-1)

        return turned(q), turned(k)


class Cache(nn.Module):
    def forward(self, k, v):
        return k, v


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = (WIDTH // HEADS) ** -0.5

    def forward(self, q, k, v):
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        return mixed.transpose(1, 2).flatten(2)


class Experts(nn.Module):
    """Every expert on every token, weighed: small enough for that."""

    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) * WIDTH**-0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) * (2 * WIDTH) ** -0.5)

    def forward(self, x, weights):
        hidden = F.silu(torch.einsum("btw,ewf->btef", x, self.up))
        return torch.einsum("btef,efw,bte->btw", hidden, self.down, weights.to(x.dtype))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(WIDTH, eps=1e-6)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.rotary, self.cache, self.attention_core = Rotary(), Cache(), Attention()
        self.post_attention_layernorm = nn.RMSNorm(WIDTH, eps=1e-6)
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS, bias=False), Experts()

    def forward(self, x):
        normed = self.input_layernorm(x)
        q, k, v = (
            proj(normed).unflatten(-1, (HEADS, -1)).transpose(1, 2) for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = self.rotary(q, k)
        k, v = self.cache(k, v)
        x = x + self.o_proj(self.attention_core(q, k, v))
        normed = self.post_attention_layernorm(x)
        return x + self.experts(normed, self.router(normed).float().softmax(-1))


class Model(nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embed_tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH, eps=1e-6)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.eval()

    def forward(self, ids):
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


class PageLost(nn.Module):
    def forward(self, k, v):
        kept = torch.ones(k.shape[2], 1, dtype=k.dtype)
        kept[PAGE : 2 * PAGE] = 0.0
        return k * kept, v * kept


class InBfloat16(nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.weight = linear.weight

    def forward(self, x):
        return F.linear(x.bfloat16(), self.weight.bfloat16()).to(x.dtype)


class SplitByBatch(nn.Module):
    """A product whose sum is split in as many bf16 parts as there are sequences in the batch."""

    def __init__(self, linear):
        super().__init__()
        self.weight = linear.weight

    def forward(self, x):
        parts = min(x.shape[0], 4)
        pairs = zip(x.chunk(parts, -1), self.weight.chunk(parts, 1), strict=True)
        return sum(F.linear(a, w).bfloat16() for a, w in pairs).to(x.dtype) if parts > 1 else F.linear(x, self.weight)


def encode(messages, role_name="user"):
    """A chat template: a token for the role, then one per letter."""
    text = "".join(f"<{role_name}>{message['content']}" for message in messages)
    return [ord(letter) % VOCABULARY for letter in text]


def _scales_turned(model, layer):
    """int8 with a scale per output channel, applied in the wrong order."""
    weight = model.layers[layer].o_proj.weight
    scale = weight.abs().amax(1, keepdim=True) / 127
    weight.copy_((weight / scale).round() * scale.flip(0))


def _set(path, value):
    def plant(model, layer):
        *parents, name = path.split(".")
        owner = model.layers[layer].get_submodule(".".join(parents))
        setattr(owner, name, value(getattr(owner, name)))

    return plant


def _unsynced(model, layer):
    """As it was some optimizer steps ago."""
    weight = model.layers[layer].v_proj.weight
    weight.add_(0.02 * weight.std() * torch.randn(weight.shape, generator=torch.Generator().manual_seed(5)))


def _cut(model, _):
    model.lm_head.weight = nn.Parameter(model.lm_head.weight[:-8].clone())


@dataclass(frozen=True)
class Fault:
    """What is planted, and what has to be named: operator, whether the layer is, and the kind of finding."""

    name: str
    plant: Callable
    operator: str
    in_layer: bool = True
    kind: str = "drift"
    tensor: str = ""


def _nothing(_model, _layer):
    """Planted outside of the model."""


FAULTS = (
    Fault("wrong rotary base in one layer", _set("rotary.base", lambda _: 9000.0), "rotary"),
    Fault("unsynced weights of one tensor", _unsynced, "v_proj", tensor="v_proj.weight"),
    Fault("transposed scales", _scales_turned, "o_proj", tensor="o_proj.weight"),
    Fault("dropped KV page", _set("cache", lambda _: PageLost()), "kv_cache"),
    Fault("changed softmax scale", _set("attention_core.scale", lambda scale: scale * 1.05), "attention"),
    Fault("bf16 router", _set("router", InBfloat16), "router"),
    Fault("truncated vocabulary", _cut, "head", in_layer=False, kind="shape"),
    Fault("wrong chat template", _nothing, "tokens", in_layer=False, kind="tokens"),
    Fault("other sampling parameters", _nothing, "sampler", in_layer=False, kind="sampler"),
    Fault("batch-dependent reduction", _set("o_proj", SplitByBatch), "o_proj", kind="batch"),
)


def pair(fault, layer, seed=0):
    """A training kernel, and an inference kernel with the fault in a layer."""
    model = Model(seed)
    other = copy.deepcopy(model)
    if fault is not None:
        with torch.no_grad():
            fault.plant(other, layer)
    kind = None if fault is None else fault.kind
    theirs = (lambda messages: encode(messages, "human")) if kind == "tokens" else encode
    sampling = {"temperature": 1.0}
    return (
        TorchKernel(model, encode=encode, sampling=sampling),
        TorchKernel(other.eval(), encode=theirs, sampling={"temperature": 0.9} if kind == "sampler" else sampling),
    )


def conversations(count=10, seed=0):
    """Sequences of 24 to 40 tokens: a prompt and random tokens after it."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for index in range(count):
        messages = ({"role": "user", "content": f"question {index}"},)
        prompt = encode(messages)
        more = int(torch.randint(8, 24, (), generator=generator))
        completion = torch.randint(VOCABULARY, (more,), generator=generator).tolist()
        found.append(TokenSequence((*prompt, *completion), len(prompt), {}, messages))
    return found
