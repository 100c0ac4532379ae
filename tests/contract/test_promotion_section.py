"""The section `promotion`: what is accepted, what is refused at which line, and what a change of it means."""

import jsonschema
import pytest

from kc_otel.contract.diff import diff
from kc_otel.contract.errors import ContractError
from kc_otel.contract.load import load_text
from kc_otel.contract.schema import json_schema
from kc_otel.contract.yaml_document import parse

_TEXT = """\
apiVersion: kernel-contract/v1
kind: KernelContract
metadata: {name: a, version: 1, owner: o}
kernels: {train: {engine: torch}, inference: {engine: vllm}}
statistical: [{id: tv, metric: tv_token, unit: token, limit: 0.01}]
promotion:
  windows: 2
  steps: [1%, 0.1]
  failure_limit: 2
  approve: [full]
  skip: [shadow]
"""
_VALIDATOR = jsonschema.Draft202012Validator(json_schema())


def test_shares_are_numbers_or_percentages():
    contract = load_text(_TEXT)
    assert contract.promotion.steps == (0.01, 0.1)
    assert load_text(_TEXT.replace("[1%, 0.1]", "[0.01, 10 %]")).hash == contract.hash
    document, _ = parse(_TEXT, "c.yaml")
    _VALIDATOR.validate(document.data)


def test_a_contract_without_the_section_promises_the_defaults():
    bare = load_text(_TEXT.partition("promotion:")[0])
    assert (bare.promotion.windows, bare.promotion.steps, bare.promotion.failure_limit) == (3, (0.01, 0.05, 0.25), 1)
    written = "promotion: {windows: 3, steps: [1%, 5%, 25%], failure_limit: 1, approve: [], skip: []}\n"
    assert load_text(_TEXT.partition("promotion:")[0] + written).hash == bare.hash
    assert load_text(_TEXT).hash != bare.hash


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("windows: 2", "windows: 0", "c.yaml:7: promotion.windows: 0 is out of range; write a number of at least 1"),
        ("[1%, 0.1]", "[1%, 100%]", "c.yaml:8: promotion.steps[1]: '100%' is not a share of the traffic"),
        ("[1%, 0.1]", "[5%, 1%]", "c.yaml:8: promotion.steps: 1% comes after 5%"),
        ("[1%, 0.1]", "[]", "c.yaml:8: promotion.steps: is empty"),
        ("[1%, 0.1]", "[1s]", "c.yaml:8: promotion.steps[0]: '1s' is not a share"),
        ("failure_limit: 2", "failure_limit: 1.5", "c.yaml:9: promotion.failure_limit: 1.5 is not a whole number"),
        ("approve: [full]", "approve: [ful]", "c.yaml:10: promotion.approve[0]: 'ful' is not accepted here; did you"),
        ("skip: [shadow]", "skip: [canary]", "c.yaml:11: promotion.skip[0]: 'canary' is not accepted here"),
        ("windows: 2", "window: 2", "c.yaml:7: promotion.window: unknown key; did you mean 'windows'?"),
    ],
)
def test_what_cannot_be_meant_is_refused_at_its_line(old, new, said):
    with pytest.raises(ContractError) as error:
        load_text(_TEXT.replace(old, new), "c.yaml")
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("windows: 2", "windows: 1", ["loosens promotion.windows"]),
        ("windows: 2", "windows: 3", ["tightens promotion.windows"]),
        ("failure_limit: 2", "failure_limit: 3", ["loosens promotion.failure_limit"]),
        ("failure_limit: 2", "failure_limit: 1", ["tightens promotion.failure_limit"]),
        ("[1%, 0.1]", "[0.1]", ["loosens promotion.steps"]),
        ("[1%, 0.1]", "[1%]", ["loosens promotion.steps"]),
        ("[1%, 0.1]", "[1%, 0.1, 0.5]", ["tightens promotion.steps"]),
        ("[1%, 0.1]", "[2%, 0.1]", ["loosens promotion.steps"]),
        ("approve: [full]", "approve: []", ["loosens promotion.approve"]),
        ("approve: [full]", "approve: [canary, full]", ["tightens promotion.approve"]),
        ("skip: [shadow]", "skip: [shadow, offline-ci]", ["loosens promotion.skip"]),
        ("skip: [shadow]", "skip: []", ["tightens promotion.skip"]),
        ("[1%, 0.1]", "[1%, 10%]", []),
    ],
)
def test_each_change_is_named_and_judged(old, new, expected):
    assert old in _TEXT
    found = [f"{change.kind} {change.field}" for change in diff(load_text(_TEXT), load_text(_TEXT.replace(old, new)))]
    assert [change for change in found if not change.endswith("metadata.version")] == expected
