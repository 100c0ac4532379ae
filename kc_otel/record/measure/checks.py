"""Input checks: what has to hold before a difference between two kernels may be called drift.

A sequence that fails one is not measured; it is counted under the check's name (`kc.input.invalid`); `measure.reasons`
has them in words. Each sequence has at most one reason: what was declared comes before what the numbers show, and a
fault of single numbers before a pattern of many. Stale weights are no reason: they are a lag, recorded as such, and the
drift they cause is real.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kc_otel.record.measure.arrays import as_host, is_tensor
from kc_otel.record.measure.packing import Block, SampledBatch
from kc_otel.record.measure.processing import (
    ends_alike,
    ends_like,
    looks_processed,
    looks_processed_together,
    padded,
    patterns,
    temperature_like,
    together_temperature_like,
    truncation_like,
)
from kc_otel.record.measure.reasons import InvalidReason
from kc_otel.record.measure.sampled import saturated

__all__ = [
    "InvalidReason",
    "RowStats",
    "check",
    "check_block",
    "check_declared",
    "check_fillers",
    "check_patterns",
    "check_together",
    "counted",
    "difference",
    "judged",
    "looks_shifted",
    "same_shape",
]


_TOLERANCE: Final = 1e-3
"""How far above 0 a log-probability may be: a log-softmax in half precision, or one summed in another order."""
_ZERO_DRIFT: Final = 0.01
"""Mean |l| from which a side of zeros is a fault: below, both kernels may be that sure of a short answer."""
_SHIFT_DRIFT: Final = 0.1
_SHIFT_GAIN: Final = 4.0
_SHIFT_TOKENS: Final = 8


@dataclass(frozen=True, slots=True, eq=False)
class RowStats:
    """What the checks need to know of each sequence, float64 [rows], over its unmasked tokens.

    Attributes:
        train_min: Smallest log P(y); NaN where one is NaN, and likewise for the next three.
        train_max: Largest log P(y).
        inference_min: Smallest log Q(y).
        inference_max: Largest log Q(y).
        drift: Mean |l|.
        shifted: Mean |l| when one side is moved by a token, in the better of both directions; inf where the sequence
            is short or `drift` gives no cause to look.
        found: An `InvalidReason` that the row's pattern has, int8; None where nobody looked for patterns.
    """

    train_min: NDArray[np.float64]
    train_max: NDArray[np.float64]
    inference_min: NDArray[np.float64]
    inference_max: NDArray[np.float64]
    drift: NDArray[np.float64]
    shifted: NDArray[np.float64]
    found: NDArray[np.int8] | None = None


def check(
    train: Any,
    inference: Any,
    *,
    mask: Any = None,
    train_token_ids: Any = None,
    inference_token_ids: Any = None,
    processing: tuple[Mapping[str, object], Mapping[str, object]] | None = None,
    prompt_ids: tuple[Sequence[Any], Sequence[Any]] | None = None,
) -> NDArray[np.int8]:
    """Check a batch of sampled log-probabilities.

    Args:
        train: log P(y), [sequences, tokens], NumPy or torch.
        inference: log Q(y) of the same tokens.
        mask: Which tokens count, bool or int, same shape; the others may hold anything.
        train_token_ids: Tokens that `train` scores, same shape.
        inference_token_ids: Tokens that `inference` scores, same shape. Compared when both are given.
        processing: What the caller declares of each side's sampling processing, (train, inference): temperature, top-p
            and the like. Any difference makes the batch incomparable.
        prompt_ids: The prompts that each side saw, (train, inference), integers [prompt] for each sequence, without
            padding. A prompt that was decoded and encoded again is another prompt wherever its ids differ, and nothing
            in the log-probabilities tells it from drift.

    Returns:
        An `InvalidReason` per sequence, int8 [sequences].

    Raises:
        ValueError: If `train` is not two-dimensional or does not hold real numbers, or there is not one prompt for each
            sequence on both sides.
    """
    if not same_shape(train, inference, mask, train_token_ids, inference_token_ids):
        return np.full(len(train), InvalidReason.SHAPE_MISMATCH, dtype=np.int8)
    batch = SampledBatch.of(train, inference, mask)
    codes = check_declared(batch.lengths.size, batch.mask, train_token_ids, inference_token_ids, processing)
    codes[(codes == InvalidReason.VALID) & (batch.lengths == 0)] = InvalidReason.NO_TOKENS
    if prompt_ids is not None:
        codes[(codes == InvalidReason.VALID) & _differing(prompt_ids, codes.size)] = InvalidReason.PROMPT_MISMATCH
    for block in batch.blocks(np.flatnonzero(codes == InvalidReason.VALID)):
        codes[block.rows] = check_block(block, difference(block))
    return codes


def _differing(prompts: tuple[Sequence[Any], Sequence[Any]], sequences: int) -> NDArray[np.bool_]:
    for side, given in zip(("train", "inference"), prompts, strict=True):
        if len(given) != sequences:
            msg = f"prompt_ids: {len(given)} {side} prompts for {sequences} sequences; give one for each"
            raise ValueError(msg)
    pairs = zip(*prompts, strict=True)
    return np.array([not np.array_equal(as_host(left), as_host(right)) for left, right in pairs], dtype=np.bool_)


def counted(codes: NDArray[np.int8]) -> dict[str, int]:
    """Sequences per reason, by the name that the metric's attribute has; without those that are valid."""
    found, counts = np.unique(codes, return_counts=True)
    pairs = zip(found.tolist(), counts.tolist(), strict=True)
    return {InvalidReason(code).name.lower(): count for code, count in pairs if code != InvalidReason.VALID}


def same_shape(*arrays: Any) -> bool:
    """Whether all arrays that are given (not None) have one shape."""
    return len({tuple(np.shape(array)) for array in arrays if array is not None}) == 1


def check_declared(
    sequences: int,
    mask: Any,
    train_token_ids: Any,
    inference_token_ids: Any,
    processing: tuple[Mapping[str, object], Mapping[str, object]] | None,
) -> NDArray[np.int8]:
    """What can be said without looking at log-probabilities; arguments as in `check`, int8 [sequences]."""
    codes = np.zeros(sequences, dtype=np.int8)
    if train_token_ids is not None and inference_token_ids is not None:
        given = [train_token_ids, inference_token_ids] + ([] if mask is None else [mask])
        if not all(is_tensor(each) and each.device == given[0].device for each in given):
            given = [as_host(each) for each in given]
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


def check_block(block: Block, log_w: NDArray[Any]) -> NDArray[np.int8]:
    """An `InvalidReason` for each row of a block, from its log-probabilities and their `difference`."""
    starts, lengths = block.starts, block.lengths
    with np.errstate(invalid="ignore"):
        drift = np.add.reduceat(np.abs(saturated(log_w)), starts, dtype=np.float64) / lengths
        shifted, found = np.full(starts.size, np.inf), np.zeros(starts.size, dtype=np.int8)
        suspicious = looks_shifted(drift, lengths)
        if suspicious.any():
            part = block.only(suspicious)
            shifted[suspicious] = np.minimum(
                _shifted(part.train, part.inference, part), _shifted(part.inference, part.train, part)
            )
        suspicious = looks_processed(drift, lengths)
        if suspicious.any():
            found[suspicious] = check_patterns(block if suspicious.all() else block.only(suspicious))
        alike = ends_alike(block) & ~suspicious
        if alike.any():
            found[alike] = check_fillers(block.only(alike))
        filled = found == InvalidReason.PADDING_COUNTED
        if filled.any():
            ends = starts + lengths - 1
            found[ends_like(filled, block.train[ends], block.inference[ends])] = InvalidReason.PADDING_COUNTED
        short = looks_processed_together(drift, lengths) & (found == InvalidReason.VALID)
        if short.any():
            found[short] = check_together(block.only(short))
        return judged(
            RowStats(
                np.minimum.reduceat(block.train, starts).astype(np.float64),
                np.maximum.reduceat(block.train, starts).astype(np.float64),
                np.minimum.reduceat(block.inference, starts).astype(np.float64),
                np.maximum.reduceat(block.inference, starts).astype(np.float64),
                drift,
                shifted,
                found,
            )
        )


def check_patterns(block: Block) -> NDArray[np.int8]:
    """An `InvalidReason` for each row of a block of suspicious rows (`looks_processed`), from many tokens together."""
    pattern = patterns(block)
    codes = np.zeros(block.rows.size, dtype=np.int8)
    codes[truncation_like(pattern)] = InvalidReason.TRUNCATED_SAMPLING
    codes[temperature_like(pattern)] = InvalidReason.TEMPERATURE_MISMATCH
    codes[padded(block)] = InvalidReason.PADDING_COUNTED
    return codes


def check_fillers(block: Block) -> NDArray[np.int8]:
    """An `InvalidReason` for each row of a block of rows that end alike on both sides (`ends_alike`)."""
    return np.where(padded(block), InvalidReason.PADDING_COUNTED, InvalidReason.VALID).astype(np.int8)


def check_together(block: Block) -> NDArray[np.int8]:
    """An `InvalidReason` for each row of a block of short rows (`looks_processed_together`), the same for all."""
    reason = InvalidReason.TEMPERATURE_MISMATCH if together_temperature_like(block) else InvalidReason.VALID
    return np.full(block.rows.size, reason, dtype=np.int8)


def looks_shifted(drift: NDArray[np.float64], lengths: NDArray[np.intp]) -> NDArray[np.bool_]:
    """Rows whose mean |l| is worth comparing with the shifted one: large, and over enough tokens."""
    return (drift > _SHIFT_DRIFT) & (lengths >= _SHIFT_TOKENS)


def judged(stats: RowStats) -> NDArray[np.int8]:
    """An `InvalidReason` for each row, int8 [rows]."""
    drifted = stats.drift > _ZERO_DRIFT
    train_zero = (stats.train_min == 0) & (stats.train_max == 0)
    inference_zero = (stats.inference_min == 0) & (stats.inference_max == 0)
    highest = np.maximum(stats.train_max, stats.inference_max)
    findings = (
        (InvalidReason.NAN_LOGPROB, np.isnan(highest)),
        (InvalidReason.POSITIVE_LOGPROB, highest > _TOLERANCE),
        (InvalidReason.IMPOSSIBLE_TOKEN, stats.inference_min == -np.inf),
        (InvalidReason.ZERO_FILLED, (train_zero ^ inference_zero) & drifted),
        (InvalidReason.ONE_TOKEN_SHIFT, stats.shifted * _SHIFT_GAIN < stats.drift),
    )
    codes = np.zeros(stats.drift.size, dtype=np.int8) if stats.found is None else stats.found.copy()
    for reason, found in reversed(findings):
        codes[found] = reason
    return codes


def _shifted(ahead: NDArray[Any], behind: NDArray[Any], block: Block) -> NDArray[np.float64]:
    # Pairs across two rows are left out; the last place stays 0 so that every row has a place to start from.
    apart = np.zeros(ahead.size)
    apart[:-1] = np.abs(saturated(ahead[1:] - behind[:-1]))
    apart[block.starts[1:] - 1] = 0.0
    sums: NDArray[np.float64] = np.add.reduceat(apart, block.starts)
    return sums / (block.lengths - 1)
