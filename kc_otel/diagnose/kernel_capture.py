"""Capturing a kernel, a torch module or an engine: alone, in another batch, and in the other's number format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from kc_otel._extras import extra
from kc_otel.diagnose.boundaries import SAMPLER, Boundary
from kc_otel.diagnose.capture_file import CapturedSequence, kept_positions, projected, relative_error
from kc_otel.diagnose.token_sequences import TokenSequence
from kc_otel.diagnose.torch_kernel import Activations, TorchKernel
from kc_otel.diagnose.torch_measure import OTHER_PADDING, kernel_in
from kc_otel.diagnose.watched_kernel import WatchedKernel

with extra("torch", "capturing a torch module"):
    import torch


def capture_kernel(
    kernel: WatchedKernel, sequences: Sequence[TokenSequence], *, precision: torch.dtype | None = None
) -> Iterator[CapturedSequence]:
    """Yield the outputs of a kernel's operators on each sequence, and the distributions it samples from.

    Products of one input count as one operator, as engines compute them. `precision` is the number format whose
    rounding is to be measured, in a torch kernel's own operators. One sequence at a time is in memory.
    """
    if isinstance(kernel, TorchKernel):
        kernel = replace(kernel, is_fused=True)
    rounded = kernel_in(kernel, precision) if precision and isinstance(kernel, TorchKernel) else None
    for index, sequence in enumerate(sequences):
        taken, logits = kernel.run([sequence], [[0]])
        own = _outputs(taken)
        others = _outputs(kernel.run([sequences[index - 1], sequence], [[0, 1]], padding=OTHER_PADDING)[0], 1)
        rough = _outputs(rounded.run([sequence], [[0]])[0]) if rounded else {}
        encoded = kernel.encode(sequence.messages) if kernel.encode and sequence.messages else None
        sampled = np.zeros((len(sequence.token_ids), logits[0].shape[1]), dtype=np.float32)
        found = kernel.distributions([sequence], logits)[0].exp().cpu().numpy()
        sampled[-1 - len(found) : -1] = found
        outputs, positions = {**own, SAMPLER: sampled}, kept_positions(len(sequence.token_ids))
        yield CapturedSequence(
            token_ids=tuple(sequence.token_ids),
            prompt_tokens=sequence.prompt_tokens,
            positions=positions,
            outputs={key: projected(values[positions]) for key, values in outputs.items()},
            features={key: values.shape[1] for key, values in outputs.items()},
            noise=_errors(own, others),
            precision=_errors(own, rough),
            messages=sequence.messages,
            encoded=None if encoded is None else tuple(encoded),
        )


def _errors(
    own: Mapping[Boundary, NDArray[np.float32]], others: Mapping[Boundary, NDArray[np.float32]]
) -> dict[Boundary, float]:
    return {
        key: relative_error(own[key], values)
        for key, values in others.items()
        if key in own and own[key].shape == values.shape
    }


def _outputs(activations: Activations, row: int = 0) -> dict[Boundary, NDArray[np.float32]]:
    taken = {key: tensor[row] for key, tensor in activations.items()}
    numbers = {key: tensor for key, tensor in taken.items() if tensor.ndim == 2 and tensor.is_floating_point()}
    return {key: tensor.float().cpu().numpy() for key, tensor in numbers.items()}
