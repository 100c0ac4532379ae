"""The one registry of names: every quantity, metric and attribute that kc-otel measures, sends or stores.

A contract is refused against it, the recorder names its histograms by it, and dashboards, alerts and documentation
are checked against it. It lives beside the contract model because a contract's clauses are the first thing that
names a quantity; every other box may import it.
"""

from __future__ import annotations

from kc_otel.contract.registry.attributes import ATTRIBUTES, Attribute
from kc_otel.contract.registry.clause_metrics import (
    BY_SEQUENCE,
    DERIVED,
    OPERATORS,
    QUANTITIES,
    RECORDED,
    Derived,
    Origin,
    Quantity,
    Unit,
    known_metrics,
)
from kc_otel.contract.registry.own_metrics import METRICS, Instrument, Metric

__all__ = [
    "ATTRIBUTES",
    "BY_SEQUENCE",
    "DERIVED",
    "METRICS",
    "OPERATORS",
    "QUANTITIES",
    "RECORDED",
    "Attribute",
    "Derived",
    "Instrument",
    "Metric",
    "Origin",
    "Quantity",
    "Unit",
    "known_metrics",
]
