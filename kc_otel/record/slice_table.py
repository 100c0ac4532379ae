"""Attributes of sequences, the slices that get streams of their own, and the sequences that count in each."""

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

Attributes = Mapping[str, Scalar | Sequence[Scalar]] | Sequence[Mapping[str, Scalar]] | None
"""One mapping for each sequence, or one for all, in which a list has a value for each sequence."""
OwnAttributes = Mapping[str, Scalar] | Sequence[Mapping[str, Scalar]] | None
"""One mapping for each sequence, or one for all alike."""
_MAX_REMEMBERED = 4096
_MAX_OPERATORS = 64  # operators recorded besides those that the contract is about


BETWEEN: Final = len(POSITION_EDGES)
"""Column of `Places.before`, and of differences of it, at which turns follow positions."""
_EVERY: Final = np.iinfo(np.intp).max


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
        found = Places(counts, self.positions[rows])
        found.__dict__["begins"] = self.begins[rows]
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
    def before(self) -> NDArray[np.intp]:
        """Tokens of each sequence before each of PLACES and after the last, [sequences, bins + 1 + turns + 1]."""
        lengths = np.count_nonzero(self.counts, axis=1)
        of_one_run = np.array([*POSITION_EDGES, _EVERY, 0, *[_EVERY] * TURNS], dtype=np.intp)
        found: NDArray[np.intp] = np.minimum(of_one_run, lengths[:, None])
        last = self.counts.shape[1] - 1 - self.counts[:, ::-1].argmax(1)
        end = last - self.counts.argmax(1) if self.given is None else self.given[np.arange(lengths.size), last]
        if (several := np.flatnonzero(end + 1 != lengths)).size:
            counts, positions = self.counts[several], self.positions[several].astype(np.int32)
            turns = np.cumsum(self.begins[several], axis=1, dtype=np.int32)
            for column, edge in enumerate(POSITION_EDGES):
                found[several, column] = np.count_nonzero(counts & (positions < edge), axis=1)
            for turn in range(2, TURNS + 1):
                found[several, BETWEEN + turn] = np.count_nonzero(counts & (turns < turn), axis=1)
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
        values: dict[str, NDArray[Any]] = {POSITION: places.positions, TURN: places.turns, PHASE: places.begins}
        for name, by_mask in values.items():
            own = {row: sequence[name] for row, sequence in enumerate(sequences) if name in sequence}
            if name == PHASE:
                own = {row: phase == PREFILL for row, phase in own.items()}
            if own := {row: value for row, value in own.items() if isinstance(value, int | float)}:
                values[name] = by_mask.copy()
                values[name][list(own)] = np.array(list(own.values()))[:, None]
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
                        mask &= np.where(values[PHASE], condition.holds(PREFILL), condition.holds(DECODE))
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
