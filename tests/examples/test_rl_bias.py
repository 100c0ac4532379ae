from __future__ import annotations

import math
import re

import numpy as np
import pytest

from examples.rl_bias import __main__ as program
from examples.rl_bias import claims
from examples.rl_bias.exact import Pair, Training
from examples.rl_bias.kernels import FAMILIES, train_log_probs
from examples.rl_bias.policy import Policy

FAMILY = {family.name: family for family in FAMILIES}


@pytest.fixture(scope="module")
def policy():
    return Policy.random(3)


@pytest.fixture(scope="module")
def training(policy):
    return Training(policy, train_log_probs(policy, 3))


@pytest.fixture(scope="module")
def quick():
    return program.results(program.enumerated(4), 4)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_kernels_drift_more_along_their_knob_and_stay_distributions(family, policy, training):
    drifts = []
    for scale in (family.scales[0], family.scales[-1]):
        pair = Pair(training, family.log_probs(policy, 3, scale))
        assert pair.q.sum() == pytest.approx(1.0, abs=1e-12)
        drifts.append(pair.sequence_tv)
    assert drifts[0] < drifts[1] / 5


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_bound_holds_and_is_ordered(family, policy, training):
    for scale in family.scales[1::2]:
        pair = Pair(training, family.log_probs(policy, 3, scale))
        if pair.sequence_tv < 1e-12:
            continue
        bounds = {"TV": claims.from_sequences(pair), **claims.from_rollouts(pair), **claims.worst_cases(pair)}
        if claims.covered(pair):
            bounds |= claims.paper(pair)
        for reward in ("random", "verifier", "adversarial"):
            assert pair.bias(reward) <= min(bounds.values()) * (1 + 1e-9)
            assert pair.reward_drift(reward) <= pair.sequence_tv * (1 + 1e-9)
            assert pair.bias_truncated(reward, 1.0) <= claims.truncated(pair, 1.0, deficit=True) + 1e-12
            assert pair.bias_token_corrected(reward) <= claims.token_corrected(pair) + 1e-12
        assert bounds["TV"] <= bounds["coupling"] * (1 + 1e-9)
        assert bounds["coupling"] <= bounds["mean token TV"] * (1 + 1e-9)
        if claims.covered(pair):
            assert claims.offline(pair).value <= claims.paper(pair)["exp(T lam) - 1"] * (1 + 1e-9)


def test_a_dropped_tail_breaks_what_needs_support(policy, training):
    """E_Q[W] falls short by the deficit, half of E|1 - W| is half of TV_seq, and truncated weights keep a bias."""
    pair = Pair(training, FAMILY["dropped tail"].log_probs(policy, 3, 0.8))
    assert pair.half_range == math.inf
    assert pair.mean_weight < 0.9
    assert pair.sequence_tv == pytest.approx(1 - pair.mean_weight, rel=1e-9)
    assert pair.half_mean_deviation == pytest.approx(pair.sequence_tv / 2, rel=1e-9)
    assert pair.bias_truncated("adversarial", 5.0) > claims.truncated(pair, 5.0, deficit=False) + 1e-3
    cut = Pair(Training(policy, train_log_probs(policy, 1)), FAMILY["dropped tail"].log_probs(policy, 1, 0.8))
    assert claims.tv_from_seen_ratios(cut) < cut.sequence_tv <= claims.tv_from_worst_steps(cut) + 1e-12


def test_sampled_estimate_surrounds_the_exact_value(policy, training):
    for name, scale in (("dropped tail", 0.8), ("noise by prefix", 0.3)):
        pair = Pair(training, FAMILY[name].log_probs(policy, 3, scale))
        interval = claims.sampled(pair, 20_000, seed=5)
        assert interval.lower <= pair.sequence_tv <= interval.upper
        assert interval.upper - interval.lower < 0.05


NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[-+]?\d+)?")


def rows_of(markdown):
    """Rows by table title and their words; the numbers of each, in order."""
    found, title = {}, ""
    for line in markdown.splitlines():
        if line.startswith("**"):
            title = line.split("**")[1]
        elif line.startswith("| ") and "---" not in line:
            cells = line.strip("| ").split(" | ")
            found[title, cells[0], cells[1]] = (NUMBER.sub("#", line), [float(x) for x in NUMBER.findall(line)])
    return found


@pytest.mark.slow
def test_readme_has_the_results_of_a_run(quick):
    readme = program.README.read_text(encoding="utf-8")
    written = rows_of(readme[readme.index(program.BEGIN) : readme.index(program.END)])
    compared = 0
    for key, (words, numbers) in rows_of(quick).items():
        if key[0].startswith("Every bound"):
            continue
        there, values = written[key]
        assert there == words
        np.testing.assert_allclose(values, numbers, rtol=0.02, atol=1e-9)
        compared += 1
    assert compared > 40


@pytest.mark.slow
def test_quick_run_prints_tables(capsys):
    assert program.main(["--quick"]) == 0
    first = capsys.readouterr().out
    assert "Bias of the uncorrected policy gradient" in first
    assert program.main(["--quick"]) == 0
    assert capsys.readouterr().out == first
