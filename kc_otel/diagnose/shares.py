"""Shares of a drift among components: each alone, each left out, and by Shapley, with intervals over sequences.

A component's Shapley value is what it adds on average to the components that were put in before it, over all orders.
Some orders are drawn, each with its reverse, which cancels most of the error of drawing; the shares add up to the whole
in every single order, so they do here.

Source: Castro, Gomez and Tejada 2009, Polynomial calculation of the Shapley value based on sampling; Mitchell et al.
2022, Sampling Permutations for Shapley Value Estimation (antithetic orders).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kc_otel.stats import Interval

__all__ = ["ComponentShare", "Shares", "shares_of"]

_RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class ComponentShare:
    """What of a drift is one component's.

    Attributes:
        name: The component.
        alone: Drift with it alone swapped in, in shares of the whole: first order.
        without: What goes away when it alone is swapped out, in shares of the whole.
        share: Shapley value in shares of the whole, with a bootstrap interval over sequences.
    """

    name: str
    alone: float
    without: float
    share: Interval


@dataclass(frozen=True, slots=True)
class Shares:
    """How a drift divides among components.

    Attributes:
        whole: Drift with every component swapped in, mean over sequences.
        interaction: What the components do together beyond the sum of each alone, in shares of the whole.
        components: Largest share first.
        evaluations: Sets of components that the model was run with.
    """

    whole: float
    interaction: float
    components: tuple[ComponentShare, ...]
    evaluations: int


def shares_of(
    names: Sequence[str],
    value: Callable[[frozenset[int]], NDArray[np.float64]],
    *,
    alpha: float,
    pairs: int = 4,
    seed: int = 0,
) -> Shares:
    """Divide a drift among components.

    >>> weights = np.array([[3.0, 1.0], [6.0, 2.0], [3.0, 1.0]])
    >>> found = shares_of(["scales", "cache"], lambda put_in: weights[:, sorted(put_in)].sum(1), alpha=0.05)
    >>> [(each.name, round(each.share.estimate, 2)) for each in found.components]
    [('scales', 0.75), ('cache', 0.25)]

    Args:
        names: The components.
        value: Drift of each sequence, [sequences], with these components swapped in, by index.
        alpha: Error probability of the intervals, both sides together.
        pairs: Orders that are drawn, each with its reverse.
        seed: Of the draw.

    Raises:
        ValueError: If there is no component.
    """
    if not names:
        raise ValueError("no component to divide a drift among")
    known: dict[frozenset[int], NDArray[np.float64]] = {}

    def drift(components: frozenset[int]) -> NDArray[np.float64]:
        if components not in known:
            known[components] = np.asarray(value(components), dtype=np.float64)
        return known[components]

    everything = frozenset(range(len(names)))
    nothing, whole = drift(frozenset()), drift(everything)
    alone = np.stack([drift(frozenset({each})) for each in range(len(names))])
    without = np.stack([drift(everything - {each}) for each in range(len(names))])
    generator = np.random.default_rng(seed)
    orders = [tuple(generator.permutation(len(names)).tolist()) for _ in range(pairs)]
    orders = list(dict.fromkeys([*orders, *(order[::-1] for order in orders)]))
    gains = np.zeros((len(names), whole.size))
    for order in orders:
        before, put_in = nothing, frozenset[int]()
        for each in order:
            put_in |= {each}
            gains[each] += drift(put_in) - before
            before = drift(put_in)
    gains /= len(orders)
    total = whole - nothing
    lower, upper = _bootstrap(gains, total, alpha, generator)
    size = float(total.mean())

    def share(values: NDArray[np.float64]) -> float:
        return float(values.mean() / size) if size else 0.0

    method = f"Shapley over {len(orders)} orders, bootstrap over sequences"
    found = [
        ComponentShare(
            name,
            share(alone[each] - nothing),
            share(whole - without[each]),
            Interval(share(gains[each]), float(lower[each]), float(upper[each]), whole.size, method),
        )
        for each, name in enumerate(names)
    ]
    interaction = 1.0 - sum(each.alone for each in found) if size else 0.0
    found.sort(key=lambda each: -each.share.estimate)
    return Shares(float(whole.mean()), interaction, tuple(found), len(known))


def _bootstrap(
    gains: NDArray[np.float64], total: NDArray[np.float64], alpha: float, generator: np.random.Generator
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Percentile ends [components] of the ratio of means, sequences drawn with replacement."""
    drawn = generator.multinomial(total.size, np.full(total.size, 1 / total.size), size=_RESAMPLES).astype(np.float64)
    sums = drawn @ total
    usable = sums != 0.0
    if not usable.any():
        return np.zeros(len(gains)), np.zeros(len(gains))
    ratios = (drawn[usable] @ gains.T) / sums[usable, None]
    ends = np.quantile(ratios, [alpha / 2, 1 - alpha / 2], axis=0)
    return ends[0], ends[1]
