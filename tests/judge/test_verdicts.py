"""Verdicts as a pure function of samples: the table of two windows, Holm over cells, reasons a person can act on."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kc_otel.judge.cell_columns import decide
from kc_otel.judge.evaluator import Evaluator
from kc_otel.judge.sample_sizes import observations_to_pass
from kc_otel.judge.statistics import clause_interval
from kc_otel.judge.verdict import Cell, Status, Verdict
from kc_otel.judge.verdicts import Evidence
from kc_otel.record.telemetry.accumulate import Accumulator
from kc_otel.stats import Binned
from tests.tools.verdicts import verdicts_of

NOW = 1_800_000_000.0
RNG = np.random.default_rng(7)


def sample(mean: float, size: int, spread: float = 0.0) -> NDArray[np.float64]:
    """A sample in [0, 1] with exactly this mean; without spread every value is the mean."""
    values = np.full(size, mean)
    values[: size // 2] += spread
    values[size - size // 2 :] -= spread
    return values


def evidence(
    contract: Any, short: Any, long: Any, *, slice: str = "all", clause: int = 0, absence: str = ""
) -> Evidence:
    windows = {"short": Binned.of_samples(short), "long": Binned.of_samples(long)}
    item = contract.clauses[clause]
    return Evidence(Cell(contract.name, item.id, slice, "a", "b"), item, lambda window: windows[window], absence)


def judge(contract: Any, short: Any, long: Any) -> Verdict:
    (verdict,) = decide(contract, [evidence(contract, short, long)], NOW)
    return verdict


FAIL, PASS, OPEN, FEW, NONE = (
    sample(0.05, 50_000), sample(0.0005, 50_000), sample(0.0035, 3_000, 0.003), sample(0.0, 50), np.zeros(0)
)  # fmt: skip


@pytest.mark.parametrize(
    ("short", "long", "status", "window"),
    [
        (FAIL, PASS, Status.FAIL, "short"),
        (FAIL, FAIL, Status.FAIL, "short"),
        (PASS, FAIL, Status.PASS, "short"),
        (PASS, PASS, Status.PASS, "short"),
        (OPEN, FAIL, Status.FAIL, "long"),
        (OPEN, PASS, Status.PASS, "long"),
        (OPEN, OPEN, Status.INCONCLUSIVE, "long"),
        (FEW, FAIL, Status.FAIL, "long"),
        (FEW, FEW, Status.INCONCLUSIVE, "long"),
        (NONE, PASS, Status.PASS, "long"),
    ],
)
def test_the_short_window_decides_and_the_long_one_where_it_cannot(
    contract: Any, short: Any, long: Any, status: Status, window: str
) -> None:
    """FAIL and PASS of the short window stand; where it is undecided or thin, the long window's verdict does."""
    verdict = judge(contract(), short, long)
    assert (verdict.status, verdict.window) == (status, window)
    assert verdict.at == NOW
    assert verdict.samples == (short if window == "short" else long).size
    if status is Status.FAIL:
        assert verdict.lower > verdict.limit
        assert verdict.margin < 0
    if status is Status.PASS:
        assert verdict.upper <= verdict.limit
        assert verdict.margin >= 0


def test_absence_is_no_data(contract: Any) -> None:
    made = contract()
    (verdict,) = decide(made, [evidence(made, NONE, NONE, absence="no report for 2m")], NOW)
    assert (verdict.status, verdict.reason, verdict.samples, verdict.window) == (
        Status.NO_DATA, "no report for 2m", 0, "",
    )  # fmt: skip


def test_limits_of_slices_are_used(contract: Any) -> None:
    made = contract(
        statistical=[{"id": "tv", "metric": "tv_token", "unit": "token", "limit": 0.004, "slices": {"code": 0.1}}]
    )
    cells = [evidence(made, FAIL, FAIL), evidence(made, FAIL, FAIL, slice="code")]
    assert [(v.status, v.limit) for v in decide(made, cells, NOW)] == [(Status.FAIL, 0.004), (Status.PASS, 0.1)]


def test_reasons_carry_the_numbers(contract: Any) -> None:
    made = contract()
    assert judge(made, FAIL, FAIL).reason == "lower bound 0.04999 > limit 0.004 with 50,000 samples in 5m"
    assert judge(made, PASS, PASS).reason == "upper bound 0.0006239 <= limit 0.004 with 50,000 samples in 5m"
    assert judge(made, OPEN, OPEN).reason == (
        "upper bound 0.005553 > limit 0.004 with 3,000 samples in 1h: about 9,500 more needed; "
        "with `cap: 0.02` the upper bound is 0.003709, a PASS"
    )
    assert judge(made, FEW, FEW).reason == (
        "upper bound 0.1191 > limit 0.004 with 50 of 100 samples in 1h: about 1,700 more needed; "
        "with `cap: 0.02` the upper bound is 0.002382: 50 more needed"
    )
    few = contract(observability={"min_samples": 80_000})
    assert judge(few, PASS, PASS).reason == (
        "upper bound 0.0006239 <= limit 0.004 with 50,000 of 80,000 samples in 1h: 30,000 more needed"
    )


def test_a_cap_is_said_in_the_unit_of_the_metric(contract: Any) -> None:
    clause = {"id": "share", "metric": "clip_budget_share", "cap": 0.5, "limit": 0.52}
    made = contract(statistical=[clause], assumptions={"clip": 0.2}, observability={"min_sequences": 100})
    many = np.full(400, 0.3)
    assert judge(made, many, many).reason == (
        "lower bound 1.619 > limit 0.52 with 400 prompts in 5m (for the mean of min(value, 2.742))"
    )


def test_an_upper_bound_that_is_far_off_for_want_of_a_cap_says_what_a_cap_gives(contract: Any) -> None:
    """How low the bound would be, and how many observations it takes then; with a cap there is nothing to advise."""
    clause = {"id": "tv", "metric": "tv_token", "unit": "sequence", "limit": 0.03}
    some = np.random.default_rng(0).normal(0.02, 0.004, 32).clip(0, 1)
    made = contract(statistical=[clause], observability={"min_sequences": 20})
    said = judge(made, some, some).reason
    assert re.search(r"^upper bound 0.\d+ > limit 0.03 with 32 sequences in 1h: about [\d,]+ more needed; ", said), said
    assert re.search(r"; with `cap: 0.15` the upper bound is 0.0\d+: (about )?[\d,]+ more needed$", said), said
    more = np.concatenate([some] * 10)
    assert judge(made, more, more).reason.endswith(", a PASS")
    capped = contract(statistical=[clause | {"cap": 0.15}], observability={"min_sequences": 20})
    assert "cap" not in judge(capped, some, some).reason


@pytest.mark.parametrize("mean", [0.0005, 0.002, 0.0035, 0.0045, 0.005])
def test_the_number_of_missing_samples_is_about_right(contract: Any, mean: float) -> None:
    """As many more as the reason asks for decide the cell, on the side of the limit that it names; half do not."""
    made = contract()
    few = RNG.permutation(sample(mean, 200, mean))
    verdict = judge(made, few, few)
    assert verdict.status is Status.INCONCLUSIVE
    words = verdict.reason.split()
    more = int(words[words.index("more") - 1].replace(",", ""))
    enough, half = sample(mean, 200 + int(more * 1.1), mean), sample(mean, 200 + int(more * 0.5), mean)
    above = verdict.reason.startswith(f"estimate {verdict.estimate:.4g} > limit 0.004 with 200 samples in 1h: about ")
    assert judge(made, enough, enough).status is (Status.FAIL if above else Status.PASS)
    assert judge(made, half, half).status is Status.INCONCLUSIVE


@pytest.mark.parametrize("anytime", [False, True])
@pytest.mark.parametrize("statistic", ["mean", "p99", "p50", "fraction > 0.01"])
def test_what_narrows_to_a_point_is_never_called_hopeless(contract: Any, statistic: str, anytime: bool) -> None:
    """However near the limit, of whatever shape: enough of it would decide, so the reason asks for more of it."""
    rng = np.random.default_rng(3)
    for shape in range(12):
        values = np.minimum(rng.gamma(0.2 * (shape + 1), 0.005, 400), 1.0)
        estimate = {"mean": values.mean(), "p99": np.quantile(values, 0.99), "p50": np.quantile(values, 0.5)}
        near = estimate.get(statistic, (values > 0.01).mean()) * rng.uniform(0.8, 1.25)
        clause = {"id": "c", "metric": "tv_token", "statistic": statistic, "unit": "token", "limit": float(near)}
        made = contract(statistical=[clause])
        (verdict,) = decide(made, [replace(evidence(made, values, values), anytime=anytime)], NOW)
        assert "would not decide it" not in verdict.reason, (shape, verdict.reason)


def test_a_maximum_is_broken_by_one_observation_and_kept_by_no_fewer_than_the_minimum(contract: Any) -> None:
    """One observation above the limit is a fact; below it, as many are asked for as of any other statistic."""
    made = contract(statistical=[{"id": "worst", "metric": "abs_log_ratio", "statistic": "max", "limit": 1}])
    least = made.observability.min_samples
    cells = [evidence(made, np.full(n, x), np.full(n, x)) for x in (0.5, 2.0) for n in (1, least - 1, least)]
    found = [decide(made, [cell], NOW)[0] for cell in cells]
    doubt = Status.INCONCLUSIVE
    assert [verdict.status for verdict in found] == [doubt, doubt, Status.PASS, Status.FAIL, Status.FAIL, Status.FAIL]
    assert f"1 of {least:,} samples" in found[0].reason


def test_what_comes_once_a_batch_needs_no_minimum(contract: Any) -> None:
    made = contract(runtime=[{"id": "lag", "metric": "weights_lag", "statistic": "max", "limit": 1}])
    cells = [evidence(made, np.array([value]), np.array([value]), clause=1) for value in (1.0, 2.0)]
    assert [decide(made, [cell], NOW)[0].status for cell in cells] == [Status.PASS, Status.FAIL]


def test_more_cells_ask_for_more_evidence_before_any_fails(contract: Any) -> None:
    """Holm: what fails alone need not fail as one of many, unless the others fail too."""
    made = contract(slices={f"s{i}": {"where": {"task": f"s{i}"}} for i in range(60)})
    # A handful of ones in many zeros: above the limit at alpha/2, not at alpha/120.
    values = np.zeros(5000)
    values[:44] = 1.0
    quiet = np.zeros(20_000)
    alone = evidence(made, values, quiet)
    others = [evidence(made, quiet, quiet, slice=f"s{i}") for i in range(60)]
    loud = [evidence(made, np.full(5000, 0.9), quiet, slice=f"s{i}") for i in range(60)]
    assert decide(made, [alone], NOW)[0].status is Status.FAIL
    assert decide(made, [alone, *others], NOW)[0].status is not Status.FAIL
    assert {verdict.status for verdict in decide(made, [alone, *loud], NOW)} == {Status.FAIL}
    one_louder = decide(made, [alone, loud[0], *others[1:]], NOW)
    assert [verdict.status is Status.FAIL for verdict in one_louder[:2]] == [False, True]


def test_the_long_window_is_one_of_as_many_tests_as_there_are_cells(contract: Any) -> None:
    """Cells that the short window has decided count as tests on the long one, too, which was asked in view of it."""
    made = contract(slices={f"s{i}": {"where": {"task": f"s{i}"}} for i in range(60)})
    values = np.zeros(5000)
    values[:44] = 1.0
    open_ = evidence(made, NONE, values)
    decided = [evidence(made, np.zeros(20_000), NONE, slice=f"s{i}") for i in range(60)]
    alone, among = decide(made, [open_], NOW)[0], decide(made, [open_, *decided], NOW)[0]
    assert (alone.status, alone.window) == (Status.FAIL, "long")
    assert (among.status, among.window) == (Status.INCONCLUSIVE, "long")


ASSUMPTIONS = {
    "reward_range": [-1, 3], "horizon": 100, "advantage_max": 5, "score_norm_max": 2, "clip": 0.2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("metric", "values", "expected"),
    [
        ("k1", [-0.1, 0.3], -0.1),
        ("support_deficit", [0.9, 0.94], 0.08),
        ("clip_budget_share", [0.01, 0.03], 0.02 / np.log(1.2)),
        ("reward_drift_bound", [0.0, 0.02], 4 * 0.01),
        ("gradient_bias_bound", [0.0, 0.02], 2 * 5 * 100 * 2 * 0.01),
    ],
)
def test_derived_metrics_follow_their_formulas(contract: Any, metric: str, values: Any, expected: float) -> None:
    cap = {"cap": 10} if metric == "support_deficit" else {}
    made = contract(assumptions=ASSUMPTIONS, statistical=[{"id": "d", "metric": metric, "limit": 1, **cap}])
    base = Binned.of_samples(np.array(values * 5000))
    interval = clause_interval(made.clauses[0], made.assumptions, base, alpha_lower=1e-6, alpha_upper=0.1)
    assert interval.estimate == pytest.approx(expected)
    assert interval.lower < interval.estimate < interval.upper
    mirrored = clause_interval(made.clauses[0], made.assumptions, base, alpha_lower=0.1, alpha_upper=1e-6)
    assert interval.lower < mirrored.lower
    assert interval.upper < mirrored.upper


def test_a_support_deficit_fails_only_where_the_contract_says_how_large_a_ratio_can_be(contract: Any) -> None:
    """A thousand-fold ratio once in a million tokens would make up for it: without a cap nothing is claimed."""
    w = np.full(20_000, 0.9)
    found = {}
    for cap in ({}, {"cap": 10}):
        made = contract(statistical=[{"id": "d", "metric": "support_deficit", "unit": "token", "limit": 0.05, **cap}])
        found[bool(cap)] = judge(made, w, w)
    assert (found[True].status, found[False].status) == (Status.FAIL, Status.INCONCLUSIVE)
    assert "the lower one if no ratio is above 10" in found[True].reason
    assert "would take a ratio that none exceeds" in found[False].reason
    made = contract(statistical=[{"id": "d", "metric": "support_deficit", "unit": "token", "limit": 0.15}])
    assert judge(made, w, w).status is Status.PASS


def test_what_is_either_0_or_1_is_judged_by_the_exact_interval(contract: Any) -> None:
    """Top-1 disagreement by token is a share; its mean over a sequence is not."""
    flips = Binned.of_samples(np.repeat([0.0, 1.0], [1990, 10]))
    sides = {"alpha_lower": 0.005, "alpha_upper": 0.005}
    methods = []
    for unit in ("token", "sequence"):
        made = contract(numerical=[{"id": "d", "metric": "top1_disagreement", "unit": unit, "limit": 0.1}])
        methods.append(clause_interval(made.clauses[0], made.assumptions, flips, **sides).method)
    assert methods == ["Clopper-Pearson", "mixture betting"]


@pytest.mark.slow
@pytest.mark.parametrize("runs", [100, pytest.param(400, marks=pytest.mark.long)])
def test_false_fails_stay_within_alpha(contract: Any, runs: int) -> None:
    """On data that sits exactly on the limit in every slice, any FAIL in a window is as rare as the contract asks."""
    made = contract(
        slices={f"s{i}": {"where": {"task": f"s{i}"}} for i in range(9)},
        statistical=[
            {"id": "tv", "metric": "tv_token", "unit": "token", "limit": 0.004},
            {"id": "tail", "metric": "tv_token", "statistic": "p99", "limit": 0.1},
            {"id": "share", "metric": "tv_token", "statistic": "fraction > 0.05", "limit": 0.02},
        ],
        observability={"confidence": 0.9, "min_samples": 100},
    )
    rng = np.random.default_rng(11)
    wrong, n = 0, 2000
    for _ in range(runs):
        cells = []
        for slice in ("all", *made.slices):
            spiky = (rng.random(n) < 0.004).astype(float)
            upper = np.where(rng.random(n) < 0.99, rng.uniform(0.0, 0.1, n), 0.2)
            share = np.where(rng.random(n) < 0.02, 0.06, 0.01)
            for clause, values in enumerate((spiky, upper, share)):
                cells.append(evidence(made, values, values, slice=slice, clause=clause))
        wrong += any(verdict.status is Status.FAIL for verdict in decide(made, cells, NOW))
    assert wrong / runs <= 0.1


NONE_MAY = {"id": "same", "metric": "abs_log_ratio", "statistic": "fraction > 0", "limit": 0}


def test_a_share_of_none_holds_while_none_is_seen_and_one_breaks_it(contract: Any) -> None:
    """How many differ is counted; none of enough tokens is a PASS that says how many may at most, one is a FAIL."""
    made = contract(statistical=[NONE_MAY])
    none, seen = np.zeros(5000), np.r_[np.zeros(4999), 1e-6]
    kept = judge(made, none, none)
    assert (kept.status, kept.reason) == (Status.PASS, "0 of 5,000 tokens differ in 5m; at most 0.00106 at 99 %")
    assert kept.upper == pytest.approx(1.0 - 0.005 ** (1 / 5000))
    assert kept.margin == 0.0
    broken = judge(made, seen, seen)
    assert (broken.status, broken.reason) == (Status.FAIL, "1 of 5,000 tokens differ in 5m, and none is allowed to")
    few = judge(made, none[:99], none[:99])
    assert (few.status, few.reason) == (
        Status.INCONCLUSIVE, "0 of 99 tokens differ in 1h; at most 0.0521 at 99 %: 1 more needed",
    )  # fmt: skip
    assert judge(made, seen[-10:], seen[-10:]).status is Status.FAIL


def test_equal_log_probabilities_differ_nowhere_in_what_the_recorder_sends(contract: Any) -> None:
    """The zero bucket of its histograms holds them, also beside tokens that differ."""
    made = contract(statistical=[NONE_MAY])
    train = -RNG.exponential(size=(4, 500))
    for moved, status in ((0, Status.PASS), (1, Status.FAIL), (3, Status.FAIL)):
        inference = train.copy()
        inference[0, :moved] += 1e-5
        recorded = Accumulator(["all"])
        recorded.add_sampled(train, inference)
        binned = recorded.snapshot()["abs_log_ratio", "all"].binned()
        item = Evidence(Cell(made.name, "same", "all", "a", "b"), made.clauses[0], lambda _: binned)  # noqa: B023
        (verdict,) = decide(made, [item], NOW)
        assert verdict.status is status
        assert verdict.reason.startswith(f"{moved} of 2,000 tokens differ in 5m")


def test_what_has_two_values_is_counted_too(contract: Any) -> None:
    greedy = contract(
        statistical=[], numerical=[{"id": "top1", "metric": "top1_disagreement", "unit": "token", "limit": 0}]
    )
    flips = np.repeat([0.0, 1.0], [998, 2])
    assert judge(greedy, flips, flips).reason == "2 of 1,000 tokens differ in 5m, and none is allowed to"
    far = contract(statistical=[{**NONE_MAY, "statistic": "fraction > 0.5"}])
    assert judge(far, flips, flips).reason == "2 of 1,000 tokens are above 0.5 in 5m, and none is allowed to"
    (needed,) = (observations_to_pass(far, clause, "all") for clause in far.clauses)
    assert needed.observations == 1


BY_TOKEN = {"id": "by-token", "metric": "tv_token", "unit": "token", "limit": 0.02}
BY_SEQ = {"id": "by-sequence", "metric": "tv_token", "unit": "sequence", "limit": 0.02}
OF_SEQ = {"id": "of-sequences", "metric": "tv_seq", "limit": 0.02}


def test_a_verdict_says_what_it_is_about(contract: Any) -> None:
    """Of the slice where sequences were judged, of the window's traffic where tokens were; without data too."""
    made = contract(statistical=[BY_TOKEN, BY_SEQ, OF_SEQ])
    items = [evidence(made, np.full(60, 0.9), np.full(60, 0.9), clause=clause) for clause in range(3)]
    said = [decide(made, [item], NOW)[0].about for item in items]
    assert said == ["traffic", "population", "population"]
    silent = [replace(item, absence="silent") for item in items]
    assert [verdict.about for verdict in decide(made, silent, NOW)] == said


def test_the_two_units_are_judged_on_streams_of_their_own(contract: Any, sender: Any, now: float) -> None:
    evaluator = Evaluator([contract(slices={}, statistical=[BY_TOKEN, BY_SEQ], observability={"min_sequences": 10})])
    evaluator.ingest_metrics(sender().request(now, [0.001] * 20_000), now)
    evaluator.ingest_metrics(sender("kc.drift.tv_token_by_sequence").request(now, [0.5] * 100), now)
    found = {verdict.cell.clause: (verdict.status, verdict.samples) for verdict in verdicts_of(evaluator, now)}
    assert found == {"by-token": (Status.PASS, 20_000), "by-sequence": (Status.FAIL, 100)}


def test_a_recorder_with_an_older_contract_is_named_as_the_cause(contract: Any, sender: Any, now: float) -> None:
    """Tokens arrive, means by sequence do not: the reason says what to update, and not to look at the endpoint."""
    evaluator = Evaluator([contract(slices={}, statistical=[BY_SEQ])])
    (verdict,) = verdicts_of(evaluator, now)
    assert "does the recorder's OTLP endpoint point here?" in verdict.reason
    evaluator.ingest_metrics(sender().request(now, [0.001] * 100), now)
    (verdict,) = verdicts_of(evaluator, now)
    assert verdict.status is Status.NO_DATA
    assert verdict.reason == (
        "tokens arrive, but nothing for kc.drift.tv_token_by_sequence; give the recorder this version of the contract, "
        "or write `unit: token` if it is given single tokens"
    )
