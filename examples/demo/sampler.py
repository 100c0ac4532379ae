"""The inference kernel: the same weights as the training kernel, evaluated another way so that sampling is quick.

It keeps keys and values in a bf16 cache, folds the norms' gains into the matrices behind them, and multiplies in low
precision. Two versions of it are rolled out:

- `bf16`: weights and activations in bf16.
- `int8`: W8A8. Weights have a scale per output channel, activations a scale per token, as usual. The MLP's hidden
  activations are different: squaring makes a few channels 50 times larger than the rest, and one scale for all of
  them would leave nothing for the others. So each hidden channel gets a scale of its own, found once on calibration
  text and folded into the next matrix. That repairs every kind of text that the calibration saw.

Products are those of a tensor core: factors in bf16, summed in fp32, the sum rounded to bf16. They are computed on the
rounded factors in fp32, where each product is exact, because only some CPUs multiply bf16 quickly. torch has no public
int8 matmul for CPUs either; integers up to 256 are exact in bf16, and sums of 512 of their products are exact in fp32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F  # noqa: N812 - the name that torch's users know

from examples.demo.model import Block, Model, rotary, rotate

Linear = Callable[[torch.Tensor], torch.Tensor]

_BF16 = torch.bfloat16
_TOP = 127.0


class Sampler:
    """Batched sampling at temperature 1 from the full vocabulary, with the log-probs of what was sampled.

    Args:
        model: The training kernel, whose weights are copied.
        calibration: Bytes [B, T] that the int8 scales of the hidden channels are found on; bf16 without.
    """

    def __init__(self, model: Model, calibration: torch.Tensor | None = None) -> None:
        self.config = model.config
        self.head_width = self.config.width // self.config.heads
        cos, sin = rotary(torch.arange(self.config.context), self.head_width)
        self.cos, self.sin = cos.to(_BF16), sin.to(_BF16)
        self.embed = model.embed.weight.detach().to(_BF16)
        peaks = [None] * self.config.layers if calibration is None else hidden_peaks(model, calibration)

        def linear(weight: torch.Tensor, peak: torch.Tensor | None = None) -> Linear:
            if calibration is None:
                return linear_bf16(weight)
            return linear_int8(weight) if peak is None else linear_int8_static(weight, peak)

        self.layers = [
            (
                linear(fold(block.norm_attention, block.qkv)),
                linear(block.out.weight.detach()),
                linear(fold(block.norm_mlp, block.up)),
                linear(block.down.weight.detach(), peak),
            )
            for block, peak in zip(model.blocks, peaks, strict=True)
        ]
        self.head = linear(fold(model.norm, model.head))

    @torch.no_grad()
    def generate(self, prompts: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Continue prompts [B, T] by `length` bytes: ids [B, length] int64 and their log-probs [B, length] fp32.

        Raises:
            ValueError: If prompt and continuation do not fit into the context.
        """
        batch, start = prompts.shape
        if start + length > self.config.context:
            raise ValueError(f"{start} + {length} bytes do not fit into a context of {self.config.context}")
        shape = (self.config.layers, 2, batch, self.config.heads, start + length, self.head_width)
        cache = torch.empty(shape, dtype=_BF16)
        ids, logprobs = [], []
        tokens, position = prompts, 0
        for _ in range(length):
            distribution = self._step(tokens, position, cache).log_softmax(-1)
            position += tokens.shape[1]
            tokens = torch.multinomial(distribution.exp(), 1)
            ids.append(tokens)
            logprobs.append(distribution.gather(1, tokens))
        return torch.cat(ids, 1), torch.cat(logprobs, 1)

    def _step(self, tokens: torch.Tensor, position: int, cache: torch.Tensor) -> torch.Tensor:
        """Logits [B, vocabulary] after tokens [B, T] that begin at `position`; keys and values enter the cache."""
        batch, length = tokens.shape
        end = position + length
        cos, sin = self.cos[position:end], self.sin[position:end]
        x = self.embed[tokens]
        for (qkv, out, up, down), (keys, values) in zip(self.layers, cache, strict=True):
            heads = qkv(normalize(x)).view(batch, length, 3, self.config.heads, self.head_width)
            q, k, v = heads.permute(2, 0, 3, 1, 4)
            keys[:, :, position:end] = rotate(k, cos, sin)
            values[:, :, position:end] = v
            factors = (rotate(q, cos, sin), keys[:, :, :end], values[:, :, :end])
            wide = (factor.float() for factor in factors)
            mixed = F.scaled_dot_product_attention(*wide, is_causal=length > 1).to(_BF16)
            x = x + out(mixed.transpose(1, 2).reshape(batch, length, -1))
            x = x + down(F.relu(up(normalize(x))).square())
        return self.head(normalize(x[:, -1])).float()


def normalize(x: torch.Tensor) -> torch.Tensor:
    """RMS norm without a gain: the gain is in the matrix that follows."""
    return F.rms_norm(x, x.shape[-1:], eps=1e-6)


def fold(norm: torch.nn.RMSNorm, linear: torch.nn.Linear) -> torch.Tensor:
    """Weight [out, in] with the gain of the norm before it multiplied in."""
    return (linear.weight * norm.weight).detach()


def linear_bf16(weight: torch.Tensor) -> Linear:
    """Product with a weight [out, in] in bf16."""
    rounded = weight.to(_BF16).float()
    return lambda x: F.linear(x.float(), rounded).to(_BF16)


def linear_int8(weight: torch.Tensor) -> Linear:
    """W8A8 product: a scale per output channel of the weight and one per token of the activations."""
    quantized, scale = quantize(weight)
    widened = quantized.float()

    def apply(x: torch.Tensor) -> torch.Tensor:
        tokens, token_scale = quantize(x.float())
        return (F.linear(tokens.float(), widened) * token_scale * scale.T[0]).to(_BF16)

    return apply


def linear_int8_static(weight: torch.Tensor, peak: torch.Tensor) -> Linear:
    """W8A8 product: a fixed scale per input channel, from its peak [in] in calibration, folded into the weight."""
    step = peak / _TOP
    quantized, scale = quantize(weight.detach() * step)
    widened = quantized.float()

    def apply(x: torch.Tensor) -> torch.Tensor:
        channels = (x.float() / step).round().clamp(-_TOP, _TOP)
        return (F.linear(channels, widened) * scale.T[0]).to(_BF16)

    apply.input_scale = step  # by the name that it has in checkpoints
    return apply


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 values and the scale [..., 1] of each row: the largest of a row becomes 127."""
    scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-8) / _TOP
    return (x / scale).round().to(torch.int8), scale


@torch.no_grad()
def hidden_peaks(model: Model, calibration: torch.Tensor) -> list[torch.Tensor]:
    """Largest value [4 * width] of each hidden channel over the calibration text, for each block."""
    peaks: list[torch.Tensor] = []

    def observe(block_down: torch.nn.Module, inputs: tuple[torch.Tensor]) -> None:  # noqa: ARG001
        peaks.append(inputs[0].flatten(0, 1).amax(0).clamp_min(1e-5))

    hooks = [block.down.register_forward_pre_hook(observe) for block in model.blocks if isinstance(block, Block)]
    try:
        model(calibration)
    finally:
        for hook in hooks:
            hook.remove()
    return peaks
