"""PromQL of the dashboards. Names come from the registry; `$contract` and `$slice` are variables of the dashboard."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from kc_otel.evaluator.verdict import Status
from kc_otel.generate.names import label, selector

__all__ = [
    "CELL",
    "alerts",
    "bound",
    "by",
    "cells",
    "count_alerts",
    "count_routed",
    "count_status",
    "health",
    "info",
    "margin_share",
    "of_contract",
    "rate",
    "routes",
    "since",
    "verdicts",
]

CELL: Final = ("kc.contract", "kc.clause", "kc.slice", "kc.kernel.train", "kc.kernel.inference")
_PICKED_CONTRACT: Final = f'{label("kc.contract")}=~"$contract"'
_PICKED: Final = (_PICKED_CONTRACT, f'{label("kc.slice")}=~"$slice"')
_STEP: Final = "1m"


def by(attributes: Iterable[str], expression: str, how: str = "max") -> str:
    """`expression` aggregated by attributes; evaluators that run side by side then count once."""
    return f"{how} by ({', '.join(label(name) for name in attributes)}) ({expression})"


def cells(metric: str, *, offset: str = "", attributes: Iterable[str] = CELL) -> str:
    """A metric of the picked cells."""
    return by(attributes, selector(metric, None, *_PICKED) + (f" offset {offset}" if offset else ""))


def verdicts() -> str:
    """Worst verdict of each clause and slice, over all pairs of kernel versions."""
    return cells("kc.verdict", attributes=CELL[:3])


def count_status(status: Status) -> str:
    """How many of the picked cells have a status."""
    return f"count({cells('kc.verdict')} == {status.code}) or vector(0)"


def since() -> str:
    """Unix time, milliseconds, at which each cell got its present verdict, to the minute; not before the range."""
    changed = f"timestamp({cells('kc.verdict')} != {cells('kc.verdict', offset=_STEP)})"
    seen = f"timestamp({cells('kc.verdict')})"
    first = f"min_over_time({seen}[$__range:{_STEP}])"
    return f"1000 * (max_over_time({changed}[$__range:{_STEP}]) or {first} or {seen})"


def margin_share() -> str:
    """Margin as a share of the limit, where the limit is not zero."""
    limit = cells("kc.bound.limit")
    return f"{cells('kc.bound.margin')} / (abs({limit}) > 0)"


def alerts() -> str:
    """1 for each step of the policy that fires."""
    labels = ("kc.contract", "kc.clause", "kc.slice", "kc.severity")
    return f"{cells('kc.alert.firing', attributes=labels)} == 1"


def count_alerts() -> str:
    """How many steps of the policy fire, over clauses and slices."""
    return f"count({alerts()}) or vector(0)"


def routes() -> str:
    """1 for slices that the decision table sends to the training kernel, 0 for the others."""
    labels = ("kc.contract", "kc.slice")
    return f"({by(labels, _to_train())} == 1) or 0 * {cells('kc.route', attributes=labels)}"


def count_routed() -> str:
    """How many slices are routed to the training kernel."""
    return f"count({by(('kc.contract', 'kc.slice'), _to_train())} == 1) or vector(0)"


def bound(metric: str, contract: str, clause: str, how: str = "max") -> str:
    """A bound of one clause by slice; empty when another contract is picked."""
    matchers = {"kc.contract": contract, "kc.clause": clause}
    return by(("kc.slice",), selector(metric, matchers, *_PICKED), how)


def rate(metric: str, attributes: Iterable[str], *, contract: bool = False) -> str:
    """Increase per second of a counter."""
    picked = (_PICKED_CONTRACT,) if contract else ()
    return by(attributes, f"rate({selector(metric, None, *picked)}[$__rate_interval])", "sum")


def of_contract(metric: str, contract: str, attributes: Iterable[str]) -> str:
    """Increase of a counter of one contract over the panel's interval; empty when another contract is picked."""
    selected = selector(metric, {"kc.contract": contract}, _PICKED_CONTRACT)
    return by(attributes, f"increase({selected}[$__rate_interval])", "sum")


def health(metric: str, attributes: Iterable[str] = (), how: str = "sum") -> str:
    """A gauge of the evaluator or the recorders."""
    attributes = tuple(attributes)
    return by(attributes, selector(metric), how) if attributes else f"{how}({selector(metric)})"


def info() -> str:
    """The kernel versions that have reported, with every field of their fingerprints as labels."""
    return f"{selector('kc.kernel.info', None, _PICKED_CONTRACT)} == 1"


def _to_train() -> str:
    return selector("kc.route", {"kc.route.kernel": "train-kernel"}, *_PICKED)
