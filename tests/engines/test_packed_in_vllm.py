"""Four bits as GPTQ's and AWQ's tools pack them, in a live vLLM: what `precision` proposes to keep makes the gate pass.

The remedy is searched for with torch; here vLLM's own kernels run what it found, sample, and are judged.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from kc_otel import cli
from tests.engines._checkpoints import packed_in_four_bits
from tests.engines._random_checkpoints import VOCABULARY, changed, checkpoint
from tests.engines.test_precision_command import CONTRACT, _loud

pytestmark = pytest.mark.slow

ENGINE = {"dtype": "bfloat16", "max_model_len": 64, "kv_cache_memory_bytes": 64 << 20, "skip_tokenizer_init": True}
TOKENS = 12


@pytest.fixture
def prompts(tmp_path, monkeypatch):
    import torch

    monkeypatch.chdir(tmp_path)
    (tmp_path / "contract.yaml").write_text(CONTRACT)
    wide = {"hidden_size": 128, "intermediate_size": 384, "head_dim": 32}
    changed(checkpoint("plain", gain=0.6, **wide), "checkpoint", _loud)
    generator = torch.Generator().manual_seed(0)
    found = [torch.randint(VOCABULARY, (8,), generator=generator).tolist() for _ in range(400)]
    rows = [{"prompt_ids": each, "token_ids": [1], "attributes": {"task": "code"}} for each in found[:48]]
    (tmp_path / "prompts.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return found


def run(*words):
    cli._register(words[0])
    return CliRunner().invoke(cli.app, words)


def recorded(folder, prompts, into):
    """What vLLM samples from a checkpoint at temperature 1, scored by the training kernel."""
    import torch
    from transformers import AutoModelForCausalLM

    from kc_otel.diagnose.vllm_kernel import VllmKernel

    kernel = VllmKernel.of(str(folder), {**ENGINE, "logprobs_mode": "raw_logprobs"})
    from vllm import SamplingParams

    params = SamplingParams(temperature=1.0, max_tokens=TOKENS, ignore_eos=True, detokenize=False, logprobs=0, seed=7)
    answers = kernel._engine.generate([{"prompt_token_ids": each} for each in prompts], params, use_tqdm=False)
    kernel.close()
    ids = torch.tensor([each.outputs[0].token_ids for each in answers])
    theirs = [
        [step[token].logprob for step, token in zip(each.outputs[0].logprobs, each.outputs[0].token_ids, strict=True)]
        for each in answers
    ]
    train = AutoModelForCausalLM.from_pretrained("checkpoint", dtype="float32").eval()
    with torch.no_grad():
        logits = train(torch.cat([torch.tensor(prompts), ids], 1)).logits[:, len(prompts[0]) - 1 : -1]
    ours = logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0].numpy()
    np.savez(into, train_logprobs=ours, inference_logprobs=np.asarray(theirs), task=np.asarray(["code"] * len(prompts)))


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_what_precision_keeps_passes_in_the_engine_and_nothing_kept_does_not(prompts, tmp_path, method):
    """The packed checkpoint fails, in torch and in vLLM; with the named layers in 16 bits it passes in both."""
    packed_in_four_bits(tmp_path / "checkpoint", tmp_path / "packed", method)
    said = run("precision", "contract.yaml", "checkpoint", "--sequences", "prompts.jsonl", "--tokens", str(TOKENS),
               "--quantized", "packed", "--runs", "12").output  # fmt: skip
    (answer,) = [line for line in said.splitlines() if "gate passes on new requests" in line and "keep " in line]
    layers = [int(each) for each in answer.partition(" in 16 bits")[0].replace(",", " ").split() if each.isdigit()]
    assert 1 in layers, said
    recorded(tmp_path / "packed", prompts, "packed.npz")
    assert run("gate", "run", "contract.yaml", "packed.npz").exit_code == 1
    packed_in_four_bits(tmp_path / "checkpoint", tmp_path / "kept", method, kept=layers)
    recorded(tmp_path / "kept", prompts, "kept.npz")
    assert run("gate", "run", "contract.yaml", "kept.npz").exit_code == 0
