"""Train with TRL, lose the connection that weights are sent through, and watch the contract repair it.

    python -m examples.trl_grpo [--lose-at 6] [--beyond-repair]

Needs trl, and vLLM or transformers; runs on a CPU in about a minute. Everything said about the run is a verdict of a
`kc-otel serve` of its own, which is also what keeps stale rollouts out of training, asks for the weights to be sent
again, and, where they cannot be, stops it.
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
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
)

from examples.demo.__main__ import export_to
from examples.demo.evaluator import Evaluator, evaluating
from examples.demo.terminal import Terminal
from examples.tiny_model import prompts, tiny_model
from examples.trl_grpo.sampler import TOKENS, sampler
from kc_otel.client.router import Router
from kc_otel.client.webhooks import new_secret
from kc_otel.integrations.trl import FollowDirectives, InstrumentedTrainer, instrument
from kc_otel.record.guided_loop import Quarantine

CONTRACT = Path(__file__).with_name("contract.yaml")
STEPS = 18
STEPS_BEYOND_REPAIR = 60


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.trl_grpo", description=__doc__.splitlines()[0])
    parser.add_argument("--lose-at", type=int, default=6, help="step from which on weights do not arrive")
    parser.add_argument("--beyond-repair", action="store_true", help="sending them again fails too")
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
        link = Link(kernel, lose_at=options.lose_at, beyond_repair=options.beyond_repair)

        def rollout(texts: list[str], trainer: Any) -> dict[str, Any]:
            link.send(trainer.model, trainer.state.global_step)
            ids = [trainer.processing_class(text)["input_ids"] for text in texts]
            tokens, logprobs = kernel.sample(ids)
            terminal.say(
                f"step {trainer.state.global_step}: {len(ids)} rollouts from {kernel.name} "
                f"with the weights of step {link.step}"
            )
            return {"prompt_ids": ids, "completion_ids": tokens, "logprobs": logprobs}

        steps = STEPS_BEYOND_REPAIR if options.beyond_repair else STEPS
        trainer = grpo(checkpoint, folder, rollout, steps)
        # What a TRL user adds: the first line to watch, and the others where the contract may act.
        watch = instrument(trainer, CONTRACT, weights=lambda: link.step, quarantine=lambda: router.quarantined("grpo"))
        stack.enter_context(watch)
        follow = FollowDirectives(watch.recorder, router, lambda _: link.reconnect(trainer))
        trainer.add_callback(telling(terminal, watch, evaluator, router, follow))
        trainer.add_callback(follow)
        trainer.train()
        terminal.heading(f"Ended after step {trainer.state.global_step} of {steps}")
        terminal.say(f"stopped: {follow.loop.reason}" if follow.loop.reason else "nobody asked for a halt")
        terminal.say(f"{watch.recorder.stats().quarantined} rollouts were kept out of training")
        cells = evaluator.verdicts()
        terminal.verdicts(cells, {v["kernel_inference"]: kernel.name for v in cells})


class Link:
    """What weights are sent through. It is lost at a step, on purpose, and nobody is told."""

    def __init__(self, kernel: Any, *, lose_at: int, beyond_repair: bool) -> None:
        self._kernel, self._lose_at, self._beyond_repair = kernel, lose_at, beyond_repair
        self._lost = False
        self.step = 0
        """Optimizer step whose weights the sampler has."""

    def send(self, model: Any, step: int) -> None:
        """Send the weights, or lose them on the way."""
        if step >= self._lose_at:
            self._lost, self._lose_at = True, 10**9
        if not self._lost:
            self._kernel.load(model)
            self.step = step

    def reconnect(self, trainer: Any) -> None:
        """Repair it and send the weights; all that the user has to give to `FollowDirectives`."""
        if self._beyond_repair:
            raise ConnectionError("the sampler does not answer")
        self._lost = False
        self.send(trainer.model, trainer.state.global_step)


def quiet() -> None:
    """Keep the libraries' progress bars out of what is told here."""
    from transformers.utils.logging import disable_progress_bar  # noqa: PLC0415

    disable_progress_bar()


def reward(completions: list[str], **_: Any) -> list[float]:
    """Lower-case letters are good."""
    return [sum(map(str.islower, text)) / TOKENS for text in completions]


def grpo(checkpoint: Path, folder: Path, rollout: Any, steps: int) -> Any:
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
        max_steps=steps,
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


def telling(
    terminal: Terminal, watch: InstrumentedTrainer, evaluator: Evaluator, router: Router, follow: FollowDirectives
) -> Any:
    """Prints what was done and the verdicts after each step. Only here does anything wait for the evaluator."""
    from transformers import TrainerCallback  # noqa: PLC0415

    class Tell(TrainerCallback):
        told = 0

        def on_step_begin(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            for reason in follow.loop.sent[self.told :]:
                terminal.say(f"step {state.global_step}: weights sent again, because {reason}", "bold")
            self.told = len(follow.loop.sent)

        def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            if watch.quarantine is not None and any(watch.quarantine.reasons):
                terminal.detail(kept_out(watch.quarantine))
            watch.recorder.force_flush()
            flushed, deadline = time.time(), time.monotonic() + 10
            while (cells := evaluator.verdicts()) and min(v["at"] for v in cells) <= flushed:
                if time.monotonic() > deadline:
                    break
                time.sleep(0.1)
            failing = sorted(f"{v['clause']} on {v['slice']}" for v in cells if v["status"] == "FAIL")
            passing = sum(v["status"] == "PASS" for v in cells)
            style = "bold red" if failing else "green"
            terminal.say(f"step {state.global_step}: {passing} of {len(cells)} cells PASS", style)
            if failing:
                terminal.detail(f"FAIL: {', '.join(failing)}")
                while router.resync("grpo") is None and time.monotonic() < deadline:
                    time.sleep(0.1)

    return Tell()


def kept_out(found: Quarantine) -> str:
    """What quarantine took out of a batch, and what was measured before and after."""
    before, after = found.before, found.after
    rest = f", {after.tv_sum / after.tokens:.2g} of what is left" if after.sequences else ""
    return (
        f"quarantine: {before.sequences - after.sequences} of {before.sequences} rollouts count in no loss; "
        f"token-tv was {before.tv_sum / before.tokens:.2g} of all{rest}"
    )


if __name__ == "__main__":
    main()
