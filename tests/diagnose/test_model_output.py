"""Differences after the last operator: they are named where every operator agrees, and only there."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

from kc_otel.diagnose.above_noise import boundary_drift
from kc_otel.diagnose.boundaries import HEAD, OUTPUT, Boundary
from kc_otel.diagnose.located import located_lines, located_sentence
from kc_otel.diagnose.torch_kernel import TorchKernel
from kc_otel.diagnose.torch_locate import locate
from tests.diagnose.test_above_noise import measured
from tests.diagnose.test_reach import CONTRACT, Model, compared, sequences

THROUGH = pytest.mark.parametrize("through", ["kernels", "captures"])
GIVEN = sequences(*[28] * 8)


def kernel(after=lambda logits: logits, faulty=None):
    """The model with a function after its head, and perhaps a fault in an operator."""
    model = Model()
    if faulty:
        model.get_submodule(faulty).weight.data *= 1.5
    model.register_forward_hook(lambda _, __, logits: after(logits))
    return TorchKernel(model)


def capped(logits):
    return 0.5 * torch.tanh(logits / 0.5)


@THROUGH
@pytest.mark.parametrize("after", [lambda logits: logits / 0.7, capped], ids=["temperature", "soft cap"])
def test_a_difference_after_the_head_is_named_and_is_no_missing_culprit(after, through):
    found = compared(kernel(), kernel(after), GIVEN, through)
    assert [finding.boundary for finding in found.findings] == [OUTPUT]
    place = "lm_head" if through == "kernels" else "head"
    assert found.culprit.sentence.startswith(f"after {place}: the outputs differ though every operator agrees; ")
    assert not any(line.startswith("no culprit") for line in located_lines(found))
    assert located_sentence(found).startswith("first divergence: model_output (8 sequences")


def test_a_difference_after_the_head_has_all_of_the_drift():
    found = locate(CONTRACT, kernel(), kernel(capped), GIVEN)
    assert [component.name for component in found.shares.components] == ["model_output"]
    assert found.explained == pytest.approx(1.0)


@THROUGH
def test_log_probabilities_are_no_other_output_than_logits(through):
    assert compared(kernel(), kernel(lambda logits: logits.log_softmax(-1)), GIVEN, through).findings == ()


@pytest.mark.parametrize("faulty", ["layers.1.q_proj", "lm_head"])
def test_an_error_of_an_operator_does_not_count_again_after_the_head(faulty):
    found = compared(kernel(capped), kernel(capped, faulty), GIVEN, "kernels")
    assert [finding.boundary for finding in found.findings] == [Boundary(1, "q_proj") if "q" in faulty else HEAD]


def test_an_operator_and_what_follows_the_head_are_both_named():
    found = compared(kernel(), kernel(capped, "lm_head"), GIVEN, "kernels")
    assert [str(finding.boundary) for finding in found.findings] == ["head", "model_output"]
    assert found.findings[1].sentence.startswith("after lm_head: the outputs differ; ")


def test_kernels_that_share_nothing_but_their_outputs_are_refused():
    with pytest.raises(ValueError, match="the two kernels share no operator by name"):
        boundary_drift({OUTPUT: measured([1.0] * 8)}, 0.01)
