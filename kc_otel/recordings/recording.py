"""A recording: both kernels' log-probabilities of the same sampled tokens, packed, and what is known of them."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kc_otel.contract.slices import LAG, Scalar
from kc_otel.record.pairing import content_key

_log: Final = logging.getLogger("kc_otel")
_REWARDS: Final = ("reward", "rewards", "score")
"""Attributes that may hold the reward of a sequence, the first that does counting."""


def reward_of(attributes: Mapping[str, Scalar]) -> float:
    """The reward of a sequence, from its attributes `reward`, `rewards` or `score`; NaN where none is a number."""
    given = (attributes.get(name) for name in _REWARDS)
    return next((float(value) for value in given if isinstance(value, int | float)), math.nan)


GROUPS: Final = ("group", "uid", "group_id", "group_index", "prompt_id")
"""Attributes that may name the prompt of a sequence, the first that is there counting."""


def group_of(attributes: Mapping[str, Scalar]) -> Scalar | None:
    """Name of a sequence's prompt, from its attributes `group`, `uid` and the like; None where none is, or only NaN."""
    given = (attributes[name] for name in GROUPS if name in attributes)
    return next((name for name in given if not (isinstance(name, float) and math.isnan(name))), None)


def step_of(attributes: Mapping[str, Scalar]) -> tuple[Scalar | None, Scalar | None]:
    """Training weights and step of a sequence; None for each that is not known, or NaN."""
    weights, step = (
        None if isinstance(value := attributes.get(name), float) and math.isnan(value) else value
        for name in ("train_weights", "step")
    )
    return weights, step


def prompt_of(attributes: Mapping[str, Scalar]) -> tuple[Scalar | None, ...] | None:
    """Name of a sequence's prompt with its `step_of`: at another step it is another prompt; None without a name."""
    return None if (name := group_of(attributes)) is None else (*step_of(attributes), name)


PROMPT_IDS: Final = ("prompt_ids", "prompt_token_ids")


def with_prompt(attributes: Mapping[str, Scalar], row: Mapping[str, Any]) -> Mapping[str, Scalar]:
    """Attributes with a `prompt_id` of the row's prompt tokens, where no attribute names the prompt."""
    tokens = next((row[name] for name in PROMPT_IDS if row.get(name) is not None), None)
    if tokens is not None and group_of(attributes) is None:
        with suppress(ValueError, TypeError, OverflowError):
            if np.size(ids := np.asarray(tokens, dtype=np.int64)):
                return {**attributes, "prompt_id": content_key((), ids)}
    return attributes


DENSITY: Final = "density"
"""Attribute that is true where both sides are log-densities, which may exceed 0."""

ONE_MODEL: Final = "one_model"
"""Attribute that names the model where it both sampled and scored: its decoding is compared with its prefill."""


def of_one_model(name: str, file: object) -> str:
    """Say that a gate decides nothing on a recording of one model."""
    return (
        f"no decision: {name} both sampled and scored, so that this compares its decoding with its prefill, the floor "
        f"of such comparisons, and not two kernels; kc-otel compare {file} shows it"
    )


class RecordingError(ValueError):
    """A recording cannot be used: sentences with file, row, field and remedy, and how many rows were read if known."""

    def __init__(self, *problems: str, sequences: int = 0) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems
        self.sequences = sequences


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """Log-probabilities of S sequences with N tokens in all, one sequence after the other, without padding.

    `train` and `inference` are log P and log Q of the sampled tokens, nats [N]. `lengths` [S] are at least 1 each. What
    a file does not have is None. `advantages` of a sequence are repeated over its tokens. `train_kept` is the log of
    P's mass on the tokens that truncation (top-p, top-k) kept: both sides are renormalised over them. `versions` are
    the steps of the weights that sampled each token, `positions` [N] are in the response, None where the file's mask
    leaves out nothing between the tokens that count. Logits are [N, V]. Of `masked` sequences the file's mask leaves no
    token; they are not among the S, nor are the `repeated` ones that were left out as copies. `unread` are columns that
    are no attributes, and why. Where `by_age` split any, `whole` are the sequences before that, and `whole_rows` [S]
    the rows there of those that count; -1 for a part whose sequence counts at its older part.
    """

    train: NDArray[np.float64]
    inference: NDArray[np.float64]
    lengths: NDArray[np.int64]
    attributes: tuple[Mapping[str, Scalar], ...]
    token_ids: NDArray[np.int64] | None = None
    advantages: NDArray[np.float64] | None = None
    train_kept: NDArray[np.float64] | None = None
    versions: NDArray[np.int64] | None = None
    positions: NDArray[np.int64] | None = None
    source: str = field(default="recording")
    train_logits: NDArray[np.floating] | None = None
    inference_logits: NDArray[np.floating] | None = None
    masked: int = 0
    repeated: int = 0
    unread: Mapping[str, str] = field(default_factory=dict)
    whole: Recording | None = None
    whole_rows: NDArray[np.int64] | None = None

    @property
    def rewards(self) -> NDArray[np.float64] | None:
        """`reward_of` each sequence, float64 [S], NaN where it is not known; None where none is."""
        found = np.array([reward_of(attributes) for attributes in self.attributes])
        return None if np.isnan(found).all() else found

    @property
    def prompts(self) -> NDArray[np.int64] | None:
        """Number of each sequence's prompt, int64 [S]; None where no prompt is named. Others are alone in theirs."""
        names = [prompt_of(attributes) for attributes in self.attributes]
        if all(name is None for name in names):
            return None
        number: dict[object, int] = {}
        alone = ((None, row) if name is None else name for row, name in enumerate(names))
        return np.array([number.setdefault(name, len(number)) for name in alone], dtype=np.int64)

    @property
    def identical(self) -> bool:
        """True if both sides have the same number at every token."""
        return bool(np.array_equal(self.train, self.inference))

    @property
    def density(self) -> bool:
        """True if both sides are log-densities: every sequence says so."""
        return all(row.get(DENSITY) is True for row in self.attributes)

    @property
    def starts(self) -> NDArray[np.int64]:
        """Start of each sequence, int64 [S]."""
        return np.cumsum(self.lengths) - self.lengths

    def rows(self, name: str) -> list[NDArray[Any]]:
        """A per-token column by sequence, or nothing where the recording does not have it."""
        values = getattr(self, name)
        return [] if values is None else np.split(values, self.starts[1:])

    def digests(self) -> Iterator[bytes]:
        """Digests of both sides' numbers of each sequence."""
        for train, inference in zip(self.rows("train"), self.rows("inference"), strict=True):
            yield hashlib.sha256(train.tobytes() + inference.tobytes()).digest()

    @property
    def unread_reward(self) -> str:
        """Problem of a rewards column that could not be read; empty if there is no such column."""
        for name in _REWARDS:
            if name in self.unread:
                return f"{name} {self.unread[name]}"
            for row, attributes in enumerate(self.attributes):
                if isinstance(attributes.get(name), str):
                    return f"{name} of sequence {row} is {attributes[name]!r}, not a number"
        return ""

    @property
    def age_unknown(self) -> NDArray[np.bool_]:
        """Mask of the sequences of which one side's weights are known, and no lag of those that sampled."""
        steps: Iterable[int | None] = repeat(None) if self.versions is None else self.versions[self.starts].tolist()
        unknown = (
            math.isnan(_step(row.get(LAG)))
            and lag_unknown(row.get("train_weights"), row.get("inference_weights") if step is None else step)
            for row, step in zip(self.attributes, steps, strict=False)
        )
        return np.fromiter(unknown, np.bool_)

    def with_attributes(self, given: Mapping[str, Scalar]) -> Recording:
        """The recording with attributes that every sequence gets besides its own; these win."""
        return replace(self, attributes=tuple({**row, **given} for row in self.attributes))

    def only(self, kept: NDArray[np.bool_]) -> Recording:
        """The sequences that are kept, bool [S]."""
        return self if kept.all() else replace(self.of_tokens(np.repeat(kept, self.lengths)), whole=self.whole)

    def of_tokens(self, tokens: NDArray[np.bool_]) -> Recording:
        """Some tokens, bool [N], of the sequences that have any of these."""
        lengths = np.add.reduceat(tokens, self.starts, dtype=np.int64)
        return replace(
            self,
            whole=None,
            whole_rows=None if self.whole_rows is None else self.whole_rows[lengths > 0],
            lengths=lengths[lengths > 0],
            attributes=tuple(self.attributes[row] for row in np.flatnonzero(lengths)),
            **self._per_token(tokens),
        )

    def by_age(self, *, split: bool = True) -> Recording:
        """The recording with attribute `lag`, where the steps of both kernels' weights are known.

        A sequence that the training kernel's own weights sampled in part becomes two, the older one at the end, which
        counts as the whole sequence; without `split` all of it has the lag of its oldest weights.
        """
        train, inference = (
            np.repeat([_step(attributes.get(name)) for attributes in self.attributes], self.lengths)
            for name in ("train_weights", "inference_weights")
        )
        sampled = inference if self.versions is None else self.versions
        lag = np.maximum(train - sampled, 0.0)
        if np.isnan(lag).all():
            return self
        if (newer := np.flatnonzero(sampled > train)).size:
            _log.warning(
                "%s: %d tokens were sampled by newer weights than the trainer's, the first at step %d where "
                "train_weights is %d; they count as the trainer's own",
                self.source, newer.size, sampled[newer[0]], train[newer[0]],
            )  # fmt: skip
        both = split & np.logical_and(*(np.logical_or.reduceat(part, self.starts) for part in (lag == 0, lag > 0)))
        apart = np.repeat(both, self.lengths) & (lag > 0)
        tokens, rows = (np.concatenate(parts) for parts in (
            (np.flatnonzero(~apart), np.flatnonzero(apart)), (np.arange(both.size), np.flatnonzero(both))
        ))  # fmt: skip
        counted = np.concatenate([np.where(both, -1, np.arange(both.size)), np.flatnonzero(both)])
        older = np.add.reduceat(apart, self.starts, dtype=np.int64)
        lengths = np.concatenate([self.lengths - older, older[both]])
        oldest = np.maximum.reduceat(lag[tokens], np.cumsum(lengths) - lengths).tolist()
        known = ({} if math.isnan(age) else {LAG: int(age)} for age in oldest)
        places = np.arange(self.train.size) - np.repeat(self.starts, self.lengths)
        divided: dict[str, Any] = {"whole": self, "whole_rows": counted} if both.any() else {}
        return replace(
            self,
            lengths=lengths,
            attributes=tuple({**self.attributes[row], **age} for row, age in zip(rows, known, strict=True)),
            **{"positions": places[tokens], **self._per_token(tokens), **divided},
        )

    def _per_token(self, tokens: NDArray[np.bool_] | NDArray[np.intp]) -> dict[str, Any]:
        """Return the per-token columns of some tokens."""
        names = (
            "train", "inference", "token_ids", "advantages", "train_kept", "versions", "positions", "train_logits",
            "inference_logits",
        )  # fmt: skip
        return {name: values[tokens] for name in names if (values := getattr(self, name)) is not None}


def _step(version: Scalar | None) -> float:
    """A weight version that is an optimizer step; NaN for any other."""
    return math.nan if version is None or isinstance(version, str) else float(version)


def lag_unknown(train: Scalar | None, inference: Scalar | None) -> bool:
    """Return True if one side's weights are known, and nothing says by how much those that sampled are older."""
    return train != inference and math.isnan(_step(train) - _step(inference))
