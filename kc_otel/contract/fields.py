"""Kinds of fields that several parts of a contract have."""

from __future__ import annotations

import re
from typing import Annotated, Final

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, WithJsonSchema

from kc_otel.contract.units import format_duration, parse_duration

NAME_PATTERN: Final = r"^[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?$"
Name = Annotated[str, Field(pattern=NAME_PATTERN)]
OPERATOR_PATTERN: Final = r"^[A-Za-z0-9_]([A-Za-z0-9_.:/-]{0,98}[A-Za-z0-9_])?$"
"""Names of modules and of `torch.ops` operators have dots, colons and capitals; each is an attribute of metrics."""


def operator_name(name: str) -> str:
    """Return the name, if it can be an operator's, such as `aten::linear`; else raise ValueError."""
    if not re.fullmatch(OPERATOR_PATTERN, name):
        shown = repr(name if len(name) <= 60 else f"{name[:60]}...")
        raise ValueError(
            f"{shown} cannot name an operator (letters, digits, and . : / - _ within; at most 100); "
            "write a name such as attention or model.layers.0.mlp"
        )
    return name


OperatorName = Annotated[
    str,
    AfterValidator(operator_name),
    WithJsonSchema({"type": "string", "pattern": OPERATOR_PATTERN, "examples": ["attention", "model.layers.0.mlp"]}),
]
Number = Annotated[float, Field(strict=True)]
"""A number that is written as one: neither true nor "0.5" in quotes."""
Duration = Annotated[
    float,
    BeforeValidator(parse_duration),
    Field(le=366 * 86400.0),
    PlainSerializer(format_duration, return_type=str),
    WithJsonSchema({"type": "string", "pattern": r"^(\d+(\.\d+)?(ns|us|ms|s|m|h|d))+$", "examples": ["5m", "1h30m"]}),
]
RawLimit = Annotated[Number | str, WithJsonSchema({"type": ["number", "string"], "examples": [0.004, "800ms", "2%"]})]


class Strict(BaseModel):
    """A part of a contract: unknown keys are refused, and nothing changes once it is made."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False, use_attribute_docstrings=True)
