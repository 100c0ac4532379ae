from __future__ import annotations

import numpy as np
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

from kc_otel.contract.registry.own_metrics import ATTRIBUTES
from kc_otel.record.kernel import Kernel


def test_a_batch_has_a_span_with_its_worst_token(recorders, tracing, contract, logprobs):
    provider, spans = tracing
    recorder = recorders(tracer_provider=provider, inference=Kernel("vllm", dtype="fp8"))
    train, inference = logprobs(3, 10)
    train[1, 4] = inference[1, 4] - 2.0
    ids = np.arange(30).reshape(3, 10)
    recorder.compare(train, inference, token_ids=ids, attributes={"task": "code"}, weights=(7, 7))
    recorder.force_flush()
    (span,) = spans.get_finished_spans()
    assert span.name == "kc.compare"
    assert span.end_time > span.start_time
    attributes = dict(span.attributes)
    assert set(attributes) <= {name for name, known in ATTRIBUTES.items() if "span" in known.on}
    assert abs(attributes.pop("kc.compare.worst.abs_log_ratio") - 2.0) < 1e-6
    expected = np.maximum(-np.expm1(train - inference), 0).mean()
    assert abs(attributes.pop("kc.compare.tv_token") - expected) < 1e-6
    assert attributes == {
        "kc.contract": "policy",
        "kc.contract.version": 3,
        "kc.contract.hash": contract().hash,
        "kc.kernel.train": Kernel("torch").fingerprint,
        "kc.kernel.inference": Kernel("vllm", dtype="fp8").fingerprint,
        "kc.compare.sequences": 3,
        "kc.compare.tokens": 30,
        "kc.compare.slices": ("all", "code"),
        "kc.compare.worst.sequence": 1,
        "kc.compare.worst.position": 4,
        "kc.compare.worst.token_id": 14,
        "kc.weights.train": 7,
        "kc.weights.inference": 7,
    }


@pytest.mark.parametrize("paired", [False, True])
def test_the_callers_span_is_the_parent_and_those_that_sampled_are_links(recorders, tracing, logprobs, paired):
    """A comparison belongs to the step that made it, and is linked to the requests that sampled it."""
    provider, spans = tracing
    tracer = provider.get_tracer("test")
    (train,), (inference,) = logprobs(1, 5)
    recorder = recorders(tracer_provider=provider)
    with tracer.start_as_current_span("request") as request:
        if paired:
            recorder.sampled("a", token_ids=np.arange(5), logprobs=inference)
    with tracer.start_as_current_span("step") as step:
        if paired:
            recorder.scored("a", token_ids=np.arange(5), logprobs=train)
        else:
            recorder.compare(train, inference, links=[request.get_span_context(), trace.INVALID_SPAN_CONTEXT])
    recorder.force_flush()
    span = next(span for span in spans.get_finished_spans() if span.name == "kc.compare")
    assert span.parent.span_id == step.get_span_context().span_id
    assert [link.context.span_id for link in span.links] == [request.get_span_context().span_id]


def test_exemplars_point_to_the_span_of_the_worst_token(recorders, tracing, memory, logprobs):
    """Each slice has one exemplar per interval: its worst token's value, and the span to look at."""
    provider, spans = tracing
    recorder = recorders(tracer_provider=provider)
    for number, drop in enumerate((1.0, 3.0, 2.0)):
        train, inference = logprobs(2, 10, seed=number)
        train[0, 0] = inference[0, 0] - drop
        recorder.compare(train, inference, attributes=[{"task": "code"}, {"prompt_tokens": 200}], weights=(number,) * 2)
    recorder.force_flush()
    worst = spans.get_finished_spans()[1]
    for name, value in (("kc.drift.abs_log_ratio", 3.0), ("kc.drift.tv_token", 1 - np.exp(-3.0))):
        for slice in ("all", "code"):
            (point,) = memory.points(name, kc_slice=slice)
            (exemplar,) = point.exemplars
            assert abs(exemplar.value - value) < 1e-6
            assert (exemplar.trace_id, exemplar.span_id) == (worst.context.trace_id, worst.context.span_id)
            assert exemplar.filtered_attributes == {"kc.weights.train": 1, "kc.weights.inference": 1}
            assert point.min <= exemplar.value <= point.max
    assert not memory.points("kc.drift.k3", kc_slice="all")[0].exemplars
    assert not memory.points("kc.drift.tv_token", kc_slice="long")[0].exemplars, "it is not of their sequences"
    recorder.force_flush()
    assert not memory.points("kc.drift.tv_token", kc_slice="all")[0].exemplars


def test_spans_that_are_not_kept_make_no_exemplars(recorders, memory, logprobs):
    recorder = recorders(tracer_provider=TracerProvider(sampler=ALWAYS_OFF))
    recorder.compare(*logprobs(1, 5))
    recorder.force_flush()
    assert not any(point.exemplars for point in memory.points("kc.drift.abs_log_ratio"))


def test_a_span_processor_that_fails_costs_the_span_and_not_the_measurement(recorders, memory, logprobs):
    class Broken(SpanProcessor):
        def on_end(self, _):
            raise RuntimeError("planted")

    provider = TracerProvider()
    provider.add_span_processor(Broken())
    recorder = recorders(tracer_provider=provider)
    recorder.compare(*logprobs(1, 5))
    assert recorder.force_flush()
    assert memory.count() == 5
    assert (recorder.stats().untraced, recorder.stats().dropped) == (1, {})
    provider.shutdown()


def test_batches_without_a_valid_token_have_no_span(recorders, tracing):
    provider, spans = tracing
    recorder = recorders(tracer_provider=provider)
    recorder.compare(np.full((2, 3), np.nan), np.zeros((2, 3)))
    recorder.compare(np.full((2, 3), -1.0), np.full((2, 3), -1.0), mask=np.zeros((2, 3)))
    recorder.force_flush()
    assert spans.get_finished_spans() == ()
    assert recorder.stats().batches == 0
