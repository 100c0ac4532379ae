"""What became of sampled requests, as the program's own meter provider sees it."""

from __future__ import annotations

import logging
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from kc_otel.contract.registry.own_metrics import ATTRIBUTES, METRICS
from kc_otel.integrations.vllm.delivery import CaptureStats
from kc_otel.integrations.vllm.instrumentor import RECORDED, CaptureCounters, outcomes
from kc_otel.integrations.vllm.plugin import EngineLog
from kc_otel.record.kernel import Kernel
from kc_otel.recordings.request import SampledRequest
from kc_otel.recordings.spool import Spool


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


def test_counts_are_observed_by_reason(reader):
    counts = CaptureCounters()
    counts.start("policy", lambda: Counter({RECORDED: 7, "queue-full": 2}), reader.provider)
    assert observed(reader) == {("kc.capture.recorded", "policy"): 7, ("kc.capture.dropped", "policy", "queue-full"): 2}


def test_counters_never_go_down(reader):
    counts = CaptureCounters()
    counts.start("policy", lambda: Counter({RECORDED: 7}), reader.provider)
    counts.end()
    assert observed(reader) == {("kc.capture.recorded", "policy"): 7}
    counts.start("policy", lambda: Counter({RECORDED: 1}), reader.provider)
    assert observed(reader) == {("kc.capture.recorded", "policy"): 8}
    counts.end()
    counts.start("other", lambda: Counter({RECORDED: 3}), reader.provider)
    assert observed(reader) == {("kc.capture.recorded", "policy"): 8, ("kc.capture.recorded", "other"): 3}


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
def loggers():
    """Loggers: vLLM's with a handler, ours without, and the root logger as a dependency of vLLM leaves it."""
    names = ("vllm", "kc_otel", None)
    before = [
        (logging.getLogger(name), logging.getLogger(name).level, logging.getLogger(name).handlers[:]) for name in names
    ]
    seen = []
    handler = logging.Handler(logging.INFO)
    handler.emit = seen.append
    logging.getLogger("vllm").handlers = [handler]
    logging.getLogger("vllm").setLevel(logging.INFO)
    logging.getLogger().setLevel(logging.ERROR)
    logging.getLogger("kc_otel").handlers = []
    logging.getLogger("kc_otel").setLevel(logging.NOTSET)
    yield seen
    for logger, level, handlers in before:
        logger.setLevel(level)
        logger.handlers = handlers


def test_warnings_are_in_vllms_log(tmp_path, loggers):
    EngineLog.attach()
    EngineLog.attach()
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


def test_a_handler_of_both_loggers_gets_a_line_once(loggers):
    logging.getLogger().addHandler(logging.getLogger("vllm").handlers[0])
    EngineLog.attach()
    logging.getLogger("kc_otel.integrations").warning("once")
    assert [record.getMessage() for record in loggers] == ["once"]


@pytest.mark.usefixtures("loggers")
def test_a_program_with_handlers_of_its_own_keeps_them():
    """Whoever has configured logging of kc_otel gets each line there and not a second time in vLLM's log."""
    own = logging.NullHandler()
    logging.getLogger("kc_otel").handlers = [own]
    EngineLog.attach()
    assert logging.getLogger("kc_otel").handlers == [own]
