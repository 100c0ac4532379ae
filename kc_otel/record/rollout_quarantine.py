"""Quarantine: sequences that break the contract by themselves are kept out of training.

It is what a training loop does while a `quarantine-rollouts` step fires. The metrics of the contract stay those from
before: they are about what was sampled, and a contract that looked better because of its own quarantine would lift it.

A sequence is judged by its own value of a clause's quantity, which is noisier than the statistic of a window that the
limit was written for: a few of a healthy kernel's sequences break a tight limit too, and leaving out what the kernels
disagree on most is a selection that biases the gradient. So it is made for a breach, on the slices that broke, and what
it took away is reported.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf, nan
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kc_otel.contract.clause import Clause, Statistic
from kc_otel.contract.model import Contract
from kc_otel.contract.slices import ALL
from kc_otel.record.measure.arrays import as_bool, host_rows, is_tensor
from kc_otel.record.measure.checks import InvalidReason, check
from kc_otel.record.measure.sampled import SEQUENCE, TOKEN, log_ratio
from kc_otel.record.measure.truncation import renormalised
from kc_otel.record.sequence_attributes import Attributes, own_attributes
from kc_otel.record.slice_table import each_row

_Floats = NDArray[np.float64]
_Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Share:
    """Measurements on some sequences of a batch.

    Attributes:
        sequences: How many, of those with tokens that count.
        tokens: Their tokens that count.
        tv_sum: Sum of (1-w)+ over those tokens that can be measured.
        statistics: Estimate of each clause's statistic, by clause, over those sequences that can be measured; NaN where
            there are none.
    """

    sequences: int
    tokens: int
    tv_sum: float
    statistics: Mapping[str, float]


@dataclass(frozen=True, slots=True, eq=False)
class Quarantine:
    """Remainder of a batch after quarantine, and the measurements before and after.

    Attributes:
        keep: Which sequences may be trained on, bool [sequences]; an array or tensor as the log-probabilities were.
        mask: Which tokens count, bool [sequences, tokens]; none of a sequence that is kept out.
        reasons: Why each sequence is kept out: the clause that it breaks by most, or the input check that it fails;
            empty for those that stay.
        before: Measurements on all sequences.
        after: Measurements on the sequences that stay.
    """

    keep: Any
    mask: Any
    reasons: tuple[str, ...]
    before: Share
    after: Share


def quarantine(
    train: Any,
    inference: Any,
    contract: Contract,
    *,
    mask: Any = None,
    attributes: Attributes = None,
    slices: Collection[str] | None = None,
    clauses: Collection[str] | None = None,
    kept: tuple[Any, Any] | None = None,
) -> Quarantine:
    """Find the sequences whose own drift breaks a clause, or that fail an input check (`measure.checks`).

    A sequence's own value is the clause's statistic of its tokens alone (their mean, maximum, quantile or fraction), or
    for a metric of sequences that metric; with `unit: sequence` the mean over its tokens. Everything is from before any
    clipping.

    >>> from kc_otel.contract.load import load
    >>> contract = load("contracts/rl-rollouts-bf16-fp8.yaml")
    >>> sequences = np.log([[0.5, 0.4], [0.5, 0.4]])
    >>> shifted = sequences + [[0.0, 0.01], [-0.4, -0.4]]
    >>> found = quarantine(shifted, sequences, contract, clauses=["token-tv"])
    >>> found.reasons, found.before.statistics, found.after.statistics
    (('', 'token-tv'), {'token-tv': 0.1648...}, {'token-tv': 0.0})

    Args:
        train: log P(y) of the sampled tokens, nats, [sequences, tokens], NumPy or torch on any device.
        inference: log Q(y) of the same tokens.
        contract: The contract.
        mask: Which tokens count, bool or int, same shape; all where it is None.
        attributes: Attributes that decide the slices: of each sequence, or of all alike.
        slices: Slices in quarantine; sequences of no other are judged. None for every sequence.
        clauses: Ids of the clauses that count; None for every clause that a sequence can be judged by.
        kept: As in `Recorder.compare`.

    Raises:
        ValueError: If shapes differ, there are attributes for another number of sequences, a clause does not exist, or
            none is about the log-probabilities of single sequences.
    """
    judged = _named(contract, clauses)
    p, q = (
        renormalised(*(array if array is None else host_rows(array).read(...) for array in pair))
        for pair in zip((train, inference), kept or (None, None), strict=True)
    )
    given = np.ones(p.shape, dtype=np.bool_) if mask is None else as_bool(mask)
    if p.ndim != 2 or p.shape != q.shape or p.shape != given.shape:
        raise ValueError(
            f"train, inference, mask: shapes {p.shape}, {q.shape} and {given.shape}; give three of [sequences, tokens]"
        )
    member = list(_membership(contract, attributes, slices, given.sum(1).tolist()))
    codes = check(p, q, mask=given, density=contract.assumptions.density)
    codes[codes == InvalidReason.NO_TOKENS] = InvalidReason.VALID  # nothing to keep out of a training that masks it
    counts = given & (codes == InvalidReason.VALID)[:, None]
    drift = np.where(counts, log_ratio(p, q), 0.0)
    reasons = [
        InvalidReason(code).name.lower() if code != InvalidReason.VALID and names else ""
        for code, names in zip(codes.tolist(), member, strict=True)
    ]
    worst = np.zeros(len(reasons))
    for clause in judged:
        values, of = _values(clause, drift, counts)
        own = np.where(counts.any(1), _statistic(clause.parsed_statistic, values, of), 0.0)
        for row, names in enumerate(member):
            limit = _limit(clause, names)
            times = own[row] / limit if limit > 0.0 else inf
            if codes[row] == InvalidReason.VALID and own[row] > limit and times > worst[row]:
                worst[row], reasons[row] = times, clause.id
    keep = np.array([not reason for reason in reasons], dtype=np.bool_)
    stay = given & keep[:, None]
    before, after = _share(judged, drift, given, counts), _share(judged, drift, stay, counts & keep[:, None])
    if not is_tensor(train):
        return Quarantine(keep, stay, tuple(reasons), before, after)
    import torch  # noqa: PLC0415 - a caller with a tensor has loaded it

    there = [torch.from_numpy(which).to(train.device) for which in (keep, stay)]
    return Quarantine(there[0], there[1], tuple(reasons), before, after)


def judgeable(clause: Clause) -> bool:
    """Return True if a single sequence has a value of its own for a clause: its metric needs log-probabilities only."""
    return clause.metric in TOKEN or clause.metric in SEQUENCE


def _named(contract: Contract, clauses: Collection[str] | None) -> list[Clause]:
    known = {clause.id: clause for clause in contract.clauses}
    if clauses is not None and (unknown := sorted(set(clauses) - known.keys())):
        raise ValueError(f"clauses: {contract.name!r} has no clause {unknown[0]!r}; it has {', '.join(known)}")
    found = [known[name] for name in (known if clauses is None else clauses) if judgeable(known[name])]
    if not found or (clauses is not None and len(found) < len(set(clauses))):
        metrics = ", ".join((*TOKEN, *SEQUENCE))
        raise ValueError(f"clauses: a sequence can be judged by itself only by a clause on one of {metrics}")
    return found


def _membership(
    contract: Contract, attributes: Attributes, slices: Collection[str] | None, lengths: Sequence[int]
) -> Iterator[tuple[str, ...]]:
    """Slices in quarantine that each sequence belongs to; every sequence is in `all`."""
    for row in each_row(own_attributes(attributes), range(len(lengths)), len(lengths), lengths):
        names = contract.slices_of(row)
        yield names if slices is None else tuple(name for name in names if name in slices)


def _limit(clause: Clause, names: Sequence[str]) -> float:
    """The smallest limit of a sequence's slices; where a slice has its own, that of `all` does not count."""
    own = [name for name in names if name != ALL and name in clause.slices]
    return min((clause.limit_for(name) for name in own or names), default=inf)


def _values(clause: Clause, drift: _Floats, counts: _Mask) -> tuple[_Floats, _Mask]:
    """The clause's observations and which of them count: [sequences, tokens], or [sequences, 1]."""
    lengths = counts.sum(1, keepdims=True)
    if clause.metric in SEQUENCE:
        return SEQUENCE[clause.metric](drift.sum(1, keepdims=True), lengths.clip(1)), lengths > 0
    values = TOKEN[clause.metric](drift)
    if clause.averaged is not None:
        return np.where(counts, values, 0.0).sum(1, keepdims=True) / lengths.clip(1), lengths > 0
    return values, counts


def _statistic(wanted: Statistic, values: _Floats, counts: _Mask) -> Any:
    """A statistic of each row, [rows]; of a row without observations it means nothing."""
    lengths = counts.sum(1).clip(1)
    match wanted.kind:
        case "mean":
            return np.where(counts, values, 0.0).sum(1) / lengths
        case "fraction":
            return ((values > wanted.argument) & counts).sum(1) / lengths
        case "max":
            return np.where(counts, values, -inf).max(1)
    ranks = np.maximum(np.ceil(lengths * wanted.argument).astype(np.int64), 1) - 1
    return np.take_along_axis(np.sort(np.where(counts, values, inf), 1), ranks[:, None], 1)[:, 0]


def _share(judged: Sequence[Clause], drift: _Floats, given: _Mask, counts: _Mask) -> Share:
    statistics = {}
    for clause in judged:
        values, of = _values(clause, drift, counts)
        together = values[of][None]
        known = (
            _statistic(clause.parsed_statistic, together, np.ones_like(together, np.bool_)) if together.size else (nan,)
        )
        statistics[clause.id] = float(known[0])
    return Share(
        sequences=int(given.any(1).sum()),
        tokens=int(given.sum()),
        tv_sum=float(np.where(counts, TOKEN["tv_token"](drift), 0.0).sum()),
        statistics=statistics,
    )
