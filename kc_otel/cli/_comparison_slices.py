"""How a recording is cut into slices, and what a contract says of them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kc_otel.bounds import Binned
from kc_otel.cli._comparison import Part, Samples
from kc_otel.contract.model import Contract
from kc_otel.contract.registry import DERIVED, QUANTITIES
from kc_otel.contract.slices import ALL
from kc_otel.contract.units import format_duration
from kc_otel.evaluator.verdict import Cell, Verdict
from kc_otel.evaluator.verdicts import Evidence, Window, decide
from kc_otel.instrument.membership import SliceTable
from kc_otel.instrument.recordings import Recording

__all__ = ["Judged", "by_attributes", "by_contract", "judge"]

_MOST: Final = 20
"""Values of an attribute that become slices of their own."""
_RANGES: Final = 4


@dataclass(frozen=True, slots=True)
class Judged:
    """What a contract says of a recording.

    Attributes:
        verdicts: A verdict for each clause that a recording can be judged by, on each slice.
        left_out: Clauses that it cannot, as sentences.
    """

    verdicts: tuple[Verdict, ...] = ()
    left_out: tuple[str, ...] = ()

    def on(self, slices: Sequence[str]) -> Judged:
        """The verdicts on some slices; they were reached together with those on the others."""
        return replace(self, verdicts=tuple(each for each in self.verdicts if each.cell.slice in slices))


def by_contract(recording: Recording, contract: Contract) -> list[Part]:
    """`all` and the contract's slices; those over its cap on series are together in `other`."""
    table = SliceTable.of(contract)
    rows = range(recording.lengths.size)
    membership = table.of_batch(recording.attributes, rows, recording.lengths.size)
    return [_part(recording, name, membership[:, column]) for column, name in enumerate(table.names)]


def by_attributes(recording: Recording, names: Sequence[str]) -> list[Part]:
    """`all`, and a slice for each value of each attribute; of numbers with many values, for each quarter of them.

    Raises:
        ValueError: If no sequence has one of the attributes.
    """
    parts = [Part(ALL, recording)]
    for name in names:
        values = [attributes.get(name) for attributes in recording.attributes]
        if all(value is None for value in values):
            known = sorted({each for attributes in recording.attributes for each in attributes})
            msg = f"{recording.source}: no sequence has an attribute {name!r}; there are {', '.join(known) or 'none'}"
            raise ValueError(msg)
        given = [value for value in values if value is not None]
        counts = Counter(map(str, given))
        if len(counts) > _MOST and all(isinstance(value, int | float) for value in given):
            parts += _ranges(recording, name, np.array([np.nan if v is None else v for v in values], dtype=np.float64))
            continue
        of = np.array([None if value is None else str(value) for value in values], dtype=object)
        kept = sorted(value for value, _ in counts.most_common(_MOST))
        parts += [_part(recording, f"{name}={value}", of == value) for value in kept]
        rest = np.array([value is not None and value not in kept for value in of])
        if rest.any():
            parts.append(_part(recording, f"{name}=other", rest))
    return parts


def judge(contract: Contract, parts: Sequence[Part]) -> Judged:
    """Verdicts as an evaluator would give them, if the recording were what both of its windows hold.

    The intervals come from the values themselves, not from histograms. Holm's procedure counts the cells that can be
    judged from a recording.

    Raises:
        ValueError: If a clause needs an assumption that the contract does not state.
    """
    known = {part.name: Samples(part.recording) for part in parts if part.recording is not None}
    evidence, left_out = [], []
    for clause in contract.clauses:
        quantity = DERIVED[clause.metric].base if clause.metric in DERIVED else clause.metric
        if quantity not in QUANTITIES or known[ALL].of(quantity) is None:
            left_out.append(f"{clause.id}: {clause.metric} cannot be told from this recording")
            continue
        for part in parts:
            sample, samples = None, known.get(part.name)
            if samples is not None:
                of_mean = clause.parsed_statistic.kind == "mean"
                sample = samples.for_mean(quantity) if of_mean else samples.of(quantity)
            cell = Cell(contract.name, clause.id, part.name)
            absence = "" if sample is not None else f"no sequence of this recording is in slice {part.name}"
            evidence.append(Evidence(cell, clause, partial(_same, sample), absence))
    spans = [f" in {format_duration(s)}" for s in (contract.observability.window, contract.observability.long_window)]
    verdicts = []
    for verdict in decide(contract, evidence, time.time()):
        # A recording is no window: the reason is the same without its length.
        reason = verdict.reason.replace(spans[verdict.window == "long"], "", 1)
        verdicts.append(replace(verdict, reason=reason))
    return Judged(tuple(verdicts), tuple(left_out))


def _same(sample: Binned | None, _window: Window) -> Binned:
    """The same observations on either window."""
    return Binned.of_samples(np.zeros(0)) if sample is None else sample


def _part(recording: Recording, name: str, kept: NDArray[np.bool_]) -> Part:
    return Part(name, recording.only(kept.astype(np.bool_)) if kept.any() else None)


def _ranges(recording: Recording, name: str, values: NDArray[np.float64]) -> list[Part]:
    edges = np.unique(np.nanquantile(values, np.linspace(0.0, 1.0, _RANGES + 1), method="lower"))
    parts = []
    for place, (low, high) in enumerate(pairwise(edges)):
        last = place == edges.size - 2
        inside = (values >= low) & ((values <= high) if last else (values < high))
        parts.append(_part(recording, f"{name} in [{low:g}, {high:g}{']' if last else ')'}", inside))
    return parts
