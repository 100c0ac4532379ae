"""Warnings about cells that a slice's traffic cannot decide: a PASS larger than the long window, an endless FAIL."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kc_otel.contract.clause import Clause
from kc_otel.contract.errors import LintFinding
from kc_otel.contract.model import Contract
from kc_otel.contract.registry.clause_metrics import Unit
from kc_otel.contract.slices import ALL
from kc_otel.contract.units import format_duration
from kc_otel.judge.mean_test import mean_test
from kc_otel.judge.sample_sizes import observations_to_pass, rounded


def undecided_by_traffic(contract: Contract, traffic: Mapping[str, float]) -> tuple[LintFinding, ...]:
    """Warnings about clauses that a slice's traffic cannot decide, even where the kernels are identical.

    Args:
        contract: The contract.
        traffic: Sequences an hour, each of a prompt of its own, by slice.

    Raises:
        ValueError: If the contract has no such slice, or a rate is not above 0.
    """
    for slice, rate in traffic.items():
        if slice not in {ALL, *contract.slices}:
            raise ValueError(
                f"traffic: the contract has no slice {slice!r}; there are {', '.join((ALL, *contract.slices))}"
            )
        if not rate > 0.0:
            raise ValueError(f"traffic: {rate:g} sequences an hour on {slice} decide nothing; leave the slice out")
    sections = (("numerical", contract.numerical), ("statistical", contract.statistical), ("runtime", contract.runtime))
    return tuple(
        finding
        for section, clauses in sections
        for number, clause in enumerate(clauses)
        for finding in _findings(contract, clause, (section, number), traffic)
    )


def _findings(
    contract: Contract, clause: Clause, here: tuple[str, int], traffic: Mapping[str, float]
) -> Iterator[LintFinding]:
    span = max(contract.observability.long_window, contract.observability.window)
    for slice, rate in traffic.items():
        held = _in_window(contract, clause, rate * span / 3600.0)
        if held is None:
            continue
        needed = observations_to_pass(contract, clause, slice)
        takes = None if needed.observations is None else max(needed.observations, needed.minimum)
        if takes is not None and takes <= held:
            continue
        most = "no number of observations is enough" if takes is None else f"it takes {rounded(takes):,} {needed.unit}s"
        where = f"on {slice} no PASS is possible: {most}, and {format_duration(span)} has {held:,.0f}"
        if mean_test(clause, contract.assumptions, slice) is None:
            said = f"{where}; and a FAIL stays forever, because only a PASS ends it for this statistic"
        else:
            said = f"{where}; an incident still ends once its fault is refuted, but a promotion waits forever"
        yield LintFinding(
            (*here, "limit"), f"{said}; loosen the limit, cap the mean, or lengthen long_window", "warning"
        )


def _in_window(contract: Contract, clause: Clause, sequences: float) -> float | None:
    """Observations among so many sequences; None where that cannot be told."""
    per = None if clause.quantity is None else clause.quantity.per
    if per is Unit.SEQUENCE or per is Unit.PROMPT:
        return sequences
    horizon = contract.assumptions.horizon
    return sequences * horizon if per is Unit.TOKEN and horizon is not None else None
