"""Two kernels run on the same tokens: relative errors at every boundary, noise, and what components cost.

An operator's own error excludes the one inherited from upstream: in one forward, every output is replaced by the
training kernel's as soon as it was taken, so that each operator works on the training kernel's inputs.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kc_otel._extras import extra
from kc_otel.diagnose.above_noise import Measured
from kc_otel.diagnose.boundaries import OUTPUT, SAMPLER, Boundary, fused, in_order
from kc_otel.diagnose.captures import relative_error
from kc_otel.diagnose.token_sequences import TokenSequence
from kc_otel.diagnose.torch_kernel import TorchKernel
from kc_otel.diagnose.visits import Activations
from kc_otel.diagnose.vllm_kernel import WatchedKernel

with extra("torch", "locating in a torch module"):
    import torch

_ALONE_ROWS: Final = 8
"""Sequences that are run alone, each kernel against itself; the rest of a batch stays together."""
_MAX_OUTPUT_BYTES: Final = 300 << 20
"""Bytes of a run's outputs that are in memory at a time. Up to four runs are."""
OTHER_PADDING: Final = 7
"""Padding of the other composition of a batch: no power of two, so that kernels choose other tiles."""


@dataclass(frozen=True, slots=True)
class Absent:
    """A boundary that one side lacks, training or inference, or where its features differ between the two."""

    boundary: Boundary
    side: str
    features: tuple[int, int] | None = None


def kernel_in(kernel: TorchKernel, dtype: torch.dtype) -> TorchKernel | None:
    """A kernel cast to another number format, or under autocast, to show its rounding; None if it runs in none."""
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
    batch_tokens: int,
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[dict[Boundary, Measured], list[Absent], tuple[Boundary, ...]]:
    """Run both kernels, each also against itself in other batches, and compare at every boundary.

    Returns relative errors by boundary, nan of sequences whose chunk did not reach it; what cannot be compared; and
    what no sequence reached. `precision` is the training kernel in the inference kernel's number format.
    """
    parts, done = [], 0
    chunks = chunks_of(sequences, batch_tokens)
    with not_run(train) as ours, not_run(inference) as theirs:
        for chunk in chunks:
            parts.append(_measure_chunk(train, inference, precision, chunk))
            done += len(chunk)
            progress(f"compared at every operator: {done} of {len(sequences)} sequences")
    sizes = [len(chunk) for chunk in chunks]
    measured = {
        key: _joined([part.get(key) for part, _ in parts], sizes) for key in in_order(part for part, _ in parts)
    }
    missing = list(dict.fromkeys(gap for _, gaps in parts for gap in gaps))
    seen = {*measured, *(gap.boundary for gap in missing)}
    by_neither = set(unreached(inference, theirs, seen))
    return measured, missing, tuple(key for key in unreached(train, ours, seen) if key in by_neither)


def _joined(parts: Sequence[Measured | None], sizes: Sequence[int]) -> Measured:
    """Measurements of one boundary in several chunks of so many sequences; nan where a chunk has none."""
    joined: list[Any] = []
    for field in fields(Measured):
        columns = [None if part is None else getattr(part, field.name) for part in parts]
        filled = [
            np.full(size, np.nan) if column is None else column for column, size in zip(columns, sizes, strict=True)
        ]
        joined.append(None if all(column is None for column in columns) else np.concatenate(filled))
    return Measured(*joined)


@contextlib.contextmanager
def not_run(kernel: WatchedKernel) -> Iterator[dict[Boundary, None]]:
    """Have the boundaries that a kernel names, in order, lose those whose modules run meanwhile."""
    left = dict.fromkeys(kernel.named.values())

    def ran(boundary: Boundary, *_: Any) -> None:
        left.pop(boundary, None)

    handles = [
        kernel.module.get_submodule(name).register_forward_pre_hook(partial(ran, boundary))
        for name, boundary in kernel.named.items()
    ]
    try:
        yield left
    finally:
        for handle in handles:
            handle.remove()


def unreached(kernel: WatchedKernel, left: dict[Boundary, None], seen: Iterable[Boundary]) -> list[Boundary]:
    """Boundaries of those `left` by `not_run` that no sequence reached, with fused products as one."""
    for key in seen:
        left.pop(replace(key, part=0), None)
    return list(fused(left, lambda _: None) if isinstance(kernel, TorchKernel) and kernel.is_fused else left)


def tokens_at_a_time(kernel: TorchKernel) -> int:
    """Return the number of tokens whose outputs at every boundary fit the memory limit."""
    outputs, _ = kernel.run([TokenSequence((0, 0))], [[0]])
    of_two = sum(int(value.nbytes) for values in outputs.values() for value in values)
    return max(1, 2 * _MAX_OUTPUT_BYTES // of_two)


def chunks_of(sequences: Sequence[TokenSequence], batch_tokens: int) -> list[list[TokenSequence]]:
    """Runs of sequences with about so many tokens each; one sequence at least, and where there are, two."""
    chunks: list[list[TokenSequence]] = [[]]
    for sequence in sequences:
        held = sum(len(other.token_ids) for other in chunks[-1])
        if len(chunks[-1]) > 1 and held + len(sequence.token_ids) > batch_tokens:
            chunks.append([])
        chunks[-1].append(sequence)
    return chunks


def inputs_as_seen(
    train: TorchKernel, inference: WatchedKernel, chunk: Sequence[TokenSequence], own: Activations, forced: Activations
) -> Activations:
    """Return the outputs of the training kernel's operators on the inputs of the inference kernel's.

    These are its `own`, except after what can only be observed: attention in an engine reads the engine's cache, so it
    is compared with the training kernel's attention to those keys and values. `forced` has all else replaced.
    """
    seen = {key: tensor for key, tensor in forced.items() if key.operator in inference.only_seen and key in own}
    if not seen:
        return own
    expected: Activations = train.run(chunk, [list(range(len(chunk)))], replaced={**own, **seen})[0]
    return expected


def _measure_chunk(
    train: TorchKernel, inference: WatchedKernel, precision: TorchKernel | None, chunk: Sequence[TokenSequence]
) -> tuple[dict[Boundary, Measured], list[Absent]]:
    rows = list(range(len(chunk)))
    together = [rows]
    alone = [[row] for row in rows[:_ALONE_ROWS]] + ([rows[_ALONE_ROWS:]] if len(rows) > _ALONE_ROWS else [])
    turned = [rows[::-1]]
    prompts = [(0, sequence.prompt_tokens) for sequence in chunk]
    completions = [(sequence.prompt_tokens, len(sequence.token_ids)) for sequence in chunk]
    none = np.full(len(chunk), np.nan)
    own, own_logits = train.run(chunk, together)
    ran, _ = inference.run(chunk, together)
    missing: list[Absent] = [Absent(key, "inference") for key in own if key not in ran]
    missing += [Absent(key, "training") for key in ran if key not in own]
    drift, prefill, decode = (_errors(own, ran, spans) for spans in (None, prompts, completions))
    shapes = {
        key: (ours.shape[-1], theirs.shape[-1])
        for key in own
        if key in ran
        for ours, theirs in zip(own[key], ran[key], strict=True)
        if ours.shape != theirs.shape
    }
    shared = frozenset(ran)
    del ran  # one run's outputs at a time, beside what others are held against
    given = {key: values for key, values in own.items() if key in shared}
    forced, _ = inference.run(chunk, together, replaced=given)
    local = _errors(inputs_as_seen(train, inference, chunk, own, forced), forced)
    noise, theirs_noise = (
        _largest(
            _errors(reference, kernel.run(chunk, batches, replaced=inputs, padding=padding)[0])
            for batches, padding in ((alone, 0), (turned, OTHER_PADDING))
        )
        for kernel, reference, inputs in ((train, own, own), (inference, forced, given))
    )
    comparable = [key for key in own if key in forced and key in drift]
    del forced
    rounding, allowed = {}, {}
    if precision:
        rounded, _ = precision.run(chunk, together, replaced=own)
        rounding = _errors(own, rounded)
        allowed = _errors(rounded, precision.run(chunk, alone, replaced=own)[0])
    measured = {}
    for key in comparable:
        if not own[key][0].is_floating_point():
            continue
        if key in shapes:
            missing.append(Absent(key, "", shapes[key]))
            continue
        measured[key] = Measured(
            local=local.get(key, none),
            drift=drift[key],
            train_noise=noise.get(key, none),
            inference_noise=theirs_noise.get(key, none),
            precision=rounding.get(key, none),
            prefill=prefill[key],
            decode=decode[key],
            allowed=np.fmax(noise.get(key, none), allowed.get(key, none)),
        )
    if inference.has_sampler or dict(train.sampling) != dict(inference.sampling):
        measured[SAMPLER] = _sampler(train, inference, chunk, own_logits)
    return measured, missing


Errors = dict[Boundary, NDArray[np.float64]]


def _errors(reference: Activations, other: Activations, spans: Sequence[tuple[int, int]] | None = None) -> Errors:
    return {
        key: relative(values, other[key], spans, shifted=key == OUTPUT)
        for key, values in reference.items()
        if key in other
    }


def _largest(runs: Iterable[Errors]) -> Errors:
    found: Errors = {}
    for errors in runs:
        found |= {key: np.maximum(found[key], error) if key in found else error for key, error in errors.items()}
    return found


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
    reference: Sequence[torch.Tensor],
    other: Sequence[torch.Tensor],
    spans: Sequence[tuple[int, int]] | None = None,
    *,
    shifted: bool = False,
) -> NDArray[np.float64]:
    """`relative_error` per sequence of [tokens, features], over its span if given; nan without tokens on both sides."""
    found = np.full(len(reference), np.nan)
    if any(a.shape != b.shape or a.ndim != 2 for a, b in zip(reference, other, strict=True)):
        return found
    for row, pair in enumerate(zip(reference, other, strict=True)):
        tokens = slice(None) if spans is None else slice(*spans[row])
        ours, theirs = (tensor[tokens].float().cpu().numpy() for tensor in pair)
        if len(ours):
            free = np.ones(ours.shape[1], dtype=np.float32) if shifted else None
            found[row] = relative_error(ours, theirs, free=free)
    return found


PerToken = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""From log-probabilities P and Q [tokens, vocabulary] and the tokens that came next [tokens], each token's drift."""


def token_drift(
    train: TorchKernel,
    inference: WatchedKernel,
    sequences: Sequence[TokenSequence],
    per_token: PerToken,
    above: Sequence[Boundary],
    *,
    batch_tokens: int,
) -> tuple[Callable[[frozenset[Boundary]], NDArray[np.float64]], NDArray[np.float64]]:
    """Drift of the next-token distribution with the errors of some operators put into the training kernel.

    An operator's error is what it gives on the training kernel's inputs beyond that kernel's own. Put in alone it is
    exact; of several each is taken as it was measured, though inputs further down have changed. Returns a function from
    boundaries to the mean drift of each sequence, and the inference kernel's drift as it runs.
    """
    chunks = []
    whole = []
    wanted = {replace(boundary, part=0) for boundary in above}
    for chunk in chunks_of(sequences, batch_tokens):
        together = [list(range(len(chunk)))]
        own, own_logits = train.run(chunk, together)
        forced, _ = inference.run(chunk, together, replaced=own)
        expected = inputs_as_seen(train, inference, chunk, own, forced)
        _, ran_logits = inference.run(chunk, together, taken=False)
        errors = {
            key: [
                b.float() - a.float() if a.is_floating_point() else b
                for a, b in zip(expected[key], forced[key], strict=True)
            ]
            for key in own
            if replace(key, part=0) in wanted
            and key in forced
            and all(a.shape == b.shape for a, b in zip(own[key], forced[key], strict=True))
        }
        ours = train.distributions(chunk, own_logits)
        chunks.append((chunk, together, errors, ours))
        whole.append(_drifts(ours, inference.distributions(chunk, ran_logits), chunk, per_token))

    def with_errors(boundaries: frozenset[Boundary]) -> NDArray[np.float64]:
        found = []
        swapped = {replace(boundary, part=0) for boundary in boundaries}
        for chunk, together, errors, ours in chunks:
            added = {
                key: values
                for key, values in errors.items()
                if key in boundaries or (not values[0].is_floating_point() and replace(key, part=0) in swapped)
            }
            _, logits = train.run(chunk, together, added=added, taken=False)
            samples: WatchedKernel = inference if SAMPLER in boundaries else train
            found.append(_drifts(ours, samples.distributions(chunk, logits), chunk, per_token))
        return np.concatenate(found)

    return with_errors, np.concatenate(whole)


def _drifts(
    ours: Sequence[torch.Tensor],
    theirs: Sequence[torch.Tensor],
    sequences: Sequence[TokenSequence],
    per_token: PerToken,
) -> NDArray[np.float64]:
    return np.asarray(
        [
            float(per_token(p, q, torch.as_tensor(sequence.token_ids[-len(p) :])).mean())
            for p, q, sequence in zip(ours, theirs, sequences, strict=True)
        ]
    )


def token_tv(p: torch.Tensor, q: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """Total variation of each token's distribution."""
    drift = 0.5 * (p.exp() - q.exp()).abs().sum(-1)
    return drift.nan_to_num(nan=1.0)  # a kernel without numbers is as far away as can be


def token_log_ratio(p: torch.Tensor, q: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """|log P - log Q| of the tokens that came next, nats; at most 50, so that what is never sampled has a number."""
    chosen = tokens[:, None]
    ratio = (p.gather(1, chosen) - q.gather(1, chosen)).squeeze(1)
    return ratio.abs().nan_to_num(nan=50.0, posinf=50.0).clamp(max=50.0)
