"""Audit forwards of verl's driver in bypass mode: a few prompts are scored before the step, by the training kernel.

The first mini-batch of an update may not be like the rest of it. An audit scores a share of the step's prompts, chosen
by a hash of their names: whole prompts, whatever their length, reward or drift, so the unweighted mean over them is an
unbiased estimate of the mean over the step. Opt-in, by `KC_OTEL_AUDIT_SHARE`, such as 0.02.

Time is capped by `KC_OTEL_AUDIT_BUDGET`, milliseconds a step on average: each step adds them to an account, which an
audit's own time is taken from, and no audit begins while the account is overdrawn. That is decided by earlier steps
alone, so that skipping does not select among the step's prompts. Skips are counted in verl's metrics, beside the time.

The sequences are scored as copies in a partition of their own, which is cleared again: verl's batch stays as it was.
The names of the prompts that were scored go with the update to the workers, which leave these prompts out: each counts
once, and none is lost where an audit is skipped or fails.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable, MutableMapping
from typing import Any, Final

from kc_otel._extras import extra
from kc_otel.integrations.verl.shared import Guarded, column

_log: Final = logging.getLogger("kc_otel")
_PARTITION: Final = "kc-otel-audit"
_AUDITED_PROMPTS: Final = "kc_otel_audited_prompts"
_BUDGET_WARNING: Final = (
    "kc-otel: audit forwards: %d of the step's %d sequences were scored in %.0f ms; KC_OTEL_AUDIT_BUDGET allows "
    "%.0f ms a step on average"
)
_UNSENT_FIELDS: Final = frozenset({"entropy", "log_probs", "old_log_probs"})


def audited(prompt: str, share: float) -> bool:
    """Return whether a prompt is chosen, which its name alone decides."""
    digest = hashlib.blake2b(prompt.encode(), digest_size=8, person=b"kc-audit").digest()
    return int.from_bytes(digest, "big") < share * 2.0**64


def pop_audited(data: Any) -> frozenset[str]:
    """Take the names of the prompts that the driver has scored out of the batch of an update."""
    found = data.pop(_AUDITED_PROMPTS, None)
    return frozenset() if found is None else getattr(found, "data", found)


class Audit(Guarded):
    """Audits of a trainer. Nothing here raises into verl.

    `record` records scored sequences: of a trainer, their fields, the training kernel's log-probabilities, and tags.
    """

    watched = "forward"

    def __init__(
        self, record: Callable[[Any, Any, Any, Any], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__()
        self.share = _number("KC_OTEL_AUDIT_SHARE", 0.0, 1.0)
        self._record = record
        self._clock = clock
        self._budget = _number("KC_OTEL_AUDIT_BUDGET", 500.0) / 1000.0
        self._account = 0.0
        self._skipped = 0
        self._scored: frozenset[str] = frozenset()
        self._said = False

    def around_old_log_prob(self, wrapped: Any, trainer: Any, args: Any, kwargs: Any) -> Any:
        """The trainer of v1 takes the engine's log-probabilities for its own: before the step's first update."""
        batch = wrapped(*args, **kwargs)
        self._scored = frozenset()
        correction = trainer.config.algorithm.get("rollout_correction") or {}
        if correction.get("bypass_mode") and not getattr(trainer, "local_trigger_step", 0):
            metrics = kwargs.get("metrics", args[1] if len(args) > 1 else {})
            self._guarded(self._step, trainer, batch, metrics)
        return batch

    def around_update(self, wrapped: Any, _: Any, args: Any, kwargs: Any) -> Any:
        """Send the names of the prompts that were scored along with the update."""
        self._guarded(self._mark, kwargs.get("batch", args[0] if args else None))
        return wrapped(*args, **kwargs)

    def _mark(self, batch: Any) -> None:
        if self._scored:
            batch.extra_info[_AUDITED_PROMPTS] = self._scored

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
        self._record(trainer, data, response_from_nested(found["log_probs"], found["response_mask"]), chosen.tags)
        self._scored = frozenset(str(name) for name in names if audited(str(name), self.share))
        return len(chosen)


def _number(name: str, default: float, most: float = float("inf")) -> float:
    text = os.environ.get(name, "") or str(default)
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value <= most:
        raise ValueError(f"{name}: {text!r} is not a number from 0 to {most:g}")
    return value
