"""Train the model for about a minute on two cores: Muon for the matrices inside the blocks, AdamW for the rest."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

import torch
from torch.nn import functional as F  # noqa: N812 - the name that torch's users know

from examples.demo.corpus import Text
from examples.demo.model import Config, Model

MIXTURE = {"code": 0.4, "prose": 0.35, "tables": 0.25}
"""Share of each slice in training."""

_BATCH = 16


class Muon(torch.optim.Optimizer):
    """Momentum whose steps are made orthogonal, in float32.

    `torch.optim.Muon` computes in bfloat16, which takes ten times as long as float32 on a processor that has no
    instructions for it.

    Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024), with its coefficients.
    """

    def __init__(self, params: Iterable[torch.Tensor], lr: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override] - no closure
        """Change each matrix that has a gradient."""
        for group in self.param_groups:
            for matrix in group["params"]:
                state = self.state[matrix]
                mean = state.setdefault("mean", torch.zeros_like(matrix)).lerp_(matrix.grad, 1 - group["momentum"])
                step = orthogonal(matrix.grad.lerp(mean, group["momentum"]))
                matrix.sub_(step, alpha=group["lr"] * max(1.0, matrix.shape[0] / matrix.shape[1]) ** 0.5)


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """Nearly U V^T of a matrix U S V^T, of its shape, by five Newton-Schulz iterations."""
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (2.0315 * gram @ gram - 4.7750 * gram) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def train(
    corpus: Mapping[str, Text], steps: int, progress: Callable[[int, float], None] = lambda _step, _bits: None
) -> Model:
    """A trained model, the same one for the same corpus, steps and number of threads.

    Args:
        corpus: The slices' texts.
        steps: Optimizer steps of 16 sequences.
        progress: Called after each step with its number and the batch's bits per byte.
    """
    torch.manual_seed(0)
    config = Config()
    model = Model(config)
    inner = [p for p in model.blocks.parameters() if p.dim() == 2]
    outer = [p for p in model.parameters() if all(p is not q for q in inner)]
    optimizers = (Muon(inner, lr=0.02), torch.optim.AdamW(outer, lr=4e-3, betas=(0.9, 0.95), weight_decay=0.0))
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(o, lambda step: min(1.0, (step + 1) / 20, 2 * (1 - step / steps)))
        for o in optimizers
    ]
    shares = torch.tensor([MIXTURE[name] for name in corpus])
    texts = [text.train for text in corpus.values()]
    for step in range(steps):
        picked = torch.multinomial(shares, _BATCH, replacement=True)
        rows = windows([texts[i] for i in picked], config.context + 1)
        loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        model.zero_grad()
        loss.backward()
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        progress(step + 1, loss.item() / math.log(2))
    return model.eval()


def windows(texts: list[torch.Tensor], length: int, generator: torch.Generator | None = None) -> torch.Tensor:
    """One stretch of `length` bytes from a random place in each text, [len(texts), length]."""
    starts = [int(torch.randint(len(text) - length, (), generator=generator)) for text in texts]
    return torch.stack([text[start : start + length] for text, start in zip(texts, starts, strict=True)])


@torch.no_grad()
def held_out_bits(model: Model, text: Text, rows: int = 128) -> tuple[float, float]:
    """Bits per held-out byte: of the model, and of guessing from how often each byte occurs."""
    length = model.config.context + 1
    data = text.held_out[: len(text.held_out) // length * length].view(-1, length)[:rows]
    model_nats = F.cross_entropy(model(data[:, :-1]).flatten(0, 1), data[:, 1:].flatten()).item()
    counts = torch.bincount(text.train, minlength=model.config.vocabulary) + 1.0
    unigram_nats = F.nll_loss((counts / counts.sum()).log().expand(data[:, 1:].numel(), -1), data[:, 1:].flatten())
    return model_nats / math.log(2), unigram_nats.item() / math.log(2)
