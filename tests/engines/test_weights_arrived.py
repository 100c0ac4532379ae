"""A trainer's weights and those of a live vLLM: all arrived, one tensor was left out, and nobody asked for a tensor."""

from __future__ import annotations

import pytest

from kc_otel.integrations.vllm.weights import check_weights
from tests.engines._checkpoints import changed
from tests.engines._vllm import offline_engine

pytestmark = pytest.mark.slow

LATE = "model.layers.2.self_attn.k_proj.weight"


@pytest.fixture(scope="module")
def trainer(tiny_model):
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)


@pytest.fixture(scope="module")
def llm(tiny_model, tmp_path_factory):
    """An engine with the trainer's weights but for one tensor, which an earlier step had otherwise."""
    folder = tmp_path_factory.mktemp("late") / "model"
    with offline_engine(changed(tiny_model, folder, lambda tensors: tensors[LATE].mul_(1.02))) as engine:
        yield engine


def test_the_one_tensor_that_did_not_arrive_is_named(llm, trainer):
    report = check_weights(llm, trainer)
    (late,) = report.unequal
    assert late.name == LATE
    assert late.apart == pytest.approx(0.02, rel=0.5)
    assert late.norm == pytest.approx(1.02 * late.trainer.norm, rel=1e-3)
    assert report.compared == len(list(trainer.named_parameters()))
    assert not report.not_compared
    assert report.mismatch == late.trainer.elements / sum(parameter.numel() for parameter in trainer.parameters())
    assert LATE in str(report)


def test_an_engine_that_has_them_all_has_no_mismatch(llm, trainer):
    import torch

    parameter = trainer.get_parameter(LATE)
    sent = parameter.detach().clone()
    with torch.no_grad():
        parameter.mul_(1.02)
    before = check_weights(llm, trainer)
    assert (before.unequal, before.mismatch) == ((), 0.0)
    with torch.no_grad():
        parameter.copy_(sent)
    (late,) = check_weights(llm, trainer, before=before).unequal
    assert late.stale
    assert str(late).endswith("as it was before this sync")
