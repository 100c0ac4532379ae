"""Attributes of sequences and tokens, the slices that get streams of their own, and what counts in each.

Weight versions are of tokens: an update that comes while a sequence is sampled leaves it with tokens of several steps.
Every token has the probability that it was sampled with. Where its weights are the training kernel's, the ratio of
the two is the kernels' drift; where they are older, it is that and the change of the policy together. A sequence that
holds tokens of both is measured in two parts, each by its own tokens; what is said of sequences is said of the whole
one, which is not the kernels' alone. `weights_lag` has an observation for each step
that sampled any token of a batch, in the slices of the sequences that hold such tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kc_otel.contract.model import Contract
from kc_otel.contract.registry.clause_metrics import OPERATORS
from kc_otel.contract.slices import (
    ALL,
    DECODE,
    LAG,
    LENGTH,
    OF_TOKENS,
    OLDER,
    OTHER,
    PHASE,
    PLACES,
    POSITION,
    POSITION_EDGES,
    PREFILL,
    STALE,
    STALE_BY_LAG,
    TURN,
    TURNS,
    Scalar,
    match,
)
from kc_otel.record.measure.arrays import on_gpu, on_host

Attributes = Mapping[str, Scalar | Sequence[Scalar]] | Sequence[Mapping[str, Scalar]] | None
"""One mapping for each sequence, or one for all, in which a list has a value for each sequence."""
OwnAttributes = Mapping[str, Scalar] | Sequence[Mapping[str, Scalar]] | None
"""One mapping for each sequence, or one for all alike."""
_MAX_REMEMBERED = 4096
_MAX_NAMED_VERSIONS = 8  # versions that are spelled out; more are counted
_STEP_DIGITS = 7  # digits of a step, at most; a longer text of digits is a name
_MAX_OPERATORS = 64  # operators recorded besides those that the contract is about


BETWEEN: Final = len(POSITION_EDGES)
"""Column of `Places.bounds`, and of differences of it, at which turns follow positions."""


class TokenSlice(NamedTuple):
    """The tokens of a batch that a slice selects."""

    column: int  # number of the slice among those of the membership
    mask: NDArray[np.bool_]  # bool [sequences, tokens]


@dataclass(frozen=True, eq=False)
class Places:
    """Positions and turns of a batch."""

    counts: NDArray[np.bool_]  # which tokens count, bool [sequences, tokens]
    given: NDArray[np.integer] | None = None  # positions, rising; None where the first token that counts is at 0

    def of_parts(self, rows: NDArray[np.integer], counts: NDArray[np.bool_]) -> Places:
        """The places of some of the rows again, where fewer tokens count, bool [parts, tokens]."""
        found = Places(counts)
        found.__dict__.update({name: getattr(self, name)[rows] for name in ("positions", "turns", "begins", "bounds")})
        return found

    @cached_property
    def positions(self) -> NDArray[np.integer]:
        """Position of each token, integers [sequences, tokens]; of those that do not count, any."""
        if self.given is not None:
            return self.given
        found: NDArray[np.integer] = np.arange(self.counts.shape[1]) - self.counts.argmax(1)[:, None]
        return found

    @cached_property
    def turns(self) -> NDArray[np.integer]:
        """Turn of each token that counts, integers [sequences, tokens]; the others have that of the last before."""
        return np.cumsum(self.begins, axis=1)

    @cached_property
    def bounds(self) -> NDArray[np.intp]:
        """Columns between which the tokens of each of PLACES are, integers [sequences, bins + 1 + turns + 1]."""
        sequences, width = self.counts.shape
        found = np.full((sequences, BETWEEN + 1 + TURNS + 1), width, dtype=np.intp)
        if self.given is None:
            first = self.counts.argmax(1)
            found[:, :BETWEEN] = np.minimum(first[:, None] + np.array(POSITION_EDGES), width)
        else:
            for column, edge in enumerate(POSITION_EDGES):
                beyond = self.counts & (self.given >= edge)
                found[:, column] = np.where(beyond.any(1), beyond.argmax(1), width)
        found[:, BETWEEN + 1] = 0
        several = np.flatnonzero(np.count_nonzero(self.begins, axis=1) > 1)
        if several.size:
            number = np.cumsum(self.begins[several], axis=1)
            for turn in range(2, TURNS + 1):
                found[several, BETWEEN + turn] = np.count_nonzero(number < turn, axis=1)
        return found

    @cached_property
    def begins(self) -> NDArray[np.bool_]:
        """Mask of the tokens that are the first of a turn, bool [sequences, tokens]: prefill computed these."""
        begins = self.counts.copy()
        follows = self.counts[:, :-1]
        if self.given is not None:
            follows = follows & (np.diff(self.given, axis=1) == 1)
        begins[:, 1:] &= ~follows
        return begins


def asked_for(contract: Contract) -> frozenset[str]:
    """Names of attributes that a contract's slices ask for."""
    return frozenset(name for spec in contract.slices.values() for name in spec.conditions)


def own_attributes(given: Attributes) -> OwnAttributes:
    """A copy that the caller cannot change any more, with columns as a mapping for each sequence."""
    if given is None:
        return None
    if not isinstance(given, Mapping):
        rows = list(given)
        if not all(isinstance(row, Mapping) for row in rows):
            raise ValueError(f"attributes: {type(given).__name__} is no mapping, nor a list with one for each sequence")
        return [dict(row) for row in rows]
    columns = {name: _values(value) for name, value in given.items()}
    lengths = {name: len(values) for name, values in columns.items() if values is not None}
    if not lengths:
        return dict(given)  # type: ignore[arg-type]  # no value is a list
    if len(set(lengths.values())) > 1:
        said = ", ".join(f"{name} has {many}" for name, many in lengths.items())
        raise ValueError(f"attributes: {said} values; give as many as there are sequences")
    return [
        {name: given[name] if values is None else values[row] for name, values in columns.items()}  # type: ignore[misc]
        for row in range(next(iter(lengths.values())))
    ]


def _values(value: Any) -> list[Any] | None:
    """The values of a column; None where there is one value for all."""
    if isinstance(value, np.ndarray) and value.ndim == 1:
        return list(value.tolist())
    return list(value) if isinstance(value, list | tuple) else None


@dataclass(frozen=True, slots=True, eq=False)
class SliceTable:
    """The slices of a contract within its cap on series.

    `names` have streams of their own: `all`, as declared, `other` where some are over the cap, and those of what older
    weights sampled.
    """

    contract: Contract
    names: tuple[str, ...]
    over: tuple[str, ...]  # declared slices that the cap leaves no room for; their sequences count as `other`
    more_operators: int = 0  # that the cap leaves room for besides those that the contract names
    places: bool = False  # whether the cap leaves room for drift by position and turn
    _known: dict[tuple[tuple[str, Scalar], ...], NDArray[np.bool_]] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, contract: Contract) -> SliceTable:
        """Build the table with room for max_series / quantities slices: each quantity needs a stream per slice."""
        declared = tuple(contract.slices)
        each_operator, quantities = len(OPERATORS), contract.streams_per_slice
        room = max(contract.observability.max_series // quantities, 1)
        older = OLDER if 1 + len(OLDER) + len(declared) <= room else (STALE,)
        always = 1 + len(older)
        if always + len(declared) <= room:
            left = contract.observability.max_series - len(PLACES) - len(older) * quantities
            more = max(left // (1 + len(declared)) - quantities, 0) // each_operator
            fits = left >= (1 + len(declared)) * quantities
            return cls(contract, (ALL, *declared, *older), (), min(more, _MAX_OPERATORS), fits)
        kept = declared[: max(room - always - 1, 0)]
        return cls(contract, (ALL, *kept, OTHER, *older), declared[len(kept) :])

    @classmethod
    def whole(cls, contract: Contract) -> SliceTable:
        """Build the table without a cap, for a recording."""
        return cls(contract, (ALL, *contract.slices, *OLDER), (), _MAX_OPERATORS, True)

    @property
    def judged(self) -> tuple[str, ...]:
        """Return the names but for those of what older weights sampled."""
        return tuple(name for name in self.names if name not in OLDER)

    @property
    def asked(self) -> frozenset[str]:
        """Return the names of attributes that the contract's slices ask for."""
        return asked_for(self.contract)

    def of_sequence(self, attributes: Mapping[str, Scalar]) -> NDArray[np.bool_]:
        """Mask of the slices in `names` to which a sequence belongs, [slices]."""
        try:
            key = tuple(sorted(attributes.items()))
            known = self._known.get(key)
        except TypeError:  # an attribute that cannot be hashed matches no condition, but the others still may
            return self._row(attributes)
        if known is None:
            if len(self._known) >= _MAX_REMEMBERED:
                self._known.clear()
            known = self._known[key] = self._row(attributes)
        return known

    def of_batch(
        self,
        attributes: OwnAttributes,
        rows: Sequence[int],
        given: int,
        lengths: Sequence[int] | None = None,
        lags: Sequence[int] | None = None,
    ) -> NDArray[np.bool_]:
        """Membership of the given rows of a batch, [rows, slices]; `given` are all its sequences.

        Sequences whose attributes do not say their length have `lengths`, of tokens that count; `lags` are the versions
        that the weights of each row are behind the training kernel's, None for not known.
        """
        if (attributes is None or isinstance(attributes, Mapping)) and lengths is None and lags is None:
            return np.tile(self.of_sequence(attributes or {}), (len(rows), 1))
        sequences = each_row(attributes, rows, given, lengths, lags)
        return np.array([self.of_sequence(sequence) for sequence in sequences], dtype=bool).reshape(
            len(rows), len(self.names)
        )

    def of_tokens(self, places: Places | None, sequences: Sequence[Mapping[str, Scalar]]) -> list[TokenSlice]:
        """The tokens of a batch that count in slices which select tokens, apart from what `of_batch` has as a whole.

        What a sequence has as an attribute of its own, of `sequences` as `each_row` gives them, is that of all its
        tokens.
        """
        specs = self.contract.slices
        chosen = [(column, specs[name]) for column, name in enumerate(self.names) if name in specs]
        chosen = [(column, spec) for column, spec in chosen if spec.of_tokens]
        if places is None or not chosen:
            return []
        values = {}
        for name, found_by_mask in ((POSITION, places.positions), (TURN, places.turns)):
            known = {row: sequence.get(name) for row, sequence in enumerate(sequences)}
            own = {row: value for row, value in known.items() if isinstance(value, int | float)}
            values[name] = found_by_mask.copy() if own else found_by_mask
            if own:
                values[name][list(own)] = np.array(list(own.values()))[:, None]
        first = places.begins
        if phases := {row: sequence[PHASE] for row, sequence in enumerate(sequences) if PHASE in sequence}:
            first = first.copy()
            first[list(phases)] = np.array([phase == PREFILL for phase in phases.values()])[:, None]
        found = []
        for column, spec in chosen:
            others = {name: conditions for name, conditions in spec.conditions.items() if name not in OF_TOKENS}
            fits = [
                match(others, sequence) and not spec.matches(sequence) and (LAG in others or not _stale(sequence))
                for sequence in sequences
            ]
            mask = places.counts & np.array(fits, dtype=np.bool_)[:, None]
            for name in OF_TOKENS.intersection(spec.conditions):
                for condition in spec.conditions[name]:
                    if name == PHASE:
                        mask &= np.where(first, condition.holds(PREFILL), condition.holds(DECODE))
                    else:
                        mask &= condition.holds_for(values[name])
            if mask.any():
                found.append(TokenSlice(column, mask))
        return found

    def counted(self, membership: NDArray[np.bool_]) -> dict[str, int]:
        """Return how many sequences are on each slice, of their membership [sequences, slices]."""
        return dict(zip(self.names, membership.sum(0).tolist(), strict=True))

    def _row(self, attributes: Mapping[str, Scalar]) -> NDArray[np.bool_]:
        member = set(self.contract.slices_of(attributes))
        if lag := _stale(attributes):
            of_lag = {name for name, spec in self.contract.slices.items() if LAG in spec.conditions}
            bins = [name for name, least in STALE_BY_LAG.items() if lag >= least]
            member = member & of_lag | {STALE, *bins[-1:]}
        if member.intersection(self.over):
            member.add(OTHER)
        return np.array([name in member for name in self.names], dtype=bool)


def _stale(attributes: Mapping[str, Scalar]) -> float:
    """Return the versions that a sequence's weights are behind; 0 where that is not known."""
    lag = attributes.get(LAG)
    return max(lag, 0.0) if isinstance(lag, int | float) else 0.0


def each_row(
    attributes: OwnAttributes,
    rows: Sequence[int],
    given: int,
    lengths: Sequence[int] | None = None,
    lags: Sequence[int] | None = None,
) -> Sequence[Mapping[str, Scalar]]:
    """Attributes of each of the rows."""
    own = [attributes or {}] * given if attributes is None or isinstance(attributes, Mapping) else attributes
    if len(own) != given:
        raise ValueError(f"attributes: {len(own)} for {given} sequences; give one mapping for each, or one for all")
    sequences: Sequence[Mapping[str, Scalar]] = [own[row] for row in rows]
    if lengths is not None:
        sequences = [{LENGTH: length, **known} for length, known in zip(lengths, sequences, strict=True)]
    if lags is not None:
        sequences = [{**known, LAG: lag} for lag, known in zip(lags, sequences, strict=True)]
    return sequences


class BatchVersions(NamedTuple):
    """Training steps that sampled a batch, and the sequences of each."""

    steps: NDArray[np.int64]  # rising
    members: Any  # slices of the sequences that hold tokens of each step, bool [steps, slices]

    def __str__(self) -> str:
        named = ",".join(str(step) for step in self.steps[-_MAX_NAMED_VERSIONS:].tolist())
        return named if self.steps.size <= _MAX_NAMED_VERSIONS else f"{self.steps.size} versions, the last {named}"


def as_version(weights: Any) -> int | str | None:
    """A weight version as it was given, or as a number of NumPy or torch; engines report a step as text.

    ValueError if it is neither a whole number nor a name, or lies on a device, from where it would be waited for.
    """
    given = weights.item() if getattr(weights, "ndim", None) == 0 and not on_gpu(weights) else weights
    if isinstance(given, float) and given.is_integer():
        given = int(given)
    if isinstance(given, str) and given.isdecimal() and len(given) <= _STEP_DIGITS:
        given = int(given)
    if given is None or isinstance(given, str | int):
        return given
    raise ValueError(f"weights: {type(weights).__name__} is no weight version; give an optimizer step, an int")


def split(weights: Any) -> tuple[int | str | None, Any]:
    """Return the version of all tokens, or the versions of each; the other is None."""
    if weights is None or isinstance(weights, str | int | float) or getattr(weights, "ndim", None) == 0:
        return as_version(weights), None
    return None, weights


def batch_versions(
    version: int | str | None, per_token: Any, counts: NDArray[np.bool_], membership: NDArray[np.bool_]
) -> BatchVersions | None:
    """The versions of the tokens that count, [sequences, tokens]; None where they are not known as steps.

    All tokens have one `version`, or `per_token` has the step that sampled each. ValueError if these are not integers,
    or not one for each token.
    """
    if per_token is None:
        known = isinstance(version, int)
        return BatchVersions(np.array([version]), membership.any(axis=0, keepdims=True)) if known else None
    given = on_host(per_token)
    if given.dtype.kind not in "iu" or counts.shape != given.shape:
        raise ValueError(
            f"weights: versions of tokens are {given.dtype} {given.shape}; give an integer step for each token"
        )
    rows, places = np.nonzero(counts)
    steps, which = np.unique(given[rows, places].astype(np.int64), return_inverse=True)
    held = np.unique(rows * steps.size + which)  # one for each step of each sequence
    rows, which = np.divmod(held, max(steps.size, 1))
    members = np.zeros((steps.size, membership.shape[1]), dtype=np.bool_)
    np.logical_or.at(members, which, membership[rows])
    return BatchVersions(steps, members)


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """Sequences of a batch by the age of the weights that sampled them: the first part of each, then the others."""

    row: NDArray[np.int64]  # sequence that each part is of [parts]
    lag: list[int]  # versions that its weights are behind the training kernel's, those of its oldest token
    mask: NDArray[np.bool_] | None = None  # which tokens each part holds, bool [parts, tokens]; None for all

    @property
    def again(self) -> NDArray[np.bool_]:
        """Mask of the parts whose sequence has an earlier part, bool [parts]."""
        return np.not_equal(np.arange(self.row.size), self.row)

    @property
    def whole(self) -> NDArray[np.intp]:
        """Part that each part's whole sequence counts at, which is the older of two, [parts]."""
        found = np.arange(self.row.size)
        found[self.row[self.again]] = np.flatnonzero(self.again)
        return found


def parts_by_lag(
    train: int | str | None, version: int | str | None, per_token: Any, counts: NDArray[np.bool_]
) -> Parts | None:
    """Split each sequence into the part that the training kernel's weights sampled and older parts; None if unknown.

    `train` is the training kernel's version; the others are as in `batch_versions`, which has found them to be right.
    """
    rows = np.arange(counts.shape[0], dtype=np.int64)
    if not isinstance(train, int):
        return None
    if per_token is None:
        return Parts(rows, [max(train - version, 0)] * rows.size) if isinstance(version, int) else None
    lag = np.where(counts, np.maximum(train - on_host(per_token).astype(np.int64), 0), 0)
    oldest, stale = lag.max(axis=1, initial=0), lag > 0
    both = np.logical_and(stale.any(axis=1), (counts & ~stale).any(axis=1))
    if not both.any():
        return Parts(rows, oldest.tolist())
    first = np.where(both[:, None], counts & ~stale, counts)
    return Parts(
        np.concatenate([rows, rows[both]]),
        [*np.where(both, 0, oldest).tolist(), *oldest[both].tolist()],
        np.concatenate([first, stale[both]]),
    )
