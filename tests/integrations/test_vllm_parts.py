"""The parts of the vLLM instrumentation that need no vLLM, and the counts that a meter provider sees."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from collections import Counter
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from kc_otel.contract.measuring_paths import AUTOMATIC, MeasuringPath
from kc_otel.contract.registry.own_metrics import ATTRIBUTES, METRICS
from kc_otel.contract.slices import LAG, OF_TOKENS
from kc_otel.integrations.trl.rollouts import OWN
from kc_otel.integrations.vllm.delivery import (
    CaptureStats,
    Completion,
    RequestDelivery,
    kept_of,
    processing_of,
    request_of,
    traceparent_of,
    weights_of,
)
from kc_otel.integrations.vllm.engines import EngineCapture, Engines, RequestCapture, kernel_of, logprobs_mode_of
from kc_otel.integrations.vllm.instrumentor import RECORDED, CaptureCounters, outcomes
from kc_otel.integrations.vllm.plugin import configured, described, log_with_vllm
from kc_otel.integrations.vllm.settings import HEADERS, RequestHeaders, attributes_from, default_spool, settings_of
from kc_otel.record.kernel import Kernel
from kc_otel.record.sampling import Sampler
from kc_otel.recordings.request import SampledRequest
from kc_otel.recordings.spool import Spool


def completion(**changes):
    return Completion(**{
        "request_id": "cmpl-1-ab", "external_id": "cmpl-1", "prompt_ids": [1, 2, 3], "token_ids": [4, 5],
        "logprobs": [-0.5, -1.5], "params": SimpleNamespace(temperature=1.0), "finish_reason": "stop", "model": "m",
        "at": 7, **changes,
    })  # fmt: skip


def finished(kernel=None, watermarks=False, **changes):
    """A completion as the engine leaves it."""
    engine = EngineCapture("m", "raw", watermarks)
    if kernel is None:
        engine.kernel.set_result(Kernel("vllm"))
    else:
        engine.kernel = kernel
    return replace(RequestCapture(completion(), None, {}, engine, logprobs=[-0.5, -1.5]), **changes)


def submit(delivery, capture):
    delivery.submit(capture.whole, capture.engine.kernel, "raw", 7)


def config(**model):
    ours = {"dtype": "bfloat16", "quantization": None, "enforce_eager": True, "logprobs_mode": "raw_logprobs"}
    mode, graphs = SimpleNamespace(name="VLLM_COMPILE"), SimpleNamespace(name="PIECEWISE")
    return SimpleNamespace(
        model_config=SimpleNamespace(**ours | model),
        cache_config=SimpleNamespace(cache_dtype="fp8"),
        parallel_config=SimpleNamespace(tensor_parallel_size=2, pipeline_parallel_size=1, data_parallel_size=1),
        compilation_config=SimpleNamespace(mode=mode, cudagraph_mode=graphs),
    )


class Sink:
    def __init__(self, fails=False):
        self.requests, self.fails = [], fails

    def put(self, request):
        if self.fails:
            raise OSError("no space")
        self.requests.append(request)


@pytest.mark.slow
def test_importing_needs_no_vllm():
    code = (
        "import sys; sys.modules['vllm'] = None; import kc_otel.integrations.vllm as v; "
        "[getattr(v, name) for name in v.__all__]; import kc_otel.integrations.vllm.plugin as p; p.load()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_request_is_made_of_a_completion():
    """Ids are int64, log-probabilities float32, and the automatic attributes are those that contracts ask for."""
    request = request_of(completion(lora="sql"), Kernel("vllm"), "raw", {"task": "code", "model": "mine"})
    dtypes = [array.dtype for array in (request.prompt_ids, request.token_ids, request.logprobs)]
    assert dtypes == [np.int64, np.int64, np.float32]
    assert request.attributes == {
        "prompt_tokens": 3, "completion_tokens": 2, "temperature": 1.0, "finish_reason": "stop",
        "lora": "sql", "task": "code", "model": "mine",
    }  # fmt: skip
    assert (request.processing, request.logprobs_mode, request.weights, request.at) == ({}, "raw", None, 7)


@pytest.mark.parametrize(
    ("engine", "asked", "told"), [(True, None, True), (True, True, True), (True, False, False), (False, True, False)]
)
def test_a_watermark_is_told_where_the_engine_has_one(engine, asked, told):
    found = finished(watermarks=engine)
    found.completion.params.watermarking = asked
    request = request_of(found.whole(), Kernel("vllm"), "raw", {})
    assert request.processing == ({"watermarking": True} if told else {})


def test_processing_holds_what_changes_the_distribution():
    params = SimpleNamespace(
        temperature=0.7, top_p=1.0, top_k=-1, min_p=0.05, repetition_penalty=1.0, presence_penalty=0.5,
        frequency_penalty=0.0, min_tokens=0, logit_bias={3: 1.0}, bad_words=[], stop=["x"], max_tokens=9,
    )  # fmt: skip
    assert processing_of(params) == {"temperature": 0.7, "min_p": 0.05, "presence_penalty": 0.5, "logit_bias": True}
    assert processing_of(SimpleNamespace(temperature=0.0)) == {"temperature": 0.0}


@pytest.mark.parametrize(
    ("versions", "weights"),
    [((), None), (("default",), None), (("17",), 17), (("step-9",), "step-9"), (("3", "4"), ((3, 0), (4, 7))),
     (("default", "4"), "default,4")],
)  # fmt: skip
def test_weight_versions(versions, weights):
    """One version is itself, a number where it can be; several that changed under way are never taken for one."""
    assert weights_of([(version, 7 * place) for place, version in enumerate(versions)]) == weights


@pytest.mark.parametrize("text", ["task=", "=header:x", "task=cookie:x", "task=header:", "task=header"])
def test_a_source_that_is_none_is_refused(text):
    with pytest.raises(ValueError, match="is no source; write NAME, or NAME=PLACE:NAME"):
        attributes_from(text)


def test_attributes_are_found_where_the_sender_put_them():
    read = attributes_from("task, tenant=header:X-Tenant, level=baggage:level, id=xarg:id, none")
    found = read(
        completion(
            params=SimpleNamespace(temperature=1.0, extra_args={"task": "code", "id": "x" * 999, "level": 1}),
            headers={"x-tenant": "a"},
            baggage={"task": "prose", "level": "3"},
        )
    )
    assert found == {"task": "code", "tenant": "a", "level": 3, "id": "x" * 256}
    assert read(completion(baggage={"task": "prose"})) == {"task": "prose"}
    assert read(completion(params=SimpleNamespace(extra_args={"task": [1]}))) == {}


def test_a_kernel_is_spelled_out():
    """Configuration, workers and variables that change numbers end up in the fingerprint; what is trivial does not."""
    workers = [{"attention": "FLASH_ATTN", "hardware": "H100"}] * 2
    kernel = kernel_of(config(), "0.32.0", workers, {"VLLM_BATCH_INVARIANT": "1", "HOME": "/"})
    assert kernel == Kernel(
        "vllm", version="0.32.0", dtype="bfloat16", kv_cache_dtype="fp8", attention="FLASH_ATTN", parallelism="tp=2",
        compile="eager", hardware="H100", extra={"vllm_batch_invariant": "1"},
    )  # fmt: skip
    other = kernel_of(config(enforce_eager=False), "0.32.0", [], {})
    assert (other.compile, other.attention) == ("vllm_compile,graphs=piecewise", None)


@pytest.mark.parametrize(
    ("declared", "said"), [("auto", ["kv_cache_dtype auto is declared, and fp8 reported"]), ("fp8", [])]
)
def test_an_engine_that_is_not_what_the_contract_declares_is_said_once_at_its_start(
    contract, monkeypatch, caplog, declared, said
):
    """In vLLM's log: a roll-out whose flag was forgotten passes as the new kernel otherwise."""
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.32.0"))
    kernels = {"train": {"engine": "torch"}, "inference": {"engine": "vllm", "kv_cache_dtype": declared}}
    engines = Engines(RequestDelivery(Sink(), lambda _: {}, Sampler(1.0)), contract(kernels=kernels))
    engine = SimpleNamespace(
        vllm_config=config(served_model_name="m"), output_processor=Sink(), collective_rpc=lambda *_, **__: []
    )
    engines.register(engine)
    engines.delivery.close()
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [message.partition("declares: ")[2].partition(";")[0] for message in warned] == said


@pytest.mark.parametrize(
    ("mode", "named"), [("raw_logprobs", "raw"), ("processed_logprobs", "processed"), ("raw_logits", None)]
)
def test_logits_are_no_log_probabilities(mode, named):
    assert logprobs_mode_of(config(logprobs_mode=mode)) == named


def test_a_worker_describes_its_attention_layers(monkeypatch):
    def layer(name):
        return SimpleNamespace(get_attn_backend=lambda: SimpleNamespace(get_name=lambda: name))

    monkeypatch.setattr("kc_otel.integrations.vllm.plugin._hardware", lambda: "H100")
    context = {"0": layer("FLASHINFER"), "1": layer("FLASH_ATTN"), "2": SimpleNamespace()}
    worker = SimpleNamespace(
        vllm_config=SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=context))
    )
    assert described(worker) == {"attention": "FLASHINFER+FLASH_ATTN", "hardware": "H100"}


def test_a_delivery_gives_to_its_sink_and_counts():
    sink, asked = Sink(), Future()
    delivery = RequestDelivery(sink, lambda _: {"task": "code"}, Sampler(1.0))
    submit(delivery, finished(asked))
    assert not delivery.flush(0.05)
    asked.set_result(Kernel("vllm", dtype="fp8"))
    assert delivery.flush()
    (request,) = sink.requests
    assert (request.kernel.dtype, request.attributes["task"]) == ("fp8", "code")
    assert (delivery.stats().recorded, delivery.stats().tokens) == (1, 2)
    assert delivery.close()


def test_the_sampling_masks_of_steps_are_one_set_of_tokens_for_each_token():
    mask = SimpleNamespace(token_ids=np.array([4, 9], np.int32), offsets=None)
    two = SimpleNamespace(token_ids=np.array([1, 2, 3], np.int32), offsets=np.array([0, 1, 3]))
    kept = kept_of([mask, two], 3)
    assert kept.ids.tolist() == [4, 9, 1, 2, 3]
    assert kept.counts.tolist() == [2, 1, 2]
    assert kept_of([mask, two], 4) is None
    assert kept_of([], 2) is None
    mine = finished()
    mine.masks += [mask, mask]
    assert request_of(mine.whole(), Kernel("vllm"), "processed", {}).kept.counts.tolist() == [2, 2]


def test_what_fails_on_the_other_thread_is_counted():
    def fail(_):
        raise RuntimeError("no")

    broken = RequestDelivery(Sink(fails=True), lambda _: {}, Sampler(1.0))
    submit(broken, finished())
    submit(broken, finished(context=None))
    submit(broken, finished(logprobs=[-0.5]))
    assert broken.close()
    assert broken.stats().dropped == {"sink-failed": 1, "failed": 1, "invalid": 1}
    sink = Sink()
    halting = RequestDelivery(sink, fail, Sampler(1.0))
    submit(halting, finished())
    assert halting.close()
    assert (len(sink.requests), halting.stats().attributes_failed) == (1, 1)


def test_headers_are_there_for_code_of_the_request():
    seen = {}

    async def app(scope, _receive, _send):
        seen[scope["type"]] = list(HEADERS.get())

    async def serve(scope):
        await RequestHeaders(app)(scope, None, None)

    async def both():
        await asyncio.create_task(serve({"type": "http", "headers": [(b"x-tenant", b"a")]}))
        await asyncio.create_task(serve({"type": "lifespan"}))

    asyncio.run(both())
    assert seen == {"http": [(b"x-tenant", b"a")], "lifespan": []}


def test_settings_come_from_arguments_before_variables(contract, tmp_path):
    environment = {"KC_OTEL_SPOOL": str(tmp_path / "a" / "s.sqlite"), "KC_OTEL_SAMPLING": "0.5"}
    made = settings_of(environment, contract=contract(), attributes={"tenant": "t"})
    assert made.sampler.share() == 0.5
    assert made.attributes(completion(baggage={"task": "code"})) == {"tenant": "t", "task": "code"}
    assert made.sink.path == tmp_path / "a" / "s.sqlite"
    made.close()
    sink = Sink()
    given = settings_of({}, contract=contract(observability={"sampling": 0.2}), sink=sink)
    assert (given.sampler.share(), given.sink, given.close) == (0.2, sink, None)
    assert settings_of(environment, contract=contract(), sink=sink, sampling=0.1).sampler.share() == 0.1


def test_a_spool_is_as_large_and_as_old_as_somebody_says(contract, tmp_path):
    spool = {"KC_OTEL_SPOOL": str(tmp_path / "s.sqlite")}
    made = settings_of(
        {**spool, "KC_OTEL_SPOOL_MAX_AGE": "36h", "KC_OTEL_SPOOL_MAX_SIZE": "2 MiB"}, contract=contract()
    ).sink
    assert (made._max_age, made._max_bytes) == (36 * 3600.0, 2 << 20)
    made.close()
    for name, text, said in (
        ("AGE", "7 d", "no spaces"), ("AGE", "0s", "max_age: 0.0"),
        ("SIZE", "1GB", "write 512MiB"), ("SIZE", "10KiB", "1 MiB or more"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=said):
            settings_of({**spool, f"KC_OTEL_SPOOL_MAX_{name}": text}, contract=contract())


def test_nothing_is_set_up_unasked(contract, tmp_path):
    environment = {"XDG_STATE_HOME": str(tmp_path)}
    assert settings_of(environment) is None
    assert settings_of({**environment, "OTEL_SDK_DISABLED": "TRUE"}, contract=contract()) is None
    assert not configured({"KC_OTEL_CONTRACT": "c.yaml", "OTEL_SDK_DISABLED": "true"})
    assert configured({"KC_OTEL_CONTRACT": "c.yaml"})
    assert not list(tmp_path.iterdir())
    assert default_spool(contract(), environment) == tmp_path / "kc-otel" / "policy.sqlite"


def test_two_places_to_put_requests_are_refused(contract, tmp_path):
    with pytest.raises(ValueError, match="spool and sink are given"):
        settings_of({}, contract=contract(), sink=Sink(), spool=tmp_path / "spool.sqlite")


def test_doctor_knows_what_every_request_has():
    """`doctor --path vllm` asks nobody to send an attribute that each request has, and relies on no other."""
    request = request_of(completion(lora="sql"), Kernel("vllm"), "raw", {})
    assert set(request.attributes) | OF_TOKENS == AUTOMATIC[MeasuringPath.VLLM]
    assert AUTOMATIC[MeasuringPath.TRL] == OWN | OF_TOKENS | {LAG}  # the last is the recorder's, of both weights


@pytest.fixture
def reader():
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    reader.provider = provider
    yield reader
    provider.shutdown()


def observed(reader):
    """Value by metric, contract and reason."""
    found = {}
    data = reader.get_metrics_data()
    for resource in [] if data is None else data.resource_metrics:
        for metric in (metric for scope in resource.scope_metrics for metric in scope.metrics):
            known = METRICS[metric.name]
            assert (metric.unit, metric.description) == (known.unit, known.meaning)
            assert metric.data.is_monotonic
            for point in metric.data.data_points:
                assert set(point.attributes) == set(known.attributes) <= set(ATTRIBUTES)
                found[metric.name, *point.attributes.values()] = point.value
    return found


def test_counts_are_observed_by_reason_and_never_go_down(reader):
    counts = CaptureCounters()
    recorded, dropped = ("kc.capture.recorded", "policy"), ("kc.capture.dropped", "policy", "queue-full")
    counts.start("policy", lambda: Counter({RECORDED: 7, "queue-full": 2}), reader.provider)
    assert observed(reader) == {recorded: 7, dropped: 2}
    counts.start("policy", lambda: Counter({RECORDED: 1}), reader.provider)
    assert observed(reader) == {recorded: 8, dropped: 2}
    counts.start("other", lambda: Counter({RECORDED: 3}), reader.provider)
    assert observed(reader) == {recorded: 8, dropped: 2, ("kc.capture.recorded", "other"): 3}


def test_what_a_spool_refuses_counts_as_dropped(tmp_path):
    spool = Spool(tmp_path / "spool.sqlite")
    good = SampledRequest("r", np.arange(2), np.arange(3), np.zeros(3, np.float32), Kernel("vllm"))
    spool.put(good)
    spool.put(SampledRequest("odd", np.arange(2), np.arange(3), np.zeros(2, np.float32), Kernel("vllm")))
    assert spool.flush()
    spool.close()
    spool.put(good)
    delivery = SimpleNamespace(sink=spool, stats=lambda: CaptureStats(recorded=3, dropped={"aborted": 4}))
    assert outcomes(delivery) == {RECORDED: 1, "unwritable": 1, "closed": 1, "aborted": 4}


def test_an_operator_who_scrapes_vllm_sees_the_counts():
    client = pytest.importorskip("prometheus_client")
    counts, registry = CaptureCounters(), client.CollectorRegistry(auto_describe=True)
    counts.start("policy", lambda: Counter({RECORDED: 7, "spool-full": 2}), MeterProvider())
    counts.show(registry)
    counts.show(registry)
    said = client.generate_latest(registry).decode()
    assert 'kc_capture_recorded_total{kc_contract="policy"} 7.0' in said
    assert 'kc_capture_dropped_total{kc_contract="policy",kc_reason="spool-full"} 2.0' in said


@pytest.fixture
def loggers(monkeypatch):
    """What vLLM's logger is given; ours and the root logger are as a dependency of vLLM leaves them."""
    seen, ours, engine, root = [], *map(logging.getLogger, ("kc_otel", "vllm", None))
    handler = logging.Handler(logging.INFO)
    handler.emit = seen.append
    for logger, level, handlers in ((ours, logging.NOTSET, []), (engine, logging.INFO, [handler]), (root, 40, [])):
        monkeypatch.setattr(logger, "handlers", handlers)
        monkeypatch.setattr(logger, "level", level)
    monkeypatch.setattr(ours, "parent", root)
    monkeypatch.setattr(engine, "propagate", False)
    ours.manager._clear_cache()
    yield seen
    ours.manager._clear_cache()


def test_warnings_are_in_vllms_log(tmp_path, loggers):
    logging.getLogger().handlers = []  # pytest's own, of this phase
    log_with_vllm()
    (tmp_path / "file").write_text("")
    spool = Spool(tmp_path / "file" / "spool.sqlite")
    spool.put(SampledRequest("r", np.arange(2), np.arange(3), np.zeros(3, np.float32), Kernel("vllm")))
    assert spool.flush()
    spool.close()
    (record,) = loggers
    assert "requests are not kept (spool-failed)" in record.getMessage()
    logging.getLogger("kc_otel.integrations").debug("not for an operator")
    logging.getLogger("vllm").setLevel(logging.ERROR)
    logging.getLogger("kc_otel.integrations").warning("below the level that vLLM was given")
    assert len(loggers) == 1


def test_the_root_loggers_handlers_get_what_an_operator_must_know(loggers):
    """A dependency of vLLM configures the root logger, at a level at which warnings would vanish."""
    seen, handler = [], logging.Handler()
    handler.emit = seen.append
    logging.getLogger().handlers = [handler]
    log_with_vllm()
    logging.getLogger("kc_otel.integrations").info("recording")
    assert [record.getMessage() for record in seen] == ["recording"]
    assert not loggers


@pytest.mark.parametrize("name", [None, "kc_otel"])
def test_a_program_with_handlers_of_its_own_keeps_them(name, loggers):
    """Whoever has configured logging gets each line there and not a second time in vLLM's log."""
    logging.getLogger().handlers = []
    logging.getLogger(name).handlers = [logging.NullHandler()]
    log_with_vllm()
    logging.getLogger("kc_otel.integrations").warning("theirs")
    assert not loggers


def test_a_current_span_without_an_id_hides_no_senders_traceparent():
    current = trace.set_span_in_context(trace.NonRecordingSpan(trace.SpanContext(0, 0, is_remote=True)))
    assert traceparent_of(current, {"traceparent": "00-aa-bb-01"}) == "00-aa-bb-01"
