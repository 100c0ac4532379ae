"""vLLM with top-p, top-k and `return_sampling_mask`, recorded by our plugin.

    python -m tests.engines._sampling_mask_run MODEL

Prints one JSON object: a list of completions with what we recorded of each and what vLLM says to its caller.
"""

from __future__ import annotations

import json
import sys

from tests.engines import _second_runner


def main(model: str) -> None:
    """Sample with truncation, and print what was recorded."""
    _second_runner.start()
    from vllm import SamplingParams

    from examples.tiny_model import prompts
    from kc_otel.integrations.vllm import KernelContractInstrumentor
    from tests.engines._vllm import MemorySink, contract, offline_engine

    sink = MemorySink()
    params = SamplingParams(seed=7, max_tokens=12, top_p=0.8, top_k=40, logprobs=0)
    texts = [text[:40] for text in prompts("code", 6)]
    found = []
    with offline_engine(
        model, max_model_len=128, max_num_seqs=4, max_num_batched_tokens=128, return_sampling_mask=True,
        logprobs_mode="processed_logprobs",
    ) as engine:  # fmt: skip
        instrumentor = KernelContractInstrumentor()
        instrumentor.instrument(contract=contract(), sink=sink, sampling=1.0)
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
