"""What recording costs a training step: the same step with and without `Recorder.compare`, interleaved.

    python tests/benchmarks/bench_recorder.py [--steps 30] [--tokens 1024]

The step is a policy-gradient update of a small transformer on this machine's CPU; the recorder measures every token
of every step and exports every second. Wall time is the step's alone, with the measuring beside it; CPU time is the
whole process's until the batch is measured. Prints the median of the paired ratios and their spread.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from opentelemetry.sdk.metrics.export import MetricExporter, MetricExportResult

from kc_otel import Contract, Kernel, Recorder

VOCABULARY, WIDTH, HEADS, LAYERS = 4096, 256, 4, 4
CONTRACT = {
    "apiVersion": "kernel-contract/v1",
    "kind": "KernelContract",
    "metadata": {"name": "bench", "version": 1, "owner": "bench"},
    "kernels": {"train": {"engine": "torch"}, "inference": {"engine": "torch"}},
    "slices": {f"task-{i}": {"where": {"task": f"t{i}"}} for i in range(8)},
}


class Accept(MetricExporter):
    """An endpoint that is always up."""

    def export(self, *_, **__):
        return MetricExportResult.SUCCESS

    def force_flush(self, *_, **__):
        return True

    def shutdown(self, *_, **__):
        pass


class Policy(torch.nn.Module):
    """A small causal transformer."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, WIDTH)
        layer = torch.nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, 0.0, batch_first=True, norm_first=True)
        self.layers = torch.nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = torch.nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        causal = torch.nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        return self.head(self.layers(self.embedding(ids), mask=causal, is_causal=True))


def main():
    """Run the comparison and print it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=30, help="pairs of steps")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of a step, in sequences of 256")
    options = parser.parse_args()
    torch.manual_seed(0)
    sequences = max(options.tokens // 256, 1)
    policy = Policy()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-4)
    ids = torch.randint(0, VOCABULARY, (sequences, 257))
    advantages = torch.randn(sequences)
    with torch.no_grad():
        rollout = policy(ids[:, :-1]).bfloat16().float().log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    attributes = [{"task": f"t{i % 8}"} for i in range(sequences)]
    handing_over = []

    def step(recorder):
        """Wall and CPU seconds; the CPU's are of the whole process, until the batch is measured."""
        began, used = time.perf_counter(), time.process_time()
        logprobs = policy(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        if recorder is not None:
            called = time.perf_counter()
            recorder.compare(
                logprobs, rollout, attributes=attributes, advantages=advantages, token_ids=ids[:, 1:], weights=(1, 0)
            )
            handing_over.append(time.perf_counter() - called)
        loss = -(logprobs * advantages[:, None]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        wall = time.perf_counter() - began
        while recorder is not None and recorder.stats().queued_batches:
            time.sleep(0.001)
        return wall, time.process_time() - used

    kernels = {"train": Kernel("torch", dtype="float32"), "inference": Kernel("torch", dtype="bfloat16")}
    with Recorder(
        Contract.model_validate(CONTRACT), metric_exporter=Accept(), export_interval=1.0, **kernels
    ) as recorder:
        for _ in range(2):
            step(None)
            step(recorder)
        handing_over.clear()
        plain, recorded = [], []
        for pair in range(options.steps):
            for observed in (False, True) if pair % 2 else (True, False):
                (recorded if observed else plain).append(step(recorder if observed else None))
        stats = recorder.stats()
    print(f"{torch.get_num_threads()} threads, {sequences * 256} tokens a step, {options.steps} pairs, interleaved")
    for name, index in (("wall", 0), ("CPU", 1)):
        without, watched = ([times[index] for times in steps] for steps in (plain, recorded))
        ratios = sorted(b / a for a, b in zip(without, watched, strict=True))
        low, middle, high = (ratios[int(len(ratios) * q)] for q in (0.25, 0.5, 0.75))
        medians = (
            f"plain {statistics.median(without) * 1e3:8.2f} ms, recorded {statistics.median(watched) * 1e3:8.2f} ms"
        )
        print(f"{name:4} {medians}, ratio {middle:.4f} (middle half {low:.4f} .. {high:.4f})")
    middle, worst = statistics.median(handing_over) * 1e6, max(handing_over) * 1e6
    print(f"compare returns in {middle:.0f} us (median), {worst:.0f} us at worst")
    print(f"batches measured {stats.batches}, dropped {stats.dropped or 0}, invalid {stats.invalid or 0}")


if __name__ == "__main__":
    main()
