"""How a kernel version comes to serve, as a contract writes it: what each stage asks for, and how traffic grows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, PlainSerializer, WithJsonSchema, field_validator

from kc_otel.contract.errors import Loc, ProblemLevel
from kc_otel.contract.fields import Number, Strict
from kc_otel.contract.units import parse_limit

__all__ = ["SAMPLING_PARAMETERS", "PromotionTerms", "diff_promotion", "lint_promotion", "shown_share"]

_STEPS: Final = (0.01, 0.05, 0.25)
_FLAGS: Final = ("logit_bias", "allowed_token_ids", "bad_words", "structured_outputs", "watermarking")
SAMPLING_PARAMETERS: Final = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "min_tokens", "thinking_token_budget", *_FLAGS
)  # fmt: skip
"""What changes the distribution that tokens are drawn from, by vLLM's names; the last five are there, or are not."""


def _share(value: object) -> float:
    try:
        share = parse_limit(value, "1")
    except ValueError:
        share = math.nan
    if not 0.0 < share < 1.0:
        msg = f"{value!r} is not a share of the traffic; write one such as 5%; everything is the stage full"
        raise ValueError(msg)
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
    """What a kernel version has to show before it serves more: offline CI, shadow, canary in steps, full."""

    windows: int = Field(default=3, ge=1, le=100, strict=True)
    """Consecutive windows without shared data in which every clause is PASS on every slice, before each step."""
    steps: tuple[TrafficShare, ...] = Field(default=_STEPS, min_length=1, max_length=20)
    """Share of the requests that the version serves at each step of the canary, growing."""
    failure_limit: int = Field(default=1, ge=1, le=100, strict=True)
    """Windows without shared data in which something FAILs, until the version is rolled back."""
    approve: tuple[Literal["shadow", "canary", "full"], ...] = Field(default=(), max_length=3)
    """Stages that a person has to let a version into, once its gate is open."""
    skip: tuple[Literal["offline-ci", "shadow"], ...] = Field(default=(), max_length=2)
    """Stages that this team does not have."""
    sampling: dict[str, Annotated[tuple[bool | Number, ...], Field(min_length=1, max_length=20)]] = Field(
        default_factory=dict,
        max_length=len(SAMPLING_PARAMETERS),
        json_schema_extra={"propertyNames": {"enum": [*SAMPLING_PARAMETERS]}},
    )
    """Sampling parameters, as vLLM calls them, and the values that a recording for offline-ci may be made with. Each
    sequence has to say those that are listed; others have to change nothing."""

    @field_validator("sampling")
    @classmethod
    def _known(cls, value: dict[str, tuple[bool | float, ...]]) -> dict[str, tuple[bool | float, ...]]:
        for name, values in value.items():
            if name not in SAMPLING_PARAMETERS:
                msg = f"{name!r} is no sampling parameter; there are {', '.join(SAMPLING_PARAMETERS)}"
                raise ValueError(msg)
            for one in values:
                if isinstance(one, bool) is not (name in _FLAGS):
                    msg = f"{name}: {one!r} is not {'true or false' if name in _FLAGS else 'a number'}"
                    raise ValueError(msg)
                if (name == "temperature" and not one > 0.0) or (name == "top_p" and not 0.0 < one <= 1.0):
                    msg = f"{name}: {one:g} samples nothing that drift could be told from; write one above 0"
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


def lint_promotion(written: PromotionTerms) -> Iterator[tuple[Loc, str, ProblemLevel]]:
    """Place, message and level of what no field of the section can say on its own."""
    for name in ("approve", "skip"):
        stages = getattr(written, name)
        for place, stage in enumerate(stages):
            if stage in stages[:place]:
                yield ("promotion", name, place), f"{stage} is there twice; keep one", "error"
    if "shadow" in written.skip and "shadow" in written.approve:
        place = written.approve.index("shadow")
        yield ("promotion", "approve", place), "nobody is asked about a stage that is skipped; leave it out", "error"


_Difference = tuple[Literal["tightens", "loosens", "adds", "drops", "changes"], str, Any, Any, str]


def diff_promotion(before: PromotionTerms, after: PromotionTerms) -> Iterator[_Difference]:
    """Kind, field, old, new and a sentence for every difference."""
    if before.windows != after.windows:
        kind: Literal["tightens", "loosens"] = "loosens" if after.windows < before.windows else "tightens"
        sentence = f"a step asks for {after.windows} windows of PASS instead of {before.windows}"
        yield kind, "promotion.windows", before.windows, after.windows, sentence
    if before.failure_limit != after.failure_limit:
        kind = "loosens" if after.failure_limit > before.failure_limit else "tightens"
        sentence = f"a version is rolled back after {after.failure_limit} failing windows, not {before.failure_limit}"
        yield kind, "promotion.failure_limit", before.failure_limit, after.failure_limit, sentence
    if before.steps != after.steps:
        steps = [", ".join(map(shown_share, one.steps)) for one in (before, after)]
        sentence = f"a canary serves {steps[1]} instead of {steps[0]}"
        yield _steps(before.steps, after.steps), "promotion.steps", steps[0], steps[1], sentence
    for stage in sorted({*before.approve} ^ {*after.approve}):
        kind = "loosens" if stage in before.approve else "tightens"
        who = "nobody has to" if stage in before.approve else "a person has to"
        yield kind, "promotion.approve", list(before.approve), list(after.approve), f"{who} let a version into {stage}"
    for skipped in sorted({*before.skip} ^ {*after.skip}):
        kind = "tightens" if skipped in before.skip else "loosens"
        what = "asked for again" if skipped in before.skip else "skipped"
        yield kind, "promotion.skip", list(before.skip), list(after.skip), f"stage {skipped} is {what}"
    if before.sampling != after.sampling:
        yield (
            _sampling(before.sampling, after.sampling),
            "promotion.sampling",
            before.sampling,
            after.sampling,
            ("recordings may be made with other sampling parameters"),
        )


def _sampling(before: dict[str, Any], after: dict[str, Any]) -> Literal["tightens", "loosens"]:
    """Values that might not be used before loosen, and so does what need not be said any more.

    A parameter that was not listed might not be used at all, so that listing it loosens too, whatever its values.
    """
    more = not after or (before and any({*values} - {*before.get(name, ())} for name, values in after.items()))
    return "loosens" if more or {*before} - {*after} else "tightens"


def _steps(before: tuple[float, ...], after: tuple[float, ...]) -> Literal["tightens", "loosens"]:
    """A jump between two shares that no gate stands between any more is a loosening, wherever it is."""
    reached = (0.0, *after, 1.0)
    for low, high in pairwise(reached):
        if any(low < share < high for share in before):
            return "loosens"
    return "tightens"
