"""Divergences from top-k log-probs: what the listed tokens and the mass of the tails say about the whole distributions.

Each side lists its own most probable tokens; the lists may name different ones. A token that a side does not list has a
share of that side's tail mass, and no more than the smallest probability that the side lists.

- `TV = 1 - sum_y min(P(y), Q(y))`. It is largest where the tails share no token: `TV <= 1 - sum over tokens listed by
  both`. It is smallest where each tail covers what the other side lists, as far as mass and smallest probability
  allow, and the rest of the tails coincide. With one list for both it is `[(sum|p - q| + |p_tail - q_tail|) / 2,
  (sum|p - q| + p_tail + q_tail) / 2]`. Both ends are attained, given a vocabulary large enough for the tails.
- Merging tokens never raises an f-divergence (data processing; Csiszar 1967), so KL, chi2 and JS are at least those of
  the listed tokens and one lump of the rest. The tokens that one side lists alone are kept apart, at the probability
  on the other side that makes the divergence smallest: equal ratios within the lump, none above the smallest listed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kc_otel.stats._check import real

__all__ = ["TopKBounds", "topk_bounds"]

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class TopKBounds:
    """What the two lists say, one element per position [...].

    Attributes:
        tv_lower: TV(P, Q) is at least this.
        tv_upper: TV(P, Q) is at most this.
        kl_train_inference: KL(P || Q) is at least this, nats.
        kl_inference_train: KL(Q || P) is at least this, nats.
        chi2: chi2(P, Q) = E_Q[(w - 1)^2] is at least this.
        js: Jensen-Shannon divergence is at least this, nats.
        train_tail: Mass of P that its list leaves out.
        inference_tail: Mass of Q that its list leaves out.
    """

    tv_lower: Floats
    tv_upper: Floats
    kl_train_inference: Floats
    kl_inference_train: Floats
    chi2: Floats
    js: Floats
    train_tail: Floats
    inference_tail: Floats


def topk_bounds(
    train_ids: ArrayLike,
    train_logprobs: ArrayLike,
    inference_ids: ArrayLike,
    inference_logprobs: ArrayLike,
    *,
    extra: int = 1,
    rounding: float = 1e-6,
) -> TopKBounds:
    """Bounds on the divergences of two next-token distributions from the log-probs that each side lists.

    Source: for TV the overlap `sum min(P, Q)` as a linear program; for the others the data-processing inequality and
    the KKT conditions of its smallest case.

    Args:
        train_ids: Tokens [..., k] that the training kernel lists; a negative id is padding.
        train_logprobs: Their log-probs [..., k], nats, after the same processing on both sides.
        inference_ids: Tokens [..., m] that the inference kernel lists.
        inference_logprobs: Their log-probs [..., m].
        extra: Entries of a list that may be less probable than some that it leaves out. vLLM appends the sampled token
            to its k most probable ones, hence 1; 0 sharpens the bounds where every list is a true top-k.
        rounding: Error of a tail mass, which is 1 less the listed ones: lower bounds of KL and chi2 take the tail that
            they divide by as larger by this, so that rounding is never taken for a token outside the support, and that
            of JS takes both tails as much nearer to each other.

    Raises:
        ValueError: If shapes do not fit, a log-prob is NaN or above 0, a row lists a token twice, or its probabilities
            add up to more than 1.

    >>> import numpy as np
    >>> p, q = np.log([0.6, 0.3]), np.log([0.5, 0.3])
    >>> found = topk_bounds([7, 2], p, [7, 2], q, extra=0)
    >>> round(float(found.tv_lower), 3), round(float(found.tv_upper), 3)
    (0.1, 0.2)
    >>> found = topk_bounds([7, 2], p, [7, 5], q, extra=0)        # the tails can cover only part of 2 and 5
    >>> round(float(found.tv_lower), 3), round(float(found.tv_upper), 3)
    (0.2, 0.5)
    """
    p_ids, p = _listed("train", train_ids, train_logprobs)
    q_ids, q = _listed("inference", inference_ids, inference_logprobs)
    if p.shape[:-1] != q.shape[:-1]:
        msg = f"inference_ids: positions {q.shape[:-1]} are not those of train_ids, {p.shape[:-1]}"
        raise ValueError(msg)
    if isinstance(extra, bool) or extra < 0:
        msg = f"extra: {extra!r} is not a number of entries"
        raise ValueError(msg)
    real("rounding", rounding)
    p_tail, q_tail = (np.maximum(1.0 - side.sum(axis=-1), 0.0) for side in (p, q))
    p_most, q_most = _most(p_ids, p, p_tail, extra), _most(q_ids, q, q_tail, extra)

    same = (p_ids[..., :, None] == q_ids[..., None, :]) & (p_ids >= 0)[..., :, None]
    p_shared, q_shared = same.any(axis=-1), same.any(axis=-2)
    opposite = np.where(same, q[..., None, :], 0.0).sum(axis=-1)
    both_p, both_q = np.where(p_shared, p, 0.0), np.where(p_shared, opposite, 0.0)
    alone_p, alone_q = np.where(p_shared, 0.0, p), np.where(q_shared, 0.0, q)

    overlap = np.minimum(both_p, both_q).sum(axis=-1)
    on_p = np.minimum(np.minimum(alone_p, q_most[..., None]).sum(axis=-1), q_tail)
    on_q = np.minimum(np.minimum(alone_q, p_most[..., None]).sum(axis=-1), p_tail)
    most = overlap + on_p + on_q + np.minimum(q_tail - on_p, p_tail - on_q)

    pairs = _Pairs(both_p, both_q, alone_p, alone_q, p_tail, q_tail, p_most, q_most)
    over_q, over_p = pairs.merged(0.0, rounding), pairs.merged(rounding, 0.0)
    return TopKBounds(
        tv_lower=np.clip(1.0 - most, 0.0, 1.0),
        tv_upper=np.clip(1.0 - overlap, 0.0, 1.0),
        kl_train_inference=_largest([_kl(a, b) for a, b in over_q]),
        kl_inference_train=_largest([_kl(b, a) for a, b in over_p]),
        chi2=_largest([_chi2(a, b) for a, b in over_q]),
        js=pairs.least_js(rounding),
        train_tail=p_tail,
        inference_tail=q_tail,
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Pairs:
    """Tokens by who lists them, with the tails and the most that a token in each can have."""

    both_p: Floats
    both_q: Floats
    alone_p: Floats
    alone_q: Floats
    p_tail: Floats
    q_tail: Floats
    p_most: Floats
    q_most: Floats

    def merged(self, p_slack: float, q_slack: float) -> tuple[tuple[Floats, Floats], tuple[Floats, Floats]]:
        """Two merged pairs of distributions, with the tails larger by the slack: Q's unknown filled, and P's."""
        p_lump, q_lump = self.p_tail + p_slack, self.q_tail + q_slack
        p_rest, q_rest = p_lump + self.alone_p.sum(axis=-1), q_lump + self.alone_q.sum(axis=-1)
        filled_q, left_q, _ = _filled(self.alone_p, p_lump, q_rest, np.minimum(self.q_most + q_slack, q_lump))
        filled_p, left_p, _ = _filled(self.alone_q, q_lump, p_rest, np.minimum(self.p_most + p_slack, p_lump))
        return (
            _joined(self.both_p, self.both_q, self.alone_p, filled_q, p_lump, left_q),
            _joined(self.both_p, self.both_q, filled_p, self.alone_q, left_p, q_lump),
        )

    def least_js(self, rounding: float) -> Floats:
        """The smallest JS that two distributions with these lists, and tails within the rounding, can have."""
        p_rest, q_rest = self.p_tail + self.alone_p.sum(axis=-1), self.q_tail + self.alone_q.sum(axis=-1)
        fillings = (
            _least_js(self.alone_p, self.p_tail, q_rest, self.q_most + rounding, rounding),
            _least_js(self.alone_q, self.q_tail, p_rest, self.p_most + rounding, rounding),
        )
        return _js(self.both_p, self.both_q) + _largest(list(fillings))


def _listed(side: str, ids: ArrayLike, logprobs: ArrayLike) -> tuple[NDArray[np.int64], Floats]:
    """Tokens and probabilities [..., k]; padding has the probability 0."""
    token, value = np.asarray(ids), np.asarray(logprobs, dtype=np.float64)
    if token.shape != value.shape or token.ndim == 0 or token.shape[-1] == 0:
        msg = f"{side}_logprobs: shape {value.shape} for ids of shape {token.shape}; pass both as [..., k]"
        raise ValueError(msg)
    if token.dtype.kind not in "iu":
        msg = f"{side}_ids: {token.dtype} are no token ids; pass integers"
        raise ValueError(msg)
    token = token.astype(np.int64)
    given = token >= 0
    real(f"{side}_logprobs", np.where(given, value, 0.0), low=-np.inf, high=1e-6, infinite=True, what="a log-prob")
    ordered = np.sort(token, axis=-1)
    twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
    if twice.any():
        msg = f"{side}_ids: token {int(ordered[..., 1:][twice][0])} is listed twice in a row"
        raise ValueError(msg)
    probability = np.exp(np.where(given, value, -np.inf))
    total = probability.sum(axis=-1)
    if (total > 1.0 + 1e-3).any():
        msg = f"{side}_logprobs: the probabilities of a row add up to {float(total.max())!r}, more than 1"
        raise ValueError(msg)
    return token, probability


def _most(ids: NDArray[np.int64], probability: Floats, tail: Floats, extra: int) -> Floats:
    """Largest probability that a token which a side does not list can have there."""
    known = np.sort(np.where(ids >= 0, probability, np.inf), axis=-1)
    if extra >= known.shape[-1]:
        return tail
    return np.asarray(np.minimum(known[..., extra], tail))


def _least_js(listed: Floats, rest: Floats, mass: Floats, most: Floats, rounding: float) -> Floats:
    """JS of listed tokens [..., k] and a rest against the filling that makes it smallest, masses within the rounding.

    It is convex in the two masses, and falls along each of them towards the other. So its value at the corner of their
    box where they are nearest is the least of all, provided that there they still are on the sides where they were;
    else it is that of the listed tokens alone.
    """
    found = _js(listed, np.minimum(listed, most[..., None]))
    for sign in (1.0, -1.0):
        near, mate = np.maximum(rest + sign * rounding, 0.0), np.maximum(mass - sign * rounding, 0.0)
        filled, lump, scale = _filled(listed, near, mate, most)
        value = _js(listed, filled) + _js(near[..., None], lump[..., None])
        found = np.where(sign * (scale - 1.0) >= 0.0, np.maximum(found, value), found)
    return found


def _filled(listed: Floats, rest: Floats, mass: Floats, most: Floats) -> tuple[Floats, Floats, Floats]:
    """Probabilities of tokens [..., k] on the side that does not list them, of the lump [...], and 1/r, at the least.

    Each has `min(most, listed / r)`, and the lump of everything else `rest / r`, with the one r that makes them add up
    to `mass`. The tokens at `most` are those that are listed with the largest probabilities: the n of them for which r
    fits. Where they take all of the mass there is no r.
    """
    order = np.argsort(-listed, axis=-1, kind="stable")
    ranked = np.take_along_axis(listed, order, -1)
    none = np.zeros((*ranked.shape[:-1], 1))
    # Summed from the smallest: as a difference of sums, what is left would round to 0 while there is something.
    after = np.concatenate([np.cumsum(ranked[..., ::-1], axis=-1)[..., ::-1], none], axis=-1)
    free = after + rest[..., None]
    left = mass[..., None] - np.arange(ranked.shape[-1] + 1) * most[..., None]
    # With n tokens at the most, 1/r = left / free. It fits once the largest of the others stays below the most.
    scale = np.divide(left, free, out=np.full_like(free, np.inf), where=free > 0.0)
    following = np.concatenate([ranked, none], axis=-1)
    fits = (following * np.where(following > 0.0, scale, 0.0) <= most[..., None]) | (left <= 0.0)
    n = fits.argmax(axis=-1)[..., None]
    chosen = np.where(np.take_along_axis(left, n, -1) > 0.0, np.take_along_axis(scale, n, -1), 0.0)
    with np.errstate(invalid="ignore"):
        share = np.where(ranked > 0.0, ranked * chosen, 0.0)
    filled = np.where(np.arange(ranked.shape[-1]) < n, most[..., None], np.minimum(share, most[..., None]))
    result = np.empty_like(filled)
    np.put_along_axis(result, order, np.where(ranked > 0.0, filled, 0.0), -1)
    # Not what the tokens leave of the mass: that difference rounds to 0 where a sliver should remain.
    some = np.take_along_axis(free, n, -1)[..., 0] > 0.0
    with np.errstate(invalid="ignore"):
        lump = np.where(some, rest * chosen[..., 0], np.maximum(np.take_along_axis(left, n, -1)[..., 0], 0.0))
    return result, lump, np.where(chosen[..., 0] > 0.0, chosen[..., 0], np.nan)


def _joined(
    both_p: Floats, both_q: Floats, alone_p: Floats, alone_q: Floats, lump_p: Floats, lump_q: Floats
) -> tuple[Floats, Floats]:
    """The two merged distributions: tokens listed by both, those by one side, the lump of the rest."""
    p = np.concatenate([both_p, alone_p, lump_p[..., None]], axis=-1)
    q = np.concatenate([both_q, alone_q, lump_q[..., None]], axis=-1)
    return p, q


def _kl(p: Floats, q: Floats) -> Floats:
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = np.where(p > 0.0, p * np.log(p / q), 0.0)
    return np.asarray(np.maximum(terms.sum(axis=-1), 0.0))


def _chi2(p: Floats, q: Floats) -> Floats:
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        terms = np.where(p > 0.0, p * (p / q), 0.0)
    return np.asarray(np.maximum(terms.sum(axis=-1) - 1.0, 0.0))


def _js(p: Floats, q: Floats) -> Floats:
    """Sum of (p log(p/m) + q log(q/m)) / 2, m the middle: terms that are never negative, each to its last digits."""
    both = p + q
    apart = np.divide(p - q, both, out=np.zeros(both.shape), where=both > 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        far = (1.0 + apart) * np.log1p(apart) + (1.0 - apart) * np.log1p(-apart)
    far = np.where(np.abs(apart) < 1.0, far, 2.0 * np.log(2.0))
    square = apart * apart
    return np.asarray((both * np.where(square < 1e-6, square * (1.0 + square / 6.0), far)).sum(axis=-1) / 4.0)


def _largest(bounds: list[Floats]) -> Floats:
    largest: Floats = np.maximum.reduce(bounds)
    return largest
