"""A clause's statistic with its interval as a query of histograms: closed forms where the evaluator inverts.

Each form is a tail bound that the evaluator's interval is sharper than, or an interval of its own around the sample's
statistic, and reads buckets on the conservative side. n is the number of observations, L = ln(1/alpha).

- Mean of a quantity in [a, b]: `m +- (s sqrt(2 L / (n - 1)) + 7 (b - a) L / (3 (n - 1)))` with L = ln(2/alpha); Maurer
  and Pontil 2009, Theorem 4.
- Quantile of rank q: the quantiles of ranks `q + t(1 - q)` and `q - t(q)`, with
  `t(r) = r L / (3 n) + sqrt((r L / (3 n))^2 + 2 q (1 - q) L / n)`; Bernstein's inequality for the number of
  observations at or below the quantile. PromQL takes only constants for ranks, so n is rounded down to a power of two
  times the fewest that will do.
- Share p above a threshold: `p + L/n + sqrt((L/n)^2 + 2 p L/n)` above and
  `p + 2L/(3n) - sqrt((2L/(3n))^2 + 2 p L/n)` below; Chernoff's and Bernstein's inequality, solved for the true share.
- Largest: the edges of the highest bucket in use.

The deviation s is a bound from above. Cutting values to a range makes no deviation larger. Every observation stands for
the geometric middle of its bucket, which is off by at most a part r of it. By the triangle inequality for root mean
squares the true deviation is at most the middles' own, plus r times their root mean square.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

from kc_otel.contract.clause import Clause
from kc_otel.contract.limits import BucketLayout, factors
from kc_otel.contract.model import Contract
from kc_otel.contract.registry.clause_metrics import DERIVED, Quantity
from kc_otel.judge.statistics import samples_needed

PLANNED_PAIRS: Final = 4
"""Kernel pairs at a time for which false FAILs stay as rare as the contract asks."""

_SAMPLE_SIZES: Final = 10
"""Sizes of a sample that a quantile's rank is shifted for."""
EDGE_ROUNDING: Final = 1e-9
"""Largest relative error of a bucket's edge from arithmetic in float64."""
NOT_ONE: Final = 1e-6
"""Less than one observation, and more than rounding makes of none."""


class Alphas(NamedTuple):
    """Error probabilities of the two sides of every cell's interval, on one window."""

    lower: float
    upper: float


class Forms(NamedTuple):
    """Expressions of a statistic, in the unit of the clause's limit."""

    estimate: str
    lower: str
    upper: str


def alphas(contract: Contract) -> Alphas:
    """Half of alpha per window, as the evaluator's; below it is split evenly over every possible cell."""
    alpha = (1.0 - contract.observability.confidence) / 2.0
    cells = len(contract.clauses) * (1 + len(contract.slices)) * PLANNED_PAIRS
    return Alphas(alpha / cells, alpha)


def forms(clause: Clause, contract: Contract, histogram: Native, samples: str) -> Forms:
    """The statistic and its interval; ValueError if recorders do not send the metric, or an assumption is missing."""
    if clause.quantity is None:
        msg = f"{clause.id}: {clause.metric} is not a quantity of recorders; rules from raw histograms cannot judge it"
        raise ValueError(msg)
    levels, statistic, signed = alphas(contract), clause.parsed_statistic, clause.quantity.low < 0
    match statistic.kind:
        case "max":
            return _maximum(histogram, signed=signed)
        case "quantile":
            needed = samples_needed(clause, contract.observability)
            return _quantile(statistic.argument, needed, levels, histogram, samples, signed=signed)
        case "fraction":
            return _fraction(statistic.argument or histogram.layout.zero_threshold, levels, histogram, samples)
    if clause.metric not in DERIVED:
        return _mean(clause.quantity, clause.cap, levels, histogram, samples)
    scale, offset = factors(clause.metric, contract.assumptions)
    if scale < 0:  # the sides change places, and their error probabilities with them
        levels = Alphas(levels.upper, levels.lower)
    base = _mean(clause.quantity, clause.cap, levels, histogram, samples)
    first, second = (base.lower, base.upper) if scale > 0 else (base.upper, base.lower)
    if clause.metric == "support_deficit" and clause.cap is None:
        # No sample bounds a deficit from below: a rare, large ratio that is not in it may make up for all of it.
        first = f"{samples} * 0 + 1"
    return Forms(*(f"{text(scale)} * ({side}) + {text(offset)}" for side in (base.estimate, first, second)))


def rank_shift(toward: float, rank: float, n: float, alpha: float) -> float:
    """Share of n observations by which the number at or below a quantile exceeds its mean with probability <= alpha.

    `toward` is the largest contribution of one observation: 1 - rank above, rank below.

    >>> 0.0009 < rank_shift(1 - 0.999, 0.999, 13_000, 0.005) < 0.001
    True
    """
    log = -math.log(alpha)
    linear = toward * log / (3.0 * n)
    return linear + math.sqrt(linear * linear + 2.0 * rank * (1.0 - rank) * log / n)


def _mean(quantity: Quantity, cap: float | None, levels: Alphas, histogram: Native, samples: str) -> Forms:
    bound = cap or quantity.cap
    floor, ceiling = max(quantity.low, -bound), min(quantity.high, bound)
    mean = histogram.mean
    least, most = mean, mean
    above = below = ""
    wider = text(1 + EDGE_ROUNDING)
    if ceiling < quantity.high:
        above = histogram.above(_edge_toward(ceiling, histogram.layout, down=True))
        beyond = f"clamp_min({histogram.quantile(1.0)} * {wider} - {text(ceiling)}, 0)"
        least = f"{mean} - {above} * {beyond}"
    if floor > quantity.low:
        below = histogram.below(-_edge_toward(-floor, histogram.layout, down=True))
        beyond = f"clamp_min({text(floor)} - {histogram.quantile(0.0)} * {wider}, 0)"
        most = f"{mean} + {below} * {beyond}"
    left = f"clamp_min({samples} - 1, 0)"

    def half(alpha: float) -> str:
        log = math.log(2.0 / alpha)
        linear = text(7.0 * (ceiling - floor) * log / 3.0)
        return f"({histogram.deviation} * sqrt({text(2.0 * log)} / {left}) + {linear} / {left})"

    lower = f"clamp_min({least} - {half(levels.lower)}, {text(floor)})"
    upper = f"clamp_max({most} + {half(levels.upper)}, {text(ceiling)})"
    # What a clause's own cap cuts counts as the cap, and its mean is at most the plain one.
    if above and cap is None:
        upper = _unless_beyond(upper, above, samples, "+Inf")
    if below and cap is None:
        lower = _unless_beyond(lower, below, samples, "-Inf")
    return Forms(mean, lower, upper)


def _unless_beyond(side: str, share: str, samples: str, instead: str) -> str:
    """The side, where no observation may lie beyond the cap."""
    beyond = f"{share} * {samples}"
    return f"({side} and {beyond} <= {text(NOT_ONE)} or {beyond} * 0 + {instead})"


def _quantile(rank: float, needed: int, levels: Alphas, histogram: Native, samples: str, *, signed: bool) -> Forms:
    estimate = histogram.quantile(rank)
    first = max(needed, 2)
    lower = _by_size(
        lambda n: rank - rank_shift(rank, rank, n, levels.lower) - 1.0 / n, first, histogram, samples, "-Inf"
    )
    while rank + rank_shift(1.0 - rank, rank, first, levels.upper) + 1.0 / first >= 1.0:
        first = math.ceil(first * 1.05)
    upper = _by_size(
        lambda n: rank + rank_shift(1.0 - rank, rank, n, levels.upper) + 1.0 / n, first, histogram, samples, "+Inf"
    )
    sides = (_outwards(side, sign, histogram, signed=signed) for side, sign in ((lower, -1), (upper, 1)))
    return Forms(estimate, *sides)


def _by_size(rank_at: Callable[[int], float], first: int, histogram: Native, samples: str, fewer: str) -> str:
    """The quantile of the largest listed sample size that a window reaches."""
    tiers = [
        histogram.quantile(rank_at(size), f"{samples} >= {size}")
        for size in (first * 2**power for power in reversed(range(_SAMPLE_SIZES)))
        if 0.0 < rank_at(size) < 1.0
    ]
    return "({})".format("\nor ".join([*tiers, f"{samples} * 0 + {fewer}"]))


def _outwards(value: str, sign: int, histogram: Native, *, signed: bool) -> str:
    """Return the outer edge of the bucket in which a quantile was interpolated."""
    away, zero = histogram.layout.growth - 1.0, text(histogram.layout.zero_threshold)
    if signed:
        return f"{value} {'+' if sign > 0 else '-'} ({text(away)} * abs({value}) + {zero})"
    if sign > 0:
        return f"clamp_min({text(1.0 + away)} * {value}, {zero})"
    return f"{text(1.0 - away)} * {value} - {zero}"


def _fraction(threshold: float, levels: Alphas, histogram: Native, samples: str) -> Forms:
    maybe = histogram.above(_edge_toward(threshold, histogram.layout, down=True))
    surely = histogram.above(_edge_toward(threshold, histogram.layout, down=False))
    up, down = -math.log(levels.upper), -math.log(levels.lower)
    once = f"{text(up)} / {samples}"
    upper = f"{maybe} + {once} + sqrt(({once}) ^ 2 + {text(2 * up)} * {maybe} / {samples})"
    third = f"{text(2 * down / 3)} / {samples}"
    lower = f"{surely} + {third} - sqrt(({third}) ^ 2 + {text(2 * down)} * {surely} / {samples})"
    return Forms(f"({maybe} + {surely}) / 2", f"clamp_min({lower}, 0)", f"clamp_max({upper}, 1)")


def _maximum(histogram: Native, *, signed: bool) -> Forms:
    """The upper edge of the largest value's bucket; in the zero bucket, its sign is unknown too."""
    largest, zero = histogram.quantile(1.0), histogram.layout.zero_threshold
    inward = histogram.layout.growth - 1.0
    in_zero = f"({largest} <= bool {zero * (1.0 + EDGE_ROUNDING)!r})"
    size = f"abs({largest})" if signed else largest
    return Forms(
        largest,
        f"{largest} - {text(inward)} * {size} - {text(zero)} * {in_zero}",
        f"clamp_min({largest}, {text(zero)})",
    )


def _edge_toward(threshold: float, layout: BucketLayout, *, down: bool) -> float:
    """The nearest edge of a bucket at or below, or at or above, a threshold."""
    if abs(threshold) < layout.zero_threshold:
        return -layout.zero_threshold if down else layout.zero_threshold
    per_octave = 2**layout.scale
    inward = down == (threshold > 0)
    steps = round(math.log2(abs(threshold)) * per_octave, 9)
    edge: float = 2.0 ** ((math.floor(steps) if inward else math.ceil(steps)) / per_octave)
    return math.copysign(edge, threshold)


@dataclass(frozen=True, slots=True)
class Native:
    """Native histograms in PromQL: their selector and their buckets."""

    histogram: str
    layout: BucketLayout

    @property
    def mean(self) -> str:
        """Sum by count."""
        return f"histogram_sum({self.histogram}) / histogram_count({self.histogram})"

    @property
    def deviation(self) -> str:
        """Upper bound on the standard deviation; geometric middles are off by at most sqrt(g) - 1, g their growth."""
        root = math.sqrt(self.layout.growth)
        return (
            f"({text(root)} * histogram_stddev({self.histogram}) + {text(root - 1.0)} * abs({self.mean})"
            f" + {text(self.layout.zero_threshold)})"
        )

    def above(self, edge: float) -> str:
        """Exact, for an edge."""
        return f"histogram_fraction({edge!r}, +Inf, {self.histogram})"

    def below(self, edge: float) -> str:
        """Exact, for an edge."""
        return f"histogram_fraction(-Inf, {edge!r}, {self.histogram})"

    def quantile(self, rank: float, where: str = "") -> str:
        """Interpolated within its bucket; of ranks 0 and 1 an edge."""
        chosen = f"{self.histogram} and {where}" if where else self.histogram
        return f"histogram_quantile({text(rank)}, {chosen})"


def text(number: float) -> str:
    """A constant of a formula; edges of buckets are written in full instead, so that they are edges."""
    return f"{number:.12g}"
