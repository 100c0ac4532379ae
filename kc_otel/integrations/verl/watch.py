"""Both kernels' log-probabilities out of verl's trainers, before rejection and clipping.

verl compares them itself, in `calculate_debug_metrics`, wherever the trainer scores what the engine sampled: that is
where they are taken. Rewards and advantages come later in the step: from `compute_data_metrics` in the trainer of
`verl.trainer.ppo.ray_trainer`, and from `_compute_advantage` in those of `verl.trainer.ppo.v1`, whose batches lie in a
TransferQueue. In bypass mode the trainer scores nothing: `first_pass` takes what the workers' loss compares.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, Final

import numpy as np

from kc_otel._extras import extra
from kc_otel.contract.load import load
from kc_otel.contract.model import Contract
from kc_otel.integrations.verl.first_pass import AUDITED_PROMPTS, FirstPassWatch
from kc_otel.integrations.verl.logged_batch import LoggedBatch, Watch, attributes_of, column, padded
from kc_otel.record.recorder import Recorder
from kc_otel.record.work import Weights

_log: Final = logging.getLogger("kc_otel")
_REWARD_COLUMNS: Final = ("rm_scores", "advantages")
_NO_LOGPROBS: Final = (
    "kc-otel: actor_rollout_ref.rollout.calculate_log_probs is off: the engine's log-probabilities are not kept, so no "
    "drift is measured; set actor_rollout_ref.rollout.calculate_log_probs=True"
)

_PARTITION: Final = "kc-otel-audit"
_BUDGET_WARNING: Final = (
    "kc-otel: audit forwards: %d of the step's %d sequences were scored in %.0f ms; KC_OTEL_AUDIT_BUDGET allows "
    "%.0f ms a step on average"
)
_UNSENT_FIELDS: Final = frozenset({"entropy", "log_probs", "old_log_probs"})


def audited(prompt: str, share: float) -> bool:
    """Return whether a prompt is chosen, which its name alone decides."""
    digest = hashlib.blake2b(prompt.encode(), digest_size=8, person=b"kc-audit").digest()
    return int.from_bytes(digest, "big") < share * 2.0**64


class Audit:
    """Audit forwards in bypass mode: a few prompts are scored before the step, by the training kernel.

    An audit scores a share of the step's prompts, chosen by a hash of their names (`KC_OTEL_AUDIT_SHARE`, such as
    0.02): whole prompts, whatever their length, reward or drift, so the unweighted mean over them is an unbiased
    estimate of the mean over the step, which that over the first mini-batch of an update is not.

    `KC_OTEL_AUDIT_BUDGET`, milliseconds a step on average, caps the time: each step adds them to an account, which an
    audit's own time is taken from, and no audit begins while the account is overdrawn. Earlier steps alone decide that,
    so that skipping does not select among the step's prompts.

    The sequences are scored as copies in a partition of their own, which is cleared again. The names of the prompts
    that were scored go with the update to the workers, which leave these prompts out: each counts once, and none is
    lost where an audit is skipped or fails.

    `watch` records the scored sequences.
    """

    def __init__(self, watch: TrainerWatch, clock: Callable[[], float] = time.monotonic) -> None:
        self.share = _number("KC_OTEL_AUDIT_SHARE", 0.0, 1.0)
        self._watch = watch
        self._clock = clock
        self._budget = _number("KC_OTEL_AUDIT_BUDGET", 500.0) / 1000.0
        self._account = 0.0
        self._skipped = 0
        self._scored: frozenset[str] = frozenset()
        self._said = False

    def look(self, batch: Any, trainer: Any, _: Any, metrics: Any) -> None:
        """Audit a step before its first update, once v1's trainer has taken the engine's log-probabilities."""
        self._scored = frozenset()
        correction = trainer.config.algorithm.get("rollout_correction") or {}
        if correction.get("bypass_mode") and not getattr(trainer, "local_trigger_step", 0):
            self._step(trainer, batch, metrics)

    def mark(self, _: Any, batch: Any, *__: Any, **___: Any) -> None:
        """Send the names of the prompts that were scored along with the update."""
        if self._scored:
            batch.extra_info[AUDITED_PROMPTS] = self._scored

    def _step(self, trainer: Any, batch: Any, metrics: MutableMapping[str, Any]) -> None:
        begun, scored = self._clock(), 0
        self._account = min(self._account + self._budget, self._budget)
        if self._account < 0.0:
            self._skipped += 1
        else:
            try:
                scored = self._score(trainer, batch)
            finally:
                self._account -= self._clock() - begun
        spent = 1000.0 * (self._clock() - begun)
        if scored and not self._said:
            self._said = True
            _log.warning(_BUDGET_WARNING, scored, len(batch), spent, 1000.0 * self._budget)
        metrics["kc/audit/ms"] = spent
        metrics["kc/audit/sequences"] = scored
        metrics["kc/audit/skipped_steps"] = self._skipped

    def _score(self, trainer: Any, batch: Any) -> int:
        """Score the chosen prompts of a batch with the weights that the step begins with. Returns the sequences."""
        with extra("verl", "an audit forward"):
            import transfer_queue as queue  # noqa: PLC0415 - verl has it
            from verl.utils.tensordict_utils import index_select_tensor_dict  # noqa: PLC0415
            from verl.workers.utils.padding import response_from_nested  # noqa: PLC0415

        place = {"partition_id": batch.partition_id}
        names = column(queue.kv_batch_get(keys=batch.keys, select_fields=["uid"], **place), "uid")
        chosen = batch.select_keys([
            key
            for key, tag, name in zip(batch.keys, batch.tags, names, strict=True)
            if audited(str(name), self.share) and not tag.get("is_padding", False)
        ])  # fmt: skip
        if not chosen.keys:
            return 0
        data = queue.kv_batch_get(keys=chosen.keys, **place)
        # Every rank gets as many whole micro-batches as the others: some sequences again fill them up, and count once.
        scoring = trainer.config.actor_rollout_ref.rollout
        rows_of_rank = 1 if scoring.log_prob_use_dynamic_bsz else scoring.log_prob_micro_batch_size_per_gpu
        more = -len(chosen) % (trainer.actor_rollout_wg.world_size * rows_of_rank)
        rows = [at % len(chosen) for at in range(len(chosen) + more)]
        copies = index_select_tensor_dict(data.exclude(*_UNSENT_FIELDS), rows)
        keys, place = [f"{at}-audit" for at in range(len(rows))], {"partition_id": _PARTITION}
        try:
            meta = queue.kv_batch_put(keys=keys, fields=copies, tags=[chosen.tags[row] for row in rows], **place)
            meta.extra_info = {
                **(batch.extra_info or {}), "calculate_entropy": False, "compute_loss": False,
                "temperature": trainer.config.actor_rollout_ref.rollout.temperature,
            }  # fmt: skip
            trainer.actor_rollout_wg.compute_log_prob(meta)
            found = queue.kv_batch_get(keys=keys[: len(chosen)], select_fields=["log_probs", "response_mask"], **place)
        finally:
            queue.kv_clear(keys=keys, **place)
        self._watch.audited(
            trainer, data, response_from_nested(found["log_probs"], found["response_mask"]), chosen.tags
        )
        self._scored = frozenset(str(name) for name in names if audited(str(name), self.share))
        return len(chosen)


class TrainerWatch(Watch):
    """Records what the trainer of a process compares. Nothing here raises into verl."""

    def __init__(self, contract: Contract, make: Callable[..., Recorder] = Recorder) -> None:
        super().__init__(contract, make)
        self._pending: LoggedBatch | None = None
        self._trainer: Any = None
        self.audits = Audit(self)
        fit = self.around(self._around_fit)
        v1 = {"PPOTrainer.fit": fit, "PPOTrainer._compute_advantage": self.hook(after=self._advantaged)}
        if self.audits.share:
            v1 |= {
                "PPOTrainer._compute_old_log_prob": self.hook(after=self.audits.look),
                "PPOTrainer._update_actor": self.hook(before=self.audits.mark),
            }
        self.wrappers = {
            "verl.utils.debug.metrics": {"calculate_debug_metrics": self.hook(after=self._compared)},
            "verl.trainer.ppo.metric_utils": {"compute_data_metrics": self.hook(after=self._finished)},
            "verl.trainer.ppo.ray_trainer": {"RayPPOTrainer.fit": fit},
            "verl.trainer.ppo.v1.trainer_base": v1,
        }

    def _around_fit(self, original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
        """Read the kernels from a trainer's configuration, and record pending batches at its end."""
        self._trainer = trainer
        self.guarded(self._check, trainer)
        try:
            return original(trainer, *args, **kwargs)
        finally:
            self.flush()
            self._trainer = None

    def flush(self) -> None:
        """Record what is pending without rewards, and export."""
        self.guarded(self._record)
        super().flush()

    def _check(self, trainer: Any) -> None:
        if not trainer.config.actor_rollout_ref.rollout.get("calculate_log_probs"):
            _log.warning(_NO_LOGPROBS)

    def _compared(self, _: Any, data: Any) -> None:
        """Take the batch whose rollouts the trainer has scored."""
        self._record()  # a step whose rewards never came
        self._pending = LoggedBatch.of(data)

    def _finished(self, _: Any, batch: Any, *__: Any, **___: Any) -> None:
        """Take rewards and advantages at the end of a step of `ray_trainer`."""
        pending = self._pending
        if pending is None:
            return
        if len(batch.batch) == len(pending.train):
            pending.rewarded(batch.batch.get("token_level_scores"), batch.batch.get("advantages"))
        self._record()

    def _advantaged(self, batch: Any, *_: Any, **__: Any) -> None:
        """Take the advantages that a trainer of v1 has put into its TransferQueue."""
        pending = self._pending
        if pending is None:
            return
        try:
            self.guarded(self._from_queue, batch, pending)
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
            values = self.guarded(get, name)
            if values is not None:
                columns = attributes_of({name: list(values)}, len(tags))
                for row, column in zip(pending.attributes, columns, strict=True):
                    row.update(column)
        pending.rewarded(*(padded(get(name), pending.train.shape) for name in _REWARD_COLUMNS))

    def audited(self, trainer: Any, data: Any, scored: Any, tags: Sequence[Mapping[str, Any]]) -> None:
        """Record a few prompts of a step in bypass mode: a trainer's fields, the scores of its kernel, and tags."""
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


def _number(name: str, default: float, most: float = float("inf")) -> float:
    text = os.environ.get(name, "") or str(default)
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value <= most:
        raise ValueError(f"{name}: {text!r} is not a number from 0 to {most:g}")
    return value


def watch(path: str) -> None:
    """Watch whatever trainer and worker of verl this process will have, under the contract of a file.

    Raises:
        ContractError: If it is no contract.
        OSError: If it cannot be read.
        MissingExtraError: If wrapt is not installed.
    """
    with extra("verl", "the plugin of verl"):
        from wrapt import register_post_import_hook  # noqa: PLC0415 - the core does without

    contract = load(path)
    for watching in (TrainerWatch(contract), FirstPassWatch(contract)):
        for module in watching.wrappers:
            register_post_import_hook(watching.attach, module)
