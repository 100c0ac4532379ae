"""vLLM's second model runner in this process, with top-p, top-k and `return_sampling_mask`, recorded by our plugin.

    python -m tests.engines._sampling_mask_run MODEL FOLDER_OF_TRITON

It takes Triton, whose kernels Triton's own interpreter runs where there is no GPU; the one kernel that it cannot run,
top-k with top-p, is replaced by vLLM's own form of it in PyTorch. Prints one JSON object: a list of completions with
what we recorded of each and what vLLM says to its caller.
"""

from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace

os.environ |= {
    "TRITON_INTERPRET": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_CI_ENV": "1",
}


def main(model: str, triton: str) -> None:
    """Sample with truncation, and print what was recorded."""
    sys.path.append(triton)
    from triton.backends import backends

    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None)
    from vllm import SamplingParams
    from vllm.v1.sample.ops import topk_topp_sampler

    from examples.tiny_model import prompts
    from kc_otel.integrations.vllm import KernelContractInstrumentor
    from tests.engines._vllm import MemorySink, contract, offline_engine

    topk_topp_sampler.apply_top_k_top_p_triton = topk_topp_sampler.apply_top_k_top_p_pytorch
    engine = offline_engine(
        model, max_model_len=128, max_num_seqs=4, max_num_batched_tokens=128, return_sampling_mask=True,
        logprobs_mode="processed_logprobs",
    )  # fmt: skip
    sink = MemorySink()
    instrumentor = KernelContractInstrumentor()
    instrumentor.instrument(contract=contract(), sink=sink, sampling=1.0)
    params = SamplingParams(seed=7, max_tokens=12, top_p=0.8, top_k=40, logprobs=0)
    texts = [text[:40] for text in prompts("code", 6)]
    found = []
    outputs = engine.generate(texts, params, use_tqdm=False)
    instrumentor.flush()
    for output in outputs:
        (completion,), (recorded,) = output.outputs, sink.of(output.request_id)
        found.append(
            {
                "prompt": recorded.prompt_ids.tolist(),
                "tokens": recorded.token_ids.tolist(),
                "logprobs": recorded.logprobs.tolist(),
                "kept": per_token(recorded.kept),
                "said": completion.sampling_mask.token_ids,
            }
        )
    print("\n" + json.dumps(found))


def per_token(kept):
    """A list of ids for each token, as vLLM has it."""
    ends = kept.counts.cumsum()
    return [kept.ids[end - count : end].tolist() for end, count in zip(ends, kept.counts, strict=True)]


if __name__ == "__main__":
    main(*sys.argv[1:])
