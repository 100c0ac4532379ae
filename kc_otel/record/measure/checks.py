"""Input checks: conditions for calling a difference between two kernels drift.

A sequence that fails one is not measured; it is counted under the check's name (`kc.input.invalid`);
`contract.input_reasons` has them in words. Each sequence has at most one reason: declarations come before the numbers,
and a fault of single numbers before a pattern of many. Stale weights are no reason: they are a lag, recorded as such,
and the drift they cause is real.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kc_otel.contract.input_reasons import InvalidReason
from kc_otel.record.measure.altered import left_out, looks_altered, never_sure, no_logprobs, shifted
from kc_otel.record.measure.arrays import Block, SampledBatch, as_host, is_tensor
from kc_otel.record.measure.fillers import agree_in_runs, constants
from kc_otel.record.measure.pairing_faults import PairingFault, without
from kc_otel.record.measure.processing import (
    looks_processed,
    looks_processed_together,
    patterns,
    surer_rows,
    temperature_like,
    together_temperature_like,
    truncation_like,
)
from kc_otel.record.measure.rounding import looks_rounded
from kc_otel.record.measure.same_tokens import likeliest, looks_unlike, not_told, other_places, other_tokens
from kc_otel.record.measure.sampled import saturated

__all__ = [
    "LOWEST_LOGPROB",
    "CheckedRows",
    "InvalidReason",
    "check",
    "check_block",
    "check_declared",
    "check_patterns",
    "difference",
    "doubtful",
    "failed",
    "held_together",
    "same_shape",
]


_TOLERANCE: Final = 1e-3
"""Tolerance for a log-probability above 0: a log-softmax in half precision, or a sum in another order."""
LOWEST_LOGPROB: Final = -100.0
"""log-probability below which nobody has sampled a token: a mask's or a sentinel's number, as -inf."""
_PROCESSING: Final = (InvalidReason.TEMPERATURE_MISMATCH, InvalidReason.TRUNCATED_SAMPLING)
_PAIRING: Final = (InvalidReason.NOT_SAME_TOKENS, InvalidReason.ONE_VALUE, InvalidReason.NOT_LOGPROBS)
_FILLER: Final = 1.0
"""Number that some trainers write in place of a log-probability that they do not have."""
_SETTING_SHARE: Final = 0.1
"""Share of a batch's sequences that show a sampler's setting from which all have it: it is set for all of them."""
_PAIRING_SHARE: Final = 0.5
"""Share that show a fault of the pairing from which the others are of the same making, and do not show it."""
_MIN_SEQUENCES: Final = 4


@dataclass(frozen=True, slots=True, eq=False)
class CheckedRows:
    """Result of the checks on some rows."""

    codes: NDArray[np.int8]  # an `InvalidReason` for each, int8 [rows]
    why: dict[InvalidReason, str]  # findings, where they add to the reason; under `VALID`, what could not be checked


def check(
    train: Any,
    inference: Any,
    *,
    mask: Any = None,
    train_token_ids: Any = None,
    inference_token_ids: Any = None,
    processing: tuple[Mapping[str, object], Mapping[str, object]] | None = None,
    prompt_ids: tuple[Sequence[Any], Sequence[Any]] | None = None,
    density: bool = False,
) -> NDArray[np.int8]:
    """An `InvalidReason` for each sequence of a batch of sampled log-probabilities, int8 [sequences].

    Arrays are [sequences, tokens], NumPy or torch; where `mask` is 0 they may hold anything. Token ids are compared
    when both sides' are given, `processing` is what the caller declares of each side, and `prompt_ids` are the prompts
    that each side saw, integers [prompt] for each sequence: nothing in the log-probabilities tells one that was decoded
    and encoded again from drift. For `density` see `check_block`.
    """
    if not same_shape(train, inference, mask, train_token_ids, inference_token_ids):
        return np.full(len(train), InvalidReason.SHAPE_MISMATCH, dtype=np.int8)
    batch = SampledBatch.of(train, inference, mask)
    codes = check_declared(batch.lengths.size, batch.mask, train_token_ids, inference_token_ids, processing)
    codes[(codes == InvalidReason.VALID) & (batch.lengths == 0)] = InvalidReason.NO_TOKENS
    if prompt_ids is not None:
        codes[(codes == InvalidReason.VALID) & _differing(prompt_ids, codes.size)] = InvalidReason.PROMPT_MISMATCH
    for block in batch.blocks(np.flatnonzero(codes == InvalidReason.VALID)):
        codes[block.rows] = check_block(block, difference(block), density=density).codes
    return held_together(codes)


def _differing(prompts: tuple[Sequence[Any], Sequence[Any]], sequences: int) -> NDArray[np.bool_]:
    for side, given in zip(("train", "inference"), prompts, strict=True):
        if len(given) != sequences:
            msg = f"prompt_ids: {len(given)} {side} prompts for {sequences} sequences; give one for each"
            raise ValueError(msg)
    pairs = zip(*prompts, strict=True)
    return np.array([not np.array_equal(as_host(left), as_host(right)) for left, right in pairs], dtype=np.bool_)


def failed(codes: NDArray[np.int8]) -> dict[str, NDArray[np.intp]]:
    """Return which sequences failed, [n] each, by the reason's name as the metric's attribute has it."""
    found = np.unique(codes[codes != InvalidReason.VALID]).tolist()
    return {InvalidReason(code).name.lower(): np.flatnonzero(codes == code) for code in found}


def same_shape(*arrays: Any) -> bool:
    """Return True if all given arrays (not None) have one shape."""
    return len({tuple(np.shape(array)) for array in arrays if array is not None}) == 1


def check_declared(
    sequences: int,
    mask: Any,
    train_token_ids: Any,
    inference_token_ids: Any,
    processing: tuple[Mapping[str, object], Mapping[str, object]] | None,
) -> NDArray[np.int8]:
    """Check the arguments of `check` without looking at log-probabilities; int8 [sequences]."""
    codes = np.zeros(sequences, dtype=np.int8)
    if train_token_ids is not None and inference_token_ids is not None:
        given = [train_token_ids, inference_token_ids] + ([] if mask is None else [mask])
        if not all(is_tensor(array) and array.device == given[0].device for array in given):
            given = [as_host(array) for array in given]
        differs = given[0] != given[1]
        for kept in given[2:]:
            differs &= kept != 0
        codes[as_host(differs.any(1))] = InvalidReason.TOKEN_MISMATCH
    if processing is not None and dict(processing[0]) != dict(processing[1]):
        codes[:] = InvalidReason.PROCESSING_MISMATCH
    return codes


def difference(block: Block) -> NDArray[Any]:
    """Difference log P(y) - log Q(y) of a block's tokens, not yet saturated; NaN where both are infinite."""
    with np.errstate(invalid="ignore", over="ignore"):
        return np.subtract(block.train, block.inference)


def check_block(block: Block, log_w: NDArray[Any], *, sample: bool = True, density: bool = False) -> CheckedRows:
    """Check a block's rows, from their log-probabilities and their `difference`.

    `sample` is to look for what a program does to all rows (`measure.altered`). With `density` they are log-densities,
    which may be any finite number, whatever else they look like; one of the training kernel may be -inf.
    """
    if density:
        return CheckedRows(_single_densities(block), {})
    why: dict[InvalidReason, str] = {}
    with np.errstate(invalid="ignore", over="ignore"):
        drift = np.add.reduceat(np.abs(saturated(log_w)), block.starts, dtype=np.float64) / block.lengths
        edges = tuple(
            reduce(side, block.starts)
            for reduce in (np.maximum.reduceat, np.minimum.reduceat)
            for side in (block.train, block.inference)
        )
        wrong = no_logprobs(block, edges, apart=bool(drift.max() > 0.5)) or never_sure(block, edges) if sample else []
        altered = sample and (looks_altered(block, log_w, edges) or looks_rounded(block))
    if wrong:
        said = "; ".join(fault.of(block.rows.size) for fault in wrong)
        return CheckedRows(np.full(block.rows.size, wrong[0].reason, np.int8), {wrong[0].reason: said})
    codes = _single_numbers(block, edges, why)
    if codes.any():
        sound = codes == InvalidReason.VALID
        rest = block.only(sound)
        if rest.rows.size:
            codes[sound] = _check_pairs(rest, drift[sound], why, altered=altered)
        return CheckedRows(codes, why)
    codes = _check_pairs(block, drift, why, altered=altered)
    if sample and not codes.any() and (said := not_told(block, drift)):
        why[InvalidReason.VALID] = said
    return CheckedRows(codes, why)


def doubtful(drift: NDArray[np.float64], lengths: NDArray[np.intp]) -> NDArray[np.bool_]:
    """Rows that drift by enough for a fault of the pairing, or of the sampler, to be looked for."""
    return looks_unlike(drift) | looks_processed(drift, lengths)


def held_together(codes: NDArray[np.int8]) -> NDArray[np.int8]:
    """The codes of a batch where what many rows show is every row's; its argument otherwise."""
    if not codes.any():
        return codes
    measured = codes != InvalidReason.NO_TOKENS
    for reason in (*_PROCESSING, *_PAIRING):
        found, share = np.count_nonzero(codes == reason), _SETTING_SHARE if reason in _PROCESSING else _PAIRING_SHARE
        if found >= _MIN_SEQUENCES and found >= share * np.count_nonzero(measured):
            return np.where(codes == InvalidReason.VALID, np.int8(reason), codes)
    return codes


def check_patterns(block: Block) -> NDArray[np.int8]:
    """An `InvalidReason` for each row of a block of suspicious rows (`looks_processed`), from many tokens together."""
    pattern = patterns(block)
    codes = np.zeros(block.rows.size, dtype=np.int8)
    codes[truncation_like(pattern)] = InvalidReason.TRUNCATED_SAMPLING
    codes[temperature_like(block, pattern)] = InvalidReason.TEMPERATURE_MISMATCH
    return codes


def _check_pairs(
    block: Block, drift: NDArray[np.float64], why: dict[InvalidReason, str], *, altered: bool
) -> NDArray[np.int8]:
    """Codes of rows whose single numbers are log-probabilities."""
    codes = np.zeros(block.rows.size, dtype=np.int8)
    suspicious = doubtful(drift, block.lengths)
    if not (altered or suspicious.any() or agree_in_runs(block).any()):
        return codes

    def note(findings: list[PairingFault]) -> None:
        for finding in reversed(findings):
            codes[finding.rows] = finding.reason
        for finding in sorted(findings, key=_rows, reverse=True):
            said = finding.of(block.rows.size)
            why[finding.reason] = f"{why[finding.reason]}; {said}" if finding.reason in why else said

    fillers, filler = constants(block, drift, altered=altered)
    rest, at = without(block, filler) if filler.any() else (block, None)
    note([*other_tokens(rest, drift if at is None else drift[rest.rows], at), *fillers])
    if suspicious.any() and not codes.any():
        note(shifted(block) or other_places(block))
    if {InvalidReason.NOT_SAME_TOKENS, InvalidReason.PLACEHOLDER} <= why.keys():
        why[InvalidReason.NOT_SAME_TOKENS] += f"; and {why[InvalidReason.PLACEHOLDER]}"
    _check_processing(block, drift, codes)
    if suspicious.any() and not codes.any():
        note(likeliest(block, drift))
    if altered and not codes.any():
        note(left_out(block))
    return codes


def _rows(finding: PairingFault) -> int:
    return finding.rows.size


def _check_processing(block: Block, drift: NDArray[np.float64], codes: NDArray[np.int8]) -> None:
    """Add the faults of sampling processing to the codes of rows that have none."""
    look = looks_processed(drift, block.lengths) & (codes == InvalidReason.VALID)
    if look.any():
        codes[look] = check_patterns(block if look.all() else block.only(look))
    short = looks_processed_together(drift, block.lengths) & (codes == InvalidReason.VALID)
    if short.any() and together_temperature_like(block.only(short)):
        codes[short] = InvalidReason.TEMPERATURE_MISMATCH
    left = doubtful(drift, block.lengths) & (codes == InvalidReason.VALID)
    if left.any():
        codes[np.flatnonzero(left)[surer_rows(block.only(left))]] = InvalidReason.TEMPERATURE_MISMATCH


def _single_numbers(block: Block, edges: tuple[NDArray[Any], ...], why: dict[InvalidReason, str]) -> NDArray[np.int8]:
    """Codes of rows in which a number cannot be a log-probability, and what was found."""
    codes = np.zeros(block.rows.size, dtype=np.int8)
    most = np.maximum(*edges[:2])
    with np.errstate(invalid="ignore"):
        codes[edges[3] < LOWEST_LOGPROB] = InvalidReason.IMPOSSIBLE_TOKEN
        above = np.flatnonzero(most > _TOLERANCE)
        filler = (most[above] == _FILLER).all()
        codes[above] = InvalidReason.PLACEHOLDER if filler else InvalidReason.POSITIVE_LOGPROB
    codes[np.isnan(most)] = InvalidReason.NAN_LOGPROB
    for reason in np.unique(codes[codes != InvalidReason.VALID]):
        why[InvalidReason(reason)] = _said(block, codes, InvalidReason(reason))
    return codes


def _single_densities(block: Block) -> NDArray[np.int8]:
    """Codes of rows in which a number cannot be the log-density of something sampled."""
    most = np.maximum(*(np.maximum.reduceat(side, block.starts) for side in (block.train, block.inference)))
    codes = np.zeros(block.rows.size, dtype=np.int8)
    codes[np.minimum.reduceat(block.inference, block.starts) == -np.inf] = InvalidReason.IMPOSSIBLE_TOKEN
    codes[most == np.inf] = InvalidReason.POSITIVE_LOGPROB
    codes[np.isnan(most)] = InvalidReason.NAN_LOGPROB
    return codes


def _said(block: Block, codes: NDArray[np.int8], reason: InvalidReason) -> str:
    """Say how many tokens of how many sequences have a wrong number, and name the first."""
    sides, none = (block.train, block.inference), reason is InvalidReason.NAN_LOGPROB
    with np.errstate(invalid="ignore"):
        wrong = [np.isnan(side) if none else side > _TOLERANCE for side in sides]
        if reason is InvalidReason.IMPOSSIBLE_TOKEN:
            wrong = [np.zeros_like(wrong[0]), block.inference < LOWEST_LOGPROB]
    rows = np.flatnonzero(codes == reason)
    of_rows = np.repeat(codes == reason, block.lengths)
    name, side, tokens = next(
        (name, side, tokens)
        for name, side, here in zip(("training", "inference"), sides, wrong, strict=True)
        if (tokens := np.flatnonzero(here & of_rows)).size
    )
    first = int(tokens[0])
    row = int(np.searchsorted(block.starts, first, side="right")) - 1
    return (
        f"{rows.size:,} of {block.rows.size:,} sequences: {tokens.size:,} tokens on the {name} side, the first of them "
        f"token {first - int(block.starts[row])} of sequence {int(block.rows[row])}, which is {side[first]:.4g}"
    )
