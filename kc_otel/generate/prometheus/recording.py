"""Recording rules that judge a contract from the recorders' own histograms, without the evaluator.

Per clause, in this order, because each rule reads the ones before it: what either window holds; how many observations
it is sure to hold; the statistic and its bounds (`closed_forms`); the limit; a verdict per window; the verdict of the
cell, the short window's where that decides and else the long one's; and the numbers of the window that decided.

`increase` extrapolates to the ends of its range: by less than 1.1 steps at either end, so with k samples in the range a
count is at most 1 + 2.2/(k - 1) times what was counted. A mean, a share or a quantile is not touched by that; a number
of observations is divided by it, and so never too large.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from kc_otel.contract.clause import Clause
from kc_otel.contract.model import Contract
from kc_otel.contract.slices import ALL, OTHER
from kc_otel.contract.units import format_duration
from kc_otel.evaluator.statistics import samples_needed
from kc_otel.evaluator.verdict import Status
from kc_otel.generate.ladder import CELL_LABELS
from kc_otel.generate.names import label, metric, prometheus_name, selector
from kc_otel.generate.prometheus.closed_forms import forms

__all__ = ["clause_rules", "expressible", "left_out"]

_EXTRAPOLATED: Final = 2.2
_CELL: Final = ", ".join(CELL_LABELS)
_PAIR: Final = ", ".join(CELL_LABELS[1:])
_WINDOWS: Final = ("short", "long")
_BOUNDS: Final = ("estimate", "lower", "upper", "samples")


def expressible(contract: Contract) -> tuple[Clause, ...]:
    """The clauses that rules can judge: those on what recorders send."""
    return tuple(clause for clause in contract.clauses if clause.quantity is not None)


def left_out(contract: Contract) -> tuple[Clause, ...]:
    """The clauses that rules cannot judge: those on others' histograms, which carry no slice and no kernels."""
    return tuple(clause for clause in contract.clauses if clause.quantity is None)


def clause_rules(clause: Clause, contract: Contract) -> Iterator[dict[str, Any]]:
    """The recording rules of a clause on a recorded quantity, in the order in which they have to run."""

    def rule(name: str, expr: str, window: str = "") -> dict[str, Any]:
        labels = {label("kc.contract"): contract.name, label("kc.clause"): clause.id}
        if window:
            labels[label("kc.window")] = window
        return {"record": metric(name), "expr": expr, "labels": labels}

    def own(name: str, window: str = "", **matchers: str) -> str:
        more = {"kc.window": window} if window else {}
        more |= {attribute.replace("_", "."): value for attribute, value in matchers.items()}
        return selector(name, {"kc.contract": contract.name, "kc.clause": clause.id, **more})

    histogram, samples = own("kc.rule.window.histogram"), own("kc.rule.window.samples")
    for window in _WINDOWS:
        yield rule("kc.rule.window.histogram", _observed(clause, contract, window), window)
    for window in _WINDOWS:
        yield rule("kc.rule.window.samples", _counted(clause, contract, window, own), window)
    found = forms(clause, contract, histogram, samples)
    yield rule("kc.rule.window.estimate", found.estimate)
    yield rule("kc.rule.window.lower", found.lower)
    yield rule("kc.rule.window.upper", found.upper)
    yield rule("kc.rule.limit", _limits(clause, contract, own))
    yield rule("kc.rule.window.status", _judged(clause, contract, own))
    yield rule("kc.rule.status", _decided(clause, contract, own))
    short = own("kc.rule.window.status", "short")
    for name in _BOUNDS:
        whole = f"kc.rule.window.{name}"
        deciding = f"{own(whole, 'short')} and on ({_CELL}) {short} != {Status.INCONCLUSIVE.code}"
        yield rule(
            f"kc.rule.{name}",
            f"(\n  max by ({_CELL}) ({deciding})\n  or\n  max by ({_CELL}) ({own(whole, 'long')})\n)\n"
            f"and on ({_CELL}) {own('kc.rule.status')}",
        )


def _raw(clause: Clause, contract: Contract) -> str:
    assert clause.quantity is not None
    operator = "" if clause.operator is None else f', {label("kc.operator")}="{clause.operator}"'
    cells = f'{label("kc.contract")}="{contract.name}", {label("kc.slice")}!="{OTHER}"{operator}'
    return f"{prometheus_name(clause.quantity)}{{{cells}}}"


def _seconds(contract: Contract, window: str) -> float:
    seen = contract.observability
    return seen.window if window == "short" else max(seen.long_window, seen.window)


def _observed(clause: Clause, contract: Contract, window: str) -> str:
    span = format_duration(_seconds(contract, window))
    return f"sum by ({_CELL}) (increase({_raw(clause, contract)}[{span}]))"


def _counted(clause: Clause, contract: Contract, window: str, own: Any) -> str:
    span = format_duration(_seconds(contract, window))
    exports = f"min by ({_CELL}) (count_over_time({_raw(clause, contract)}[{span}]) > 1)"
    counted = f"sum by ({_CELL}) (histogram_count({own('kc.rule.window.histogram', window)}))"
    return f"{counted}\n/ (1 + {_EXTRAPOLATED} / ({exports} - 1))"


def _limits(clause: Clause, contract: Contract, own: Any) -> str:
    def limited(slices: str, limit: float) -> str:
        cells = own("kc.rule.window.samples", "long").replace("}", f"{slices}}}")
        return f"max by ({_CELL}) ({cells}) * 0 + {limit!r}"

    special = [
        limited(f', {label("kc.slice")}="{name}"', clause.limit_for(name))
        for name in contract.slices
        if clause.limit_for(name) != clause.limit_for(ALL)
    ]
    return "\nor ".join([*special, limited("", clause.limit_for(ALL))])


def _judged(clause: Clause, contract: Contract, own: Any) -> str:
    """FAIL above the limit, PASS at or below it, and INCONCLUSIVE between or with too few observations."""
    limit = f"on ({_CELL}) group_left () {own('kc.rule.limit')}"
    enough = f"({own('kc.rule.window.samples')} >= bool {samples_needed(clause, contract.observability)})"
    fails = f"({own('kc.rule.window.lower')} > bool {limit})"
    passes = f"({own('kc.rule.window.upper')} <= bool {limit})"
    doubt = Status.INCONCLUSIVE.code
    return (
        f"{doubt} + {Status.FAIL.code - doubt} * {fails} * {enough}\n- {doubt - Status.PASS.code} * {passes} * {enough}"
    )


def _decided(clause: Clause, contract: Contract, own: Any) -> str:
    """The verdict of each cell of the current kernel pairs.

    A pair is current while it has observations in the short window; where no pair has, all are. A cell without
    observations in the long window has no data, and none has when nothing at all arrived for two heartbeats.
    """
    status, samples = "kc.rule.window.status", "kc.rule.window.samples"
    observed = f"max by ({_CELL}) ({own(samples, 'long')})"
    verdict = (
        f"    max by ({_CELL}) ({own(status, 'short')} != {Status.INCONCLUSIVE.code})\n"
        f"    or\n    max by ({_CELL}) ({own(status, 'long')})"
    )
    heard = f"count(count_over_time({_raw(clause, contract)}[{format_duration(2 * contract.observability.heartbeat)}]))"
    current = f"max by ({_PAIR}) ({own(samples, 'short', kc_slice=ALL)} > 0)"
    cells = (
        f"  (\n{verdict}\n  )\n  and on ({_CELL}) ({observed} > 0)\n  and on () {heard}\n"
        f"  or\n  {observed} * 0 + {Status.NO_DATA.code}"
    )
    return (
        f"(\n{cells}\n)\nunless on ({_PAIR}) (\n  {observed}\n  unless on ({_PAIR}) {current}\n  and on () {current}\n)"
    )
