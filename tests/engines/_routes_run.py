"""vLLM with a tiny mixture of experts and `enable_return_routed_experts`.

    python -m tests.engines._routes_run FOLDER

Makes a checkpoint in the folder, and prints one JSON object: for each sequence its tokens, and the experts [tokens,
layers, k] that vLLM says it sent them to.
"""

from __future__ import annotations

import json
import sys

from tests.engines import _second_runner

LAYERS, CHOSEN = 2, 2
PROMPTS = [[5, 6, 7, 8, 9 + number, 40 + 3 * number] for number in range(4)]


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


def main(folder: str) -> None:
    """Sample, and print where vLLM sent each token."""
    _second_runner.start()
    from vllm import SamplingParams

    from tests.engines._vllm import offline_engine

    mixture().save_pretrained(folder)
    prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
    with offline_engine(
        folder, skip_tokenizer_init=True, max_model_len=64, max_num_seqs=4, max_num_batched_tokens=64,
        enable_prefix_caching=True, enable_return_routed_experts=True,
    ) as engine:  # fmt: skip
        outputs = engine.generate(prompts, SamplingParams(seed=3, max_tokens=16), use_tqdm=False)
    completions = [(output.prompt_token_ids, output.outputs[0]) for output in outputs]
    found = [([*prompt, *sampled.token_ids], sampled.routed_experts.tolist()) for prompt, sampled in completions]
    print("\n" + json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
