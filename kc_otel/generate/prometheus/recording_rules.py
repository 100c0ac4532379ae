"""Recording rules that judge a contract from the recorders' own native histograms, without the evaluator.

Per clause, in this order, because each rule reads the ones before it: what either window holds; how many observations
it is sure to hold; and then the steps of `judging`.

`increase` extrapolates to the ends of its range: by less than 1.1 steps at either end, so with k samples in the range a
count is at most 1 + 2.2/(k - 1) times what was counted. A mean, a share or a quantile is not touched by that; a number
of observations is divided by it, and so never too large.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from kc_otel.contract.clause import Clause
from kc_otel.contract.model import Contract
from kc_otel.contract.prometheus_names import label, metric, prometheus_name, selector
from kc_otel.contract.slices import OTHER
from kc_otel.contract.units import format_duration
from kc_otel.generate.prometheus.histogram_queries import Native
from kc_otel.generate.prometheus.judging import CELL, WINDOWS, steps

__all__ = ["clause_rules", "expressible", "left_out", "recorded", "rule", "seconds"]

_EXTRAPOLATED: Final = 2.2


def expressible(contract: Contract) -> tuple[Clause, ...]:
    """The clauses that rules can judge: those on one histogram that recorders send."""
    return tuple(clause for clause in contract.clauses if clause.quantity is not None and clause.opposite is None)


def left_out(contract: Contract) -> tuple[Clause, ...]:
    """The clauses that rules cannot judge.

    Others' histograms carry no slice and no kernels; and what two histograms bound from either side, by bets on their
    buckets, has no closed form.
    """
    judged = expressible(contract)
    return tuple(clause for clause in contract.clauses if clause not in judged)


def clause_rules(clause: Clause, contract: Contract) -> Iterator[dict[str, Any]]:
    """The recording rules of a clause on a recorded quantity, in the order in which they have to run."""

    def own(name: str, window: str = "", slice: str = "") -> str:
        matchers = {"kc.contract": contract.name, "kc.clause": clause.id}
        matchers |= {"kc.window": window} if window else {}
        return selector(name, matchers | ({"kc.slice": slice} if slice else {}))

    assert clause.quantity is not None
    raw = f"{prometheus_name(clause.quantity)}{{{recorded(clause, contract)}}}"
    for window in WINDOWS:
        span = format_duration(seconds(contract, window))
        yield rule(clause, contract, "kc.rule.window.histogram", f"sum by ({CELL}) (increase({raw}[{span}]))", window)
    for window in WINDOWS:
        span = format_duration(seconds(contract, window))
        exports = f"min by ({CELL}) (count_over_time({raw}[{span}]) > 1)"
        counted = f"sum by ({CELL}) (histogram_count({own('kc.rule.window.histogram', window)}))"
        sure = f"{counted}\n/ (1 + {_EXTRAPOLATED} / ({exports} - 1))"
        yield rule(clause, contract, "kc.rule.window.samples", sure, window)
    for name, expr in steps(clause, contract, own, Native(own("kc.rule.window.histogram")), raw):
        yield rule(clause, contract, name, expr)


def rule(clause: Clause, contract: Contract, name: str, expr: str, window: str = "") -> dict[str, Any]:
    """A recording rule of a metric of the registry."""
    labels = {label("kc.contract"): contract.name, label("kc.clause"): clause.id}
    if window:
        labels[label("kc.window")] = window
    return {"record": metric(name), "expr": expr, "labels": labels}


def recorded(clause: Clause, contract: Contract) -> str:
    """Matchers of what recorders send for a clause."""
    operator = "" if clause.operator is None else f', {label("kc.operator")}="{clause.operator}"'
    return f'{label("kc.contract")}="{contract.name}", {label("kc.slice")}!="{OTHER}"{operator}'


def seconds(contract: Contract, window: str) -> float:
    """Length of the window `short` or `long`."""
    seen = contract.observability
    return seen.window if window == "short" else max(seen.long_window, seen.window)
