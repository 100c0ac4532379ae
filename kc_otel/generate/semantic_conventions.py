"""The registry of names as a semantic-convention registry that others can import, in the v2 syntax of Weaver.

https://github.com/open-telemetry/weaver/blob/main/schemas/semconv-syntax.v2.md
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import Any, Final

from kc_otel.contract.registry import (
    ATTRIBUTES,
    METRICS,
    OPERATORS,
    QUANTITIES,
    Attribute,
    Instrument,
    Metric,
    Quantity,
)
from kc_otel.generate.files import GeneratedFile, as_yaml

__all__ = ["semantic_convention_files"]

_DEVELOPMENT: Final = {"stability": "development"}
_INSTRUMENT: Final = {
    Instrument.EXPONENTIAL_HISTOGRAM: "histogram",
    Instrument.HISTOGRAM: "histogram",
    Instrument.COUNTER: "counter",
    Instrument.GAUGE: "gauge",
}
_OF_DRIFT: Final = ("kc.contract", "kc.slice", "kc.kernel.train", "kc.kernel.inference")
_RULE: Final = "kc.rule."
_SCHEMA_URL: Final = "https://github.com/kc-otel/kc-otel/semconv/0.1.0"


def semantic_convention_files() -> tuple[GeneratedFile, ...]:
    """A manifest, and the attributes, metrics and span; recording rules of Prometheus are no telemetry of ours."""
    manifest = {
        "description": "Drift between the training and the inference kernel of a policy, and what contracts say of it.",
        "schema_url": _SCHEMA_URL,
        **_DEVELOPMENT,
    }
    metrics = [
        *(_drift(each) for each in QUANTITIES.values()),
        *(_metric(each) for each in METRICS.values() if not each.name.startswith(_RULE)),
    ]
    return (
        _file("manifest.yaml", manifest),
        _definitions("attributes.yaml", attributes=[_attribute(each) for each in ATTRIBUTES.values()]),
        _definitions("metrics.yaml", metrics=metrics),
        _definitions("spans.yaml", spans=[_comparison()]),
    )


def _attribute(attribute: Attribute) -> dict[str, Any]:
    return {"key": attribute.name, "type": attribute.type, "brief": attribute.meaning, **_DEVELOPMENT}


def _drift(quantity: Quantity) -> dict[str, Any]:
    names = (*_OF_DRIFT, "kc.operator") if quantity.key in OPERATORS else _OF_DRIFT
    return {
        "name": quantity.name,
        "instrument": _INSTRUMENT[Instrument.EXPONENTIAL_HISTOGRAM],
        "unit": quantity.unit,
        "brief": quantity.meaning,
        "note": f"One observation for each {quantity.per}. Definition: {quantity.source_text}.",
        **_DEVELOPMENT,
        "attributes": _references(names, required=names),
    }


def _metric(metric: Metric) -> dict[str, Any]:
    found: dict[str, Any] = {
        "name": metric.name,
        "instrument": _INSTRUMENT[metric.instrument],
        "unit": metric.unit,
        "brief": metric.meaning,
        **_DEVELOPMENT,
    }
    if metric.attributes:
        found["attributes"] = _references(metric.attributes, required=metric.attributes)
    return found


def _comparison() -> dict[str, Any]:
    names = [each.name for each in ATTRIBUTES.values() if "span" in each.on]
    return {
        "type": "kc.compare",
        "kind": "internal",
        "name": {"note": "kc.compare"},
        "brief": "One measured batch: both kernels' log-probabilities of the same tokens.",
        **_DEVELOPMENT,
        "attributes": _references(names, required=("kc.contract",)),
    }


def _references(names: Iterable[str], required: Iterable[str]) -> list[dict[str, str]]:
    levels = {True: "required", False: "recommended"}
    return [{"ref": name, "requirement_level": levels[name in required]} for name in names]


def _definitions(name: str, **groups: Any) -> GeneratedFile:
    return _file(name, {"file_format": "definition/2", **groups})


def _file(name: str, content: Any) -> GeneratedFile:
    return GeneratedFile(PurePosixPath("semconv", name), as_yaml(content))
