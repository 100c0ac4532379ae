"""Which prompt a sequence of a training batch came from, and which weights sampled it.

TRL generates for many steps at once, shuffles the sequences and cuts them into training batches, which hold tokens and
no dataset columns. Reward functions are given the columns, in the order of generation. A sequence is found again by
its prompt's and its completion's tokens, so that nothing has to be added to a batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from kc_otel.contract.slices import Scalar
from kc_otel.record.work import Weights

__all__ = ["OWN", "RolloutBatch", "RolloutBatches", "own_attributes"]

OWN: Final = frozenset({"prompt_tokens", "completion_tokens", "advantage", "mode"})
"""Attributes that every sequence has, whatever the dataset's columns."""
_SCALARS: Final = (str, int, float, bool)


@dataclass(slots=True)
class RolloutBatch:
    """One call for completions.

    Attributes:
        step: Optimizer steps done when it was made: the training kernel's weight version.
        weights: Weight version that sampled.
        prompts: Prompt tokens of each sequence, as bytes; None where they are not known.
        rows: By completion tokens as bytes: prompt tokens and columns of each sequence that has them.
        rewarded: Whether the columns have come; what is generated after that belongs to another batch.
    """

    step: int
    weights: Weights
    prompts: list[bytes] | None = None
    rows: dict[bytes, list[tuple[bytes | None, Mapping[str, Scalar]]]] = field(default_factory=dict)
    rewarded: bool = False

    def columns_of(self, inputs: Mapping[str, Any]) -> list[Mapping[str, Scalar] | None]:
        """Columns of each sequence of a batch as TRL hands it to `compute_loss`; None where they are not known."""
        names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
        arrays = zip(*(inputs[name].cpu().numpy() for name in names), strict=True)
        return [
            self._columns(prompt[prompt_mask != 0], completion[completion_mask != 0])
            for prompt, prompt_mask, completion, completion_mask in arrays
        ]

    def _columns(self, prompt: Any, completion: Any) -> Mapping[str, Scalar] | None:
        """Columns of the sequence with these tokens; None if there is none, or several that differ in them."""
        own = _key(prompt)
        found = [columns for each, columns in self.rows.get(_key(completion), ()) if each is None or each == own]
        return found[0] if found and all(columns == found[0] for columns in found) else None


class RolloutBatches:
    """The newest batch of training and the newest of evaluation, which do not mix."""

    def __init__(self) -> None:
        self._newest: dict[bool, RolloutBatch] = {}

    def of(self, training: bool) -> RolloutBatch | None:
        """The rollout that training batches come from now."""
        return self._newest.get(training)

    def generated(self, training: bool, step: int, weights: Weights, prompts: Sequence[Any] | None) -> None:
        """Completions were sampled; more calls before the reward, as in a loop of tool calls, continue the same."""
        current = self._newest.get(training)
        if current is None or current.rewarded or current.step != step:
            keys = None if prompts is None else [_key(prompt) for prompt in prompts]
            self._newest[training] = RolloutBatch(step, weights, keys)

    def rewarded(self, training: bool, completions: Sequence[Any], columns: Mapping[str, Sequence[Any]]) -> None:
        """The columns of each completion, in the order of generation."""
        current = self._newest.get(training)
        if current is None or current.rewarded:
            return
        current.rewarded = True
        prompts: Sequence[bytes | None] = [None] * len(completions)
        if current.prompts is not None and len(current.prompts) == len(completions):
            prompts = current.prompts
        for row, completion in enumerate(completions):
            values = {name: each[row] for name, each in columns.items() if isinstance(each[row], _SCALARS)}
            current.rows.setdefault(_key(completion), []).append((prompts[row], values))


def own_attributes(inputs: Mapping[str, Any], mask: Any, *, training: bool) -> list[dict[str, Scalar]]:
    """The attributes `OWN` of each sequence of a batch; advantages that differ within a sequence are left out."""
    mode = "train" if training else "eval"
    rows: list[dict[str, Scalar]] = [
        {"prompt_tokens": int(prompt), "completion_tokens": int(completion), "mode": mode}
        for prompt, completion in zip(inputs["prompt_mask"].sum(1).tolist(), mask.sum(1).tolist(), strict=True)
    ]
    if inputs["advantages"].ndim == 1:
        for row, advantage in zip(rows, inputs["advantages"].tolist(), strict=True):
            row["advantage"] = advantage
    return rows


def _key(tokens: Any) -> bytes:
    return np.asarray(tokens, dtype=np.int64).tobytes()
