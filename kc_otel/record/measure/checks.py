"""Input checks: conditions for calling a difference between two kernels drift.

A sequence that fails one is not measured; it is counted under the check's name (`kc.input.invalid`);
`contract.input_reasons` has them in words. Each sequence has at most one reason: declarations come before the numbers,
and a fault of single numbers before a pattern of many. Stale weights are no reason: they are a lag, recorded as such,
and the drift they cause is real.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kc_otel.contract.input_reasons import InvalidReason
from kc_otel.record.measure import altered, fillers, same_tokens
from kc_otel.record.measure.arrays import as_bool, on_host
from kc_otel.record.measure.blocks import DRIFT, Block, Found, RowFault, SampledBatch, Seen
from kc_otel.record.measure.processing import processing_faults
from kc_otel.record.measure.rounding import looks_rounded, rounded_rows

_TOLERANCE: Final = 1e-3
"""Tolerance for a log-probability above 0: a log-softmax in half precision, or a sum in another order."""
_LOWEST_LOGPROB: Final = -100.0
"""log-probability below which nobody has sampled a token: a mask's or a sentinel's number, as -inf."""
_PROCESSING: Final = (InvalidReason.TEMPERATURE_MISMATCH, InvalidReason.TRUNCATED_SAMPLING)
_PAIRING: Final = (InvalidReason.NOT_SAME_TOKENS, InvalidReason.ONE_VALUE, InvalidReason.NOT_LOGPROBS)
_FILLER: Final = 1.0  # number that some trainers write in place of a log-probability that they do not have
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

    def note(self, faults: Found) -> None:
        """Add faults: a row's reason is the first of its own, and what most rows have is told first."""
        for fault in reversed(faults):
            self.codes[fault.rows] = fault.reason
        for fault in sorted(faults, key=lambda fault: fault.rows.size, reverse=True):
            if fault.what:
                said = fault.of(self.codes.size)
                self.why[fault.reason] = f"{self.why[fault.reason]}; {said}" if fault.reason in self.why else said


def check(train: Any, inference: Any, *, mask: Any = None, density: bool = False) -> NDArray[np.int8]:
    """An `InvalidReason` for each sequence of a batch of sampled log-probabilities, int8 [sequences].

    Arrays are [sequences, tokens], NumPy or torch; where `mask` is 0 they may hold anything. For `density` see
    `check_block`.
    """
    if not same_shape(train, inference, mask):
        return np.full(len(train), InvalidReason.SHAPE_MISMATCH, dtype=np.int8)
    batch = SampledBatch.of(train, inference, mask)
    codes = np.where(batch.lengths == 0, np.int8(InvalidReason.NO_TOKENS), np.int8(InvalidReason.VALID))
    for block in batch.blocks(np.flatnonzero(batch.lengths)):
        codes[block.rows] = check_block(block, density=density).codes
    return held_together(codes)


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
    """Check what the caller says of a batch, before anybody looks at log-probabilities; int8 [sequences]."""
    codes = np.zeros(sequences, dtype=np.int8)
    if train_token_ids is not None and inference_token_ids is not None:
        differs = on_host(train_token_ids) != on_host(inference_token_ids)
        codes[(differs if mask is None else differs & as_bool(mask)).any(1)] = InvalidReason.TOKEN_MISMATCH
    if processing is not None and dict(processing[0]) != dict(processing[1]):
        codes[:] = InvalidReason.PROCESSING_MISMATCH
    return codes


def check_block(block: Block, *, sample: bool = True, density: bool = False) -> CheckedRows:
    """Check a block's rows, from their log-probabilities.

    Unless it is a `sample`, nothing is looked for that a program does to all rows. With `density` they are
    log-densities, which may be any finite number, whatever else they look like; one of the training kernel may be -inf.
    """
    found = CheckedRows(np.zeros(block.rows.size, dtype=np.int8), {})
    if density:
        found.note(_single_densities(block))
        return found
    with np.errstate(invalid="ignore", over="ignore"):
        wrong = altered.no_logprobs(block) or altered.never_sure(block) if sample else []
        changed = sample and (altered.looks_altered(block) or looks_rounded(block))
    if wrong:
        found.note(wrong)
        found.codes[:] = wrong[0].reason
        return found
    found.note(_single_numbers(block))
    sound = found.codes == InvalidReason.VALID
    if sound.any():
        of_rest = CheckedRows(found.codes[sound], found.why)
        _check_pairs(block.only(sound), of_rest, changed=changed)
        found.codes[sound] = of_rest.codes
    if sample and not found.codes.any() and (said := same_tokens.not_told(block)):
        found.why[InvalidReason.VALID] = said
    return found


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


def _check_pairs(block: Block, found: CheckedRows, *, changed: bool) -> None:
    """Note the faults of rows whose single numbers are log-probabilities."""
    drifting = bool((block.drift > DRIFT).any())
    if not (changed or drifting or fillers.agree_in_runs(block)):
        return
    faults: Found = []
    seen = Seen(np.zeros(block.train.size, dtype=np.bool_), np.zeros(block.rows.size, dtype=np.bool_))
    for check in _CHECKS:
        if check.altered > changed or check.drifting > drifting or (check.alone and faults):
            continue
        for fault in list(check.look(block, seen)):
            faults.append(fault)
            seen.rows[fault.rows] = True
            if fault.tokens is not None:
                seen.tokens[fault.tokens] = True
    # Rows that do not score the same tokens have that reason, whatever else they have.
    found.note(sorted(faults, key=lambda fault: fault.reason != InvalidReason.NOT_SAME_TOKENS))
    if {InvalidReason.NOT_SAME_TOKENS, InvalidReason.PLACEHOLDER} <= found.why.keys():
        found.why[InvalidReason.NOT_SAME_TOKENS] += f"; and {found.why[InvalidReason.PLACEHOLDER]}"


class Check(NamedTuple):
    """A check of rows whose single numbers are log-probabilities; a block in which nothing looks odd is not checked."""

    look: Callable[[Block, Seen], Iterable[RowFault]]
    altered: bool = False  # only where numbers look altered
    drifting: bool = False  # only where a row drifts
    alone: bool = False  # only where no check before it has found anything


_CHECKS: Final = (
    Check(fillers.sentinels),
    Check(fillers.whole_rows),
    Check(fillers.runs_of_one),
    Check(fillers.edges),
    Check(fillers.floors),
    Check(fillers.blurred_floors),
    Check(fillers.one_number),
    Check(altered.repeated_in_rows, altered=True),
    Check(altered.copied_rows, altered=True),
    Check(rounded_rows, altered=True),
    Check(altered.copied_runs),
    Check(altered.copied_tokens, altered=True),
    Check(altered.clipped, altered=True),
    Check(fillers.nucleus),
    Check(fillers.of_the_token_before),
    Check(fillers.cleared),
    Check(fillers.single_zeros),
    Check(same_tokens.other_tokens),
    Check(altered.shifted, drifting=True, alone=True),
    Check(same_tokens.other_places, drifting=True, alone=True),
    Check(processing_faults),
    Check(same_tokens.likeliest, drifting=True, alone=True),
    Check(altered.left_out, altered=True, alone=True),
)
"""Checks in the order in which a row gets its reason; each of them knows what those before it have found."""


def _single_numbers(block: Block) -> Found:
    """Rows in which a number cannot be a log-probability, with how many tokens are wrong and which is the first."""
    most, sides = np.maximum(*block.highest), (block.train, block.inference)
    with np.errstate(invalid="ignore"):
        nan, above, never = np.isnan(most), most > _TOLERANCE, block.lowest[1] < _LOWEST_LOGPROB
        if not (nan | above | never).any():
            return []
        filler = InvalidReason.PLACEHOLDER if (most[above] == _FILLER).all() else InvalidReason.POSITIVE_LOGPROB
        sampled = (np.zeros(block.inference.size, dtype=np.bool_), block.inference < _LOWEST_LOGPROB)
        looks = (
            (InvalidReason.NAN_LOGPROB, nan, [np.isnan(side) for side in sides]),
            (filler, above, [side > _TOLERANCE for side in sides]),
            (InvalidReason.IMPOSSIBLE_TOKEN, never & ~nan & ~above, sampled),
        )
    found = []
    for reason, rows, wrong in looks:
        if not rows.any():
            continue
        of_rows = block.by_token(rows)
        name, side, tokens = next(
            (name, side, tokens)
            for name, side, here in zip(("training", "inference"), sides, wrong, strict=True)
            if (tokens := np.flatnonzero(here & of_rows)).size
        )
        first = int(tokens[0])
        row = int(block.row_of(tokens[0]))
        said = f"{tokens.size:,} tokens on the {name} side, the first of them token {block.place[first]} of "
        said += f"sequence {int(block.rows[row])}, which is {side[first]:.4g}"
        found.append(RowFault(reason, np.flatnonzero(rows), said))
    return found


def _single_densities(block: Block) -> Found:
    """Rows in which a number cannot be the log-density of something sampled."""
    most, never = np.maximum(*block.highest), block.lowest[1] == -np.inf
    return [
        RowFault(InvalidReason.NAN_LOGPROB, np.flatnonzero(np.isnan(most))),
        RowFault(InvalidReason.POSITIVE_LOGPROB, np.flatnonzero(most == np.inf)),
        RowFault(InvalidReason.IMPOSSIBLE_TOKEN, np.flatnonzero(never)),
    ]
