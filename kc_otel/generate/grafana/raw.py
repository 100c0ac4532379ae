"""PromQL of the dashboards on the drift histograms themselves, as the recorders send them.

They are native histograms in Prometheus and Mimir, of at most 4 % resolution. What is computed here carries no
confidence: verdicts come from the evaluator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from kc_otel.contract.clause import Clause
from kc_otel.contract.model import Contract
from kc_otel.contract.prometheus_names import label, prometheus_name, selector
from kc_otel.contract.registry import RECORDED
from kc_otel.generate.grafana.queries import by, one_of, picked

__all__ = [
    "OF_SLICE",
    "any_histogram",
    "histogram",
    "limits",
    "mean",
    "minimum_step",
    "of_each_contract",
    "quantile",
    "quantity_of",
    "scaled",
]

OF_SLICE: Final = ("kc.contract", "kc.slice")
_STREAM: Final = ("kc.contract", "kc.slice", "kc.kernel.train", "kc.kernel.inference")


def histogram(quantity: str, attributes: Iterable[str] = OF_SLICE) -> str:
    """Observations per second of a quantity of the registry, as a histogram."""
    return any_histogram(prometheus_name(RECORDED[quantity]), attributes)


def any_histogram(name: str, attributes: Iterable[str] = OF_SLICE, *more: str) -> str:
    """Observations per second of a histogram by its Prometheus name, which may be a variable; `more` are matchers."""
    selected = f"{name}{{{', '.join((*picked(_STREAM), *more))}}}"
    known = tuple(attributes)
    expression = f"rate({selected}[$__rate_interval])"
    return by(known, expression, "sum") if known else f"sum({expression})"


def mean(quantity: str) -> str:
    """Mean of a quantity, exact, by contract and slice."""
    return f"histogram_avg({histogram(quantity)})"


def quantile(rank: float, of: str) -> str:
    """A quantile of a histogram, to its resolution."""
    return f"histogram_quantile({rank:g}, {of})"


def of_each_contract(values: Mapping[str, float]) -> str:
    """A number for each contract, by name, as series that can be joined."""
    return " or ".join(
        f'label_replace(vector({value!r}), "{label("kc.contract")}", "{name}", "", "")'
        for name, value in values.items()
    )


def scaled(expression: str, values: Mapping[str, float]) -> str:
    """An expression by contract and slice, times each contract's number; contracts without one are left out."""
    return f"{expression} * on ({label('kc.contract')}) group_left () ({of_each_contract(values)})"


def limits(contracts: Iterable[Contract], wanted: Callable[[Clause], bool]) -> str:
    """The limits of some clauses, smallest by contract and slice; empty text when there are no such clauses."""
    parts = []
    for contract in contracts:
        ids = [clause.id for clause in contract.clauses if wanted(clause)]
        if ids:
            clauses = one_of("kc.clause", ids)
            matchers = {"kc.contract": contract.name}
            parts.append(selector("kc.bound.limit", matchers, clauses, *picked(_STREAM)))
    return by(OF_SLICE, " or ".join(parts), "min") if parts else ""


def quantity_of(contracts: Iterable[Contract]) -> str:
    """One series whose label `quantity` is the Prometheus name of the histogram behind `$contract`'s `$clause`."""
    names: dict[tuple[str, str], list[str]] = {}
    for contract in contracts:
        for clause in contract.clauses:
            if clause.quantity is not None:
                names.setdefault((contract.name, prometheus_name(clause.quantity)), []).append(clause.id)
    parts = []
    for (contract_name, name), ids in names.items():
        clauses = one_of("kc.clause", ids)
        chosen = (f'{label("kc.contract")}="$contract"', f'{label("kc.clause")}="$clause"', clauses)
        verdict = selector("kc.verdict", {"kc.contract": contract_name}, *chosen)
        parts.append(f'label_replace({verdict}, "quantity", "{name}", "", "")')
    return f"group by (quantity) ({' or '.join(parts)})"


def minimum_step(contracts: Iterable[Contract]) -> str:
    """Smallest step of rates of what recorders send: four of them, Grafana's rate interval, hold three exports.

    Recorders export three times per heartbeat unless they are told otherwise, which is more seldom than the data source
    is told: without a step of their own, rates would be of a single export, and empty.
    """
    slowest = max((contract.observability.heartbeat for contract in contracts), default=60.0)
    return f"{max(30, math.ceil(slowest / 4))}s"
