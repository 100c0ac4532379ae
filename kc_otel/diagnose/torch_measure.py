"""Two torch kernels run on the same tokens: relative errors at every boundary, noise, and what components cost.

An operator's own error is measured with every output replaced by the training kernel's as soon as it was taken: each
operator of the inference kernel then works on the training kernel's inputs, in one forward. What it inherits from
upstream is not in it.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kc_otel._extras import extra
from kc_otel.diagnose.above_noise import Measured
from kc_otel.diagnose.boundaries import SAMPLER, Boundary
from kc_otel.diagnose.token_sequences import TokenSequence
from kc_otel.diagnose.torch_kernel import TorchKernel
from kc_otel.diagnose.torch_visit import Activations
from kc_otel.diagnose.watched_kernel import WatchedKernel

with extra("torch", "locating in a torch module"):
    import torch

__all__ = ["MOVED", "Absent", "PairMeasurement", "chunks_of", "inputs_as_seen", "kernel_in", "measure_pair"]

_ALONE: Final = 8
"""Sequences that are run alone, each kernel against itself; the rest of a batch stays together."""
MOVED: Final = 7
"""Padding of the other composition of a batch: no power of two, so that kernels choose other tiles."""


@dataclass(frozen=True, slots=True)
class Absent:
    """A boundary that cannot be compared.

    Attributes:
        boundary: Where.
        side: The kernel that has none, training or inference; empty where its shapes differ.
        features: Features of the training kernel's output and of the inference kernel's, where these differ.
    """

    boundary: Boundary
    side: str
    features: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class PairMeasurement:
    """What two kernels showed on S sequences.

    Attributes:
        measured: Relative errors by boundary, in the order of execution.
        own_noise: By boundary, the inference kernel's noise and that of the training kernel in the other's number
            format, [sequences] each: dependence on the batch, with the same inputs.
        missing: Boundaries that one kernel has and the other has not, or has in another shape.
        forwards: Forwards that were run, in sequences.
        tokens: Tokens of the sequences.
    """

    measured: dict[Boundary, Measured]
    own_noise: dict[Boundary, tuple[NDArray[np.float64], NDArray[np.float64]]]
    missing: tuple[Absent, ...]
    forwards: int
    tokens: int


def kernel_in(kernel: TorchKernel, dtype: torch.dtype) -> TorchKernel | None:
    """A kernel in another number format: what honest rounding alone does; None where it runs in none.

    Its parameters are cast, or where its forward mixes formats, it runs under autocast.
    """
    probe = [TokenSequence((0, 0))]
    with contextlib.suppress(RuntimeError, MemoryError):
        cast = replace(kernel, module=copy.deepcopy(kernel.module).to(dtype))
        cast.run(probe, [[0]])
        return cast
    with contextlib.suppress(RuntimeError):
        region = replace(kernel, autocast=dtype)
        region.run(probe, [[0]])
        return region
    return None


def measure_pair(
    train: TorchKernel,
    inference: WatchedKernel,
    sequences: Sequence[TokenSequence],
    *,
    precision: TorchKernel | None,
    batch_tokens: int = 4096,
) -> PairMeasurement:
    """Run both kernels, each also against itself in other batches, and compare at every boundary.

    Args:
        train: The reference.
        inference: The kernel whose operators are held against it.
        sequences: What both are run on.
        precision: The training kernel in the inference kernel's number format; None where they are the same.
        batch_tokens: Tokens that are worked on at a time; their activations are in memory together.
    """
    chunks = list(chunks_of(sequences, batch_tokens))
    parts = [_measure_chunk(train, inference, precision, chunk) for chunk in chunks]
    boundaries = [key for key in parts[0][0] if all(key in part[0] for part in parts)]
    measured = {
        key: Measured(*(np.concatenate([getattr(part[0][key], name) for part in parts]) for name in _FIELDS))
        for key in boundaries
    }
    own = {
        key: (
            np.concatenate([part[1][key][0] for part in parts]),
            np.concatenate([part[1][key][1] for part in parts]),
        )
        for key in boundaries
        if all(key in part[1] for part in parts)
    }
    missing = tuple(dict.fromkeys(each for part in parts for each in part[2]))
    tokens = sum(len(each.token_ids) for each in sequences)
    return PairMeasurement(measured, own, missing, (8 if precision else 6) * len(sequences), tokens)


_FIELDS: Final = ("local", "drift", "train_noise", "inference_noise", "precision", "prefill", "decode")


def chunks_of(sequences: Sequence[TokenSequence], batch_tokens: int) -> list[list[TokenSequence]]:
    """Runs of sequences with about so many tokens each; one sequence at least, and where there are, two."""
    chunks: list[list[TokenSequence]] = [[]]
    for each in sequences:
        held = sum(len(other.token_ids) for other in chunks[-1])
        if len(chunks[-1]) > 1 and held + len(each.token_ids) > batch_tokens:
            chunks.append([])
        chunks[-1].append(each)
    return chunks


def inputs_as_seen(
    train: TorchKernel, inference: WatchedKernel, chunk: Sequence[TokenSequence], own: Activations, forced: Activations
) -> Activations:
    """What the training kernel's operators give on the inputs that the inference kernel's were given.

    These are the training kernel's own outputs, but behind what can only be seen: attention in an engine reads the
    engine's cache, so it is held against the training kernel's attention to the keys and values of that cache.

    Args:
        train: The training kernel.
        inference: The inference kernel.
        chunk: What both were run on, as one batch.
        own: The training kernel's outputs.
        forced: The inference kernel's with all that can be replaced replaced by these.
    """
    seen = {key: each for key, each in forced.items() if key.operator in inference.only_seen and key in own}
    if not seen:
        return own
    expected: Activations = train.run(chunk, [list(range(len(chunk)))], replaced={**own, **seen})[0]
    return expected


def _measure_chunk(
    train: TorchKernel, inference: WatchedKernel, precision: TorchKernel | None, chunk: Sequence[TokenSequence]
) -> tuple[dict[Boundary, Measured], dict[Boundary, tuple[NDArray[np.float64], NDArray[np.float64]]], list[Absent]]:
    rows = list(range(len(chunk)))
    together = [rows]
    alone = [[row] for row in rows[:_ALONE]] + ([rows[_ALONE:]] if len(rows) > _ALONE else [])
    turned = [rows[::-1]]
    own, own_logits = train.run(chunk, together)
    ran, _ = inference.run(chunk, together)
    forced, _ = inference.run(chunk, together, replaced=own)
    expected = inputs_as_seen(train, inference, chunk, own, forced)
    again, others = (
        [each.run(chunk, alone, replaced=own)[0], each.run(chunk, turned, replaced=own, padding=MOVED)[0]]
        for each in (train, inference)
    )
    rounded = precision.run(chunk, together, replaced=own)[0] if precision else {}
    rounded_alone = precision.run(chunk, alone, replaced=own)[0] if precision else {}
    none = np.full(len(chunk), np.nan)
    missing: list[Absent] = [Absent(key, "inference") for key in own if key not in ran]
    missing += [Absent(key, "training") for key in ran if key not in own]
    measured, own_noise = {}, {}
    for key in own:
        if key not in ran or key not in forced or not own[key][0].is_floating_point():
            continue
        shapes = {
            (tuple(a.shape), tuple(b.shape)) for a, b in zip(own[key], ran[key], strict=True) if a.shape != b.shape
        }
        if shapes:
            ours, theirs = min(shapes)
            missing.append(Absent(key, "", (ours[-1], theirs[-1])))
            continue
        drift = relative(own[key], ran[key])
        noise = np.max([relative(own[key], each[key]) for each in again if key in each] or [none], axis=0)
        theirs_noise = np.max([relative(forced[key], each[key]) for each in others if key in each] or [none], axis=0)
        rounding = relative(own[key], rounded[key]) if key in rounded else none
        prompts = [(0, each.prompt_tokens) for each in chunk]
        completions = [(each.prompt_tokens, len(each.token_ids)) for each in chunk]
        measured[key] = Measured(
            local=relative(expected[key], forced[key]),
            drift=drift,
            train_noise=noise,
            inference_noise=theirs_noise,
            precision=rounding,
            prefill=relative(own[key], ran[key], prompts),
            decode=relative(own[key], ran[key], completions),
        )
        allowed = relative(rounded[key], rounded_alone[key]) if key in rounded_alone else none
        own_noise[key] = theirs_noise, np.fmax(noise, allowed)
    if inference.has_sampler or dict(train.sampling) != dict(inference.sampling):
        measured[SAMPLER] = _sampler(train, inference, chunk, own_logits)
    return measured, own_noise, missing


def _sampler(
    train: TorchKernel, inference: WatchedKernel, chunk: Sequence[TokenSequence], logits: Sequence[torch.Tensor]
) -> Measured:
    """Total variation that the two sides' sampling makes of the same logits."""
    ours, theirs = train.distributions(chunk, logits), inference.distributions(chunk, logits)
    drift = np.asarray(
        [0.5 * float((a.exp() - b.exp()).abs().sum(-1).mean()) for a, b in zip(ours, theirs, strict=True)]
    )
    none = np.full(len(ours), np.nan)
    return Measured(drift, drift, none, none, none, none, none)


def relative(
    reference: Sequence[torch.Tensor], other: Sequence[torch.Tensor], spans: Sequence[tuple[int, int]] | None = None
) -> NDArray[np.float64]:
    """Root mean square of the difference in shares of the reference's, per sequence.

    inf where only one is finite; nan where there are no tokens, or not every sequence was taken on both sides.

    Args:
        reference: [tokens, features] of each sequence.
        other: Likewise.
        spans: First token of each sequence that counts, and the one after the last; None for all.
    """
    if any(a.shape != b.shape or a.ndim != 2 for a, b in zip(reference, other, strict=True)):
        return np.full(len(reference), np.nan)
    ours, theirs = torch.cat(list(reference)).cpu().double(), torch.cat(list(other)).cpu().double()
    difference = (theirs - ours).masked_fill_((ours == theirs) | (ours.isnan() & theirs.isnan()), 0.0)
    error = difference.square().sum(-1).nan_to_num(nan=float("inf")).numpy()
    size = ours.masked_fill(~ours.isfinite(), 0.0).square().sum(-1).numpy()
    ends = np.cumsum([len(each) for each in reference])
    found = np.full(len(reference), np.nan)
    for row, (end, each) in enumerate(zip(ends, reference, strict=True)):
        first, last = spans[row] if spans is not None else (0, len(each))
        tokens = slice(end - len(each) + first, end - len(each) + min(last, len(each)))
        if tokens.stop > tokens.start:
            most, whole = float(error[tokens].sum()), float(size[tokens].sum())
            found[row] = math.sqrt(most / whole) if whole else (math.inf if most else 0.0)
    return found
