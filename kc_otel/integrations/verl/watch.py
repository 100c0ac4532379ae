"""Both kernels' log-probabilities out of verl's trainers, before rejection and clipping.

verl compares them itself, in `calculate_debug_metrics`, wherever the trainer scores what the engine sampled: that is
where they are taken. Rewards and advantages come later in the step: from `compute_data_metrics` in the trainer of
`verl.trainer.ppo.ray_trainer`, and from `_compute_advantage` in those of `verl.trainer.ppo.v1`, whose batches lie in a
TransferQueue. In bypass mode the trainer scores nothing: `first_pass` takes what the workers' loss compares.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from kc_otel._extras import extra
from kc_otel.contract.load import load
from kc_otel.contract.model import Contract
from kc_otel.integrations.verl.audit import Audit
from kc_otel.integrations.verl.first_pass import WORKER_MODULES, FirstPassWatch
from kc_otel.integrations.verl.shared import LoggedBatch, Watch, attributes_of, padded
from kc_otel.record.recorder import Recorder
from kc_otel.record.work import Weights

_log: Final = logging.getLogger("kc_otel")
_V1_MODULE: Final = "verl.trainer.ppo.v1.trainer_base"
_LEGACY_MODULE: Final = "verl.trainer.ppo.ray_trainer"
_REWARD_COLUMNS: Final = ("rm_scores", "advantages")
_NO_LOGPROBS: Final = (
    "kc-otel: actor_rollout_ref.rollout.calculate_log_probs is off: the engine's log-probabilities are not kept, so no "
    "drift is measured; set actor_rollout_ref.rollout.calculate_log_probs=True"
)


class TrainerWatch(Watch):
    """Records what the trainer of a process compares. Nothing here raises into verl."""

    def __init__(self, contract: Contract, make: Callable[..., Recorder] = Recorder) -> None:
        super().__init__(contract, make)
        self._pending: LoggedBatch | None = None
        self._trainer: Any = None
        self.audits = Audit(self._audited)

    def around_fit(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        """Wrap a trainer's fit: read the kernels from its configuration, and record pending batches at its end."""
        self._trainer = instance
        self._guarded(self._check, instance)
        try:
            return wrapped(*args, **kwargs)
        finally:
            self.flush()
            self._trainer = None

    def around_debug_metrics(self, wrapped: Any, _: Any, args: Any, kwargs: Any) -> Any:
        """Take the batch whose rollouts the trainer has scored."""
        found = wrapped(*args, **kwargs)
        self._guarded(self._compared, kwargs.get("data", args[0] if args else None))
        return found

    def around_data_metrics(self, wrapped: Any, _: Any, args: Any, kwargs: Any) -> Any:
        """Take rewards and advantages at the end of a step of `ray_trainer`."""
        found = wrapped(*args, **kwargs)
        self._guarded(self._finished, kwargs.get("batch", args[0] if args else None))
        return found

    def around_advantage(self, wrapped: Any, _: Any, args: Any, kwargs: Any) -> Any:
        """Take the advantages that a trainer of v1 has put into its TransferQueue."""
        batch = wrapped(*args, **kwargs)
        self._guarded(self._advantaged, batch)
        return batch

    def flush(self) -> None:
        """Record what is pending without rewards, and export."""
        self._guarded(self._record)
        super().flush()

    def _check(self, trainer: Any) -> None:
        if not trainer.config.actor_rollout_ref.rollout.get("calculate_log_probs"):
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
        """Read columns that the contract names from v1's TransferQueue, as far as the queue has them."""
        import transfer_queue  # noqa: PLC0415 - verl has it

        tags = list(batch.tags)
        if len(tags) != len(pending.train):
            return
        pending.kept = np.array([not tag.get("is_padding", False) for tag in tags], dtype=bool)
        pending.versions = [tag.get("min_global_steps") for tag in tags]
        for row, tag in zip(pending.attributes, tags, strict=True):
            row["prompt_tokens"] = int(tag.get("prompt_len", 0))

        def get(name: str) -> Any:
            given = {"keys": batch.keys, "partition_id": batch.partition_id, "select_fields": [name]}
            return transfer_queue.kv_batch_get(**given)[name]

        for name in self._columns:
            values = self._guarded(get, name)
            if values is not None:
                columns = attributes_of({name: list(values)}, len(tags))
                for row, column in zip(pending.attributes, columns, strict=True):
                    row.update(column)
        pending.rewarded(*(padded(get(name), pending.train.shape) for name in _REWARD_COLUMNS))

    def _audited(self, trainer: Any, data: Any, scored: Any, tags: Sequence[Mapping[str, Any]]) -> None:
        """A few prompts of a step in bypass mode were scored."""
        logged = LoggedBatch.audited(data, scored, tags, self._columns)
        self._record_batch(logged, trainer.config, _trained(trainer))

    def _record(self) -> None:
        """Hand what is pending to the recorder."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        if self._contract.assumptions.reward_range is None:
            pending.rewards = None
        trainer = self._trainer
        self._record_batch(pending, None if trainer is None else trainer.config, _trained(trainer))


def _trained(trainer: Any) -> Weights:
    """Optimizer steps done when the step's rollouts were scored: verl counts the step that it is in."""
    return None if trainer is None else int(trainer.global_steps) - 1


def watch(path: str) -> TrainerWatch:
    """Watch whatever trainer of verl this process will have, under the contract of a file.

    Raises:
        ContractError: If it is no contract.
        OSError: If it cannot be read.
        MissingExtraError: If wrapt is not installed.
    """
    with extra("verl", "the plugin of verl"):
        from wrapt import register_post_import_hook, wrap_function_wrapper  # noqa: PLC0415 - the core does without

    contract = load(path)
    found, workers = TrainerWatch(contract), FirstPassWatch(contract)
    wrappers: dict[str, dict[str, Callable[..., Any]]] = {
        "verl.utils.debug.metrics": {"calculate_debug_metrics": found.around_debug_metrics},
        "verl.trainer.ppo.metric_utils": {"compute_data_metrics": found.around_data_metrics},
        _LEGACY_MODULE: {"RayPPOTrainer.fit": found.around_fit},
        _V1_MODULE: {"PPOTrainer.fit": found.around_fit, "PPOTrainer._compute_advantage": found.around_advantage},
    }

    def wrap(module: Any) -> None:
        try:
            for name, wrapper in wrappers.get(module.__name__, {}).items():
                wrap_function_wrapper(module, name, wrapper)
            workers.attach(module)
        except AttributeError as error:
            _log.error("kc-otel: %s is not as expected, and is not watched: %s", module.__name__, error)

    if found.audits.share:
        wrappers[_V1_MODULE] |= {
            "PPOTrainer._compute_old_log_prob": found.audits.around_old_log_prob,
            "PPOTrainer._update_actor": found.audits.around_update,
        }

    for module in (*wrappers, *WORKER_MODULES):
        register_post_import_hook(wrap, module)
    return found
