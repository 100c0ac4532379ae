"""Shapes of the API's answers. Numbers that are not finite are null: JSON has no NaN."""

from __future__ import annotations

import math
from typing import Any

from pydantic import BaseModel, ConfigDict

from kc_otel.evaluator.verdict import Status, Verdict

__all__ = [
    "CellView",
    "Cells",
    "ClauseView",
    "ContractView",
    "Contracts",
    "Event",
    "Events",
    "KernelView",
    "Problem",
    "ResumeRequest",
    "Resumed",
    "VerdictView",
    "Verdicts",
    "view_of",
]


class _View(BaseModel):
    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)


class VerdictView(_View):
    """A verdict and everything that decided it."""

    contract: str
    clause: str
    slice: str
    kernel_train: str
    """Short fingerprint of the training kernel; empty before any has reported."""
    kernel_inference: str
    """Short fingerprint of the inference kernel; empty before any has reported."""
    status: Status
    at: float
    """Unix time of the evaluation, seconds."""
    limit: float
    estimate: float | None
    lower: float | None
    upper: float | None
    margin: float | None
    """Limit minus the bound that decided; negative is bad."""
    samples: int
    window: str
    method: str
    reason: str
    contract_version: int
    contract_hash: str


class Verdicts(_View):
    """The newest verdict of every cell."""

    at: float | None
    """Unix time of the last evaluation; null before the first."""
    verdicts: list[VerdictView]


class CellView(_View):
    """A cell: its verdict, since when, what fires, and its recent past."""

    verdict: VerdictView
    since: float
    """Unix time since when the status is what it is."""
    firing: list[str]
    """Severities of the escalation steps that fire for this cell."""
    history: list[tuple[float, float | None, float | None, float | None, int]]
    """(time, estimate, lower, upper, status code) of recent evaluations, oldest first."""


class Cells(_View):
    """Every cell."""

    at: float | None
    cells: list[CellView]


class ClauseView(_View):
    """A clause as the contract states it."""

    id: str
    section: str
    metric: str
    statistic: str
    limit: float
    unit: str
    per: str | None
    slices: dict[str, float]
    description: str


class KernelView(_View):
    """A kernel version that has reported."""

    version: str
    role: str
    fields: dict[str, Any]
    last_seen: float | None


class ContractView(_View):
    """A contract that this evaluator judges."""

    name: str
    version: int
    hash: str
    owner: str
    description: str
    clauses: list[ClauseView]
    slices: dict[str, dict[str, Any]]
    kernels: list[KernelView]
    status: Status
    """Worst status of its cells: FAIL, then NO_DATA, then INCONCLUSIVE, then PASS."""
    directives: dict[str, Any]
    """What the escalation policy asks of trainers and gates at the moment."""


class Contracts(_View):
    """Every contract."""

    contracts: list[ContractView]


class Event(_View):
    """Something that changed."""

    id: int
    at: float
    kind: str
    contract: str
    message: str
    data: dict[str, Any]


class Events(_View):
    """Events, oldest first."""

    events: list[Event]


class ResumeRequest(_View):
    """A person lifts a route."""

    contract: str
    slice: str | None = None
    """Only this slice; every slice when null."""
    by: str
    """Who."""
    why: str
    """Why; kept with the event."""


class Resumed(_View):
    """What lifting routes did."""

    lifted: int
    """Routes that were lifted."""
    version: int
    """Version of the decision table."""


class Problem(_View):
    """An error, as RFC 9457 has it."""

    title: str
    detail: str
    status: int


def finite(value: float) -> float | None:
    """The number, or None where JSON could not say it."""
    return value if math.isfinite(value) else None


def view_of(verdict: Verdict) -> VerdictView:
    """A verdict in the API's shape."""
    cell = verdict.cell
    return VerdictView(
        contract=cell.contract,
        clause=cell.clause,
        slice=cell.slice,
        kernel_train=cell.kernel_train,
        kernel_inference=cell.kernel_inference,
        status=verdict.status,
        at=verdict.at,
        limit=verdict.limit,
        estimate=finite(verdict.estimate),
        lower=finite(verdict.lower),
        upper=finite(verdict.upper),
        margin=finite(verdict.margin),
        samples=verdict.samples,
        window=verdict.window,
        method=verdict.method,
        reason=verdict.reason,
        contract_version=verdict.contract_version,
        contract_hash=verdict.contract_hash,
    )
