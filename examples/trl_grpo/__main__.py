"""Train with TRL, skip a weight synchronisation, and read what the contract says of it.

    python -m examples.trl_grpo [--skip-from 6]

Needs trl, and vLLM or transformers; runs on a CPU in about a minute. Everything said about the run is a verdict of a
`kc-otel serve` of its own, which is also what stops it.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import tempfile
import time
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any

os.environ.update(
    HF_HUB_OFFLINE="1",
    TRL_EXPERIMENTAL_SILENCE="1",
    TOKENIZERS_PARALLELISM="false",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
)

from examples.demo.__main__ import export_to
from examples.demo.evaluator import Evaluator, evaluating
from examples.demo.terminal import Terminal
from examples.tiny_model import prompts, tiny_model
from examples.trl_grpo.sampler import TOKENS, sampler
from kc_otel.instrument.transformers import StopWhenHalted
from kc_otel.instrument.trl import Watch, instrument
from kc_otel.routing.client import Router
from kc_otel.webhooks import new_secret

CONTRACT = Path(__file__).with_name("contract.yaml")
STEPS = 12


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.trl_grpo", description=__doc__.splitlines()[0])
    parser.add_argument("--skip-from", type=int, default=6, help="first step without weight synchronisation")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    quiet()
    terminal = Terminal()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kc-otel-grpo-")))
        terminal.say("a tiny model, trained on the text that this Python carries (made once, about 20 s)")
        checkpoint = shutil.copytree(tiny_model(Path(".cache")), folder / "model")
        kernel = sampler(checkpoint)
        evaluator = stack.enter_context(evaluating(CONTRACT, folder, "http://127.0.0.1:9/", new_secret()))
        export_to(evaluator.otlp)
        router = stack.enter_context(Router(evaluator.api, refresh=0.2))
        synced = {"step": 0}

        def rollout(texts: list[str], trainer: Any) -> dict[str, Any]:
            step = trainer.state.global_step
            if step < options.skip_from:
                kernel.load(trainer.model)
                synced["step"] = step
            ids = [trainer.processing_class(text)["input_ids"] for text in texts]
            tokens, logprobs = kernel.sample(ids)
            terminal.say(
                f"step {step}: {len(ids)} rollouts from {kernel.name} with the weights of step {synced['step']}"
            )
            return {"prompt_ids": ids, "completion_ids": tokens, "logprobs": logprobs}

        trainer = grpo(checkpoint, folder, rollout)
        # What a TRL user adds is the first line, and the last where the contract may stop training.
        watch = stack.enter_context(instrument(trainer, CONTRACT, weights=lambda: synced["step"]))
        trainer.add_callback(telling(terminal, watch, evaluator, router))
        trainer.add_callback(stop := StopWhenHalted(lambda: router.halted("grpo")))
        trainer.train()
        terminal.heading(f"Stopped after step {trainer.state.global_step} of {STEPS}")
        terminal.say(stop.reason or "nobody asked for a halt")
        cells = evaluator.verdicts()
        terminal.verdicts(cells, {v["kernel_inference"]: kernel.name for v in cells})


def quiet() -> None:
    """Keep the libraries' progress bars out of what is told here."""
    from transformers.utils.logging import disable_progress_bar  # noqa: PLC0415

    disable_progress_bar()


def reward(completions: list[str], **_: Any) -> list[float]:
    """Lower-case letters are good."""
    return [sum(map(str.islower, text)) / TOKENS for text in completions]


def grpo(checkpoint: Path, folder: Path, rollout: Any) -> Any:
    """TRL's trainer, as its documentation has it."""
    from datasets import Dataset  # noqa: PLC0415
    from transformers import AutoTokenizer, PrinterCallback  # noqa: PLC0415
    from trl import GRPOConfig, GRPOTrainer  # noqa: PLC0415

    rows = [{"prompt": text, "task": task} for task in ("code", "prose") for text in prompts(task, 24, characters=40)]
    config = GRPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=32,
        num_generations=8,
        steps_per_generation=2,
        max_completion_length=TOKENS,
        max_steps=STEPS,
        learning_rate=2e-3,
        lr_scheduler_type="constant",
        bf16=False,
        use_cpu=True,
        report_to="none",
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
    )
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    trainer = GRPOTrainer(
        str(checkpoint), reward, config, Dataset.from_list(rows), processing_class=tokenizer, rollout_func=rollout
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def telling(terminal: Terminal, watch: Watch, evaluator: Evaluator, router: Router) -> Any:
    """Prints the verdicts on everything up to a step. Only here does anything wait for the evaluator."""
    from transformers import TrainerCallback  # noqa: PLC0415

    class Tell(TrainerCallback):
        def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            watch.recorder.force_flush()
            deadline = time.monotonic() + 10
            while (cells := evaluator.verdicts()) and seen(cells) < watch.recorder.stats().tokens:
                if time.monotonic() > deadline:
                    break
                time.sleep(0.1)
            failing = sorted(f"{v['clause']} on {v['slice']}" for v in cells if v["status"] == "FAIL")
            passing = sum(v["status"] == "PASS" for v in cells)
            style = "bold red" if failing else "green"
            terminal.say(f"step {state.global_step}: {passing} of {len(cells)} cells PASS", style)
            if failing:
                terminal.detail(f"FAIL: {', '.join(failing)}")
                while router.halted("grpo") is None and time.monotonic() < deadline:
                    time.sleep(0.1)

    return Tell()


def seen(cells: list[dict[str, Any]]) -> int:
    """Tokens that the evaluator has judged."""
    return max((v["samples"] for v in cells if (v["clause"], v["slice"]) == ("token-tv", "all")), default=0)


if __name__ == "__main__":
    main()
