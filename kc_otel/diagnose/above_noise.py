"""Statistics of locating: boundaries that differ by more than noise, and shares of a drift among components.

Above noise: exact tests over sequences, corrected for the number of boundaries. A sequence is the independent unit;
tokens of one are not. At each boundary a sequence either differs by more than `NOISE_FACTOR` times the noise floor or
does not, and a boundary is above noise where surely more than a tenth of the sequences that reach it do
(Clopper-Pearson), after Holm over the boundaries. Noise is the largest that any sequence showed, so that a kernel which
is only as noisy as itself is never named; rounding is each sequence's own.

Shares: a component's Shapley value is what it adds on average to the components put in before it, over all orders. Of
few components every set is run; of more, some orders are drawn, each with its reverse, which cancels most of the error.
Percentile bootstraps of few sequences are too narrow: their quantiles are moved out as Student's is from the normal's,
and the error of drawing orders is added in quadrature. With eight sequences whose shares are heavy-tailed an interval
of 99 % still holds the truth in 97 %, with sixteen in 98 to 99 %.

Source: Castro, Gomez and Tejada 2009, Polynomial calculation of the Shapley value based on sampling; Mitchell et al.
2022, Sampling Permutations for Shapley Value Estimation (antithetic orders); Hesterberg 2015, What Teachers Should Know
About the Bootstrap (expanded percentiles).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import permutations
from statistics import NormalDist
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kc_otel._extras import extra
from kc_otel.diagnose.boundaries import OUTPUT, SAMPLER, Boundary
from kc_otel.stats import Binned, Interval, fraction_interval, holm, quantile_interval

NOISE_FACTOR: Final = 2.0
"""Multiple of the noise floor by which a sequence has to differ."""
NULL_SHARE: Final = 0.1
"""Share of sequences that may do so at a boundary where nothing is wrong."""
NOT_FINITE: Final = 1e9
"""Stands for the relative error of an output that is NaN or infinite where the other is not."""
ROUNDING_RMS: Final = 0.21
"""Root mean square error of rounding, relative and in units of the format's epsilon: 1.6e-3 of values in bf16."""
_MAX_SEQUENCES: Final = 1000
ABOVE_NOISE: Final = (
    f"above noise: surely more than {100 * NULL_SHARE:g} % of sequences differ by more than {NOISE_FACTOR:g} times "
    "the floor"
)
LEAST_FLOOR: Final = 2e-6
"""Relative error of fp32 sums in another order: nothing below it is ever named."""


@dataclass(frozen=True, slots=True)
class BoundaryDrift:
    """Measurements at one boundary: relative errors, medians over sequences with intervals; nan for none.

    `local` is the operator's error on the training kernel's inputs, `drift` of the kernels as they ran. Noise is of
    each kernel against itself in other batches, `precision` of the training operator in the other's format, the largest
    of any sequence. `above` is the share of sequences beyond `NOISE_FACTOR` times the floor.
    """

    boundary: Boundary
    local: Interval
    drift: Interval
    floor: float
    train_noise: float
    inference_noise: float
    precision: float
    prefill: float
    decode: float
    above: Interval
    is_above: bool

    @property
    def error(self) -> float:
        """The operator's own error, or where that was not measured the drift up to it."""
        return self.drift.estimate if math.isnan(self.local.estimate) else self.local.estimate


@dataclass(frozen=True, slots=True, eq=False)
class Measured:
    """Relative errors at one boundary, float64 [sequences], as in `BoundaryDrift`; nan where one was not measured."""

    local: NDArray[np.float64]
    drift: NDArray[np.float64]
    train_noise: NDArray[np.float64]
    inference_noise: NDArray[np.float64]
    precision: NDArray[np.float64]
    prefill: NDArray[np.float64]
    decode: NDArray[np.float64]
    allowed: NDArray[np.float64] | None = None


def least_sequences(boundaries: int, alpha: float) -> int:
    """Sequences without which no boundary could be named, were all of them beyond the floor."""
    return math.ceil(math.log(alpha / max(boundaries, 1)) / math.log(NULL_SHARE))


def enough_sequences(given: int, boundaries: int, alpha: float) -> None:
    """Refuse, before the work, sequences of which none could name anything."""
    if given < (least := least_sequences(2 * boundaries, alpha)):
        raise ValueError(
            f"sequences: {given} {'is' if given == 1 else 'are'} too few to name any of {boundaries} boundaries, even "
            f"one at which all of them differ; give {least} or more, better twice as many"
        )


def sequences_to_name(share: float, boundaries: int, alpha: float) -> int | None:
    """Sequences with which a boundary would be named if that share of them lay beyond; None where none would do."""
    counts = range(least_sequences(boundaries, alpha), _MAX_SEQUENCES)
    return next((n for n in counts if _tail(n, math.floor(n * share)) <= alpha / boundaries), None)


def boundary_drift(
    measured: Mapping[Boundary, Measured], alpha: float, *, rounding: float = 0.0
) -> tuple[BoundaryDrift, ...]:
    """Test each boundary on the sequences that reach it; any is named by chance with `alpha`, none below `rounding`."""
    if measured.keys() <= {OUTPUT, SAMPLER}:
        raise ValueError("no boundary was measured; the two kernels share no operator by name")
    rows = []
    for boundary, errors in measured.items():
        noise = [_of_known(values, np.max) for values in (errors.train_noise, errors.inference_noise, errors.precision)]
        floor = max([LEAST_FLOOR, rounding, *(level for level in noise if math.isfinite(level))])
        # Noise may have struck in a run and not in another; a sequence's rounding is its own.
        others = max([LEAST_FLOOR, rounding, *(level for level in noise[:2] if math.isfinite(level))])
        own = np.where(np.isfinite(errors.precision), np.fmax(others, errors.precision), others)
        judged = errors.drift if np.isnan(errors.local).all() else errors.local
        rows.append((boundary, errors, noise, floor, (judged > NOISE_FACTOR * own)[~np.isnan(judged)]))
    tests = holm([_p_value(beyond) for *_, beyond in rows], alpha)
    return tuple(
        BoundaryDrift(
            boundary=boundary,
            local=_median(errors.local, alpha),
            drift=_median(errors.drift, alpha),
            floor=floor,
            train_noise=noise[0],
            inference_noise=noise[1],
            precision=noise[2],
            prefill=_of_known(errors.prefill, np.median),
            decode=_of_known(errors.decode, np.median),
            above=_share(beyond, tests.level),
            is_above=failed,
        )
        for (boundary, errors, noise, floor, beyond), failed in zip(rows, tests.failed, strict=True)
    )


def batch_dependence(
    measured: Mapping[Boundary, Measured], alpha: float, rounding: float
) -> dict[Boundary, tuple[Interval, float]]:
    """Boundaries whose numbers surely depend on the batch: the share of sequences, and the floor held against."""
    floors = {
        key: max(LEAST_FLOOR, rounding, float(np.nanmax([*errors.allowed, 0.0])))
        for key, errors in measured.items()
        if errors.allowed is not None and not np.isnan(errors.inference_noise).all()
    }
    beyond = {
        key: noise[~np.isnan(noise)] > NOISE_FACTOR * floor
        for key, floor in floors.items()
        for noise in (measured[key].inference_noise,)
    }
    tests = holm([_p_value(above) for above in beyond.values()], alpha)
    return {
        key: (_share(above, tests.level), floors[key])
        for (key, above), failed in zip(beyond.items(), tests.failed, strict=True)
        if failed
    }


def _share(beyond: NDArray[np.bool_], level: float) -> Interval:
    sample = Binned.of_samples(beyond.astype(np.float64))
    return fraction_interval(sample, 0.5, alpha_lower=level, alpha_upper=level)


def _p_value(beyond: NDArray[np.bool_]) -> float:
    """P(Bin(n, NULL_SHARE) >= k), k the sequences beyond."""
    return _tail(beyond.size, int(beyond.sum()))


def _tail(n: int, k: int) -> float:
    return float(min(1.0, sum(math.comb(n, i) * NULL_SHARE**i * (1 - NULL_SHARE) ** (n - i) for i in range(k, n + 1))))


def _median(values: NDArray[np.float64], alpha: float) -> Interval:
    known: Sequence[float] | NDArray[np.float64] = values[~np.isnan(values)]
    # An order statistic is one also where some values are infinite: a number beyond all others stands for them.
    sample = Binned.of_samples(np.minimum(known, NOT_FINITE))
    return quantile_interval(sample, 0.5, alpha_lower=alpha / 2, alpha_upper=alpha / 2)


def _of_known(values: NDArray[np.float64], reduce: Callable[[NDArray[np.float64]], Any]) -> float:
    known = values[~np.isnan(values)]
    return float(reduce(known)) if known.size else math.nan


_RESAMPLE_COUNT: Final = 2000
_ORDER_PAIRS: Final = 4
"""Orders that are drawn of more components, each with its reverse."""
_MAX_EXACT_COMPONENTS: Final = 5
"""Components of which every set is run: 32 sets, fewer than eight orders of them have."""


@dataclass(frozen=True, slots=True)
class ComponentShare:
    """A component's Shapley value in shares of the whole, with an interval over sequences and drawn orders."""

    name: str
    share: Interval


@dataclass(frozen=True, slots=True)
class Shares:
    """Division of a drift, mean over sequences, among components, the largest share first."""

    whole: float
    components: tuple[ComponentShare, ...]


def shares_of(
    names: Sequence[str], value: Callable[[frozenset[int]], NDArray[np.float64]], *, alpha: float, seed: int = 0
) -> Shares:
    """Divide a drift among components, given the drift [sequences] with some of them swapped in, by index."""
    drift = cache(lambda components: np.asarray(value(components), dtype=np.float64))
    nothing, whole = drift(frozenset()), drift(frozenset(range(len(names))))
    generator = np.random.default_rng(seed)
    orders = _orders(len(names), generator)
    gains = np.zeros((len(orders), len(names), whole.size))
    for row, order in zip(gains, orders, strict=True):
        before, put_in = nothing, frozenset[int]()
        for index in order:
            put_in |= {index}
            row[index] = drift(put_in) - before
            before = drift(put_in)
    total = whole - nothing
    size = float(total.mean())
    every = len(names) <= _MAX_EXACT_COMPONENTS
    drawn = np.zeros(len(names)) if every or not size else _drawing_error(gains.mean(2) / size, alpha)
    gains = gains.mean(0)
    lower, upper = _bootstrap(gains, total, alpha, generator)

    estimates = gains.mean(1) / size if size else np.zeros(len(names))
    below, above = (np.hypot(np.maximum(gap, 0.0), drawn) for gap in (estimates - lower, upper - estimates))
    method = f"Shapley over {'all' if every else len(orders)} orders, expanded bootstrap over sequences"
    ends = zip(names, estimates.tolist(), below.tolist(), above.tolist(), strict=True)
    found = [
        ComponentShare(name, Interval(share, share - down, share + up, whole.size, method))
        for name, share, down, up in ends
    ]
    return Shares(float(whole.mean()), tuple(sorted(found, key=lambda component: -component.share.estimate)))


def _orders(components: int, generator: np.random.Generator) -> list[tuple[int, ...]]:
    """All orders of few components; of more, some of them, each followed by its reverse."""
    if components <= _MAX_EXACT_COMPONENTS:
        return list(permutations(range(components)))
    drawn = [tuple(generator.permutation(components).tolist()) for _ in range(_ORDER_PAIRS)]
    return [direction for order in drawn for direction in (order, order[::-1])]


def _drawing_error(by_order: NDArray[np.float64], alpha: float) -> NDArray[np.float64]:
    """Half width [components] of what drawing orders leaves open, from shares [orders, components] in pairs."""
    pairs = by_order.reshape(-1, 2, by_order.shape[1]).mean(1)
    spread = pairs.std(0, ddof=1) / np.sqrt(len(pairs))
    # A few orders may treat a component alike by chance: it is as uncertain as components are on average.
    spread = np.maximum(spread, np.sqrt(np.mean(spread**2)))
    return np.asarray(_student(1 - alpha / 2, len(pairs) - 1) * spread)


def _student(probability: float, freedom: int) -> float:
    with extra("stats", "intervals of shares"):
        from scipy.special import stdtrit  # noqa: PLC0415 - who only shows what was found has none
    return float(stdtrit(freedom, probability))


def _bootstrap(
    gains: NDArray[np.float64], total: NDArray[np.float64], alpha: float, generator: np.random.Generator
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Expanded percentile ends [components] of the ratio of means, sequences drawn with replacement."""
    n = total.size
    drawn = generator.multinomial(n, np.full(n, 1 / n), size=_RESAMPLE_COUNT).astype(np.float64)
    sums = drawn @ total
    usable = sums != 0.0
    if not usable.any():
        return np.zeros(len(gains)), np.zeros(len(gains))
    if n < 2:  # of one sequence nothing follows about others
        return np.zeros(len(gains)), np.ones(len(gains))
    ratios = (drawn[usable] @ gains.T) / sums[usable, None]
    tail = NormalDist().cdf(-math.sqrt(n / (n - 1)) * _student(1 - alpha / 2, n - 1))
    ends = np.quantile(ratios, [tail, 1 - tail], axis=0)
    return ends[0], ends[1]
