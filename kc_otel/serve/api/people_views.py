"""Shapes of what people tell the evaluator, and of what it answers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from kc_otel.contract.slices import ALL
from kc_otel.judge.escalation.people import Acknowledgement, Silence
from kc_otel.serve.api.people_input import Name, Reason, Signature, Until

__all__ = [
    "AcknowledgeRequest",
    "Acknowledged",
    "AlertList",
    "AlertView",
    "DiagnosisRequest",
    "DryRun",
    "EndRequest",
    "PinRequest",
    "Pinned",
    "SilenceList",
    "SilenceRequest",
    "UnpinRequest",
]


class _View(BaseModel):
    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)


class _Signed(_View):
    # A misspelt `slice` would silence every slice: what is not known is refused.
    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True, extra="forbid")

    by: Signature
    """Who decides this; kept with the event."""
    why: Reason
    """Their reason; kept with the event."""


class AlertView(_View):
    """A step of an escalation policy that waits or fires for a cell."""

    contract: str
    clause: str
    slice: str
    kernel_train: str
    kernel_inference: str
    on: str
    """What the step waits for: fail, no-data, inconclusive or invalid-input."""
    severity: str
    phase: Literal["pending", "firing"]
    since: float
    """Unix time of the first matching verdict, seconds."""
    started_at: float | None
    """Unix time of firing, seconds; null while pending."""
    actions: list[str]
    """What the step does, such as `route:train-kernel`."""
    reason: str
    """The last verdict's sentence."""
    fingerprint: str
    """Identifies the alert here, in webhooks and in events."""
    acknowledged: Acknowledgement | None
    silenced: list[str]
    """Ids of the silences that mute it."""
    notified: int
    """How often people have been told that it fires, reminders included."""
    dry_run: bool
    """Whether its contract runs dry: nothing of what the step does is done."""


class AlertList(_View):
    """AlertList that wait or fire."""

    at: float | None
    """Unix time of the last evaluation; null before the first."""
    alerts: list[AlertView]


class AcknowledgeRequest(_Signed):
    """Somebody is at work on alerts."""

    contract: Name
    clause: Name | None = None
    """Only alerts of this clause."""
    slice: Name | None = None
    """Only alerts on this slice."""


class Acknowledged(_View):
    """AlertList that were taken on."""

    fingerprints: list[str]


class SilenceRequest(_Signed):
    """Nobody is to be told of some alerts for some time. Routes, holds, quarantines and halts are not silenced."""

    contract: Name
    clause: Name | None = None
    """Only this clause."""
    slice: Name | None = None
    """Only this slice."""
    until: Until
    """Unix time at which it ends, seconds."""


class SilenceList(_View):
    """Silences in force."""

    silences: list[Silence]


class DiagnosisRequest(_View):
    """What locate or remedy found out about an incident."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True, extra="forbid")

    kind: Literal["locate", "remedy"]
    text: Annotated[Reason, Field(min_length=1)]
    """What was found, on one line: it stands on the page, in reports and in messages."""
    evidence: dict[str, Any]
    """What it rests on; a number that is not finite is written as text."""
    by: Signature
    """Who, or what program, has found it."""
    slice: Name = ALL
    """The slice that was looked at."""


class EndRequest(_Signed):
    """A person ends something before its time."""


class PinRequest(_Signed):
    """A person decides which kernel serves a slice."""

    contract: Name
    slice: Name = "all"
    """The slice; `all` for every request."""
    kernel: Literal["train-kernel", "inference-kernel"]
    until: Until | None = None
    """Unix time at which it ends by itself, seconds; null for a pin that a person ends."""


class UnpinRequest(_Signed):
    """A person ends pins."""

    contract: Name
    slice: Name | None = None
    """Only this slice's; every pin of the contract when null."""


class EnableRequest(_Signed):
    """An endpoint that answered 410 is told again."""

    contract: Name
    """A contract that names it; it is told of all that do."""
    endpoint: Name


class Enabled(_View):
    """What an endpoint is told now."""

    waiting: int
    """Messages about the contract that wait for it."""


class Pinned(_View):
    """What pinning or unpinning changed."""

    pins: int
    """Pins that were made or ended."""
    version: int
    """Version of the decision table."""


class DryRun(_View):
    """Contracts that run dry, and what they would have done."""

    contracts: list[str]
    decisions: dict[str, Any]
    """The decision table that they would have published."""
