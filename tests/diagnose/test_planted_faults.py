"""Ten faults, each planted at several depths, are named; where nothing is planted, nothing is."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

import torch
from torch.nn import functional as F  # noqa: N812

from kc_otel.diagnose import torch_measure
from kc_otel.diagnose.torch_locate import locate
from tests.diagnose.planted_faults import FAULTS, LAYERS, WIDTH, conversations, pair
from tests.tools.contracts import contract_of


def contract(**inference):
    return contract_of("planted", kernels={"train": {"engine": "torch"}, "inference": {"engine": "torch", **inference}})


def named(fault, layer, seed=0):
    train, inference = pair(fault, layer, seed)
    return locate(contract(), train, inference, conversations(seed=seed), shares=False)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_named(fault):
    layer = LAYERS - 2
    culprit = named(fault, layer).culprit
    assert culprit is not None
    assert (culprit.kind, culprit.boundary.operator) == (fault.kind, fault.operator)
    assert culprit.boundary.layer == (layer if fault.in_layer else None)
    if fault.tensor:
        assert culprit.tensors == (f"layers.{layer}.{fault.tensor}",)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_nothing_is_named_where_nothing_was_planted(seed):
    assert named(None, 0, seed).findings == ()


@pytest.mark.slow
def test_settings_of_the_checkpoints_come_before_those_the_contract_declares():
    train, inference = pair(None, 0)
    for side, theta in ((train, 1e4), (inference, 5e5)):
        side.module.config = SimpleNamespace(to_dict=lambda theta=theta: {"rope_theta": theta})
    settings = locate(contract(dtype="bfloat16"), train, inference, conversations(6), shares=False).settings
    assert [said.partition(" differ")[0] for said in settings] == [
        "the checkpoints' configurations",
        "the contract's kernels",
    ]


@pytest.mark.slow
def test_honest_rounding_has_no_culprit():
    """A bf16 kernel differs from an fp32 one at every operator, and is not accused of it."""
    train, inference = pair(None, 0)
    inference.module.to(torch.bfloat16)
    located = locate(contract(dtype="bfloat16"), train, inference, conversations(), shares=False)
    assert located.findings == ()
    assert min(row.drift.estimate for row in located.boundaries[1:]) > 1e-4


@pytest.mark.slow
def test_the_culprit_has_the_largest_error_of_the_operator_with_the_largest_share():
    train, inference = pair(None, 0)
    noise = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for layer in inference.module.layers:
            for operator in ("v_proj", "o_proj"):
                weight = layer.get_submodule(operator).weight
                weight.add_(0.02 * weight.std() * torch.randn(weight.shape, generator=noise))
    located = locate(contract(), train, inference, conversations(6))
    operator = located.shares.components[0].name.partition(" ")[0]
    errors = {row.boundary: row.error for row in located.boundaries if row.boundary.operator == operator}
    assert located.culprit.boundary == max(errors, key=errors.get)


@pytest.mark.slow
def test_numbers_that_are_not_finite_are_named_where_they_begin():
    train, inference = pair(None, 0)
    inference.module.layers[1].o_proj.weight.data[0, 0] = float("nan")
    located = locate(contract(), train, inference, conversations(6))
    assert [str(finding.boundary) for finding in located.findings] == ["layer 1, o_proj"]
    assert "NaN or infinite" in located.culprit.sentence
    assert located.shares.components[0].share.estimate == 1.0


@pytest.mark.slow
def test_memory_bounds_the_tokens_that_are_worked_on_and_changes_no_answer(monkeypatch):
    fault, told = FAULTS[0], []
    train, inference = pair(fault, 1)
    at_once = locate(contract(), train, inference, conversations(6))
    monkeypatch.setattr(torch_measure, "_MAX_OUTPUT_BYTES", 1)
    in_parts = locate(contract(), train, inference, conversations(6), progress=told.append)
    assert in_parts.culprit.boundary == at_once.culprit.boundary
    assert in_parts.observed == pytest.approx(at_once.observed, rel=1e-3)
    done = [f"compared at every operator: {count} of 6 sequences" for count in (2, 4, 6)]
    assert [said for said in told if said.startswith("compared")] == done


class StaticInt8(torch.nn.Module):
    """A product whose inputs are int8 with a scale for each channel."""

    def __init__(self, linear, most):
        super().__init__()
        self.weight = linear.weight
        self.register_buffer("input_scale", most / 127)

    def forward(self, x):
        return F.linear((x / self.input_scale).round().clamp(-127, 127) * self.input_scale, self.weight)


def peaks(kernel, layer):
    """The largest input of a layer's output projection, by channel."""
    seen = []
    hook = kernel.module.layers[layer].o_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    kernel.run(conversations(), [[row] for row in range(10)])
    hook.remove()
    return torch.cat([tensor.abs().flatten(0, 1) for tensor in seen]).amax(0)


@pytest.mark.slow
@pytest.mark.parametrize("channel", [5, WIDTH - 1])
def test_the_scale_the_channel_and_how_far_beyond_are_said(channel):
    train, inference = pair(None, 0)
    most = peaks(train, 2)
    most[channel] /= 4
    inference.module.layers[2].o_proj = StaticInt8(inference.module.layers[2].o_proj, most)
    culprit = locate(contract(), train, inference, conversations(), shares=False).culprit
    assert culprit.tensors == ("layers.2.o_proj.input_scale",)
    assert f"in channel {channel} up to 3.98 times what it can hold" in culprit.sentence


@pytest.mark.slow
def test_a_scale_that_holds_its_inputs_is_not_accused():
    """int8 by itself is above the noise of fp32; nothing is cut off."""
    train, inference = pair(None, 0)
    inference.module.layers[2].o_proj = StaticInt8(inference.module.layers[2].o_proj, peaks(train, 2))
    culprit = locate(contract(), train, inference, conversations(), shares=False).culprit
    assert str(culprit.boundary) == "layer 2, o_proj"
    assert culprit.tensors == ()
