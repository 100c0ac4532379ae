"""vLLM's asynchronous engine, whose core and worker are another process: streams, n, aborts."""

from __future__ import annotations

import asyncio
import os

import numpy as np
import pytest

from examples.tiny_model import prompts
from kc_otel.integrations.vllm import KernelContractInstrumentor
from tests.engines._vllm import SMALL, MemorySink, contract, every_field, without_id

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def story(tiny_model):
    """One engine and one event loop, everything that the tests look at done in them once."""
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    sink = MemorySink()
    instrumentor = KernelContractInstrumentor()
    try:
        yield asyncio.run(tell(tiny_model, instrumentor, sink)), sink
    finally:
        if instrumentor.is_instrumented_by_opentelemetry:
            instrumentor.uninstrument()


async def tell(model, instrumentor, sink):
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    asked = AsyncEngineArgs(str(model), logprobs_mode="processed_logprobs", max_num_batched_tokens=1024, **SMALL)
    engine = AsyncLLM.from_engine_args(asked)
    found = {}
    try:
        found["plain"] = await streams(engine, "plain")
        instrumentor.instrument(contract=contract(), sink=sink, sampling=1.0)
        found["instrumented"] = await streams(engine, "instrumented")
        found["asked"] = await streams(engine, "asked", logprobs=0)
        await abort(engine)
        await drain(engine, "after")
        # The hand-over waits for what the worker says, which comes through this loop.
        await asyncio.to_thread(instrumentor.flush)
        found["stats"] = instrumentor.stats()
    finally:
        engine.shutdown()
    return found


def params(kind="DELTA", **options):
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    options = {"seed": 3, "max_tokens": 24, "temperature": 0.8, "top_p": 0.9, **options}
    return SamplingParams(output_kind=RequestOutputKind[kind], **options)


async def streams(engine, name, **options):
    """Outputs of concurrent requests of each kind of stream, in order."""

    async def stream_of(number, kind, n, stop):
        stream = engine.generate(
            prompts("code", 4)[number], params(kind, n=n, stop=stop, **options), f"{name}-{number}-{kind}-{n}-{stop}"
        )
        return [every_field(output) async for output in stream]

    cases = [(i, kind, n, stop) for i, kind in enumerate(("DELTA", "CUMULATIVE", "FINAL_ONLY")) for n in (1, 2)
             for stop in (None, "e")]  # fmt: skip
    # One at a time: how steps fall together in time decides how deltas are merged.
    return [(case, await stream_of(*case)) for case in cases]


async def drain(engine, request_id):
    async for _ in engine.generate(prompts("code", 1)[0], params(), request_id):
        pass


async def abort(engine):
    stream = engine.generate(prompts("code", 1)[0], params(max_tokens=500), "aborted")
    async for _ in stream:
        break
    await stream.aclose()
    await engine.abort("aborted")


def whole(outputs, kind):
    """Text, tokens, and ends of each completion, however it was cut into deltas."""
    found = {}
    for output in outputs:
        for part in output["outputs"]:
            mine = found.setdefault(part["index"], {"text": "", "token_ids": []})
            fresh = kind != "DELTA"
            mine["text"] = part["text"] if fresh else mine["text"] + part["text"]
            mine["token_ids"] = part["token_ids"] if fresh else mine["token_ids"] + part["token_ids"]
            mine |= {name: part[name] for name in ("logprobs", "cumulative_logprob", "finish_reason", "stop_reason")}
    return found


def test_streams_are_what_they_would_have_been(story):
    found, _ = story
    for (case, plain), (_, instrumented) in zip(found["plain"], found["instrumented"], strict=True):
        assert whole(instrumented, case[1]) == whole(plain, case[1]), case
        assert without_id(instrumented[-1]).keys() == without_id(plain[-1]).keys()
        assert all(completion["logprobs"] is None for output in instrumented for completion in output["outputs"])


def test_what_is_recorded_is_what_was_sampled(story):
    """Log-probabilities are those that vLLM gives for the same request, bit for bit, from after processing here."""
    found, sink = story
    for (case, outputs), (_, asked) in zip(found["instrumented"], found["asked"], strict=True):
        kept = sink.of(outputs[-1]["request_id"])
        assert len(kept) == case[2]
        completions = whole(outputs, case[1])
        theirs = {}
        for output in asked:
            for completion in output["outputs"]:
                new = list(completion["logprobs"])
                theirs[completion["index"]] = theirs.get(completion["index"], []) + new if case[1] == "DELTA" else new
        for index, request in enumerate(kept):
            tokens = completions[index]["token_ids"]
            assert request.token_ids.tolist() == tokens
            logprobs = [top[token].logprob for top, token in zip(theirs[index], tokens, strict=True)]
            np.testing.assert_array_equal(request.logprobs, np.array(logprobs, np.float32))
            assert request.logprobs_mode == "processed"
            assert request.processing == {"temperature": 0.8, "top_p": 0.9}


def test_an_abandoned_stream_is_not_recorded(story):
    found, sink = story
    assert not sink.of("aborted")
    assert len(sink.of("after")) == 1
    assert found["stats"].sampled == found["stats"].recorded + 1
    assert found["stats"].dropped == {}
