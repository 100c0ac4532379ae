"""One engine in a process of its own: `python _matrix_engine.py JOB.json`. It is told what to record by variables.

A job is {model, options, requests: [{text, attributes, seed}], tokens, kept_every, alone, out}. All requests run in one
batch, and for each of them the log-probabilities of the sampled tokens are kept and, at one position of so many, those
of the whole vocabulary, [positions, vocabulary], for who wants to know the drift exactly. With `alone`, those requests
run again, each by itself.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def main(job):
    import numpy as np
    from vllm import LLM, SamplingParams

    from kc_otel.integrations.vllm import KernelContractInstrumentor

    llm = LLM(
        job["model"],
        max_model_len=1024,
        max_num_batched_tokens=1 << 16,
        max_num_seqs=256,
        gpu_memory_utilization=0.3,
        enforce_eager=True,
        enable_prefix_caching=False,
        max_logprobs=-1,
        **job["options"],
    )

    def run(requests, logprobs):
        outputs = llm.generate(
            [request["text"] for request in requests],
            [
                SamplingParams(
                    seed=request["seed"],
                    max_tokens=job["tokens"],
                    ignore_eos=True,
                    detokenize=False,
                    flat_logprobs=True,
                    logprobs=logprobs,
                    extra_args=request["attributes"],
                )
                for request in requests
            ],
            use_tqdm=False,
        )
        return [output.outputs[0] for output in outputs]

    found = {}
    for number, completion in enumerate(run(job["requests"], -1)):
        tokens = np.asarray(completion.token_ids)
        ids = np.asarray(completion.logprobs.token_ids).reshape(len(tokens), -1)
        values = np.asarray(completion.logprobs.logprobs, np.float32).reshape(ids.shape)
        assert (ids[:, 0] == tokens).all()
        whole = np.full((len(ids), ids.max() + 1), -np.inf, np.float32)
        np.put_along_axis(whole, ids, values, 1)
        found[f"tokens-{number}"], found[f"sampled-{number}"] = tokens, values[:, 0]
        found[f"logprobs-{number}"] = whole[:: job["kept_every"]]
    # The requests by themselves are compared with the batch by the test, and are no traffic to rescore.
    instrumentor = KernelContractInstrumentor()
    assert instrumentor.flush()
    instrumentor.uninstrument()
    for number in job["alone"]:
        (completion,) = run([job["requests"][number]], 0)
        found[f"alone-tokens-{number}"] = np.asarray(completion.token_ids)
        chosen = [completion.logprobs[i][token].logprob for i, token in enumerate(completion.token_ids)]
        found[f"alone-logprobs-{number}"] = np.asarray(chosen, np.float32)
    np.savez(job["out"], **found)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    main(json.loads(Path(sys.argv[1]).read_text()))
    # vLLM's own tear-down prints to a log that nobody reads, and takes seconds.
    sys.stdout.flush()
    os.environ.pop("KC_OTEL_CONTRACT", None)
