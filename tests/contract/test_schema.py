"""The JSON Schema accepts what the loader accepts, above all the contracts that teams start from."""

import json
import re
from pathlib import Path

import jsonschema
import pytest

from kc_otel.contract.load import load, load_all
from kc_otel.contract.model import declared_otherwise
from kc_otel.contract.schema import json_schema
from kc_otel.contract.yaml_document import parse

_CONTRACTS = sorted((Path(__file__).parents[2] / "contracts").glob("*.yaml"))
_VALIDATOR = jsonschema.Draft202012Validator(json_schema())


def _data(text):
    document, _ = parse(text, "c.yaml")
    assert document is not None
    return document.data


def test_the_schema_is_a_schema():
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["$schema"].endswith("2020-12/schema")
    assert schema["title"]
    assert schema["$id"]


def test_every_key_is_described():
    schema = json_schema()
    places = {"": schema, **schema["$defs"]}
    silent = [
        f"{name}.{key}"
        for name, place in places.items()
        for key, value in place.get("properties", {}).items()
        if not value.get("description") and "$ref" not in value and "const" not in value
    ]
    assert silent == []


def test_editors_find_the_schema_beside_the_example_contracts():
    folder = _CONTRACTS[0].parent
    assert json.loads((folder / "kernel-contract.schema.json").read_text()) == json_schema(), "run `make generate`"
    first = {path.read_text(encoding="utf-8").splitlines()[0] for path in _CONTRACTS}
    assert first == {"# yaml-language-server: $schema=kernel-contract.schema.json"}


@pytest.mark.parametrize("path", _CONTRACTS, ids=lambda path: path.stem)
def test_the_example_contracts_are_accepted_and_name_sources_of_their_figures(path):
    text = path.read_text(encoding="utf-8")
    _VALIDATOR.validate(_data(text))
    assert re.search(r"arXiv:\d{4}\.\d{5}|\b20\d\d \(\"|README\.md|docs/", text)


@pytest.mark.parametrize(
    "line",
    [
        "runtime: [{id: a, metric: gen_ai.client.operation.duration, statistic: p99, limit: 800ms}]",
        "slices: {a: {where: {x: [1, two, true], y: '>= 3, < 4', z: false}, description: why}}",
        "escalation: [{on: fail, for: 1h30m, do: [notify, {route: train-kernel}, {webhook: pager}]}]",
        "assumptions: {reward_range: [-1, 1.5], horizon: 10, advantage_max: 5, score_norm_max: 1e2, clip: .2}",
        "observability: {window: 500ms, long_window: 1d, heartbeat: 1ms}",
        "numerical: [{id: a, metric: js, statistic: fraction > 1e-3, limit: 2%}]",
        "numerical: [{id: a, metric: js, unit: sequence, limit: .2}, {id: b, metric: js, unit: token, limit: .3}]",
        "observability: {min_samples: 100, min_sequences: 10}",
        "promotion: {windows: 2, steps: [1%, 0.1], failure_limit: 2, approve: [full], skip: [shadow]}",
    ],
)
def test_what_the_loader_accepts_is_accepted(written, contract, line):
    contract(line)
    _VALIDATOR.validate(_data(written(line)))


_WANTED = {
    "rl-rollouts-bf16-fp8", "serving-int8", "serving-awq", "attention-kernel-upgrade", "moe", "batch-invariance",
    "fp8-kv-cache",
}  # fmt: skip


def test_there_is_one_for_each_need():
    assert {contract.name for contract in load_all([_CONTRACTS[0].parent])} >= _WANTED
    assert all(load(path).name == path.stem for path in _CONTRACTS)


def test_quantisations_are_declared_as_vllm_reports_them():
    """Where not, each engine is another than is declared, and no promotion goes on."""
    reported = {"serving-int8": "compressed-tensors", "serving-awq": "auto_awq", "rl-rollouts-bf16-fp8": "fp8"}
    for contract in load_all([_CONTRACTS[0].parent]):
        spec = contract.kernels.inference
        if spec.quantization is not None:
            fields = {"engine": "vllm", "dtype": "bfloat16", "quantization": reported[contract.name]}
            assert declared_otherwise(spec, fields) == ()
