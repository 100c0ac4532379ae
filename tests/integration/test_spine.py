"""The whole flow with real processes: OTLP in, verdicts, a signed webhook, a route, a recovery, a crash in between."""

import time
from collections.abc import Callable
from typing import Any

import pytest
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter as GrpcExporter
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter as HttpExporter

import kc_otel
from kc_otel.client.router import Router
from kc_otel.contract.load import load

from .conftest import GOOD, Evaluator, Traffic

pytestmark = pytest.mark.slow

BAD = kc_otel.Kernel("vllm", version="2", dtype="int8")


def statuses(answer: dict[str, Any], kernel: kc_otel.Kernel) -> dict[str, str]:
    return {
        verdict["slice"]: verdict["status"]
        for verdict in answer["verdicts"]
        if verdict["kernel_inference"] == kernel.fingerprint
    }


def exporter_of(protocol: str, evaluator: Evaluator) -> Any:
    if protocol == "grpc":
        return GrpcExporter(endpoint=evaluator.grpc, insecure=True, timeout=2)
    return HttpExporter(endpoint=f"{evaluator.http}/v1/metrics", timeout=2)


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_a_bad_kernel_version_is_found_on_its_slice_paged_routed_and_recovered(protocol, serve, pager, contract_file):
    """PASS everywhere; a version that is worse on code only FAILs there; a webhook and a route follow; it recovers."""
    evaluator = serve()
    traffic = Traffic(contract_file, exporter_of(protocol, evaluator))

    def now(kernel: kc_otel.Kernel) -> dict[str, str]:
        return statuses(evaluator.get("/api/v1/verdicts"), kernel)

    def feed(happens: Callable[[], bool], **sigma: float) -> None:
        traffic.send_until(happens, lambda: evaluator.get("/api/v1/verdicts"), **sigma)

    with traffic.recorder, Router(evaluator.api, contracts=[load(contract_file)], wait=1.0) as router:

        def routed(kernel: kc_otel.Kernel) -> str:
            return router.choose("policy", {"task": "code"}, inference_version=kernel.fingerprint)

        feed(lambda: set(now(GOOD).values()) == {"PASS"}, code=0.005, prose=0.005)
        assert set(now(GOOD)) == {"all", "code", "prose"}
        assert pager.bodies == []

        traffic.recorder.rollout(inference=BAD)
        feed(lambda: bool(pager.bodies), code=0.2, prose=0.005)
        assert now(BAD)["code"] == "FAIL"
        assert now(BAD)["prose"] != "FAIL"
        (alert, *_) = pager.bodies[0]["alerts"]
        assert pager.bodies[0]["version"] == "4"
        assert pager.bodies[0]["status"] == alert["status"] == "firing"
        assert alert["labels"]["slice"] in {"code", "all"}
        cell = pager.bodies[0]["kernelContract"]["cells"][0]
        assert cell["lower"] > cell["limit"] == 0.02
        assert pager.refused == []

        feed(lambda: routed(BAD) == "train-kernel", code=0.2, prose=0.005)
        assert routed(GOOD) == "inference-kernel"
        assert router.sampling("policy", 0.1) == 1.0

        traffic.recorder.rollout(inference=GOOD)  # what a service does that obeys the route
        feed(lambda: any(body["status"] == "resolved" for body in pager.bodies), code=0.005, prose=0.005)
        feed(lambda: set(now(GOOD).values()) == {"PASS"}, code=0.005, prose=0.005)
        assert routed(BAD) == "train-kernel"

    kinds = [event["kind"] for event in evaluator.get("/api/v1/events", newest=1000)["events"]]
    assert {"verdict", "firing", "resolved"} <= set(kinds)
    assert all(event["message"] for event in evaluator.get("/api/v1/events", newest=1000)["events"])
    assert evaluator.stop() == 0


def test_verdicts_and_transitions_leave_over_otlp_where_an_endpoint_is_configured(serve, contract_file, collector):
    """Every cell's verdict and bounds as gauges, every change as a log record with the contract's version."""
    evaluator = serve(
        OTEL_EXPORTER_OTLP_PROTOCOL="http/protobuf", OTEL_METRIC_EXPORT_INTERVAL="300", OTEL_BLRP_SCHEDULE_DELAY="200"
    )
    traffic = Traffic(contract_file, exporter_of("http", evaluator))

    def verdicts() -> dict[str, float]:
        return {
            next(pair.value.string_value for pair in point.attributes if pair.key == "kc.slice"): point.as_double
            for metric in collector.metrics
            if metric.name == "kc.verdict"
            for point in metric.gauge.data_points
        }

    with traffic.recorder:
        traffic.send_until(lambda: verdicts().get("code") == 3.0, verdicts, code=0.3, prose=0.005)
    assert {"kc.bound.lower", "kc.bound.upper", "kc.bound.limit", "kc.evaluator.points"} <= {
        metric.name for metric in collector.metrics
    }
    evaluator.stop()
    said = {record.body.string_value: record for record in collector.logs}
    failed = next(record for message, record in said.items() if "FAIL" in message)
    attributes = {pair.key: pair.value.string_value for pair in failed.attributes}
    assert attributes["kc.contract.version"] == "1"
    assert attributes["kc.verdict.status"] == "FAIL"
    assert failed.event_name == "gen_ai.evaluation.result"
    assert attributes["gen_ai.evaluation.name"] == "token-tv"
    assert attributes["gen_ai.evaluation.score.label"] == "fail"
    assert attributes["gen_ai.evaluation.explanation"]
    (score,) = [pair.value.double_value for pair in failed.attributes if pair.key == "gen_ai.evaluation.score.value"]
    assert score > 0.02


def test_stopping_does_not_wait_for_an_endpoint_that_is_gone(serve: Callable[..., Evaluator]) -> None:
    """SIGTERM ends the process within seconds, whatever its own telemetry is doing."""
    evaluator = serve(OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:9", OTEL_METRIC_EXPORT_INTERVAL="200")
    time.sleep(1.0)
    assert evaluator.stop() == 0
