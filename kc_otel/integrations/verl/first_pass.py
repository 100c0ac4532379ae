"""Both kernels' log-probabilities out of the loss of verl's workers, where the trainer scores nothing before it trains.

In bypass mode, which verl's separate and fully asynchronous trainers use, `old_log_probs` are the engine's, and the
policy loss is the first to see the training kernel's. Until the first optimizer step of an update these are at the
weights that the update began with: that mini-batch is what is compared, without an extra forward pass. Later
mini-batches compare policies, not kernels, and are left out.

A worker knows the version of its weights from `update_weights`, which numbers the weights that it sends to the engines,
and from its own optimizer steps since. Of the ranks that hold the same sequences, one records. verl spreads the
rollouts of a prompt, whose drift is one observation, over its data-parallel ranks: each prompt is counted by the one
rank that its name selects, so that one in `dp` tokens of the first mini-batch counts.
"""

from __future__ import annotations

import logging
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, Final

import numpy as np

from kc_otel.contract.model import Contract
from kc_otel.integrations.verl.logged_batch import LoggedBatch, Watch, attributes_of, column, padded
from kc_otel.record.recorder import Recorder

_log: Final = logging.getLogger("kc_otel")
AUDITED_PROMPTS: Final = "kc_otel_audited_prompts"
_MEASURED_MESSAGE: Final = (
    "kc-otel: verl trains without scoring rollouts before (bypass mode): the first mini-batch of each update is "
    "measured, here %d of %d sequences%s"
)
_RANKS_NOTE: Final = "; of %d data-parallel ranks one counts each prompt"


class FirstPassWatch(Watch):
    """Records the first mini-batch of every update that a worker of this process makes. Nothing is raised into verl."""

    watched = "mini-batch"

    def __init__(self, contract: Contract, make: Callable[..., Recorder] = Recorder) -> None:
        super().__init__(contract, make)
        self.wrappers = {
            "verl.workers.utils.losses": {
                "ppo_loss": self.around(self._around_loss),
                "get_policy_loss_fn": self.around(self._around_choice),
            },
            "verl.workers.engine_workers": {
                "TrainingWorker.train_mini_batch": self.around(self._around_update),
                "TrainingWorker.train_batch": self.around(self._around_mini_batch),
                "ActorRolloutRefWorker.update_actor": self.hook(before=self._begun),
                "ActorRolloutRefWorker.update_weights": self.hook(after=self._sent),
            },
        }
        self._worker: Any = None
        self._synced: int | None = None
        self._stepped = False
        self._update: int | None = None
        self._audited: frozenset[str] = frozenset()
        self._rollouts: Counter[str] | None = None
        self._rank: tuple[int, int] = (0, 1)
        self._micro_batch: Any = None
        self._said = False

    def _begun(self, worker: Any, *_: Any, **__: Any) -> None:
        self._worker = worker

    def _sent(self, _: Any, __: Any, global_steps: Any = None, *___: Any, **____: Any) -> None:
        if global_steps is not None:
            self._synced, self._stepped = int(global_steps), False

    def _around_update(self, original: Callable[..., Any], worker: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
        if self._is_actor(worker):
            self._audited = self.guarded(pop_audited, data) or frozenset()
            self._update = self.guarded(_bypassed, data)
        try:
            return original(worker, data, *args, **kwargs)
        finally:
            self._update = None

    def _around_mini_batch(
        self, original: Callable[..., Any], worker: Any, data: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if not self._is_actor(worker):
            return original(worker, data, *args, **kwargs)
        try:
            if self._update:
                self._rollouts = self.guarded(self._counted, worker.engine, data)
            return original(worker, data, *args, **kwargs)
        finally:
            self._stepped, self._update, self._rollouts = True, None, None

    def _around_loss(
        self, original: Callable[..., Any], config: Any, model_output: Any, data: Any, dp_group: Any = None
    ) -> Any:
        self._micro_batch = data if self._rollouts else None
        try:
            return original(config, model_output, data, dp_group)
        finally:
            self._micro_batch = None

    def _around_choice(self, original: Callable[..., Any], name: Any) -> Any:
        chosen = original(name)
        if self._micro_batch is None:
            return chosen

        def policy_loss(*args: Any, **kwargs: Any) -> Any:
            self.guarded(self._record, kwargs)
            return chosen(*args, **kwargs)

        return policy_loss

    def _is_actor(self, worker: Any) -> bool:
        return self._worker is not None and worker is self._worker.actor

    def _counted(self, engine: Any, data: Any) -> Counter[str] | None:
        """Rollouts of each prompt that this rank counts, of a mini-batch; None where another rank records it."""
        if not engine.is_mp_src_rank_with_outputs():
            return None
        self._rank = (int(engine.get_data_parallel_rank()), int(engine.get_data_parallel_size()))
        # Rows that verl makes up to fill a batch have no token that counts.
        filled = [bool(row.any()) for row in data["response_mask"].unbind()]
        rollouts = Counter(name for name, some in zip(_names(data), filled, strict=True) if some and self._counts(name))
        if not self._said:
            self._said = True
            spread = _RANKS_NOTE % self._rank[1] if self._rank[1] > 1 else ""
            _log.warning(_MEASURED_MESSAGE, rollouts.total(), self._update, spread)
        return rollouts

    def _counts(self, prompt: str) -> bool:
        rank, ranks = self._rank
        if prompt in self._audited:  # the driver has scored it, and it counts once
            return False
        return zlib.crc32(prompt.encode()) % ranks == rank

    def _record(self, given: Any) -> None:
        data, rollouts = self._micro_batch, self._rollouts or Counter()
        names = _names(data)
        kept = np.array([name in rollouts for name in names], dtype=np.bool_)
        mask = given["response_mask"]
        logged = LoggedBatch(
            given["log_prob"].detach(),
            given["old_log_prob"],
            mask,
            padded(data["responses"], mask.shape),
            self._attributes(data, len(names)),
            versions=_versions(data),
            kept=kept,
            prompts=names,
        )
        scores = None
        if self._contract.assumptions.reward_range is not None:
            scores = next((data[name] for name in ("token_level_scores", "rm_scores") if name in data), None)
        logged.rewarded(None if scores is None else padded(scores, mask.shape), given.get("advantages"))
        # Version of the weights that the update began with; once they have moved on from what was sent, the next.
        trained = None if self._synced is None else self._synced + self._stepped
        config = SimpleNamespace(actor_rollout_ref=self._worker.config, get={}.get)
        self._record_batch(logged, config, trained, rollouts)

    def _attributes(self, data: Any, rows: int) -> list[dict[str, Any]]:
        found = attributes_of({name: column(data, name) for name in self._columns if name in data}, rows)
        if self._wants_prompt_tokens:
            prompts = data["prompts"]
            if prompts.is_nested:
                lengths = prompts.offsets().diff()
            else:
                lengths = data["attention_mask"][:, : prompts.shape[1]].sum(1)
            for row, length in zip(found, lengths.tolist(), strict=True):
                row["prompt_tokens"] = int(length)
        return found


def _bypassed(data: Any) -> int | None:
    """Sequences of an update whose old log-probabilities are the engine's; None where the trainer scored them."""
    if "rollout_log_probs" not in data or "old_log_probs" not in data or "entropy" in data:
        return None
    old, said = (data[name] for name in ("old_log_probs", "rollout_log_probs"))
    old, said = (tensor.values() if tensor.is_nested else tensor for tensor in (old, said))
    return len(data) if old.shape == said.shape and bool((old == said).all()) else None


def _names(data: Any) -> list[str]:
    return [str(name) for name in column(data, "uid")]


def _versions(data: Any) -> Sequence[int | None]:
    """Steps of the oldest weights that sampled each sequence, from their column or from what the agent loop adds."""
    name = "min_global_steps"
    if name in data:
        return column(data, name)
    return [fields.get(name) for fields in column(data, "extra_fields")] if "extra_fields" in data else []


def pop_audited(data: Any) -> frozenset[str]:
    """Take the names of the prompts that the driver has scored out of the batch of an update."""
    found = data.pop(AUDITED_PROMPTS, None)
    return frozenset() if found is None else getattr(found, "data", found)
