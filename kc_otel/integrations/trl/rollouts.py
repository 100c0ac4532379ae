"""Prompt and weights of each sequence of a training batch.

TRL generates for many steps at once, shuffles the sequences and cuts them into training batches, which hold tokens and
no dataset columns. Reward functions are given the columns, in the order of generation. A sequence is found again by
its prompt's and its completion's tokens, so that nothing has to be added to a batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kc_otel.contract.slices import Scalar
from kc_otel.record.work import Weights

OWN: Final = frozenset({"prompt_tokens", "completion_tokens", "advantage", "mode"})
"""Attributes that every sequence has, whatever the dataset's columns."""
_SCALARS: Final = (str, int, float, bool)


@dataclass(slots=True)
class RolloutBatch:
    """One call for completions, after `step` optimizer steps, sampled with `weights`.

    `rows` are, by completion tokens as bytes, prompt tokens, columns and number of each sequence that has them.
    `rewarded` is whether the columns have come: what is generated after that belongs to another batch. `scores` are, by
    number of a reward function, what it said of each sequence, NaN for nothing.
    """

    step: int
    weights: Weights
    prompts: Sequence[Any] | None = None
    rows: dict[bytes, list[tuple[bytes | None, Mapping[str, Scalar], int]]] = field(default_factory=dict)
    rewarded: bool = False
    scores: dict[int, NDArray[np.float64]] = field(default_factory=dict)

    def reward(self, completions: Sequence[Any], columns: Mapping[str, Sequence[Any]]) -> None:
        """Take the columns of each completion, in the order of generation; only the first ones count."""
        if self.rewarded:
            return
        self.rewarded = True
        known = self.prompts is not None and len(self.prompts) == len(completions)
        prompts = [_key(prompt) for prompt in self.prompts or ()] if known else [None] * len(completions)
        for row, completion in enumerate(completions):
            values = {name: column[row] for name, column in columns.items() if isinstance(column[row], _SCALARS)}
            self.rows.setdefault(_key(completion), []).append((prompts[row], values, row))

    def score(self, function: int, scores: Any) -> None:
        """Take a reward function's scores of the completions, in the order of generation; None for a missing one."""
        self.scores[function] = np.array([np.nan if score is None else score for score in scores], dtype=np.float64)

    def columns_of(self, inputs: Mapping[str, Any]) -> list[Mapping[str, Scalar] | None]:
        """Columns of each sequence of a batch as TRL hands it to `compute_loss`; None where they are not known."""
        return [
            found[0][0] if found and all(columns == found[0][0] for columns, _ in found) else None
            for found in self._found(inputs)
        ]

    def rewards_of(self, inputs: Mapping[str, Any], weights: Sequence[float]) -> NDArray[np.float64] | None:
        """Reward of each sequence of a batch, as TRL adds it up, [sequences]; NaN where it is not known.

        The batch is as TRL hands it to `compute_loss`, `weights` those of the reward functions; None until each of
        these has said what it thinks.
        """
        if not self.scores or len(self.scores) < len(weights):
            return None
        said = np.stack([self.scores[number] for number in range(len(weights))])
        weighted = np.nansum(said * np.asarray(weights, dtype=np.float64)[:, None], axis=0)
        rewards = np.where(np.isnan(said).all(axis=0), np.nan, weighted)
        # Several sequences of the same tokens are one only as far as their rewards are.
        of_rows = [{float(rewards[number]) for _, number in found} for found in self._found(inputs)]
        return np.array([values.pop() if len(values) == 1 else np.nan for values in of_rows])

    def _found(self, inputs: Mapping[str, Any]) -> Iterator[list[tuple[Mapping[str, Scalar], int]]]:
        """Columns and number of every sequence that has the tokens of each one of a batch."""
        names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
        arrays = zip(*(inputs[name].cpu().numpy() for name in names), strict=True)
        for prompt, prompt_mask, completion, completion_mask in arrays:
            own = _key(prompt[prompt_mask != 0])
            known = self.rows.get(_key(completion[completion_mask != 0]), ())
            yield [(columns, number) for key, columns, number in known if key is None or key == own]


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
