from __future__ import annotations

import hashlib

import pytest
import torch

from kc_otel.contract.model import KernelSpec
from kc_otel.contract.registry.own_metrics import ATTRIBUTES
from kc_otel.record.kernel import Kernel


def test_fingerprint_is_the_hash_of_the_canonical_fields():
    """The fingerprint is the first 12 hex digits of the SHA-256 of the sorted JSON of the fields that are set."""
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
    """A kernel that differs in any field is another version; False is a fact, too."""
    values = ({"a": 1}, {"a": 2}, {"a": False}) if field == "extra" else ("a", "b", False)
    kernels = [Kernel("vllm"), *(Kernel("vllm", **{field: value}) for value in values)]
    assert len(set(kernels)) == len({kernel.fingerprint for kernel in kernels}) == 4


def test_a_kernel_cannot_be_changed():
    """It is a key of streams."""
    with pytest.raises(AttributeError):
        Kernel("torch").engine = "vllm"


def test_attributes_are_those_of_the_registry():
    """Every field has a registered attribute name; extra fields have a prefix of their own."""
    fields = {"version": "1", "dtype": "a", "quantization": "b", "kv_cache_dtype": "c", "attention": "d",
              "parallelism": "e", "compile": True, "hardware": "f"}  # fmt: skip
    attributes = Kernel("vllm", **fields, extra={"seed": 3}).attributes()
    assert attributes.pop("kc.kernel.extra.seed") == 3
    assert set(attributes) <= set(ATTRIBUTES)
    assert sorted(map(str, attributes.values())) == sorted(map(str, ["vllm", *fields.values()]))


def test_declared_takes_what_the_contract_says():
    """A kernel can be made of what a contract declares about it."""
    spec = KernelSpec(engine="vllm", dtype="fp8", kv_cache_dtype="fp8")
    assert Kernel.declared(spec) == Kernel("vllm", dtype="fp8", kv_cache_dtype="fp8")


@pytest.mark.parametrize("engine", ["", None, 3])
def test_an_engine_must_have_a_name(engine):
    """A kernel without the name of its program is refused."""
    with pytest.raises(ValueError, match="engine"):
        Kernel(engine)
