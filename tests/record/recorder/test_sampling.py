from __future__ import annotations

import hashlib
import random
import subprocess
import sys
from enum import StrEnum

import numpy as np
import pytest
import torch

from kc_otel.contract.registry.own_metrics import ATTRIBUTES
from kc_otel.record.kernel import Kernel
from kc_otel.record.sampling import Sampler, position_of


def test_the_share_of_keys_is_what_was_asked_for():
    sampler = Sampler(0.2)
    assert abs(sum(sampler.takes(f"request-{i}") for i in range(20_000)) / 20_000 - 0.2) < 0.015
    assert abs(sum(sampler.takes() for _ in range(20_000)) / 20_000 - 0.2) < 0.015


def test_a_key_is_decided_alike_everywhere():
    """The same key has the same place in another process, so both sides of a pair take the same sequences."""
    code = "from kc_otel.record.sampling import position_of; print(position_of('request-7'), position_of((1, 'a')))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.split() == [str(position_of("request-7")), str(position_of((1, "a")))]


def test_a_larger_share_takes_what_a_smaller_one_took():
    keys = [str(i) for i in range(2000)]
    few = {key for key in keys if Sampler(0.1).takes(key)}
    assert few < {key for key in keys if Sampler(0.4).takes(key)}


@pytest.mark.parametrize(("share", "taken"), [(0.0, 0), (1.0, 100), (1, 100)])
def test_none_and_all(share, taken):
    assert sum(Sampler(share).takes() for _ in range(100)) == taken


def test_it_draws_nothing_from_the_program():
    random.seed(1)
    expected = random.random()
    random.seed(1)
    Sampler(0.5).takes()
    assert random.random() == expected


class _Text(StrEnum):
    CODE = "code-7"


@pytest.mark.parametrize(
    ("key", "other"),
    [
        (np.int64(7), 7),
        (np.str_("code-7"), "code-7"),
        (_Text.CODE, "code-7"),
        (7.0, 7),
        (("a", np.int32(3), (np.str_("b"),)), ("a", 3, ("b",))),
    ],
)
def test_keys_that_are_equal_are_decided_alike(key, other):
    assert key == other
    assert position_of(key) == position_of(other)


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
