"""Items in a recorder's queue, on the way from the caller's thread to the measuring thread.

    Recorder.compare          -> SampledComparison --.
    Recorder.compare_logits   -> LogitsComparison    |
    Recorder.compare_operator -> OperatorComparison  +--> BoundedWorker --> Measurer.handle
    Recorder.compare_routes   -> RouteComparison     |
    Recorder.observe          -> RuntimeValue        |
    Recorder.sampled, scored  -> KernelSide          |
    Recorder.rollout          -> KernelPair        --'

Every kind of batch is made with the caller's own arrays, and copied by `taken` once there is room for it.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, Self

from opentelemetry import trace
from opentelemetry.context import Context

from kc_otel.contract.slices import Scalar
from kc_otel.record import capture
from kc_otel.record.sequence_attributes import own_attributes
from kc_otel.record.telemetry.pair_streams import KernelPair

Processing = Mapping[str, Scalar]
"""Temperature, top-p and the like, by name."""
TokenWeights = Any
"""A weight version, or the optimizer step of each token: integers [sequences, tokens], or a list of them."""
Weights = int | str | None
"""A weight version: an optimizer step, or a name where there is no step."""
Role = Literal["sampled", "scored"]
"""Side of a pair: sampled by the inference kernel, or scored by the training kernel."""


@dataclass(frozen=True, slots=True, eq=False)
class BatchOrigin:
    """Origin of a batch.

    Attributes:
        pair: The kernel pair that was current.
        attributes: Attributes of the sequences, as they were given; once taken, `OwnAttributes`.
        parent: Trace context of the caller.
        links: Further spans that the batch belongs to.
        at: When it was given to the recorder, unix nanoseconds.
    """

    pair: KernelPair
    attributes: Any = None
    parent: Context | None = None
    links: Sequence[trace.SpanContext] = ()
    at: int = 0

    @property
    def spans(self) -> tuple[trace.SpanContext, ...]:
        """Contexts of the spans that it belongs to: the caller's, and further ones."""
        current = trace.get_current_span(self.parent).get_span_context()
        return (*((current,) if current.is_valid else ()), *self.links)

    def taken(self) -> BatchOrigin:
        """The same, which the caller cannot change any more."""
        if self.attributes is None and not self.links:
            return self
        return replace(self, attributes=own_attributes(self.attributes), links=tuple(self.links))


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class QueuedBatch:
    """Arrays, NumPy or torch, and where they come from.

    Attributes:
        origin: Where it comes from.
        ready: CUDA event after which the copies are complete; None where none of them is on a device.
    """

    origin: BatchOrigin
    ready: capture.DeviceEvent = None

    @property
    def nbytes(self) -> int:
        """Bytes that a copy of the arrays takes."""
        return sum(capture.size_of(data) for data in self.arrays.values())

    @property
    def arrays(self) -> dict[str, capture.Tree]:
        """The arrays by name: what is declared as a `capture.Tree`."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.type == "capture.Tree"}

    @property
    def per_token(self) -> dict[str, capture.Tree]:
        """The arrays with one value, or one row of logits, per sampled token."""
        return {name: data for name, data in self.arrays.items() if name not in {"prompts", "rewards"}}

    def taken(self) -> Self:
        """The same with copies of the arrays, on the device where they are."""
        given = ((name, data) for name, data in self.arrays.items() if data is not None)
        copies: dict[str, Any] = {name: capture.taken(data) for name, data in given}
        return replace(self, origin=self.origin.taken(), ready=capture.device_ready(*copies.values()), **copies)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SampledComparison(QueuedBatch):
    """Both kernels' log-probabilities of sampled tokens; arguments as in `Recorder.compare`.

    Attributes:
        versions: Instead of the inference kernel's one weight version, the step of each token, [sequences, tokens].
        positions: Position of each token in its response, [sequences, tokens], where what a mask left out is gone.
        prompts: Prompt tokens of each sequence, where `groups` does not name the prompts.
    """

    train: capture.Tree
    inference: capture.Tree
    mask: capture.Tree = None
    advantages: capture.Tree = None
    token_ids: capture.Tree = None
    inference_token_ids: capture.Tree = None
    train_kept: capture.Tree = None
    inference_kept: capture.Tree = None
    rewards: capture.Tree = None
    versions: capture.Tree = None
    positions: capture.Tree = None
    groups: Any = None
    prompts: capture.Tree = None
    group_size: int | Sequence[int] | None = None
    processing: tuple[Processing, Processing] | None = None
    weights: tuple[Weights, Weights] = (None, None)
    density: bool | None = None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LogitsComparison(QueuedBatch):
    """Both kernels' logits; arguments as in `Recorder.compare_logits`, `targets` the tokens that were sampled."""

    train: capture.Tree
    inference: capture.Tree
    mask: capture.Tree = None
    targets: capture.Tree = None
    processing: tuple[Processing, Processing] | None = None
    weights: tuple[Weights, Weights] = (None, None)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class OperatorComparison(QueuedBatch):
    """Two outputs of one operator; arguments as in `Recorder.compare_operator`."""

    operator: str
    train: capture.Tree
    inference: capture.Tree
    mask: capture.Tree = None
    ulp_of: Any = None
    of_batches: bool = False


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RouteComparison(QueuedBatch):
    """Two kernels' routes; arguments as in `Recorder.compare_routes`."""

    train: capture.Tree
    inference: capture.Tree
    mask: capture.Tree = None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RuntimeValue(QueuedBatch):
    """An observation of a runtime quantity; arguments as in `Recorder.observe`."""

    quantity: str
    value: capture.Tree


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class KernelSide(QueuedBatch):
    """One kernel's log-probabilities of sampled tokens, to be compared with the other's when they come.

    Attributes:
        role: Which side it is; arguments as in `Recorder.sampled` and `Recorder.scored`.
        prompts: Prompt tokens, [sequences, prompt tokens] or a list of them; they are part of a sequence's own name.
        versions: Instead of the one weight version, the step that sampled each token.
    """

    role: Role
    token_ids: capture.Tree
    logprobs: capture.Tree
    kept: capture.Tree = None
    mask: capture.Tree = None
    advantages: capture.Tree = None
    prompts: capture.Tree = None
    rewards: capture.Tree = None
    versions: capture.Tree = None
    key: Hashable | list[Hashable] = None
    processing: Processing | None = None
    weights: Weights = None
    groups: Any = None
    group_size: int | None = None

    @property
    def one_key(self) -> Hashable:
        """The key that names all of it, by which sampling is decided before it is copied; None where there is none."""
        return None if isinstance(self.key, list) else self.key


BatchWork = SampledComparison | LogitsComparison | OperatorComparison | RouteComparison | RuntimeValue | KernelSide
"""A batch to be measured."""
Work = BatchWork | KernelPair
"""Items that wait in the queue: a batch, or the kernel pair that is the current one from there on."""
