"""A static scale that cuts inputs off is named with its tensor and channel; one that holds them is not."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch
from torch.nn import functional as F  # noqa: N812

from kc_otel.diagnose.torch_locate import locate
from tests.diagnose.planted_faults import WIDTH, conversations, pair
from tests.diagnose.test_planted_faults import contract


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
    """A channel that calibration has seen only a quarter of."""
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
