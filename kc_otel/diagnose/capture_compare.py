"""Two captures held against each other: the first boundary whose drift is above noise.

A capture has what came out of each operator, with all that it inherited from upstream. So only the first boundary above
noise is a finding; what lies behind it drifts anyway.
"""

from __future__ import annotations

import time
from typing import Final

import numpy as np

from kc_otel.contract.model import Contract
from kc_otel.contract.words import number
from kc_otel.diagnose.above_noise import MARGIN, SHARE, Measured, boundary_drift, least_sequences
from kc_otel.diagnose.boundaries import Boundary, by_operator
from kc_otel.diagnose.capture_file import Capture, CapturedSequence
from kc_otel.diagnose.located import Divergence, Located, NotComparableError
from kc_otel.diagnose.torch_capture import relative_error

__all__ = ["compare_captures"]

_UNRELATED: Final = 0.7
"""Relative error of the embedding beyond which two kernels have other weights; quantised ones stay below 0.1."""


def compare_captures(
    contract: Contract, train: Capture, inference: Capture, *, slice: str = "all", rounding: float = 0.0
) -> Located:
    """Where two kernels begin to differ by more than noise, from what each wrote.

    Args:
        contract: Names the confidence.
        train: What the training kernel gave.
        inference: What the inference kernel gave.
        slice: The slice that the sequences are of, for the text.
        rounding: Relative error of writing a value in the inference kernel's number format.

    Raises:
        NotComparableError: If they have no sequence in common, other layers, other shapes or other weights.
    """
    began = time.monotonic()
    theirs = {each.token_ids: each for each in inference.sequences}
    pairs = [(each, theirs[each.token_ids]) for each in train.sequences if each.token_ids in theirs]
    if not pairs:
        raise NotComparableError(
            "the captures have no sequence of the same tokens: capture the second from the first's tokens "
            "(--sequences FIRST.capture), and compare tokenizer and chat template if you did"
        )
    ours = list(pairs[0][0].outputs)
    keys = [key for key in ours if all(key in a.outputs and key in b.outputs for a, b in pairs)]
    _same_model(pairs[0][0], pairs[0][1], keys)
    nan = np.full(len(pairs), np.nan)
    measured = {}
    for key in keys:
        drift = np.asarray([relative_error(a.outputs[key], b.outputs[key]) for a, b in pairs])
        measured[key] = Measured(
            local=nan,
            drift=drift,
            train_noise=np.asarray([a.noise.get(key, np.nan) for a, _ in pairs]),
            inference_noise=np.asarray([b.noise.get(key, np.nan) for _, b in pairs]),
            precision=np.asarray([a.precision.get(key, np.nan) for a, _ in pairs]),
            prefill=np.asarray([_part(key, a, b, decode=False) for a, b in pairs]),
            decode=np.asarray([_part(key, a, b, decode=True) for a, b in pairs]),
        )
    embedding = measured.get(Boundary(None, "embedding"))
    if embedding is not None and float(np.median(embedding.drift)) > _UNRELATED:
        raise NotComparableError(
            "the embeddings of the same tokens have nothing to do with each other: the checkpoints are others"
        )
    alpha = 1.0 - contract.observability.confidence
    rows = boundary_drift(measured, alpha, rounding=rounding)
    above = [row for row in rows if row.is_above]
    findings = [
        Divergence(
            "drift",
            row.boundary,
            "",
            f"relative difference {number(row.drift.estimate)} [{number(row.drift.lower)}, {number(row.drift.upper)}], "
            f"{number(row.drift.estimate / row.floor)} times the noise floor; what lies behind it inherits it",
        )
        for row in above[:1]
    ]
    return Located(
        contract=contract.metadata.name,
        slice=slice,
        metric="",
        sequences=len(pairs),
        tokens=sum(len(a.token_ids) for a, _ in pairs),
        boundaries=rows,
        findings=tuple(findings),
        culprit=findings[0] if findings else None,
        shares=(),
        observed=float("nan"),
        notes=tuple(_notes(train, inference, pairs, keys, alpha)),
        forwards=0,
        seconds=time.monotonic() - began,
        confidence=contract.observability.confidence,
    )


def _part(key: Boundary, a: CapturedSequence, b: CapturedSequence, *, decode: bool) -> float:
    chosen = (a.positions >= a.prompt_tokens) == decode
    return relative_error(a.outputs[key][chosen], b.outputs[key][chosen]) if chosen.any() else float("nan")


def _same_model(ours: CapturedSequence, theirs: CapturedSequence, keys: list[Boundary]) -> None:
    layers = [sorted({each.layer for each in side.outputs if each.layer is not None}) for side in (ours, theirs)]
    if layers[0] != layers[1]:
        raise NotComparableError(
            f"the training kernel has {len(layers[0])} layers and the inference kernel {len(layers[1])}: "
            "they are not the same checkpoint, or layers of one are not recognised"
        )
    for key in keys:
        if ours.features[key] != theirs.features[key]:
            raise NotComparableError(
                f"{key} has {ours.features[key]} features in training and {theirs.features[key]} in inference: "
                "the kernels are not the same checkpoint; give both the same"
            )


def _notes(
    train: Capture,
    inference: Capture,
    pairs: list[tuple[CapturedSequence, CapturedSequence]],
    keys: list[Boundary],
    alpha: float,
) -> list[str]:
    notes = [f"training kernel: {train.kernel}; inference kernel: {inference.kernel}"]
    if len(pairs) < (least := least_sequences(len(keys), alpha)):
        notes.append(f"{len(pairs)} sequences cannot name anything at {len(keys)} boundaries: give {least} or more")
    a, b = pairs[0]
    for side, have, lack in (("inference", a, b), ("training", b, a)):
        if unseen := by_operator(key for key in have.outputs if key not in lack.outputs):
            notes.append(f"the {side} kernel has none of these, so they were not compared: {'; '.join(unseen)}")
    notes.append("no shares: captures can be compared, and nothing in them can be swapped")
    notes.append(
        f"above noise: surely more than {100 * SHARE:g} % of sequences differ by more than {MARGIN:g} times the floor"
    )
    return notes
