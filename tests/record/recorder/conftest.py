"""Recorders that export into memory, and two kernels that differ by rounding."""

from __future__ import annotations

import os
import threading
from functools import partial

import numpy as np
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kc_otel.record.measurer import Measurer
from kc_otel.record.recorder import Recorder
from tests.tools.contracts import contract_of
from tests.tools.memory import Memory


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    for name in list(os.environ):
        if name.startswith("OTEL_"):
            monkeypatch.delenv(name)


@pytest.fixture
def contract():
    slices = {"code": {"where": {"task": "code"}}, "long": {"where": {"prompt_tokens": ">= 100"}}}
    return partial(contract_of, version=3, slices=slices)


@pytest.fixture
def memory():
    return Memory()


@pytest.fixture
def recorders(contract, memory):
    made = []

    def make(**options):
        options.setdefault("metric_exporter", memory)
        options.setdefault("export_interval", 1000.0)
        made.append(Recorder(options.pop("contract", None) or contract(), **options))
        return made[-1]

    yield make
    for recorder in made:
        recorder.shutdown(5.0)


@pytest.fixture
def tracing():
    """A tracer provider and what was exported through it."""
    provider, spans = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    yield provider, spans
    provider.shutdown()


@pytest.fixture
def logprobs():
    """Log P and log Q of sampled tokens of two kernels that differ by rounding."""

    def make(*shape, seed=0, drift=0.02):
        rng = np.random.default_rng(seed)
        inference = -rng.exponential(size=shape) - 0.2
        return inference + drift * rng.normal(size=shape).clip(-3, 3), inference

    return make


@pytest.fixture
def held(monkeypatch):
    """Keeps measuring threads from going on until it is set."""
    release, handle = threading.Event(), Measurer.handle

    def wait(measurer, work, now):
        release.wait(120)
        return handle(measurer, work, now)

    monkeypatch.setattr(Measurer, "handle", wait)
    yield release
    release.set()
