"""vLLM's second model runner on a CPU, for what only it gives: sampling masks and routes of experts.

    python -m tests.engines._second_runner masks|routes FOLDER

It takes Triton, whose kernels Triton's own interpreter runs where there is no GPU; the one kernel that it cannot run,
top-k with top-p, is replaced by vLLM's own form of it in PyTorch. Triton lies apart (Makefile), because vLLM and
transformers would take it for a GPU's; so this belongs into a process of its own, which prints one JSON object.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

TRITON = Path(sys.prefix, "triton")
LAYERS, CHOSEN = 2, 2


def start() -> None:
    """Make the second model runner the one that engines of this process get; before vLLM is imported."""
    os.environ |= {
        "TRITON_INTERPRET": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_CI_ENV": "1",
    }
    sys.path.append(str(TRITON))
    from triton.backends import backends

    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None)
    from vllm.v1.sample.ops import topk_topp_sampler

    topk_topp_sampler.apply_top_k_top_p_triton = topk_topp_sampler.apply_top_k_top_p_pytorch


def mixture():
    """A Qwen3 mixture of experts with random weights, the same ones each time."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, moe_intermediate_size=64, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, num_experts=8, num_experts_per_tok=CHOSEN,
        max_position_embeddings=256,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config).eval()


def routes(folder: str) -> list:
    """Of each sequence its tokens, and the experts [tokens, layers, k] that vLLM says it sent them to."""
    from vllm import SamplingParams

    from tests.engines._vllm import offline_engine

    mixture().save_pretrained(folder)
    prompts = [{"prompt_token_ids": [5, 6, 7, 8, 9 + number, 40 + 3 * number]} for number in range(4)]
    with offline_engine(
        folder, skip_tokenizer_init=True, max_model_len=64, max_num_seqs=4, max_num_batched_tokens=64,
        enable_prefix_caching=True, enable_return_routed_experts=True,
    ) as engine:  # fmt: skip
        outputs = engine.generate(prompts, SamplingParams(seed=3, max_tokens=16), use_tqdm=False)
    completions = [(output.prompt_token_ids, output.outputs[0]) for output in outputs]
    return [([*prompt, *sampled.token_ids], sampled.routed_experts.tolist()) for prompt, sampled in completions]


def masks(model: str) -> list:
    """Of each completion what our plugin records with top-p and top-k, and what vLLM says to its caller."""
    from vllm import SamplingParams

    from examples.tiny_model import prompts
    from kc_otel.integrations.vllm import KernelContractInstrumentor
    from tests.engines._vllm import MemorySink, contract, offline_engine

    sink = MemorySink()
    params = SamplingParams(seed=7, max_tokens=12, top_p=0.8, top_k=40, logprobs=0)
    with offline_engine(
        model, max_model_len=128, max_num_seqs=4, max_num_batched_tokens=128, return_sampling_mask=True,
        logprobs_mode="processed_logprobs",
    ) as engine:  # fmt: skip
        instrumentor = KernelContractInstrumentor()
        instrumentor.instrument(contract=contract(), sink=sink, sampling=1.0)
        outputs = engine.generate([text[:40] for text in prompts("code", 6)], params, use_tqdm=False)
        instrumentor.flush()
    found = []
    for output in outputs:
        (completion,), (recorded,) = output.outputs, sink.of(output.request_id)
        kept, ends = recorded.kept, recorded.kept.counts.cumsum()
        found.append({
            "prompt": recorded.prompt_ids.tolist(),
            "tokens": recorded.token_ids.tolist(),
            "logprobs": recorded.logprobs.tolist(),
            "kept": [kept.ids[end - count : end].tolist() for end, count in zip(ends, kept.counts, strict=True)],
            "said": completion.sampling_mask.token_ids,
        })  # fmt: skip
    return found


if __name__ == "__main__":
    start()
    print("\n" + json.dumps({"masks": masks, "routes": routes}[sys.argv[1]](sys.argv[2])))
