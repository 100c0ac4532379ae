"""How fast full logits are compared on a GPU, beside a copy of them, eager torch, torch.compile and Liger's kernels.

    python tests/benchmarks/bench_logits_gpu.py

[4096, 151936] bfloat16 pairs. Ours reads both tensors twice, a copy of both reads and writes them once: as many bytes,
so the ratio of the times is the share of a copy's bandwidth. The others are given as many rows at a time as fit, and
compute what they have: eager torch and torch.compile all seven quantities, Liger's kernels total variation or
Jensen-Shannon alone, of log-probabilities that are made outside of the time. A decode step that is watched at 5% of 256
tokens is timed too: of a 7B model it takes about 10 ms. Without a GPU nothing is measured.
"""

from __future__ import annotations

import argparse
import importlib.util

import torch
from bench_logits import naive

from kc_otel.record.measure.logit_device import by_kernel
from kc_otel.record.measure.logits import logit_drift

ROWS, VOCAB, WATCHED = 4096, 151_936, 13


def milliseconds(program, rounds: int) -> float:
    """Median time of a program on the device."""
    program()
    times = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        program()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[rounds // 2]


def extra_memory(program) -> int:
    """Bytes beyond what is allocated already, at their highest."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    program()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def in_parts(function, train: torch.Tensor, inference: torch.Tensor, rows: int = 256):
    """A program that gives a function some rows at a time."""
    return lambda: [function(train[i : i + rows], inference[i : i + rows]) for i in range(0, train.shape[0], rows)]


def main() -> None:
    """Time all and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    if not torch.cuda.is_available():
        print("no GPU here: nothing is measured")
        return
    generator = torch.Generator("cuda").manual_seed(0)
    inference = torch.empty((ROWS, VOCAB), dtype=torch.bfloat16, device="cuda")
    inference.normal_(0, 3, generator=generator)
    train = inference + 0.05 * torch.randn_like(inference)
    few = train[:WATCHED].clone(), inference[:WATCHED].clone()
    into = torch.empty_like(train)
    programs = {
        "copy of both": lambda: (into.copy_(train), into.copy_(inference)),
        "kc-otel": lambda: logit_drift(train, inference),
        "eager torch": in_parts(naive, train, inference),
        "torch.compile": in_parts(torch.compile(naive), train, inference),
    }
    if importlib.util.find_spec("liger_kernel"):
        from liger_kernel.transformers import LigerJSD, LigerTVDLoss

        part = [side[:256].float().log_softmax(-1) for side in (train, inference)]
        for name, loss in (("Liger JSD", LigerJSD()), ("Liger TVD", LigerTVDLoss())):
            operands = part if name == "Liger JSD" else [logprobs.exp() for logprobs in part]
            programs[f"{name}, float32, of 256 rows x {ROWS // 256}"] = lambda loss=loss, operands=operands: [
                loss(*operands) for _ in range(ROWS // 256)
            ]
    else:
        print("liger-kernel is not installed, and left out")
    times = {name: milliseconds(program, rounds) for name, program in programs.items()}
    print(f"{torch.cuda.get_device_name()}, [{ROWS}, {VOCAB}] bfloat16, median of {rounds}\n")
    for name, time in times.items():
        print(f"{name:44s}{time:9.2f} ms{times['copy of both'] / time:8.2f} of a copy's bandwidth")
    memory = extra_memory(programs["kc-otel"])
    step = milliseconds(lambda: logit_drift(*few), rounds)
    print(
        f"\nneeded: 0.70 of a copy's bandwidth, 1% of memory. here: {times['copy of both'] / times['kc-otel']:.2f},",
        end=" ",
    )
    print(f"{memory / (2 * train.nbytes):.2%}; {WATCHED} rows of a decode step: {step:.3f} ms", end=" ")
    print(f"({step / 10:.1%} of 10 ms); by {'the kernel' if by_kernel(train, inference) else 'torch'}")


if __name__ == "__main__":
    main()
