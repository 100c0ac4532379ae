"""Two captures held against each other: the first boundary whose drift is above noise.

A capture has what came out of each operator, with all that it inherited from upstream. So only the first boundary above
noise is a finding; later ones drift anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kc_otel.contract.model import Contract
from kc_otel.contract.words import number
from kc_otel.diagnose.above_noise import (
    ABOVE_NOISE,
    ROUNDING_RMS,
    BoundaryDrift,
    Measured,
    boundary_drift,
    enough_sequences,
)
from kc_otel.diagnose.boundaries import SAMPLER, Boundary, by_operator
from kc_otel.diagnose.capture_file import Capture, CapturedSequence, relative_error
from kc_otel.diagnose.located import (
    Divergence,
    Located,
    NotComparableError,
    batch_findings,
    between,
    cut_vocabulary,
    other_tokens,
    related,
    same_layers,
    settings_of,
)

_HEAD: Final = Boundary(None, "head")


def rounding_of(dtype: str | None) -> float:
    """Relative error of writing a value in a number format, root mean square; of bfloat16 for what is quantised.

    >>> f"{rounding_of('bfloat16'):.1e} {rounding_of('float16'):.1e} {rounding_of('float32'):.1e}"
    '1.6e-03 2.1e-04 2.5e-08'
    """
    bits = {"float32": 23, "float16": 10, "half": 10, "float64": 52}.get((dtype or "").removeprefix("torch."), 7)
    return ROUNDING_RMS * 2.0**-bits


def compare_captures(
    contract: Contract, train: Capture, inference: Capture, *, slice: str = "all", rounding: float = 0.0
) -> Located:
    """Find where two kernels begin to differ by more than noise, and by more than `rounding` to a number format.

    Raises:
        NotComparableError: If they have no sequence in common, other layers, other shapes or other weights.
    """
    theirs = {sequence.token_ids: sequence for sequence in inference.sequences}
    pairs = [(sequence, theirs[sequence.token_ids]) for sequence in train.sequences if sequence.token_ids in theirs]
    if not pairs:
        raise NotComparableError(
            "the captures have no sequence of the same tokens: capture the second from the first's tokens "
            "(--sequences FIRST.capture), and compare tokenizer and chat template if you did"
        )
    alpha = 1.0 - contract.observability.confidence
    ours = list(pairs[0][0].outputs)
    keys = [key for key in ours if all(key in a.outputs and key in b.outputs for a, b in pairs)]
    a, b = pairs[0]
    same_layers(a.outputs, b.outputs)
    features = [(key, a.features[key], b.features[key]) for key in keys if key != SAMPLER]
    cut = cut_vocabulary(shape for shape in features if shape[1] != shape[2])
    keys = [key for key in keys if key not in {finding.boundary for finding in cut} and not (cut and key == SAMPLER)]
    enough_sequences(len(pairs), len(keys), alpha)
    nan = np.full(len(pairs), np.nan)
    ours_alone = [a.noise for a, _ in pairs], [a.precision for a, _ in pairs]
    measured = {}
    for key in keys:
        noise, precision = (np.asarray([of.get(key, np.nan) for of in found]) for found in ours_alone)
        measured[key] = Measured(
            local=nan,
            drift=np.asarray([relative_error(a.outputs[key], b.outputs[key]) for a, b in pairs]),
            train_noise=noise,
            inference_noise=np.asarray([b.noise.get(key, np.nan) for _, b in pairs]),
            precision=precision,
            allowed=np.fmax(noise, precision),
            prefill=np.asarray([_part(key, a, b, decode=False) for a, b in pairs]),
            decode=np.asarray([_part(key, a, b, decode=True) for a, b in pairs]),
        )
    if SAMPLER in measured and _HEAD in measured:
        inherited = _inherited(pairs, measured[_HEAD].drift)
        measured[SAMPLER] = replace(measured[SAMPLER], train_noise=np.fmax(measured[SAMPLER].train_noise, inherited))
    embedding = Boundary(None, "embedding")
    related(measured[embedding].drift if embedding in measured else None)
    rows = boundary_drift(measured, alpha / 2, rounding=rounding)
    encoded = [(a.encoded, b.encoded) for a, b in pairs if a.encoded is not None and b.encoded is not None]
    findings = [
        *other_tokens(encoded, len(encoded)),
        *cut,
        *_first(rows),
        *batch_findings(measured, alpha / 2, rounding, {})[:1],  # what lies behind it inherits it
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
        notes=tuple(_notes(train, inference, pairs)),
        confidence=contract.observability.confidence,
        settings=tuple(settings_of(contract)),
    )


def _inherited(
    pairs: Sequence[tuple[CapturedSequence, CapturedSequence]], of_logits: NDArray[np.float64]
) -> NDArray[np.float64]:
    """The log-probabilities' relative difference due to the logits': each is its logit less a mean.

    The mean differs by no more than the logits do, so that it is twice as much at most.
    """
    sizes = [[float(np.linalg.norm(a.outputs[key].astype(np.float64))) for key in (_HEAD, SAMPLER)] for a, _ in pairs]
    logits, logprobs = np.array(sizes).T
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(2.0 * of_logits * logits / logprobs, dtype=np.float64)


def _first(rows: Sequence[BoundaryDrift]) -> list[Divergence]:
    """The first boundary above noise; later ones inherit its error."""
    row = next((candidate for candidate in rows if candidate.is_above), None)
    if row is None:
        return []
    difference = (
        f"relative difference {between(row.drift)}, {number(row.drift.estimate / row.floor)} times the noise floor"
    )
    if row.boundary == SAMPLER:
        said = f"of the sampled distribution, while the logits before it do not differ: {difference}"
        return [Divergence("sampler", row.boundary, "", said)]
    return [Divergence("drift", row.boundary, "", f"{difference}; what lies behind it inherits it")]


def _part(key: Boundary, a: CapturedSequence, b: CapturedSequence, *, decode: bool) -> float:
    chosen = (a.positions >= a.prompt_tokens) == decode
    return relative_error(a.outputs[key][chosen], b.outputs[key][chosen]) if chosen.any() else float("nan")


def _notes(train: Capture, inference: Capture, pairs: Sequence[tuple[CapturedSequence, CapturedSequence]]) -> list[str]:
    notes = [f"training kernel: {train.kernel}; inference kernel: {inference.kernel}"]
    a, b = pairs[0]
    for side, have, lack in (("inference", a, b), ("training", b, a)):
        if unseen := by_operator(key for key in have.outputs if key not in lack.outputs):
            notes.append(f"the {side} kernel has none of these, so they were not compared: {'; '.join(unseen)}")
    return [*notes, "no shares: captures can be compared, and nothing in them can be swapped", ABOVE_NOISE]
