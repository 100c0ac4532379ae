"""The quantities of one recording with their intervals, by a contract's slices or by attributes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kc_otel.contract.registry.clause_metrics import DERIVED, QUANTITIES
from kc_otel.contract.slices import ALL
from kc_otel.judge.plain_json import for_others
from kc_otel.offline.gate.recorded_verdicts import (
    ADVANTAGE,
    RecordingObservations,
    RecordingVerdicts,
    verdict_for_others,
)
from kc_otel.record.measure.logits import LOGITS
from kc_otel.record.measure.rounding import CoarseSide
from kc_otel.recordings.recording import Recording
from kc_otel.stats import Interval, affine, capped_mean_interval, maximum_interval, quantile_interval, support_deficit


@dataclass(frozen=True, slots=True)
class SliceReport:
    """Every number of one slice: our quantities with their intervals, by name."""

    name: str
    sequences: int
    tokens: int
    own: Mapping[str, Interval]


@dataclass(frozen=True, slots=True)
class LogComparison:
    """The quantities of a recording by slice, and a contract's verdicts; no token of `masked` sequences counts."""

    source: str
    sequences: int
    tokens: int
    masked: int
    confidence: float
    clip: float
    slices: Sequence[SliceReport]
    judged: RecordingVerdicts | None
    coarse: CoarseSide | None = None


def report(name: str, of: Recording | None, *, confidence: float, clip: float) -> SliceReport:
    """Every number of a slice; the confidence is of each interval by itself, half of the rest on either side."""
    if of is None:
        return SliceReport(name, 0, 0, {})
    samples, alpha = RecordingObservations(of), (1.0 - confidence) / 2.0

    def mean(quantity: str) -> Interval:
        known, sample = QUANTITIES[quantity], samples.for_mean(quantity)
        assert sample is not None
        return capped_mean_interval(
            sample, low=known.low, high=known.high, cap=known.cap, alpha_lower=alpha, alpha_upper=alpha
        )

    absolute, ratio = samples.of("abs_log_ratio"), samples.for_mean("ratio")
    assert absolute is not None
    assert ratio is not None
    mean_absolute, chi2 = mean("abs_log_ratio"), mean("chi2_token")
    own = {
        "tv_token": mean("tv_token"),
        "tv_seq": mean("tv_seq"),
        "k1": affine(mean("log_ratio"), -1.0),
        "k3": mean("k3"),
        "chi2_token": chi2,
        "ess_token": _effective(chi2),
        "abs_log_ratio mean": mean_absolute,
        "abs_log_ratio p99.9": quantile_interval(absolute, 0.999, alpha_lower=alpha, alpha_upper=alpha),
        "abs_log_ratio max": maximum_interval(absolute),
        "support_deficit": support_deficit(ratio, cap=QUANTITIES["ratio"].cap, alpha_lower=alpha, alpha_upper=alpha),
        "clip_budget_share": affine(mean_absolute, 1.0 / math.log1p(clip)),
    }
    own |= {quantity: mean(quantity) for quantity in (*ADVANTAGE, *LOGITS) if samples.of(quantity) is not None}
    return SliceReport(name, of.lengths.size, of.train.size, own)


def _effective(chi2: Interval) -> Interval:
    """ESS/n = 1/(1 + chi2), which falls as chi2 rises."""
    low, high = max(chi2.lower, 0.0), chi2.upper
    return replace(chi2, estimate=1.0 / (1.0 + chi2.estimate), lower=1.0 / (1.0 + high), upper=1.0 / (1.0 + low))


def as_data(comparison: LogComparison) -> dict[str, Any]:
    """Every digit of everything; a bound that is not claimed and a number that does not exist are null."""
    judged = comparison.judged
    return {
        "source": comparison.source,
        "sequences": comparison.sequences,
        "tokens": comparison.tokens,
        "masked_sequences": comparison.masked,
        "confidence": comparison.confidence,
        "clip": comparison.clip,
        "rounded": None if comparison.coarse is None else asdict(comparison.coarse),
        "slices": [
            {
                "slice": part.name,
                "sequences": part.sequences,
                "tokens": part.tokens,
                "kc": {name: {**for_others(interval), "unit": _unit(name)} for name, interval in part.own.items()},
            }
            for part in comparison.slices
        ],
        "verdicts": None if judged is None else list(map(verdict_for_others, judged.verdicts)),
        "not_judged": None if judged is None else [str(clause) for clause in judged.left_out],
    }


def _unit(name: str) -> str:
    key = name.split(maxsplit=1)[0]
    if key in QUANTITIES:
        return QUANTITIES[key].unit
    return DERIVED[key].unit if key in DERIVED else "1"


_MAX_VALUES: Final = 20
"""Values of an attribute that become slices of their own."""
_RANGE_COUNT: Final = 4


def by_attributes(recording: Recording, names: Sequence[str]) -> dict[str, Recording | None]:
    """`all`, and a slice for each value of each attribute; of numbers with many values, for each quarter of them."""
    parts: dict[str, Recording | None] = {ALL: recording}
    measured = recording.lengths.size
    for name in names:
        values = [attributes.get(name) for attributes in (*recording.attributes, *recording.masked)]
        given = [value for value in values[:measured] if value is not None]
        if not given:
            known = sorted({attribute for attributes in recording.attributes for attribute in attributes})
            msg = f"{recording.source}: no sequence has an attribute {name!r}; there are {', '.join(known) or 'none'}"
            raise ValueError(msg)
        counts = Counter(map(str, given))
        if len(counts) > _MAX_VALUES and all(isinstance(value, int | float) for value in given):
            numbers = np.array([v if isinstance(v, int | float) else np.nan for v in values], dtype=np.float64)
            parts |= _ranges(recording, name, numbers)
            continue
        of = np.array([None if value is None else str(value) for value in values], dtype=object)
        kept = sorted(value for value, _ in counts.most_common(_MAX_VALUES))
        parts |= {f"{name}={value}": _part(recording, of == value) for value in kept}
        rest = np.array([value is not None and value not in kept for value in of])
        if rest[:measured].any():
            parts[f"{name}=other"] = _part(recording, rest)
    return parts


def _part(recording: Recording, inside: NDArray[np.bool_]) -> Recording | None:
    """A slice; `inside` is about the sequences that are measured and then about those that are masked."""
    kept, masked = np.split(inside.astype(np.bool_), [recording.lengths.size])
    return recording.only(kept, masked) if kept.any() else None


def _ranges(recording: Recording, name: str, values: NDArray[np.float64]) -> dict[str, Recording | None]:
    measured = values[: recording.lengths.size]
    edges = np.unique(np.nanquantile(measured, np.linspace(0.0, 1.0, _RANGE_COUNT + 1), method="lower"))
    parts = {}
    for place, (low, high) in enumerate(pairwise(edges)):
        last = place == edges.size - 2
        inside = (values >= low) & ((values <= high) if last else (values < high))
        parts[f"{name} in [{low:g}, {high:g}{']' if last else ')'}"] = _part(recording, inside)
    return parts
