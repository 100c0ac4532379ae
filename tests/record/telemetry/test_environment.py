from __future__ import annotations

import logging

import pytest

from kc_otel.record.telemetry import environment


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


def test_every_writer_has_an_instance_id_of_its_own(monkeypatch):
    assert environment.process_resource().attributes["service.instance.id"]
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.instance.id=r7")
    assert environment.process_resource({"r7"}).attributes["service.instance.id"] != "r7"


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
