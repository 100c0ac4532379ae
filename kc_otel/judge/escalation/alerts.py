"""The policy's memory and its output: alerts, the state made of them, and transitions."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from kc_otel.contract.policy import Action
from kc_otel.judge.verdict import Cell, Verdict

__all__ = ["ROLLED_BACK", "WENT_AWAY", "Alert", "Phase", "PolicyState", "Transition", "What"]


ROLLED_BACK: Final = "rolled-back"
"""Step of what is said of a version that was rolled back: no contract writes it, for every roll-back is told."""
WENT_AWAY: Final = "went away without proof of recovery"
"""End of an alert that is over while its breach is unproven: an endpoint that was told this is told that it fires."""


class Phase(StrEnum):
    """Phase of an alert; a quiet alert is not stored."""

    PENDING = "pending"
    FIRING = "firing"


class What(StrEnum):
    """Kind of a transition."""

    FIRING = "firing"
    RESOLVED = "resolved"


@dataclass(frozen=True, slots=True)
class Transition:
    """One edge of one alert, on which webhooks, routes and promotion act.

    Attributes:
        contract: metadata.name.
        step: Key of the step, stable under reordering and under changes of its durations.
        on: Condition of the step: fail, no-data, inconclusive or invalid-input.
        cell: Cell of the alert.
        what: firing or resolved.
        at: Unix time of the edge, seconds; never before `started_at`.
        started_at: Unix time at which the alert fired, seconds.
        severity: info, warning or critical.
        actions: Actions of the step.
        verdict: Last verdict of the cell; when the cell has gone, the last one it had.
        fingerprint: 16 hex digits of contract, step and cell; the same for a firing and its resolve.
        end: Why missing data that still have no verdict are missed no more, as the end of a sentence; or WENT_AWAY.
    """

    contract: str
    step: str
    on: str
    cell: Cell
    what: What
    at: float
    started_at: float
    severity: str
    actions: tuple[Action, ...]
    verdict: Verdict
    fingerprint: str
    end: str = ""

    @property
    def incident(self) -> tuple[str, str, str]:
        """Key of its incident: `Incident.key`."""
        return self.on, self.cell.kernel_train, self.cell.kernel_inference


@dataclass(frozen=True, slots=True)
class Alert:
    """A step's state for one cell.

    Attributes:
        step: Key of the step.
        on: Condition of the step.
        severity: Label of the step.
        actions: Actions of the step; stored so that a step that left the contract can still be resolved.
        cell: Cell of the alert.
        phase: pending or firing.
        since: Unix time of the first matching verdict, seconds.
        started_at: Unix time of firing, seconds; None while pending.
        seen: Unix time of the last evaluation, seconds.
        counting: Whether the last evaluation counted towards `for` (pending) or `clear_for` (firing).
        held: Seconds counted so far towards `for` (pending) or `clear_for` (firing).
        verdict: Last verdict of the cell.
    """

    step: str
    on: str
    severity: str
    actions: tuple[Action, ...]
    cell: Cell
    phase: Phase
    since: float
    started_at: float | None
    seen: float
    counting: bool
    held: float
    verdict: Verdict

    @property
    def fingerprint(self) -> str:
        """16 hex digits that identify the alert: contract, step and cell."""
        cell = self.cell
        identity = [cell.contract, self.step, cell.clause, cell.slice, cell.kernel_train, cell.kernel_inference]
        return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class PolicyState:
    """Everything the policy remembers of one contract between evaluations.

    Attributes:
        contract: metadata.name.
        alerts: Pending and firing alerts, sorted by step and cell.
    """

    contract: str
    alerts: tuple[Alert, ...] = ()

    @property
    def firing(self) -> tuple[Alert, ...]:
        """The alerts that fire."""
        return tuple(alert for alert in self.alerts if alert.phase is Phase.FIRING)
