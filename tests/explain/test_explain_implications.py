"""No random pair of kernels keeps one promise and breaks another that is said to follow from it."""

import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kc_otel.explain.clause_facts import facts_of, sequence_bounds
from kc_otel.explain.implications import bound_on, never_exceeded
from kc_otel.explain.promise import Promise
from kc_otel.explain.ratio_regions import SEQUENCE, TOKEN, region, top

_PREFIX = ("logit_half_range", "tv_exact", "kl_train_inference", "kl_inference_train", "js")
_SAMPLED = ("log_ratio", "abs_log_ratio", "ratio", "tv_token", "k3", "chi2_token")
_MEANS_ONLY = ("k1",)


def kernels(seed, prefixes=4, vocabulary=5):
    """Weights of prefixes, and P, Q after each [prefixes, vocabulary]; drift, peakedness and outliers vary."""
    rng = np.random.default_rng(seed)
    scale, drift = rng.choice([0.3, 2.0, 5.0]), rng.choice([0.01, 0.2, 1.0, 3.0])
    z = rng.normal(0, scale, (prefixes, vocabulary))
    moved = z + drift * rng.normal(size=z.shape) * rng.choice([0.05, 1.0], size=(prefixes, 1))
    if rng.random() < 0.3:
        moved[0, 0] += rng.choice([-6, 6])
    softmax = lambda x: np.exp(x - x.max(1, keepdims=True)) / np.exp(x - x.max(1, keepdims=True)).sum(1, keepdims=True)  # noqa: E731
    return rng.dirichlet(np.ones(prefixes)), softmax(moved), softmax(z)


class Traffic:
    """The exact distribution of every metric under sampling from Q."""

    def __init__(self, weight, p, q):
        log_w = np.log(p / q)
        w = p / q
        self.token_weight = (weight[:, None] * q).ravel()
        self.prefix_weight = weight
        m = (p + q) / 2
        self.of = {
            "log_ratio": log_w,
            "k1": -log_w,
            "abs_log_ratio": abs(log_w),
            "ratio": w,
            "tv_token": np.maximum(1 - w, 0),
            "k3": np.expm1(log_w) - log_w,
            "chi2_token": (w - 1) ** 2,
            "logit_half_range": np.ptp(log_w, axis=1) / 2,
            "tv_exact": abs(p - q).sum(1) / 2,
            "kl_train_inference": (p * log_w).sum(1),
            "kl_inference_train": -(q * log_w).sum(1),
            "js": (p * np.log(p / m) + q * np.log(q / m)).sum(1) / 2,
        }

    def statistic(self, metric, kind, argument):
        values = self.of[metric]
        weight = self.token_weight if values.ndim == 2 else self.prefix_weight
        values = values.ravel()
        if kind == "mean":
            return float(values @ weight)
        if kind == "max":
            return float(values.max())
        if kind == "fraction":
            return float(weight[values > argument].sum())
        order = np.argsort(values)
        reached = np.cumsum(weight[order])
        return float(values[order][min(np.searchsorted(reached, argument - 1e-12), values.size - 1)])


statistics = st.one_of(
    st.just(("mean", 0.0)),
    st.just(("max", 0.0)),
    st.tuples(st.just("quantile"), st.sampled_from([0.5, 0.9, 0.99])),
    st.tuples(st.just("fraction"), st.sampled_from([0.01, 0.1, 0.3, 0.7, 1.5])),
)
metrics = st.sampled_from(_SAMPLED + _PREFIX)


@pytest.mark.slow
@settings(max_examples=1500, deadline=None)
@given(st.integers(0, 10_000), metrics, statistics, metrics, statistics)
def test_what_is_said_to_follow_does(seed, known, known_statistic, other, other_statistic):
    """The bound on the other statistic is not below its true value while the known limit is the true statistic."""
    traffic = Traffic(*kernels(seed))
    limit = traffic.statistic(known, *known_statistic)
    promise = Promise(known, known_statistic[0], limit, known_statistic[1])
    asked = Promise(other, other_statistic[0], 0.0, other_statistic[1])
    implied = bound_on(promise, asked)
    assume(implied is not None)
    assert traffic.statistic(other, *other_statistic) <= implied.value + 1e-7 * abs(implied.value) + 1e-9


@pytest.mark.parametrize("seed", range(60))
def test_every_rule_between_means_holds(seed):
    """For every pair of metrics, on kernels far and near; also from k1, which a clause names as a derived metric."""
    traffic = Traffic(*kernels(seed))
    rules = 0
    for known in (*_SAMPLED, *_PREFIX, *_MEANS_ONLY):
        for other in (*_SAMPLED, *_PREFIX, *_MEANS_ONLY):
            limit = traffic.statistic(known, "mean", 0.0)
            implied = bound_on(Promise(known, "mean", limit), Promise(other, "mean", 0.0))
            if implied is not None:
                rules += 1
                assert traffic.statistic(other, "mean", 0.0) <= implied.value + 1e-7 * abs(implied.value) + 1e-9, (
                    known,
                    other,
                )
    assert rules >= 30


@pytest.mark.parametrize("seed", range(40))
def test_the_mean_total_variation_of_a_promise_holds(seed):
    """Whatever statistic of whatever metric is limited, the mean TV that is concluded is not below the true one."""
    traffic = Traffic(*kernels(seed))
    truth = traffic.statistic("tv_exact", "mean", 0.0)
    concluded = 0
    for metric in (*_SAMPLED, *_PREFIX, *_MEANS_ONLY):
        for kind, argument in (("mean", 0), ("max", 0), ("quantile", 0.9), ("quantile", 0.5), ("fraction", 0.1)):
            if metric == "k1" and kind != "mean":
                continue
            facts = facts_of(Promise(metric, kind, traffic.statistic(metric, kind, argument), argument))
            if facts.mean_tv is not None:
                concluded += 1
                assert truth <= facts.mean_tv.value * (1 + 1e-9) + 1e-9, (metric, kind)
            if facts.mean_kl is not None:
                assert traffic.statistic("kl_inference_train", "mean", 0) <= facts.mean_kl * (1 + 1e-7) + 1e-9
    assert concluded >= 30


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("horizon", [2, 3])
def test_no_sequence_bound_is_broken(random_policies, seed, horizon):
    """The exact TV of whole sequences never exceeds a bound concluded from the exact statistics of its tokens."""
    p, q, log_w = random_policies(seed, 3, horizon)
    tv = abs(p - q).sum() / 2
    token_weight = np.repeat(q[:, None] / horizon, horizon, axis=1)
    w = np.exp(log_w)
    tokens = {
        "abs_log_ratio": abs(log_w),
        "tv_token": np.maximum(1 - w, 0),
        "k3": np.expm1(log_w) - log_w,
        "k1": -log_w,
        "chi2_token": (w - 1) ** 2,
    }
    for metric, values in tokens.items():
        mean = float((values * token_weight).sum())
        for by_sequence in (False, True):  # sequences of one length: both means are the same number
            for bound in sequence_bounds(facts_of(Promise(metric, "mean", mean, by_sequence=by_sequence)), horizon):
                assert tv <= bound.value * (1 + 1e-9) + 1e-9, (metric, bound)
        if metric != "k1":
            for bound in sequence_bounds(facts_of(Promise(metric, "max", float(values.max()))), horizon):
                assert tv <= bound.value * (1 + 1e-9) + 1e-9, (metric, bound)
    chi2 = float(((p / q - 1) ** 2) @ q)
    assert tv <= facts_of(Promise("chi2_seq", "mean", chi2)).sequence_tv.value * (1 + 1e-9)
    L = np.log(p / q)
    share = float(q[np.maximum(1 - np.exp(L), 0) > 0.05].sum())
    assert tv <= facts_of(Promise("tv_seq", "fraction", share, 0.05)).sequence_tv.value * (1 + 1e-9) + 1e-12


def test_a_support_deficit_stands_in_for_absolute_continuity():
    """With P on a token that Q never samples, k3 and the deficit together bound KL(Q||P); k3 alone is below it."""
    q, p = np.array([0.7, 0.3, 0.0]), np.array([0.5, 0.3, 0.2])
    log_w = np.log(p[:2] / q[:2])
    k3 = float((np.expm1(log_w) - log_w) @ q[:2])
    kl = float(-log_w @ q[:2])
    deficit = 1 - float(np.exp(log_w) @ q[:2])
    facts = facts_of(Promise("k3", "mean", k3), deficit)
    assert k3 < kl <= facts.mean_kl * (1 + 1e-12)
    assert "support" not in facts.needs
    assert "support" in facts_of(Promise("k3", "mean", k3)).needs


@given(st.integers(0, 5000), st.sampled_from([0.5, 0.9, 0.99]))
def test_a_limit_that_never_fails_cannot_be_reached(seed, rank):
    """Where a promise is called unbreakable, the true statistic of random kernels is within it."""
    traffic = Traffic(*kernels(seed))
    for promise in (
        Promise("ratio", "quantile", 1 / (1 - rank), rank),
        Promise("log_ratio", "quantile", -math.log(1 - rank), rank),
        Promise("ratio", "mean", 1.0),
        Promise("log_ratio", "mean", 0.0),
        Promise("ratio", "fraction", 1 / 1.5, 1.5),
        Promise("chi2_token", "fraction", 0.5, 1.0),
    ):
        if never_exceeded(promise):
            truth = traffic.statistic(promise.metric, promise.kind, promise.argument)
            assert truth <= promise.limit * (1 + 1e-9) + 1e-9
    assert never_exceeded(Promise("ratio", "quantile", 1.01 / (1 - rank), rank))
    assert not never_exceeded(Promise("ratio", "quantile", 0.99 / (1 - rank), rank))
    assert not never_exceeded(Promise("abs_log_ratio", "quantile", 50.0, rank))


@given(st.sampled_from(sorted(TOKEN | SEQUENCE)), st.floats(1e-6, 3.0))
def test_a_region_is_where_the_metric_is_within_its_limit(metric, limit):
    """At a finite end of the region the metric is at its limit; beyond it is more."""
    limit = min(limit, 0.999) if metric.startswith("tv") else limit
    low, high = region(metric, limit)
    inside = top(metric, (max(low, -60.0), min(high, 60.0)))
    assert inside <= limit * (1 + 1e-6) + 1e-12
    for end, step in ((low, -1e-3), (high, 1e-3)):
        if math.isfinite(end):
            assert top(metric, (end + min(step, 0), end + max(step, 0))) > limit


def test_a_quantile_is_not_a_worst_case():
    """A p99.9 of the half range says nothing of one token in a thousand: E[TV] <= tanh(rho/2) (1-q) + q."""
    facts = facts_of(Promise("logit_half_range", "quantile", 0.15, 0.999))
    assert facts.mean_tv.value == pytest.approx(math.tanh(0.075) * 0.999 + 0.001)
    assert facts.every_half_range is None
    assert facts_of(Promise("logit_half_range", "max", 0.15)).every_half_range == 0.15


def test_markov_is_attained():
    """A mean of 0.01 may be one token in fifty at 0.5, and not more; through k3, by what (1-w)+ > 0.5 costs there."""
    share = bound_on(Promise("tv_token", "mean", 0.01), Promise("tv_token", "fraction", 0.0, 0.5))
    assert share.value == pytest.approx(0.02)
    through = bound_on(Promise("k3", "mean", 0.01), Promise("tv_token", "fraction", 0.0, 0.5))
    assert through.value == pytest.approx(0.01 / (math.log(2) - 0.5))
    quantile = bound_on(Promise("tv_token", "mean", 0.001), Promise("tv_token", "quantile", 0.0, 0.99))
    assert quantile.value == pytest.approx(0.1)
