"""Terms of promotion in a contract: the requirements of each stage, and the growth of traffic."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Annotated, Final, Literal

from pydantic import BeforeValidator, Field, PlainSerializer, WithJsonSchema, field_validator

from kc_otel.contract.fields import Number, Strict
from kc_otel.contract.units import parse_limit

_CANARY_SHARES: Final = (0.01, 0.05, 0.25)
_FLAGS: Final = ("logit_bias", "allowed_token_ids", "bad_words", "structured_outputs", "watermarking")
SAMPLING_PARAMETERS: Final = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "min_tokens", "thinking_token_budget", *_FLAGS
)  # fmt: skip
"""Parameters that change the distribution that tokens are drawn from, by vLLM's names; the last five are present or
absent, without a value."""


def _share(value: object) -> float:
    try:
        share = parse_limit(value, "1")
    except ValueError:
        share = math.nan
    if not 0.0 < share < 1.0:
        raise ValueError(f"{value!r} is not a share of the traffic between 0 and 100%; write one such as 5%")
    return share


def shown_share(share: float) -> str:
    """A share of the traffic as people write it.

    >>> shown_share(0.05)
    '5%'
    """
    return f"{100 * share:.12g}%"


TrafficShare = Annotated[
    float,
    BeforeValidator(_share),
    PlainSerializer(shown_share, return_type=str),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
                {"type": "string", "pattern": r"^\s*[0-9]+(\.[0-9]*)?\s*%\s*$"},
            ],
            "examples": ["5%", 0.05],
        }
    ),
]


class PromotionTerms(Strict):
    """Requirements for a kernel version to serve more traffic: stages offline CI, shadow, canary in steps, and full."""

    windows: int = Field(default=3, ge=1, le=100, strict=True)
    """Consecutive windows, without shared data, in which every clause must PASS on every slice before each step."""
    steps: tuple[TrafficShare, ...] = Field(default=_CANARY_SHARES, min_length=1, max_length=20)
    """Shares of the requests that the version serves at the steps of the canary, in increasing order."""
    failure_limit: int = Field(default=1, ge=1, le=100, strict=True)
    """Number of failing windows (without shared data) after which the version is rolled back."""
    approve: tuple[Literal["shadow", "canary", "full"], ...] = Field(default=(), max_length=3)
    """Stages that a person must approve once the gate is open."""
    skip: tuple[Literal["offline-ci", "shadow"], ...] = Field(default=(), max_length=2)
    """Stages to skip."""
    sampling: dict[str, Annotated[tuple[bool | Number, ...], Field(min_length=1, max_length=20)]] = Field(
        default_factory=dict,
        max_length=len(SAMPLING_PARAMETERS),
        json_schema_extra={"propertyNames": {"enum": [*SAMPLING_PARAMETERS]}},
    )
    """Sampling parameters, by vLLM's names, with the values that a recording for offline-ci may use. Each sequence must
    state every listed parameter; other parameters must have no effect."""

    @field_validator("sampling")
    @classmethod
    def _known(cls, value: dict[str, tuple[bool | float, ...]]) -> dict[str, tuple[bool | float, ...]]:
        for name, values in value.items():
            if name not in SAMPLING_PARAMETERS:
                raise ValueError(f"{name!r} is not a sampling parameter; write one of {', '.join(SAMPLING_PARAMETERS)}")
            for entry in values:
                if isinstance(entry, bool) is not (name in _FLAGS):
                    raise ValueError(f"{name}: {entry!r} is not {'true or false' if name in _FLAGS else 'a number'}")
                if (name == "temperature" and not entry > 0.0) or (name == "top_p" and not 0.0 < entry <= 1.0):
                    msg = f"{name}: drift cannot be measured at {entry:g}; write a value above 0"
                    raise ValueError(msg + " and at most 1" * (name == "top_p"))
        return value

    @field_validator("steps")
    @classmethod
    def _growing(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        for before, after in pairwise(value):
            if after <= before:
                msg = f"{shown_share(after)} comes after {shown_share(before)}; write each step larger than the last"
                raise ValueError(msg)
        return value
