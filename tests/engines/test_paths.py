"""From install to a correct verdict with an engine's page alone, by copy and paste, in under ten minutes."""

from __future__ import annotations

import pytest

from tests.handbook.newcomer import newcomer

_SMALL = "HuggingFaceTB/SmolLM2-135M-Instruct"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_vllm(tiny_model, tmp_path):
    """A server, its requests, the rescorer and an evaluator: float32 beside float32 keeps the budget on each slice."""
    with newcomer(tmp_path, {"Qwen/Qwen2.5-0.5B-Instruct": str(tiny_model)}) as reader:
        said = reader.follows("measure/vllm.md", "test_vllm")
    assert "NO_DATA" not in said
    assert "FAIL" not in said


def test_trl(tiny_model, tmp_path):
    """GRPO whose sampler has the trainer's weights keeps the budget; one that keeps its first ones lags behind."""
    with newcomer(tmp_path, {_SMALL: str(tiny_model)}) as reader:
        reader.follows("measure/trl.md", "test_trl")


def test_trainer(tiny_model, tmp_path):
    """Hugging Face's Trainer with an inference kernel in step, and with one whose weights are forgotten."""
    with newcomer(tmp_path, {_SMALL: str(tiny_model)}) as reader:
        reader.follows("measure/transformers.md", "test_trainer")
