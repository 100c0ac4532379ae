"""Input checks: conditions for calling a difference between two kernels drift.

A sequence that fails one is not measured; it is counted under the check's name (`kc.input.invalid`);
`contract.input_reasons` has them in words. Each sequence has at most one reason: declarations come before the numbers,
and a fault of single numbers before a pattern of many. Stale weights are no reason: they are a lag, recorded as such,
and the drift they cause is real.

A presence or frequency penalty lowers the logits of tokens that the sequence already has, and a repetition penalty
those of the prompt as well. With d > 0 what it takes from each such token, on the inference side alone,

    l(y) = d(y) [y came before] + log E_P[exp(-d)],

so that tokens that came before have a positive l, and all the others, of which none may be in the prompt, a negative
one, each of at most d. No other fault and no drift knows which tokens came before: honest drift has both signs among
both, a truncation one sign for all, and a temperature that of how sure a token is.

Different tokens after one prompt have one distribution, whatever it is. Where both sides are too sure of all tokens (in
another base, divided by the length, at another temperature) nothing between the sides contradicts it, and of texts with
many alternatives nothing along a sequence does; but five first tokens with a third of the mass each do. And n rollouts
all begin with one token of probability q at most once in q^(1 - n) prompts: with the prompt's own they always do.

`remarks` are of a gate, on numbers that it judges: columns that look copied, and drift like a setting.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kc_otel.contract.input_reasons import InvalidReason
from kc_otel.record.measure import altered, fillers, same_tokens
from kc_otel.record.measure.arrays import as_bool, on_host
from kc_otel.record.measure.blocks import DRIFT, Block, Found, RowFault, SampledBatch, Seen
from kc_otel.record.measure.processing import processing_faults
from kc_otel.record.measure.rounding import looks_rounded, rounded_column, rounded_rows
from kc_otel.record.measure.sampled import TOLERANCE, saturated

_LOWEST_LOGPROB: Final = -100.0
"""log-probability below which nobody has sampled a token: a mask's or a sentinel's number, as -inf."""
_LARGEST_DENSITY: Final = float(np.finfo(np.float32).max)  # largest |log-density| that is finite
_PROCESSING: Final = (InvalidReason.TEMPERATURE_MISMATCH, InvalidReason.TRUNCATED_SAMPLING)
_PAIRING: Final = (InvalidReason.NOT_SAME_TOKENS, InvalidReason.ONE_VALUE, InvalidReason.NOT_LOGPROBS)
_FILLER: Final = 1.0  # number that some trainers write in place of a log-probability that they do not have
_SETTING_SHARE: Final = 0.1
"""Share of a batch's sequences that show a sampler's setting from which all have it: it is set for all of them."""
_PAIRING_SHARE: Final = 0.5
"""Share that show a fault of the pairing from which the others are of the same making, and do not show it."""
_MIN_SEQUENCES: Final = 4
LOOK: Final = 65_536  # tokens of a batch that are looked at: a penalty is set for all of its requests
_ONE_SIDED: Final = 0.88
"""Share of sum |l| of one sign, of tokens that came before. Simulated with words of Zipf's law and the noise of
bfloat16: 0.90 to 1 with presence and frequency of 0.1 to 1 and repetition of 1.05 to 1.3; of drift of the size of fp8
and of 4 bits 0.67 at most, of temperatures from 0.8 to 1.3 at most 0.84."""
_SHARE_GAP: Final = 0.45
"""By how much that share is another one among the other tokens: 0.6 to 1 with a penalty, 0.02 with drift or top-p, 0.43
with a temperature."""
_EFFECTIVE_TOKENS: Final = 48.0  # tokens that sum |l| is made of, in effect, of each of the two kinds
TOO_SURE: Final = (
    "there are far fewer tokens with less than half of the mass than these probabilities would give: they are the "
    "sampled tokens' of a colder or greedy sampler, or multiplied by less than 1 on both sides (base 10, the length)"
)
"""Message for a finding of `stats.sureness`."""
_MAX_MASS: Final = 1.15
"""Mass of the different tokens of a prompt from which it is too much; rounding to bfloat16 adds 0.01, and weights that
change between the rollouts of a prompt what they drift."""
_SAME_NATS: Final = 0.05
"""Nats up to which a token that came twice has one log-probability, so that both came after the same tokens."""
_MAX_OTHER_SHARE: Final = 0.2
"""Share of prompts with a token that came twice, of which one may have had several log-probabilities."""
_LOG_WEALTH: Final = math.log(1e6)
"""Log of the wealth of a bet, half of it at each prompt, that all rollouts of a prompt begin alike."""
_PROMPTS: Final = 3
"""Prompts that show it, at least, and at least every fourth of those that could: one may be named wrongly."""
_SWAPPED: Final = (6.0, 3.0, math.log(1000.0))
"""Standard errors by which a mean P/Q is surely above 1, those within which that of Q/P is 1, and cut of both, nats.
Of real kernels from bfloat16 to int8 it is within 2.1; with the columns swapped 8.9 to 22 above."""
_EVEN: Final = (0.5, 1e-5, 0.1, 100, 0.3)
"""Nats from which both sides are unsure of a token, between which the median |l| of those lies, tokens that a side is
surer of than by that median, at least, and share of what a fifth of the others exceeds that a fifth of them does where
something was added after the kernels: what changes logits leaves next to nothing of a token that has all of the mass,
0.05 of it in real kernels."""
_LIKE_A_SETTING: Final = (512, 0.25, 0.85, 0.3)
"""Tokens from which drift is asked whether it looks like a temperature; share of its square that means over equally
likely tokens explain; share of the likely tokens of which one side is surer; and share of the unlikely ones of which
the same side is less sure. Of real kernels from bfloat16 to an fp8 cache at most 0.05 and 0.74; of simulated ones in
four bits 0.15 and 0.55; of log-probabilities on a grid of 1/16 0.19 and 0.57. Of a kernel that computes something else
at some positions 0.5 to 0.95, but both sides are equally sure there. With T = 0.8 and noise as of fp8 0.35 and 0.96."""
_LIKELY, _UNLIKELY = math.log(0.6), math.log(0.3)
_BIN_TOKENS: Final = 30


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
    log-densities, which may be any number of float32, whatever else they look like; of the training kernel -inf, too.
    """
    found = CheckedRows(np.zeros(block.rows.size, dtype=np.int8), {})
    if density:
        found.note(_single_numbers(block, -_LARGEST_DENSITY, _LARGEST_DENSITY))
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
    Check(fillers.nothing_but_zeros),
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


def _single_numbers(block: Block, low: float = _LOWEST_LOGPROB, high: float = TOLERANCE) -> Found:
    """Rows with a NaN, a number above `high`, or one below `low` on the side that sampled: how many, and the first."""
    most, sides = np.maximum(*block.highest), (block.train, block.inference)
    with np.errstate(invalid="ignore"):
        nan, above, never = np.isnan(most), most > high, block.lowest[1] < low
        if not (nan | above | never).any():
            return []
        filler = InvalidReason.PLACEHOLDER if (most[above] == _FILLER).all() else InvalidReason.POSITIVE_LOGPROB
        sampled = (np.zeros(block.inference.size, dtype=np.bool_), block.inference < low)
        looks = (
            (InvalidReason.NAN_LOGPROB, nan, [np.isnan(side) for side in sides]),
            (filler, above, [side > high for side in sides]),
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


def penalised(
    train: NDArray[np.floating],
    inference: NDArray[np.floating],
    token_ids: NDArray[np.integer],
    lengths: NDArray[np.integer],
) -> str:
    """Return the reason where one side penalises earlier tokens of rows of these lengths; empty where neither does."""
    log_w = saturated(train.astype(np.float64) - inference)
    if not log_w.size or not float(np.abs(log_w).mean()) > DRIFT:
        return ""
    ids, row = token_ids.astype(np.int64), np.repeat(np.arange(lengths.size), lengths)
    _, first = np.unique(row * (int(ids.max()) + 1) + ids, return_index=True)
    before = np.ones(ids.size, dtype=np.bool_)
    before[first] = False
    shares = []
    for part in (log_w[before], log_w[~before]):
        size = float(np.abs(part).sum())
        if not size or size * size < _EFFECTIVE_TOKENS * float(part @ part):
            return ""
        shares.append(float(np.maximum(part, 0.0).sum()) / size)
    on_inference = shares[0] > 0.5
    again, new = shares if on_inference else [1.0 - share for share in shares]
    if again < _ONE_SIDED or again - new < _SHARE_GAP:
        return ""
    name = "inference" if on_inference else "training"
    return (
        f"the {name} side gives less to tokens that came before in their sequence: {again:.0%} of sum |l| has that "
        f"sign among them, {new:.0%} among the others"
    )


def more_than_all(logprobs: NDArray[np.floating], token_ids: NDArray[np.integer], prompts: Sequence[Hashable]) -> str:
    """Return the reason where first tokens of prompts, [sequences], have more mass than there is; else empty.

    Only prompts count of which a token came more than once and had one log-probability each time: turns of one
    conversation, and rollouts of other weights, come after other tokens. Where many tokens that came again had several,
    rows of one prompt do not begin at the same place, and none counts.
    """
    names: dict[Hashable, int] = {}
    prompt = np.array([names.setdefault(name, len(names)) for name in prompts], dtype=np.int64)
    ids = token_ids.astype(np.int64)
    pair, place, count = np.unique(prompt * (int(ids.max()) + 1) + ids, return_inverse=True, return_counts=True)
    highest, lowest = np.full(pair.size, -np.inf), np.full(pair.size, np.inf)
    np.maximum.at(highest, place, logprobs)
    np.minimum.at(lowest, place, logprobs)
    of = np.zeros(pair.size, dtype=np.int64)
    of[place] = prompt
    rollouts = np.bincount(prompt)[of]
    alone = (count == rollouts) & (count > 1) & (highest - lowest <= _SAME_NATS)
    bets = np.logaddexp(0.0, -(count[alone] - 1.0) * np.minimum(highest[alone], 0.0)) - math.log(2.0)
    several = np.unique(of[count < rollouts]).size
    if bets.sum() - several * math.log(2.0) > _LOG_WEALTH:
        return (
            f"all rollouts of {bets.size:,} prompts begin with the same token, which has a probability of "
            f"{np.exp(highest[alone].min()):.2g} at least: it is the prompt's, or they are one rollout"
        )
    again = np.bincount(of[count > 1], minlength=len(names)) > 0
    other = np.bincount(of[highest - lowest > _SAME_NATS], minlength=len(names)) > 0
    if np.count_nonzero(other) > _MAX_OTHER_SHARE * np.count_nonzero(again):
        return ""
    mass = np.bincount(of, weights=np.exp(lowest), minlength=len(names))[again & ~other]
    over = np.count_nonzero(mass > _MAX_MASS)
    if over < max(_PROMPTS, 0.25 * mass.size):
        return ""
    return (
        f"different first tokens of {over:,} of {mass.size:,} prompts have probabilities that add up to more than 1, "
        f"{mass.max():.3g} at most: they are other tokens', or all too large by a base, a length or a temperature"
    )


def remarks(block: Block) -> str:
    """Return what to look at before a verdict on these rows is believed; empty for nothing."""
    log_w = saturated(block.exact_log_w)
    copied = rounded_column(block) or _even(block, log_w)
    found = [copied, like_a_setting(block, log_w), same_tokens.not_told(block)]
    return "; ".join(said for said in found if said)


def swapped(log_w: NDArray[np.float64]) -> str:
    """Say that the tokens look like samples of P: the mean of P/Q is above 1, and that of Q/P is 1; else empty."""
    return swapped_by_sums(ratio_sums(log_w))


def ratio_sums(log_w: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return what `swapped_by_sums` takes, float64 [5]: number of tokens, sums of P/Q, Q/P and their squares."""
    log_w = log_w[np.isfinite(log_w)]
    ratio = np.exp(np.clip(log_w, -_SWAPPED[2], _SWAPPED[2]))
    return np.array([log_w.size, *(part.sum() for part in (ratio, 1.0 / ratio, ratio**2, 1.0 / ratio**2))])


def swapped_by_sums(sums: NDArray[np.float64]) -> str:
    """Say the same of sums of `ratio_sums`, [5], which add up."""
    tokens = int(sums[0])
    if not tokens:
        return ""
    mean, other = (sums[1:3] / tokens).tolist()
    errors = np.sqrt(np.maximum(sums[3:] / tokens - (sums[1:3] / tokens) ** 2, 0.0) / tokens).tolist()
    if mean - 1.0 <= _SWAPPED[0] * errors[0] or abs(other - 1.0) > _SWAPPED[1] * errors[1]:
        return ""
    return (
        f"the mean of P/Q over {tokens:,} tokens is {mean:.4f}, significantly above 1, and that of Q/P "
        f"{other:.4f}: the columns look swapped, or P sampled these tokens, or Q's numbers were computed "
        "anew after sampling"
    )


def like_a_setting(block: Block, log_w: NDArray[np.float64]) -> str:
    """Say that the drift depends on how likely a token is, and on little else; empty where it does not."""
    p, q = (np.minimum(side.astype(np.float64), 0.0) for side in (block.train, block.inference))
    larger, smaller = np.maximum(p, q), np.minimum(p, q)
    likely, unlikely = (larger > _LIKELY) & (larger < 0.0) & (smaller < -1e-4), larger < _UNLIKELY
    least = _LIKE_A_SETTING[0]
    if np.count_nonzero(likely) < least or np.count_nonzero(unlikely) < least:
        return ""
    surer, raised = float(np.mean(log_w[likely] > 0.0)), float(np.mean(log_w[unlikely] > 0.0))
    training = surer > 0.5
    if max(surer, 1.0 - surer) < _LIKE_A_SETTING[2] or (not training and raised < _LIKE_A_SETTING[3]):
        return ""
    capped = np.clip(log_w, -3.0, 3.0)
    by_likelihood = np.digitize((p + q) / 2.0, -np.geomspace(1e-3, 12.0, 25))
    count, total = np.bincount(by_likelihood), np.bincount(by_likelihood, capped)
    enough = count >= _BIN_TOKENS
    share = float((total[enough] ** 2 / count[enough]).sum() / np.square(capped).sum())
    if share < _LIKE_A_SETTING[1]:
        return ""
    side = "training" if training else "inference"
    return (
        f"{share:.0%} of the drift depends only on how likely a token is, and the {side} side is surer of "
        f"{max(surer, 1.0 - surer):.0%} of the likely tokens: compare the two sides' temperatures and weights before "
        "you blame a kernel"
    )


def _even(block: Block, log_w: NDArray[np.float64]) -> str:
    """Say that the sides differ as much where they are sure as where they are not; empty where they do not."""
    size = np.abs(log_w)
    open_tokens = size[np.maximum(block.train, block.inference) < -_EVEN[0]]
    if open_tokens.size < _EVEN[3] or not _EVEN[1] < (usual := float(np.median(open_tokens))) < _EVEN[2]:
        return ""
    sure = [size[side > -usual] for side in (block.train, block.inference)]
    there = max((float(np.quantile(sizes, 0.8)) for sizes in sure if sizes.size >= _EVEN[3]), default=0.0)
    # Where one slice drifts and another does not, a fifth of the sure tokens may be the drifting one's.
    if there < _EVEN[4] * float(np.quantile(open_tokens, 0.8)):
        return ""
    return (
        f"the sides differ by {there:.1g} where they are sure of a token and by {usual:.1g} where they are not, which "
        "no logits do: one side may be a copy with noise, or its log-sum-exp is in half precision"
    )
