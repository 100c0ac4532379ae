"""Confidence intervals for a mean, from samples or histograms: by betting, with worst placements in the bins.

For observations x in [0, 1], a hypothetical mean m and a bet c > 0, the product of (1 + c x_i) / (1 + c m) is the
wealth of one who starts with 1 and puts lambda = c / (1 + c m) of it on each observation: 1 + lambda (x_i - m). If m is
the mean of every observation given the earlier ones, no bet gains on average, so the wealth is a martingale, and its
average over any bets chosen beforehand is one, too. By Ville's inequality it ever reaches 1/alpha with probability at
most alpha.

Written this way the observations and m come apart: the sum of log(1 + c_j x_i), one number per bet, is all that a
sample is needed for. It depends on no order, never falls when an observation grows, and is concave in each of them. For
the opposite side, mirror the sample: x -> 1 - x.

For any concave function the worst placement of values in their bins is the same one: all on edges, the upper edges
going to the highest bins first, until the exact sum is reached. It majorises every other placement with that sum
(moving sum from a lower bin to a higher one never makes a sum of squares smaller, nor a sum of concave functions
larger), so it has the largest variance and the least wealth at once.

For the total variation of a log ratio that deviates by 0.01, from 2,000 to 200,000 tokens at 99 %, the upper side is 12
to 77 times nearer to the mean than Hoeffding's, and 2.4 to 2.6 times nearer than the empirical Bernstein interval's.
For coins it is wider than what knows that they are coins: `two_valued_mean_interval`.

Source: Waudby-Smith and Ramdas 2024, Estimating means of bounded random variables by betting, JRSS-B 86(1), Theorem 3
and section 4.3 (mixtures over bets; here a finite one, over powers of sqrt(2)); Ville 1939; Marshall, Olkin and Arnold
2011, Inequalities: Theory of Majorization, 3.C.1 (Schur) and 5.A.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Final

import numpy as np

from kc_otel.stats.interval import Binned, Floats, Interval, finite_range, nothing
from kc_otel.stats.interval_rows import HistogramRows, IntervalRows, of_sample

Bets = tuple[Floats, Floats]
"""Bets c [J], ascending, and the logarithms of their weights [R, J], which add up to 1 in each row."""
Side = tuple[Floats, Callable[[Floats], Floats], float]
"""Mean of a sample [R], what puts its values into [0, 1] so that the bound is one from below, and its alpha."""
_PER_OCTAVE: Final = 2
"""Bets per factor of 2: with four the bounds would be narrower by less than a part in a hundred."""
_WEIGHT_DECAY: Final = 0.125
"""Exponent of the weight of bets above 1, c^-_WEIGHT_DECAY: they pay where the mean is tiny, often but not always."""
_SMALLEST_BET: Final = 4.0
"""Smallest bet for n observations, in 1/sqrt(n): about the best one for a coin, which has the largest variance."""
_LARGEST_BET: Final = 16.0
"""Largest bet for few observations; for more than that it is n, which one observation of 1 among n zeros pays."""
EVER: Final = (-16 * _PER_OCTAVE, 20 * _PER_OCTAVE)
"""Numbers of the first and the last of the bets for any number of observations."""
_TOLERANCE_NATS: Final = 1e-9
"""Nats by which the wealth at a bound may exceed 1/alpha: the bound is that much too cautious, never too bold."""
_ROWS_PER_SEARCH: Final = 128
"""Rows whose bounds are looked for together: their bets stay in a core's cache."""
METHOD: Final = ("mixture betting", "anytime mixture betting")
"""Name of the interval, of a size fixed beforehand and of all sizes at once."""
_MAX_NEWTON_STEPS: Final = 50
"""Newton steps; three or four are usual."""


def capped_mean_interval(
    sample: Binned,
    *,
    low: float,
    high: float,
    cap: float,
    alpha_lower: float,
    alpha_upper: float,
    cut: bool = False,
    anytime: bool = False,
    scale: float = 1.0,
) -> Interval:
    """`mean_interval` for a quantity that may be unbounded: low, high, cap as in the registry.

    No finite sample bounds the mean of an unbounded quantity from above. The interval is therefore for the mean of
    the value cut to [max(low, -cap), min(high, cap)], which is the mean itself for a quantity that stays inside, and:

    - for a quantity with low >= -cap (such as one that is never negative) the lower side is valid for the mean itself,
      because cutting from above only makes a mean smaller;
    - once an observation is (or, from its bin, may be) beyond the cap, the side it lies on claims nothing: inf above,
      -inf below;
    - the note says which of this applies. The estimate is the plain mean of the sample.

    With `cut` the interval and the estimate are for the mean of the cut value and for nothing else: values beyond the
    cap count as the cap. Another statistic has to limit how often that happens.

    Everything is in units of `scale` times the value, which may be negative.
    """
    if math.isnan(cap) or cap <= 0:
        raise ValueError(f"cap: {cap!r} is not a positive number")
    if not math.isfinite(scale) or scale == 0.0:
        raise ValueError(f"scale: {scale!r} is not a finite number other than 0")
    finite_range(max(low, -cap), min(high, cap))
    levels = {"alpha_lower": alpha_lower, "alpha_upper": alpha_upper}
    options = {"low": low, "high": high, "cap": cap, "cut": cut, "anytime": anytime, "scale": scale}
    return of_sample(mean_intervals, sample, nothing(METHOD[anytime]), **levels, **options)


def mean_intervals(
    rows: HistogramRows,
    *,
    low: float,
    high: float,
    cap: float,
    alpha_lower: float,
    alpha_upper: float,
    cut: bool = False,
    anytime: bool = False,
    scale: float = 1.0,
) -> IntervalRows:
    """`capped_mean_interval` of each row."""
    if scale < 0.0:
        alpha_lower, alpha_upper = alpha_upper, alpha_lower
    floor, ceiling = max(low, -cap), min(high, cap)
    width, known = ceiling - floor, Placement.of(rows, floor, ceiling)
    below = above = np.zeros(rows.total.size)
    if known.is_cut:
        # A promised end is broken only by a bin that lies wholly outside; a cap already by one that may.
        if floor == low or not cut:
            below = (rows.count * ((rows.upper if floor == low else rows.lower) < floor)).sum(axis=1)
        if ceiling == high or not cut:
            above = (rows.count * ((rows.lower if ceiling == high else rows.upper) > ceiling)).sum(axis=1)
    share_below, share_above = known.bounds(
        (known.least, lambda x: (x - floor) / width, alpha_lower),
        (known.most, lambda x: (ceiling - x) / width, alpha_upper),
        anytime=anytime,
    )
    # Every side holds the sample's own mean, and may miss it only by rounding.
    lower = np.maximum(floor, np.minimum(known.least, floor + width * share_below))
    upper = np.minimum(ceiling, np.maximum(known.most, ceiling - width * share_above))
    lower, upper = np.where(below > 0, -math.inf, lower), np.where(above > 0, math.inf, upper)
    if scale < 0.0:
        lower, upper, below, above = upper, lower, above, below
        low, high, floor, ceiling = high, low, ceiling, floor
    # Adding 0 makes no -0 of what is 0.
    low, high, floor, ceiling = (scale * end + 0.0 for end in (low, high, floor, ceiling))
    middle = (known.least + known.most) / 2.0
    return IntervalRows(
        scale * (middle if cut else np.where(np.isfinite(rows.sum), rows.sum / rows.total, middle)) + 0.0,
        scale * lower + 0.0,
        scale * upper + 0.0,
        rows.total,
        METHOD[anytime],
        [
            note_of(low, high, floor, ceiling, int(under), int(over), cut=cut)
            for under, over in zip(below.tolist(), above.tolist(), strict=True)
        ],
    )


def mean_interval(
    sample: Binned, *, low: float, high: float, alpha_lower: float, alpha_upper: float, anytime: bool = False
) -> Interval:
    """Interval for the mean of a quantity in [low, high], by betting against every candidate mean.

    Each side ends where the wealth won against a mean by a mixture of fixed bets, reaches 1/alpha. The
    grid of bets depends on the number of observations, which has to be fixed beforehand. It adapts to the variance as
    the empirical Bernstein interval does, pays for the mixture (up to an eighth of the width for a coin), and has a
    much smaller remainder: a little over ln(1/alpha)/n, not 7 ln(2/alpha) / (3 n). The remainder decides where means
    are tiny.

    It holds for observations that are independent, equally distributed or not, and more generally whenever the mean of
    each, given the earlier ones, is the same. If these conditional means change, it is an interval for their average:
    the product of 1 + c m_i is at most that of 1 + c times their average.

    With `anytime` it is a confidence sequence: one grid of bets for all sizes, a little wider, for repeated looks at a
    growing sample (not at a rolling window). The chance that a side ever misses, over all looks together, is then at
    most its alpha. It is narrower than sequences whose bets follow the stream (Theorems 2 and 3) on every drift and
    size that was tried, from 200 observations to 200,000, except for coins below a thousand; and the fixed bets do not
    depend on the order, so that histograms can be merged and used.

    >>> import numpy as np
    >>> drift = np.random.default_rng(0).beta(2, 498, 5000)        # mean 0.004
    >>> levels = {"low": 0.0, "high": 1.0, "alpha_lower": 0.005, "alpha_upper": 0.005}
    >>> looks = [mean_interval(Binned.of_samples(drift[:n]), **levels, anytime=True) for n in (500, 1000, 5000)]
    >>> [look.upper < 0.01 for look in looks]
    [False, False, True]

    Source: Waudby-Smith and Ramdas 2024, JRSS-B 86(1), Theorem 3 and section 4.3; Ville 1939.
    """
    finite_range(low, high)
    cap = max(abs(low), abs(high))
    return capped_mean_interval(
        sample, low=low, high=high, cap=cap, alpha_lower=alpha_lower, alpha_upper=alpha_upper, anytime=anytime
    )


def note_of(low: float, high: float, floor: float, ceiling: float, below: int = 0, above: int = 0, *, cut: bool) -> str:
    """Return the note on an interval's range, and on the number of observations outside of it."""
    said, least, most = [], f"{floor:.4g}", f"{ceiling:.4g}"
    if floor > low and ceiling < high:
        said.append(f"{'' if cut else 'bounds are '}for the mean of values cut to [{least}, {most}]")
    elif ceiling < high:
        said.append(f"{'' if cut else 'the upper bound is '}for the mean of min(value, {most})")
    elif floor > low:
        said.append(f"{'' if cut else 'the lower bound is '}for the mean of max(value, {least})")
    if above:
        said.append(f"{above} observation{'s' * (above != 1)} above {most}: no upper bound is claimed")
    if below:
        said.append(f"{below} observation{'s' * (below != 1)} below {least}: no lower bound is claimed")
    return "; ".join(said)


def support_deficit(
    ratio: Binned,
    *,
    cap: float = 10.0,
    highest: float | None = None,
    alpha_lower: float,
    alpha_upper: float,
    anytime: bool = False,
) -> Interval:
    """Interval for `1 - E_Q[w]` from importance ratios of sampled tokens, or W of sequences.

    Cutting w at `cap`, above 1, makes E_Q[w] smaller and the deficit larger, so the upper side holds for the deficit
    itself whatever the tail of w. No sample bounds it from below: a ratio of D/e that occurs once in 1/e tokens makes
    up for a deficit of D and may be missing from the sample. So the lower side is 0, unless the caller vouches for a
    `highest` ratio, as exists for two kernels whose samplers keep the same tokens; then it is that of w in [0,
    highest], and 0 again once a larger one was observed. The estimate is the plain `1 - mean w`, negative by chance
    where the deficit is small.

    >>> import numpy as np
    >>> w = Binned.of_samples(np.full(10_000, 0.95))         # top-p 0.95 and nothing else
    >>> found = support_deficit(w, alpha_lower=0.005, alpha_upper=0.005)
    >>> round(found.estimate, 3), found.lower, found.upper < 0.07
    (0.05, 0.0, True)
    >>> support_deficit(w, highest=5.0, alpha_lower=0.005, alpha_upper=0.005).lower > 0.04
    True
    """
    levels = {"alpha_lower": alpha_lower, "alpha_upper": alpha_upper}
    empty = replace(nothing(METHOD[anytime]), lower=0.0, upper=1.0)
    return of_sample(support_deficits, ratio, empty, **levels, cap=cap, highest=highest, anytime=anytime)


def support_deficits(
    rows: HistogramRows,
    *,
    cap: float,
    highest: float | None,
    alpha_lower: float,
    alpha_upper: float,
    anytime: bool = False,
) -> IntervalRows:
    """`support_deficit` of each row."""
    if not (math.isfinite(cap) and cap > 1.0):
        raise ValueError(f"cap: {cap!r} is not a finite ratio above 1")
    if highest is not None and not (math.isfinite(highest) and highest >= 1.0):
        raise ValueError(f"highest: {highest!r} is not a finite ratio of at least 1")
    mean_of = partial(
        mean_intervals, rows, low=0.0, high=math.inf, alpha_lower=alpha_upper, alpha_upper=alpha_lower, anytime=anytime
    )
    mean, lower = mean_of(cap=cap), np.zeros(rows.total.size)
    said = ["a lower one above 0 would take a ratio that none exceeds"] * lower.size
    if highest is not None:
        lower = 1.0 - mean_of(cap=highest).upper
        seen = "; larger ones were observed, so only 0 is claimed"
        said = [f"the lower one if no ratio is above {highest:g}{seen * (low == -math.inf)}" for low in lower.tolist()]
    return IntervalRows(
        1.0 - mean.estimate,
        np.clip(lower, 0.0, 1.0),
        np.clip(1.0 - mean.lower, 0.0, 1.0),
        mean.samples,
        mean.method,
        [f"the upper bound, with w cut at {cap:g}, holds for any tail of w; {lower_one}" for lower_one in said],
    )


@dataclass(frozen=True, eq=False)
class Placement:
    """Samples cut to [low, high], as far as their bins tell: edges, cut [R, B], and the mean of each in [least, most].

    These two [R] are equal where the sum is exact and nothing is cut.
    """

    rows: HistogramRows
    low: float
    high: float
    is_cut: bool
    lower: Floats
    upper: Floats
    least: Floats
    most: Floats

    @classmethod
    def of(cls, rows: HistogramRows, low: float, high: float) -> Placement:
        """Return the possible placements of min(max(x, low), high).

        The sum of the cut values lies between the sums of the cut edges, and also between the exact sum less the most
        and less the least that the cutting can have taken away.
        """
        total = np.where(np.isfinite(rows.sum), rows.sum, math.nan)
        lower, upper, taken_least, taken_most = rows.lower, rows.upper, np.zeros(1), np.zeros(1)
        is_cut = bool(rows.own[0, 0].min() < low or high < rows.own[1, 1].max())
        if is_cut:
            lower, upper = np.clip(lower, low, high), np.clip(upper, low, high)
            taken_least, taken_most = _dot(rows.count, rows.lower - lower), _dot(rows.count, rows.upper - upper)
        # fmax and fmin skip the nan of an unknown sum. Bins and sum can disagree by rounding: then cover both.
        first = np.fmax(_dot(rows.count, lower), total - taken_most)
        second = np.fmin(_dot(rows.count, upper), total - taken_least)
        least, most = np.minimum(first, second) / rows.total, np.maximum(first, second) / rows.total
        return cls(rows, low, high, is_cut, lower, upper, least, most)

    @cached_property
    def _room(self) -> tuple[Floats, Floats]:
        """By how much all of a bin's values can rise, and the same of the higher bins together [R, B]."""
        room = self.rows.count * (self.upper - self.lower)
        return room, np.cumsum(room[:, ::-1], axis=1)[:, ::-1] - room

    def raised(self, mean: Floats) -> Floats:
        """Observations on upper edges in the worst placement with a mean of the cut sample [R]; the others on lower.

        Where the sum ends inside a bin, their number is not whole, which is worse than any placement that can be.
        """
        (room, above), count = self._room, self.rows.count
        raised = (mean * self.rows.total - _dot(count, self.lower))[:, None] - above
        np.minimum(np.maximum(raised, 0.0, out=raised), room, out=raised)
        raised /= np.where(room > 0.0, room, 1.0)
        raised *= count
        return raised

    def bounds(self, *sides: Side, anytime: bool) -> list[Floats]:
        """`lower_bounds` of the worst placements of each side [R], all in one search."""
        sizes = self.rows.total
        bets, log_weights = grid_of([EVER if anytime else span_of(int(size)) for size in sizes.tolist()])
        scores = []
        for mean, place, alpha in sides:

            def won(edges: Floats, place: Callable[[Floats], Floats] = place) -> Floats:
                stakes = bets * place(np.clip(edges, self.low, self.high))[:, None]
                stakes += 1.0
                # log, and not log1p: five times as fast, and wrong by 1e-16 per observation at most.
                return np.log(stakes, out=stakes)

            raised = self.raised(mean)
            grown = self.rows.added_up(won, self.rows.count - raised)
            if raised.any():
                grown += self.rows.added_up(won, raised, upper=True)
            scores.append(grown + log_weights + math.log(alpha))
        every, n = np.concatenate(scores), np.tile(sizes, len(scores))
        parts = [slice(begin, begin + _ROWS_PER_SEARCH) for begin in range(0, n.size, _ROWS_PER_SEARCH)]
        found = np.concatenate([lower_bounds(bets, every[part], n[part]) for part in parts])
        return np.split(found, len(scores))


def _dot(a: Floats, b: Floats) -> Floats:
    product: Floats = np.einsum("rb,rb->r", a, b)
    return product


@lru_cache(maxsize=4096)
def span_of(n: int) -> tuple[int, int]:
    """The numbers of the first and the last of the bets for n observations in the geometric series of all bets."""
    return (
        math.floor(_PER_OCTAVE * math.log2(_SMALLEST_BET / math.sqrt(n))),
        math.ceil(_PER_OCTAVE * math.log2(max(float(n), _LARGEST_BET))),
    )


def grid_of(spans: Sequence[tuple[int, int]]) -> Bets:
    """The bets of many samples [J], and the logarithms of their weights in each [R, J], -inf where there is none."""
    kinds = {span: kind for kind, span in enumerate(dict.fromkeys(spans))}
    bets, weights = _grid(tuple(kinds))
    return bets, weights[[kinds[span] for span in spans]]


@lru_cache(maxsize=1024)
def _grid(spans: tuple[tuple[int, int], ...]) -> Bets:
    first, last = min(begin for begin, _ in spans), max(end for _, end in spans)
    bets = np.exp2(np.arange(first, last + 1) / _PER_OCTAVE)
    weights = np.zeros((len(spans), bets.size))
    for kind, (begin, end) in enumerate(spans):
        own = slice(begin - first, end - first + 1)
        weights[kind, own] = np.maximum(bets[own], 1.0) ** -_WEIGHT_DECAY
    with np.errstate(divide="ignore"):
        return bets, np.log(weights / weights.sum(axis=1, keepdims=True))


def lower_bounds(bets: Floats, scores: Floats, n: Floats) -> Floats:
    """The mean in [0, 1] at which a mixture's wealth is 1/alpha; all smaller ones are refuted. 0 when none is [R].

    From bets [J], the logarithms of wealth, weight and alpha together [R, J], and sizes [R]. Newton's method from below
    on a convex, falling function never passes the root, so that every step is a valid bound.
    """
    # Alone, each bet has its root in closed form. The mixture refutes at least what the luckiest of them refutes.
    mean: Floats = np.clip((np.expm1(scores / n[:, None]) / bets).max(axis=1), 0.0, 1.0)
    active = np.arange(n.size)
    for _ in range(_MAX_NEWTON_STEPS):
        excess, slope = _wealth(bets, scores[active], n[active], mean[active])
        on = excess > _TOLERANCE_NATS
        if not on.any():
            break
        active = active[on]
        mean[active] = np.minimum(mean[active] - excess[on] / slope[on], 1.0)
    return mean


def _wealth(bets: Floats, scores: Floats, n: Floats, mean: Floats) -> tuple[Floats, Floats]:
    """Logarithm of sum_j exp(score_j - n log(1 + c_j m)) of each row [R], and its derivative in m."""
    stakes = 1.0 + bets * mean[:, None]
    exponents = scores - n[:, None] * np.log(stakes)
    top = exponents.max(axis=1)
    share = np.exp(exponents - top[:, None])
    whole = share.sum(axis=1)
    return top + np.log(whole), -n * np.einsum("rb,rb->r", bets / stakes, share) / whole
