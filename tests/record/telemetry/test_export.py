from __future__ import annotations

import logging
import os
import socket
import threading
import time

import pytest
from opentelemetry.sdk.metrics.export import MetricExportResult
from opentelemetry.sdk.resources import Resource

import kc_otel
from kc_otel.record.export_loop import SCOPE, ExportLoop
from kc_otel.record.telemetry import environment
from kc_otel.record.telemetry.recorder_points import Counters
from tests.tools.contracts import contract_of
from tests.tools.memory import Memory
from tests.tools.waiting import NOT_HUNG, eventually


class Remember(Memory):
    """Keeps what it is given, and answers as it is told."""

    def __init__(self, result=MetricExportResult.SUCCESS, wait=None):
        super().__init__()
        self.shutdowns, self.result, self.wait = 0, result, wait

    def export(self, metrics_data, **_):
        if self.wait is not None:
            self.wait.wait(120)
        if isinstance(self.result, Exception):
            raise self.result
        return super().export(metrics_data)

    def shutdown(self, **_):
        self.shutdowns += 1


class Counting:
    """A source that is nothing but its counters."""

    def __init__(self):
        self.counters = Counters("policy")
        self.start = time.time_ns()

    def collect(self, now):
        return self.counters.metrics(self.start, now)

    def exported(self, error):
        if error is None:
            self.counters.exported()
        else:
            self.counters.export_failed(error)


@pytest.fixture
def loops():
    running = []

    def make(exporter=None, *, source=None, interval=1000.0, resource=None, exporters=None):
        loop = ExportLoop(
            source or Counting(),
            exporters=exporters or (lambda: (exporter,)),
            resource=resource or Resource({"service.instance.id": "test"}),
            interval=interval,
            timeout=5.0,
        )
        running.append(loop)
        return loop

    yield make
    for loop in running:
        loop.shutdown(2.0)


def test_one_export_owns_one_resource_and_one_scope(loops):
    exporter = Remember()
    assert loops(exporter).force_flush(60)
    (data,) = exporter.exports
    (resource,) = data.resource_metrics
    (scope,) = resource.scope_metrics
    assert resource.resource.attributes["service.instance.id"] == "test"
    assert scope.scope is SCOPE
    assert {metric.name for metric in scope.metrics} == {"kc.recorder.tokens", "kc.recorder.export.failures"}


def test_the_scope_names_the_version_and_the_slices_of_the_contract_that_is_applied():
    """A digest of each slice's conditions: other words for them are the same slice, and other values another one."""

    def said(version, task):
        exporter = Remember()
        contract = contract_of(
            version=version, slices={"code": {"where": {"task": task}}, "long": {"where": {"n": ">= 8"}}}
        )
        with kc_otel.Recorder(contract, metric_exporter=exporter):
            pass
        return dict(exporter.exports[-1].resource_metrics[0].scope_metrics[0].scope.attributes)

    first, second, other = said(1, "code"), said(2, ["code"]), said(2, ["code", "math"])
    assert (first["kc.contract.version"], second["kc.contract.version"]) == (1, 2)
    (code, long), (other_code, same) = first["kc.contract.slices"], other["kc.contract.slices"]
    assert second["kc.contract.slices"] == (code, long)
    assert (code != other_code, long == same) == (True, True)
    assert (code[:5], long[:5], len(code)) == ("code=", "long=", 13)


def test_a_recorder_does_not_claim_slices_that_its_cap_leaves_no_room_for():
    """It counts them together as `other`: what nobody measures of them is not judged by other recorders."""
    exporter = Remember()
    slices = {f"s{number}": {"where": {"task": f"t{number}"}} for number in range(4)}
    contract = contract_of(slices=slices)
    room = {"max_series": 5 * contract.streams_per_slice}  # all, stale and other
    with kc_otel.Recorder(contract_of(slices=slices, observability=room), metric_exporter=exporter):
        pass
    claimed = exporter.exports[-1].resource_metrics[0].scope_metrics[0].scope.attributes["kc.contract.slices"]
    assert [said.partition("=")[0] for said in claimed] == ["s0", "s1"]


def test_it_exports_every_interval_though_nothing_changed(loops):
    exporter = Remember()
    loops(exporter, interval=0.02)
    eventually(lambda: len(exporter.exports) >= 3)


def test_force_flush_waits_for_the_export_that_contains_what_came_before(loops):
    exporter, source = Remember(), Counting()
    loop = loops(exporter, source=source)
    for i in range(1, 20):
        source.counters.count(tokens=10)
        assert loop.force_flush(60)
        assert [point.value for point in exporter.points("kc.recorder.tokens")] == [10 * i]


def test_an_export_that_hangs_holds_up_neither_flush_nor_shutdown(loops):
    release = threading.Event()
    exporter = Remember(wait=release)
    loop = loops(exporter)
    for end in (loop.force_flush, loop.shutdown):
        began = time.monotonic()
        assert not end(0.05)
        assert time.monotonic() - began < NOT_HUNG
    eventually(lambda: exporter.shutdowns == 1)
    release.set()


def test_shutdown_exports_once_more_and_closes_the_exporter_once(loops):
    exporter = Remember()
    loop = loops(exporter)
    assert loop.shutdown(60)
    assert loop.shutdown(60)
    assert len(exporter.exports) == 1
    assert exporter.shutdowns == 1
    assert not loop.force_flush(0.1)


@pytest.mark.parametrize("result", [MetricExportResult.FAILURE, RuntimeError("no route")])
def test_failed_exports_are_counted_and_logged_once_an_outage(loops, caplog, result):
    exporter, source = Remember(result), Counting()
    loop = loops(exporter, source=source)
    with caplog.at_level(logging.WARNING, "kc_otel"):
        for _ in range(3):
            assert not loop.force_flush(60)
        assert source.counters.values().export_failures == 3
        assert len(caplog.records) == 1
        exporter.result = MetricExportResult.SUCCESS
        assert loop.force_flush(60)
        exporter.result = result
        assert not loop.force_flush(60)
        assert len(caplog.records) == 2


def test_an_exporter_that_cannot_be_made_is_tried_again(loops):
    source, exporter, attempts = Counting(), Remember(), []

    def make():
        attempts.append(1)
        if len(attempts) == 1:
            raise OSError("no certificate yet")
        return (exporter,)

    loop = loops(source=source, exporters=make)
    assert loop.force_flush(60)
    assert source.counters.values().export_failures == 1
    assert exporter.exports


def test_all_of_several_exporters_must_accept(loops):
    good, bad = Remember(), Remember(MetricExportResult.FAILURE)
    assert not loops(exporters=lambda: (good, bad)).force_flush(60)
    assert good.exports
    assert bad.exports


def test_what_no_exporter_takes_is_not_counted_as_exported(loops):
    source = Counting()
    assert loops(source=source, exporters=tuple).force_flush(60)
    assert source.counters.values().exports == 0


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_a_dead_endpoint_blocks_nobody(loops, monkeypatch, protocol, caplog):
    """With nobody listening, failures are counted, the log says where nothing got through, and shutdown is in time."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{unused.getsockname()[1]}"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.2")
    source = Counting()
    loop = loops(source=source, exporters=environment.metric_exporters)
    assert not loop.force_flush(60)
    assert source.counters.values().export_failures == 1
    began = time.monotonic()
    loop.shutdown(3)
    assert time.monotonic() - began < 3
    (said,) = [record.getMessage() for record in caplog.records if "nothing gets through to" in record.getMessage()]
    assert endpoint.removeprefix("http://") in said
    assert "`kc-otel doctor` says why" in said


def forked(loops, seconds):
    """Whether a child was made in the middle of an export that takes so long, and how long its fork took."""
    inside = threading.Event()

    class Slow(Remember):
        def export(self, metrics_data, **_):
            inside.set()
            time.sleep(seconds)
            inside.clear()
            return super().export(metrics_data)

    loops(Slow()).request()
    assert inside.wait(20)
    begun = time.monotonic()
    child = os.fork()
    if not child:
        os._exit(int(inside.is_set()))
    took = time.monotonic() - begun
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), took


@pytest.mark.slow
def test_no_child_is_made_in_the_middle_of_an_export(loops):
    assert forked(loops, 0.3)[0] == 0


@pytest.mark.slow
def test_a_fork_waits_no_longer_than_a_second_for_an_export(loops):
    code, took = forked(loops, 3.0)
    assert (code, 0.9 < took < 2.5) == (1, True)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("", {"service.name": "rollout", "service.instance.id": "gpu-3", "rl.run.id": "program"}),
        ("service.instance.id=r7,rl.run.id=people", {"service.instance.id": "r7", "rl.run.id": "people"}),
    ],
)
def test_what_the_program_knows_of_itself_comes_after_what_people_say(monkeypatch, said, expected):
    """OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES go before what the program says, and that before defaults."""
    own = {"service.name": "rollout", "service.instance.id": "gpu-3", "rl.run.id": "program"}
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", said)
    if said:
        monkeypatch.setenv("OTEL_SERVICE_NAME", "trainer")
        expected |= {"service.name": "trainer"}
    assert environment.process_resource(own=own).attributes.items() >= expected.items()


@pytest.mark.parametrize(("text", "names"), [("", ("otlp",)), ("none", ()), ("console", ("console",)),
                                             ("otlp, console", ("otlp", "console"))])  # fmt: skip
def test_exporter_names(monkeypatch, text, names):
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", text)
    assert environment.exporter_names() == names


@pytest.mark.parametrize(
    ("variables", "module"),
    [
        ({}, "grpc"),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, "http"),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf", "OTEL_EXPORTER_OTLP_METRICS_PROTOCOL": "grpc"}, "grpc"),
        ({"OTEL_METRICS_EXPORTER": "otlp_proto_http"}, "http"),
    ],
)
def test_the_protocol_chooses_the_exporter(monkeypatch, variables, module):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    (exporter,) = environment.metric_exporters()
    assert f".otlp.proto.{module}." in type(exporter).__module__
    exporter.shutdown()


@pytest.mark.parametrize(
    ("variable", "value"), [("OTEL_METRICS_EXPORTER", "carrier-pigeon"), ("OTEL_EXPORTER_OTLP_PROTOCOL", "smtp")]
)
def test_unknown_exporters_are_named_in_the_error(monkeypatch, variable, value):
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=rf"{variable}.*{value}.*write"):
        environment.metric_exporters()


@pytest.mark.parametrize(("text", "seconds"), [("", 20.0), ("1500", 1.5)])
def test_the_interval_is_given_in_milliseconds(monkeypatch, text, seconds):
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", text)
    assert environment.export_interval(60.0) == seconds


@pytest.mark.parametrize("text", ["soon", "0", "-5", "nan"])
def test_an_impossible_interval_is_logged_and_ignored(monkeypatch, caplog, text):
    monkeypatch.setenv("OTEL_METRIC_EXPORT_TIMEOUT", text)
    with caplog.at_level(logging.WARNING, "kc_otel"):
        assert environment.export_timeout() == 30.0
    assert "OTEL_METRIC_EXPORT_TIMEOUT" in caplog.text
