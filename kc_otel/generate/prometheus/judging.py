"""From a clause's histograms to its verdict, as the steps of a chain of queries.

In this order, because each step reads the ones before it: the statistic and its bounds (`closed_forms`); the limit; a
verdict per window; the verdict of the cell, the short window's where that decides and else the long one's; and the
numbers of the window that decided.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Protocol

from kc_otel.contract.clause import Clause
from kc_otel.contract.model import Contract
from kc_otel.contract.slices import ALL
from kc_otel.contract.units import format_duration
from kc_otel.generate.alert_steps import CELL_LABELS
from kc_otel.generate.prometheus.closed_forms import NOT_ONE, forms
from kc_otel.generate.prometheus.histogram_queries import Reading
from kc_otel.judge.statistics import samples_needed
from kc_otel.judge.verdict import Status

__all__ = ["BOUNDS", "CELL", "WINDOWS", "Own", "steps"]

CELL: Final = ", ".join(CELL_LABELS)
"""Labels of a cell of one clause."""
WINDOWS: Final = ("short", "long")
"""The windows that a clause is judged over; the first decides where it can."""
BOUNDS: Final = ("estimate", "lower", "upper", "samples")
"""What is told of the window that decided."""

_PAIR: Final = ", ".join(CELL_LABELS[1:])


class Own(Protocol):
    """How a query reads what an earlier step of the same clause found."""

    def __call__(self, name: str, window: str = "", slice: str = "") -> str:
        """The step's series, of one window and one slice if they are named."""


def steps(clause: Clause, contract: Contract, own: Own, histogram: Reading, heard: str) -> Iterator[tuple[str, str]]:
    """Metric of the registry and query of each step.

    Args:
        clause: A clause on a recorded quantity.
        contract: Its contract.
        own: Reads an earlier step, and `kc.rule.window.samples`.
        histogram: What either window holds.
        heard: Selector of the series that recorders send for the clause.
    """
    found = forms(clause, contract, histogram, own("kc.rule.window.samples"))
    yield "kc.rule.window.estimate", found.estimate
    yield "kc.rule.window.lower", found.lower
    yield "kc.rule.window.upper", found.upper
    yield "kc.rule.limit", _limits(clause, contract, own)
    yield "kc.rule.window.status", _judged(clause, contract, own)
    yield "kc.rule.status", _decided(contract, own, heard)
    short = own("kc.rule.window.status", "short")
    for name in BOUNDS:
        whole = f"kc.rule.window.{name}"
        deciding = f"{own(whole, 'short')} and on ({CELL}) {short} != {Status.INCONCLUSIVE.code}"
        either = f"(\n  max by ({CELL}) ({deciding})\n  or\n  max by ({CELL}) ({own(whole, 'long')})\n)"
        yield f"kc.rule.{name}", f"{either}\nand on ({CELL}) {own('kc.rule.status')}"


def _limits(clause: Clause, contract: Contract, own: Own) -> str:
    def limited(slice: str, limit: float) -> str:
        return f"max by ({CELL}) ({own('kc.rule.window.samples', 'long', slice)}) * 0 + {limit!r}"

    special = [
        limited(name, clause.limit_for(name))
        for name in contract.slices
        if clause.limit_for(name) != clause.limit_for(ALL)
    ]
    return "\nor ".join([*special, limited("", clause.limit_for(ALL))])


def _judged(clause: Clause, contract: Contract, own: Own) -> str:
    """FAIL above the limit, PASS at or below it, and INCONCLUSIVE between or with too few observations.

    A maximum is broken by any number of them. A share of none is kept while none is seen; it takes more than one to
    break it here, because a store may count what is 0 as a little above.
    """
    limit = f"on ({CELL}) group_left () {own('kc.rule.limit')}"
    needed = samples_needed(clause, contract.observability)
    enough = f"({own('kc.rule.window.samples')} >= bool {needed})"
    any_ = f"({own('kc.rule.window.samples')} >= bool 1)" if clause.parsed_statistic.kind == "max" else enough
    fails = f"({own('kc.rule.window.lower')} > bool {limit})"
    passes = f"({own('kc.rule.window.upper')} <= bool {limit})"
    if all(clause.allows_none(slice) for slice in (ALL, *contract.slices)):
        seen = f"{own('kc.rule.window.estimate')} * {own('kc.rule.window.samples')}"
        passes = f"({seen} <= bool {NOT_ONE!r})"
    doubt = Status.INCONCLUSIVE.code
    return (
        f"{doubt} + {Status.FAIL.code - doubt} * {fails} * {any_}\n- {doubt - Status.PASS.code} * {passes} * {enough}"
    )


def _decided(contract: Contract, own: Own, heard: str) -> str:
    """The verdict of each cell of the current kernel pairs.

    A pair is current while it has observations in the short window; where no pair has, all are. A cell without
    observations in the long window has no data, and none has when nothing at all arrived for two heartbeats.
    """
    status, samples = "kc.rule.window.status", "kc.rule.window.samples"
    observed = f"max by ({CELL}) ({own(samples, 'long')})"
    verdict = (
        f"    max by ({CELL}) ({own(status, 'short')} != {Status.INCONCLUSIVE.code})\n"
        f"    or\n    max by ({CELL}) ({own(status, 'long')})"
    )
    lately = f"count(count_over_time({heard}[{format_duration(2 * contract.observability.heartbeat)}]))"
    current = f"max by ({_PAIR}) ({own(samples, 'short', ALL)} > 0)"
    cells = (
        f"  (\n{verdict}\n  )\n  and on ({CELL}) ({observed} > 0)\n  and on () {lately}\n"
        f"  or\n  {observed} * 0 + {Status.NO_DATA.code}"
    )
    return (
        f"(\n{cells}\n)\nunless on ({_PAIR}) (\n  {observed}\n  unless on ({_PAIR}) {current}\n  and on () {current}\n)"
    )
