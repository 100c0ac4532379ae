"""Shapes of what people tell the evaluator, and of what it answers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from kc_otel.contract.slices import ALL
from kc_otel.judge.escalation.people import Acknowledgement, Silence
from kc_otel.serve.api.people_input import Name, Order, Reason, Signature, Until, View


class _Signed(Order):
    by: Signature
    """Author of the decision; stored with the event."""
    why: Reason
    """Their reason; kept with the event."""


class AlertView(View):
    """A step of an escalation policy that waits or fires for a cell."""

    contract: str
    clause: str
    slice: str
    kernel_train: str
    kernel_inference: str
    on: str
    """Condition of the step: fail, no-data, inconclusive or invalid-input."""
    severity: str
    phase: Literal["pending", "firing"]
    since: float
    """Unix time of the first matching verdict, seconds."""
    started_at: float | None
    """Unix time of firing, seconds; null while pending."""
    actions: list[str]
    """Actions of the step, such as `route:train-kernel`."""
    reason: str
    """The last verdict's sentence."""
    fingerprint: str
    """Identifies the alert here, in webhooks and in events."""
    acknowledged: Acknowledgement | None
    silenced: list[str]
    """Ids of the silences that mute it."""
    notified: int
    """Number of notices sent that it fires, reminders included."""
    dry_run: bool
    """True if the contract runs dry: none of the step's actions is carried out."""


class AlertList(View):
    """Alerts that wait or fire."""

    at: float | None
    """Unix time of the last evaluation; null before the first."""
    alerts: list[AlertView]


class AcknowledgeRequest(_Signed):
    """Request to acknowledge alerts."""

    contract: Name
    clause: Name | None = None
    """Only alerts of this clause."""
    slice: Name | None = None
    """Only alerts on this slice."""


class Acknowledged(View):
    """Alerts that were taken on, and incidents that were closed."""

    fingerprints: list[str]
    closed: list[str]
    """Incidents that went away without proof of recovery."""


class SilenceRequest(_Signed):
    """Request to silence alerts for some time. Routes, holds, quarantines and halts are not silenced."""

    contract: Name
    clause: Name | None = None
    """Only this clause."""
    slice: Name | None = None
    """Only this slice."""
    until: Until
    """Unix time at which it ends, seconds."""


class SilenceList(View):
    """Silences in force."""

    silences: list[Silence]


class DiagnosisRequest(Order):
    """Finding of locate or remedy about an incident."""

    kind: Literal["locate", "remedy"]
    text: Annotated[Reason, Field(min_length=1)]
    """Finding, on one line: it is shown on the page, in reports and in messages."""
    evidence: dict[str, Any]
    """Evidence of the finding; numbers that are not finite are written as text."""
    by: Signature
    """Person or program that found it."""
    slice: Name = ALL
    """The slice that was looked at."""


class EndRequest(_Signed):
    """Request to end something before its time."""


class PinRequest(_Signed):
    """A person decides which kernel serves a slice."""

    contract: Name
    slice: Name = "all"
    """The slice; `all` for every request."""
    kernel: Literal["train-kernel", "inference-kernel"]
    until: Until | None = None
    """Unix time at which it ends by itself, seconds; null for a pin that a person ends."""


class UnpinRequest(_Signed):
    """Request to end pins."""

    contract: Name
    slice: Name | None = None
    """Only this slice's; every pin of the contract when null."""


class EnableRequest(_Signed):
    """An endpoint that answered 410 is told again."""

    contract: Name
    """A contract that names it; it is told of all that do."""
    endpoint: Name


class Enabled(View):
    """Number of messages that an endpoint is sent now."""

    waiting: int
    """Messages about the contract that wait for it."""


class Pinned(View):
    """Result of pinning or unpinning."""

    pins: int
    """Pins that were made or ended."""
    version: int
    """Version of the decision table."""


class DryRun(View):
    """Contracts that run dry, and what they would have done."""

    contracts: list[str]
    decisions: dict[str, Any]
    """The decision table that they would have published."""
