"""What `explain` concludes from a contract, forwards, backwards and among its clauses."""

import json
from pathlib import Path

import pytest

from kc_otel.contract import load
from kc_otel.contract.words import one_in, rounded, rounded_down, rounded_up
from kc_otel.explain import explain, relations
from kc_otel.explain import explanation as report
from kc_otel.explain.explanation import as_json
from kc_otel.explain.explanation_text import WIDTH, lines
from kc_otel.judge.sample_sizes import Needed, observations_to_pass

_CONTRACTS = sorted((Path(__file__).parents[2] / "contracts").glob("*.yaml"))
_GOLDEN = Path(__file__).parent / "golden"
_ASSUMED = "assumptions: {reward_range: [0, 2], horizon: 100, advantage_max: 5, score_norm_max: 40, clip: 0.2}"


def best(explanation, level, slice="all"):
    (entry,) = [entry for entry in explanation.forwards if entry.slice == slice]
    return entry.of(level)


def text(explanation):
    return "\n".join(line.text for line in lines(explanation)) + "\n"


@pytest.mark.parametrize(
    ("tail", "says"),
    [
        ("2%", "how often it is above, tail limits to 2 %: of the value itself, the mean is at most 0.0236"),
        (None, "no clause limits (metric: tv_token, statistic: fraction > 0.02, unit: sequence)"),
    ],
)
def test_a_cap_is_explained_with_what_is_above_it(contract, tail, says):
    """Both claims and what they give together, or the clause that is missing; alone it bounds the mean fifty times."""
    lines = ["- {id: tv, metric: tv_token, limit: 0.004, cap: 0.02}"]
    if tail:
        lines.append(f"- {{id: tail, metric: tv_token, statistic: fraction > 0.02, unit: sequence, limit: {tail}}}")
    made = explain(contract("assumptions: {horizon: 1}", "statistical:", *lines))
    chain = made.forwards[0].chains[0]
    assert says in chain.evidence
    assert chain.rung("sequence").bound == pytest.approx(0.004 / 0.02)


@pytest.mark.slow
@pytest.mark.parametrize("path", _CONTRACTS, ids=lambda path: path.stem)
def test_every_example_contract_explains(path):
    """As text within the width, and as JSON, with a guarantee or the reason why there is none, and a budget."""
    explanation = explain(load(path))
    shown = text(explanation)
    assert all(len(line) <= WIDTH for line in shown.splitlines())
    for heading in ("TAKEN AS GIVEN", "FORWARDS", "BACKWARDS", "AMONG EACH OTHER", "BEFORE A PASS"):
        assert heading in shown
    json.dumps(as_json(explanation), allow_nan=False)
    assert explanation.forwards[0].best


@pytest.mark.slow
def test_the_text_is_golden(monkeypatch):
    """One contract with every kind of clause, word by word; how wide an interval is does not come into it."""

    def counted(_, clause, slice):
        return Needed(clause.id, slice, 1000, "token", 2000, "min_samples")

    monkeypatch.setattr(relations, "observations_to_pass", counted)
    monkeypatch.setattr(report, "observations_to_pass", counted)
    explanation = explain(load(_GOLDEN / "contract.yaml"))
    assert text(explanation) == (_GOLDEN / "explained.txt").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_json_schema_is_stable():
    """Names and types of every field: programs read them."""

    def shape(value):
        if isinstance(value, dict):
            return {key: shape(item) for key, item in sorted(value.items())}
        if isinstance(value, list):
            return [shape(value[0])] if value else []
        return type(value).__name__

    data = as_json(explain(load(_GOLDEN / "contract.yaml")))
    assert shape(data) == json.loads((_GOLDEN / "shape.json").read_text(encoding="utf-8"))
    assert data["schema"] == "kc-otel.explain/v1"


def test_the_chain_has_the_numbers_of_its_statements(contract):
    """On policy T x mean; reward range x TV; 2 A G T TV; each rung names its statement."""
    said = explain(contract(_ASSUMED, "statistical: [{id: tv, metric: tv_token, unit: token, limit: 0.001}]"))
    (chain,) = said.forwards[0].chains
    assert [(rung.level, rung.bound, rung.by) for rung in chain.rungs] == [
        ("token", 0.001, "TV = E_Q[(1-w)+]"),
        ("sequence", pytest.approx(0.1), "on policy, T x mean"),
        ("reward", pytest.approx(0.2), "(r_max - r_min) TV_seq"),
        ("gradient", pytest.approx(2 * 5 * 100 * 40 * 0.1), "2 A_max G_seq TV_seq"),
    ]
    assert chain.needs == ()
    assert chain.reach == 50  # the example budget: 5 % of the range is TV_seq <= 0.05


def test_the_binding_clause_is_the_smallest_and_says_by_how_much(contract):
    """k3 through Pinsker wins at a long horizon; its limit could rise until the mean TV takes over."""
    said = explain(
        contract(
            _ASSUMED,
            "statistical:",
            "  - {id: tv, metric: tv_token, unit: token, limit: 0.001}",
            "  - {id: kl, metric: k3, unit: token, limit: 0.00005}",
        )
    )
    sequence = best(said, "sequence")
    assert sequence.clause == "kl"
    assert sequence.bound == pytest.approx((100 * 0.00005 / 2) ** 0.5)
    assert (sequence.next_clause, sequence.next_bound) == ("tv", pytest.approx(0.1))
    assert 100 * sequence.loosen_to / 2 == pytest.approx(0.1**2)
    assert sequence.needs == ("support",)
    assert best(said, "token").clause == "tv"


def test_a_slice_with_its_own_limits_has_its_own_guarantee(contract):
    """And slices that share every limit share one entry."""
    said = explain(
        contract(
            _ASSUMED,
            "slices: {code: {where: {task: code}}, chat: {where: {task: chat}}}",
            "statistical: [{id: tv, metric: tv_token, unit: token, limit: 0.001, slices: {code: 0.002}}]",
        )
    )
    assert [(entry.slice, entry.like) for entry in said.forwards] == [("all", ("chat",)), ("code", ())]
    assert best(said, "sequence", "code").bound == pytest.approx(0.2)


def test_a_slice_that_the_answer_chooses_is_guaranteed_nothing(contract):
    """Its tokens are no sample from Q given a prompt."""
    said = explain(
        contract(
            _ASSUMED,
            'slices: {long: {where: {response_tokens: ">= 50"}}}',
            "statistical: [{id: tv, metric: tv_token, unit: token, limit: 0.001}]",
        )
    )
    entry = said.forwards[1]
    assert (entry.slice, entry.chosen_by, entry.best) == ("long", ("response_tokens",), ())
    assert all(not chain.rungs for chain in entry.chains)


def test_by_sequence_a_token_metric_bounds_sequences_and_no_token(contract):
    """T x mean holds for the mean of means too; a token's own mean is another number."""
    said = explain(contract(_ASSUMED, "statistical: [{id: tv, metric: tv_token, unit: sequence, limit: 0.001}]"))
    (chain,) = said.forwards[0].chains
    assert chain.rung("token") is None
    assert chain.rung("sequence").bound == pytest.approx(0.1)


def test_a_limit_on_the_support_deficit_replaces_the_assumption(contract):
    """KL(Q||P) is at most the limit on k3 plus that on the deficit."""
    said = explain(
        contract(
            _ASSUMED,
            "statistical:",
            "  - {id: kl, metric: k3, unit: token, limit: 0.00004}",
            "  - {id: deficit, metric: support_deficit, unit: token, limit: 0.00001}",
        )
    )
    assert best(said, "sequence").needs == ()
    assert best(said, "sequence").bound == pytest.approx((100 * 0.00005 / 2) ** 0.5)
    assert "A clause of this contract limits it" not in text(said)  # nothing takes P << Q any more


@pytest.mark.slow
def test_backwards_agrees_with_forwards(contract):
    """Each limit of the table, written as a clause, guarantees the budget, and 1 % more does not."""
    said = explain(contract(_ASSUMED, "statistical: [{id: r, metric: reward_drift_bound, limit: 0.02}]"))
    (back,) = said.backwards
    assert (back.kind, back.budget, back.source, back.tv_seq) == ("reward", 0.02, "clause r", 0.01)
    assert len(back.enough) == 11
    for row in back.enough:
        section = "numerical" if row.metric == "logit_half_range" else "statistical"
        for factor, guaranteed in ((1.0, True), (1.01, False)):
            statistic = "" if row.metric == "clip_budget_share" else f"statistic: {row.statistic}, "
            clause = f"{{id: x, metric: {row.metric}, {statistic}limit: {row.limit * factor!r}}}"
            trial = contract(_ASSUMED, f"{section}: [{clause}]")
            (one,) = explain(trial, reward_budget=0.02).backwards[0].clauses
            assert one.guarantees is guaranteed, (row, factor)
            assert one.needed == pytest.approx(row.limit, rel=1e-3), row


def test_backwards_says_how_far_a_limit_is_from_a_guarantee(contract):
    """And that a quantile never guarantees it."""
    said = explain(
        contract(
            _ASSUMED,
            "statistical:",
            "  - {id: tv, metric: tv_token, unit: token, limit: 0.001}",
            "  - {id: tail, metric: tv_token, statistic: p99, limit: 0.2}",
        ),
        reward_budget=0.02,
    )
    mean, tail = said.backwards[0].clauses
    assert mean.times_too_loose == pytest.approx(10, rel=1e-6)
    assert (tail.needed, tail.times_too_loose) == (None, None)
    assert said.backwards[0].guaranteed_by == ()


def test_a_gradient_budget(contract):
    """2 A G T TV = 400: TV_seq <= 0.01."""
    (said,) = explain(
        contract(_ASSUMED, "statistical: [{id: tv, metric: tv_token, unit: token, limit: 0.001}]"),
        gradient_budget=400.0,
    ).backwards
    assert (said.kind, said.tv_seq) == ("gradient", pytest.approx(0.01))


def test_relations_between_clauses(contract):
    """Each kind, about the right clause."""
    said = explain(
        contract(
            _ASSUMED,
            "slices: {code: {where: {task: code}}}",
            "statistical:",
            "  - {id: mean, metric: abs_log_ratio, unit: token, limit: 0.02}",
            "  - {id: share, metric: clip_budget_share, unit: token, limit: 0.2}",
            "  - {id: worst, metric: abs_log_ratio, statistic: max, limit: 0.5, slices: {code: 0.6}}",
            "  - {id: p99, metric: abs_log_ratio, statistic: p99, limit: 0.7}",
            "  - {id: huge, metric: ratio, statistic: p99, limit: 200}",
            "  - {id: tv, metric: tv_token, unit: token, limit: 0.0195}",
            "observability: {min_samples: 100000}",
        )
    )
    found = {(relation.kind, relation.clauses) for relation in said.relations}
    assert ("disagree", ("share", "mean")) in found
    assert ("implied", ("p99", "worst")) in found
    assert ("never fails", ("huge",)) in found
    assert ("idle slice limit", ("worst",)) in found
    assert ("nearly implied", ("tv", "mean")) in found  # 1 - exp(-0.02) = 0.0198
    assert not any(kind == "implied" and clauses[0] == "mean" for kind, clauses in found)


def test_nobody_is_advised_to_drop_a_clause_about_traffic_for_one_about_what_was_seen(contract):
    """A maximum says nothing of the tokens that were not observed, so a quantile below it keeps its place."""
    worst = "  - {id: worst, metric: abs_log_ratio, statistic: max, limit: 0.5}"
    tail = "  - {id: tail, metric: abs_log_ratio, statistic: p99, limit: 0.7}"
    tighter = "  - {id: tighter, metric: abs_log_ratio, statistic: p99.9, limit: 0.5}"
    advice = {
        relation.clauses: relation.suggestion
        for relation in explain(contract("statistical:", worst, tail, tighter)).relations
        if relation.kind == "implied"
    }
    assert advice["tail", "worst"] == "keep tail: worst speaks of what was observed, tail of what was not, too"
    assert advice["tail", "tighter"].startswith(("drop tail", "keep tail because it is decided sooner"))


def test_a_clause_that_the_minimum_cannot_decide_is_slow(contract):
    """With the number of observations from the evaluator's own interval."""
    made = contract(
        "statistical: [{id: kl, metric: k3, unit: token, limit: 0.001}]", "observability: {min_samples: 2000}"
    )
    (relation,) = explain(made).relations
    needed = observations_to_pass(made, made.clauses[0], "all").observations
    assert relation.kind == "slow"
    assert needed > 2000
    assert f"{needed:,} tokens" in relation.sentence


def test_without_assumptions_it_says_what_is_missing(contract):
    """No horizon, no reward range: tokens only."""
    said = explain(contract("statistical: [{id: tv, metric: tv_token, unit: token, limit: 0.001}]"))
    assert set(said.missing) == {"horizon", "reward_range", "advantage_max, score_norm_max"}
    assert [entry.level for entry in said.forwards[0].best] == ["token"]
    assert said.backwards == ()


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"slice": "x"}, "slice: 'x'"),
        ({"horizon": 0}, "horizon: 0"),
        ({"gradient_budget": 1.0}, "gradient budget: needs"),
    ],
)
def test_what_cannot_be_explained_is_named(contract, asked, named):
    """With the argument and what to write."""
    with pytest.raises(ValueError, match=named):
        explain(contract("statistical: [{id: tv, metric: tv_token, unit: token, limit: 0.001}]"), **asked)


def test_numbers_are_rounded_to_the_side_that_stays_true():
    """Upper bounds up, limits down, and nothing that is exact."""
    assert (rounded_up(0.0707106), rounded_down(0.003125), rounded(0.0707106)) == ("0.0708", "0.00312", "0.0707")
    assert (rounded_up(0.3 - 0.1), rounded_down(0.1 + 0.2), rounded_up(0.9992)) == ("0.2", "0.3", "1")
    assert (one_in(1 / 14.9, "token"), one_in(0.6, "token")) == ("1 token in 14", "60 % of tokens")


def test_two_operators_are_never_taken_for_one(contract):
    """Limits on different operators neither disagree nor imply each other; rows are counted, not tokens."""
    found = explain(
        contract(
            "numerical:",
            "  - {id: attn, metric: operator_ulp, operator: attention, statistic: p99.9, limit: 4}",
            "  - {id: mlp, metric: operator_ulp, operator: mlp, statistic: p99.9, limit: 2}",
            "  - {id: attn-max, metric: operator_ulp, operator: attention, statistic: max, limit: 3}",
        )
    )
    between = [(each.kind, set(each.clauses)) for each in found.relations if len(each.clauses) > 1]
    assert between == [("implied", {"attn", "attn-max"})]
    assert "1 row in 1,000" in text(found)
    assert "{ulp}" not in text(found)


def test_what_verdicts_claim_names_the_clauses_that_claim_less(contract):
    """For how long a FAIL holds up, and which clauses fail by a fact or by the interval of one evaluation alone."""
    explanation = explain(
        contract(
            "observability: {confidence: 0.999, false_alarms: 7d}",
            "statistical:",
            "  - {id: mean, metric: tv_token, limit: 0.01}",
            "  - {id: worst, metric: abs_log_ratio, statistic: max, limit: 1}",
            "  - {id: signed, metric: k1, limit: 0.01}",
        )
    )
    sure, apart, fact, alone = explanation.claims
    assert sure.endswith("is at least 99.9 %.")
    assert "at least 7d for all cells" in apart
    assert fact.startswith("Of worst one observation")
    assert alone.startswith("A FAIL of signed rests on the interval of one evaluation")
