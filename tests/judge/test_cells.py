"""Cells whose input is no sample of two kernels, whose assumptions do not hold, and what is said of sampling."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kc_otel.judge.escalation.alerts import Phase, PolicyState
from kc_otel.judge.evaluator import Evaluator
from kc_otel.judge.series import LONG
from kc_otel.judge.verdict import Status, Verdict
from kc_otel.offline.gate.recorded_verdicts import by_contract, judge
from kc_otel.recordings.recording import Recording
from kc_otel.stats.surplus import is_surplus
from tests.judge.conftest import NOW, Sender, counted, make_contract, merge
from tests.tools.escalations import advanced
from tests.tools.verdicts import verdicts_of

GRADIENT = {"id": "gradient", "metric": "gradient_bias_bound", "limit": 500}
REWARD = {"id": "reward", "metric": "reward_drift_bound", "limit": 0.5}
ASSUMED = {"reward_range": [0, 1], "horizon": 64, "advantage_max": 2, "score_norm_max": 10}


def contract() -> Any:
    return make_contract(statistical=[GRADIENT, REWARD], assumptions=ASSUMED, slices={})


def with_observed(**observed: list[float]) -> dict[str, Verdict]:
    """The verdicts on two hundred prompts with hardly any drift, beside what else was observed."""
    evaluator = Evaluator([contract()])
    requests = [Sender("kc.drift.tv_seq_by_prompt").request(NOW, [0.001] * 2000)]
    requests += [Sender(f"kc.sampling.{name}").request(NOW, values) for name, values in observed.items()]
    evaluator.ingest_metrics(merge(*requests), NOW)
    return {verdict.cell.clause: verdict for verdict in verdicts_of(evaluator, NOW)}


def test_what_keeps_every_assumption_passes() -> None:
    for observed in ({}, {"tokens": [64.0], "advantage": [2.0], "score_norm": [10.0]}):
        assert {verdict.status for verdict in with_observed(**observed).values()} == {Status.PASS}


@pytest.mark.parametrize(
    ("observed", "said"),
    [
        ({"tokens": [20.0, 200.0]}, "assumptions.horizon is 64, but a sequence had 197 tokens or more"),
        ({"advantage": [0.5, 10.3]}, "assumptions.advantage_max is 2, but an advantage of 9.93 or more occurred"),
        ({"score_norm": [12.5]}, "assumptions.score_norm_max is 10, but a token's score had a norm of 12.5 or more"),
    ],
)
def test_a_pass_that_rests_on_a_broken_assumption_is_refused(observed: dict[str, list[float]], said: str) -> None:
    """It says which one and what came; a clause that does not rest on it passes."""
    found = with_observed(**observed)
    assert found["gradient"].status is Status.INCONCLUSIVE
    assert found["gradient"].reason.startswith(
        f"no PASS, because an assumption does not hold: {said}; otherwise upper bound"
    )
    assert found["reward"].status is Status.PASS


def recording(tokens: int = 20, advantage: float = 1.0, reward: float = 1.0) -> Recording:
    """Two thousand sequences of two kernels that are one."""
    lengths = np.full(2000, 20)
    lengths[0] = tokens
    train = np.full(lengths.sum(), -1.0)
    advantages = np.full(train.size, advantage)
    return Recording(train, train, lengths, ({"reward": reward},) * 2000, advantages=advantages)


@pytest.mark.parametrize(
    ("made", "clauses", "said"),
    [
        (recording(tokens=200), {"gradient"}, "assumptions.horizon is 64, but a sequence had 200 tokens or more"),
        (recording(advantage=-10.3), {"gradient"}, "assumptions.advantage_max is 2, but an advantage of 10.3 or more"),
        (recording(reward=3.0), {"reward"}, "assumptions.reward_range is [0, 1], but 2,000 rewards are outside of it"),
        (recording(), set(), ""),
    ],
)
def test_a_gate_refuses_it_too(made: Recording, clauses: set[str], said: str) -> None:
    found = judge(contract(), by_contract(made, contract()), NOW)
    refused = {verdict.cell.clause: verdict.reason for verdict in found.verdicts if verdict.status is not Status.PASS}
    assert refused.keys() == clauses
    assert all(said in reason for reason in refused.values())


def test_it_says_what_is_assumed_and_what_is_measured() -> None:
    """Nothing before anything came, independence without prompts, rollouts and the design effect with them."""
    evaluator = Evaluator([make_contract(statistical=[{"id": "tv", "metric": "tv_token", "limit": 0.1}], slices={})])
    assert evaluator.sampling("policy") == []
    drift = Sender("kc.drift.tv_token_by_prompt")
    evaluator.ingest_metrics(drift.request(NOW, [0.01] * 10), NOW)
    (said,) = evaluator.sampling("policy")
    assert said.startswith("Assumes that sequences are independent: no recorder says which of them answer one prompt")
    rollouts, effect = Sender("kc.sampling.rollouts"), Sender("kc.sampling.design_effect")
    evaluator.ingest_metrics(merge(rollouts.request(NOW, [16, 8]), effect.request(NOW, [4.0])), NOW)
    (said,) = evaluator.sampling("policy")
    assert said == (
        "Prompts count once, with 12 rollouts on average; 4 of these are worth one independent sequence (design "
        "effect)."
    )
    evaluator.ingest_metrics(Sender("kc.drift.tv_token_by_prompt", inference="c" * 12).request(NOW, [0.01]), NOW)
    assert [said.split(" of kernel ")[1][:12] for said in evaluator.sampling("policy")] == ["b" * 12, "c" * 12]
    clause = {"id": "tv", "metric": "tv_token", "unit": "sequence", "limit": 0.1}
    evaluator = Evaluator([make_contract(statistical=[clause], slices={})])
    evaluator.ingest_metrics(Sender("kc.drift.tv_token_by_sequence").request(NOW, [0.01] * 10), NOW)
    assert evaluator.sampling("policy") == [], "a contract on sequences assumes what it says"


LADDER = [{"on": "fail", "do": ["notify"]}, {"on": "invalid-input", "do": ["halt"]}]


def ratios(surplus: float, size: int, rng: Any) -> Any:
    """P/Q of tokens, with a mean of 1 + surplus."""
    return (1.0 + surplus) * rng.lognormal(-0.02, 0.2, size)


class Kernels:
    """What recorders send of a pair: the ratio and the total variation, on all traffic and on a slice."""

    def __init__(self) -> None:
        self.senders = [
            (Sender("kc.drift.ratio", slice=slice), Sender(slice=slice), slice) for slice in ("all", "code")
        ]

    def send(self, evaluator: Evaluator, now: float, surplus: dict[str, float], rng: Any, size: int = 400) -> None:
        """An export with `size` tokens of each slice."""
        for ratio, variation, slice in self.senders:
            w = ratios(surplus.get(slice, 0.0), size, rng)
            request = merge(ratio.request(now, w), variation.request(now, np.maximum(1.0 - w, 0.0)))
            evaluator.ingest_metrics(request, now)


def judged(evaluator: Evaluator, now: float) -> dict[str, Any]:
    return {verdict.cell.slice: verdict for verdict in verdicts_of(evaluator, now)}


@pytest.mark.slow
def test_what_was_invalid_is_not_held_against_the_kernel_afterwards() -> None:
    """Once the window holds samples only, the cell is judged by these, and what was said of it resolves."""
    contract, rng = make_contract(escalation=LADDER[1:], slices={}), np.random.default_rng(0)
    evaluator, kernels, state = Evaluator([contract]), Kernels(), PolicyState("policy")
    edges, seen = [], []
    for step in range(80):
        now = NOW + 10.0 * step
        kernels.send(evaluator, now, {"all": 0.3 if step < 30 else 0.0}, rng)
        verdicts = evaluator.evaluate(now)["policy"].verdicts
        state, more = advanced(contract, verdicts, now, state)
        edges += [edge.phase for edge in more]
        seen.append(verdicts[0].status)
    assert {*seen[3:30]} == {Status.INVALID_INPUT}
    assert Status.INVALID_INPUT not in seen[65:]
    assert edges == [Phase.FIRING, Phase.RESOLVED]


@pytest.mark.parametrize("spread", [0.02, 0.3, 1.0, 2.0])
def test_samples_of_any_drift_are_judged(spread: float) -> None:
    rng = np.random.default_rng(1)
    for size in (200, 5000, 40_000) * 4:
        w = rng.lognormal(-(spread**2) / 2, spread, size)
        edges = np.exp2(np.floor(np.log2(w) * 16) / 16)
        assert not is_surplus(edges, edges * 2 ** (1 / 16), np.ones(size, dtype=np.int64), float(w.sum()))


def test_a_surplus_is_seen_in_bins() -> None:
    rng = np.random.default_rng(1)
    for w in (ratios(0.05, 20_000, rng), np.where(rng.random(5000) < 0.05, 1e6, 0.99)):
        edges = np.exp2(np.floor(np.log2(w) * 16) / 16)
        assert is_surplus(edges, edges * 2 ** (1 / 16), np.ones(w.size, dtype=np.int64), float(w.sum()))
    none = np.zeros(0)
    assert not is_surplus(none, none, none.astype(np.int64), 0.0)


def test_where_all_that_comes_fails_the_checks_the_cell_is_invalid_input() -> None:
    """Newer by a heartbeat than what was measured; a single bad sequence beside others is no such thing."""
    contract, rng = make_contract(slices={}), np.random.default_rng(0)
    evaluator, kernels = Evaluator([contract]), Kernels()
    statuses = []
    for step in range(40):
        now = NOW + 10.0 * step
        kernels.send(evaluator, now, {}, rng, 400 if step < 20 or step > 35 else 0)
        evaluator.ingest_metrics(counted("placeholder", step, NOW, now), now)
        statuses.append(judged(evaluator, now)["all"].status)
    assert Status.INVALID_INPUT not in statuses[1:20]
    assert {*statuses[27:36]} == {Status.INVALID_INPUT}
    assert Status.INVALID_INPUT not in statuses[36:]
    assert statuses[-1] is not Status.NO_DATA


def test_a_contract_of_which_nothing_was_ever_measured_says_which_check_fails() -> None:
    """Kernels that only send invalid sequences each have a cell of their own, INVALID INPUT from the start."""
    evaluator = Evaluator([make_contract(slices={})])
    for name, sequences in (("b", 40), ("c", 2)):
        message = counted("not_same_tokens", sequences, NOW - 10, NOW, ("a" * 12, name * 12))
        evaluator.ingest_metrics(message, NOW)
    found = {verdict.cell.kernel_inference: verdict for verdict in verdicts_of(evaluator, NOW + 1)}
    assert {verdict.status for verdict in found.values()} == {Status.INVALID_INPUT}
    for name, sequences in (("b", 40), ("c", 2)):
        said = f"INVALID INPUT, not_same_tokens: {sequences} sequences were not measured. The two sides do"
        assert found[name * 12].reason.startswith(said)


@pytest.mark.slow
def test_a_kernel_of_which_nothing_is_valid_keeps_its_cells_and_its_alerts_beside_others() -> None:
    """It is there, and was refuted by nobody, though another version is measured: what fired goes on, on each slice."""
    contract = make_contract(escalation=LADDER[:1])
    evaluator, state, rng = Evaluator([contract]), PolicyState("policy"), np.random.default_rng(0)
    broken, sound = (
        [Sender(slice=slice, inference=name * 12, instance=name) for slice in ("all", "code")] for name in "bc"
    )
    edges, statuses = [], []
    for step in range(240):
        now = NOW + 10.0 * step
        if step >= 40:
            evaluator.ingest_metrics(counted("placeholder", step, NOW, now, ("a" * 12, "b" * 12)), now)
        for sender in (*broken, *sound) if step < 40 else sound:
            scale = 0.5 if sender in broken else 0.001
            evaluator.ingest_metrics(sender.request(now, rng.exponential(scale, 400).clip(0, 1)), now)
        verdicts = evaluator.evaluate(now)["policy"].verdicts
        state, more = advanced(contract, verdicts, now, state)
        edges += [(edge.phase, edge.cell.slice) for edge in more]
        statuses.append({(verdict.cell.slice, verdict.cell.kernel_inference): verdict.status for verdict in verdicts})
    assert sorted(edges) == [(Phase.FIRING, "all"), (Phase.FIRING, "code")]
    for slice in ("all", "code"):
        assert statuses[39][slice, "b" * 12] is Status.FAIL
        assert {by_cell[slice, "b" * 12] for by_cell in statuses[60:]} == {Status.INVALID_INPUT}
        assert statuses[-1][slice, "c" * 12] is Status.PASS


def test_a_cell_is_invalid_only_by_its_own_sequences() -> None:
    """All sequences of chat fail, those of code are measured, nothing comes on math: one INVALID INPUT, one NO_DATA."""
    slices = {name: {"where": {"task": name}} for name in ("chat", "code", "math")}
    evaluator, rng, pair = Evaluator([make_contract(slices=slices)]), np.random.default_rng(0), ("a" * 12, "b" * 12)
    senders = {slice: Sender(slice=slice, instance=slice) for slice in ("all", *slices)}
    for step in range(40):
        now = NOW + 10.0 * step
        for slice, sender in senders.items():
            if slice in {"all", "code"} or (slice == "chat" and not step):
                evaluator.ingest_metrics(sender.request(now, rng.exponential(0.001, 400).clip(0, 1)), now)
        if step:
            for slice in ("all", "chat"):
                message = counted("placeholder", step, NOW, now, pair, slice)
                evaluator.ingest_metrics(message, now)
    found = judged(evaluator, NOW + 400.0)
    assert {slice: found[slice].status for slice in slices} == {
        "chat": Status.INVALID_INPUT,
        "code": Status.PASS,
        "math": Status.NO_DATA,
    }
    assert evaluator.states["policy"].failed("all", NOW + 400.0, LONG) == {pair: {"placeholder": 39}}


@pytest.mark.parametrize("reason", ["greedy", "no_tokens"])
def test_what_is_not_to_be_measured_is_invalid_only_where_nothing_of_the_pair_is_measured(reason: str) -> None:
    """A slice keeps its verdict; one that has nothing else is NO DATA; another fault, or another pair, is INVALID."""
    slices = {name: {"where": {"task": name}} for name in ("agent", "code")}
    evaluator, rng, pair = Evaluator([make_contract(slices=slices)]), np.random.default_rng(0), ("a" * 12, "b" * 12)
    senders = [Sender(slice=slice, instance=slice) for slice in ("all", "code")]

    def after(seconds: float, failing: str = reason, version: str = "b") -> dict[str, Status]:
        now, of = NOW + seconds, (pair[0], version * 12)
        for sender in senders:
            evaluator.ingest_metrics(sender.request(now, []), now)
        for slice in ("", "code", "agent"):
            evaluator.ingest_metrics(counted(failing, int(seconds), NOW, now, of, slice), now)
        found = (cell for cell in verdicts_of(evaluator, now) if cell.cell.kernel_inference == of[1])
        verdicts.update({verdict.cell.slice: verdict for verdict in found})
        return {slice: verdict.status for slice, verdict in verdicts.items()}

    verdicts: dict[str, Verdict] = {}
    for sender in senders:
        evaluator.ingest_metrics(sender.request(NOW, rng.exponential(0.001, 4000).clip(0, 1)), NOW)
    kept = {"all": Status.PASS, "code": Status.PASS, "agent": Status.NO_DATA}
    assert [after(seconds) for seconds in (200, 280)] == [kept, kept]
    assert verdicts["agent"].reason.startswith(f"nothing to measure on slice agent: {reason}: 280 sequences were not")
    assert set(after(281, version="c").values()) == {Status.INVALID_INPUT}
    assert after(282, "placeholder")["agent"] is Status.INVALID_INPUT
    assert set(after(3700).values()) == {Status.INVALID_INPUT}


def test_a_pair_that_only_older_weights_sample_has_nothing_to_measure_and_wakes_nobody() -> None:
    """In a recipe whose lag is always 1: but on slices by lag, until its own weights sample, and not once it is silent.

    A slice is without data, and no less, while the pair is measured on others.
    """
    slices = {
        "code": {"where": {"task": "code"}},
        "one-old": {"where": {"lag": 1}},
        "older": {"where": {"lag": ">= 2"}},
    }
    steps = [{"on": "no-data", "do": ["notify"]}]
    lag = {"id": "lag", "metric": "weights_lag", "limit": 1}
    drift = {"id": "token-tv", "metric": "tv_token", "unit": "token", "limit": 0.1}
    contract = make_contract(slices=slices, escalation=steps, runtime=[lag], statistical=[drift])
    evaluator, of_lag = Evaluator([contract]), Sender("kc.weights.lag")
    senders = {slice: Sender(slice=slice, instance=slice) for slice in ("stale", "one-old", "all")}
    policy = PolicyState("policy")

    def after(seconds: float, *sampled: str) -> tuple[dict[str, Verdict], set[str]]:
        nonlocal policy
        now = NOW + seconds
        for slice in sampled:
            evaluator.ingest_metrics(of_lag.request(now, [1.0]), now)
            evaluator.ingest_metrics(senders[slice].request(now, [0.001] * 4000), now)
        found = verdicts_of(evaluator, now)
        policy, _ = advanced(contract, found, now, policy)
        by_slice = {verdict.cell.slice: verdict for verdict in found if verdict.cell.clause == "token-tv"}
        assert {verdict.cell.slice for verdict in found if verdict.cell.clause == "lag"} == {"all", "code"}
        firing = {alert.cell.slice for alert in policy.firing if alert.cell.clause == "token-tv"}
        return by_slice, firing

    def expect(found: dict[str, Verdict], *statuses: str) -> None:
        assert [found[slice].status for slice in ("all", "code", "one-old", "older")] == list(statuses)

    for seconds in (0, 60, 120):
        found, firing = after(seconds, "stale", "one-old")
        expect(found, "NO_DATA", "NO_DATA", "PASS", "NO_DATA")
        for slice in ("all", "code"):
            said = f"nothing to measure on slice {slice}: older weights sampled all of it; "
            assert found[slice].reason.startswith(said)
            assert '`where: {lag: ">= 1"}`' in found[slice].reason
        assert found["older"].reason.startswith("no observations of kc.drift.tv_token on slice older")
        assert firing <= {"older"}
    found, firing = after(180, "stale", "one-old", "all")
    expect(found, "PASS", "NO_DATA", "PASS", "NO_DATA")
    assert found["code"].reason.startswith("no observations of kc.drift.tv_token on slice code")
    for seconds in range(240, 4200, 60):
        found, firing = after(seconds, "stale", "one-old")
    expect(found, "NO_DATA", "NO_DATA", "PASS", "NO_DATA")
    assert found["all"].reason.startswith("nothing to measure")
    assert firing <= {"older"}
    for seconds in (4200, 4210):  # after a pause, the first export begins a count
        found, _ = after(seconds, "stale", "one-old", "all")
    expect(found, "PASS", "NO_DATA", "PASS", "NO_DATA")
    found, firing = after(4200 + 4000)
    assert found["all"].reason.startswith("no report for")
    assert "all" in firing


def test_tokens_that_were_not_sampled_are_invalid_input_on_their_slice() -> None:
    """The mean of P/Q over the window is above 1 on a slice: no verdict there, the cause first, and the step acts."""
    contract, now = make_contract(escalation=LADDER), NOW + 300.0
    evaluator, kernels, rng = Evaluator([contract]), Kernels(), np.random.default_rng(0)
    for step in range(30):
        kernels.send(evaluator, NOW + 10.0 * step, {"code": 0.2}, rng)
    verdicts = evaluator.evaluate(now)["policy"].verdicts
    _, edges = advanced(contract, verdicts, now, invalid=evaluator.invalid_input("policy", now))
    found = judged(evaluator, now)
    assert found["code"].status is Status.INVALID_INPUT
    assert found["code"].reason.startswith("INVALID INPUT, not_sampled: the mean of P/Q over 10,800 tokens is 1.2. ")
    assert found["all"].status is Status.FAIL
    assert [edge.cell.slice for edge in edges if edge.on == "invalid-input"] == ["code"]


def test_tokens_that_were_not_sampled_on_one_slice_say_nothing_of_another() -> None:
    """The mean of P/Q is above 1 on all traffic because of chat: code is judged by its own tokens."""
    evaluator, kernels, rng = Evaluator([make_contract()]), Kernels(), np.random.default_rng(0)
    for step in range(30):
        kernels.send(evaluator, NOW + 10.0 * step, {"all": 0.2}, rng)
    found = judged(evaluator, NOW + 300.0)
    assert found["all"].status is Status.INVALID_INPUT
    assert found["all"].reason.startswith("INVALID INPUT, not_sampled: the mean of P/Q over 10,800 tokens is 1.2. ")
    assert found["code"].status is not Status.INVALID_INPUT


def test_sequences_whose_slices_nobody_knows_are_of_every_cell() -> None:
    evaluator, kernels, rng = Evaluator([make_contract()]), Kernels(), np.random.default_rng(0)
    kernels.send(evaluator, NOW, {}, rng)
    message = counted("placeholder", 7, NOW, NOW + 200.0, ("a" * 12, "b" * 12))
    evaluator.ingest_metrics(message, NOW + 200.0)
    assert {verdict.status for verdict in judged(evaluator, NOW + 201.0).values()} == {Status.INVALID_INPUT}


@pytest.mark.parametrize(
    ("reason", "measured", "failed", "said"),
    [
        ("nan_logprob", {"kc.sampling.tokens": 990, "kc.drift.tv_token": 5000}, 10, None),
        ("nan_logprob", {"kc.sampling.tokens": 990, "kc.drift.tv_token": 5000}, 11, "1.1 % of the sequences failed"),
        ("nan_logprob", {"kc.drift.tv_token": 990}, 11, "1.1 % of the sequences failed"),
        ("nan_logprob", {}, 3, "100 % of the sequences failed"),
        ("nan_logprob", {"kc.sampling.rollouts": 48}, 192, "100 % of the sequences failed"),
        ("reward_out_of_range", {"kc.sampling.tokens": 990}, 500, None),
        ("no_tokens", {"kc.sampling.tokens": 990}, 500, None),
        ("greedy", {"kc.sampling.tokens": 990}, 500, None),
        ("operator_not_finite", {"kc.sampling.tokens": 10, "kc.drift.tv_token": 990}, 500, "100 % of the rows of"),
    ],
)
def test_too_many_sequences_that_fail_the_checks_are_told(
    reason: str, measured: dict[str, int], failed: int, said: str | None
) -> None:
    """More than one in a hundred of a kernel pair, until a window has none; counted in tokens where nothing else is."""
    evaluator, pair = Evaluator([make_contract(slices={})]), ("a" * 12, "b" * 12)
    for metric, count in measured.items():
        evaluator.ingest_metrics(Sender(metric, start=NOW - 5).request(NOW, np.full(count, 0.5)), NOW)
    evaluator.ingest_metrics(counted(reason, failed, NOW - 5, NOW, pair), NOW)
    evaluator.evaluate(NOW + 1)
    found = evaluator.missing("policy", NOW + 1)
    assert [((row.kernel_train, row.kernel_inference), row.outcome) for row in found] == (
        [(pair, "invalid")] if said else []
    )
    assert all(row.text.startswith(said or "") for row in found)
    evaluator.evaluate(NOW + 700)
    assert evaluator.missing("policy", NOW + 700) == []


def test_too_many_sequences_of_a_slice_are_told_though_few_of_all_fail() -> None:
    """A fifth of a slice that has a twentieth of the traffic is one in a hundred of it."""
    evaluator, pair = Evaluator([make_contract()]), ("a" * 12, "b" * 12)
    for slice, count in (("all", 995), ("code", 40)):
        lengths = Sender("kc.sampling.tokens", slice=slice, start=NOW - 5)
        evaluator.ingest_metrics(lengths.request(NOW, np.full(count, 20.0)), NOW)
        evaluator.ingest_metrics(counted("nan_logprob", 10, NOW - 5, NOW, pair, slice=slice), NOW)
    evaluator.evaluate(NOW + 1)
    (row,) = evaluator.missing("policy", NOW + 1)
    assert ((row.kernel_train, row.kernel_inference), row.outcome) == (pair, "invalid")
    assert row.text.startswith("20 % of the sequences on slice code failed the input checks in the window, most of")


def test_of_all_traffic_as_many_sequences_fail_as_on_any_slice_counted_there_or_not() -> None:
    evaluator, pair = Evaluator([make_contract()]), ("a" * 12, "b" * 12)
    for slice, count in (("all", 4), ("code", 10)):
        evaluator.ingest_metrics(counted("nan_logprob", count, NOW - 5, NOW, pair, slice=slice), NOW)
    assert evaluator.invalid_input("policy", NOW + 1) == {pair: {"nan_logprob": 10}}


def test_reasons_that_are_as_frequent_are_told_in_the_same_order_by_every_process() -> None:
    evaluator, pair = Evaluator([make_contract(slices={})]), ("a" * 12, "b" * 12)
    for reason in ("unmeasured", "shape", "prompts", "nan_logprob", "sampler", "weights"):
        evaluator.ingest_metrics(counted(reason, 10, NOW - 5, NOW, pair), NOW)
    evaluator.evaluate(NOW + 1)
    (row,) = evaluator.missing("policy", NOW + 1)
    assert "most of them nan_logprob" in row.text
