"""Timeline of a recording under one contract: alerts from firing to resolution, decisions, messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from kc_otel.judge.decisions.entries import DecisionTable
from kc_otel.judge.escalation.alerts import Transition, What


@dataclass(frozen=True, slots=True)
class AlertSpan:
    """One alert from its firing to its resolve, Unix times in seconds; without an end it fires at the last entry.

    Kernels are short fingerprints, empty when none has reported; `actions` are those of the step, as the contract
    writes them, and `step` is its key.
    """

    step: str
    on: str
    severity: str
    actions: tuple[str, ...]
    clause: str
    slice: str
    kernel_train: str
    kernel_inference: str
    reason: str
    start: float
    end: float | None = None


@dataclass(frozen=True, slots=True)
class DecisionSpan:
    """A route or a directive from when it came into force until it ended; without an end it is in force still.

    `what` is `route:train-kernel`, or the directive's kind; `avoid` the inference kernel version that a route avoids.
    """

    what: str
    slice: str
    avoid: str
    start: float
    end: float | None = None


@dataclass(frozen=True, slots=True)
class SentWebhook:
    """One webhook to an endpoint: firing, resolved or a reminder of so many alerts."""

    at: float
    endpoint: str
    reason: str
    alerts: int


@dataclass(frozen=True, slots=True)
class ReplayTimeline:
    """Timeline of a recording under one contract; everything is in the order of its beginning.

    Attributes:
        hash: Content hash of the contract.
        start: Unix time of the first entry of the recording, seconds.
        end: Unix time of the last evaluation, seconds.
        evaluations: How often every cell was judged.
        points: Data points by outcome.
        cells: Cells that were judged in the last evaluation.
        not_recorded: Parts of the contract for which the recording has no data, as sentences.
    """

    name: str
    version: int
    hash: str
    start: float
    end: float
    evaluations: int
    requests: int
    points: Mapping[str, int]
    cells: int
    alerts: tuple[AlertSpan, ...]
    decisions: tuple[DecisionSpan, ...]
    messages: tuple[SentWebhook, ...]
    not_recorded: tuple[str, ...]


class SpanCollector:
    """Puts edges together to spans: of alerts by their fingerprint, of what is in force by what it is."""

    def __init__(self) -> None:
        self._alerts: dict[str, AlertSpan] = {}
        self._decisions: dict[tuple[str, str, str], DecisionSpan] = {}
        self._over: list[AlertSpan] = []
        self._ended: list[DecisionSpan] = []

    def edges(self, transitions: Iterable[Transition]) -> None:
        """Take what fired and resolved in an evaluation."""
        for transition in transitions:
            if transition.what is What.FIRING:
                self._alerts[transition.fingerprint] = _alert_span(transition)
            else:
                self._over.append(replace(self._alerts.pop(transition.fingerprint), end=transition.at))

    def table(self, decisions: DecisionTable, now: float) -> None:
        """Take the decision table of an evaluation in which it changed."""
        keys: dict[tuple[str, str, str], None] = {
            (f"route:{route.kernel}", route.slice, route.avoid): None for route in decisions.routes
        }
        keys |= {(directive.kind.value, directive.slice, ""): None for directive in decisions.directives}
        for key in [key for key in self._decisions if key not in keys]:
            self._ended.append(replace(self._decisions.pop(key), end=now))
        for key in keys:
            self._decisions.setdefault(key, DecisionSpan(*key, now))

    @property
    def alerts(self) -> tuple[AlertSpan, ...]:
        """Alerts so far, in the order of their firing."""
        return tuple(
            sorted([*self._over, *self._alerts.values()], key=lambda row: (row.start, row.step, row.clause, row.slice))
        )

    @property
    def decisions(self) -> tuple[DecisionSpan, ...]:
        """Routes and directives so far, in the order of their beginning."""
        return tuple(
            sorted(
                [*self._ended, *self._decisions.values()], key=lambda row: (row.start, row.what, row.slice, row.avoid)
            )
        )


def _alert_span(fired: Transition) -> AlertSpan:
    cell = fired.cell
    return AlertSpan(
        step=fired.step, on=fired.on, severity=fired.severity, actions=tuple(map(str, fired.actions)),
        clause=cell.clause, slice=cell.slice, kernel_train=cell.kernel_train, kernel_inference=cell.kernel_inference,
        reason=fired.verdict.reason, start=fired.at,
    )  # fmt: skip
