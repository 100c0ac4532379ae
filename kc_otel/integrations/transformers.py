"""Callbacks for Hugging Face's `Trainer` and everything that is derived from it.

`KernelContractCallback` compares the model in training with an inference kernel on given tokens, at evaluation or every
so many steps. `StopWhenHalted` ends training and `ResyncWeights` sends the weights again when the evaluator asks for
it. `log_verdicts` adds the verdicts to the trainer's log. None of them ever raises into the training
loop.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from kc_otel.contract.model import Contract
from kc_otel.contract.slices import Scalar
from kc_otel.integrations import wrap
from kc_otel.record.guided_loop import Resync
from kc_otel.record.recorder import Recorder
from kc_otel.record.work import Processing, Weights
from kc_otel.recordings.scoring import Scorer, hf_scorer

if TYPE_CHECKING:
    from transformers import TrainerCallback
else:
    try:
        from transformers import TrainerCallback
    except ImportError:
        TrainerCallback = object  # so that everything here can be imported and read without the library

__all__ = ["KernelContractCallback", "ResyncWeights", "Sample", "StopWhenHalted", "log_verdicts"]

_log: Final = logging.getLogger("kc_otel")


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One sequence that both kernels score.

    Attributes:
        prompt_ids: Prompt tokens, integers [prompt], at least one.
        token_ids: Tokens after it, integers [tokens].
        attributes: Attributes that decide its slices.
    """

    prompt_ids: Any
    token_ids: Any
    attributes: Mapping[str, Scalar] = field(default_factory=dict)


class KernelContractCallback(TrainerCallback):  # type: ignore[misc]
    """Compares the model that is being trained with an inference kernel, teacher-forced on the same tokens.

    >>> trainer.add_callback(KernelContractCallback("contract.yaml", score, samples))    # a transformers.Trainer
    >>> trainer.train()

    Log ratios and their quantiles are facts about any tokens. Expectations over the inference kernel (tv_token, tv_seq,
    k3, chi2 and the bounds computed from them) need tokens that it sampled: pass a function as `samples` that has it
    sample them.

    Training waits while both kernels score. In a distributed run the first process compares; a model that is sharded
    over processes (FSDP, DeepSpeed) cannot be run by one of them, which is counted as dropped.

    Args:
        contract: The contract, the path of its YAML file, or a recorder that has one, and knows the kernels' versions.
        score: The inference kernel.
        samples: Sequences to score, or a function that returns new ones for each comparison.
        every: Optimizer steps between comparisons; None to compare at each evaluation.
        sync: Called with the model before each comparison, to bring the inference kernel's weights up to date.
        weights: Returns the optimizer step whose weights the inference kernel has, after `sync`; None if unknown.
        processing: Temperature, top_p, top_k and min_p that both kernels apply.
        batch_size: Sequences of one forward.

    Raises:
        ValueError: If a number is not positive or the contract is not valid.
        OSError: If the contract cannot be read.
    """

    def __init__(
        self,
        contract: Recorder | Contract | str | os.PathLike[str],
        score: Scorer,
        samples: Sequence[Sample] | Callable[[], Sequence[Sample]],
        *,
        every: int | None = None,
        sync: Callable[[Any], object] | None = None,
        weights: Callable[[], Weights] | None = None,
        processing: Processing | None = None,
        batch_size: int = 16,
    ) -> None:
        for name, value in (("every", every), ("batch_size", batch_size)):
            if value is not None and value < 1:
                raise ValueError(f"{name}: {value!r} is not 1 or more")
        self.recorder = contract if isinstance(contract, Recorder) else Recorder(contract)
        self._score = score
        self._samples = samples
        self._every = every
        self._sync = sync
        self._weights = weights
        self._processing = dict(processing or {})
        self._batch_size = batch_size

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002 - the hook's
        """Compare every `every` steps."""
        if self._every is not None and state.global_step % self._every == 0:
            self._compare(args, state, kwargs.get("model"))

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002 - the hook's
        """Compare at an evaluation."""
        if self._every is None:
            self._compare(args, state, kwargs.get("model"))

    def _compare(self, args: Any, state: Any, model: Any) -> None:
        if not state.is_world_process_zero:
            return
        if getattr(args, "fsdp", None) or getattr(args, "deepspeed", None):
            self.recorder.drop("sharded-model", "one process cannot score with a model that is sharded over several")
            return
        try:
            if self._sync is not None:
                self._sync(model)
            self._score_both(args, model, state.global_step)
        except Exception as error:  # noqa: BLE001 - training must not fail because somebody watches
            self.recorder.drop("comparison-failed", error)

    def _score_both(self, args: Any, model: Any, step: int) -> None:
        import torch  # noqa: PLC0415 - the core does without torch

        # Accelerate puts autocast into the model's own forward; a trainer that does not enters it around the forward.
        autocast = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None
        train = hf_scorer(model, autocast=autocast)
        synced = None if self._weights is None else self._weights()
        samples = self._samples() if callable(self._samples) else self._samples
        ordered = sorted(samples, key=lambda sample: len(sample.prompt_ids) + len(sample.token_ids))
        rollouts = Counter(tuple(sample.prompt_ids) for sample in ordered)
        for start in range(0, len(ordered), self._batch_size):
            batch = ordered[start : start + self._batch_size]
            prompts, tokens = [sample.prompt_ids for sample in batch], [sample.token_ids for sample in batch]
            self.recorder.compare(
                list(train(prompts, tokens, self._processing)),
                list(self._score(prompts, tokens, self._processing)),
                token_ids=tokens,
                attributes=[{"prompt_tokens": len(sample.prompt_ids), **sample.attributes} for sample in batch],
                processing=(self._processing, self._processing),
                weights=(step, synced),
                prompt_ids=prompts,
                group_size=[rollouts[tuple(prompt)] for prompt in prompts],
                presampled=True,
            )


class _AskedCallback(TrainerCallback):  # type: ignore[misc]
    """Asks the user's function for a reason to act; the first process of a distributed run decides for all of them."""

    def __init__(self, asked: Callable[[], str | None], failure: str) -> None:
        self._asked = asked
        self._failure = failure
        self._failed = False

    def _decision(self, args: Any, state: Any) -> str | None:
        """Return the reason to act, the same in every process; None if there is none or the function failed."""
        reason = None
        if state.is_world_process_zero:
            try:
                reason = self._asked()
            except Exception:  # noqa: BLE001 - the user's function; training must not fail because of it
                if not self._failed:
                    self._failed = True
                    _log.exception(self._failure)
        if args.world_size > 1:
            import torch.distributed  # noqa: PLC0415 - the core does without torch

            from_first = [reason]
            torch.distributed.broadcast_object_list(from_first, src=0)
            reason = from_first[0]
        return reason


class StopWhenHalted(_AskedCallback):
    """Ends training after the step in which the evaluator's decision table asks for a halt, and logs why.

    >>> from kc_otel.client.router import Router
    >>> with Router("http://127.0.0.1:4320") as router:
    ...     trainer.add_callback(StopWhenHalted(lambda: router.halted("policy-7b", recorder.inference_version)))
    ...     trainer.train()

    In a distributed run the first process decides for all, so that none of them is left waiting.

    Args:
        halted: Returns the reason to stop, or None; the router ignores halts because of another kernel version than the
            one that it is given. Called after every step, so it must not block: the router answers from memory. If it
            raises, training goes on.
    """

    def __init__(self, halted: Callable[[], str | None]) -> None:
        super().__init__(halted, "whether training should stop cannot be told; it goes on")
        self.reason: str | None = None
        """Reason why training was stopped; None if it was not."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stop if there is a reason."""
        reason = self._decision(args, state)
        if reason is not None and self.reason is None:
            self.reason = reason
            _log.error("step %d: training stops: %s", state.global_step, reason)
        if self.reason is not None:
            control.should_training_stop = True


class ResyncWeights(_AskedCallback):
    """Calls `sync` before the next step while a `resync-weights` step of the contract's policy fires.

    >>> from kc_otel.client.router import Router
    >>> sync = trainer.vllm_generation.sync_weights                                      # a trl.GRPOTrainer
    >>> with Router("http://127.0.0.1:4320") as router:
    ...     trainer.add_callback(ResyncWeights(lambda: router.resync("policy-7b"), lambda _: sync()))
    ...     trainer.train()

    The verdict is about a window, so the step keeps firing for a while after the weights have arrived. They are sent
    again only if it still fires `pause` training steps later, or has stopped and fires anew. In a distributed run the
    first process decides for all and `sync` is called in each, as TRL's own synchronisation is.

    Args:
        asked: Returns the reason to send the weights, or None. It must not block: the router answers from memory. If it
            raises, training goes on.
        sync: Called with the model. If it raises, that is logged, training goes on, and it is called again after
            `pause` steps.
        pause: Steps between two calls while the same reason lasts.

    Raises:
        ValueError: If `pause` is not 1 or more.
    """

    def __init__(self, asked: Callable[[], str | None], sync: Callable[[Any], object], *, pause: int = 20) -> None:
        super().__init__(asked, "whether weights should be sent again cannot be told; training goes on")
        self._resync = Resync(sync, pause)
        self.reason: str | None = None
        """Reason why the weights were sent last; None if they were not."""
        self.steps: list[int] = []
        """Optimizer steps after which they were sent."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002 - the hook's
        """Send the weights if there is a reason."""
        reason = self._decision(args, state)
        said = None if reason is None else f"{reason} (step {state.global_step})"
        if self._resync.step(said, kwargs.get("model")):
            self.reason = reason
            self.steps.append(state.global_step)


def log_verdicts(trainer: Any, recorder: Recorder) -> Callable[[], None]:
    """Add a recorder's scalars to everything that a trainer logs: W&B, TensorBoard, MLflow, trackio, its own history.

    >>> import kc_otel
    >>> with kc_otel.Recorder("contract.yaml", log=kc_otel.TrainingLog()) as recorder:
    ...     trainer.add_callback(KernelContractCallback(recorder, score, samples))
    ...     log_verdicts(trainer, recorder)
    ...     trainer.train()

    A callback could not do this: reporting callbacks run before the user's own.

    Args:
        trainer: A `transformers.Trainer`, or one derived from it.
        recorder: One that was made with `log`.

    Returns:
        A function that restores the trainer.

    Raises:
        ValueError: If the recorder has no log.
    """
    if recorder.log is None:
        raise ValueError("recorder: it has no verdicts to log; make it with log=kc_otel.TrainingLog()")

    def log(original: Callable[..., Any], logs: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        return original({**logs, **recorder.scalars()}, *args, **kwargs)

    return wrap(trainer, "log", log)
