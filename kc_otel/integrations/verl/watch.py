"""Both kernels' log-probabilities out of verl's trainers, before rejection and clipping.

verl compares them itself, in `calculate_debug_metrics`, wherever the trainer scores what the engine sampled: that is
where they are taken. Rewards and advantages come later in the step: from `compute_data_metrics` in the trainer of
`verl.trainer.ppo.ray_trainer`, and from `_compute_advantage` in those of `verl.trainer.ppo.v1`, whose batches lie in a
TransferQueue. In bypass mode the trainer scores nothing, so that there is nothing to compare.
"""

from __future__ import annotations

import atexit
import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from kc_otel._extras import extra
from kc_otel.contract.load import load
from kc_otel.contract.model import Contract
from kc_otel.integrations.verl.configuration import kernels, processings, run_resource
from kc_otel.integrations.verl.logged_batch import LoggedBatch, attributes_of, by_version
from kc_otel.record.recorder import Recorder
from kc_otel.record.work import Weights

__all__ = ["TrainerWatch", "watch"]

_log: Final = logging.getLogger("kc_otel")
_V1: Final = "verl.trainer.ppo.v1.trainer_base"
_LEGACY: Final = "verl.trainer.ppo.ray_trainer"
_REWARDED: Final = ("rm_scores", "advantages")
_BYPASS: Final = (
    "kc-otel: algorithm.rollout_correction.bypass_mode is on: verl's trainer scores no rollouts before it trains on "
    "them, so no drift is measured; kc-otel needs bypass_mode=False"
)
_NO_LOGPROBS: Final = (
    "kc-otel: actor_rollout_ref.rollout.calculate_log_probs is off: the engine's log-probabilities are not kept, so no "
    "drift is measured; set actor_rollout_ref.rollout.calculate_log_probs=True"
)


class TrainerWatch:
    """Records what the trainer of a process compares. Nothing here raises into verl.

    Args:
        contract: The contract.
        make: Makes the recorder from the two kernels, when there is first something to record.
    """

    def __init__(self, contract: Contract, make: Callable[..., Recorder] = Recorder) -> None:
        self._contract = contract
        self._make = make
        self._recorder: Recorder | None = None
        self._pending: LoggedBatch | None = None
        self._trainer: Any = None
        self._failed: set[str] = set()

    def around_fit(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        """A trainer begins: its configuration says what the kernels are; at its end what is pending is recorded."""
        self._trainer = instance
        self._guarded(self._check, instance)
        try:
            return wrapped(*args, **kwargs)
        finally:
            self.flush()
            self._trainer = None

    def around_debug_metrics(self, wrapped: Any, _: Any, args: Any, kwargs: Any) -> Any:
        """The trainer has scored what the engine sampled."""
        found = wrapped(*args, **kwargs)
        self._guarded(self._compared, kwargs.get("data", args[0] if args else None))
        return found

    def around_data_metrics(self, wrapped: Any, _: Any, args: Any, kwargs: Any) -> Any:
        """A step of the trainer of `ray_trainer` is done: rewards and advantages are in the batch."""
        found = wrapped(*args, **kwargs)
        self._guarded(self._finished, kwargs.get("batch", args[0] if args else None))
        return found

    def around_advantage(self, wrapped: Any, _: Any, args: Any, kwargs: Any) -> Any:
        """A trainer of v1 has computed advantages, and put them into its TransferQueue."""
        batch = wrapped(*args, **kwargs)
        self._guarded(self._advantaged, batch)
        return batch

    def flush(self) -> None:
        """Record what is pending without rewards, and export."""
        self._guarded(self._record)
        if self._recorder is not None:
            self._guarded(self._recorder.force_flush)

    def _check(self, trainer: Any) -> None:
        config = trainer.config
        correction = config.algorithm.get("rollout_correction") or {}
        if correction.get("bypass_mode"):
            _log.warning(_BYPASS)
        elif not config.actor_rollout_ref.rollout.get("calculate_log_probs"):
            _log.warning(_NO_LOGPROBS)

    def _compared(self, data: Any) -> None:
        self._record()  # a step whose rewards never came
        self._pending = LoggedBatch.of(data)

    def _finished(self, data: Any) -> None:
        pending = self._pending
        if pending is None:
            return
        if len(data.batch) == len(pending.train):
            pending.rewarded(data.batch.get("token_level_scores"), data.batch.get("advantages"))
        self._record()

    def _advantaged(self, batch: Any) -> None:
        pending = self._pending
        if pending is None:
            return
        try:
            self._guarded(self._from_queue, batch, pending)
        finally:
            self._record()

    def _from_queue(self, batch: Any, pending: LoggedBatch) -> None:
        """What v1 keeps in its TransferQueue; columns that the contract names, as far as the queue has them."""
        import transfer_queue  # noqa: PLC0415 - verl has it

        tags = list(batch.tags)
        if len(tags) != len(pending.train):
            return
        pending.kept = np.array([not tag.get("is_padding", False) for tag in tags], dtype=bool)
        pending.versions = [tag.get("min_global_steps") for tag in tags]
        named = {name for spec in self._contract.slices.values() for name in spec.conditions}
        for row, tag in zip(pending.attributes, tags, strict=True):
            row["prompt_tokens"] = int(tag.get("prompt_len", 0))

        def get(name: str) -> Any:
            given = {"keys": batch.keys, "partition_id": batch.partition_id, "select_fields": [name]}
            return transfer_queue.kv_batch_get(**given)[name]

        for name in sorted(named - {"prompt_tokens", "completion_tokens"}):
            values = self._guarded(get, name)
            if values is not None:
                columns = attributes_of({name: list(values)}, len(tags))
                for row, column in zip(pending.attributes, columns, strict=True):
                    row.update(column)
        scores, advantages = (self._padded(get(name), pending.train) for name in _REWARDED)
        pending.rewarded(scores, advantages)

    @staticmethod
    def _padded(nested: Any, like: Any) -> Any:
        return nested.to_padded_tensor(0.0, output_size=tuple(like.shape)) if nested.is_nested else nested

    def _record(self) -> None:
        """Hand what is pending to the recorder, one call for each version of the weights that sampled."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        trainer = self._trainer
        recorder = self._recorder = self._recorder or self._made(trainer)
        processing = None if trainer is None else processings(trainer.config)
        rewards = pending.rewards if self._contract.assumptions.reward_range is not None else None
        for version, rows in by_version(pending):
            if not rows.size:
                continue
            recorder.compare(
                pending.train[rows],
                pending.inference[rows],
                mask=None if pending.mask is None else pending.mask[rows],
                token_ids=pending.tokens[rows],
                attributes=[pending.attributes[row] for row in rows],
                advantages=None if pending.advantages is None else pending.advantages[rows],
                rewards=None if rewards is None else rewards[rows],
                processing=processing,
                weights=(_trained(trainer), version),
            )

    def _made(self, trainer: Any) -> Recorder:
        said: Mapping[str, Any] = {}
        if trainer is not None:
            train, inference = kernels(trainer.config)
            said = {"train": train, "inference": inference, "resource": run_resource(trainer.config)}
        recorder = self._make(self._contract, **said)
        atexit.register(self.flush)  # before the recorder's own end: it was registered earlier
        return recorder

    def _guarded(self, function: Callable[..., Any], *args: Any) -> Any:
        """Training goes on whatever goes wrong here; each kind of fault is said once."""
        try:
            return function(*args)
        except Exception as error:  # noqa: BLE001 - the trainer must not fail because somebody watches
            text = f"{type(error).__name__}: {error}"
            if self._recorder is not None:
                self._recorder.drop("rollout-unusable", text)
            elif text not in self._failed:
                self._failed.add(text)
                _log.error("kc-otel: a batch of verl was not recorded: %s", text)
            return None


def _trained(trainer: Any) -> Weights:
    """Optimizer steps done when the step's rollouts were scored: verl counts the step that it is in."""
    return None if trainer is None else int(trainer.global_steps) - 1


def watch(path: str) -> TrainerWatch:
    """Watch whatever trainer of verl this process will have.

    Args:
        path: The contract's file.

    Raises:
        ContractError: If it is no contract.
        OSError: If it cannot be read.
        MissingExtraError: If wrapt is not installed.
    """
    with extra("verl", "the plugin of verl"):
        from wrapt import register_post_import_hook, wrap_function_wrapper  # noqa: PLC0415 - the core does without

    found = TrainerWatch(load(path))
    wrappers: Mapping[str, Mapping[str, Callable[..., Any]]] = {
        "verl.utils.debug.metrics": {"calculate_debug_metrics": found.around_debug_metrics},
        "verl.trainer.ppo.metric_utils": {"compute_data_metrics": found.around_data_metrics},
        _LEGACY: {"RayPPOTrainer.fit": found.around_fit},
        _V1: {"PPOTrainer.fit": found.around_fit, "PPOTrainer._compute_advantage": found.around_advantage},
    }

    def wrap(module: Any) -> None:
        for name, wrapper in wrappers[module.__name__].items():
            try:
                wrap_function_wrapper(module, name, wrapper)
            except AttributeError as error:
                _log.error("kc-otel: %s is not as expected, and is not watched: %s", module.__name__, error)

    for module in wrappers:
        register_post_import_hook(wrap, module)
    return found
