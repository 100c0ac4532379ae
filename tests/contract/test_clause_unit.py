"""What one observation of a clause is: its unit, or the rows of one operator."""

import jsonschema
import pytest

from kc_otel.contract.clause import Clause
from kc_otel.contract.diff import diff
from kc_otel.contract.fields import operator_name
from kc_otel.contract.lint import lint
from kc_otel.contract.registry.clause_metrics import OPERATORS, Unit
from kc_otel.contract.schema import json_schema
from kc_otel.contract.sentences import limitation
from tests.contract.conftest import clause

_ROWS = {"metric": "operator_ulp", "operator": "attention"}


@pytest.mark.parametrize(
    ("section", "fields", "message"),
    [
        ("numerical", {"metric": "tv_exact", "statistic": "p99", "unit": "sequence"}, "numerical[0].unit: p99 of"),
        ("numerical", {"metric": "logit_half_range", "unit": "sequence"}, "numerical[0].unit: p99.9 of tokens cannot"),
        ("numerical", {"metric": "js", "statistic": "max", "unit": "sequence"}, "numerical[0].unit: the maximum over"),
        ("runtime", {"metric": "weights_lag", "unit": "token"}, "runtime[0].unit: weights_lag is observed once per"),
        ("runtime", {"metric": "weights_lag", "unit": "sequence"}, "runtime[0].unit: weights_lag is observed once"),
        (
            "runtime",
            {"metric": "gen_ai.server.time_to_first_token", "unit": "sequence"},
            "runtime[0].unit: the sender of gen_ai.server.time_to_first_token decides what one observation is",
        ),
        ("numerical", {"metric": "tv_exact", "unit": "tokens"}, "numerical[0].unit: 'tokens' is not accepted here;"),
        ("numerical", {"metric": "tv_exact", "unit": "batch"}, "numerical[0].unit: 'batch' is not accepted here;"),
        ("numerical", {**_ROWS, "unit": "token"}, "numerical[0].unit: operator_ulp is observed once per row of an"),
        ("numerical", {**_ROWS, "unit": "sequence"}, "numerical[0].unit: operator_ulp is observed once per row of an"),
    ],
)
def test_units_that_mean_nothing_are_refused_at_their_line(written, said, section, fields, message):
    (problem, *more) = said(written(clause(section, **fields)))
    assert problem.startswith(f"c.yaml:5: {message}")
    assert not more


@pytest.mark.parametrize("metric", ["tv_seq", "reward_drift_bound"])
def test_a_sequence_metric_is_not_observed_per_token(written, said, metric):
    text = written(
        "assumptions: {reward_range: [0, 1]}", clause("statistical", metric=metric, unit="token"), clause=False
    )
    assert said(text) == [
        f"c.yaml:6: statistical[0].unit: {metric} is observed once per sequence, not per token; remove unit"
    ]


def test_the_unit_decides_which_quantity_is_judged(contract):
    metrics = ["tv_token", "k1", "support_deficit", "clip_budget_share", "tv_seq", "reward_drift_bound"]
    lines = [f"- {{id: {m.replace('_', '-')}, metric: {m}, unit: sequence, limit: 0.1}}" for m in metrics]
    made = contract("assumptions: {reward_range: [0, 1], clip: 0.2}", "statistical:", *lines, clause=False)
    assert [clause.quantity.key for clause in made.clauses] == [
        "tv_token_by_sequence",
        "log_ratio_by_sequence",
        "ratio_by_sequence",
        "abs_log_ratio_by_sequence",
        "tv_seq",
        "tv_seq",
    ]
    bases = ("log_ratio", "abs_log_ratio", "ratio", "tv_token")
    assert made.averaged == tuple(f"{base}_by_sequence" for base in bases)
    assert [clause.metric_text for clause in made.clauses][-2:] == ["tv_seq", "reward_drift_bound"]
    assert made.clauses[0].metric_text == "tv_token by sequence"
    unsaid = contract(
        "assumptions: {reward_range: [0, 1], clip: 0.2}", "statistical:", *_without_unit(lines), clause=False
    )
    assert unsaid.averaged == (*(f"{base}_by_prompt" for base in bases), "tv_seq_by_prompt")
    assert unsaid.hash != made.hash


def _without_unit(lines):
    return [line.replace(" unit: sequence,", "") for line in lines]


@pytest.mark.parametrize("fields", [{"statistic": "p99"}, {"statistic": "fraction > 0.5"}, {"statistic": "max"}])
def test_what_has_no_form_by_sequence_counts_tokens(fields):
    for unit in (None, "token"):
        clause = Clause(id="x", metric="tv_token", limit=0.1, unit=unit, **fields)
        assert (clause.averaged, clause.quantity.key) == (None, "tv_token")


def test_a_share_of_sequences_is_of_those_whose_mean_is_above():
    clause = Clause(id="x", metric="tv_token", statistic="fraction > 0.02", unit="sequence", limit=0.01)
    assert (clause.averaged, clause.quantity.key, clause.about) == (Unit.SEQUENCE, "tv_token_by_sequence", "population")
    assert limitation(clause) == "Share above 0.02 of tv_token by sequence must not be above 0.01"


def test_a_share_that_none_may_is_counted_token_by_token():
    """Nothing said: limit 0 counts tokens, a limit above it judges prompts; a slice's own 0 does not mix the two."""

    def clause(limit, **more):
        return Clause(id="x", metric="top1_disagreement", limit=limit, **more)

    assert (clause(0).averaged, clause(0).allows_none("all")) == (None, True)
    assert (clause(0.1).averaged, clause(0.1).allows_none("all")) == (Unit.PROMPT, False)
    assert clause(0, unit="sequence").averaged is Unit.SEQUENCE
    assert not clause(0, unit="sequence").allows_none("all")
    assert [clause(0.1, slices={"code": 0}, **unit).allows_none("code") for unit in ({}, {"unit": "token"})] == [
        False,
        True,
    ]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("tv_token, unit: token", "tv_token, unit: sequence", "mean of tv_token by sequence <= 0.1"),
        ("tv_token, unit: sequence", "tv_token, unit: token", "mean of tv_token <= 0.1"),
        ("operator_ulp, operator: attention", "operator_ulp, operator: mlp", "p99.9 of operator_ulp of mlp <= 0.1"),
    ],
)
def test_another_unit_or_operator_is_another_promise(contract, old, new, said):
    """Neither bounds the other on all data, so the old promise is dropped, which a review has to see."""
    before, after = (contract(f"numerical: [{{id: x, metric: {of}, limit: 0.1}}]", clause=False) for of in (old, new))
    changes = [change for change in diff(before, after) if change.field.startswith("numerical")]
    assert [(change.kind, change.loosening) for change in changes] == [("drops", True), ("adds", False)]
    assert changes[0].sentence.endswith(" <= 0.1 is no longer promised")
    assert changes[1].sentence == f"{said} is promised"
    assert before.hash != after.hash


def test_quantiles_are_held_against_the_minimum_of_their_own_unit(written, said):
    clause = "[{id: x, metric: log_ratio_seq, limit: 1}]"

    def warned(minima):
        return said(written(f"observability: {{{minima}}}", f"statistical: {clause}", clause=False))

    (problem,) = warned("min_samples: 100000, min_sequences: 527")
    assert "a p99 cannot PASS at confidence 0.99 with fewer than 528 observations, and min_sequences is 527" in problem
    assert warned("min_samples: 1, min_sequences: 528") == []


@pytest.mark.parametrize(
    ("fields", "about"),
    [
        ({"metric": "tv_token", "unit": "sequence"}, "population"),
        ({"metric": "tv_seq"}, "population"),
        ({"metric": "log_ratio_seq", "statistic": "p99"}, "traffic"),
        ({"metric": "log_ratio_seq", "statistic": "p99", "unit": "sequence"}, "population"),
        ({"metric": "log_ratio_seq", "statistic": "fraction > 1"}, "traffic"),
        ({"metric": "log_ratio_seq", "statistic": "fraction > 1", "unit": "prompt"}, "population"),
        ({"metric": "tv_seq", "unit": "step"}, "population"),
        ({"metric": "log_ratio_seq", "statistic": "max"}, "traffic"),
        ({"metric": "tv_token"}, "population"),
        ({"metric": "clip_budget_share"}, "population"),
        ({"metric": "tv_token", "unit": "token"}, "traffic"),
        ({"metric": "top1_disagreement"}, "population"),
        ({"metric": "tv_token", "statistic": "p99"}, "traffic"),
        ({"metric": "operator_ulp", "operator": "attention"}, "traffic"),
        ({"metric": "weights_lag"}, "traffic"),
        ({"metric": "gen_ai.server.time_to_first_token"}, "traffic"),
    ],
)
def test_only_what_is_drawn_anew_tells_of_what_comes(fields, about):
    """A verdict is about the population by prompt or step, or by sequence where the clause says so; never a maximum."""
    assert Clause(id="x", limit=0.1, **fields).about == about


def _acting(clause, *more):
    return "slices: {a: {where: {b: c}}}", f"statistical: [{{id: x, limit: 0.1, {clause}}}]", *more


_ROUTE = "escalation: [{on: fail, do: [{route: train-kernel}]}]"


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ((_ROUTE,), "route would"),
        (("escalation: [{on: fail, severity: critical, do: [notify]}]",), "critical alert would"),
        (("escalation: [{on: fail, clauses: [x], do: [hold-promotion, halt]}]",), "hold-promotion and halt would"),
        (("promotion: {windows: 2}",), "promotion would"),
    ],
)
def test_who_acts_on_tokens_is_warned_unless_the_contract_says_so(written, said, more, what):
    (problem,) = said(written(*_acting("metric: tv_token, statistic: p90", *more), clause=False))
    assert problem.startswith(
        f"c.yaml:6: warning: statistical[0].metric: {what} act on verdicts that cover only the tokens"
    )
    assert "because p90 cannot be judged by prompt" in problem
    assert "trigger it, or write `unit: token` if this window is what matters" in problem
    for other in ("metric: tv_token, statistic: p90, unit: token", "metric: tv_token"):
        assert said(written(*_acting(other, *more), clause=False)) == []


@pytest.mark.parametrize(
    ("clause", "more"),
    [
        ("metric: tv_token, statistic: p90", "escalation: [{on: fail, do: [notify, {webhook: team}]}]"),
        ("metric: tv_token, statistic: p90", "escalation: [{on: no-data, severity: critical, do: [hold-promotion]}]"),
        ("metric: abs_log_ratio, statistic: max", _ROUTE),
        ("metric: tv_seq", _ROUTE),
        ("metric: tv_token", _ROUTE),
        (
            "metric: tv_token, statistic: p90}, {id: y, metric: tv_seq, limit: 0.1",
            "escalation: [{on: fail, clauses: [y], do: [{route: train-kernel}]}]",
        ),
    ],
)
def test_nobody_is_warned_where_nothing_acts_on_tokens(written, said, clause, more):
    assert said(written(*_acting(clause, more), clause=False)) == []


@pytest.mark.parametrize("metric", OPERATORS)
def test_an_operator_metric_names_its_operator(written, said, metric):
    (problem,) = said(written(clause(metric=metric, limit=4), clause=False))
    assert problem.startswith(f"c.yaml:5: numerical[0].metric: {metric} is measured on single operators; add the name")
    assert "operator: attention" in problem
    accepted = said(written(clause(metric=metric, operator="attention", limit=0.5), clause=False))
    assert all("warning" in line for line in accepted)


def test_other_metrics_name_none(written, said):
    (problem,) = said(written(clause(metric="tv_exact", unit="token", limit=0.1, operator="attention"), clause=False))
    assert problem.startswith("c.yaml:5: numerical[0].operator: tv_exact is not measured on single operators")
    assert all(key in problem for key in OPERATORS)


@pytest.mark.parametrize("name", ["attention", "model.layers.0.mlp", "aten::linear", "Qwen3/o_proj-1", "7"])
def test_names_of_modules_and_torch_operators_are_accepted(contract, name):
    made = contract(clause(metric="operator_ulp", statistic="max", operator=f"'{name}'"), clause=False)
    assert made.operators == (name,)
    written = {"id": "x", "metric": "operator_ulp", "limit": 1, "operator": name}
    schema = json_schema()
    jsonschema.Draft202012Validator({**schema["$defs"]["Clause"], "$defs": schema["$defs"]}).validate(written)


@pytest.mark.parametrize("name", ["", "layers.*.mlp", "a b", ".a", "a.", "x" * 101, "a\n", "é"])
def test_what_cannot_be_an_attribute_is_refused(name):
    with pytest.raises(ValueError, match="cannot name an operator"):
        operator_name(name)
    schema = json_schema()["$defs"]["Clause"]["properties"]["operator"]["anyOf"][0]
    if name != "a\n":  # in ECMA 262, which the schema's patterns are, $ is the end and nothing else
        assert not jsonschema.Draft202012Validator(schema).is_valid(name)


def test_the_same_promise_on_two_operators_is_two_promises(contract):
    two = "{id: a, metric: operator_ulp, statistic: max, operator: attention, limit: 4}"
    made = contract(f"numerical: [{two}, {two.replace('id: a', 'id: b').replace('attention', 'mlp')}]", clause=False)
    assert (lint(made), made.operators) == ([], ("attention", "mlp"))
    assert contract(f"numerical: [{two}, {two.replace('id: a', 'id: b')}]", clause=False).operators == ("attention",)
