"""vLLM's layers held against Hugging Face's on the tokens that it decoded: quantisation is named, bf16 is not."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from examples.tiny_model import prompts
from kc_otel import cli
from tests.engines._checkpoints import in_int8
from tests.engines._cpu import avx512_arithmetic, needs_avx512

pytestmark = pytest.mark.slow

CONTRACT = """\
apiVersion: kernel-contract/v1
kind: KernelContract
metadata: {name: tiny, version: 1, owner: tests}
kernels: {train: {engine: torch, dtype: float32}, inference: {engine: vllm, dtype: bfloat16}}
statistical: [{id: token-tv, metric: tv_token, limit: 0.01}]
"""
ENGINE = ["dtype=bfloat16", "max_model_len=256", "gpu_memory_utilization=0.3"]


@pytest.fixture
def locate(tiny_model, tmp_path, monkeypatch):
    from transformers import AutoTokenizer

    monkeypatch.chdir(tmp_path)
    (tmp_path / "contract.yaml").write_text(CONTRACT)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    rows = [
        {"prompt_ids": ids[:40], "token_ids": ids[40:48]}
        for text in [*prompts("code", 4), *prompts("prose", 4)]
        if len(ids := tokenizer(text)["input_ids"]) >= 42
    ]
    (tmp_path / "prompts.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    cli._register("locate")

    def run(checkpoint, *engine):
        options = [word for each in (*ENGINE, *engine) for word in ("--engine", each)]
        words = ["--train", str(tiny_model), "--infer", f"vllm:{checkpoint}", "--sequences", "prompts.jsonl", "--json"]
        result = CliRunner().invoke(cli.app, ["locate", "contract.yaml", *words, *options])
        assert result.exit_code in {0, 1}, result.output
        return json.loads(result.stdout[result.stdout.index("{\n") :])

    return run


@avx512_arithmetic
def test_bf16_has_no_culprit(locate, tiny_model):
    """VLLM in bf16 differs from fp32 by what the trainer's own operators in bf16 do."""
    assert locate(tiny_model)["culprit"] is None


@needs_avx512
def test_an_fp8_kv_cache_is_named(locate, tiny_model):
    """The first boundary above noise is attention in the first layer."""
    found = locate(tiny_model, "kv_cache_dtype=fp8")
    assert found["culprit"]["boundary"] == {"layer": 0, "operator": "attention", "part": 0}


@avx512_arithmetic
def test_int8_weights_and_activations_are_named(locate, tiny_model, tmp_path):
    """The first boundary above noise is a quantised product of the first layer: at qkv_proj it is just above."""
    boundary = locate(in_int8(tiny_model, tmp_path / "int8"))["culprit"]["boundary"]
    assert (boundary["layer"], boundary["operator"].endswith("_proj")) == (0, True)
