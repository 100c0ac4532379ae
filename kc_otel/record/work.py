"""A batch as it was handed over, on its way from the caller's thread to the one that measures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from opentelemetry import trace
from opentelemetry.context import Context

from kc_otel.contract.slices import Scalar
from kc_otel.record.telemetry.pair_streams import KernelPair

__all__ = ["Attributes", "OperatorOutputs", "Processing", "Weights", "Work", "copied"]

Attributes = Mapping[str, Scalar] | Sequence[Mapping[str, Scalar]] | None
"""Of every sequence alike, or one mapping for each."""
Processing = Mapping[str, Scalar]
"""Temperature, top-p and the like, by name."""
Weights = int | str | None
"""A weight version: an optimizer step, or a name where there is no step."""


@dataclass(frozen=True, slots=True)
class OperatorOutputs:
    """Whose outputs a batch holds.

    Attributes:
        name: Name of the operator.
        of_batches: Whether they are of one kernel, alone and in a batch, and not of two kernels.
        ulp_of: dtype whose units in the last place count; None for that of the second output.
    """

    name: str
    of_batches: bool = False
    ulp_of: Any = None


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """One batch as it was handed over, or the news that another kernel pair is current.

    Attributes:
        kind: What to do with it.
        pair: The kernel pair that was current.
        arrays: What was taken from the caller, by name.
        attributes: Attributes of the sequences.
        weights: Weight versions of the training and the inference kernel; one of them for one side of a pair.
        processing: Temperature and other sampling processing of the training and the inference kernel, as declared.
        keys: Names of the sequences of one side of a pair: one for all, a list with one for each, or None.
        prompts: Prompt tokens, [sequences, prompt tokens] or a list of them; they are part of a sequence's own name.
        parent: Trace context of the caller.
        links: Further spans that the batch belongs to.
        at: When it was handed over, unix nanoseconds.
        operator: Whose outputs the arrays are; None where they are log-probabilities or logits.
        ready: CUDA event after which the copies are complete.
    """

    kind: Literal["compare", "logits", "operator", "sampled", "scored", "rollout"]
    pair: KernelPair
    arrays: Mapping[str, Any] = field(default_factory=dict)
    attributes: Attributes = None
    weights: tuple[Weights, Weights] = (None, None)
    processing: tuple[Processing | None, Processing | None] = (None, None)
    keys: Any = None
    prompts: Any = None
    parent: Context | None = None
    links: Sequence[trace.SpanContext] = ()
    at: int = 0
    operator: OperatorOutputs | None = None
    ready: Any = None

    @property
    def one_key(self) -> bool:
        """Whether one key names it, so that sampling was decided before it was copied."""
        return self.keys is not None and not isinstance(self.keys, list)

    @property
    def spans(self) -> tuple[trace.SpanContext, ...]:
        """Contexts of the spans that it belongs to: the caller's, and further ones."""
        current = trace.get_current_span(self.parent).get_span_context()
        return (*((current,) if current.is_valid else ()), *self.links)

    def without_arrays(self) -> Work:
        """The same without the data, to be kept for long."""
        return replace(self, arrays={}, prompts=None, ready=None)


def copied(attributes: Attributes) -> Attributes:
    """Attributes that the caller cannot change any more."""
    if attributes is None:
        return None
    return dict(attributes) if isinstance(attributes, Mapping) else [dict(each) for each in attributes]
