from __future__ import annotations

import hashlib

import pytest

from kc_otel.contract.model import KernelSpec
from kc_otel.contract.registry.own_metrics import ATTRIBUTES
from kc_otel.record.kernel import Kernel


def test_fingerprint_is_the_hash_of_the_canonical_fields():
    """The fingerprint is the first 12 hex digits of the SHA-256 of the sorted JSON of the fields that are set."""
    canonical = b'{"dtype":"fp8","engine":"vllm","extra":{"tp":2}}'
    assert Kernel("vllm", dtype="fp8", extra={"tp": 2}).fingerprint == hashlib.sha256(canonical).hexdigest()[:12]


def test_fields_that_are_not_set_do_not_count():
    """None and empty text leave the fingerprint as it is, so a new field does not rename old kernels."""
    assert Kernel("torch", dtype=None, attention="", extra={"a": None}) == Kernel("torch")
    assert Kernel("torch", dtype=None, attention="").fingerprint == Kernel("torch").fingerprint


def test_false_is_a_fact():
    """compile=False says something that leaving it out does not."""
    assert Kernel("torch", compile=False) != Kernel("torch")


@pytest.mark.parametrize("field", ["version", "dtype", "quantization", "kv_cache_dtype", "attention", "parallelism",
                                   "compile", "hardware"])  # fmt: skip
def test_every_field_changes_the_version(field):
    """A kernel that differs in any field is another version."""
    kernel, other = Kernel("vllm", **{field: "a"}), Kernel("vllm", **{field: "b"})
    assert len({kernel.fingerprint, other.fingerprint, Kernel("vllm").fingerprint}) == 3
    assert kernel != other


def test_extra_fields_change_the_version_whatever_their_order():
    """Extra fields count, and their order does not."""
    assert Kernel("vllm", extra={"a": 1, "b": 2}) == Kernel("vllm", extra={"b": 2, "a": 1})
    assert Kernel("vllm", extra={"a": 1}).fingerprint != Kernel("vllm", extra={"a": 2}).fingerprint


def test_a_torch_dtype_is_the_same_as_its_name():
    """dtype=torch.bfloat16 and dtype="bfloat16" are one version."""
    torch = pytest.importorskip("torch")
    assert Kernel("torch", dtype=torch.bfloat16) == Kernel("torch", dtype="bfloat16")


def test_a_kernel_is_a_value():
    """Equal kernels are one key of a dictionary, and a kernel cannot be changed."""
    assert {Kernel("torch", dtype="fp32"): 1}[Kernel("torch", dtype="fp32")] == 1
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
