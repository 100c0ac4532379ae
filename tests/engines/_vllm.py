"""What tests of the vLLM instrumentation share: a sink in memory, a contract, an eye for every field of a response."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial

from tests.tools.contracts import contract_of

SLICES = {"code": {"where": {"task": "code"}}, "prose": {"where": {"task": "prose"}}}
SMALL = {"dtype": "bfloat16", "max_model_len": 1024, "kv_cache_memory_bytes": 64 << 20, "enforce_eager": True}
contract = partial(contract_of, "tiny", slices=SLICES)


class MemorySink:
    def __init__(self):
        self.requests = {}

    def put(self, request):
        assert request.request_id not in self.requests
        self.requests[request.request_id] = request

    def of(self, external_id):
        """Completions of the request that the caller knows by this id, by index."""
        found = {}
        for name, request in list(self.requests.items()):  # others come meanwhile
            index, marked, rest = name.partition("_")
            name_, index = (rest, int(index)) if marked and index.isdigit() else (name, 0)
            if name_.rpartition("-")[0] == str(external_id):
                found[index] = request
        return [found[index] for index in sorted(found)]


def every_field(output):
    """All that a caller sees of a RequestOutput, its timings left out."""
    fields = {name: value for name, value in vars(output).items() if name not in {"metrics", "outputs"}}
    fields["outputs"] = [{**vars(completion), "token_ids": list(completion.token_ids)} for completion in output.outputs]
    return fields


def without_id(fields):
    return {name: value for name, value in fields.items() if name != "request_id"}


@contextmanager
def offline_engine(model, **options):
    """An engine in this process, which ends with the block, also when a test fails in it.

    One that the collector ends later takes the process groups of the next one with it.
    """
    from vllm import LLM

    engine = LLM(str(model), **{**SMALL, "enable_prefix_caching": False, **options})
    try:
        yield engine
    finally:
        engine.llm_engine.engine_core.shutdown()


def sampled(engine, prompts, **options):
    """Tokens that an engine samples after prompts of tokens, and the log-probabilities that it reports of them."""
    from vllm import SamplingParams

    outputs = engine.generate(
        [{"prompt_token_ids": ids} for ids in prompts], SamplingParams(logprobs=0, **options), use_tqdm=False
    )
    made = [output.outputs[0] for output in outputs]
    tokens = [list(of.token_ids) for of in made]
    return tokens, [[at[token].logprob for at, token in zip(of.logprobs, of.token_ids, strict=True)] for of in made]
