"""Modules of trainers, Hugging Face and engines have one name for one operator."""

from __future__ import annotations

import pytest

from kc_otel.diagnose.boundaries import Boundary, boundaries_of
from kc_otel.diagnose.located import NotComparableError
from kc_otel.diagnose.same_checkpoint import complete_layers


@pytest.mark.parametrize(
    ("name", "layer", "operator"),
    [
        ("model.embed_tokens", None, "embedding"),
        ("model.layers.11.input_layernorm", 11, "attention_norm"),
        ("model.layers.11.self_attn.qkv_proj", 11, "qkv_proj"),
        ("model.layers.0.self_attn.attn", 0, "attention"),
        ("model.layers.0.mlp.gate", 0, "router"),
        ("model.layers.0.mlp.gate_up_proj", 0, "gate_up_proj"),
        ("model.norm", None, "final_norm"),
        ("lm_head", None, "head"),
        ("transformer.h.3.attn.c_proj", 3, "o_proj"),
        ("transformer.h.3.mlp.c_proj", 3, "down_proj"),
        ("blocks.2.down", 2, "down_proj"),
        ("model.layers.4", 4, "block"),
    ],
)
def test_an_operator_has_one_name(name, layer, operator):
    assert boundaries_of([(name, False)]) == {name: Boundary(layer, operator)}


def test_modules_of_one_kind_keep_their_paths():
    names = ["layers.0.mlp.experts.0.up_proj", "layers.0.mlp.experts.1.up_proj", "layers.0.adapter", "layers.0.dropout"]
    found = boundaries_of([(name, "dropout" not in name) for name in names])
    assert [key.operator for key in found.values()] == ["mlp.experts.0.up_proj", "mlp.experts.1.up_proj", "adapter"]


NAMES = [f"model.layers.{layer}.{name}.weight" for layer in range(4) for name in ("self_attn.o_proj", "mlp.down_proj")]


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        (NAMES[:4] + NAMES[5:], "has no model.layers.2.self_attn.o_proj.weight, which all of its other layers have"),
        ([*NAMES, "model.layers.4.norm.weight"], ""),  # a layer of another kind
        ([name for name in NAMES if "0.mlp" not in name] + ["model.layers.0.mlp.experts.1.down_proj.weight"], ""),
        ([name.replace("weight", "qweight") if ".1." not in name else name for name in NAMES], ""),  # one in 16 bits
        (NAMES[:3], ""),
        (NAMES, ""),
    ],
)
def test_a_layer_that_lacks_a_tensor_is_refused_and_one_of_another_kind_is_not(tensors, said):
    if not said:
        complete_layers("folder", tensors)
        return
    with pytest.raises(NotComparableError, match=said):
        complete_layers("folder", tensors)
