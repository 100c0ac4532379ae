"""How fast full logits are compared on one core, against eager torch as one would write it.

    python tests/benchmarks/bench_logits.py

Both compute half range, exact total variation, both KLs, Jensen-Shannon, top-1 disagreement and the difference of
entropies for [256, 32768] logits, taking turns in one process. Extra memory is the process's peak beyond the inputs.
"""

from __future__ import annotations

import os

# ruff: noqa: E402 - libraries read these when they are loaded
for _library in ("OMP", "MKL", "OPENBLAS"):
    os.environ[f"{_library}_NUM_THREADS"] = "1"

import threading
import time

import torch
from _timing import interleaved, resident, spread
from torch.nn.functional import log_softmax

from kc_otel.record.measure.logits import logit_drift

ROWS, VOCAB, ROUNDS = 256, 32_768, 7


def naive(z_train: torch.Tensor, z_inference: torch.Tensor) -> torch.Tensor:
    """The textbook's formulas, a whole tensor at a time."""
    log_p, log_q = log_softmax(z_train, -1), log_softmax(z_inference, -1)
    p, q = log_p.exp(), log_q.exp()
    log_m = ((p + q) / 2).log()
    delta = z_train - z_inference
    return torch.stack(
        [
            (delta.amax(-1) - delta.amin(-1)) / 2,
            (p - q).abs().sum(-1) / 2,
            (p * (log_p - log_q)).sum(-1),
            (q * (log_q - log_p)).sum(-1),
            ((p * (log_p - log_m)).sum(-1) + (q * (log_q - log_m)).sum(-1)) / 2,
            (z_train.argmax(-1) != z_inference.argmax(-1)).to(p.dtype),
            (q * log_q).sum(-1) - (p * log_p).sum(-1),
        ],
        dim=1,
    )


def extra_resident(program) -> int:
    """Growth of the process's memory, at its highest, while a program runs again and again for a while."""
    base, highest, stop = resident(), 0, threading.Event()

    def watch() -> None:
        nonlocal highest
        while not stop.is_set():
            highest = max(highest, resident() - base)
            time.sleep(0.0005)

    watcher = threading.Thread(target=watch)
    watcher.start()
    for _ in range(3):
        program()
    stop.set()
    watcher.join()
    return highest


def main() -> None:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    inference = 3 * torch.randn((ROWS, VOCAB), generator=generator)
    train = inference + 0.05 * torch.randn((ROWS, VOCAB), generator=generator)
    programs = {"naive eager torch": lambda: naive(train, inference), "kc-otel": lambda: logit_drift(train, inference)}
    grown = {name: extra_resident(program) for name, program in programs.items()}
    seconds = interleaved(programs, ROUNDS)
    rates = {name: spread(times, 1.0) for name, times in seconds.items()}
    print(f"one core, [{ROWS}, {VOCAB}], {ROUNDS} interleaved rounds, CPU time\n")
    print(f"{'milliseconds':20s}{'best':>8s}{'median':>8s}{'worst':>8s}{'speed':>8s}{'extra MiB':>12s}")
    for name, rate in rates.items():
        numbers = "".join(f"{1e3 / value:8.1f}" for value in rate)
        speed = rate[0] / rates["naive eager torch"][0]
        print(f"{name:20s}{numbers}{speed:7.1f}x{grown[name] / 2**20:12.1f}")


if __name__ == "__main__":
    main()
