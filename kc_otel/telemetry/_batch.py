"""What recording one batch tells its caller: enough for a span."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Batch", "WorstToken"]


@dataclass(frozen=True, slots=True)
class WorstToken:
    """The token of a batch with the largest |l|.

    Attributes:
        log_ratio: Its signed log ratio l, nats.
        row: Its row in the batch.
        position: Its position in that row, masked positions included.
        token_id: Its id, when token ids were given.
        slices: Slices that its sequence belongs to.
    """

    log_ratio: float
    row: int
    position: int
    token_id: int | None
    slices: tuple[str, ...]

    @property
    def abs_log_ratio(self) -> float:
        """|l|, nats."""
        return abs(self.log_ratio)


@dataclass(frozen=True, slots=True)
class Batch:
    """What became of one batch.

    Attributes:
        sequences: Sequences that were measured; those without an unmasked token are not.
        tokens: Tokens that were measured.
        tv_token: Mean total variation per token: of (1-w)+, or exact where logits were given; nan without tokens.
        worst: The token with the largest |l|; None without tokens, or where logits came without targets.
        slices: Slices that something was recorded in.
        invalid: Sequences that failed an input check, by reason.
    """

    sequences: int
    tokens: int
    tv_token: float
    worst: WorstToken | None
    slices: tuple[str, ...]
    invalid: Mapping[str, int] = field(default_factory=dict)
