"""Make a recording: sample from the inference kernel, score the same tokens with the training kernel, save both.

    python -m examples.ci.record bfloat16 good.npz
    python -m examples.ci.record int4 bad.npz

A team puts its own two kernels here; what the gate needs is `save_recording`'s file. These two are a small recurrent
policy in PyTorch: the training kernel reads whole sequences in float32, the inference kernel goes token by token with
the same weights in bfloat16, or rounded to 4 bits with one scale per matrix, as a careless export does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch

from kc_otel.recordings.recording import Recording
from kc_otel.recordings.recording_files import save_recording

TASKS = ("code", "prose")
VOCABULARY, WIDTH, LENGTH, SEQUENCES = 64, 96, 64, 400


def int4(weight: torch.Tensor) -> torch.Tensor:
    """The nearest of 16 values, one scale for the whole matrix."""
    scale = weight.abs().max() / 7
    return (weight / scale).round().clamp(-8, 7) * scale


KERNELS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "float32": torch.Tensor.float,
    "bfloat16": torch.Tensor.bfloat16,
    "int4": int4,
}


def weights(seed: int = 0) -> list[torch.Tensor]:
    """Embedding, recurrence and head of the policy, float32."""
    draw = torch.Generator().manual_seed(seed)
    shapes = ((VOCABULARY, WIDTH, 1.0), (WIDTH, WIDTH, 0.8 / WIDTH**0.5), (WIDTH, VOCABULARY, 3.0 / WIDTH**0.5))
    return [torch.randn(rows, columns, generator=draw) * scale for rows, columns, scale in shapes]


def step(policy: list[torch.Tensor], state: torch.Tensor, token: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The next state [S, width] and the log-probabilities of the next token [S, vocabulary]."""
    embed, recur, head = policy
    state = torch.tanh(embed[token] + state @ recur)
    return state, (state @ head).float().log_softmax(-1)


def record(kernel: str, seed: int) -> Recording:
    """Sequences of the inference kernel `kernel`, with both kernels' log-probabilities of every token."""
    train, inference = ([KERNELS[name](matrix) for matrix in weights()] for name in ("float32", kernel))
    draw = torch.Generator().manual_seed(seed)
    token = torch.randint(VOCABULARY, (SEQUENCES,), generator=draw)
    task = [TASKS[int(first) * len(TASKS) // VOCABULARY] for first in token]
    p, q = (torch.zeros(SEQUENCES, WIDTH, dtype=policy[0].dtype) for policy in (train, inference))
    sides: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for _ in range(LENGTH):
        (p, log_p), (q, log_q) = step(train, p, token), step(inference, q, token)
        token = torch.multinomial(log_q.exp(), 1, generator=draw)[:, 0]
        for kept, logprobs in zip(sides, (log_p, log_q), strict=True):
            kept.append(logprobs.gather(1, token[:, None])[:, 0])
    log_train, log_inference = (torch.stack(kept, dim=1).double().reshape(-1).numpy() for kept in sides)
    lengths = torch.full((SEQUENCES,), LENGTH).numpy()
    return Recording(log_train, log_inference, lengths, tuple({"task": name} for name in task))


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in KERNELS:
        sys.exit(f"usage: python -m examples.ci.record {{{','.join(KERNELS)}}} FILE.npz")
    save_recording(record(sys.argv[1], seed=1), Path(sys.argv[2]))
