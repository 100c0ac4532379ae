"""What kernels are called, and what they report against what was declared."""

from __future__ import annotations

import pytest

from kc_otel.contract.declared_kernels import declared_otherwise
from kc_otel.contract.model import KernelSpec, KernelSpecs
from kc_otel.judge.recorders import ONE_KERNEL, KernelInfo, kernel_names, stand_in, unlike_declared

VLLM = {"engine": "vllm", "engine.version": "0.32", "dtype": "bfloat16"}


def info(version, role="inference", **more):
    return KernelInfo(role, version, VLLM | more, 0.0)


def test_kernels_that_would_be_called_alike_are_named_by_what_differs():
    """Of whatever role; those that are called otherwise are not made longer."""
    kernels = [
        info("aa", "train", kv_cache_dtype="auto", attention="FLASH_ATTN"),
        info("bb", kv_cache_dtype="fp8", attention="FLASH_ATTN"),
        KernelInfo("inference", "cc", VLLM | {"dtype": "fp8", "attention": "TRITON_ATTN"}, 0.0),
        KernelInfo("inference", "dd", {}, 0.0),
    ]
    assert list(kernel_names(kernels).values()) == [
        "vllm 0.32 bfloat16, kv_cache_dtype auto (aa)", "vllm 0.32 bfloat16, kv_cache_dtype fp8 (bb)",
        "vllm 0.32 fp8 (cc)", "dd",
    ]  # fmt: skip
    assert kernel_names([info("aa"), info("bb", attention="x")])["inference", "aa"] == (
        "vllm 0.32 bfloat16, attention not reported (aa)"
    )


@pytest.mark.parametrize(
    ("declared", "reported", "said"),
    [
        ({"kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "auto"}, ("kv_cache_dtype fp8 is declared, and auto reported",)),
        ({"kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "fp8_e4m3"}, ()),
        ({"kv_cache_dtype": "fp8"}, {}, ()),
        ({"dtype": "bf16"}, {"dtype": "torch.bfloat16"}, ()),
        ({"dtype": "fp8"}, {"quantization": "fp8"}, ()),
        ({"dtype": "fp8"}, {}, ("dtype fp8 is declared, and bfloat16 reported",)),
        ({"kv_cache_dtype": "bf16"}, {"kv_cache_dtype": "auto"}, ()),
        ({"attention": "flash-attn"}, {"attention": "FLASH_ATTN"}, ()),
    ],
)
def test_what_is_reported_is_held_against_what_is_declared(declared, reported, said):
    """In the names that engines have for one thing; what is not reported is no difference."""
    assert declared_otherwise(KernelSpec(engine="vllm", **declared), VLLM | reported) == said


def test_one_kernel_on_both_sides_is_not_the_two_that_are_declared():
    """A roll-out whose flag was forgotten is the stable kernel again; where one is declared, it is what was meant."""
    bf16, fp8 = (KernelSpec(engine="vllm", kv_cache_dtype=dtype) for dtype in ("auto", "fp8"))
    stable, candidate = info("aa", "train"), info("aa")
    assert unlike_declared(KernelSpecs(train=bf16, inference=fp8), candidate, [stable, candidate]) == (ONE_KERNEL,)
    assert unlike_declared(KernelSpecs(train=bf16, inference=fp8), candidate, [info("bb", "train"), candidate]) == ()
    assert unlike_declared(KernelSpecs(train=bf16, inference=bf16), candidate, [stable, candidate]) == ()


def test_the_training_kernel_that_slices_are_routed_to_is_no_forgotten_flag():
    """It serves beside the version that is judged; where it serves alone, it may be what was meant to be another."""
    train, version = info("aa", "train"), info("bb")
    assert stand_in([train, version, info("aa")]) == {"aa"}
    assert stand_in([train, info("aa")]) == stand_in([train, version]) == frozenset()
