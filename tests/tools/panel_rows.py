"""What queries of dashboards are about, as labelled numbers: from evaluators' objects, and from arrays in float64.

Nothing here reads a page, an OTLP request or an answer of a store.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kc_otel.contract import Contract
from kc_otel.contract.clause import Clause
from kc_otel.judge.verdict import Verdict
from tests.tools.panel_evaluators import Moment
from tests.tools.panel_traffic import CAPTURED, EXPORTS, RECORDED, TOKENS, TRAFFIC, Batch, Recorded

Labels = frozenset[tuple[str, str]]
Rows = list[tuple[dict[str, str], Any]]
Counter = list[tuple[dict[str, str], list[tuple[int, float]]]]
"""Series of a counter: labels, and (Unix seconds, value)."""
LOOKBACK = 300
"""Seconds for which Prometheus takes a series to have its last value."""
CELL = ("kc_contract", "kc_clause", "kc_slice", "kc_kernel_train", "kc_kernel_inference")
PAIR = ("kc_contract", "kc_kernel_train", "kc_kernel_inference")
VARIABLES = {
    "contract": "kc_contract",
    "slice": "kc_slice",
    "kernel_train": "kc_kernel_train",
    "kernel_inference": "kc_kernel_inference",
}


@dataclass(frozen=True)
class World:
    """What is behind the answers to queries.

    Attributes:
        contracts: The contracts that are judged; what is recorded is about the first.
        recorded: What recorders were given.
        evaluators: What evaluators knew, by `instance`.
        at: Time of the query, Unix seconds.
        picked: What is picked by each variable: a regular expression, as it is put into queries.
        rate: Seconds of `$__rate_interval`.
        range: Seconds of `$__range`.
    """

    contracts: tuple[Contract, ...]
    recorded: Recorded
    evaluators: Mapping[str, Sequence[Moment]]
    at: float
    picked: Mapping[str, str]
    rate: float
    range: float

    @property
    def contract(self) -> Contract:
        """The contract that recorders record for."""
        return self.contracts[0]

    @property
    def clause(self) -> Clause:
        """The picked clause."""
        return next(one for one in self.contract.clauses if one.id == self.picked["clause"])

    def but(self, **changes: Any) -> World:
        """The world at another time, or with something else picked."""
        return replace(self, **changes)

    def now(self) -> Iterator[Moment]:
        """The last moment of each evaluator."""
        for moments in self.evaluators.values():
            if seen := [one for one in moments if self.at - LOOKBACK < one.at <= self.at]:
                yield seen[-1]

    def takes(self, labels: Mapping[str, str], only: Iterable[str] = VARIABLES) -> bool:
        """Whether a series is picked; a variable whose label the series has not says nothing."""
        picks = ((VARIABLES[name], self.picked[name]) for name in only if name in self.picked)
        return all(label not in labels or re.fullmatch(regex, labels[label]) for label, regex in picks)

    def rows(self, of: Callable[[Moment], Iterable[tuple[dict[str, str], Any]]], **where: Any) -> Rows:
        """Picked rows of every evaluator's last moment."""
        return [(labels, value) for moment in self.now() for labels, value in of(moment) if self.takes(labels, **where)]

    def cells(self, of: Callable[[Verdict, float], float], **where: Any) -> Rows:
        """A number of each picked cell from its verdict and since when it has it; those that are not known are none."""

        def found(moment: Moment) -> Iterator[tuple[dict[str, str], float]]:
            for verdict, since in moment.cells:
                if not math.isnan(value := float(of(verdict, since))):
                    yield _labels_of(verdict), value

        return self.rows(found, **where)


def _labels_of(verdict: Verdict) -> dict[str, str]:
    cell = verdict.cell
    return {
        "kc_contract": cell.contract,
        "kc_clause": cell.clause,
        "kc_slice": cell.slice,
        "kc_kernel_train": cell.kernel_train,
        "kc_kernel_inference": cell.kernel_inference,
    }


def by(names: Iterable[str], rows: Iterable[tuple[Any, Any]], how: Callable[[Any], Any] = max) -> dict[Labels, Any]:
    """Rows aggregated by labels; an empty label is none. Rows may be what `by` returned."""
    names, groups = tuple(names), dict[Labels, list]()
    for labels, value in rows.items() if isinstance(rows, dict) else rows:
        given = dict(labels)
        key = frozenset((name, given[name]) for name in names if given.get(name))
        groups.setdefault(key, []).append(value)
    return {key: how(values) for key, values in groups.items()}


# Counters


def of_evaluators(world: World, names: Sequence[str], of: Callable[[Moment], Mapping[Any, int]]) -> Counter:
    """A counter that evaluators keep, by its labels."""
    found: dict[Any, list[tuple[int, float]]] = {}
    for instance, moments in world.evaluators.items():
        for moment in moments:
            for key, value in of(moment).items():
                texts = (key,) if isinstance(key, str) else key
                labels = (("instance", instance), *zip(names, texts, strict=True))
                found.setdefault(labels, []).append((moment.at, float(value)))
    return [(dict(labels), samples) for labels, samples in found.items()]


def of_recorders(world: World, count: Callable[[Batch, str], Mapping[tuple[str, str] | None, float]]) -> Counter:
    """A counter of recorders: what each batch adds to it, by a further (label, value) or by none."""
    found: Counter = []
    for name, batches in world.recorded.batches.items():
        increments = [count(batch, name) for batch in batches]
        for key in {key: None for each in increments for key in each}:
            labels = {"kc_contract": world.contract.name, "instance": name, **dict([key] if key else [])}
            totals = np.cumsum([each.get(key, 0.0) for each in increments])
            found.append((labels, [(world.recorded.time_of(k), float(v)) for k, v in enumerate(totals)]))
    return found


def captured(world: World, *, kept: bool) -> Counter:
    """Requests that an engine's instrumentation kept, or those that it did not."""
    found: Counter = []
    for reason, count in CAPTURED.items():
        if (reason == RECORDED) == kept:
            labels = {"kc_contract": world.contract.name} | ({} if kept else {"kc_reason": reason})
            found.append((labels, [(world.recorded.time_of(k), float(count * (k + 1))) for k in range(EXPORTS)]))
    return found


def increase(world: World, counter: Counter, window: float) -> Rows:
    """What Prometheus says a counter grew by in the `window` seconds until now, of picked series.

    The increase between the first and the last sample, extrapolated towards both ends of the window by the distance to
    it, or by half a step where that is more than 1.1 steps, and not beyond the time at which the counter was 0. Source:
    Prometheus 3.5, promql/functions.go, `extrapolatedRate`.
    """
    found: Rows = []
    for labels, samples in counter:
        inside = [(when, value) for when, value in samples if world.at - window < when <= world.at]
        if world.takes(labels) and len(inside) > 1:
            grown = inside[-1][1] - inside[0][1]
            floor = inside[0][1] / grown if grown else math.inf
            found.append((labels, grown * stretch([when for when, _ in inside], world.at, window, floor)))
    return found


def rate(world: World, counter: Counter) -> Rows:
    """Increase per second over `$__rate_interval`."""
    return [(labels, value / world.rate) for labels, value in increase(world, counter, world.rate)]


def stretch(times: Sequence[float], at: float, window: float, floor: float = math.inf) -> float:
    """How much more than the samples of these times show `increase` takes a window to hold.

    `floor` is what the counter was at the first of them, as a multiple of what it grew by.
    """
    sampled = times[-1] - times[0]
    step = sampled / (len(times) - 1)
    # A store keeps milliseconds, which a float of Unix seconds is not exact about.
    ends = (round(times[0] - (at - window), 3), round(at - times[-1], 3))
    before, after = (gap if gap < 1.1 * step else step / 2 for gap in ends)
    return (sampled + min(before, sampled * floor) + after) / sampled


# Histograms


def observed(world: World, quantity: str, window: float) -> Rows:
    """(Labels, observations) of each picked stream of a quantity after the first export in the window."""
    inside, found = _inside(world, window), Rows()
    for name, batches in world.recorded.batches.items() if len(inside) > 1 else ():
        values = np.concatenate([VALUES[quantity](batches[k], name).ravel() for k in inside[1:]])
        train, inference = world.recorded.kernels[name]
        for slice in TRAFFIC[name].slices if values.size else ():
            labels = {
                "kc_contract": world.contract.name,
                "kc_slice": slice,
                "kc_kernel_train": train.fingerprint,
                "kc_kernel_inference": inference.fingerprint,
            }
            if world.takes(labels):
                found.append((labels, values))
    return found


def stretched(world: World, window: float) -> float:
    """`stretch` of recorders' exports in a window."""
    return stretch([world.recorded.time_of(k) for k in _inside(world, window)], world.at, window)


def exports_within(world: World, window: float) -> int:
    """Exports of each recorder in a window."""
    return len(_inside(world, window))


def _inside(world: World, window: float) -> list[int]:
    return [k for k in range(EXPORTS) if world.at - window < world.recorded.time_of(k) <= world.at]


def _tv(log_ratio: np.ndarray) -> np.ndarray:
    return np.maximum(-np.expm1(log_ratio), 0.0)


def _push(batch: Batch, sign: float) -> np.ndarray:
    return (np.expm1(batch.log_ratio) * batch.advantages[:, None])[sign * batch.advantages > 0]


VALUES: dict[str, Callable[[Batch, str], np.ndarray]] = {
    "log_ratio": lambda batch, _: batch.log_ratio,
    "abs_log_ratio": lambda batch, _: np.abs(batch.log_ratio),
    "ratio": lambda batch, _: np.exp(batch.log_ratio),
    "tv_token": lambda batch, _: _tv(batch.log_ratio),
    "k3": lambda batch, _: np.expm1(batch.log_ratio) - batch.log_ratio,
    "chi2_token": lambda batch, _: np.expm1(batch.log_ratio) ** 2,
    "tv_seq": lambda batch, _: _tv(batch.log_ratio.sum(1)),
    "chi2_seq": lambda batch, _: np.expm1(batch.log_ratio.sum(1)) ** 2,
    "advantage_drift_positive": lambda batch, _: _push(batch, 1.0),
    "advantage_drift_negative": lambda batch, _: _push(batch, -1.0),
    "operator_relative": lambda batch, _: batch.relative,
    "weights_lag": lambda _, name: np.array([float(TRAFFIC[name].lag)]),
}
"""Observations of a batch, by the key of the quantity."""


def quarantined(batch: Batch, name: str) -> dict[str, tuple[float, float, float]]:
    """(Sequences, tokens, sum of (1-w)+) by outcome; the sequence that fails an input check is not kept."""
    tv = _tv(batch.log_ratio)
    kept = tv.mean(1) <= TRAFFIC[name].limit
    return {
        "kept": (kept.sum(), TOKENS * kept.sum(), tv[kept].sum()),
        "quarantined": ((~kept).sum() + 1, TOKENS * ((~kept).sum() + 1), tv[~kept].sum()),
    }
