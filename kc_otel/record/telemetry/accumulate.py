"""From tensors to cumulative exponential histograms: the part of recording that has to keep up with the kernels.

A batch is checked, measured and counted in one pass (`reduce_host`, or `reduce_device` where a GPU holds the tensors),
then added to what has accumulated. Histograms are made from counts when somebody asks for a snapshot.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kc_otel.contract.registry import BY_SEQUENCE, QUANTITIES
from kc_otel.record.measure.arrays import as_bool, as_host, host_rows, is_tensor, on_gpu
from kc_otel.record.measure.checks import InvalidReason, check_declared, counted, difference, same_shape
from kc_otel.record.measure.logits import LOGITS, CountedRows, logit_drift
from kc_otel.record.measure.packing import SampledBatch
from kc_otel.record.measure.sampled import REWARD, SEQUENCE, TOKEN, saturated
from kc_otel.record.measure.truncation import outside_mass, renormalised
from kc_otel.record.telemetry.compare_span import Batch, WorstToken
from kc_otel.record.telemetry.groups import Groups, in_groups
from kc_otel.record.telemetry.log_ratio_cells import cells
from kc_otel.record.telemetry.moments import QuantityStream, TokenStreams
from kc_otel.record.telemetry.reduce_host import ADVANTAGE, Reduced, reduce_host
from kc_otel.stats.histogram import ExponentialHistogram
from kc_otel.stats.reward_intervals import reward_sides

__all__ = ["Accumulator", "Batch", "WorstToken"]

Processing = tuple[Mapping[str, object], Mapping[str, object]]

_LOG_RATIO: Final = list(TOKEN).index("log_ratio")
_TV: Final = list(TOKEN).index("tv_token")


class Accumulator:
    """Cumulative exponential histograms of every drift quantity and slice, since it was made.

    Not thread-safe. A call that raises has recorded nothing.

    Args:
        slices: Names of the slices, the columns of every `membership`.
        scale: Scale of the histograms, 0 to 6.
        by_sequence: Token quantities whose mean over each sequence's tokens is recorded too, one observation per
            sequence; keys of `BY_SEQUENCE`. Those of logits are recorded where the logits have an axis of tokens.
        reward_range: Smallest and largest reward; without it rewards are not looked at.

    Raises:
        ValueError: If there is no slice, one is named twice, the scale is out of range, or a quantity of `by_sequence`
            is not one of tokens.
    """

    def __init__(
        self,
        slices: Sequence[str],
        *,
        scale: int = 4,
        by_sequence: Sequence[str] = (),
        reward_range: tuple[float, float] | None = None,
    ) -> None:
        if not slices or len(set(slices)) != len(slices):
            msg = f"slices: {list(slices)} must name at least one slice, and each once"
            raise ValueError(msg)
        if unknown := [quantity for quantity in by_sequence if quantity not in BY_SEQUENCE]:
            msg = f"by_sequence: {unknown[0]!r} is not one of {', '.join(BY_SEQUENCE)}"
            raise ValueError(msg)
        self.slices: Final = tuple(slices)
        self.by_sequence: Final = frozenset(by_sequence)
        self._reward_range: Final = reward_range
        self._by_side: Final = not self.by_sequence.isdisjoint(ADVANTAGE)
        self.scale: Final = scale
        self._cells: Final = cells(scale)
        self._tokens: Final = TokenStreams(len(self.slices), self._cells)
        self._streams: Final[dict[str, QuantityStream]] = {}

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
        _tensors: bool | None = None,
    ) -> Batch:
        """Record a batch of sampled tokens' log-probabilities.

        Args:
            train: log P(y), [sequences, tokens], NumPy or torch, any floating dtype and device.
            inference: log Q(y) of the same tokens, same shape.
            mask: Which tokens count, bool or int, same shape; None for all.
            membership: Which slices each sequence belongs to, bool [sequences, slices]; None puts all into the first.
            advantages: [sequences] or [sequences, tokens]; with them the advantage-signed drift is recorded too.
            rewards: [sequences], or any score of each that lies in `reward_range`; NaN where one is not known. With
                them the drift of the expected reward is recorded too.
            token_ids: Ids of the tokens, same shape: the worst token is reported with its own.
            inference_token_ids: Ids that the inference side scored, where they could differ; a difference is invalid.
            train_kept: Log of the training kernel's mass on the tokens that truncation kept, same shape: `train` is
                renormalised over them, and the mass outside of them is recorded too.
            inference_kept: The same of the inference kernel.
            processing: Temperature and other sampling processing of (train, inference), as far as the caller knows it.

        Returns:
            What was measured, and what was not and why. Sequences that fail a check of `measure.checks` are counted
            there and recorded nowhere. A reward outside of the range counts as one that is not known.

        Raises:
            ValueError: If `membership`, `advantages` or `rewards` do not fit, or the numbers are not real.
        """
        train, inference = (each if is_tensor(each) else np.asarray(each) for each in (train, inference))
        if not same_shape(train, inference, mask, token_ids, inference_token_ids, train_kept, inference_kept):
            return _nothing(train.shape[0], InvalidReason.SHAPE_MISMATCH)
        if len(train.shape) != 2:
            msg = f"train: shape {tuple(train.shape)} is not [sequences, tokens]"
            raise ValueError(msg)
        sequences = train.shape[0]
        if advantages is not None and tuple(np.shape(advantages)) not in {(sequences,), tuple(train.shape)}:
            msg = f"advantages: shape {tuple(np.shape(advantages))} is neither [sequences] nor {tuple(train.shape)}"
            raise ValueError(msg)
        if rewards is not None and tuple(np.shape(rewards)) != (sequences,):
            msg = f"rewards: shape {tuple(np.shape(rewards))} is not [sequences], ({sequences},); give one for each"
            raise ValueError(msg)
        train, inference = renormalised(train, train_kept), renormalised(inference, inference_kept)
        groups = in_groups(self._membership(membership, sequences))
        codes = check_declared(sequences, mask, token_ids, inference_token_ids, processing)
        if on_gpu(train) if _tensors is None else _tensors:
            from kc_otel.record.telemetry.reduce_device import reduce_device  # noqa: PLC0415 - it needs torch

            reduced = reduce_device(
                train, inference, mask, codes, groups, self._cells, advantages, count_sides=self._by_side
            )
        else:
            weights = None if advantages is None else host_rows(advantages)
            batch = SampledBatch.of(train, inference, mask)
            reduced = reduce_host(batch, codes, groups, self._cells, weights, count_sides=self._by_side)
        self._record(reduced, groups, whole=True)
        if train_kept is not None and reduced.rows.size:
            self._record_outside(*outside_mass(train_kept, reduced.rows, mask), groups.members[groups.of[reduced.rows]])
        found = self._sampled_batch(reduced, groups, train, inference, mask, token_ids)
        outside = 0 if rewards is None else self._add_rewards(reduced, groups, rewards)
        return replace(found, invalid={**found.invalid, "reward_out_of_range": outside}) if outside else found

    def add_logits(
        self,
        train: Any,
        inference: Any,
        *,
        mask: Any = None,
        membership: Any = None,
        targets: Any = None,
        processing: Processing | None = None,
        _tensors: bool | None = None,
    ) -> Batch:
        """Record a batch of full logits.

        Args:
            train: Logits [sequences, tokens, vocab], or [rows, vocab] of which each is a sequence of one token.
            inference: Logits of the other kernel after the same processing, same shape.
            mask: Which tokens count, [sequences, tokens] or [rows]; None for all.
            membership: Which slices each sequence (or row) belongs to, bool [sequences, slices].
            targets: The tokens that were sampled from the inference kernel, integers of the mask's shape. With them,
                what `add_sampled` records is recorded too; quantities of whole sequences only where the logits have
                an axis of tokens.
            processing: As in `add_sampled`.

        Raises:
            ValueError: If an argument's shape does not fit, or the numbers are not real.
        """
        if not same_shape(train, inference):
            return _nothing(train.shape[0], InvalidReason.SHAPE_MISMATCH)
        whole = len(train.shape) == 3
        if not whole:
            train, inference = train[:, None], inference[:, None]
        shape = tuple(train.shape[:2])
        kept = np.ones(shape, dtype=np.bool_) if mask is None else as_bool(mask).reshape(shape)
        tokens = None if targets is None else as_host(targets).reshape(shape)
        groups = in_groups(self._membership(membership, shape[0]))
        codes = check_declared(shape[0], None, None, None, processing)
        codes[(codes == InvalidReason.VALID) & ~kept.any(1)] = InvalidReason.NO_TOKENS
        at = np.nonzero(kept & (codes == InvalidReason.VALID)[:, None])
        found = logit_drift(
            train,
            inference,
            at=at,
            targets=None if tokens is None else tokens[at],
            counted=CountedRows(groups.of[at[0]], groups.members, self._cells.slots.partition.edges),
            _tensors=_tensors,
        )
        codes[at[0][~found.valid]] = InvalidReason.NAN_LOGITS
        reduced: Reduced | None = None
        pair = np.zeros((2, *shape))
        if found.train_logprob is not None and found.inference_logprob is not None:
            pair[0][at], pair[1][at] = found.train_logprob, found.inference_logprob
            reduced = reduce_host(SampledBatch.of(pair[0], pair[1], kept), codes, groups, self._cells, None)
            codes = reduced.codes
            self._record(reduced, groups, whole=whole)
        valid = codes[at[0]] == InvalidReason.VALID
        rows, values = at[0][valid], found.values[valid]
        membership = groups.members[groups.of[rows]]
        counts = found.counts if valid.all() else None
        for column, quantity in enumerate(LOGITS):
            one = values[:, column]
            if counts is None:
                self._stream(quantity).add(one, membership)
            else:
                self._stream(quantity).add_counted(counts[:, column], membership, one, one, one)
        if whole and rows.size and not self.by_sequence.isdisjoint(LOGITS):
            # Tokens come row by row, so a sequence's are next to each other.
            starts = np.flatnonzero(np.diff(rows, prepend=-1))
            totals, lengths = np.add.reduceat(values, starts), np.diff(starts, append=rows.size)
            for column, quantity in enumerate(LOGITS):
                self._add_means(quantity, totals[:, column], lengths, membership[starts])
        mean = float(values[:, LOGITS.index("tv_exact")].mean()) if rows.size else math.nan
        if reduced is not None:
            return replace(self._sampled_batch(reduced, groups, pair[0], pair[1], kept, tokens), tv_token=mean)
        measured = np.unique(rows)
        return Batch(
            measured.size, rows.size, mean, None, self._named(groups.members[groups.of[measured]]), counted(codes)
        )

    def add_values(self, quantity: str, values: Any, *, membership: Any = None) -> None:
        """Record observations of one quantity that were made elsewhere, such as `weights_lag`, one per batch.

        Args:
            quantity: Key in the registry.
            values: Finite numbers, [n] or one.
            membership: Which slices each belongs to, bool [n, slices]; None puts all into the first.

        Raises:
            ValueError: If the quantity is unknown, a value is not finite, or `membership` does not fit.
        """
        if quantity not in QUANTITIES:
            msg = f"quantity: {quantity!r} is not one of {', '.join(QUANTITIES)}"
            raise ValueError(msg)
        numbers = np.atleast_1d(host_rows(values).read(...)).astype(np.float64)
        if numbers.ndim != 1 or not np.isfinite(numbers).all():
            msg = f"values: {numbers} are not one-dimensional and finite"
            raise ValueError(msg)
        self._stream(quantity).add(numbers, self._membership(membership, numbers.size))

    def snapshot(self) -> dict[tuple[str, str], ExponentialHistogram]:
        """Cumulative histogram of each (quantity, slice) that has observations."""
        found: dict[tuple[str, str], ExponentialHistogram] = {}
        for column, slice in enumerate(self.slices):
            for quantity, histogram in self._tokens.histograms(column).items():
                found[quantity, slice] = histogram
            for quantity, stream in self._streams.items():
                more = stream.histogram(column)
                if more is not None:
                    known = found.get((quantity, slice))
                    found[quantity, slice] = more if known is None else known.merged(more)
        return found

    def _record(self, reduced: Reduced, groups: Groups, *, whole: bool) -> None:
        membership = groups.members[groups.of[reduced.rows]]
        self._tokens.add(reduced, membership)
        if whole:
            log_w = reduced.totals[:, _LOG_RATIO]
            for quantity, of in SEQUENCE.items():
                self._stream(quantity).add(of(log_w, reduced.tokens), membership)
            for column, quantity in enumerate(TOKEN):
                self._add_means(quantity, reduced.totals[:, column], reduced.tokens, membership)
        if reduced.drift is not None:
            for column, quantity in enumerate(ADVANTAGE):
                of_side = (each[:, column] for each in (reduced.drift.totals, reduced.drift.low, reduced.drift.high))
                self._stream(quantity).add_counted(reduced.drift.slots[:, column], membership, *of_side)
                if reduced.drift.tokens is not None:
                    tokens = reduced.drift.tokens[:, column]
                    self._add_means(quantity, reduced.drift.totals[:, column], tokens, membership)

    def _record_outside(
        self, mass: NDArray[np.float64], tokens: NDArray[np.intp], membership: NDArray[np.bool_]
    ) -> None:
        """Record mass outside of a truncation, [tokens], of sequences with so many tokens each, [sequences]."""
        self._stream("outside_mass").add(mass, np.repeat(membership, tokens, axis=0))
        self._add_means("outside_mass", np.add.reduceat(mass, np.cumsum(tokens) - tokens), tokens, membership)

    def _add_rewards(self, reduced: Reduced, groups: Groups, rewards: Any) -> int:
        """Record what the measured sequences' rewards say. Returns how many are outside of their range."""
        if self._reward_range is None:
            return 0
        given = host_rows(rewards).read(reduced.rows).astype(np.float64)
        membership = groups.members[groups.of[reduced.rows]]
        sides = reward_sides(saturated(reduced.totals[:, _LOG_RATIO]), given, self._reward_range)
        for quantity, values in zip(REWARD, sides, strict=True):
            self._stream(quantity).add(values, membership)
        low, high = self._reward_range
        return int(((given < low) | (given > high)).sum())

    def _add_means(
        self, quantity: str, totals: NDArray[np.float64], tokens: NDArray[np.intp], membership: NDArray[np.bool_]
    ) -> None:
        """Record a token quantity's mean over each sequence that has such tokens, if it is asked for by sequence.

        Args:
            quantity: Key of the token quantity.
            totals: Its sum over each sequence's tokens, [sequences].
            tokens: How many tokens were summed, [sequences].
            membership: Slices of each sequence, bool [sequences, slices].
        """
        if quantity not in self.by_sequence:
            return
        known, some = BY_SEQUENCE[quantity], tokens > 0
        # A mean lies between the values it is of; a sum's last digit may not.
        means = np.clip(totals[some] / tokens[some], known.low, known.high)
        self._stream(known.key).add(means, membership[some])

    def _sampled_batch(
        self, reduced: Reduced, groups: Groups, train: Any, inference: Any, mask: Any, token_ids: Any
    ) -> Batch:
        rows, tokens = reduced.rows, int(reduced.tokens.sum())
        if not rows.size:
            return Batch(0, 0, math.nan, None, (), counted(reduced.codes))
        low, high = reduced.low[:, _LOG_RATIO], reduced.high[:, _LOG_RATIO]
        row = int(rows[np.argmax(np.maximum(-low, high))])
        # One row is read again, so that no token's place has to be kept while a million of them are counted.
        only = slice(row, row + 1)
        batch = SampledBatch.of(train[only], inference[only], None if mask is None else mask[only])
        log_w = np.asarray(saturated(difference(batch.block(np.zeros(1, dtype=np.intp)))), dtype=np.float32)
        index = int(np.argmax(np.abs(log_w)))
        position = batch.position(0, index)
        worst = WorstToken(
            float(log_w[index]),
            row,
            position,
            None if token_ids is None else int(token_ids[row][position]),
            self._named(groups.members[groups.of[row : row + 1]]),
        )
        mean = float(reduced.totals[:, _TV].sum()) / tokens
        return Batch(
            rows.size, tokens, mean, worst, self._named(groups.members[groups.of[rows]]), counted(reduced.codes)
        )

    def _stream(self, quantity: str) -> QuantityStream:
        if quantity not in self._streams:
            self._streams[quantity] = QuantityStream(len(self.slices), self._cells.slots)
        return self._streams[quantity]

    def _membership(self, membership: Any, rows: int) -> NDArray[np.bool_]:
        if membership is None:
            only_first = np.zeros((rows, len(self.slices)), dtype=np.bool_)
            only_first[:, 0] = True
            return only_first
        given = as_bool(membership)
        if given.shape != (rows, len(self.slices)):
            msg = f"membership: shape {given.shape} is not [{rows}, {len(self.slices)}], sequences by slices"
            raise ValueError(msg)
        return given

    def _named(self, membership: NDArray[np.bool_]) -> tuple[str, ...]:
        return tuple(self.slices[each] for each in np.flatnonzero(membership.any(0)))


def _nothing(sequences: int, reason: InvalidReason) -> Batch:
    return Batch(0, 0, math.nan, None, (), {reason.name.lower(): sequences} if sequences else {})
