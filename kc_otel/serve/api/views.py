"""Shapes of the API's answers. Numbers that are not finite are null: JSON has no NaN."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Annotated

from pydantic import BeforeValidator

from kc_otel.contract.clause import About
from kc_otel.judge.decisions import kept_since
from kc_otel.judge.incidents.incident_lifecycle import TrafficSeen
from kc_otel.judge.plain_json import finite_or_none
from kc_otel.judge.verdict import Causes, Cell, Status, Verdict
from kc_otel.serve.api.people_input import View
from kc_otel.serve.core import Core

Finite = Annotated[float | None, BeforeValidator(finite_or_none)]
"""A number, or null where JSON could not say it."""


class PartView(View):
    """A part of a mean, with its confidence interval."""

    estimate: Finite
    lower: Finite
    upper: Finite


class LagView(View):
    """A mean over what weights of some lags sampled, with its confidence interval."""

    lag: str
    """Versions that they were behind: `0`, `1`, `2-3`, `4-7` or `8+`."""
    share: float
    """Share of the observations; of a clause by prompt, of the tokens."""
    estimate: Finite
    lower: Finite
    upper: Finite


class CausesView(View):
    """Split of a mean over everything sampled into the kernels' drift and the age of the weights."""

    clause: str
    """Clause whose mean it is; that of a clause on the weights' lag is of another."""
    limit: float
    share: float
    """Share of the observations that older weights sampled; of a clause by prompt, of the tokens."""
    total: PartView
    kernel: PartView
    """The mean over what the training kernel's weights sampled; null where that is nothing."""
    staleness: PartView
    """Increase due to the age of the other weights."""
    by_lag: list[LagView]
    """The mean at each lag that was observed; a sequence's older tokens have the lag of the oldest."""
    text: str
    """The larger of the two causes, as a phrase."""


class CellKey(View):
    """A clause on a slice for one pair of kernels."""

    contract: str
    clause: str
    slice: str
    kernel_train: str
    """Short fingerprint of the training kernel; empty before any has reported."""
    kernel_inference: str
    """Short fingerprint of the inference kernel; empty before any has reported."""


class VerdictView(CellKey):
    """A verdict and everything that decided it."""

    status: Status
    at: float
    """Unix time of the evaluation, seconds."""
    limit: float
    estimate: Finite
    lower: Finite
    upper: Finite
    margin: Finite
    """Limit minus the bound that decided; negative is bad."""
    samples: int
    window: str
    method: str
    reason: str
    contract_version: int
    contract_hash: str
    about: About
    """`population` if the verdict covers future traffic, too; `traffic` if it covers only the measured traffic."""
    evidence: Finite
    """Evidence against the limit, 0 to 1: chance alone reaches 1 in any cell of the contract no more often than once
    per `observability.false_alarms`. Null for a maximum or a share of none, which have no such measure."""
    observed: bool
    """True if any observation of the cell is stored; otherwise NO_DATA means that nobody has reported yet."""
    no_traffic: bool
    """True where NO_DATA follows from an order that keeps the slice's requests from the kernel."""
    causes: CausesView | None
    """Split by cause, on all traffic, where older weights sampled some of it."""


KeptAway = Callable[[Verdict], bool]


def kept_away(core: Core) -> KeptAway:
    """Says of a verdict whether it is NO_DATA because requests are kept from its kernel, as ordered and obeyed."""
    orders: dict[str, Callable[[str, str], float | None]] = {}
    traffic: dict[str, TrafficSeen] = {}
    now = core.evaluated_at

    def away(verdict: Verdict) -> bool:
        name, _, slice, _, version = verdict.cell
        if verdict.status is not Status.NO_DATA or not version or now is None or name not in core.contracts:
            return False
        if name not in orders:
            orders[name] = kept_since(core.decisions, name)
        if orders[name](slice, version) is None:
            return False
        if name not in traffic:
            traffic[name] = core.traffic(name, core.escalation, now)
        return traffic[name].excuses(slice, version, orders[name])

    return away


def view_of(verdict: Verdict, kept_away: KeptAway, causes: Mapping[Cell, Causes]) -> VerdictView:
    """A verdict in the API's shape."""
    of = causes.get(verdict.cell)
    told = None if of is None else CausesView.model_validate({**dataclasses.asdict(of), "text": of.text})
    return VerdictView.of(verdict, **verdict.cell._asdict(), no_traffic=kept_away(verdict), causes=told)
