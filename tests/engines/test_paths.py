"""From install to a correct verdict with an engine's page alone, by copy and paste, in under ten minutes."""

from __future__ import annotations

import pytest

from tests.handbook.newcomer import newcomer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_vllm(tiny_model, tmp_path):
    """A server, its requests, the rescorer and an evaluator: float32 beside float32 keeps the budget on each slice."""
    with newcomer(tmp_path, {"Qwen/Qwen2.5-0.5B-Instruct": str(tiny_model)}) as reader:
        said = reader.follows("measure/vllm.md", "test_vllm")
    assert "NO_DATA" not in said
    assert "FAIL" not in said
