"""What the model refuses, as sentences at the line of the offending key or value."""

import jsonschema
import pytest

from kc_otel.contract.schema import json_schema
from kc_otel.contract.yaml_document import parse

_VALIDATOR = jsonschema.Draft202012Validator(json_schema())
_BEYOND_A_SCHEMA = ("400d", "> abc", ">= nan", "[1, 0]", "limit: 5%", "limit: fast", "b: 5m", "c: 5m", "100%", "5%, 1%")
"""Values that take more than their place to refuse."""


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        (["asumptions: {}"], "5: asumptions: unknown key; did you mean 'assumptions'? keys here are apiVersion, "),
        (["observability:", "  windw: 5m"], "6: observability.windw: unknown key; did you mean 'window'? keys"),
        (["observability: {window: 5}"], "5: observability.window: 5 is not a duration; write a number with a unit"),
        (["observability: {window: 5x}"], "5: observability.window: '5x' is not a duration; write numbers with"),
        (
            ["observability: {window: 400d}"],
            "5: observability.window: '400d' is out of range; write a duration of at most 366d",
        ),
        (
            ["observability: {confidence: 99}"],
            "5: observability.confidence: 99 is out of range; write a number below 1, such as 0.99",
        ),
        (["observability: {confidence: 0.2}"], "5: observability.confidence: 0.2 is out of range; write a number"),
        (["observability: {confidence: '0.99'}"], "5: observability.confidence: '0.99' is not a number"),
        (
            ["observability: {sampling: 5}"],
            "5: observability.sampling: 5 is out of range; write a number of at most 1, such as 0.05",
        ),
        (["observability: {sampling: true}"], "5: observability.sampling: true is not a number"),
        (["observability: {min_samples: 0}"], "5: observability.min_samples: 0 is out of range; write a number of at"),
        (["observability: {min_samples: 1.5}"], "5: observability.min_samples: 1.5 is not a whole number"),
        (["observability: 5m"], "5: observability: '5m' is not a mapping; write keys and values below it"),
        (["observability:"], "5: observability: has no value; write one, or remove the key (O: measured"),
        (["slices: {Long Context: {where: {a: 1}}}"], "5: slices.Long Context: 'Long Context' is not a name"),
        (["slices: {all: {where: {a: 1}}}"], "5: slices: 'all' is reserved; choose another name"),
        (["slices:", "  x:", "    where: {}"], "7: slices.x.where: is empty; write a value (Attribute to"),
        (["slices:", "  x: {where: {n: '> abc'}}"], "6: slices.x.where.n: '> abc' compares with text; write a number"),
        (["slices:", "  x: {where: {n: '>= nan'}}"], "6: slices.x.where.n: '>= nan' compares with text"),
        (["slices:", "  x: {where: {n: [1, [2]]}}"], "6: slices.x.where.n: [1, [2]] has values other than text,"),
        (["slices:", "  x: {where: {a.b: []}}"], "6: slices.x.where.a.b: an empty list matches nothing"),
        (["slices:", "  x: {where: {n: {a: 1}}}"], "6: slices.x.where.n: {'a': 1} is not a condition; write a value"),
        (["promotion: {windows: 0}"], "5: promotion.windows: 0 is out of range; write a number of at least 1"),
        (["promotion: {window: 2}"], "5: promotion.window: unknown key; did you mean 'windows'?"),
        (["promotion: {failure_limit: 1.5}"], "5: promotion.failure_limit: 1.5 is not a whole number"),
        (["promotion: {steps: [1%, 100%]}"], "5: promotion.steps[1]: '100%' is not a share of the traffic"),
        (["promotion: {steps: [5%, 1%]}"], "5: promotion.steps: 1% comes after 5%"),
        (["promotion: {steps: []}"], "5: promotion.steps: is empty"),
        (["promotion: {steps: [1s]}"], "5: promotion.steps[0]: '1s' is not a share"),
        (["promotion: {approve: [ful]}"], "5: promotion.approve[0]: 'ful' is not accepted here; did you"),
        (["promotion: {skip: [canary]}"], "5: promotion.skip[0]: 'canary' is not accepted here"),
        (["assumptions: {reward_range: [1, 0]}"], "5: assumptions.reward_range: [1, 0] is not a range"),
        (["assumptions: {reward_range: [1]}"], "5: assumptions.reward_range[1]: is missing; add it"),
        (["assumptions: {clip: -1}"], "5: assumptions.clip: -1 is out of range; write a number above 0"),
        (["escalation:", "- on: failed", "  do: [notify]"], "6: escalation[0].on: 'failed' is not accepted here; did"),
        (["escalation:", "- on: fail", "  do: notify"], "7: escalation[0].do: 'notify' is not a list; write [...]"),
        (["escalation: [{on: fail, do: []}]"], "5: escalation[0].do: is empty; write a value (Actions when the step"),
        (["escalation: [{on: fail}]"], "5: escalation[0].do: is missing; add it (Actions when the step"),
        (["escalation: [{on: fail, do: [page]}]"], "5: escalation[0].do[0]: 'page' is not an action; write one of"),
        (["escalation: [{on: fail, do: [route]}]"], "5: escalation[0].do[0]: 'route' needs a target; write {route:"),
        (["escalation: [{on: fail, do: [{route: gpu}]}]"], "5: escalation[0].do[0].route: 'gpu' is not a kernel"),
        (["escalation: [{on: fail, do: [{webhook: A B}]}]"], "5: escalation[0].do[0].webhook: 'A B' is not an"),
        (["escalation: [{on: fail, do: [{notify: 1}]}]"], "5: escalation[0].do[0]: 'notify' is not an action with"),
        (["escalation: [{on: fail, do: [notify, 3]}]"], "5: escalation[0].do[1]: 3 is not an action; write a name"),
        (["runtime: [{id: a, metric: weights_lag, limit: 5%}]"], "5: runtime[0].limit: '5%' is a share, but the"),
        (["runtime: [{id: a, metric: weights_lag, limit: true}]"], "5: runtime[0].limit: true is not a limit; write"),
        (["runtime: [{id: a, metric: gen_ai.x, limit: fast}]"], "5: runtime[0].limit: 'fast' is not a number with a"),
        (["runtime: [{metric: weights_lag, limit: 1}]"], "5: runtime[0].id: is missing; add it (Name of the clause"),
        (["numerical:", "- id: a", "  metric: tv_exat", "  limit: 1%"], "7: numerical[0].metric: 'tv_exat' is not a"),
        (["numerical: [{id: a, metric: kl, limit: 0.1}]"], "5: numerical[0].metric: 'kl' is not a metric; did you"),
        (["numerical: [{id: a, metric: js, limit: 0.1, statistic: p100}]"], "5: numerical[0].statistic: 'p100' is"),
        (["numerical: [{id: a, metric: js, limit: 0.1, statistic: fraction > -}]"], "5: numerical[0].statistic: "),
        (["numerical: [{id: a, metric: js, limit: {x: 1}}]"], "5: numerical[0].limit: {'x': 1} is not "),
        (["numerical: [{id: a, metric: js, limit: 0.1, slices: {b: 5m}}]"], "5: numerical[0].slices.b: '5m' is a"),
        (["numerical: [{id: a, metric: js, limit: 0.1, slices: {b.c: 5m}}]"], "5: numerical[0].slices.b.c: '5m' is"),
        (["numerical: [{id: a, metric: js, limit: 0.1, cap: 0}]"], "5: numerical[0].cap: 0 is out of range; write a"),
    ],
)
def test_each_refusal_has_its_line_its_field_and_a_way_out(written, said, lines, problem):
    problems = said(written(*lines))
    valid = _VALIDATOR.is_valid(parse(written(*lines), "c.yaml")[0].data)
    assert valid == any(value in lines[-1] for value in _BEYOND_A_SCHEMA)
    assert len(problems) == 1, problems
    assert problems[0].startswith(f"c.yaml:{problem}")


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("kernel-contract/v1", "kernel-contract/v2", "1: apiVersion: 'kernel-contract/v2' is not accepted here; wri"),
        ("KernelContract", "Deployment", "2: kind: 'Deployment' is not accepted here; write KernelContract"),
        ("name: policy-7b", "name: Policy 7B", "3: metadata.name: 'Policy 7B' is not a name (lower-case letters, "),
        ("version: 3", "version: '3'", "3: metadata.version: '3' is not a whole number"),
        (", owner: rl-infra", "", "3: metadata.owner: is missing; add it (Responsible team or person)"),
        ("owner: rl-infra", "owner: " + "x" * 300, "3: metadata.owner: is too long; write at most 200 characters"),
        ("dtype: fp8", "dtype: 8", "4: kernels.inference.dtype: 8 is not text; put it in quotes"),
        ("{engine: vllm, dtype: fp8}", "vllm", "4: kernels.inference: 'vllm' is not a mapping; write keys and "),
        ("kind: KernelContract\n", "", "1: kind: is missing; add it"),
    ],
)
def test_the_head_is_judged_too(written, said, old, new, problem):
    text = written().replace(old, new)
    problems = said(text)
    assert not _VALIDATOR.is_valid(parse(text, "c.yaml")[0].data)
    assert len(problems) == 1, problems
    assert problems[0].startswith(f"c.yaml:{problem}")


def test_a_name_that_is_refused_comes_with_one_that_is_not(written, said):
    assert said(written().replace("policy-7b", "Policy 7B (new!)"))[0].endswith("did you mean 'policy-7b-new'?")
