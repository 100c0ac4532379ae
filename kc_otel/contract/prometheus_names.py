"""Prometheus names of what the registry calls by OpenTelemetry names, for `/metrics`, dashboards and rules alike.

The translation is OpenTelemetry's, except that unit `1` adds no suffix: `_ratio` says nothing about a verdict.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from kc_otel.contract.registry.clause_metrics import Quantity
from kc_otel.contract.registry.own_metrics import ATTRIBUTES, METRICS, Instrument, Metric
from kc_otel.contract.slices import ALL

_SUFFIXES: Final[dict[str, str]] = {"s": "_seconds", "ms": "_milliseconds", "By": "_bytes", "%": "_percent"}
_INVALID_CHARACTER: Final = re.compile(r"[^a-zA-Z0-9_]")


def prometheus_name(metric: Metric | Quantity) -> str:
    """Prometheus name of a metric: dots to underscores, the unit's suffix, `_total` for counters."""
    name = _INVALID_CHARACTER.sub("_", metric.name)
    suffix = _SUFFIXES.get(metric.unit, "")
    if suffix and not name.endswith(suffix):
        name += suffix
    if isinstance(metric, Metric) and metric.instrument is Instrument.COUNTER:
        name += "_total"
    return name


def label_name(attribute: str) -> str:
    """Prometheus label of an attribute: `kc.kernel.train` becomes `kc_kernel_train`."""
    return _INVALID_CHARACTER.sub("_", attribute)


def metric(name: str) -> str:
    """Prometheus name of the registry's metric of this OpenTelemetry name; KeyError if there is none."""
    return prometheus_name(METRICS[name])


def label(name: str) -> str:
    """Prometheus label of the registry's attribute of this name; KeyError if there is none."""
    return label_name(ATTRIBUTES[name].name)


def selector(name: str, matchers: Mapping[str, str] | None = None, *more: str) -> str:
    """A PromQL selector of a registry metric: attributes with their values, and further matchers in PromQL."""
    parts = [f'{label(attribute)}="{value}"' for attribute, value in (matchers or {}).items()]
    return f"{metric(name)}{{{', '.join((*parts, *more))}}}"


INVALID_ONCE: Final = f'{label("kc.slice")}=~"{ALL}|"'
"""Matcher of `kc.input.invalid` that counts each sequence once: on all traffic, or where nobody knows its slices."""
