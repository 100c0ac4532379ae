"""How many tokens per second are recorded, on one core, against what people do today.

    python tests/benchmarks/bench_record.py

Programs take turns in one process on the same float32 log-probabilities, [256, 2048]; CPU time of one thread:
  SDK      `Histogram.record` with exponential aggregation, once per token, one quantity, no slices
  kc-otel  everything that `add_sampled` records: 10 quantities, input checks, 20 overlapping slices
  verl     its off-policy metrics and importance weights, one average per batch, no slices, no histograms;
           a reimplementation from its documentation, since verl does not install without its engines

At the end: after how long `Recorder.compare` returns to a training step.
"""

from __future__ import annotations

import os

# ruff: noqa: E402 - libraries read these when they are loaded
for _library in ("OMP", "MKL", "OPENBLAS"):
    os.environ[f"{_library}_NUM_THREADS"] = "1"

import statistics
import time

import numpy as np
import torch
from _timing import Accept, interleaved, spread
from opentelemetry.sdk.metrics import Histogram, MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.metrics.view import ExponentialBucketHistogramAggregation, View

from kc_otel import Recorder
from kc_otel.record.telemetry.accumulate import Accumulator
from tests.tools.contracts import contract_of

SEQUENCES, TOKENS, SLICES = 256, 2048, 20
SDK_TOKENS, ROUNDS = 20_000, 15


def logprobs() -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities of two kernels as far apart as bf16 and fp32, float32."""
    rng = np.random.default_rng(0)
    inference = np.log(rng.uniform(0.01, 1, (SEQUENCES, TOKENS)))
    train = np.minimum(inference + 0.026 * rng.standard_normal(inference.shape), 0)
    return train.astype(np.float32), inference.astype(np.float32)


def overlapping() -> np.ndarray:
    """Everything; one of 6 tasks, one of 6 lengths, and 7 further attributes of which half of the tasks have one."""
    rng = np.random.default_rng(1)
    member = np.zeros((SEQUENCES, SLICES), dtype=bool)
    rows, task, length = np.arange(SEQUENCES), rng.integers(0, 6, SEQUENCES), rng.integers(0, 6, SEQUENCES)
    member[:, 0], member[rows, 1 + task], member[rows, 7 + length] = True, True, True
    for extra in range(7):
        member[:, 13 + extra] = (task + extra) % 2 == 0
    return member


def sdk(magnitude: np.ndarray):
    """One record of |l| per token, at scale 4 as ours; the SDK takes no negative values."""
    view = View(instrument_type=Histogram, aggregation=ExponentialBucketHistogramAggregation(max_scale=4))
    provider = MeterProvider([InMemoryMetricReader()], views=[view])
    histogram = provider.get_meter("benchmark").create_histogram("kc.drift.abs_log_ratio")
    values = magnitude.reshape(-1)[:SDK_TOKENS].tolist()
    attributes = {"kc.contract": "c", "kc.slice": "all", "kc.kernel.train": "0", "kc.kernel.inference": "1"}

    def run() -> None:
        for value in values:
            histogram.record(value, attributes)

    return run


def verl_like(train: torch.Tensor, inference: torch.Tensor, mask: torch.Tensor):
    """Off-policy metrics and truncated token importance weights as verl documents them.

    Like verl's, every mean keeps garbage under the mask out, the mask is of integers, and every number is read at once.
    """

    def total(values: torch.Tensor, *axis: int) -> torch.Tensor:
        return (torch.where(mask != 0, values, 0.0) * mask).sum(*axis)

    def mean(values: torch.Tensor, *axis: int) -> torch.Tensor:
        return total(values, *axis) / (mask.sum(*axis) + 1e-8)

    def metrics() -> dict[str, float]:
        train_mean, inference_mean = mean(train, -1), mean(inference, -1)
        log_w, gap = train - inference, inference_mean - train_mean
        whole = torch.clamp(total(log_w, -1), -20, 20)
        found = {
            "kl": mean(inference - train),
            "k3_kl": mean(torch.exp(log_w) - log_w - 1),
            "training_ppl": torch.exp(-train_mean).mean(),
            "training_log_ppl": (-train_mean).mean(),
            "rollout_ppl": torch.exp(-inference_mean).mean(),
            "rollout_log_ppl": (-inference_mean).mean(),
            "log_ppl_diff": gap.mean(),
            "log_ppl_abs_diff": gap.abs().mean(),
            "log_ppl_diff_max": gap.max(),
            "log_ppl_diff_min": gap.min(),
            "ppl_ratio": torch.exp(gap).mean(),
            "chi2_token": mean(torch.exp(torch.clamp(log_w, -20, 20)).square()) - 1,
            "chi2_seq": torch.exp(2 * whole).mean() - 1,
        }
        return {name: value.item() for name, value in found.items()}

    def weights() -> tuple[torch.Tensor, dict[str, float]]:
        ratio = torch.exp(torch.clamp(train - inference, -20, 20)) * mask
        within, rows = torch.clamp(ratio, 0.5, 2.0), mean(ratio, -1)
        found = {
            "mean": mean(ratio),
            "fraction_high": mean((ratio > 2.0).float()),
            "fraction_low": mean((ratio < 0.5).float()),
            "max": ratio.masked_fill(mask == 0, -torch.inf).max(),
            "min": ratio.masked_fill(mask == 0, torch.inf).min(),
            "std": torch.sqrt(torch.clamp(mean(within.square()) - mean(within).square(), min=0)),
            "eff_sample_size": 1 / mean((within / mean(within)).square()),
            "seq_mean": rows.mean(),
            "seq_std": rows.std(),
            "seq_max": rows.max(),
            "seq_min": rows.min(),
            "seq_max_deviation": (rows - 1).abs().max(),
            "seq_fraction_high": (rows > 2.0).float().mean(),
            "seq_fraction_low": (rows < 0.5).float().mean(),
        }
        return ratio.clamp(max=2.0), {name: value.item() for name, value in found.items()}

    return lambda: (metrics(), weights())


def handing_over(step: list[torch.Tensor], rounds: int) -> list[float]:
    """Seconds until `Recorder.compare` returns, measuring beside it, for each of many steps of a trainer."""
    contract = contract_of("bench", slices={f"slice-{number}": {"where": {"task": number}} for number in range(8)})
    attributes, ids, found = [{"task": row % 8} for row in range(len(step[0]))], torch.arange(step[0].numel()), []
    with Recorder(contract, metric_exporter=Accept(), export_interval=1.0, sampling=1.0) as recorder:
        for _ in range(rounds):
            began = time.perf_counter()
            recorder.compare(*step, attributes=attributes, token_ids=ids.reshape(step[0].shape), weights=(1, 0))
            found.append(time.perf_counter() - began)
            while recorder.stats().queued_batches:
                time.sleep(0.001)
        assert not recorder.stats().dropped
    return found


def main() -> None:
    torch.set_num_threads(1)
    train, inference = logprobs()
    tensors = torch.from_numpy(train), torch.from_numpy(inference)
    mask = torch.ones(tensors[0].shape, dtype=torch.int64)
    names = [f"slice-{number}" for number in range(SLICES)]
    realistic, accumulator = overlapping(), Accumulator(names)
    ours = f"kc-otel, {SLICES} slices"
    programs = {
        "SDK Histogram.record": sdk(np.abs(train - inference)),
        "verl metrics + weights": verl_like(*tensors, mask),
        ours: lambda: accumulator.add_sampled(*tensors, membership=realistic),
    }
    seconds = interleaved(programs, ROUNDS)
    work = dict.fromkeys(programs, SEQUENCES * TOKENS)
    work["SDK Histogram.record"] = SDK_TOKENS
    rates = {name: spread(seconds[name], work[name]) for name in programs}
    sdk_rates, verl_rates = rates["SDK Histogram.record"], rates["verl metrics + weights"]
    groups = len(np.unique(realistic, axis=0))
    print(f"one core, [{SEQUENCES}, {TOKENS}] float32, {ROUNDS} interleaved rounds; {groups} combinations of slices,")
    print(f"a sequence is in {realistic.sum(1).mean():.1f} of {SLICES} slices. Million tokens per CPU second:\n")
    print(f"{'':42s}{'best':>9s}{'median':>9s}{'worst':>9s}{'x SDK':>9s}{'x verl':>9s}")
    for name, rate in rates.items():
        numbers = "".join(f"{value / 1e6:9.2f}" for value in rate)
        print(f"{name:42s}{numbers}{rate[0] / sdk_rates[0]:9.0f}{rate[0] / verl_rates[0]:9.1f}")
    print("\nSDK: one quantity, no slices. verl: a reimplementation from its documentation, whole-batch averages only.")
    waits = handing_over([side[:4, :256].clone().requires_grad_() for side in tensors], 10 * ROUNDS)
    print(f"compare of 1,024 tokens returns in {statistics.median(waits) * 1e6:.0f} us (median of {len(waits)})")


if __name__ == "__main__":
    main()
