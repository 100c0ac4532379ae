"""Divergences from top-k lists."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kc_otel.stats.topk import topk_bounds


def top(p: np.ndarray, k: int, also: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Ids and log-probs of the k most probable tokens [N, k], and of one more [N] as vLLM adds it."""
    ids = np.argsort(-p, axis=1)[:, :k]
    if also is not None:
        listed = (ids == also[:, None]).any(axis=1)
        ids = np.concatenate([ids, np.where(listed, -1, also)[:, None]], axis=1)
    with np.errstate(divide="ignore"):
        return ids, np.log(np.where(ids < 0, 1.0, np.take_along_axis(p, np.maximum(ids, 0), 1)))


def js(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    m = (p + q) / 2
    return ((p * np.log(p / m)).sum(axis=1) + (q * np.log(q / m)).sum(axis=1)) / 2


def softmax(z: np.ndarray) -> np.ndarray:
    weight = np.exp(z - z.max(axis=1, keepdims=True))
    return weight / weight.sum(axis=1, keepdims=True)


@given(
    st.integers(0, 2**32 - 1),
    st.integers(2, 30),
    st.integers(1, 8),
    st.integers(1, 8),
    st.floats(0.0, 4.0),
    st.booleans(),
)
def test_bounds_hold(divergences, seed, vocabulary, k, m, drift, sampled):
    """No pair of distributions has a divergence outside what its two lists say, with an extra token or without."""
    rng = np.random.default_rng(seed)
    z = rng.normal(0, 2.5, (6, vocabulary))
    p, q = softmax(z + drift * rng.normal(0, 1, z.shape)), softmax(z)
    also = np.array([rng.choice(vocabulary, p=row) for row in q]) if sampled else None
    found = topk_bounds(
        *top(p, min(k, vocabulary), also), *top(q, min(m, vocabulary), also), extra=int(sampled), rounding=1e-12
    )
    exact = [divergences(a, b) for a, b in zip(p, q, strict=True)]
    tv = np.array([d["tv"] for d in exact])
    slack = 1e-9
    assert (found.tv_lower <= tv + slack).all()
    assert (tv <= found.tv_upper + slack).all()
    assert (found.kl_train_inference <= np.array([d["kl_pq"] for d in exact]) + slack).all()
    assert (found.kl_inference_train <= np.array([d["kl_qp"] for d in exact]) + slack).all()
    assert (found.chi2 <= np.array([d["chi2"] for d in exact]) * (1 + slack) + slack).all()
    assert (found.js <= js(p, q) + slack).all()


def exact_js(p, q):
    """Jensen-Shannon divergence of two distributions, in extended precision."""
    p, q = (np.asarray(side, dtype=np.longdouble) for side in (p, q))
    m = (p + q) / 2
    terms = [a * np.log(a / c) for side in (p, q) for a, c in zip(side, m, strict=True) if a > 0]
    return float(sum(terms) / 2)


@given(
    st.lists(st.tuples(st.integers(-60, 0), st.floats(0.5, 1)), min_size=2, max_size=6),
    st.lists(st.sampled_from([0.0, 0.0, 1e-9, -1e-4, 1e-4, 0.3, 3.0]), min_size=6, max_size=6),
    st.integers(1, 6),
    st.integers(1, 6),
    st.booleans(),
    st.sampled_from([1e-15, 1e-9, 1e-6]),
)
def test_js_is_a_lower_bound_down_to_the_last_digits(powers, moved, k, m, float32, rounding):
    """With probabilities down to 1e-18, nearly equal kernels, and logs of 32 bits if the rounding says so."""
    weight = np.array([x * 2.0**e for e, x in powers])
    p = weight / weight.sum()
    q = p * np.exp(np.array(moved[: p.size]))
    q /= q.sum()
    lists = top(p[None], min(k, p.size)), top(q[None], min(m, p.size))
    kind = np.float32 if float32 and rounding >= 1e-6 else np.float64
    (p_ids, p_log), (q_ids, q_log) = ((ids, logs.astype(kind)) for ids, logs in lists)
    found = topk_bounds(p_ids, p_log, q_ids, q_log, extra=0, rounding=rounding)
    error = 3e-7 if kind is np.float32 else 1e-14
    assert float(found.js[0]) <= exact_js(p, q) * (1 + 1e-6) + error * np.abs(p - q).sum() + error**2 + 1e-18


def test_tails_that_cover_what_the_other_side_lists_cost_nothing():
    """A sliver of 1e-18 in one list, which sums of doubles lose, is no mass that the other side's tail would miss."""
    p, q = np.array([0.51, 0.49, 1e-18]), np.array([0.5101, 0.4899, 1e-18])
    for extra in (0, 1):
        for one, other in ((p, q), (q, p)):
            found = topk_bounds([0], np.log(one[:1]), [0, 1, 2], np.log(other), extra=extra)
            assert 0.0 < float(found.js) <= exact_js(one, other)
            mirrored = topk_bounds([0, 1, 2], np.log(other), [0], np.log(one[:1]), extra=extra)
            assert float(mirrored.js) == pytest.approx(float(found.js), rel=1e-6)


@given(st.integers(0, 2**32 - 1), st.integers(1, 6))
def test_equal_lists_give_the_textbook_interval(seed, k):
    """With one list for both, TV is within half of the listed differences plus the tails' difference or sum."""
    rng = np.random.default_rng(seed)
    p, q = rng.dirichlet(np.ones(12), 2)
    ids = np.arange(k)
    found = topk_bounds(ids, np.log(p[:k]), ids, np.log(q[:k]), extra=k)
    listed, p_tail, q_tail = np.abs(p[:k] - q[:k]).sum(), p[k:].sum(), q[k:].sum()
    assert float(found.tv_lower) == pytest.approx((listed + abs(p_tail - q_tail)) / 2)
    assert float(found.tv_upper) == pytest.approx((listed + p_tail + q_tail) / 2)
    assert float(found.train_tail) == pytest.approx(p_tail)
    assert float(found.inference_tail) == pytest.approx(q_tail)


def test_everything_is_exact_when_everything_is_listed(divergences):
    """Lists of the whole vocabulary, in any order, give the divergences themselves."""
    rng = np.random.default_rng(0)
    p, q = rng.dirichlet(np.ones(9), 2)
    left, right = rng.permutation(9), rng.permutation(9)
    found = topk_bounds(left, np.log(p[left]), right, np.log(q[right]), rounding=0.0)
    exact = divergences(p, q)
    assert float(found.tv_lower) == pytest.approx(exact["tv"])
    assert float(found.tv_upper) == pytest.approx(exact["tv"])
    assert float(found.kl_train_inference) == pytest.approx(exact["kl_pq"])
    assert float(found.kl_inference_train) == pytest.approx(exact["kl_qp"])
    assert float(found.chi2) == pytest.approx(exact["chi2"])
    assert float(found.js) == pytest.approx(js(p[None], q[None])[0])


def test_both_ends_of_the_interval_are_attained(divergences):
    """Tails that coincide and tails that share no token have the two ends exactly."""
    listed_p, listed_q = [0.5, 0.3], [0.4, 0.35]
    found = topk_bounds([0, 1], np.log(listed_p), [0, 1], np.log(listed_q), extra=0, rounding=0.0)
    together = divergences(np.array([*listed_p, 0.2, 0.0]), np.array([*listed_q, 0.25, 0.0]))
    assert float(found.tv_lower) == pytest.approx(together["tv"])
    assert float(found.kl_train_inference) == pytest.approx(together["kl_pq"])
    assert float(found.kl_inference_train) == pytest.approx(together["kl_qp"])
    assert float(found.chi2) == pytest.approx(together["chi2"])
    apart = divergences(np.array([*listed_p, 0.2, 0.0]), np.array([*listed_q, 0.0, 0.25]))
    assert float(found.tv_upper) == pytest.approx(apart["tv"])


def test_smallest_listed_probability_sharpens(divergences):
    """A token that a true top-k leaves out is no more probable than the least listed: the least TV and KL show it."""
    # P lists token 0 with 0.6; Q lists token 1 with 0.1, so Q(0) <= 0.1.
    sharp = topk_bounds([0], np.log([0.6]), [1], np.log([0.1]), extra=0, rounding=0.0)
    blunt = topk_bounds([0], np.log([0.6]), [1], np.log([0.1]), extra=1, rounding=0.0)
    assert float(sharp.tv_lower) == pytest.approx(0.5)
    assert float(blunt.tv_lower) == pytest.approx(0.0)
    # The lump of the rest has 0.4 of P and 0.9 of Q: this pair of distributions attains it.
    worst = divergences(np.array([0.6, 0.4 / 9, 3.2 / 9]), np.array([0.1, 0.1, 0.8]))
    assert float(sharp.kl_train_inference) == pytest.approx(worst["kl_pq"])
    assert float(sharp.kl_inference_train) == pytest.approx(worst["kl_qp"])
    assert float(sharp.chi2) == pytest.approx(worst["chi2"])
    assert float(blunt.kl_train_inference) == pytest.approx(0.0, abs=1e-12)


def test_filling_is_the_smallest_case():
    """What a side does not list is filled so that KL is as small as it can be: SciPy finds nothing smaller."""
    from scipy.optimize import minimize

    rng = np.random.default_rng(4)
    for _ in range(20):
        p = np.sort(rng.dirichlet(np.ones(5)))[::-1][:4]
        most, mass = rng.uniform(0.02, 0.2), 1.0
        ids = np.arange(4)
        found = topk_bounds(ids, np.log(p), [9], np.log([most]), extra=0, rounding=0.0)

        def kl(x, p=p, mass=mass):
            rest_p, rest_q = 1 - p.sum(), mass - x.sum()
            return float((p * np.log(p / x)).sum() + rest_p * np.log(rest_p / rest_q))

        best = minimize(
            kl, np.full(4, most / 2), bounds=[(1e-9, most)] * 4, method="SLSQP", options={"ftol": 1e-14, "maxiter": 500}
        )
        # The other side's own list (token 9) can only raise it.
        assert float(found.kl_train_inference) >= best.fun - 1e-6
        if p[0] / most * 2 > 1 and best.fun > 0.05:
            one_sided = found.kl_train_inference
            assert float(one_sided) == pytest.approx(best.fun, rel=1e-3) or float(one_sided) > best.fun


def test_rounding_of_a_tail_is_no_missing_support():
    """Float32 log-probs that add up to one leave KL finite; a token that is really outside the support does not."""
    p = np.array([0.7, 0.2, 0.1 - 1e-9])
    q = np.float32(np.log([0.7, 0.3])).astype(np.float64)
    found = topk_bounds([0, 1, 2], np.log(p), [0, 1], q)
    assert np.isfinite(found.kl_train_inference)
    assert 0.5 < float(found.kl_train_inference) < 1.2  # 0.1 log(0.1 / 1e-6) - ...: far from Q, and not infinitely
    assert np.isinf(topk_bounds([0, 1], np.log([0.5, 0.5]), [0], [0.0], rounding=0.0, extra=0).kl_train_inference)


def test_padding_and_positions_are_respected():
    """Positions are independent of one another, and padding is as if it were not there."""
    one = topk_bounds([3, 5], np.log([0.5, 0.2]), [5, 3], np.log([0.3, 0.4]))
    many = topk_bounds(
        [[[3, 5, -1]], [[1, 2, 3]]],
        [[[np.log(0.5), np.log(0.2), np.nan]], np.log([[0.3, 0.3, 0.3]]).tolist()],
        [[[5, 3]], [[7, 8]]],
        [np.log([[0.3, 0.4]]).tolist(), np.log([[0.5, 0.4]]).tolist()],
    )
    assert many.tv_lower.shape == (2, 1)
    for name in ("tv_lower", "tv_upper", "kl_train_inference", "kl_inference_train", "chi2", "js"):
        assert getattr(many, name)[0, 0] == pytest.approx(float(getattr(one, name)))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"train_ids": [1, 1]}, "train_ids: token 1 is listed twice"),
        ({"train_ids": [1.0, 2.0]}, "train_ids: float64"),
        ({"train_ids": [1]}, "train_logprobs: shape"),
        ({"train_logprobs": [0.5, -1.0]}, "train_logprobs: 0.5"),
        ({"train_logprobs": [np.nan, -1.0]}, "train_logprobs: nan"),
        ({"train_logprobs": [-0.1, -0.1]}, "train_logprobs: the probabilities"),
        ({"inference_ids": [[1, 2]], "inference_logprobs": [[-1.0, -2.0]]}, "inference_ids: positions"),
        ({"extra": -1}, "extra: -1"),
        ({"rounding": -1.0}, "rounding: -1.0"),
    ],
)
def test_bad_input_is_named(change, says):
    """Each refusal names the argument and the value."""
    good = {
        "train_ids": [1, 2],
        "train_logprobs": [-1.0, -2.0],
        "inference_ids": [1, 2],
        "inference_logprobs": [-1.0, -2.0],
    }
    with pytest.raises(ValueError, match=says):
        topk_bounds(**{**good, **change})
