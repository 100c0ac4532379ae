"""The escalation policy Pi as a contract writes it: a ladder of steps, and what each of them does."""

from __future__ import annotations

import re
from typing import Any, Final, Literal

from pydantic import Field, model_validator

from kc_otel.contract.fields import NAME_PATTERN, Duration, Name, Strict

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
