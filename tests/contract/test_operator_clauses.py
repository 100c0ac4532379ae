"""Clauses on single operators: which name one, what is refused, and what another operator means to lint and diff."""

import jsonschema
import pytest

from kc_otel.contract.diff import diff
from kc_otel.contract.fields import operator_name
from kc_otel.contract.lint import lint
from kc_otel.contract.registry.clause_metrics import AVERAGED, OPERATORS, RECORDED, Origin, Unit
from kc_otel.contract.registry.own_metrics import ATTRIBUTES
from kc_otel.contract.schema import json_schema


def _clause(**fields: object) -> str:
    written = ", ".join(f"{name}: {value}" for name, value in {"id": "x", "limit": 4, **fields}.items())
    return f"numerical: [{{{written}}}]"


@pytest.mark.parametrize("metric", OPERATORS)
def test_an_operator_metric_names_its_operator(written, said, metric):
    (problem,) = said(written(_clause(metric=metric), clause=False))
    assert problem.startswith(f"c.yaml:5: numerical[0].metric: {metric} is measured on single operators; add the name")
    assert "operator: attention" in problem
    limit = 0.5
    assert [
        warning
        for warning in said(written(_clause(metric=metric, operator="attention", limit=limit), clause=False))
        if "warning" not in warning
    ] == []


def test_other_metrics_name_none(written, said):
    (problem,) = said(written(_clause(metric="tv_exact", unit="token", limit=0.1, operator="attention"), clause=False))
    assert problem.startswith("c.yaml:5: numerical[0].operator: tv_exact is not measured on single operators")
    assert all(key in problem for key in OPERATORS)


@pytest.mark.parametrize("name", ["attention", "model.layers.0.mlp", "aten::linear", "Qwen3/o_proj-1", "7"])
def test_names_of_modules_and_torch_operators_are_accepted(contract, name):
    made = contract(_clause(metric="operator_ulp", statistic="max", operator=f"'{name}'"), clause=False)
    assert made.operators == (name,)
    clause = {"id": "x", "metric": "operator_ulp", "limit": 1, "operator": name}
    schema = json_schema()
    jsonschema.Draft202012Validator({**schema["$defs"]["Clause"], "$defs": schema["$defs"]}).validate(clause)


@pytest.mark.parametrize("name", ["", "layers.*.mlp", "a b", ".a", "a.", "x" * 101, "a\n", "é"])
def test_what_cannot_be_an_attribute_is_refused(name):
    with pytest.raises(ValueError, match="cannot name an operator"):
        operator_name(name)
    schema = json_schema()["$defs"]["Clause"]["properties"]["operator"]["anyOf"][0]
    if name != "a\n":  # in ECMA 262, which the schema's patterns are, $ is the end and nothing else
        assert not jsonschema.Draft202012Validator(schema).is_valid(name)


def test_rows_are_no_tokens_and_no_sequences(written, said):
    for unit in ("token", "sequence"):
        (problem,) = said(written(_clause(metric="operator_ulp", operator="attention", unit=unit), clause=False))
        assert "numerical[0].unit: operator_ulp is observed once per row of an operator's output" in problem


def test_the_section_is_numerical(written, said):
    text = written(
        "statistical: [{id: x, metric: operator_ulp, statistic: max, operator: attention, limit: 1}]", clause=False
    )
    assert said(text) == [
        "c.yaml:5: statistical[0].metric: operator_ulp is measured from operator outputs; move the clause to numerical"
    ]


def test_the_same_promise_on_two_operators_is_two_promises(contract):
    two = "{id: a, metric: operator_ulp, statistic: max, operator: attention, limit: 4}"
    made = contract(f"numerical: [{two}, {two.replace('id: a', 'id: b').replace('attention', 'mlp')}]", clause=False)
    assert (lint(made), made.operators) == ([], ("attention", "mlp"))
    assert contract(f"numerical: [{two}, {two.replace('id: a', 'id: b')}]", clause=False).operators == ("attention",)


def test_another_operator_is_another_promise(contract):
    """The old one is dropped, which a review has to see."""
    old, new = (
        contract(f"numerical: [{{id: a, metric: operator_ulp, operator: {name}, statistic: max, limit: 4}}]")
        for name in ("attention", "mlp")
    )
    changes = [change for change in diff(old, new) if change.field.startswith("numerical")]
    assert [change.kind for change in changes] == ["drops", "adds"]
    assert changes[0].loosening
    assert changes[0].sentence == "max of operator_ulp of attention <= 4 is no longer promised"
    assert old.hash != new.hash


def test_the_registry_knows_them():
    assert set(OPERATORS) == {"route_disagreement"} | {
        f"operator_{name}" for name in ("max_abs", "relative", "ulp", "cosine", "batch_dependence")
    }
    for key, quantity in OPERATORS.items():
        assert (quantity.per, quantity.source) == (Unit.ROW, Origin.OPERATORS)
        assert RECORDED[key] is quantity
        assert key not in {base for base, _ in AVERAGED}
    assert ATTRIBUTES["kc.operator"].on == ("metric",)
