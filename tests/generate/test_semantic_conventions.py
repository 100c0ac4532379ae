"""The registry as semantic conventions: valid by Weaver's own schema, and of exactly what is sent."""

from __future__ import annotations

import json
import re

import jsonschema
import pytest
import yaml

from kc_otel.contract.registry import ATTRIBUTES, METRICS, QUANTITIES
from kc_otel.generate.semantic_conventions import semantic_convention_files


@pytest.fixture(scope="module")
def files():
    return {each.path.name: yaml.safe_load(each.text) for each in semantic_convention_files()}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["attributes.yaml", "metrics.yaml", "spans.yaml"])
def test_each_file_is_valid_by_weavers_schema(files, schemas, name):
    """The schema that it calls the source of truth. Its manifests are strings of a URL and a version."""
    schema = json.loads((schemas / "weaver-semconv.schema.v2.json").read_text())
    assert re.fullmatch(r"https://\S+/\d+\.\d+\.\d+", files["manifest.yaml"]["schema_url"])
    jsonschema.Draft202012Validator(schema).validate(files[name])


def test_every_reference_is_defined_and_every_name_is_there_once(files):
    """All that the registry has, apart from recording rules; and keys are in the form that OpenTelemetry asks for."""
    keys = [each["key"] for each in files["attributes.yaml"]["attributes"]]
    assert sorted(keys) == sorted(ATTRIBUTES)
    metrics = [each["name"] for each in files["metrics.yaml"]["metrics"]]
    sent = {name for name in METRICS if not name.startswith("kc.rule.")} | {each.name for each in QUANTITIES.values()}
    assert sorted(metrics) == sorted(sent)
    signals = [*files["metrics.yaml"]["metrics"], *files["spans.yaml"]["spans"]]
    assert {each["ref"] for signal in signals for each in signal.get("attributes", ())} <= set(keys)
    assert all(re.fullmatch(r"[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)*", name) for name in (*keys, *metrics))


def test_types_are_those_of_the_values_that_are_sent(files):
    """What a span of a comparison carries, by OpenTelemetry's names of types."""
    types = {each["key"]: each["type"] for each in files["attributes.yaml"]["attributes"]}
    assert types["kc.compare.tokens"] == "int"
    assert types["kc.compare.slices"] == "string[]"
    assert types["kc.compare.tv_token"] == "double"
    assert types["kc.contract"] == "string"
