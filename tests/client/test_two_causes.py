"""Drift of the kernels and staleness of the weights, told apart where either is planted."""

import numpy as np
import pytest

from kc_otel import Recorder, TrainingLog
from kc_otel.judge.causes import to_blame
from kc_otel.judge.verdict import Part
from tests.tools.contracts import contract_of
from tests.tools.judge import Judge
from tests.tools.two_causes import LIMIT, PLANTED, SHARES, sampled

TOKENS = 12


def contract(**changes):
    parts = {
        "statistical": [{"id": "token-tv", "metric": "tv_token", "limit": LIMIT}],
        "runtime": [{"id": "lag", "metric": "weights_lag", "statistic": "max", "limit": 1}],
        "observability": {"window": "5m", "long_window": "10m", "min_samples": 100, "sampling": 1.0},
        "escalation": [{"on": "fail", "severity": "warning", "do": ["notify"]}],
    }
    return contract_of(**parts | changes)


@pytest.mark.parametrize("said", PLANTED)
@pytest.mark.parametrize("runs", [2, pytest.param(10, marks=pytest.mark.slow)])
def test_planted_drift_and_planted_staleness_are_told_apart(said, runs):
    for seed in range(runs):
        of, (train, inference, lags) = contract(), sampled(seed, *PLANTED[said])
        judge = Judge(of)
        with Recorder(of, metric_exporter=judge, export_interval=1000.0, log=TrainingLog()) as recorder:
            recorder.compare(train, inference, weights=(20, 20 - lags))
            assert recorder.force_flush()
            evaluation, scalars = judge.evaluation(), dict(recorder.scalars())
        verdicts = {verdict.cell.clause: verdict.status.value for verdict in evaluation.verdicts}
        (cell,) = (cause for cause in evaluation.causes if cause.clause == "token-tv")
        causes = evaluation.causes[cell]
        assert causes.text.startswith(said), causes.text
        assert verdicts["token-tv"] == ("PASS" if said.startswith("staleness") else "FAIL")
        assert evaluation.causes[cell._replace(clause="lag")] == causes
        assert causes.total.estimate == pytest.approx(causes.kernel.estimate + causes.staleness.estimate)
        assert causes.share == 0.25
        assert scalars["kc/token-tv/kernel"] == pytest.approx(causes.kernel.estimate)
        assert scalars["kc/token-tv/staleness/lower"] == pytest.approx(causes.staleness.lower)
        assert {row.lag: row.share for row in causes.by_lag} == SHARES
        for row in causes.by_lag:
            assert scalars[f"kc/token-tv/lag/{row.lag}"] == pytest.approx(row.estimate)


@pytest.mark.parametrize(
    ("kernel", "staleness", "total", "said"),
    [
        ((0.04, 0.06), (0.001, 0.01), (0.04, 0.07), "the kernels' drift grew: "),
        ((0.04, 0.06), (0.04, 0.05), (0.08, 0.1), "both grew: "),
        ((0.01, 0.02), (0.02, 0.04), (0.035, 0.06), "staleness grew, not the kernels' drift: "),
        ((0.01, 0.05), (0.02, 0.04), (0.035, 0.09), "staleness grew, and the kernels' drift is undecided: "),
        ((0.01, 0.02), (0.001, 0.005), (0.01, 0.025), "kernel drift "),
        ((0.01, 0.02), (-0.01, 0.04), (0.01, 0.06), "kernel drift "),
    ],
)
def test_a_cause_is_blamed_for_what_its_bounds_show(kernel, staleness, total, said):
    """The kernels above the limit, staleness above it or above what they leave; neither by an interval that is wide."""
    parts = (Part(sum(bounds) / 2, *bounds) for bounds in (total, kernel, staleness))
    assert to_blame(LIMIT, *parts).startswith(said)


def test_nothing_is_said_of_causes_where_nothing_is_stale():
    of = contract()
    judge = Judge(of)
    with Recorder(of, metric_exporter=judge, export_interval=1000.0) as recorder:
        said = np.log(np.full((20, 10), 0.5))
        recorder.compare(said, said - 0.01, weights=(3, 3))
        recorder.compare(said, said - 0.01)
        recorder.compare(said, said - 0.01, weights=("a", 2))
        assert recorder.force_flush()
    assert judge.evaluation().causes == {}
    assert recorder.stats().tokens == 600


def test_a_prompt_of_several_ages_counts_at_each_by_its_tokens():
    """Three of the four rollouts of every prompt are older, and drift by more: so is the total, and shares sum to 1."""
    of, rng = contract(), np.random.default_rng(0)
    judge = Judge(of)
    lags = np.tile([0, 1, 2, 3], 400)[:, None].repeat(TOKENS, 1)
    inference = -1 - rng.random(lags.shape)
    train = inference + np.where(lags, 0.2, 0.02) * rng.standard_normal(lags.shape)
    with Recorder(of, metric_exporter=judge, export_interval=1000.0) as recorder:
        recorder.compare(train, inference, weights=(9, 9 - lags), groups=np.repeat(np.arange(400), 4).tolist())
        assert recorder.force_flush()
    causes = judge.evaluation().causes
    (found,) = (causes[cell] for cell in causes if cell.clause == "token-tv")
    assert found.share == 0.75
    assert {row.lag: row.share for row in found.by_lag} == {"0": 0.25, "1": 0.25, "2-3": 0.5}
    truth = np.maximum(1 - np.exp(train - inference), 0).mean()
    assert found.total.estimate == pytest.approx(truth, rel=1e-6)


def test_a_sequence_of_two_ages_is_one_sequence_of_the_total():
    """Half of the sequences have older tokens, a few each: they are half of the clause's observations, and no more."""
    of = contract(statistical=[{"id": "token-tv", "metric": "tv_token", "unit": "sequence", "limit": LIMIT}])
    rng, judge = np.random.default_rng(0), Judge(of)
    lags = np.zeros((400, TOKENS), dtype=np.int64)
    lags[::2, :3] = 2
    inference = -4 - rng.random(lags.shape)
    train = inference + np.where(lags, 0.4, 0.02) * rng.standard_normal(lags.shape)
    with Recorder(of, metric_exporter=judge, export_interval=1000.0) as recorder:
        recorder.compare(train, inference, weights=(9, 9 - lags))
        assert recorder.force_flush()
    causes = judge.evaluation().causes
    (found,) = (causes[cell] for cell in causes if cell.clause == "token-tv")
    assert found.share == 0.5
    means = np.maximum(1 - np.exp(train - inference), 0).mean(1)
    assert found.total.estimate == pytest.approx(means.mean(), rel=1e-6)
    assert found.kernel.estimate == pytest.approx(means[1::2].mean(), rel=1e-6)
