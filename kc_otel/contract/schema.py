"""JSON Schema of a contract, for editors and for other languages. It is made from the model, never written by hand."""

from __future__ import annotations

from typing import Any, Final

from kc_otel.contract.fields import NAME_PATTERN
from kc_otel.contract.model import Contract
from kc_otel.contract.policy import ROUTE_TARGET, Action
from kc_otel.contract.registry.clause_metrics import DERIVED, QUANTITIES, Derived, Quantity
from kc_otel.contract.slices import ALL, UNJUDGED

SCHEMA_ID: Final = "urn:kc-otel:kernel-contract:v1"
_DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
_STATISTIC: Final = (
    r"^\s*(mean|max|p[0-9]{1,2}(\.[0-9]{1,4})?"
    r"|fraction\s*>\s*[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?)\s*$"
)


def json_schema() -> dict[str, Any]:
    """The schema (draft 2020-12): it accepts what the loader does, but for what takes two places to see."""
    schema = Contract.model_json_schema(by_alias=True)
    definitions = schema["$defs"]
    clause = definitions["Clause"]["properties"]
    known: tuple[Quantity | Derived, ...] = (*QUANTITIES.values(), *DERIVED.values())
    del clause["metric"]["type"]
    clause["metric"]["anyOf"] = [
        *({"const": metric.key, "description": metric.meaning} for metric in known),
        {"type": "string", "pattern": r"^gen_ai\.", "description": "An OpenTelemetry GenAI histogram."},
    ]
    clause["statistic"]["anyOf"][0]["pattern"] = _STATISTIC
    clause["slices"]["additionalProperties"] = False
    schema["properties"]["slices"]["additionalProperties"] = False
    schema["properties"]["slices"]["propertyNames"] = {"not": {"enum": [ALL, *sorted(UNJUDGED)]}}
    definitions["Action"] = _action(definitions["Action"]["description"])
    definitions["Contract"] = {
        key: schema.pop(key) for key in ("type", "properties", "required", "additionalProperties", "description")
    }
    return {
        "$schema": _DIALECT,
        "$id": SCHEMA_ID,
        "title": "Kernel contract",
        "description": definitions["Contract"].pop("description"),
        **definitions.pop("Contract"),
        "$defs": definitions,
    }


def _action(description: str) -> dict[str, Any]:
    kinds = Action.model_json_schema()["properties"]["kind"]["enum"]
    bare = [kind for kind in kinds if kind not in {"route", "webhook"}]
    targets = {
        "route": {"const": ROUTE_TARGET, "description": "Kernel that the slice is sent to."},
        "webhook": {"type": "string", "pattern": NAME_PATTERN, "description": "Name of an endpoint."},
    }
    short = [
        {"type": "object", "properties": {kind: target}, "required": [kind], "additionalProperties": False}
        for kind, target in targets.items()
    ]
    return {"description": description, "anyOf": [{"enum": bare}, *short]}
