"""The escalation policy Pi as a contract writes it, a ladder of steps, and the terms of promotion, stage by stage."""

from __future__ import annotations

import math
import re
from itertools import pairwise
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, PlainSerializer, WithJsonSchema, field_validator, model_validator

from kc_otel.contract.fields import NAME_PATTERN, Duration, Name, Number, Strict
from kc_otel.contract.units import parse_limit

_BARE: Final = ("notify", "sample-more", "locate", "hold-promotion", "quarantine-rollouts", "resync-weights", "halt")
_TARGETED: Final = ("route", "webhook")
_ACTIVE_ACTIONS: Final = frozenset({"route", "hold-promotion", "quarantine-rollouts", "resync-weights", "halt"})
"""Actions that change what is served or trained, and not only who knows of it."""
REPEAT_SECONDS: Final = 4 * 3600.0
"""Seconds between reminders where a step does not say; Alertmanager's `repeat_interval` has the same default."""
ROUTE_TARGET: Final = "train-kernel"
"""The one kernel that a slice can be routed to: traffic without a route goes to the inference kernel."""


class Action(Strict):
    """Something that a step of the ladder does."""

    kind: Literal[
        "notify", "sample-more", "locate", "hold-promotion", "quarantine-rollouts", "resync-weights", "halt", "route",
        "webhook",
    ]  # fmt: skip
    target: str | None = None
    """Kernel for `route`, endpoint for `webhook`."""

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, value: Any) -> Any:
        if isinstance(value, Action) or (isinstance(value, dict) and "kind" in value):
            return value
        if isinstance(value, str):
            if value in _TARGETED:
                msg = f"{value!r} needs a target; write {{{value}: {ROUTE_TARGET if value == 'route' else 'NAME'}}}"
                raise ValueError(msg)
            if value not in _BARE:
                raise ValueError(f"{value!r} is not an action; write one of {', '.join((*_BARE, *_TARGETED))}")
            return {"kind": value}
        if isinstance(value, dict) and len(value) == 1:
            ((kind, target),) = value.items()
            if kind not in _TARGETED:
                raise ValueError(f"{kind!r} is not an action with a target; write route or webhook")
            return {"kind": kind, "target": target}
        raise ValueError(f"{value!r} is not an action; write a name such as notify, or {{webhook: NAME}}")

    @model_validator(mode="after")
    def _reachable(self) -> Action:
        if self.kind == "route" and self.target != ROUTE_TARGET:
            msg = f"route: {self.target!r} is not a kernel that a slice can be routed to; write {ROUTE_TARGET}"
            raise ValueError(msg)
        if self.kind == "webhook" and (not self.target or not re.fullmatch(NAME_PATTERN, self.target)):
            msg = f"webhook: {self.target!r} is not an endpoint's name; write lower-case letters, digits and dashes"
            raise ValueError(msg)
        return self

    @property
    def written(self) -> str | dict[str, str]:
        """The action as YAML writes it: `notify`, or `{webhook: pager}`."""
        return self.kind if self.target is None else {self.kind: self.target}

    def __str__(self) -> str:
        return self.kind if self.target is None else f"{self.kind}:{self.target}"


class EscalationStep(Strict):
    """One step of the escalation ladder."""

    on: Literal["fail", "no-data", "inconclusive", "invalid-input"]
    """Verdict that triggers the step; batches that failed an input check trigger `invalid-input`."""
    after: Duration = Field(default=0.0, alias="for")
    """Time that the verdict must last before the step fires."""
    clear_for: Duration = 0.0
    """Time that the verdict must be gone before the step resolves. For `fail`, only time in PASS, or since measurements
    refuted the fault or the run ended, counts: other NO_DATA and INCONCLUSIVE verdicts do not show that it is over."""
    repeat: Duration = REPEAT_SECONDS
    """Time after which an unacknowledged firing webhook is repeated; with `0s` it is sent once only. A person's
    acknowledgement ends the repeats until the step fires again."""
    severity: Literal["info", "warning", "critical"] = "warning"
    """Label of alerts and webhooks."""
    do: tuple[Action, ...] = Field(min_length=1, max_length=20)
    """Actions when the step fires. A route lasts until a person resumes it, other lasting actions until the step
    resolves."""
    clauses: tuple[Name, ...] = Field(default=(), max_length=200)
    """Only these clauses; all when empty."""

    def acts_on(self, clause: str) -> tuple[str, ...]:
        """Actions on a FAIL of a clause beyond telling and measuring more, or that it alerts."""
        if self.on != "fail" or (self.clauses and clause not in self.clauses):
            return ()
        done = tuple(action.kind for action in self.do if action.kind in _ACTIVE_ACTIONS)
        return (*done, f"{self.severity} alert") if self.severity == "critical" else done


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
