"""What locating found, and the same as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from kc_otel.contract.words import number
from kc_otel.diagnose.above_noise import BoundaryDrift
from kc_otel.diagnose.boundaries import Boundary
from kc_otel.diagnose.shares import Shares
from kc_otel.stats import Interval

__all__ = [
    "OTHER_EMBEDDINGS",
    "UNRELATED",
    "Divergence",
    "Located",
    "NotComparableError",
    "between",
    "cut_vocabulary",
    "located_json",
    "other_tokens",
]

UNRELATED: Final = 0.7
"""Relative error of the embedding beyond which two kernels have other weights; quantised ones stay below 0.1."""
OTHER_EMBEDDINGS: Final = (
    "the embeddings of the same tokens have nothing to do with each other: the checkpoints are others"
)

Kind = Literal["tokens", "shape", "drift", "batch", "sampler"]

OPERATORS: Final = {
    "embedding": "embedding",
    "attention_norm": "norm before attention",
    "mlp_norm": "norm before the MLP",
    "final_norm": "last norm",
    "q_proj": "query projection",
    "k_proj": "key projection",
    "v_proj": "value projection",
    "qkv_proj": "QKV projection",
    "rotary": "rotary embedding",
    "kv_cache": "KV cache write and read",
    "attention": "attention",
    "o_proj": "attention's output projection",
    "router": "router",
    "experts": "experts",
    "activation": "MLP's activation",
    "gate_proj": "MLP's gate projection",
    "up_proj": "MLP's up projection",
    "gate_up_proj": "MLP's gate and up projection",
    "down_proj": "MLP's down projection",
    "block": "residual sum",
    "head": "head",
    "sampler": "sampler's processing",
    "tokens": "tokens (tokenizer and chat template)",
}


class NotComparableError(ValueError):
    """Two kernels that cannot be held against each other; the message says why."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """Something that is not noise.

    Attributes:
        kind: Whether tokens, shapes, numbers, or numbers in another batch, or the sampler's processing differ.
        boundary: Where.
        module: The inference kernel's module there; empty where there is none.
        sentence: What was found.
        tensors: A static scale that cuts inputs off, and parameters of the module that differ by more than rounding,
            largest difference first.
    """

    kind: Kind
    boundary: Boundary
    module: str
    sentence: str
    tensors: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Located:
    """The answer to which operator it is.

    Attributes:
        contract: Name of the contract.
        slice: The slice that the sequences are of.
        metric: What shares are shares of.
        sequences: Number of sequences.
        tokens: Their tokens.
        boundaries: What was measured, in the order of execution.
        findings: What is not noise, in the order of execution.
        culprit: The finding with the largest share of the drift; without shares the first. None where there is none.
        shares: How the drift divides among what is above noise, and where that is much, how the largest part of it
            divides among layers; empty where nothing is, or where it was not asked for.
        observed: Drift of the inference kernel as it ran, mean over sequences; nan where it was not measured.
        notes: What a reader has to know: what could not be compared, swapped or verified.
        forwards: Forwards that it took, in sequences.
        seconds: How long it took.
        confidence: Of every interval and of all names together.
    """

    contract: str
    slice: str
    metric: str
    sequences: int
    tokens: int
    boundaries: tuple[BoundaryDrift, ...]
    findings: tuple[Divergence, ...]
    culprit: Divergence | None
    shares: tuple[Shares, ...]
    observed: float
    notes: tuple[str, ...]
    forwards: int
    seconds: float
    confidence: float

    @property
    def first(self) -> Divergence | None:
        """The first finding in the order of execution."""
        return self.findings[0] if self.findings else None

    @property
    def explained(self) -> float:
        """What is divided, in shares of the drift that was observed; nan without shares."""
        if not self.shares:
            return math.nan
        return self.shares[0].whole / self.observed if self.observed else 0.0

    @property
    def is_rough(self) -> bool:
        """Whether the parts together make so much more or less than was observed that shares are rough."""
        return not 0.8 <= self.explained <= 1.25


def between(error: Interval) -> str:
    """An error with its interval, where there are sequences enough for one.

    >>> between(Interval(0.02, 0.01, 0.03, 12, "exact")), between(Interval(0.02, -math.inf, math.inf, 3, "exact"))
    ('0.02 [0.01, 0.03]', '0.02 (3 sequences are too few for an interval)')
    """
    if not (math.isfinite(error.lower) and math.isfinite(error.upper)):
        return f"{number(error.estimate)} ({error.samples:g} sequences are too few for an interval)"
    return f"{number(error.estimate)} [{number(error.lower)}, {number(error.upper)}]"


def cut_vocabulary(ours: int, theirs: int) -> str:
    """What is said of a head with another vocabulary."""
    return f"{ours} tokens in training and {theirs} in inference: the vocabulary is cut"


def other_tokens(ours: Sequence[int], theirs: Sequence[int], count: int, of: int) -> str:
    """What is said of conversations that become other tokens, of which one is given."""
    place = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    return (
        f"{count} of {of} prompts become other tokens: the first from token {place} on, "
        f"{list(ours[place : place + 4])} in training and {list(theirs[place : place + 4])} in inference; "
        "compare the tokenizer and the chat template"
    )


def located_json(located: Located) -> dict[str, Any]:
    """The answer for a program, and as evidence; numbers that are not finite are texts."""
    found: dict[str, Any] = _plain(asdict(located))
    found["first"] = _plain(asdict(located.first)) if located.first else None
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
