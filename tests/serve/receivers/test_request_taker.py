"""A request that takes long is taken in chunks, between which the event loop is left to others."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)

from kc_otel import machine_code
from kc_otel.judge.otlp.requests import ExportResult, Limits, MetricsSink, ThrottledError, item_counts, to_json
from kc_otel.judge.otlp.wire_columns import ColumnMessage
from kc_otel.judge.points import walk
from kc_otel.serve.core import Core
from kc_otel.serve.durable_sink import DurableSink
from kc_otel.serve.receivers import request_taker
from kc_otel.serve.receivers.request_taker import BusyError, ByteBudget, RequestTaker, parts_of
from tests.tools.load import message
from tests.tools.receivers import http_app

pytestmark = pytest.mark.anyio

PROTOBUF = {"content-type": "application/x-protobuf"}


def mixed() -> ExportMetricsServiceRequest:
    """Resources, scopes and metrics of every kind with points, and some without any."""
    request, number = ExportMetricsServiceRequest(), 0
    for instance in range(3):
        resource = request.resource_metrics.add()
        resource.resource.attributes.add(key="service.instance.id").value.string_value = str(instance)
        for name in ("kc_otel", "other")[: 1 + instance % 2]:
            scope = resource.scope_metrics.add()
            scope.scope.name = name
            for kind, metric in (
                ("exponential_histogram", "kc.drift.tv_token"),
                ("histogram", "kc.drift.k3"),
                ("sum", "kc.input.invalid"),
                ("gauge", "kc.train.step"),
                ("gauge", "somebody.elses"),
            ):
                data = getattr(scope.metrics.add(name=metric, unit="1"), kind)
                data.SetInParent()
                if kind != "gauge":
                    data.aggregation_temporality = 2
                if kind == "sum":
                    data.is_monotonic = True
                for _ in range(7 * (instance != 1)):
                    number += 1
                    point = data.data_points.add(time_unix_nano=10**18 + number)
                    point.attributes.add(key="kc.contract").value.string_value = "policy"
                    point.attributes.add(key="kc.reason").value.string_value = f"r{number}"
                    if kind in {"sum", "gauge"}:
                        point.as_int = number
                    else:
                        point.count = 0
                        point.sum = 0.0
        resource.scope_metrics[0].metrics.add(name="kc.drift.tv_token")
    return request


def read(request: Any) -> tuple[list[Any], Counter[str]]:
    """Every point as the judge reads it, and how many it ignores."""
    counts = Counter[str]()
    return [
        (point.metric, point.attributes, getattr(point, "stream", "")) for point in walk(request, (), counts)
    ], counts


@pytest.mark.parametrize("most", [1, 2, 5, 6, 7, 13, 34])
def test_parts_hold_the_same_points_of_the_same_streams_in_order(most: int) -> None:
    whole = mixed()
    parts = list(parts_of(whole, lambda: most))
    counts = [sum(item_counts(part)) for part in parts]
    assert len(parts) > 1
    assert min(counts) > 0
    of_parts = [read(part) for part in parts]
    assert [point for points, _ in of_parts for point in points] == read(whole)[0]
    assert sum(ignored["ignored"] for _, ignored in of_parts) == read(whole)[1]["ignored"] > 0


def test_what_is_small_stays_whole() -> None:
    """As does what would repeat large resources again and again."""
    whole = mixed()
    assert list(parts_of(whole, lambda: 200)) == [whole]
    whole.resource_metrics[0].resource.attributes.add(key="large").value.string_value = "x" * 2**24
    parts = list(parts_of(whole, lambda: 1))
    assert sum(part.ByteSize() for part in parts) < 100 * 2**20


@pytest.mark.slow
async def test_a_request_of_many_points_holds_nobody_up(make_core: Callable[..., Core]) -> None:
    """Eight thousand new streams in one message: who sends one point meanwhile is answered long before they are."""
    core, counts = make_core(), Counter()
    app = http_app(DurableSink(core), counts=counts)
    began = time.time_ns() - 10**9
    large = message([f"v{number:09d}" for number in range(8000)], began, 1000)
    waits: list[float] = []
    finished = asyncio.Event()

    async def flood() -> Any:
        answer = await client("a").post("/v1/metrics", content=large, headers=PROTOBUF)
        finished.set()
        return answer

    def client(name: str) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(app, client=(name, 1))
        return httpx.AsyncClient(transport=transport, base_url="http://evaluator")

    async def report() -> None:
        async with client("b") as own:
            total = 0
            while not finished.is_set():
                total, first = total + 1000, time.monotonic()
                body = message(["honest"], began, total)
                assert (await own.post("/v1/metrics", content=body, headers=PROTOBUF)).status_code == 200
                waits.append(time.monotonic() - first)
                await asyncio.sleep(0)

    first = time.monotonic()
    answer, _ = await asyncio.gather(flood(), report())
    took = time.monotonic() - first
    assert answer.status_code == 200
    said = ExportMetricsServiceResponse.FromString(answer.content).partial_success
    counted = core.evaluator.counters
    assert sum(counted.values()) == 8000 + len(waits)
    assert said.rejected_data_points == counted["over_cap"] + counted["unknown_contract"]
    assert said.error_message
    assert len(waits) > 10
    *_, long, longest = sorted(waits)  # once a busy machine may have had something else to do
    assert long < took / 5, (long, longest, took)


@pytest.mark.skipif(not machine_code.is_available(), reason="needs a C compiler")
async def test_who_records_what_another_does_waits_for_nobody(make_core: Callable[..., Core]) -> None:
    """A message of many new streams is read in chunks once; after that, other processes' are taken at once."""
    core, lengths, waiting = make_core(), list[int](), [0]

    class Taken(DurableSink):
        async def metrics(self, request: Any, at: float | None = None) -> ExportResult:
            lengths.append(request.rows.size if isinstance(request, ColumnMessage) else 0)
            waiting.append(waiting[-1] + 1)
            result = await super().metrics(request, at)
            waiting.append(waiting[-1] - 1)
            return result

    def sent(instance: str) -> bytes:
        request = ExportMetricsServiceRequest.FromString(message([f"v{number}" for number in range(60)], began, 1000))
        (resource,) = request.resource_metrics
        resource.resource.attributes.add(key="service.instance.id").value.string_value = instance
        resource.scope_metrics[0].metrics[0].description = "Total variation of a token."
        for point in resource.scope_metrics[0].metrics[0].exponential_histogram.data_points:
            point.min, point.max = 0.3, 0.9
        return request.SerializeToString()

    began = time.time_ns() - 10**9
    taker = RequestTaker(Taken(core), Limits(), ByteBudget(Limits()))
    await asyncio.gather(*(taker.take("metrics", sent(instance), "", "http") for instance in "abc"))
    assert lengths == [50, 10, 60, 60]
    assert max(waiting) == 2
    assert core.evaluator.taken_as_columns == 120


async def test_what_takes_long_is_told_to_come_back_where_others_take_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exporters give up after ten seconds: who would wait for longer is told when to come again."""
    monkeypatch.setattr(request_taker, "_SLOW_WAIT_SECONDS", 0.05)
    body = message([f"v{number}" for number in range(300)], 1, 1)
    released = asyncio.Event()

    class Stuck(MetricsSink):
        async def metrics(self, _: Any) -> ExportResult:
            await released.wait()
            return ExportResult()

    taker = RequestTaker(Stuck(), Limits(), ByteBudget(Limits()))
    asked = [asyncio.create_task(taker.take("metrics", body, "", "http")) for _ in range(3)]
    await asyncio.sleep(0.2)
    released.set()
    first, *others = await asyncio.gather(*asked, return_exceptions=True)
    assert first[1] == "accepted"
    assert [type(answer) for answer in others] == [BusyError] * 2


@pytest.mark.parametrize("json", [False, True])
async def test_the_sink_reads_columns_of_whatever_arrives(json: bool) -> None:
    """JSON is written anew for it; other fields stay as they are."""
    request = ExportMetricsServiceRequest.FromString(message(["b"], 1, 1))
    body = to_json(request) if json else request.SerializeToString()
    sink = Columns()
    taker = RequestTaker(sink, Limits(), ByteBudget(Limits()))
    await taker.take("metrics", body, "", "http", json=json)
    [read] = sink.seen
    assert read == request


class Columns(MetricsSink):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    async def metrics(self, _: Any) -> ExportResult:
        return ExportResult()

    def columns(self, body: bytes, limits: Limits) -> Any:  # noqa: ARG002 - the sink's interface
        self.seen.append(ExportMetricsServiceRequest.FromString(body))
        return self


async def test_a_part_that_is_refused_refuses_the_request() -> None:
    """Its sender sends all of it again; nothing is told to be taken that is not."""

    class Full(MetricsSink):
        taken = 0

        async def metrics(self, request: Any) -> ExportResult:
            if self.taken:
                raise ThrottledError("full", 1.0)
            self.taken += sum(item_counts(request))
            return ExportResult()

    sink, counts = Full(), Counter()
    transport = httpx.ASGITransport(http_app(sink, counts=counts))
    async with httpx.AsyncClient(transport=transport, base_url="http://evaluator") as client:
        body = message([f"v{number}" for number in range(900)], time.time_ns(), 1)
        assert (await client.post("/v1/metrics", content=body, headers=PROTOBUF)).status_code == 503
    assert 0 < sink.taken < 900
    assert counts == {("http", "throttled"): 1}


async def test_what_a_sink_reads_itself_is_handed_over_once_however_long() -> None:
    """Two megabytes go to the sink as the columns that it made of them, as a router to shards does."""
    sink, body = Columns(), b"\xfa\x01\x80\x80\x3c" + bytes(15 * 2**16) + b"\xfa\x01\x80\x80\x3c" + bytes(15 * 2**16)
    taker = RequestTaker(sink, Limits(), ByteBudget(Limits()))
    assert (await taker.take("metrics", body, "", "http"))[1] == "accepted"
    assert len(sink.seen) == 1
