"""Accumulate tensors into exponential histograms: the part of recording that must keep up with the kernels.

A batch is checked, measured and counted in one pass (`reduce`), then added to what has accumulated. Histograms are made
from counts when somebody asks for a snapshot.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kc_otel.contract.input_reasons import InvalidReason
from kc_otel.contract.registry.clause_metrics import QUANTITIES, RECORDED, TV_PLACE, Unit
from kc_otel.record.measure.arrays import as_bool, floats, on_host
from kc_otel.record.measure.blocks import DRIFT, RUN, SampledBatch
from kc_otel.record.measure.checks import (
    LOOK,
    TOO_SURE,
    check_declared,
    failed,
    held_together,
    more_than_all,
    penalised,
    same_shape,
)
from kc_otel.record.measure.logits import LOGITS, logit_drift
from kc_otel.record.measure.rounding import NOT_TWO_FORMATS, equal_sides
from kc_otel.record.measure.sampled import REWARD, SEQUENCE, TOKEN, outside_mass, renormalised, saturated
from kc_otel.record.slice_table import Places, TokenSlice
from kc_otel.record.telemetry.buckets import QuantityStream, TokenStreams, cells
from kc_otel.record.telemetry.prompt_means import Finished, PlaceMeans, PromptMeans, Rollouts
from kc_otel.record.telemetry.reduce import ADVANTAGE, Reduced, reduce
from kc_otel.stats.histogram import Histogram
from kc_otel.stats.rewards import reward_sides
from kc_otel.stats.surplus import Surplus

Processing = tuple[Mapping[str, object], Mapping[str, object]]

_LOG_RATIO: Final = list(TOKEN).index("log_ratio")
_ABS_LOG_RATIO: Final = list(TOKEN).index("abs_log_ratio")
_TV: Final = list(TOKEN).index("tv_token")
_UNKNOWN_ROLLOUTS: Final = Rollouts()


@dataclass(frozen=True, slots=True)
class WorstToken:
    """The token of a batch with the largest |l|."""

    log_ratio: float  # its signed log ratio l, nats
    row: int  # its row in the batch
    position: int  # its position in that row, masked positions included
    token_id: int | None  # when token ids were given
    slices: tuple[str, ...]  # that its sequence belongs to


@dataclass(frozen=True, slots=True)
class Batch:
    """Result of one batch."""

    sequences: int  # that were measured; those without an unmasked token are not
    tokens: int  # that were measured
    tv_token: float  # mean of (1-w)+, or of exact total variation where logits were given; nan without tokens
    worst: WorstToken | None  # None without tokens, or where logits came without targets
    slices: tuple[str, ...]  # that something was recorded in
    failed: Mapping[str, NDArray[np.intp]] = field(default_factory=dict)
    why: Mapping[str, str] = field(default_factory=dict)

    @property
    def invalid(self) -> dict[str, int]:
        """Number of sequences that failed an input check, by reason."""
        return {reason: rows.size for reason, rows in self.failed.items()}


@dataclass(slots=True, eq=False)
class _Rows:
    """Rows of a batch, and the sums of their values that are averaged further.

    A row is a sequence, or the part of one that weights of one age sampled. Prompts and steps take the means over the
    tokens of parts; what is about a whole sequence counts once, at the row that `Rollouts.whole` names.
    """

    membership: NDArray[np.bool_]  # slices of the rows, bool [rows, slices]
    reduced: Reduced | None  # of their log-probabilities; None where there are none
    tokens: NDArray[np.bool_] | None  # those that count, bool [rows, tokens]; None for all
    whole: NDArray[np.intp] | None
    sums: NDArray[np.float64]  # of values, and how many they are [2, quantities, rows]
    measured: NDArray[np.bool_]  # [rows]

    def of_sequences(self, sums: NDArray[np.float64]) -> NDArray[np.float64]:
        """Sums [..., rows] over whole sequences, at their rows; 0 elsewhere, and for sequences that lack a part."""
        if self.whole is None:
            return sums
        found = np.zeros_like(sums)
        np.add.at(found.T, self.whole, sums.T)
        found[..., self.whole[~self.measured]] = 0.0
        return found


class Accumulator:
    """Cumulative exponential histograms of every drift quantity and slice, since it was made.

    Not thread-safe. A call that raises has recorded nothing. `slices` name the columns of every `membership`; the first
    is `all`. Of `QUANTITIES`, those `recorded` are, all for None; those that a program observes by itself
    (`add_values`) always. `averaged` are keys of `AVERAGED`, `sampling` of `SAMPLING`. There is always room for the
    `operators` of the contract's clauses, and for so many more. Without a `reward_range` rewards are not looked at;
    `patience` is for prompts whose rollouts come in several batches, seconds. Kernels that are `apart` have two number
    formats: a batch with the same number on both sides at every token is invalid.
    """

    def __init__(
        self,
        slices: Sequence[str],
        *,
        recorded: Collection[str] | None = None,
        averaged: Sequence[str] = (),
        sampling: Sequence[str] = (),
        operators: Collection[str] = (),
        more_operators: int = 0,
        reward_range: tuple[float, float] | None = None,
        patience: float = 900.0,
        apart: bool = False,
    ) -> None:
        self.slices: Final = tuple(slices)
        self._recorded: Final = frozenset(QUANTITIES if recorded is None else recorded)
        self._units: Final[dict[str, list[Unit]]] = {}
        for key in averaged:
            self._units.setdefault(RECORDED[key].base, []).append(RECORDED[key].per)
        self._sampling: Final = frozenset(sampling)
        self._reward_range: Final = reward_range
        self._apart: Final = apart
        self._place: Final = {base: place for place, base in enumerate(self._units)}
        self._limits: Final = np.array([(QUANTITIES[base].low, QUANTITIES[base].high) for base in self._units]).reshape(
            -1, 2
        )
        wider = [base for base, units in self._units.items() if {Unit.PROMPT, Unit.STEP}.intersection(units)]
        self._means: Final = PromptMeans(wider, len(self.slices), patience=patience) if wider else None
        self._cells: Final = cells()
        self._tokens: Final = TokenStreams(len(self.slices), self._cells)
        self._streams: Final[dict[tuple[str, str], QuantityStream]] = {}  # by quantity and operator; empty for none
        self._operators: Final = set(operators)
        self._most_operators: Final = len(self._operators) + more_operators
        self._surplus: Final = Surplus()
        self._places: Final = PlaceMeans(self._cells.slots, patience)

    def add_sampled(
        self,
        train: Any,
        inference: Any,
        *,
        mask: Any = None,
        membership: Any = None,
        advantages: Any = None,
        rewards: Any = None,
        token_ids: Any = None,
        inference_token_ids: Any = None,
        train_kept: Any = None,
        inference_kept: Any = None,
        processing: Processing | None = None,
        rollouts: Rollouts = _UNKNOWN_ROLLOUTS,
        density: bool = False,
        places: Places | None = None,
        parts: Sequence[TokenSlice] = (),
    ) -> Batch:
        """Record a batch of sampled tokens' log-probabilities, NumPy or torch, any floating dtype and device.

        Arguments are those of `Recorder.compare`, laid out: per token [sequences, tokens], per sequence [sequences].
        `membership` says which slices each sequence belongs to, bool [sequences, slices]; None puts all into the first.
        With `places` the first slice's drift is recorded by position and turn too. What is recorded of `parts`, slices
        of tokens, is of those tokens of the sequences that are measured; they are no further sequences or prompts, and
        no evidence of how tokens were sampled. Sequences that fail a check of `measure.checks` are counted and recorded
        nowhere. A reward outside of the range counts as one that is not known.
        """
        train, inference = floats(train), floats(inference)
        if not same_shape(train, inference, mask, token_ids, inference_token_ids, train_kept, inference_kept):
            return _nothing(train.shape[0], InvalidReason.SHAPE_MISMATCH)
        if len(train.shape) != 2:
            raise ValueError(f"train: shape {tuple(train.shape)} is not [sequences, tokens]")
        sequences = train.shape[0]
        if advantages is not None and tuple(np.shape(advantages)) not in {(sequences,), tuple(train.shape)}:
            raise ValueError(
                f"advantages: shape {tuple(np.shape(advantages))} is neither [sequences] nor {tuple(train.shape)}"
            )
        train, inference = renormalised(train, train_kept), renormalised(inference, inference_kept)
        member = self._membership(membership, sequences)
        codes = check_declared(sequences, mask, token_ids, inference_token_ids, processing)
        advantages = None if advantages is None else floats(advantages)
        batch = SampledBatch.of(train, inference, mask)
        reduced = reduce(batch, codes, member, self._cells, advantages, density=density, places=places)
        if density:
            reduced.bets[1] = 0.0  # how sure Q may be of its tokens is a question of probabilities
        ids = None if density or token_ids is None else on_host(token_ids)
        prompts = _first_tokens(reduced, batch, ids, rollouts.prompts)
        reduced = self._held(reduced, batch, _penalty(reduced, batch, ids), prompts)
        found = self._sampled_batch(reduced, member, batch, token_ids)
        tables = self._tables(member, rollouts, parts, reduced, batch, advantages)
        outside, *_ = [self._record_sampled(rows, train_kept, rewards) for rows in tables]
        self._add_means(tables, rollouts)
        self._places.add(reduced, member[:, 0], rollouts)
        if "advantage_abs" in self._sampling and advantages is not None and reduced.rows.size:
            size = np.abs(advantages[reduced.rows]).astype(np.float64)
            if size.ndim > 1:
                size = (size if batch.mask is None else np.where(batch.mask[reduced.rows], size, 0.0)).max(1)
            self._stream("advantage_abs").add(size, member[reduced.rows])
        return replace(found, failed={**found.failed, "reward_out_of_range": outside}) if outside.size else found

    def add_logits(
        self,
        train: Any,
        inference: Any,
        *,
        mask: Any = None,
        membership: Any = None,
        targets: Any = None,
        processing: Processing | None = None,
        rollouts: Rollouts = _UNKNOWN_ROLLOUTS,
        places: Places | None = None,
        parts: Sequence[TokenSlice] = (),
    ) -> Batch:
        """Record a batch of full logits [sequences, tokens, vocab]; arguments as in `add_sampled`.

        With `targets`, the tokens that were sampled from the inference kernel, integers [sequences, tokens], what
        `add_sampled` records is recorded too.
        """
        shape = tuple(train.shape[:-1])
        if len(shape) != 2:
            raise ValueError(f"train: shape {tuple(train.shape)} is not [sequences, tokens, vocab]")
        if not same_shape(train, inference) or not same_shape(np.empty(shape, dtype=np.bool_), mask, targets):
            return _nothing(shape[0], InvalidReason.SHAPE_MISMATCH)
        kept = np.ones(shape, dtype=np.bool_) if mask is None else as_bool(mask)
        tokens = None if targets is None else on_host(targets)
        member = self._membership(membership, shape[0])
        codes = check_declared(shape[0], None, None, None, processing)
        codes[(codes == InvalidReason.VALID) & ~kept.any(1)] = InvalidReason.NO_TOKENS
        at = np.nonzero(kept & (codes == InvalidReason.VALID)[:, None])
        found = logit_drift(train, inference, at=at, targets=None if tokens is None else tokens[at])
        codes[at[0][~found.valid]] = InvalidReason.NAN_LOGITS
        reduced, batch = None, None
        if found.train_logprob is not None and found.inference_logprob is not None:
            pair = np.zeros((2, *shape))
            pair[0][at], pair[1][at] = found.train_logprob, found.inference_logprob
            batch = SampledBatch.of(pair[0], pair[1], kept)
            reduced = self._held(reduce(batch, codes, member, self._cells, None, places=places), batch)
            codes = reduced.codes
        valid = codes[at[0]] == InvalidReason.VALID
        rows, values = at[0][valid], found.values[valid]
        tables = self._tables(member, rollouts, parts, reduced, batch)
        for into in tables:
            if into.reduced is not None:
                self._record_ratios(into, into.reduced)
            here = slice(None) if into.tokens is None else into.tokens[at][valid]
            for column, quantity in enumerate(LOGITS):
                self._record(into, quantity, values[here, column], rows[here])
        if rows.size:
            self._add_means(tables, rollouts)
        mean = float(values[:, LOGITS.index("tv_exact")].mean()) if rows.size else math.nan
        if reduced is None or batch is None:
            measured = np.unique(rows)
            return Batch(measured.size, rows.size, mean, None, self._named(member[measured]), failed(codes))
        self._places.add(reduced, member[:, 0], rollouts)
        return replace(self._sampled_batch(reduced, member, batch, tokens), tv_token=mean)

    def add_values(self, values: Mapping[str, NDArray[np.float64]], membership: Any = None, operator: str = "") -> bool:
        """Record finite observations that were made elsewhere, by the registry's key, [n] each, such as `weights_lag`.

        They may be of an operator; False if it has no room. NaN, as where a norm is beyond float64, is a ValueError.
        """
        known = not operator or operator in self._operators
        if not known and len(self._operators) >= self._most_operators:
            return False
        if any(np.isnan(value).any() for value in values.values()):
            raise ValueError(f"values: NaN is no observation of {operator or ', '.join(values)}; leave such rows out")
        self._operators.update([operator] if operator else [])
        for quantity, observed in values.items():
            self._stream(quantity, operator).add(observed, self._membership(membership, observed.size))
        return True

    def expire(self, now: float) -> None:
        """Count the prompts and steps that were waited for long enough; `now` is monotonic seconds."""
        if self._means is not None and self._means.waiting:
            self._count_finished(self._means, self._means.expire(now))
        self._places.expire(now)

    @property
    def waiting(self) -> int:
        """Prompts and steps that wait for more rollouts."""
        return self._places.waiting + (0 if self._means is None else self._means.waiting)

    def take_outcomes(self) -> Mapping[str, int]:
        """Prompts that counted since the last call, by how: see `PromptMeans.outcomes`."""
        if self._means is None:
            return {}
        found, self._means.outcomes = self._means.outcomes, Counter()
        return found

    def histograms(self) -> Iterator[tuple[str, str, str, Histogram]]:
        """Quantity, operator (empty for none), slice and cumulative histogram of all that have observations."""
        for place, found in self._places.histograms().items():
            yield TV_PLACE.key, "", place, found
        for column, slice in enumerate(self.slices):
            for quantity, found in self._tokens.histograms(column, self._recorded).items():
                yield quantity, "", slice, found
            for (quantity, operator), stream in self._streams.items():
                if (histogram := stream.histogram(column)) is not None:
                    yield quantity, operator, slice, histogram

    def snapshot(self) -> dict[tuple[str, str], Histogram]:
        """The histograms of quantities that are no operators', by quantity and slice."""
        return {(quantity, slice): found for quantity, operator, slice, found in self.histograms() if not operator}

    def _held(self, reduced: Reduced, batch: SampledBatch, penalty: str = "", prompts: str = "") -> Reduced:
        """Nothing measured where the batch as a whole is no sample of the inference kernel; else the argument.

        `penalty` is the finding about a penalty that one side has, `prompts` that of `more_than_all`; empty for none.
        """
        codes = held_together(reduced.codes)
        copied = NOT_TWO_FORMATS if self._apart and _copied(reduced, batch) else ""
        for reason, said in ((InvalidReason.PLACEHOLDER, copied), (InvalidReason.PENALISED_SAMPLING, penalty)):
            if said:
                codes = np.where(codes == InvalidReason.VALID, np.int8(reason), codes)
                reduced.why[reason] = said
        surplus, too_sure = self._surplus.add(reduced.bets, reduced.mean_ratio)
        if surplus or too_sure or prompts:
            codes = np.where(codes == InvalidReason.VALID, np.int8(InvalidReason.NOT_SAMPLED), codes)
            mean = f"the mean of P/Q over its tokens is {reduced.mean_ratio:.3g}"
            known = reduced.why.get(InvalidReason.NOT_SAMPLED)
            reduced.why[InvalidReason.NOT_SAMPLED] = prompts or known or (mean if surplus else TOO_SURE)
        return reduced if codes is reduced.codes else reduced.held(codes)

    def _only(self, column: int, sequences: int) -> NDArray[np.bool_]:
        """Membership of sequences of which all are in one slice."""
        return np.tile(np.arange(len(self.slices)) == column, (sequences, 1))

    def _tables(
        self,
        member: NDArray[np.bool_],
        of: Rollouts,
        parts: Sequence[TokenSlice],
        reduced: Reduced | None,
        batch: SampledBatch | None,
        advantages: NDArray[Any] | None = None,
    ) -> list[_Rows]:
        """The rows of a batch and of its slices of tokens; nothing is recorded of them yet."""
        sequences = member.shape[0]
        found = [(member, reduced, None if batch is None else batch.mask)]
        for part in parts:
            only, within = self._only(part.column, sequences), None
            if reduced is not None and batch is not None:
                # What the checks of whole sequences let pass is not checked again in parts of them.
                tokens = SampledBatch.of(batch.train, batch.inference, part.mask)
                within = reduce(tokens, reduced.codes, only, self._cells, advantages, density=True)
            found.append((only, within, part.mask))
        shape = 2, len(self._units), sequences
        return [_Rows(*table, of.whole, np.zeros(shape), np.zeros(sequences, dtype=np.bool_)) for table in found]

    def _record_sampled(self, into: _Rows, train_kept: Any, rewards: Any) -> NDArray[np.intp]:
        """`_record_ratios`, and what came with them. Returns the rows whose rewards are out of range."""
        assert into.reduced is not None
        whole, log_w = self._record_ratios(into, into.reduced)
        if train_kept is not None:
            self._record(into, "outside_mass", *outside_mass(train_kept, into.reduced.rows, into.tokens))
        if rewards is None or self._reward_range is None:
            return whole[:0]
        given, (low, high) = floats(rewards)[whole].astype(np.float64), self._reward_range
        for quantity, values in zip(REWARD, reward_sides(saturated(log_w), given, self._reward_range), strict=True):
            self._record(into, quantity, values, whole)
        return whole[(given < low) | (given > high)]

    def _record_ratios(self, into: _Rows, reduced: Reduced) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
        """Record what was measured of tokens and sequences. Returns the whole sequences' rows, and their sums of l."""
        rows = reduced.rows
        into.measured[rows] = True
        self._tokens.add(reduced.cells, into.membership[rows], reduced.stats)
        for column, quantity in enumerate(TOKEN):
            if (place := self._place.get(quantity)) is not None:
                into.sums[:, place, rows] = reduced.stats[0, :, column], reduced.tokens
        sums = np.zeros((2, into.measured.size))
        sums[:, rows] = reduced.tokens, reduced.stats[0, :, _LOG_RATIO]
        tokens, log_w = into.of_sequences(sums)
        whole = np.flatnonzero(tokens)
        tokens, log_w = tokens[whole], log_w[whole]
        if "sequence_tokens" in self._sampling:
            self._stream("sequence_tokens").add(tokens, into.membership[whole])
        for quantity, of in SEQUENCE.items():
            self._record(into, quantity, of(log_w, tokens), whole)
        for quantity, drifts in zip(ADVANTAGE, () if reduced.drifts is None else reduced.drifts, strict=False):
            self._record(into, quantity, drifts, np.repeat(rows, reduced.tokens))
        return whole, log_w

    def _record(self, into: _Rows, quantity: str, values: NDArray[np.float64], rows: NDArray[np.intp]) -> None:
        """Record values of a quantity, [n], of the rows that they belong to; NaN for none."""
        if quantity in self._recorded and rows.size:
            self._stream(quantity).add(values, into.membership[rows])
        if (place := self._place.get(quantity)) is not None:
            known, size = ~np.isnan(values), into.measured.size
            into.sums[0, place] = np.bincount(rows, np.where(known, values, 0.0), size)
            into.sums[1, place] = np.bincount(rows, known, size)

    def _add_means(self, tables: Sequence[_Rows], of: Rollouts) -> None:
        """Count sequences, prompts and steps once each, as far as that is asked for; slices of tokens on their own."""
        sequences = tables[0].measured.size
        membership = np.concatenate([table.membership for table in tables])
        by_part = self._mean(np.concatenate([table.sums for table in tables], axis=2))
        by_sequence = self._mean(np.concatenate([table.of_sequences(table.sums) for table in tables], axis=2))
        of = of.repeated(len(tables) - 1, sequences)
        # Where nobody knows the prompts, each sequence is one.
        alone = {Unit.SEQUENCE: by_sequence, **({Unit.PROMPT: by_part} if of.prompts is None else {})}
        for quantity, place in self._place.items():
            for unit in alone.keys() & set(self._units[quantity]):
                values = alone[unit][place]
                some = ~np.isnan(values)
                self._stream(f"{quantity}_by_{unit}").add(values[some], membership[some])
        if self._means is not None and sequences:
            wider = by_part[[self._place[quantity] for quantity in self._means.quantities]]
            self._count_finished(self._means, self._means.add(wider, membership, of))

    def _mean(self, sums: NDArray[np.float64]) -> NDArray[np.float64]:
        """Means [quantities, rows]; NaN where a row has none."""
        found: NDArray[np.float64] = np.full(sums.shape[1:], np.nan)
        np.divide(sums[0], sums[1], out=found, where=sums[1] > 0)
        # A mean lies between the values it is of; a sum's last digit may not.
        return found.clip(self._limits[:, :1], self._limits[:, 1:])

    def _count_finished(self, means: PromptMeans, found: Finished) -> None:
        for unit, means_of in ((Unit.PROMPT, found.prompts), (Unit.STEP, found.steps)):
            for place, quantity in enumerate(means.quantities):
                if means_of is not None and means_of.shape[1] and unit in self._units[quantity]:
                    self._stream(f"{quantity}_by_{unit}").add_by_slice(means_of[place])
        if found.rollouts.size:
            membership = self._membership(None, found.rollouts.size)
            self._stream("prompt_rollouts").add(found.rollouts, membership)
            effect = means.design_effect
            if not math.isnan(effect):
                self._stream("design_effect").add(np.array([effect]), membership[:1])

    def _sampled_batch(self, reduced: Reduced, member: NDArray[np.bool_], batch: SampledBatch, token_ids: Any) -> Batch:
        rows, tokens = reduced.rows, int(reduced.tokens.sum())
        why = {reason.name.lower(): words for reason, words in reduced.why.items()}
        if not rows.size:
            return Batch(0, 0, math.nan, None, (), failed(reduced.codes), why)
        _, low, high = reduced.stats[:, :, _LOG_RATIO]
        # One row is read again, so that no token's place has to be kept while a million of them are counted.
        row = int(rows[np.argmax(np.maximum(-low, high))])
        log_w = np.asarray(saturated(batch.block(np.array([row])).log_w), dtype=np.float32)
        index = int(np.argmax(np.abs(log_w)))
        position = batch.position(row, index)
        token_id = None if token_ids is None else int(token_ids[row][position])
        worst = WorstToken(float(log_w[index]), row, position, token_id, self._named(member[row : row + 1]))
        mean = float(reduced.stats[0, :, _TV].sum()) / tokens
        return Batch(rows.size, tokens, mean, worst, self._named(member[rows]), failed(reduced.codes), why)

    def _stream(self, quantity: str, operator: str = "") -> QuantityStream:
        if (quantity, operator) not in self._streams:
            self._streams[quantity, operator] = QuantityStream(len(self.slices), self._cells.slots)
        return self._streams[quantity, operator]

    def _membership(self, membership: Any, rows: int) -> NDArray[np.bool_]:
        return self._only(0, rows) if membership is None else as_bool(membership)

    def _named(self, membership: NDArray[np.bool_]) -> tuple[str, ...]:
        return tuple(self.slices[index] for index in np.flatnonzero(membership.any(0)))


def _nothing(sequences: int, reason: InvalidReason) -> Batch:
    return Batch(0, 0, math.nan, None, (), {reason.name.lower(): np.arange(sequences)} if sequences else {})


def _copied(reduced: Reduced, batch: SampledBatch) -> bool:
    """Return True if both sides have the same number at every token; False where few numbers are no evidence."""
    if not reduced.rows.size or reduced.tokens.max() < RUN or reduced.stats[0, :, _ABS_LOG_RATIO].any():
        return False
    block = batch.block(_few(reduced))
    return bool(equal_sides(block.train, block.inference))


def _few(reduced: Reduced) -> NDArray[np.intp]:
    """Rows that are enough to look at."""
    return reduced.rows[: int(np.searchsorted(np.cumsum(reduced.tokens), LOOK)) + 1]


def _penalty(reduced: Reduced, batch: SampledBatch, token_ids: NDArray[Any] | None) -> str:
    """Return the reason where one side has a penalty; empty for none, and without token ids."""
    tokens = reduced.tokens
    if token_ids is None or not reduced.stats[0, :, _ABS_LOG_RATIO].sum() > DRIFT * tokens.sum():
        return ""
    block = batch.block(few := _few(reduced))
    return penalised(block.train, block.inference, batch.packed(token_ids, few), block.lengths)


def _first_tokens(
    reduced: Reduced, batch: SampledBatch, token_ids: NDArray[Any] | None, prompts: Sequence[Hashable] | None
) -> str:
    """Return what is wrong with the probabilities of the prompts' first tokens; empty for nothing."""
    rows = reduced.rows
    if token_ids is None or prompts is None or not rows.size:
        return ""
    at = np.zeros(rows.size, dtype=np.intp) if batch.mask is None else batch.mask[rows].argmax(1)
    return more_than_all(batch.inference[rows, at], token_ids[rows, at], [prompts[row] for row in rows.tolist()])
