"""A training loop that obeys the evaluator: measure more, keep rollouts out of training, send weights again, stop.

While a `quarantine-rollouts` step fires, sequences that break the contract by themselves are kept out. The metrics of
the contract stay those from before: they are about what was sampled, and a contract that looked better because of its
own quarantine would lift it.

A sequence is judged by its own value of a clause's quantity, which is noisier than the statistic of a window that the
limit was written for: a few of a healthy kernel's sequences break a tight limit too, and leaving out what the kernels
disagree on most is a selection that biases the gradient. So it is made for a breach, on the slices that broke, and what
it took away is reported.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from kc_otel.contract.clause import Clause, Statistic
from kc_otel.contract.input_reasons import InvalidReason
from kc_otel.contract.measuring_paths import judgeable
from kc_otel.contract.model import Contract
from kc_otel.contract.slices import ALL
from kc_otel.record.measure.arrays import as_bool, floats, is_tensor, on_host
from kc_otel.record.measure.checks import check
from kc_otel.record.measure.sampled import SEQUENCE, TOKEN, log_ratio, renormalised
from kc_otel.record.slice_table import Attributes, each_row, own_attributes
from kc_otel.record.weight_versions import as_version, split
from kc_otel.record.work import laid_out

if TYPE_CHECKING:
    from kc_otel.record.recorder import Recorder

_log: Final = logging.getLogger("kc_otel")
Asked = tuple[str | None, str | None]
"""Reasons to send weights again and to stop; None for none."""
_Floats = NDArray[np.float64]
_Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Share:
    """Measurements on some sequences of a batch."""

    sequences: int  # with tokens that count
    tokens: int  # that count
    tv_sum: float  # of (1-w)+ over those tokens that can be measured


@dataclass(frozen=True, slots=True, eq=False)
class Quarantine:
    """Remainder of a batch after quarantine, and the measurements before and after."""

    keep: Any  # which sequences may be trained on, bool [sequences], NumPy or torch as the log-probabilities were
    mask: Any  # which tokens count, bool [sequences, tokens]; none of a sequence that is kept out
    reasons: tuple[str, ...]  # the clause broken by most, or the check failed; empty for those that stay
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
    weights: tuple[Any, Any] | None = None,
) -> Quarantine:
    """Find the sequences whose own drift breaks a clause, or that fail an input check (`measure.checks`).

    A sequence's own value is the clause's statistic of its tokens alone (their mean, maximum, quantile or fraction), or
    for a metric of sequences that metric; with `unit: sequence` the mean over its tokens. Everything is from before any
    clipping. Arguments are those of `Recorder.compare`, [sequences, tokens]. Of `slices`, those in quarantine, and ids
    of `clauses`, None is for all; a clause that single sequences have no value for is a ValueError. Tokens that older
    `weights` sampled are checked and not judged: their drift is the policy's change, too.

    >>> from kc_otel.contract.load import load
    >>> contract = load("contracts/rl-rollouts-bf16-fp8.yaml")
    >>> sequences = np.log([[0.5, 0.4], [0.5, 0.4]])
    >>> shifted = sequences + [[0.0, 0.01], [-0.4, -0.4]]
    >>> found = quarantine(shifted, sequences, contract, clauses=["token-tv"])
    >>> found.reasons, found.before.tokens, found.after.tokens
    (('', 'token-tv'), 4, 2)
    """
    judged = _named(contract, clauses)
    lengths = [len(row) for row in train] if isinstance(train, list) and np.ndim(train[0]) else None
    if lengths is not None:
        _, versions = split(None if weights is None else weights[1])
        rows = laid_out({"train": train, "inference": inference, "mask": mask, "versions": versions}, like="train")
        if len(rows.kept) < rows.given:
            raise ValueError("train, inference, mask: sequences of different lengths")
        train, inference, mask = (rows.arrays[name] for name in ("train", "inference", "mask"))
        weights = weights if versions is None or weights is None else (weights[0], rows.arrays["versions"])
    p, q = (
        renormalised(*(array if array is None else floats(array) for array in pair))
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
    counts = given & (codes == InvalidReason.VALID)[:, None] & _of_same_weights(weights, p.shape)
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
    before, after = _share(drift, given, counts), _share(drift, stay, counts & keep[:, None])
    there: Any = stay
    if lengths is not None:
        there = [row[:length] for row, length in zip(stay, lengths, strict=True)]
    elif is_tensor(train):
        import torch  # noqa: PLC0415 - a caller with a tensor has loaded it

        keep, there = (torch.from_numpy(which).to(train.device) for which in (keep, stay))
    return Quarantine(keep, there, tuple(reasons), before, after)


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


def _of_same_weights(weights: tuple[Any, Any] | None, shape: tuple[int, ...]) -> _Mask:
    """Mask of the tokens that the training kernel's weights sampled, bool [sequences, tokens]; all where unknown."""
    version, versions = split(None if weights is None else weights[1])
    train = None if weights is None else as_version(weights[0])
    given = np.asarray(version if versions is None else on_host(versions))
    if not isinstance(train, int) or given.dtype.kind not in "iu":
        return np.ones(shape, dtype=np.bool_)
    return np.broadcast_to((given[:, None] if given.ndim == 1 else given) >= train, shape)


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


def _share(drift: _Floats, given: _Mask, counts: _Mask) -> Share:
    tv_sum = float(np.where(counts, TOKEN["tv_token"](drift), 0.0).sum())
    return Share(int(given.any(1).sum()), int(given.sum()), tv_sum)


class Directives(Protocol):
    """Source of directives about a version of the inference kernel, or about an unknown one, which is about each.

    `kc_otel.client.router.Router` is one. No method may block.
    """

    def sampling(self, contract: str, default: float, inference_version: str | None = None) -> float:
        """Share of comparisons to measure."""

    def quarantined(self, contract: str, inference_version: str | None = None) -> Mapping[str, str]:
        """Slices whose rollouts should not be trained on, each with the reason."""

    def resync(self, contract: str, inference_version: str | None = None) -> str | None:
        """Return the reason to sync the trainer's weights to the inference kernel; None if there is none."""

    def halted(self, contract: str, inference_version: str | None = None) -> str | None:
        """Return the reason to stop training; None if there is none."""


class GuidedLoop:
    """A training loop that does what the contract's policy asks for; `Recorder.follow` makes it, with its arguments."""

    def __init__(
        self, recorder: Recorder, directives: Directives, send_weights: Callable[..., object] | None, pause: int
    ) -> None:
        if pause < 1:
            raise ValueError(f"pause: {pause!r} is not 1 or more")
        self._recorder = recorder
        self._directives = directives
        self._send_weights = send_weights
        self._pause = pause
        self._waiting = 0
        self._failed = False
        self.reason: str | None = None
        """Reason to end the loop; None while there is none."""
        self.sent: list[str] = []
        """Reason of each time that the weights were sent again."""

    def go_on(self, *model: Any, agree: Callable[[Asked], Asked] | None = None) -> bool:
        """Call it before each step: sends weights where that is asked for, and is False from a `halt` on.

        `send_weights` gets the arguments. Never raises: where it fails that is logged, and tried again after `pause`
        steps. In a distributed run `agree` makes the first process's answer that of all.
        """
        asked = self._asked()
        resync, halt = asked if agree is None else agree(asked)
        self._waiting = 0 if resync is None else self._waiting - 1
        if resync is not None and self._send_weights is not None and self._waiting < 0:
            self._waiting = self._pause - 1
            try:
                self._send_weights(*model)
            except Exception:  # noqa: BLE001 - the user's function; training must not fail because of it
                _log.exception("weights were to be sent again and were not: %s", resync)
            else:
                _log.warning("weights sent again: %s", resync)
                self.sent.append(resync)
        if self.reason is None and halt is not None:
            self.reason = halt
            _log.error("training stops: %s", halt)
        return self.reason is None

    def _asked(self) -> Asked:
        """Reasons to send weights, which a loop that cannot is not asked for, and to end the loop."""
        of = self._recorder.contract.name, self._recorder.inference_version
        try:
            resync = None if self._send_weights is None else self._directives.resync(*of)
            return resync, self._directives.halted(*of)
        except Exception:  # noqa: BLE001 - whatever directives of somebody else do
            if not self._failed:
                self._failed = True
                _log.exception("what the contract's policy asks for cannot be told; training goes on")
            return None, None

    def compare(
        self,
        train_logprobs: Any,
        inference_logprobs: Any,
        *,
        mask: Any = None,
        attributes: Attributes = None,
        **more: Any,
    ) -> Any:
        """Compare as `Recorder.compare` does, whose arguments these are, and say which tokens to train on.

        While nothing is in quarantine that is `mask` as it is. Else it lacks the sequences of the slices in quarantine
        that break the contract by themselves, or fail an input check; they are counted in `kc.quarantine.*`. Arrays
        that cannot be looked at row by row are kept whole, and counted as dropped.
        """
        self._recorder.compare(train_logprobs, inference_logprobs, mask=mask, attributes=attributes, **more)
        contract = self._recorder.contract
        try:
            slices = self._directives.quarantined(contract.name, self._recorder.inference_version)
            if not slices:
                return mask
            found = quarantine(
                train_logprobs,
                inference_logprobs,
                contract,
                mask=mask,
                attributes=attributes,
                slices=slices,
                kept=more.get("kept"),
                weights=more.get("weights"),
            )
            reduced = _where(mask, found.mask)
        except Exception as error:  # noqa: BLE001 - nothing is raised into the loop
            self._recorder.drop("quarantine-failed", error)
            return mask
        self._recorder.quarantined(found)
        return reduced


def _where(mask: Any, stay: Any) -> Any:
    """A mask where its tokens stay, as the kind of array that it is, or its rows are; of any other kind, `stay`."""
    if isinstance(stay, list):
        rows = [None] * len(stay) if mask is None else mask
        return [_where(row, here) for row, here in zip(rows, stay, strict=True)]
    if is_tensor(mask):
        import torch  # noqa: PLC0415 - a caller with a tensor has loaded it

        return mask * torch.as_tensor(stay, device=mask.device)
    return mask * stay if isinstance(mask, np.ndarray) and isinstance(stay, np.ndarray) else stay
