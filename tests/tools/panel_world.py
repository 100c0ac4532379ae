"""What is behind the answers of dashboards' queries: evaluators' objects and arrays, and what is picked."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kc_otel.contract.model import Contract
from kc_otel.judge.verdict import Verdict
from tests.tools.panel_evaluators import Moment
from tests.tools.panel_traffic import EXPORTS, TRAFFIC, Recorded

Labels = frozenset[tuple[str, str]]
Rows = list[tuple[dict[str, str], Any]]
LOOKBACK = 300
"""Seconds for which Prometheus takes a series to have its last value."""
CELL = ("kc_contract", "kc_clause", "kc_slice", "kc_kernel_train", "kc_kernel_inference")
VARIABLES = {name: f"kc_{name}" for name in ("contract", "slice", "kernel_train", "kernel_inference")}


@dataclass(frozen=True)
class World:
    """What is behind the answers to queries `at` a Unix time; what is recorded is about the first contract.

    `picked` is a regular expression by variable, as it is put into queries; `rate` and `range` are the seconds of
    `$__rate_interval` and `$__range`.
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
        return self.contracts[0]

    def but(self, **changes: Any) -> World:
        """The world at another time, or with something else picked."""
        return replace(self, **changes)

    def now(self) -> Iterator[Moment]:
        """The last moment of each evaluator."""
        for moments in self.evaluators.values():
            if seen := [moment for moment in moments if self.at - LOOKBACK < moment.at <= self.at]:
                yield seen[-1]

    def takes(self, labels: Mapping[str, str]) -> bool:
        """Whether a series is picked; a variable whose label the series has not says nothing."""
        picks = ((label, self.picked[name]) for name, label in VARIABLES.items() if name in self.picked)
        return all(label not in labels or re.fullmatch(regex, labels[label]) for label, regex in picks)

    def cells(self, of: Callable[[Verdict, float], float]) -> Rows:
        """A number of each picked cell from its verdict and since when it has it; those that are not known are none."""
        found: Rows = []
        for moment in self.now():
            for verdict, since in moment.cells:
                labels = {f"kc_{name}": text for name, text in verdict.cell._asdict().items()}
                if self.takes(labels) and not math.isnan(value := float(of(verdict, since))):
                    found.append((labels, value))
        return found

    def log_ratios(self) -> Rows:
        """Log P - log Q of each picked slice and recorder after the first export of the rate's interval."""
        inside = [k for k in range(EXPORTS) if self.at - self.rate < self.recorded.time_of(k) <= self.at]
        found: Rows = []
        for name, batches in self.recorded.batches.items():
            pair = (kernel.fingerprint for kernel in self.recorded.kernels[name])
            of = dict(zip(CELL[3:], pair, strict=True)) | {"kc_contract": self.contract.name}
            values = np.concatenate([batches[k].log_ratio for k in inside[1:]])
            found += [(of | {"kc_slice": slice}, values) for slice in TRAFFIC[name].slices]
        return [row for row in found if self.takes(row[0])]


def by(names: Iterable[str], rows: Iterable[tuple[Any, Any]], how: Callable[[Any], Any] = max) -> dict[Labels, Any]:
    """Rows aggregated by labels; an empty label is none."""
    names, groups = tuple(names), dict[Labels, list]()
    for labels, value in rows:
        key = frozenset((name, labels[name]) for name in names if labels.get(name))
        groups.setdefault(key, []).append(value)
    return {key: how(values) for key, values in groups.items()}
