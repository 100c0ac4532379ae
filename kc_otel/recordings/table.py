"""A file's content as rows of numbers by role: which columns have which role, and what is wrong with them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from numpy.typing import NDArray

from kc_otel.contract.slices import Scalar
from kc_otel.recordings.recording import RecordingError

ALIASES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "train": (
            "train_logprobs",
            "trainer_logprobs",  # prime-rl
            "old_log_probs",  # verl
            "old_log_prob",
            "old_per_token_logps",  # TRL
            "prev_logprobs",  # NeMo-RL
            "training_logprobs",
            "train_log_probs",
        ),
        "inference": (
            "inference_logprobs",  # prime-rl
            "rollout_log_probs",  # verl
            "rollout_log_prob",
            "sampling_per_token_logps",  # TRL
            "generation_logprobs",  # NeMo-RL
            "rollout_logprobs",
            "sampling_logprobs",
            "inference_log_probs",
        ),
        "mask": ("mask", "response_mask", "completion_mask", "loss_mask", "token_mask", "tool_mask"),
        "lengths": ("lengths", "response_lengths", "completion_lengths", "sequence_lengths"),
        "token_ids": ("token_ids", "responses", "completion_ids", "response_ids"),
        "advantages": ("advantages", "advantage"),
        "train_kept": ("train_kept_logprobs",),
        "inference_kept": ("inference_kept_logprobs",),
        "versions": ("weight_versions",),
        "train_logits": ("train_logits",),
        "inference_logits": ("inference_logits",),
    }
)
"""Role -> column names that are understood for it, the canonical one first; `save_recording` writes that one."""

LOGITS: Final = ("train_logits", "inference_logits")
"""Roles that have a row of numbers per token."""
FLOATS: Final = ("train", "inference", "advantages", "train_kept", "inference_kept", "versions")
"""Roles that have a real number per token."""
MASK: Final = "mask"
"""The role of which a file may have several, such as TRL's completion_mask and tool_mask: a token counts under all.
Those after the first have roles of their own, which begin with it."""
ATTRIBUTES: Final = "attributes"
"""Column with a sequence's attributes: a mapping, or its JSON."""


def resolve(source: str, present: Iterable[str], columns: Mapping[str, str] | None) -> dict[str, str]:
    """Role -> name of its column, for every role that a file has; `columns` are those that the caller says."""
    names = list(present)
    problems = []
    found: dict[str, str] = {}
    for role, column in (columns or {}).items():
        if role not in ALIASES:
            problems.append(f"{source}: columns: {role!r} is not a role; roles are {', '.join(ALIASES)}")
        elif column not in names:
            problems.append(f"{source}: columns: there is no column {column!r} for {role}; there are {_listed(names)}")
        else:
            found[role] = column
    for role, aliases in ALIASES.items():
        if role in (columns or {}):
            continue
        matching = [name for name in aliases if name in names and name not in found.values()]
        if len(matching) > 1 and matching[0] != aliases[0] and role in {"train", "inference"}:
            problems.append(
                f"{source}: {' and '.join(matching)} could both be the {role} kernel's log-probabilities; "
                f"say which with columns, such as {role}={matching[0]}"
            )
        elif matching:
            found[role] = matching[0]
            if role == MASK:
                found.update({f"{MASK} {name}": name for name in matching[1:]})
    from_logits = all(role in found for role in (*LOGITS, "token_ids"))
    problems += [
        f"{source}: no column has the {role} kernel's log-probabilities; there are {_listed(names)}. "
        f"Name it {ALIASES[role][0]}, or say which it is with columns, such as {role}=NAME"
        for role in ("train", "inference")
        if role not in found and role not in (columns or {}) and not from_logits and not problems
    ]
    if problems:
        raise RecordingError(*problems)
    return found


def _listed(names: list[str]) -> str:
    most = 20
    return (", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")) or "no columns"


@dataclass(frozen=True, slots=True, eq=False)
class RaggedTable:
    """A file's content: by role an array of each row, [tokens], or [tokens, V] of logits; and attributes of each row.

    For messages it has the column of each role, `place`, which gives the words for a row, such as `line 12`, and the
    columns that are neither a role's nor an attribute, with the reason.
    """

    source: str
    columns: Mapping[str, Sequence[NDArray[Any]]]
    names: Mapping[str, str]
    attributes: Sequence[Mapping[str, Scalar]]
    place: Callable[[int], str]
    unread: Mapping[str, str] = field(default_factory=dict)


_VARYING_PART: Final = re.compile(r"[-+]?\d[\d.,e+-]*|\b(?:nan|inf)\b")
"""Parts in which two sentences about one fault may differ."""


@dataclass(slots=True)
class Problems:
    """Problems of a file: the first occurrence of each fault, and a count."""

    source: str
    _first: dict[str, str] = field(default_factory=dict)
    _count: Counter[str] = field(default_factory=Counter)

    def add(self, sentence: str, *, times: int = 1) -> None:
        """Note a fault, and that it occurs so many times; sentences that differ in numbers alone are one fault."""
        kind = _VARYING_PART.sub("#", sentence)
        self._first.setdefault(kind, sentence)
        self._count[kind] += times

    def all(self) -> tuple[str, ...]:
        """Return a sentence for each fault."""
        return tuple(
            f"{self.source}: {first}" + (f" ({more:,} more like this)" if (more := self._count[kind] - 1) else "")
            for kind, first in self._first.items()
        )
