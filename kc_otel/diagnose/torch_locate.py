"""`locate` for two torch kernels: tokens, shapes, weights, operators, batches and sampler, in that order."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count

import numpy as np
from numpy.typing import NDArray

from kc_otel._extras import extra
from kc_otel.contract.clause import Clause
from kc_otel.contract.model import Contract
from kc_otel.contract.words import number
from kc_otel.diagnose.above_noise import (
    ABOVE_NOISE,
    LEAST_FLOOR,
    NOISE_FACTOR,
    NOT_FINITE,
    ROUNDING_RMS,
    BoundaryDrift,
    Shares,
    boundary_drift,
    enough_sequences,
    shares_of,
)
from kc_otel.diagnose.boundaries import HEAD, OUTPUT, SAMPLER, Boundary, by_operator, fused_parts
from kc_otel.diagnose.located import (
    Divergence,
    Located,
    after_the_last,
    batch_findings,
    between,
    by_size,
    cut_vocabulary,
    other_tokens,
    related,
    settings_of,
)
from kc_otel.diagnose.same_checkpoint import (
    TensorDifference,
    other_settings,
    same_architecture,
    same_vocabulary,
    saturated_scales,
    tensor_differences,
)
from kc_otel.diagnose.token_sequences import TokenSequence
from kc_otel.diagnose.torch_kernel import TorchKernel
from kc_otel.diagnose.torch_measure import (
    Absent,
    PerToken,
    kernel_in,
    measure_pair,
    token_drift,
    token_log_ratio,
    token_tv,
    tokens_at_a_time,
)
from kc_otel.diagnose.vllm_kernel import WatchedKernel

with extra("torch", "locating in a torch module"):
    import torch


def locate(
    contract: Contract,
    train: TorchKernel,
    inference: WatchedKernel,
    sequences: Sequence[TokenSequence],
    *,
    slice: str = "all",
    clause: Clause | None = None,
    shares: bool = True,
    precision: str | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Located:
    """Find the operator of the inference kernel that differs from the training kernel's by more than noise.

    Sequences are independent of each other. The failing `clause` decides what `shares` are of: the fraction of tokens
    above its threshold for `abs_log_ratio`, mean total variation otherwise. Rounding to `precision`, the inference
    kernel's own format by default, is no fault. `progress` gets the findings so far, configurations first. A
    NotComparableError if the kernels are not the same checkpoint, a ValueError for tokens that a kernel does not know.
    """
    alpha = 1.0 - contract.observability.confidence
    if not sequences:
        raise ValueError("sequences: there is none; give some of the slice that fails")
    enough_sequences(len(sequences), len(set(train.named.values())), alpha)
    train = replace(train, is_fused=any(key in inference.named.values() for key in fused_parts(train.named.values())))
    settings = _same_model(train, inference)
    for said in settings:
        progress(said)
    _known_tokens(train, inference, sequences)
    weights = tensor_differences(train, inference)
    findings = _token_findings(train, inference, sequences)
    wanted = _dtype(precision or contract.kernels.inference.dtype, inference)
    rounded = kernel_in(train, wanted) if wanted != train.dtype else None
    batch_tokens = tokens_at_a_time(train)
    measured, missing, unreached = measure_pair(
        train, inference, sequences, precision=rounded, batch_tokens=batch_tokens, progress=progress
    )
    embedding = measured.get(Boundary(None, "embedding"))
    related(None if embedding is None else embedding.local)
    # Also where both kernels compute in it: another order of the same sum may round each value the other way.
    rounding = ROUNDING_RMS * torch.finfo(wanted).eps
    rows = boundary_drift(measured, alpha / 2, rounding=rounding)
    notes = [*_notes(missing, rows, weights)]
    if rounded is None and wanted != train.dtype:
        notes.append(f"the training kernel does not run in {wanted}: rounding to it counts as a difference")
    modules = {boundary: name for name, boundary in inference.named.items()}
    shapes = ((gap.boundary, *gap.features) for gap in missing if gap.features)
    findings += cut_vocabulary(shapes, modules.get(HEAD, ""))
    above = [row for row in rows if row.is_above]
    scales = saturated_scales(train, inference, {_module(row.boundary, modules) for row in above} - {""}, sequences)
    findings += [_drift_finding(row, rows, modules, weights, scales) for row in above]
    findings += batch_findings(measured, alpha / 2, rounding, modules)
    shared: Shares | None = None
    culprit = by_size(findings, rows)
    metric, per_token, observed = *_metric(clause), float("nan")
    swappable, unswapped = _swappable([row.boundary for row in above], missing)
    if any(finding.kind == "tokens" for finding in findings):
        notes.append("operators are compared on the training kernel's tokens")
    if unswapped:
        notes.append(f"not swapped: an engine's router gives no choices to swap: {'; '.join(by_operator(unswapped))}")
    if shares and any(finding.kind == "shape" for finding in findings):
        notes.append("no shares: the two kernels' logits have not the same tokens, so that nothing can be swapped")
    elif shares and swappable:
        shared, observed, largest = _divide(
            train,
            inference,
            sequences,
            {row.boundary: row.error for row in rows if row.boundary in swappable},
            per_token,
            alpha,
            batch_tokens=batch_tokens,
            progress=progress,
        )
        if culprit is not None and culprit.kind not in {"tokens", "shape"}:
            culprit = next(finding for finding in findings if finding.boundary == largest and finding.kind != "batch")
    located = Located(
        contract=contract.metadata.name,
        slice=slice,
        metric=metric,
        sequences=len(sequences),
        tokens=sum(len(sequence.token_ids) for sequence in sequences),
        boundaries=rows,
        findings=tuple(findings),
        culprit=culprit,
        shares=shared,
        observed=observed,
        notes=tuple(notes),
        confidence=contract.observability.confidence,
        settings=(*settings, *settings_of(contract)),
        unreached=unreached,
    )
    return replace(located, notes=(*located.notes, *_share_notes(located)))


def _swappable(above: Sequence[Boundary], missing: Sequence[Absent]) -> tuple[list[Boundary], list[Boundary]]:
    """Split boundaries into those that can be put into the training kernel, and routers whose choices are not seen."""
    lacking = {gap.boundary for gap in missing if gap.side == "inference"}
    unswapped = [
        boundary for boundary in above if boundary.operator == "router" and replace(boundary, part=1) in lacking
    ]
    return [boundary for boundary in above if boundary not in unswapped], unswapped


def _share_notes(located: Located) -> list[str]:
    if located.shares is None:
        return []
    rough = ": errors are too large to be put in one by one, so shares are rough" if located.is_rough else ""
    explained = f"{number(100 * located.explained)} % of the drift that was observed"
    return [
        f"the errors above noise, swapped in, make {explained}{rough}",
        "each operator's error is the one on the training kernel's inputs, also with others swapped in",
    ]


def _same_model(train: TorchKernel, inference: WatchedKernel) -> list[str]:
    """Refuse models and tokenizers that are not the same, as far as they say what they are; notes of what differs."""
    if train.vocabulary is not None and inference.vocabulary is not None:
        same_vocabulary(train.vocabulary, inference.vocabulary)
    said = [getattr(getattr(side.module, "config", None), "to_dict", None) for side in (train, inference)]
    if said[0] is None or said[1] is None:
        return []
    ours, theirs = said[0](), said[1]()
    same_architecture(ours, theirs)
    differing = other_settings(ours, theirs)
    return [f"the checkpoints' configurations differ: {differing}"] if differing else []


def _known_tokens(train: TorchKernel, inference: WatchedKernel, sequences: Sequence[TokenSequence]) -> None:
    """Refuse tokens that an embedding has no row for."""
    embedding = Boundary(None, "embedding")
    for side in (train, inference):
        name = next((name for name, boundary in side.named.items() if boundary == embedding), None)
        rows = getattr(side.module.get_submodule(name), "num_embeddings", None) if name else None
        for number_, sequence in enumerate(sequences):
            if rows is not None and max(sequence.token_ids) >= rows:
                token = max(sequence.token_ids)
                raise ValueError(
                    f"sequence {number_}: token {token} is beyond the vocabulary of {rows}; is the tokenizer other?"
                )


def _dtype(name: str | None, inference: WatchedKernel) -> torch.dtype:
    """The number format whose rounding is allowed: that of the contract where it is a plain one, or the kernel's."""
    if name is None:
        return inference.dtype
    found = getattr(torch, name.removeprefix("torch."), None)
    if isinstance(found, torch.dtype):
        return found if found.is_floating_point and found.itemsize > 1 else torch.bfloat16
    if name.startswith(("fp8", "int", "awq", "gptq", "w8", "w4", "float8", "nvfp4", "mxfp4")):
        return torch.bfloat16  # what quantised kernels compute and hand on in
    raise ValueError(f"kernels.inference.dtype: {name!r} is no number format of torch; give one with --precision")


def _metric(clause: Clause | None) -> tuple[str, PerToken]:
    if clause is not None and clause.metric == "abs_log_ratio":
        statistic = clause.parsed_statistic
        if statistic.kind == "fraction":
            above = statistic.argument
            return f"tokens with |log ratio| above {number(above)}", lambda p, q, t: (
                token_log_ratio(p, q, t) > above
            ).float()
        return "mean |log ratio|", token_log_ratio
    return "tv_token", token_tv


def _token_findings(
    train: TorchKernel, inference: WatchedKernel, sequences: Sequence[TokenSequence]
) -> list[Divergence]:
    encoded = []
    for sequence in sequences if train.encode or inference.encode else ():
        if sequence.messages:
            recorded = sequence.token_ids[: sequence.prompt_tokens]
            ours, theirs = (tuple(k.encode(sequence.messages)) if k.encode else recorded for k in (train, inference))
            encoded.append((ours, theirs))
    return other_tokens(encoded, len(sequences))


def _module(boundary: Boundary, modules: Mapping[Boundary, str]) -> str:
    return modules.get(Boundary(boundary.layer, boundary.operator), "")


def _drift_finding(
    row: BoundaryDrift,
    rows: Sequence[BoundaryDrift],
    modules: Mapping[Boundary, str],
    weights: Mapping[Boundary, tuple[TensorDifference, ...]],
    scales: Mapping[str, tuple[str, str]],
) -> Divergence:
    key = Boundary(row.boundary.layer, row.boundary.operator)
    if row.boundary == SAMPLER:
        sentence = f"sampling parameters make other distributions of the same logits: TV {number(row.local.estimate)}"
        return Divergence("sampler", row.boundary, "", sentence)
    differing = [
        tensor for tensor in weights.get(key, ()) if tensor.relative > NOISE_FACTOR * max(tensor.rounding, LEAST_FLOOR)
    ]
    error = row.local if row.local.samples else row.drift
    times = number(error.estimate / row.floor)
    sentence = f"relative error {between(error)} on the training kernel's inputs, {times} times the noise floor"
    if error.estimate >= NOT_FINITE:
        sentence = "its numbers are NaN or infinite on inputs on which the training kernel's are finite"
    if row.boundary == OUTPUT:
        sentence = f"{after_the_last(rows, modules)}; {sentence}"
    if differing:
        by = differing[0].relative
        differs = f"differs by {number(100 * by)} %" if math.isfinite(by) else "is zero in training, and here not"
        sentence += f"; tensor {differing[0].name} {differs}"
    module, tensors = _module(key, modules), tuple(tensor.name for tensor in differing)
    if module in scales:
        scale, said = scales[module]
        sentence, tensors = f"{sentence}; {said}", (scale, *tensors)
    return Divergence("drift", row.boundary, module, sentence, tensors)


def _divide(
    train: TorchKernel,
    inference: WatchedKernel,
    sequences: Sequence[TokenSequence],
    above: Mapping[Boundary, float],
    per_token: PerToken,
    alpha: float,
    *,
    batch_tokens: int,
    progress: Callable[[str], None],
) -> tuple[Shares, float, Boundary]:
    """Shares of what is above noise, given with its errors, the observed drift, and the boundary that is the culprit.

    The culprit has the largest error of the operator with the largest share.
    """
    with_errors, ran = token_drift(train, inference, sequences, per_token, list(above), batch_tokens=batch_tokens)
    groups, runs = by_operator(above), count(1)
    names = list(groups)

    def swapped(put_in: frozenset[int]) -> NDArray[np.float64]:
        progress(f"divided among {len(names)}: {next(runs)} sets of them swapped in")
        return with_errors(frozenset(boundary for index in put_in for boundary in groups[names[index]]))

    found = shares_of(names, swapped, alpha=alpha)
    return found, float(ran.mean()), max(groups[found.components[0].name], key=above.__getitem__)


def _notes(
    missing: Sequence[Absent], rows: Sequence[BoundaryDrift], weights: Mapping[Boundary, tuple[TensorDifference, ...]]
) -> Sequence[str]:
    notes = []
    if not any(weights.values()):
        notes.append("the kernels have no parameters in common: that they are one checkpoint was not verified")
    known = {Boundary(row.boundary.layer, row.boundary.operator) for row in rows}
    absent = {
        side: by_operator(
            gap.boundary
            for gap in missing
            if gap.side == side and Boundary(gap.boundary.layer, gap.boundary.operator) not in known
        )
        for side in ("inference", "training")
    }
    notes += [
        f"the {side} kernel has none of these, so they count to the next that both have: {'; '.join(unseen)}"
        for side, unseen in absent.items()
        if unseen
    ]
    return [*notes, ABOVE_NOISE]
