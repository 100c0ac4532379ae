"""One engine in a process of its own: `python _matrix_engine.py JOB.json`. It is told what to record by variables.

A job is {model, options, requests: [{text, attributes, seed}], tokens, kept_every, alone, out}. All requests run in one
batch, and for each of them the log-probabilities of the sampled tokens are kept and, at one position of so many, those
of the whole vocabulary, [positions, vocabulary], for who wants to know the drift exactly. They are taken where vLLM
computes them: asking for all of them makes a Python object of each. With `alone`, those requests run again, each by
itself.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def main(job):
    import numpy as np
    from vllm import LLM, SamplingParams
    from vllm.v1.sample.sampler import Sampler

    from kc_otel.integrations.vllm import KernelContractInstrumentor

    computed, compute = [], Sampler.compute_logprobs

    def kept(logits):
        """What every row's next token is sampled from, [rows, vocabulary], at one step of so many."""
        found = compute(logits)
        computed.append(found.clone() if len(computed) % job["kept_every"] == 0 else None)
        return found

    Sampler.compute_logprobs = staticmethod(kept)

    sizes = {"max_model_len": 1024, "max_num_batched_tokens": 1 << 16, "max_num_seqs": 256}
    sizes["kv_cache_memory_bytes"] = 256 << 20
    llm = LLM(job["model"], enforce_eager=True, enable_prefix_caching=False, **sizes, **job["options"])
    alike = {"max_tokens": job["tokens"], "ignore_eos": True, "detokenize": False, "flat_logprobs": True, "logprobs": 0}

    def run(requests):
        params = [
            SamplingParams(seed=request["seed"], extra_args=request["attributes"], **alike) for request in requests
        ]
        outputs = llm.generate([request["text"] for request in requests], params, use_tqdm=False)
        return [output.outputs[0] for output in outputs]

    found = {}
    computed.clear()  # of what vLLM tried when it started
    completions = run(job["requests"])
    assert len(computed) == job["tokens"]  # one batch from the first token to the last
    whole = np.stack([tensor.numpy() for tensor in computed[:: job["kept_every"]]], axis=1)
    Sampler.compute_logprobs = staticmethod(compute)
    for number, (completion, logprobs) in enumerate(zip(completions, whole, strict=True)):
        tokens = np.asarray(completion.token_ids)
        sampled = np.array([completion.logprobs[i][token].logprob for i, token in enumerate(tokens)], np.float32)
        places = np.arange(len(logprobs))
        assert (logprobs[places, tokens[:: job["kept_every"]]] == sampled[:: job["kept_every"]]).all()  # its own row
        found[f"tokens-{number}"], found[f"sampled-{number}"], found[f"logprobs-{number}"] = tokens, sampled, logprobs
    # The requests by themselves are compared with the batch by the test, and are no traffic to rescore.
    instrumentor = KernelContractInstrumentor()
    assert instrumentor.flush()
    instrumentor.uninstrument()
    for number in job["alone"]:
        (completion,) = run([job["requests"][number]])
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
