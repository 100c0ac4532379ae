"""Input that is no sample of two kernels' scores: its cells are INVALID INPUT with the cause, and are not judged.

Two causes are seen here. Over tokens that were sampled from Q, E_Q[P/Q] <= 1: where the ratios of a short window, of
all recorders together, have a mean that is surely larger, the tokens are others', on that slice and of that pair of
kernels. And where the sequences that failed an input check are newer by a heartbeat than all that was measured, nothing
is measured any more. The first is a bet on each window anew, for which `surplus` takes 1e6 to 1: nobody
looks at a window so often that chance gets there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kc_otel.contract.clause import Clause
from kc_otel.contract.input_reasons import remedy
from kc_otel.contract.registry.clause_metrics import SAMPLING, Origin
from kc_otel.contract.slices import ALL, UNJUDGED
from kc_otel.judge.histograms import Histogram
from kc_otel.judge.panes import PaneColumns, SeriesContent
from kc_otel.judge.series import SHORT, Pair, Series, SeriesKey
from kc_otel.stats.surplus import is_surplus

INVALID_INPUT: Final = "INVALID INPUT"
"""First words of such a cell's reason."""
_OF_SAMPLES: Final = frozenset({Origin.LOGPROBS, Origin.ADVANTAGES, Origin.REWARDS, Origin.TRUNCATION})
_MAX_FAILING_SHARE: Final = 0.01
"""Share of sequences that may fail the input checks: a PASS says nothing about them, and drift in one in a hundred can
raise a total variation by 0.01, as much as a usual limit leaves."""
_MEASURED_ALL_THE_SAME: Final = "reward_out_of_range"
_NOTHING_SAMPLED: Final = "no_tokens"
"""Reason of sequences that a mask leaves nothing of, as trainers do on purpose: there is nothing to be told of them."""
_OF_ROWS: Final = "operator_not_finite"
"""Reason of rows of operators, not of sequences."""
_NO_PAIR: Final[Pair] = ("", "")
_Measured = dict[tuple[Pair, bool], dict[str, int]]
"""Observations by metric, of a kernel pair's sequences or of its operators' rows."""
Where = tuple[str, Pair]
"""Slice and pair of kernels."""


def speaks_of(clause: Clause) -> bool:
    """Return whether a clause is about tokens that the inference kernel sampled."""
    return clause.quantity is not None and clause.quantity.source in _OF_SAMPLES


class InputFaults:
    """Slices and pairs whose tokens the inference kernel did not sample; a window that has not changed is known."""

    def __init__(self) -> None:
        self._known: dict[SeriesKey, tuple[Histogram | None, str]] = {}

    def not_sampled(self, series: Mapping[SeriesKey, Series], panes: PaneColumns, now: float) -> dict[Where, str]:
        """Return the reason for each slice and pair whose tokens were not sampled.

        Args:
            series: Those of the ratio.
            panes: Their content.
            now: Unix time in seconds.
        """
        above = _above_one(panes.window(SHORT, now), [row.number for row in series.values()])
        looked = [
            (key, ratios)
            for (key, ratios), high in zip(series.items(), above.tolist(), strict=True)
            if key.slice not in UNJUDGED and (high or ratios.has_explicit)
        ]
        self._known = {key: self._said(key, ratios, now) for key, ratios in looked}
        return {(key.slice, key.pair): said for key, (_, said) in self._known.items() if said}

    def _said(self, key: SeriesKey, series: Series, now: float) -> tuple[Histogram | None, str]:
        window = series.histories[SHORT].window(now)
        known = self._known.get(key)
        if known is not None and known[0] is window:
            return known
        if window is None or not window.count:
            return window, ""
        mean, bins = window.sum / window.count, series.histories[SHORT].binned(now)
        if not is_surplus(bins.lower, bins.upper, bins.count, window.sum):
            return window, ""
        said = f"the mean of P/Q over {window.count:,} tokens is {mean:.3g}"
        return window, f"{INVALID_INPUT}, not_sampled: {said}. {remedy('not_sampled')}"


def _above_one(window: SeriesContent, rows: list[int]) -> NDArray[np.bool_]:
    """Return whether the mean over a window is above 1, for some rows, bool [n]; the others need no further look."""
    found, at = window.places(np.array(rows, np.int64))
    found[found] = window.columns.sum[at] > window.columns.count[at]
    return found


def of_sequences(
    invalid: Iterable[tuple[SeriesKey, Series]], newest: float, now: float, heartbeat: float, window: float
) -> str:
    """Return the reason where every sequence fails the input checks; empty where any is measured.

    Args:
        invalid: Series of `kc.input.invalid`.
        newest: Unix time in seconds of the newest observation that was measured; -inf for none.
        now: Unix time in seconds.
        heartbeat: Seconds by which what fails has to be newer.
        window: Seconds within which it has to have come.
    """
    since = max(newest + heartbeat, now - window)
    found: dict[str, int] = {}
    for key, series in invalid:
        if key.slice != _MEASURED_ALL_THE_SAME and series.newest > since:
            content = series.histories[SHORT].window(now)
            found[key.slice] = found.get(key.slice, 0) + (content.count if content is not None else 0)
    if not any(found.values()):
        return ""
    reason = max(found, key=found.__getitem__)
    others = sum(found.values()) - found[reason]
    more = f" and {others:,} for other reasons" if others else ""
    return f"{INVALID_INPUT}, {reason}: {found[reason]:,} sequences were not measured{more}. {remedy(reason)}"


def too_many(
    invalid: Mapping[str, Mapping[SeriesKey, Series]], every: Mapping[SeriesKey, Series], now: float
) -> dict[Pair, str]:
    """Return the kernel pairs of which more than one in a hundred sequences failed the input checks, and a sentence.

    Args:
        invalid: Series of `kc.input.invalid` that count each sequence once, by slice.
        every: Series of the contract.
        now: Unix time in seconds.
    """
    failing: dict[str, dict[Pair, Counter[str]]] = {}
    for slice, of_slice in invalid.items():
        for key, series in of_slice.items():
            if key.slice not in {_MEASURED_ALL_THE_SAME, _NOTHING_SAMPLED} and (count := _count(series, now)):
                failing.setdefault(slice, {}).setdefault(key.pair, Counter())[key.slice] += count
    if not failing:
        return {}
    measured: dict[str, _Measured] = {slice: {} for slice in failing}
    for key, series in every.items():
        if key.slice in failing:
            on = measured[key.slice].setdefault((key.pair, "[" in key.metric), {})
            on[key.metric] = _count(series, now)
    found: dict[Pair, str] = {}
    for slice, failed in failing.items():
        found = _failing_on(slice, failed, measured[slice]) | found
    return found


def _failing_on(slice: str, failed: dict[Pair, Counter[str]], measured: _Measured) -> dict[Pair, str]:
    unnamed = failed.pop(_NO_PAIR, Counter())
    pairs = failed.keys() | ({pair for pair, _ in measured} if unnamed else set())
    found: dict[Pair, str] = {}
    for pair in pairs or {_NO_PAIR}:
        reasons = failed.get(pair, Counter()) + unnamed
        for of_rows in (False, True):
            counted = {reason: count for reason, count in reasons.items() if (reason == _OF_ROWS) is of_rows}
            known, failing = measured.get((pair, of_rows), {}), sum(counted.values())
            # Without a count of sequences there are at most as many as observations: of tokens, or rows.
            passed = known.get(SAMPLING["sequence_tokens"].name) or max(known.values(), default=0)
            if failing > _MAX_FAILING_SHARE * (failing + passed):
                reason, what = max(counted, key=counted.__getitem__), "rows of operators" if of_rows else "sequences"
                share = f"{100.0 * failing / (failing + passed):.3g} % of the {what}"
                share += "" if slice == ALL else f" on slice {slice}"
                found[pair] = f"{share} failed the input checks in the window, most of them {reason}: {remedy(reason)}"
    return found


def _count(series: Series, now: float) -> int:
    content = series.histories[SHORT].window(now)
    return 0 if content is None else content.count
