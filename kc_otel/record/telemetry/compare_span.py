"""The span `kc.compare`, one per measured batch: a number on a dashboard leads to the token behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.util.types import AttributeValue

_NAME: Final = "kc.compare"


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
    """Result of one batch.

    Attributes:
        sequences: Sequences that were measured; those without an unmasked token are not.
        tokens: Tokens that were measured.
        tv_token: Mean total variation per token: of (1-w)+, or exact where logits were given; nan without tokens.
        worst: The token with the largest |l|; None without tokens, or where logits came without targets.
        slices: Slices that something was recorded in.
        failed: Which sequences failed an input check, [n] each, by reason.
        why: Findings about them, in words, by reason.
    """

    sequences: int
    tokens: int
    tv_token: float
    worst: WorstToken | None
    slices: tuple[str, ...]
    failed: Mapping[str, NDArray[np.intp]] = field(default_factory=dict)
    why: Mapping[str, str] = field(default_factory=dict)

    @property
    def invalid(self) -> dict[str, int]:
        """Number of sequences that failed an input check, by reason."""
        return {reason: rows.size for reason, rows in self.failed.items()}


def compare_span(
    tracer: trace.Tracer,
    attributes: dict[str, AttributeValue | None],
    *,
    parent: Context | None,
    links: Sequence[trace.SpanContext] = (),
    start: int,
    end: int,
) -> trace.SpanContext:
    """Emit a finished span and return its context, for exemplars to point to.

    Args:
        tracer: Where to.
        attributes: The registry's span attributes; None for what is not known.
        parent: Context that the caller was in: the request's or training step's span.
        links: Further spans that the batch belongs to, such as the requests that sampled it.
        start: When the batch was recorded, unix nanoseconds.
        end: When it was measured, unix nanoseconds.
    """
    span = tracer.start_span(
        _NAME,
        context=parent,
        links=[trace.Link(link) for link in links if link.is_valid],
        attributes={name: value for name, value in attributes.items() if value is not None},
        start_time=start,
    )
    span.end(end_time=end)
    return span.get_span_context()
