"""The span `kc.compare`: one per measured batch, so that a number on a dashboard leads to the token behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.util.types import AttributeValue

__all__ = ["compare_span"]

_NAME: Final = "kc.compare"


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
        start: When the batch was handed over, unix nanoseconds.
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
