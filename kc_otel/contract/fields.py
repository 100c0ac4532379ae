"""Kinds of fields that several parts of a contract have."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, WithJsonSchema

from kc_otel.contract.units import format_duration, parse_duration

__all__ = ["NAME_PATTERN", "Duration", "Name", "Number", "RawLimit", "Strict"]

NAME_PATTERN: Final = r"^[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?$"
Name = Annotated[str, Field(pattern=NAME_PATTERN)]
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
