"""Capturing a torch kernel: alone, in another batch, and in the other kernel's number format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from kc_otel._extras import extra
from kc_otel.diagnose.boundaries import Boundary
from kc_otel.diagnose.capture_file import CapturedSequence, fused, kept_positions, projected
from kc_otel.diagnose.token_sequences import TokenSequence
from kc_otel.diagnose.torch_kernel import TorchKernel
from kc_otel.diagnose.torch_measure import kernel_in
from kc_otel.diagnose.torch_visit import Activations

with extra("torch", "capturing a torch module"):
    import torch

__all__ = ["capture_torch", "captured_from", "relative_error"]


def capture_torch(
    kernel: TorchKernel, sequences: Sequence[TokenSequence], *, precision: torch.dtype | None = None
) -> Iterator[CapturedSequence]:
    """What a kernel's operators give on each sequence.

    Args:
        kernel: The kernel.
        sequences: What it is run on, one after the other; one at a time is in memory.
        precision: Number format whose rounding is to be measured, in the kernel's own operators; None for none.
    """
    rounded = None if precision in {None, kernel.dtype} else kernel_in(kernel, precision)
    ids = [torch.as_tensor(np.asarray(each.token_ids, dtype=np.int64)) for each in sequences]
    for index, (tokens, sequence) in enumerate(zip(ids, sequences, strict=True)):
        own = _outputs(kernel.run([tokens], [[0]])[0])
        batch = [ids[index - 1], tokens]
        others = _outputs(kernel.run(batch, [[0, 1]], padding=7)[0], 1)
        rough = _outputs(rounded.run([tokens], [[0]])[0]) if rounded else {}
        yield captured_from(sequence, own, _errors(own, others), _errors(own, rough))


def captured_from(
    sequence: TokenSequence,
    outputs: Mapping[Boundary, NDArray[np.float32]],
    noise: Mapping[Boundary, float],
    precision: Mapping[Boundary, float],
) -> CapturedSequence:
    """A sequence's outputs [tokens, features], reduced to what is kept."""
    positions = kept_positions(len(sequence.token_ids))
    return CapturedSequence(
        token_ids=tuple(sequence.token_ids),
        prompt_tokens=sequence.prompt_tokens,
        positions=positions,
        outputs={key: projected(values[positions]) for key, values in outputs.items()},
        features={key: values.shape[1] for key, values in outputs.items()},
        noise=noise,
        precision=precision,
    )


def relative_error(reference: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    """Root mean square of the difference in shares of the reference's; inf where only one is finite."""
    ours, theirs = reference.astype(np.float64), other.astype(np.float64)
    with np.errstate(invalid="ignore"):
        difference = np.where((ours == theirs) | (np.isnan(ours) & np.isnan(theirs)), 0.0, theirs - ours)
    if not np.isfinite(difference).all():
        return float("inf")
    size = float(np.linalg.norm(np.where(np.isfinite(ours), ours, 0.0)))
    error = float(np.linalg.norm(difference))
    return error / size if size else (float("inf") if error else 0.0)


def _errors(
    own: Mapping[Boundary, NDArray[np.float32]], others: Mapping[Boundary, NDArray[np.float32]]
) -> dict[Boundary, float]:
    return {
        key: relative_error(own[key], values)
        for key, values in others.items()
        if key in own and own[key].shape == values.shape
    }


def _outputs(activations: Activations, row: int = 0) -> dict[Boundary, NDArray[np.float32]]:
    taken = {key: each[row] for key, each in activations.items()}
    numbers = {key: each for key, each in taken.items() if each.ndim == 2 and each.is_floating_point()}
    return fused({key: each.float().cpu().numpy() for key, each in numbers.items()})
