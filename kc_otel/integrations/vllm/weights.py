"""Check that an engine has the weights that a trainer sent, tensor by tensor.

    report = check_weights(llm, model)
    print(report)

A sync that loses a tensor raises nothing: the engine goes on with the old one, and drift grows from step to step with
no kernel to blame. Both sides make digests of each tensor, the trainer's rounded to the engine's number format first,
and what differs is named. No tensor leaves its process: workers answer by a method that the plugin of kc-otel gives
them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self

from kc_otel._extras import extra
from kc_otel.integrations.vllm.plugin import WEIGHTS_METHOD
from kc_otel.record.measure.weight_tensors import TensorDigest, digest_of

with extra("torch", "the comparison of weights"):
    import torch

_MAX_LISTED_TENSORS: Final = 10


@dataclass(frozen=True, slots=True)
class EngineWeights:
    """An engine's weights, under the trainer's names."""

    workers: tuple[Mapping[str, TensorDigest], ...]  # of each worker, digests by name
    absent: Mapping[str, str]  # why there is no digest of a tensor, by name

    @classmethod
    def of(cls, answers: Sequence[Mapping[str, Any]]) -> Self:
        """Join what `module_digests` of all workers answered, as it is or through JSON; else ValueError."""
        try:
            workers = tuple(
                {name: TensorDigest.from_plain(plain) for name, plain in answer["tensors"].items()}
                for answer in answers
            )
            absent = {name: why for answer in answers for name, why in answer["absent"].items()}
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"the engine's answer holds no digests of weights ({error!r})") from None
        held = set().union(*workers)
        return cls(workers, {name: why for name, why in absent.items() if name not in held})


@dataclass(frozen=True, slots=True)
class UnequalTensor:
    """A tensor that the engine has otherwise."""

    name: str
    trainer: TensorDigest  # digest of the trainer's, in the engine's number format
    norm: float  # of the engine's
    apart: float  # ||a - b|| / ||a||, estimated; nan where the engine has it in parts, on several workers
    stale: bool  # whether it is what the trainer had at an earlier comparison
    reordered: bool = False  # whether it has the same values in another order, such as rows of another layout

    def __str__(self) -> str:
        apart = "" if math.isnan(self.apart) else f", relative difference {self.apart:.2g}"
        note = ", as it was before this sync" if self.stale else ", the same values in another order" * self.reordered
        format = f"[{'x'.join(str(size) for size in self.trainer.shape)}] {self.trainer.dtype}"
        return f"{self.name} {format}: norm {self.trainer.norm:.6g}, in the engine {self.norm:.6g}{apart}{note}"


@dataclass(frozen=True, slots=True)
class WeightReport:
    """Result of the check; its text names the first tensors that differ."""

    unequal: tuple[UnequalTensor, ...]  # in the trainer's order
    compared: int  # tensors
    elements: int  # of those
    not_compared: Mapping[str, str]  # why the others were not, by name
    digests: Mapping[str, TensorDigest] = field(repr=False)

    @property
    def mismatch(self) -> float:
        """Share of the compared elements that are in unequal tensors: `weights_mismatch` of a contract; nan of none."""
        unequal = sum(tensor.trainer.elements for tensor in self.unequal)
        return unequal / self.elements if self.elements else math.nan

    def __str__(self) -> str:
        whole = self.compared and not self.not_compared
        equal = "the engine has the trainer's weights" if whole else "no compared tensor differs from the trainer's"
        lines = [
            f"{len(self.unequal)} of {self.compared} tensors in the engine differ from the trainer's, with "
            f"{self.mismatch:.3g} of the {self.elements} compared elements"
            if self.unequal
            else f"{equal}: {self.compared} tensors, {self.elements} elements"
        ]
        for title, rest in (
            ("", [str(tensor) for tensor in self.unequal]),
            ("not compared: ", [f"{name} ({why})" for name, why in self.not_compared.items()]),
        ):
            lines += [f"  {title}{tensor}" for tensor in rest[:_MAX_LISTED_TENSORS]]
            lines += [f"  {title}and {len(rest) - _MAX_LISTED_TENSORS} more"] * (len(rest) > _MAX_LISTED_TENSORS)
        return "\n".join(lines)


def check_weights(engine: Any, model: Any, *, before: WeightReport | None = None) -> WeightReport:
    """Compare the weights of a trainer's whole torch module with those of a `vllm.LLM`; nothing of the two changes.

    With an `AsyncLLM`, await `engine.collective_rpc("kc_otel_weights", args=(shapes,))` and give what it returns to
    `EngineWeights.of` and `compare_weights`; over HTTP, in vLLM's development mode, POST /collective_rpc does the same.
    `before` is the report of the sync before this one.

    Raises:
        ValueError: If a tensor has no values, or is split over processes.
    """
    named = [(name, tensor) for name, tensor in model.named_parameters(remove_duplicate=False) if tensor.ndim]
    shapes = {name: list(tensor.shape) for name, tensor in named}
    return compare_weights(
        named, EngineWeights.of(engine.collective_rpc(WEIGHTS_METHOD, args=(shapes,))), before=before
    )


def compare_weights(
    trainer: Iterable[tuple[str, Any]], engine: EngineWeights, *, before: WeightReport | None = None
) -> WeightReport:
    """Compare a trainer's whole tensors, such as `named_parameters()`, with an engine's digests, one after the other.

    A tensor that the engine still has from `before`, the report of an earlier sync, is said to be so. ValueError if a
    tensor has no values, or is split over processes.
    """
    unequal, digests, not_compared, elements = [], {}, {}, 0
    for name, tensor in trainer:
        theirs = [worker[name] for worker in engine.workers if name in worker]
        if not theirs:
            not_compared[name] = engine.absent.get(name, "the engine was not asked for it")
            continue
        try:
            ours = digest_of(tensor, getattr(torch, theirs[0].dtype))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        if sum(shard.elements for shard in theirs) < ours.elements:
            not_compared[name] = f"the engine has {[list(shard.shape) for shard in theirs]} of {list(ours.shape)}"
            continue
        digests[name] = ours
        elements += ours.elements
        if not _arrived(name, ours, theirs):
            known = None if before is None else before.digests.get(name)
            whole = theirs[0].shape == ours.shape
            unequal.append(
                UnequalTensor(
                    name,
                    ours,
                    theirs[0].norm if whole else math.sqrt(sum(shard.squares for shard in theirs)),
                    ours.apart(theirs[0]) if whole else math.nan,
                    known is not None and _arrived(name, known, theirs),
                    whole and ours.values == theirs[0].values,
                )
            )
    return WeightReport(tuple(unequal), len(digests), elements, not_compared, digests)


def _arrived(name: str, ours: TensorDigest, theirs: Sequence[TensorDigest]) -> bool:
    """Return True if each worker has the tensor, or all together: digests of values add up, modulo 2^64."""
    if all(digest.elements == ours.elements for digest in theirs):
        # Engines lay out experts, and what they transpose, for their own kernels: the same values in another order.
        free = ".experts." in name
        return all(
            digest.values == ours.values and (free or digest.shape != ours.shape or digest.places == ours.places)
            for digest in theirs
        )
    return (sum(digest.values for digest in theirs) - ours.values) % (1 << 64) == 0
