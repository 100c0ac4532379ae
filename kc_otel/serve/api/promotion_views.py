"""Shapes of promotions: what the API answers about them, and what people and programs may tell them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from kc_otel.judge.promotion.promotion_state import Hold, PromotionStatus
from kc_otel.judge.promotion.stages import Stage
from kc_otel.serve.api.people_input import Name, Reason, Signature

__all__ = ["EvidenceList", "EvidenceView", "OrderRequest", "PlanView", "PromotionList", "PromotionView", "StepView"]


class _View(BaseModel):
    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)


class PromotionView(_View):
    """Where a kernel version is, and what its next step waits for."""

    contract: str
    kernel: str
    """Short fingerprint of the inference kernel version."""
    status: PromotionStatus
    position: str
    """Where it is, such as `canary at 5%`."""
    stage: Stage
    share: float
    """Share of the requests that it may serve, 0 to 1."""
    entered: float
    """Unix time since when it is there."""
    started: float
    attempt: int
    windows: int
    """Consecutive windows that have passed."""
    windows_needed: int
    failed_windows: int
    failure_limit: int
    next: str | None
    """Where the next step leads; null where there is none."""
    next_share: float | None
    """Share of the requests that it would serve there."""
    path: list[str]
    """Every position that a version passes under this contract."""
    missing: list[str]
    """What the next step waits for."""
    awaiting: str | None
    """Position whose step waits for a hook; null while other things are missing."""
    hooked: bool
    hold: Hold | None
    approved: list[str]
    reason: str
    """Why it is where it is, in a sentence."""


class PromotionList(_View):
    """PromotionList by contract, the newest first."""

    promotions: list[PromotionView]


class EvidenceView(_View):
    """A piece of evidence, without its content."""

    id: int
    at: float
    what: str
    """The step in words."""
    checksum: str


class EvidenceList(_View):
    """What was kept of a version's steps, oldest first."""

    evidence: list[EvidenceView]


class StepView(_View):
    """How long a version stays in a position at best."""

    position: str
    seconds: float | None
    """Until its gate can open; null when it cannot be told or never can."""
    never: bool
    slowest: str
    """`clause on slice` that takes longest."""
    why: str


class PlanView(_View):
    """What a promotion takes at best, position by position."""

    sampling: float
    tokens_per_second: float | None
    """All traffic together; null when it is not known."""
    steps: list[StepView]


class OrderRequest(BaseModel):
    """Something that a person or their program decides about a version."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True, extra="forbid")

    order: Literal["start", "evidence", "approve", "hold", "resume", "force", "rollback", "hook", "confirm"]
    by: Signature
    """Who; kept with the event."""
    why: Reason = ""
    """Why; asked for with hold, force and rollback."""
    stage: Stage | None = None
    """Stage to approve, or to force it into."""
    position: Name = ""
    """With confirm: the position that was awaited."""
    evidence: dict[str, Any] | None = None
    """With evidence: what `kc-otel gate run ... --evidence` wrote."""
