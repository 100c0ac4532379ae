"""What watching costs a GRPO step of TRL: every other step of one run is watched, the others are not.

    python tests/benchmarks/bench_trl.py

The step is TRL's own, with its forward, its metrics, backward and optimizer, on a small model and this machine's CPU;
completions are replayed, so that sampling does not hide anything. Wall time is the step's alone, with the measuring
beside it; CPU time is the whole process's until the batch is measured. Prints the median of the paired ratios and
their spread. Needs trl and transformers.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
import warnings
from importlib.util import find_spec
from pathlib import Path

from _timing import Accept

from kc_otel import Recorder
from kc_otel.integrations.trl import instrument

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.tiny_model import tiny_model
from tests.tools.contracts import contract_of

PAIRS = 20
SEQUENCES, PROMPT, TOKENS = 16, 32, 128
SLICES = {f"task-{i}": {"where": {"task": f"t{i}"}} for i in range(8)}
CONTRACT = contract_of("bench", slices=SLICES, observability={"sampling": 1.0})


class Steps:
    """Steps of a trainer, every other one watched, and the times of both."""

    def __init__(self, recorder):
        self.recorder, self.watch, self.trainer = recorder, None, None
        self.times = {True: [], False: []}

    def begin(self, watched):
        """The step begins; attaching is not part of it."""
        if watched:
            self.watch = instrument(self.trainer, self.recorder)
        self.began = time.perf_counter(), time.process_time()

    def end(self):
        """The step ends; what is queued is measured before the next one begins."""
        wall = time.perf_counter() - self.began[0]
        while self.recorder.stats().queued_batches:
            time.sleep(0.001)
        self.times[self.watch is not None].append((wall, time.process_time() - self.began[1]))
        if self.watch is not None:
            self.watch.remove()
            self.watch = None


def grpo(folder, steps):
    """A trainer whose completions are drawn beforehand, and whose every other step is watched."""
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, PrinterCallback, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    checkpoint = tiny_model(Path(".cache"))

    def rollout(prompts, _):
        ids = torch.randint(1, 500, (len(prompts), PROMPT + TOKENS), generator=generator)
        logprobs = -7 * torch.rand(len(prompts), TOKENS, generator=generator)
        return {
            "prompt_ids": ids[:, :PROMPT].tolist(),
            "completion_ids": ids[:, PROMPT:].tolist(),
            "logprobs": logprobs.tolist(),
        }

    class EveryOther(TrainerCallback):
        def on_step_begin(self, _, state, *__, **___):
            steps.begin(watched=state.global_step % 2 == 1)

        def on_step_end(self, *_, **__):
            steps.end()

    sizes = {"per_device_train_batch_size": SEQUENCES, "num_generations": 8, "max_completion_length": TOKENS}
    sizes |= {"max_steps": 2 * (PAIRS + 1), "learning_rate": 1e-5, "bf16": False, "use_cpu": True}
    quiet = {"report_to": "none", "logging_strategy": "no", "save_strategy": "no", "disable_tqdm": True}
    trainer = GRPOTrainer(
        str(checkpoint),
        lambda completions, **_: [float(len(text)) for text in completions],
        GRPOConfig(output_dir=folder, **sizes, **quiet),
        Dataset.from_list([{"prompt": f"{i}", "task": f"t{i % 8}"} for i in range(64)]),
        processing_class=AutoTokenizer.from_pretrained(checkpoint),
        rollout_func=rollout,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(EveryOther())
    return trainer


def main():
    if find_spec("trl") is None:
        print("trl is not installed here: nothing to measure")
        return
    warnings.simplefilter("ignore")
    with (
        tempfile.TemporaryDirectory() as folder,
        Recorder(CONTRACT, metric_exporter=Accept(), export_interval=1.0) as recorder,
    ):
        steps = Steps(recorder)
        steps.trainer = grpo(folder, steps)
        steps.trainer.train()
        stats = recorder.stats()
    print(f"a GRPO step of {SEQUENCES * TOKENS:,} tokens, {PAIRS} pairs, interleaved; {stats.tokens:,} tokens measured")
    plain, watched = steps.times[False][1:], steps.times[True][1:]
    for name, index in (("wall", 0), ("CPU", 1)):
        ratios = sorted(b[index] / a[index] for a, b in zip(plain, watched, strict=True))
        low, middle, high = (ratios[int(len(ratios) * q)] for q in (0.25, 0.5, 0.75))
        without = statistics.median(step[index] for step in plain)
        print(f"{name:4} {without * 1e3:8.1f} ms plain, ratio {middle:.4f} (middle half {low:.4f} .. {high:.4f})")


if __name__ == "__main__":
    main()
