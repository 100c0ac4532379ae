"""What a contract asks for and a recording does not have, as sentences.

A recorder measures what its own copy of the contract asks for, and puts sequences into slices as that copy defines
them. A recording therefore knows nothing of a quantity, a slice or a sampling rate that came later.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from kc_otel.contract.model import Contract
from kc_otel.contract.slices import ALL
from kc_otel.judge.statistics import metric_name

__all__ = ["not_recorded", "unmeasured"]


def not_recorded(contract: Contract, silent: Collection[tuple[str, str]]) -> Iterator[str]:
    """What never had an observation.

    Args:
        contract: The contract that was replayed.
        silent: (clause, slice) of every cell that was NO_DATA throughout.
    """
    slices = (ALL, *contract.slices)
    never = {clause.id for clause in contract.clauses if all((clause.id, slice) in silent for slice in slices)}
    for clause in contract.clauses:
        if clause.id in never:
            yield f"{clause.id}: nothing of {metric_name(clause)} was recorded, so the clause is NO_DATA throughout"
    if len(never) == len(contract.clauses):
        return
    for slice in contract.slices:
        empty = [c.id for c in contract.clauses if c.id not in never and (c.id, slice) in silent]
        if empty and len(empty) + len(never) == len(contract.clauses):
            yield f"slice {slice}: nothing was recorded of it; recorders slice by their own copy of the contract"
        elif empty:
            yield f"slice {slice}: nothing was recorded of it for {', '.join(empty)}"


def unmeasured(old: Contract, new: Contract) -> Iterator[str]:
    """Changes between two contracts that act where traffic is measured, not where it is judged."""
    measured = any(not clause.metric.startswith("gen_ai.") for clause in new.clauses)
    for name in [name for name in new.slices if name in old.slices] if measured else ():
        if old.slices[name].conditions != new.slices[name].conditions:
            yield f"slice {name}: is defined anew, and the recording has what the contract of the time put into it"
    before, after = old.observability.sampling, new.observability.sampling
    if before != after:
        yield f"sampling: {after:g} instead of {before:g} acts on recorders; the recording has the samples of the time"
