from __future__ import annotations

import hashlib

import pytest
import torch

from kc_otel.contract.registry.own_metrics import ATTRIBUTES
from kc_otel.record.kernel import Kernel


def test_fingerprint_is_the_hash_of_the_canonical_fields():
    canonical = b'{"dtype":"fp8","engine":"vllm","extra":{"tp":2}}'
    assert Kernel("vllm", dtype="fp8", extra={"tp": 2}).fingerprint == hashlib.sha256(canonical).hexdigest()[:12]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"dtype": None, "attention": "", "extra": {"a": None}}, {}),
        ({"extra": {"a": 1, "b": 2}}, {"extra": {"b": 2, "a": 1}}),
        ({"dtype": torch.bfloat16}, {"dtype": "bfloat16"}),
    ],
)
def test_the_same_said_otherwise_is_the_same_version(one, other):
    """Fields that are not set do not count, nor does the order of extra ones; a torch.dtype is its name."""
    assert Kernel("torch", **one) == Kernel("torch", **other)
    assert {Kernel("torch", **one): 1}[Kernel("torch", **other)] == 1
    assert Kernel("torch", **one).fingerprint == Kernel("torch", **other).fingerprint


@pytest.mark.parametrize("field", ["version", "dtype", "quantization", "kv_cache_dtype", "attention", "parallelism",
                                   "compile", "hardware", "extra"])  # fmt: skip
def test_every_field_changes_the_version(field):
    values = ({"a": 1}, {"a": 2}, {"a": False}) if field == "extra" else ("a", "b", False)
    kernels = [Kernel("vllm"), *(Kernel("vllm", **{field: value}) for value in values)]
    assert len(set(kernels)) == len({kernel.fingerprint for kernel in kernels}) == 4


def test_attributes_are_those_of_the_registry():
    fields = {"version": "1", "dtype": "a", "quantization": "b", "kv_cache_dtype": "c", "attention": "d",
              "parallelism": "e", "compile": True, "hardware": "f"}  # fmt: skip
    attributes = Kernel("vllm", **fields, extra={"seed": 3}).attributes()
    assert attributes.pop("kc.kernel.extra.seed") == 3
    assert set(attributes) <= set(ATTRIBUTES)
    assert sorted(map(str, attributes.values())) == sorted(map(str, ["vllm", *fields.values()]))


@pytest.mark.parametrize("engine", ["", None, 3])
def test_an_engine_must_have_a_name(engine):
    with pytest.raises(ValueError, match="engine"):
        Kernel(engine)
