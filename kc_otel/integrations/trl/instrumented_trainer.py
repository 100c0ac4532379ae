"""Both kernels' log-probabilities out of a TRL GRPO trainer, before any clipping.

Only public names of the trainer are wrapped, on the one object: `compute_loss`, whose inputs hold what both kernels
said; `log`, which the recorder's scalars are added to; `rollout_func`, or `generate` and `sync_weights` of
`vllm_generation`, to know which weights sampled; and reward functions, which is where TRL hands out the dataset's
columns, and where rewards come from: they are taken where the contract has a `reward_range`, and every reward is said
by a function or a model that says one number. Removing puts that back.

Training side: `old_per_token_logps`, the training kernel at the weights that the rollout was scored with, so that
policy updates do not count as mismatch. TRL leaves them out where every batch is trained on before the next optimizer
step and its own importance correction is off; then the log-probabilities of the first pass are the same thing, and are
taken from the model's output. Either way each batch is compared once, however often it is trained on.

Quarantine goes through TRL's own `tool_mask`, which takes tokens out of the loss and leaves the model's input as it is.
The whole batch is still recorded.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Final, Self

from kc_otel._extras import extra
from kc_otel.contract.measuring_paths import judgeable
from kc_otel.contract.model import Contract
from kc_otel.contract.slices import Scalar
from kc_otel.integrations import listen, wrap
from kc_otel.integrations.transformers import log_verdicts
from kc_otel.integrations.trl.rollouts import OWN, RolloutBatch, own_attributes
from kc_otel.record.export_loop import DriftLog
from kc_otel.record.guided_loop import Quarantine, quarantine
from kc_otel.record.kernel import Kernel
from kc_otel.record.recorder import Recorder
from kc_otel.record.slice_table import asked_for
from kc_otel.record.telemetry.environment import resource_of_run
from kc_otel.record.work import Processing, Weights
from kc_otel.recordings.request import effective

__all__ = ["InstrumentedTrainer", "instrument"]

_SAMPLING_NAMES: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_log: Final = logging.getLogger("kc_otel")
_watched: Final[weakref.WeakKeyDictionary[Any, list[InstrumentedTrainer]]] = weakref.WeakKeyDictionary()
"""Instrumentations of each trainer."""


def instrument(
    trainer: Any,
    contract: Recorder | Contract | str | os.PathLike[str],
    *,
    attributes: Mapping[str, Scalar] | None = None,
    train: Kernel | None = None,
    inference: Kernel | None = None,
    processing: Processing | None = None,
    weights: Callable[[], Weights] | None = None,
    quarantine: Callable[[], Collection[str]] | None = None,
    log: DriftLog | None = None,
) -> InstrumentedTrainer:
    """Compare the two kernels of a TRL GRPO trainer on everything that it trains on.

    >>> instrument(trainer, "contract.yaml")                                             # a trl.GRPOTrainer
    >>> trainer.train()

    Slices are made of the dataset's columns that the contract names, and of `prompt_tokens`, `completion_tokens`,
    `advantage` and `mode` (train or eval). Where TRL's vLLM, or `processing`, truncates (top-p, top-k, min-p) sequences
    are counted as `processing_mismatch` instead of being measured: TRL's training side does not truncate. In a
    distributed run every process records what it trains on.

    Args:
        trainer: A `trl.GRPOTrainer` that samples with vLLM or with a `rollout_func`, before `train` is called.
        contract: The contract or the path of its YAML file, or a recorder that has one.
        attributes: Further attributes, of all sequences alike.
        train: The training kernel; None for what the trainer reports. Not with a recorder, which has its own.
        inference: The kernel that samples; None for what TRL's own vLLM reports, or, where the engine is in another
            process (vllm_mode="server", a `rollout_func`), for what the contract declares: give it there, or a new
            version of the engine has the name of the old one. Not with a recorder.
        processing: Temperature, top_p and the like that the log-probabilities of a `rollout_func` include.
        weights: Returns the optimizer step whose weights sample; called after each rollout. None to take it from TRL's
            own calls to vLLM. With a `rollout_func` that keeps another engine, only the caller knows the step.
        quarantine: Returns the slices whose rollouts should not be trained on, such as
            `lambda: router.quarantined("policy-7b")`; called before each loss. Sequences of these slices that break the
            contract by themselves, or fail an input check, then count in no loss; advantages and the loss's denominator
            are as TRL made them from the whole group, so the other sequences keep their weight. None for no quarantine.
        log: Such as a `kc_otel.TrainingLog`: its scalars are in whatever the trainer logs. Not with a recorder, which
            has its own.

    Returns:
        The instrumentation; `remove` it when it is no longer wanted.

    Raises:
        TypeError: If the trainer is not a GRPO trainer, or kernels or a log are given with a recorder.
        ValueError: If the trainer has no second kernel, if columns are wanted and no reward function can supply them,
            if no clause can judge a sequence for a quarantine, or if the contract is not valid.
        OSError: If the contract cannot be read.
    """
    for name in ("compute_loss", "reward_funcs", "use_vllm", "rollout_func"):
        if not hasattr(trainer, name):
            raise TypeError(
                f"trainer: {type(trainer).__name__} has no {name}; give a trl.GRPOTrainer of TRL 1.0 or newer "
                "(pip install 'kc-otel[trl]')"
            )
    if not trainer.use_vllm and trainer.rollout_func is None:
        raise ValueError(
            "trainer: it samples with the model that it trains, so there is no second kernel; "
            "set use_vllm=True or give a rollout_func that returns the sampler's log-probabilities"
        )
    if isinstance(contract, Recorder):
        if train is not None or inference is not None or log is not None:
            raise TypeError("train, inference, log: the recorder has its own; give them to the recorder")
        return InstrumentedTrainer(trainer, contract, attributes or {}, processing, weights, slices=quarantine)
    recorder = Recorder(
        contract,
        train=train or _training_kernel(trainer),
        inference=inference or _sampling_kernel(trainer),
        log=log,
        resource=resource_of_run("trl", "grpo", getattr(_config_of(trainer), "_name_or_path", None)),
    )
    try:
        return InstrumentedTrainer(
            trainer, recorder, attributes or {}, processing, weights, slices=quarantine, owned=True
        )
    except BaseException:
        recorder.shutdown()
        raise


def _training_kernel(trainer: Any) -> Kernel:
    """The trainer's model as a kernel version: number formats, attention, how it is split over devices."""
    with extra("trl", "a trainer's kernel version"):
        import torch  # noqa: PLC0415 - the core does without torch

    args, accelerator = trainer.args, trainer.accelerator
    parameter = next(trainer.model.parameters())
    autocast = "bfloat16" if args.bf16 else "float16" if args.fp16 else None
    processes = accelerator.num_processes
    cuda = parameter.device.type == "cuda"
    return Kernel(
        "torch",
        version=torch.__version__,
        dtype=parameter.dtype,
        attention=getattr(_config_of(trainer), "_attn_implementation", None),
        parallelism=f"{accelerator.distributed_type.value.lower()}={processes}" if processes > 1 else None,
        hardware=torch.cuda.get_device_name(parameter.device) if cuda else parameter.device.type,
        extra={} if autocast is None else {"autocast": autocast},
    )


def _sampling_kernel(trainer: Any) -> Kernel | None:
    """The vLLM that TRL runs in this process as a kernel version; None where it runs elsewhere."""
    llm = getattr(getattr(trainer, "vllm_generation", None), "llm", None)
    config = getattr(getattr(llm, "llm_engine", None), "vllm_config", None)
    if config is None:
        return None
    from vllm import __version__ as version  # noqa: PLC0415 - only where vLLM samples

    from kc_otel.integrations.vllm.engines import kernel_of  # noqa: PLC0415

    try:
        return kernel_of(config, version, (), os.environ)
    except Exception as error:  # noqa: BLE001 - a vLLM whose configuration is unknown samples all the same
        _log.warning("the configuration of TRL's vLLM could not be read (%s); its kernel is only 'vllm'", error)
        return Kernel("vllm", version=version)


def _config_of(trainer: Any) -> Any:
    return getattr(trainer.model, "config", None)


class InstrumentedTrainer:
    """An instrumented trainer; `remove` it, or use it as a context manager.

    Attributes:
        recorder: Recorder in use; `remove` shuts it down if it was made for this trainer.
        quarantine: Remainder of the newest batch; None while there is no quarantine.
    """

    def __init__(
        self,
        trainer: Any,
        recorder: Recorder,
        attributes: Mapping[str, Scalar],
        processing: Processing | None,
        weights: Callable[[], Weights] | None,
        *,
        slices: Callable[[], Collection[str]] | None = None,
        owned: bool = False,
    ) -> None:
        if slices is not None and not any(map(judgeable, recorder.contract.clauses)):
            raise ValueError("quarantine: the contract has no clause that a single sequence can be judged by")
        self.recorder: Final = recorder
        self.quarantine: Quarantine | None = None
        self._slices = slices
        self._trainer = trainer
        self._attributes = dict(attributes)
        self._processing = _processings(trainer, processing)
        self._weights = weights
        self._owned = owned
        self._columns = asked_for(recorder.contract) - OWN - set(attributes)
        self._newest: dict[bool, RolloutBatch] = {}  # of training and of evaluation, which do not mix
        self._compared: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._logged: set[str] = set()
        # vLLM starts with the weights that training starts from; later on only a synchronisation tells.
        self._synced: Weights = 0 if trainer.use_vllm and trainer.state.global_step == 0 else None
        self._active = True
        self._take_place()
        with ExitStack() as undo:
            self._attach(undo)
            self._undo = undo.pop_all()
        _watched.setdefault(trainer, []).append(self)

    def remove(self) -> None:
        """Restore the wrapped methods; a second call does nothing.

        Where another wrapper surrounds ours, ours stays but stops recording.
        """
        if self._active:
            self._active = False
            self._undo.close()
            _watched[self._trainer].remove(self)
            if self._owned:
                self.recorder.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def _take_place(self) -> None:
        """Replace an earlier instrumentation of this trainer and contract, so that a notebook cell may run twice."""
        name = self.recorder.contract.name
        for earlier in list(_watched.get(self._trainer, ())):
            if earlier.recorder.contract.name == name:
                _log.warning("the trainer was instrumented for contract %s already: this takes its place", name)
                earlier.remove()

    def _attach(self, undo: ExitStack) -> None:
        trainer = self._trainer
        if self.recorder.log is not None:
            undo.callback(log_verdicts(trainer, self.recorder))
        undo.callback(wrap(trainer, "compute_loss", self._around_loss))
        if trainer.use_vllm:
            undo.callback(listen(trainer.vllm_generation, "sync_weights", self._failed, after=self._sent))
        if trainer.rollout_func is not None:
            undo.callback(listen(trainer, "rollout_func", self._failed, after=self._rolled_out))
        elif trainer.use_vllm:
            undo.callback(listen(trainer.vllm_generation, "generate", self._failed, after=self._generated))
        functions = [i for i, reward in enumerate(trainer.reward_funcs) if not hasattr(reward, "parameters")]
        self._rewards = bool(functions) and self.recorder.contract.assumptions.reward_range is not None
        if self._columns and not functions:
            raise ValueError(
                f"slices: the columns {', '.join(sorted(self._columns))} are only handed to reward functions, and "
                "all of these are models; add a function to reward_funcs that returns None for every completion"
            )
        for number, reward in enumerate(trainer.reward_funcs):
            if number in functions:  # each has its say, and any one is handed the columns
                if self._rewards or (self._columns and number == functions[0]):
                    after = partial(self._scored, number)
                    undo.callback(
                        listen(trainer.reward_funcs, number, self._failed, before=self._rewarded, after=after)
                    )
            elif self._rewards:
                hook = partial(self._guarded, self._model_said, number)
                undo.callback(reward.register_forward_hook(hook).remove)

    def _around_loss(self, original: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        scores: list[Any] = []
        listening = self._guarded(self._listen, model, inputs, scores)
        reduced = self._guarded(self._reduced, inputs)
        try:
            loss = original(model, inputs if reduced is None else reduced, *args, **kwargs)
        finally:
            if listening is not None:
                listening.remove()
        # After the loss: TRL has read metrics of this batch by then, and the device has nothing left to wait for.
        self._guarded(self._record, inputs, scores)
        return loss

    def _sent(self, *_: Any, **__: Any) -> None:
        self._synced = self._trainer.state.global_step

    def _rolled_out(self, output: Any, *_: Any, **__: Any) -> None:
        self._begin(output.get("prompt_ids"))

    def _generated(self, _: Any, prompts: Sequence[Any] | None = None, *__: Any, **___: Any) -> None:
        self._begin(prompts)

    def _begin(self, prompts: Sequence[Any] | None) -> None:
        weights = self._synced if self._weights is None else self._weights()
        step, current = self._trainer.state.global_step, self._current
        # Further calls before the reward, as in a loop of tool calls, continue it.
        if current is None or current.rewarded or current.step != step:
            self._newest[self._training] = RolloutBatch(step, weights, prompts)

    def _rewarded(self, /, *_: Any, **given: Any) -> None:
        columns = {name: given[name] for name in self._columns if isinstance(given.get(name), list | tuple)}
        if missing := sorted(self._columns - columns.keys()):
            self._warn_once(
                f"slices use {', '.join(missing)}, which the dataset has no column for; nothing will be in them"
            )
        if (current := self._current) is not None:
            current.reward(given["completion_ids"], columns)

    def _scored(self, number: int, scores: Any, /, *_: Any, **__: Any) -> None:
        if self._rewards and (current := self._current) is not None:
            current.score(number, scores)

    def _model_said(self, number: int, _model: Any, _inputs: Any, output: Any) -> None:
        self._scored(number, output.logits[:, 0].float().tolist())

    def _listen(self, model: Any, inputs: Mapping[str, Any], scores: list[Any]) -> Any:
        """A hook that takes the current log-probabilities from the model's output, where TRL gives no older ones."""
        if inputs.get("old_per_token_logps") is not None or self._known(inputs):
            return None

        def keep(_: Any, __: Any, output: Any) -> None:
            scores.append(getattr(output, "log_probs", None))

        return model.register_forward_hook(keep)

    def _reduced(self, inputs: Mapping[str, Any]) -> dict[str, Any] | None:
        """The batch without the sequences that are kept out; None where all of them may be trained on."""
        self.quarantine = None
        slices = self._slices() if self._slices is not None and self._training else ()
        if not slices:
            return None
        if inputs.get("old_per_token_logps") is None or inputs.get("sampling_per_token_logps") is None:
            raise ValueError(
                "quarantine: the batch has no log-probabilities of both kernels before the loss, so nothing is kept "
                "out; TRL has them with use_vllm, or with steps_per_generation above gradient_accumulation_steps"
            )
        mask = _counted(inputs)
        found = quarantine(
            inputs["old_per_token_logps"],
            inputs["sampling_per_token_logps"],
            self.recorder.contract,
            mask=mask,
            attributes=self._attributes_of(inputs, mask, self._current),
            slices=slices,
        )
        self.quarantine = found
        self.recorder.quarantined(found)
        if not any(found.reasons):
            return None
        reduced = {**inputs, "tool_mask": mask * found.keep[:, None]}
        if "importance_sampling_ratio" in inputs:  # not a number where a log-probability is not
            ratio = inputs["importance_sampling_ratio"]
            reduced["importance_sampling_ratio"] = ratio.where(found.keep[:, None], ratio.new_ones(()))
        return reduced

    def _record(self, inputs: Mapping[str, Any], scores: Sequence[Any]) -> None:
        if self._known(inputs):
            return
        tokens = inputs["completion_ids"]
        self._compared[id(tokens)] = tokens
        sampled = inputs.get("sampling_per_token_logps")
        if sampled is None:
            raise ValueError("the batch has no sampling_per_token_logps: its sampler returned no log-probabilities")
        train = inputs.get("old_per_token_logps")
        if train is None:
            if not scores or scores[-1] is None:
                raise ValueError(
                    "neither old_per_token_logps nor the model's output has the training log-probabilities"
                )
            train = scores[-1][:, -tokens.shape[1] :]
        mask = _counted(inputs)
        current, rewards = self._current, None
        if current is not None and self._rewards:
            rewards = current.rewards_of(inputs, self._trainer.reward_weights.tolist())
        self.recorder.compare(
            train,
            sampled,
            mask=mask,
            token_ids=tokens,
            advantages=inputs["advantages"],
            rewards=rewards,
            attributes=self._attributes_of(inputs, mask, current),
            processing=self._processing,
            weights=None if current is None else (current.step, current.weights),
            prompt_ids=inputs.get("prompt_ids"),
            group_size=self._rollouts,
        )

    def _attributes_of(
        self, inputs: Mapping[str, Any], mask: Any, current: RolloutBatch | None
    ) -> list[dict[str, Scalar]]:
        rows = own_attributes(inputs, mask, training=self._training)
        if self._columns and current is not None:
            found = current.columns_of(inputs)
            if any(columns is None and row["completion_tokens"] for columns, row in zip(found, rows, strict=True)):
                self._warn_once(
                    "columns of some sequences could not be told; they count in no slice that is made of columns"
                )
            rows = [{**(columns or {}), **row} for columns, row in zip(found, rows, strict=True)]
        return [{**row, **self._attributes} for row in rows]

    @property
    def _rollouts(self) -> int | None:
        """Rollouts of a prompt, which TRL shuffles over the micro-batches of a step."""
        of = ("num_generations",) if self._training else ("num_generations_eval", "num_generations")
        return next((number for name in of if (number := getattr(self._trainer, name, None))), None)

    @property
    def _current(self) -> RolloutBatch | None:
        """The rollout that batches come from now."""
        return self._newest.get(self._training)

    @property
    def _training(self) -> bool:
        return bool(self._trainer.model.training)

    def _known(self, inputs: Mapping[str, Any]) -> bool:
        tokens = inputs["completion_ids"]
        return self._compared.get(id(tokens)) is tokens

    def _warn_once(self, text: str) -> None:
        if text not in self._logged:
            self._logged.add(text)
            _log.warning("contract %s: %s", self.recorder.contract.name, text)

    def _guarded(self, function: Callable[..., Any], *args: Any) -> Any:
        try:
            return function(*args)
        except Exception as error:  # noqa: BLE001 - the trainer must not fail because somebody watches
            return self._failed(error)

    def _failed(self, error: Exception) -> None:
        """Count and log an exception, so that training goes on."""
        self.recorder.drop("rollout-unusable", error)


def _counted(inputs: Mapping[str, Any]) -> Any:
    """Tokens that the model sampled: no padding, and nothing that a tool said."""
    mask = inputs["completion_mask"]
    return mask * inputs["tool_mask"] if "tool_mask" in inputs else mask


def _processings(trainer: Any, inference: Processing | None) -> tuple[Processing, Processing] | None:
    """Return the processing in the log-probabilities of both sides; None if the inference side's is unknown.

    TRL divides the training kernel's logits by the temperature and does nothing else to them, while its vLLM returns
    log-probabilities from after top-p and all other processing: where these are used the two are of different
    distributions. `inference` is the processing of the user's own `rollout_func`; None where TRL samples.
    """
    args = trainer.args
    if inference is None and trainer.rollout_func is not None:
        return None
    if inference is None:
        asked = {**{name: getattr(args, name, None) for name in _SAMPLING_NAMES}, **(args.generation_kwargs or {})}
        inference = {name: asked[name] for name in _SAMPLING_NAMES if asked[name] is not None}
    return effective({"temperature": args.temperature}), effective(inference)
