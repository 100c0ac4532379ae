"""A training batch of verl as the recorder takes it: both kernels' log-probabilities, rewards, advantages, slices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from kc_otel.contract.slices import Scalar
from kc_otel.record.work import Weights

__all__ = ["LoggedBatch", "attributes_of", "by_version"]

_SCALARS: Final = (str, bool, int, float, np.generic)


@dataclass(slots=True)
class LoggedBatch:
    """What verl compares, kept until it knows the rewards.

    Attributes:
        train: `old_log_probs`, nats, [sequences, tokens]: the trainer's, at the weights that the step began with.
        inference: `rollout_log_probs`, nats, of the same shape: what the engine said when it sampled.
        mask: `response_mask` before verl's rejection takes tokens out of it.
        tokens: `responses`.
        attributes: Of each sequence, as far as they are known.
        rewards: Of each sequence, the sum of its `token_level_scores`; None until they are known.
        advantages: Of each token; None until they are known.
        versions: Optimizer steps of the oldest weights that sampled each sequence; None where it is not known.
        kept: Which rows are no padding of verl's own; None for all.
    """

    train: Any
    inference: Any
    mask: Any
    tokens: Any
    attributes: list[dict[str, Scalar]]
    rewards: Any = None
    advantages: Any = None
    versions: list[Weights] = field(default_factory=list)
    kept: np.ndarray | None = None

    @classmethod
    def of(cls, data: Any) -> LoggedBatch:
        """What `calculate_debug_metrics` is given: a `verl.DataProto`."""
        batch = data.batch
        width = batch["responses"].size(1)
        mask = batch.get("response_mask", batch.get("attention_mask"))
        rows = len(batch["responses"])
        attributes = attributes_of(data.non_tensor_batch, rows)
        if "attention_mask" in batch and batch["attention_mask"].size(1) > width:
            for row, prompt in zip(attributes, batch["attention_mask"][:, :-width].sum(1).tolist(), strict=True):
                row["prompt_tokens"] = int(prompt)
        logged = cls(
            batch["old_log_probs"],
            batch["rollout_log_probs"],
            None if mask is None else mask[:, -width:],
            batch["responses"],
            attributes,
        )
        if mask is not None:
            for row, tokens in zip(attributes, logged.mask.sum(1).tolist(), strict=True):
                row["completion_tokens"] = int(tokens)
        logged.versions = _versions(data.non_tensor_batch.get("min_global_steps"), rows)
        return logged

    def rewarded(self, scores: Any, advantages: Any) -> None:
        """Rewards and advantages have come.

        Args:
            scores: Rewards, [sequences, tokens] as verl spreads them, or None.
            advantages: Of each token, or None.
        """
        if scores is not None:
            self.rewards = scores.sum(-1)
        if advantages is not None and tuple(advantages.shape) == tuple(self.train.shape):
            self.advantages = advantages


def attributes_of(columns: Mapping[str, Any], rows: int) -> list[dict[str, Scalar]]:
    """Columns of a batch that hold one text, number or truth value for each sequence, such as `data_source`."""
    found: list[dict[str, Scalar]] = [{} for _ in range(rows)]
    for name, values in columns.items():
        if name == "uid" or len(values) != rows:
            continue
        for row, given in zip(found, values, strict=True):
            value = given if isinstance(given, _SCALARS) else getattr(given, "data", given)  # tensordict's wrapper
            if isinstance(value, _SCALARS):
                row[name] = value.item() if isinstance(value, np.generic) else value
    return found


def by_version(logged: LoggedBatch) -> Iterator[tuple[Weights, np.ndarray]]:
    """Rows that were sampled with the same weights; without those that verl put in to fill its batch."""
    rows = np.arange(len(logged.attributes))
    kept = rows if logged.kept is None else rows[logged.kept]
    if not logged.versions:
        yield None, kept
        return
    for version in dict.fromkeys(logged.versions[row] for row in kept):
        yield version, np.array([row for row in kept if logged.versions[row] == version])


def _versions(values: Any, rows: int) -> list[Weights]:
    if values is None or len(values) != rows:
        return []
    return [None if value is None else int(value) for value in values]
