"""Callbacks for Hugging Face's `Trainer` and everything that is derived from it.

`KernelContractCallback` compares the model in training with an inference kernel on given tokens, at evaluation or every
so many steps. `FollowDirectives` sends the weights again and ends training when the evaluator asks for it.
`log_verdicts` adds the verdicts to the trainer's log. None of them ever raises into the training loop.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from kc_otel.contract.model import Contract
from kc_otel.contract.slices import Scalar
from kc_otel.integrations import wrap
from kc_otel.record.guided_loop import Asked, Directives
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

__all__ = ["FollowDirectives", "KernelContractCallback", "Sample", "log_verdicts"]


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


class FollowDirectives(TrainerCallback):  # type: ignore[misc]
    """Does in a Trainer what `Recorder.follow` does in your own loop: after each step it sends weights, or ends it all.

    >>> from kc_otel.client.router import Router
    >>> sync = trainer.vllm_generation.sync_weights                                      # a trl.GRPOTrainer
    >>> with Router("http://127.0.0.1:4320") as router:
    ...     trainer.add_callback(FollowDirectives(recorder, router, lambda _: sync()))
    ...     trainer.train()

    A verdict is about a window, so a `resync-weights` step of the contract's policy keeps firing for a while after the
    weights have arrived. They are sent again only if it still fires `pause` training steps later, or has stopped and
    fires anew. In a distributed run the first process decides for all of them, so that none is left waiting, and
    `send_weights` is called in each, as TRL's own synchronisation is.

    Args:
        recorder: The one whose kernel version the directives are about.
        directives: A `kc_otel.client.router.Router`, asked after every step: it answers from memory. If it raises,
            training goes on.
        send_weights: Called with the model. If it raises, that is logged, training goes on, and it is called again
            after `pause` steps.
        pause: Steps between two calls while the same reason lasts.

    Raises:
        ValueError: If `pause` is not 1 or more.
    """

    def __init__(
        self,
        recorder: Recorder,
        directives: Directives,
        send_weights: Callable[[Any], object] | None = None,
        *,
        pause: int = 20,
    ) -> None:
        self.loop: Final = recorder.follow(directives, send_weights=send_weights, pause=pause)
        """Actions so far: the reasons for which weights were `sent`, and the `reason` why training was stopped."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002 - the hook's
        """Do what is asked for."""
        if not self.loop.go_on(kwargs.get("model"), agree=_of_first_process if args.world_size > 1 else None):
            control.should_training_stop = True


def _of_first_process(asked: Asked) -> Asked:
    import torch.distributed  # noqa: PLC0415 - the core does without torch

    from_first = [asked]
    torch.distributed.broadcast_object_list(from_first, src=0)
    return from_first[0]


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
