"""PromQL of the dashboards on the drift histograms themselves, as the recorders send them.

They are native histograms in Prometheus and Mimir, of at most 4 % resolution. What is computed here carries no
confidence: verdicts come from the evaluator.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from kc_otel.contract.prometheus_names import label, prometheus_name, selector
from kc_otel.contract.registry import RECORDED
from kc_otel.generate.grafana.queries import by, picked

__all__ = ["OF_SLICE", "chosen_histogram", "histogram", "mean", "quantile", "scaled"]

OF_SLICE: Final = ("kc.contract", "kc.slice")
_STREAM: Final = ("kc.contract", "kc.slice", "kc.kernel.train", "kc.kernel.inference")


def histogram(quantity: str, attributes: Iterable[str] = OF_SLICE) -> str:
    """Observations per second of a quantity of the registry, as a histogram."""
    known = tuple(attributes)
    expression = _rate(f"{prometheus_name(RECORDED[quantity])}{{{', '.join(picked(_STREAM))}}}")
    return by(known, expression, "sum") if known else f"sum({expression})"


def chosen_histogram() -> str:
    """Observations per second of the histogram that the variable `quantity` names, of the picked operators.

    The name is matched like a label, so that a clause without a histogram finds nothing and not everything.
    """
    matchers = ('__name__="$quantity"', *picked(_STREAM), f'{label("kc.operator")}=~"$operator"')
    return f"sum({_rate('{' + ', '.join(matchers) + '}')})"


def mean(quantity: str) -> str:
    """Mean of a quantity, exact, by contract and slice."""
    return f"histogram_avg({histogram(quantity)})"


def quantile(rank: float, of: str) -> str:
    """A quantile of a histogram, to its resolution."""
    return f"histogram_quantile({rank:g}, {of})"


def scaled(quantity: str, metric: str) -> str:
    """A derived metric by contract and slice: the mean of its base times the contract's factor.

    Contracts whose assumptions do not make the factor are left out.
    """
    of = label("kc.contract")
    factor = by(("kc.contract",), selector("kc.contract.factor", {"kc.clause.metric": metric}))
    return f"{mean(quantity)} * on ({of}) group_left () {factor}"


def _rate(selected: str) -> str:
    return f"rate({selected}[$__rate_interval])"
