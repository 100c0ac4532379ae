"""A recording's observations of each quantity, and a contract's verdicts on them from the evaluator's own functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kc_otel.contract.clause import Clause
from kc_otel.contract.model import NUMBER_FORMATS, OTHERWISE_REMEDY, Assumptions, Contract, declared_apart
from kc_otel.contract.registry.clause_metrics import RECORDED, Origin, Unit
from kc_otel.contract.slices import ALL, LAG, OF_TOKENS, OLDER, STALE
from kc_otel.contract.units import format_duration
from kc_otel.judge.causes import TOKENS, split_by_cause
from kc_otel.judge.cell_columns import decide
from kc_otel.judge.plain_json import for_others
from kc_otel.judge.statistics import broken_assumption
from kc_otel.judge.verdict import Causes, Cell, Status, Verdict
from kc_otel.judge.verdicts import Evidence, Window
from kc_otel.record.measure.blocks import RUN
from kc_otel.record.measure.logits import LOGITS, logit_drift
from kc_otel.record.measure.rounding import NOT_TWO_FORMATS, equal_sides
from kc_otel.record.measure.sampled import REWARD, SEQUENCE, TOKEN, log_ratio, saturated
from kc_otel.record.slice_table import Places, SliceTable
from kc_otel.recordings.recording import GROUPS, PROMPT_IDS, Recording, step_of
from kc_otel.stats import Binned, reward_sides

ADVANTAGE: Final = ("advantage_drift_positive", "advantage_drift_negative")
"""Registry keys of what needs advantages: of tokens with a positive one, and with a negative one."""
_MIN_VALUES_FOR_BINS: Final = 32_768
"""Distinct values from which a mean's interval is computed from bins of neighbours: it stays valid, and is quick."""

_Values = tuple[NDArray[np.float64], NDArray[np.bool_]]
_EMPTY_SLICE_TEXT = "no sequence of this recording is in slice {}"
_OLDER_ONLY_TEXT = ", except what older weights sampled, whose drift includes staleness"
_TOGETHER_TEXT = "drift and staleness together, because it is unknown which weights sampled"
_PADDED_BLOCK = 1 << 20
"""Tokens, padding included, whose places are looked at at a time."""
_MAX_LISTED_VALUES = 5
_PROMPT_REMEDY: Final = f"name it in a column {', '.join(GROUPS)} or {PROMPT_IDS[0]}"


@dataclass(frozen=True, slots=True, eq=False)
class RecordingObservations:
    """The values of every quantity of the registry that a recording has, when asked for; rewards need a range."""

    recording: Recording
    reward_range: tuple[float, float] | None = None
    _known: dict[str, Binned | None] = field(default_factory=dict)
    _logits: dict[str, _Values] = field(default_factory=dict)

    def of(self, quantity: str) -> Binned | None:
        """The observations of a quantity by its registry key, one a sequence without prompts, or None."""
        if quantity not in self._known:
            values = self._values(quantity)
            self._known[quantity] = None if values is None else Binned.of_samples(values)
        return self._known[quantity]

    def for_mean(self, quantity: str) -> Binned | None:
        """Reduce to at most `_MIN_VALUES_FOR_BINS` bins with the exact sum and count."""
        sample = self.of(quantity)
        return None if sample is None else sample.merged(_MIN_VALUES_FOR_BINS)

    @property
    def unreadable(self) -> int:
        """Tokens whose logits hold NaN or +inf, or nothing but -inf: they make no observation of any logit drift."""
        found = self._token_values(LOGITS[0])
        return 0 if found is None else int((~found[1]).sum())

    def broken_assumption(self, clause: Clause, assumptions: Assumptions) -> str:
        """Return the assumption of a clause that the recording breaks, in words; empty if none."""
        of = self.recording

        def observed(quantity: str) -> Binned | None:
            if quantity == "sequence_tokens":
                lengths = of.lengths if of.whole is None else of.whole.lengths[of.whole_rows]
                counted = slice(None) if of.whole_rows is None else of.whole_rows >= 0
                return Binned.of_samples(lengths[counted].astype(np.float64))
            if quantity == "advantage_abs" and of.advantages is not None:
                return Binned.of_samples(np.abs(of.advantages))
            return None

        def outside() -> int:
            if of.rewards is None or assumptions.reward_range is None:
                return 0
            low, high = assumptions.reward_range
            return int(((of.rewards < low) | (of.rewards > high)).sum())

        return broken_assumption(clause, assumptions, observed, outside)

    @property
    def unknown_rewards(self) -> int:
        """Sequences without a reward, or with one outside of the range; 0 where rewards are not looked at."""
        rewards = self.recording.rewards
        if rewards is None or self.reward_range is None:
            return 0
        low, high = self.reward_range
        return int((~((rewards >= low) & (rewards <= high))).sum())

    def _values(self, quantity: str) -> NDArray[np.float64] | None:
        known = RECORDED[quantity]
        if not known.base and known.per is Unit.TOKEN:
            tokens = self._token_values(quantity)
            return None if tokens is None else tokens[0][tokens[1]]
        base = known.base or quantity
        whole = known.per is Unit.SEQUENCE or base in SEQUENCE or base in REWARD
        values = (self._of_whole if whole else self.of_sequences)(base)
        if values is None or known.per is Unit.SEQUENCE:
            return None if values is None else values[~np.isnan(values)]
        prompts, place = self.recording.prompts, np.arange(values.size)
        means, first = _means(values, place if prompts is None else prompts)
        if known.per is Unit.PROMPT:
            return means
        number: dict[object, int] = {}
        steps = [number.setdefault(step_of(self.recording.attributes[row]), len(number)) for row in first]
        return _means(means, np.array(steps))[0]

    def _of_whole(self, quantity: str) -> NDArray[np.float64] | None:
        """`of_sequences` of whole sequences, also where older weights sampled a part: they count at this part [S]."""
        of = self.recording
        if of.whole_rows is None:
            return self.of_sequences(quantity)
        if of.whole is None:
            values = self.of_sequences(quantity)
        else:
            values = RecordingObservations(of.whole, self.reward_range).of_sequences(quantity)
            values = None if values is None else values[of.whole_rows]
        return None if values is None else np.where(of.whole_rows < 0, np.nan, values)

    def of_sequences(self, quantity: str) -> NDArray[np.float64] | None:
        """A quantity's value in each sequence, or its mean over the sequence's tokens [S]; NaN where it has none."""
        of = self.recording
        if quantity in SEQUENCE:
            log_w = log_ratio(of.train, of.inference)
            found: NDArray[np.float64] = SEQUENCE[quantity](np.add.reduceat(log_w, of.starts), of.lengths)
            return found
        if quantity in REWARD:
            rewards = of.rewards
            if rewards is None or self.reward_range is None:
                return None
            log_w = saturated(np.add.reduceat(log_ratio(of.train, of.inference), of.starts))
            side: NDArray[np.float64] = reward_sides(log_w, rewards, self.reward_range)[REWARD.index(quantity)]
            return side
        tokens = self._token_values(quantity)
        if tokens is None:
            return None
        values, counted = tokens
        number = np.add.reduceat(counted.astype(np.int64), of.starts)
        # Of the two sides of the advantage, the tokens of the other side are none of its tokens.
        whole = number > 0 if quantity in ADVANTAGE else number == of.lengths
        total = np.add.reduceat(np.where(counted, values, 0.0), of.starts)
        return np.where(whole, total / np.maximum(number, 1), np.nan)

    def _token_values(self, quantity: str) -> _Values | None:
        """A token quantity's values [N], and which of them are observations, bool [N]."""
        of = self.recording
        if quantity in TOKEN:
            values = TOKEN[quantity](log_ratio(of.train, of.inference))
            return values, np.ones(values.size, dtype=np.bool_)
        if quantity in ADVANTAGE and of.advantages is not None:
            side = of.advantages > 0.0 if quantity == ADVANTAGE[0] else of.advantages < 0.0
            return np.expm1(log_ratio(of.train, of.inference)) * of.advantages, side
        if quantity == "outside_mass" and of.train_kept is not None:
            return -np.expm1(np.minimum(of.train_kept, 0.0)) + 0.0, np.ones(of.train_kept.size, dtype=np.bool_)
        if quantity in LOGITS and of.train_logits is not None and of.inference_logits is not None:
            if not self._logits:
                drift = logit_drift(of.train_logits, of.inference_logits)
                self._logits.update({name: (drift.values[:, at], drift.valid) for at, name in enumerate(LOGITS)})
            return self._logits[quantity]
        return None


def _means(values: NDArray[np.float64], of: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.intp]]:
    """Means of the values that are known, by what they are of, and where each of these begins."""
    rows = np.flatnonzero(~np.isnan(values))
    _, first, place = np.unique(of[rows], return_index=True, return_inverse=True)
    return np.bincount(place, values[rows]) / np.maximum(np.bincount(place), 1), rows[first]


@dataclass(frozen=True, slots=True)
class UnjudgedClause:
    """A clause that a recording says nothing of; why: missing data and the next step, as words after its name."""

    clause: str
    why: str

    def __str__(self) -> str:
        return f"{self.clause}: {self.why}"


@dataclass(frozen=True, slots=True)
class RecordingVerdicts:
    """A contract's verdicts on a recording, and the clauses that it cannot be judged by.

    No verdict rests on `unreadable` tokens; `unknown_rewards` count as the worst; `causes` split means by kernels and
    age. `equal` says where both sides are equal though two number formats are declared: nothing PASSes by that.
    """

    verdicts: tuple[Verdict, ...] = ()
    left_out: tuple[UnjudgedClause, ...] = ()
    unreadable: int = 0
    unknown_rewards: int = 0
    prompts: int | None = None
    causes: tuple[Causes, ...] = ()
    age_unknown: float = 0.0
    equal: str = ""

    @property
    def no_decision(self) -> str:
        """Reason for which nothing is decided; empty where a verdict is FAIL, whatever is equal elsewhere."""
        return "" if any(verdict.status is Status.FAIL for verdict in self.verdicts) else self.equal

    @property
    def age_note(self) -> str:
        """Conclusion where nothing says which weights sampled; empty where that is known."""
        if not self.age_unknown:
            return ""
        return (
            f"it is unknown which weights sampled {100 * self.age_unknown:.3g} % of the sequences: drift and staleness "
            f"together, which no kernel fails by; if the trainer's own weights sampled all, add --attribute lag=0"
        )

    def prompts_note(self, contract: Contract, remedy: str = _PROMPT_REMEDY) -> str:
        """What is assumed of prompts that are not known; empty where they are, or no clause averages over them."""
        if self.prompts is not None or all(
            clause.averaged not in {Unit.PROMPT, Unit.STEP} for clause in contract.clauses
        ):
            return ""
        return (
            "assumes that sequences are independent, because it does not name the prompt of each; if some share one, "
            + remedy
        )


def _equal(contract: Contract, parts: Mapping[str, Recording | None]) -> str:
    """Say where both sides are equal under two number formats; a slice of few numbers or tokens is no evidence."""
    apart = declared_apart(contract.kernels, NUMBER_FORMATS)
    for name, part in parts.items() if apart else ():
        if part is None or not part.identical:
            continue
        if name == ALL or (part.lengths.max() >= RUN and equal_sides(part.train, part.inference)):
            where = "" if name == ALL else f"on slice {name} "
            return f"{where}{NOT_TWO_FORMATS}; {OTHERWISE_REMEDY}"
    return ""


def by_contract(recording: Recording, contract: Contract) -> dict[str, Recording | None]:
    """`all` and the contract's slices by name, None where empty; a cap on series concerns streams, not recordings.

    What older weights sampled is in the slices of `OLDER` and in those that select by lag alone.
    """
    table, recording = SliceTable.whole(contract), recording.by_age()
    sequences = recording.lengths.size
    measured = table.of_batch(recording.attributes, range(sequences), sequences)
    of_tokens = _tokens(recording, table)
    parts: dict[str, Recording | None] = {}
    for column, name in enumerate(table.names):
        inside = measured[:, column]
        if column in of_tokens:
            parts[name] = recording.of_tokens(of_tokens[column] | np.repeat(inside, recording.lengths))
        elif inside.any():
            parts[name] = recording.only(inside)
        elif name not in OLDER:
            parts[name] = None
    return parts


def _tokens(recording: Recording, table: SliceTable) -> dict[int, NDArray[np.bool_]]:
    """The tokens of each slice that selects tokens and has any, bool [N], by its column."""
    found: dict[int, NDArray[np.bool_]] = {}
    if not OF_TOKENS & table.asked:
        return found
    lengths, ends = recording.lengths, np.cumsum(recording.lengths)
    step = max(1, _PADDED_BLOCK // int(lengths.max()))
    for first in range(0, lengths.size, step):
        rows = slice(first, first + step)
        here = slice(int(ends[first] - lengths[first]), int(ends[rows][-1]))
        counts = np.arange(lengths[rows].max()) < lengths[rows, None]
        positions = None
        if recording.positions is not None:
            positions = np.zeros(counts.shape, dtype=np.int64)
            positions[counts] = recording.positions[here]
        for part in table.of_tokens(Places(counts, positions), recording.attributes[rows]):
            found.setdefault(part.column, np.zeros(recording.train.size, dtype=np.bool_))
            found[part.column][here] = part.mask[counts]
    return found


def judge(
    contract: Contract,
    parts: Mapping[str, Recording | None],
    now: float,
    kernels: tuple[str, str] = ("", ""),
    *,
    anytime: bool = False,
) -> RecordingVerdicts:
    """Verdicts as an evaluator would give them, if the recording were what both of its windows hold.

    Intervals come from the values, not from histograms; Holm counts the cells that a recording can judge. Where the
    sampling weights are unknown, what exceeds a limit is INCONCLUSIVE: it may be their age. `anytime`: at all sizes.
    """
    observed = {
        name: RecordingObservations(part, contract.assumptions.reward_range)
        for name, part in parts.items()
        if part is not None
    }
    known = observed.get(ALL) or observed[STALE]
    older = _OLDER_ONLY_TEXT if STALE in observed else ""
    absent = {name: _nobody_in(contract, name, known.recording) + older for name in parts if name not in observed}
    evidence, left_out = [], []
    causes: list[Causes] = []
    for clause in contract.clauses:
        quantity = clause.quantity
        if quantity is None or known.of(quantity.key) is None:
            left_out.append(UnjudgedClause(clause.id, _why(clause, known.recording)))
            continue
        split = split_by_cause(
            contract, clause, partial(_mean_on, observed, quantity.key), partial(_mean_on, observed, TOKENS)
        )
        if split is not None:
            causes.append(split)
        for name in parts:
            if name in OLDER:
                continue
            sample, samples = None, observed.get(name)
            if samples is not None:
                of_mean = clause.parsed_statistic.kind == "mean"
                sample = samples.for_mean(quantity.key) if of_mean else samples.of(quantity.key)
                if clause.opposite is not None and sample is not None:
                    sample = replace(sample, opposite=samples.for_mean(clause.opposite.key))
            cell = Cell(contract.name, clause.id, name, *kernels)
            absence = "" if sample is not None else absent.get(name, _EMPTY_SLICE_TEXT.format(name))
            broken = "" if samples is None else samples.broken_assumption(clause, contract.assumptions)
            evidence.append(
                Evidence(cell, clause, partial(on_either_window, sample), absence, anytime=anytime, broken=broken)
            )
    aged = any(LAG in row for part in parts.values() if part is not None for row in part.attributes)

    def unknown_in(part: Recording) -> NDArray[np.bool_]:
        """A row without a lag beside others with one may be as old."""
        return part.age_unknown | np.fromiter((aged and LAG not in row for row in part.attributes), np.bool_)

    unknown = {name for name, part in parts.items() if part is not None and unknown_in(part).any()}
    verdicts = tuple(
        _together(verdict) if verdict.cell.slice in unknown else verdict
        for verdict in without_windows(contract, evidence, now)
    )
    return RecordingVerdicts(
        verdicts,
        tuple(left_out),
        known.unreadable,
        known.unknown_rewards,
        None if (prompts := known.recording.prompts) is None else int(prompts.max()) + 1,
        tuple(causes),
        float(unknown_in(known.recording).mean()),
        _equal(contract, parts),
    )


def _together(verdict: Verdict) -> Verdict:
    """Return a verdict on sequences of unknown age: a lower bound above the limit is no FAIL of the kernel."""
    if verdict.status is not Status.FAIL and not verdict.lower > verdict.limit:
        return verdict
    # No number of samples makes a FAIL, so the number that is missing goes.
    reason = verdict.reason if verdict.status is Status.FAIL else verdict.reason.partition(": ")[0]
    return replace(verdict, status=Status.INCONCLUSIVE, reason=f"{reason}; {_TOGETHER_TEXT}")


def _mean_on(observed: Mapping[str, RecordingObservations], key: str, slice: str) -> Binned | None:
    return observed[slice].for_mean(key) if slice in observed else None


def _nobody_in(contract: Contract, slice: str, recording: Recording) -> str:
    """Return a message that a slice is empty, with the recording's values of the attributes that the slice needs."""
    said = _EMPTY_SLICE_TEXT.format(slice)
    for name in contract.slices[slice].where if slice in contract.slices else ():
        there = dict.fromkeys(str(row[name]) for row in recording.attributes if name in row)
        listed = ", ".join([*list(there)[:_MAX_LISTED_VALUES], *(["..."] if len(there) > _MAX_LISTED_VALUES else [])])
        if there:
            said += f"; `{name}` is {listed} there"
        else:
            said += f"; `{name}` {recording.unread[name]}" if name in recording.unread else f"; none has `{name}`"
    return said


def without_windows(contract: Contract, evidence: Sequence[Evidence], now: float) -> tuple[Verdict, ...]:
    """Verdicts on observations that are no window: their reasons do not speak of its length."""
    spans = [f" in {format_duration(s)}" for s in (contract.observability.window, contract.observability.long_window)]
    return tuple(
        replace(verdict, reason=verdict.reason.replace(spans[verdict.window == "long"], "", 1))
        for verdict in decide(contract, evidence, now)
    )


def on_either_window(sample: Binned | None, _window: Window) -> Binned:
    """Return the same observations for either window; none without a sample."""
    return Binned.of_samples(np.zeros(0)) if sample is None else sample


def verdict_for_others(of: Verdict) -> dict[str, Any]:
    """Return a verdict on a recording for JSON; a bound that is not claimed is null."""
    names = ("limit", "estimate", "lower", "upper", "samples", "method", "about", "reason")
    numbers: dict[str, Any] = for_others({name: getattr(of, name) for name in names})
    return {"clause": of.cell.clause, "slice": of.cell.slice, "status": str(of.status), **numbers}


def recordable(clause: Clause) -> bool:
    """Return whether a recording with the right columns can be judged by a clause."""
    return clause.quantity is not None and clause.quantity.source not in {Origin.RUNTIME, Origin.OPERATORS}


def _why(clause: Clause, recording: Recording) -> str:
    match clause.quantity and clause.quantity.source:
        case None | Origin.RUNTIME:
            return f"no recording holds {clause.metric_text}; the evaluator judges live traffic by it"
        case Origin.OPERATORS:
            return f"no recording holds {clause.metric_text}; `kc-otel locate operators` judges by it"
        case Origin.LOGITS:
            needs = "record a .npz with train_logits and inference_logits"
        case Origin.ADVANTAGES:
            needs = "record advantages"
        case Origin.TRUNCATION:
            needs = "record train_kept_logprobs"
        case _:
            needs = recording.unread_reward or "record a reward in each row"
    return f"this recording lacks {clause.metric_text}: {needs}"
