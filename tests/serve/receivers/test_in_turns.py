"""A request that takes long is taken in parts, between which others have their turns."""

from __future__ import annotations

import asyncio
import gzip
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from kc_otel.judge.otlp.request_errors import BadRequestError
from kc_otel.judge.otlp.request_limits import Limits
from kc_otel.judge.otlp.signals import METRICS, TRACES
from kc_otel.judge.otlp.sink import ExportResult, RequestCounts
from kc_otel.judge.points import walk
from kc_otel.serve.core import Core
from kc_otel.serve.receivers import decoding
from kc_otel.serve.receivers.fair_turns import FairTurns
from kc_otel.serve.receivers.http_server import http_app
from kc_otel.serve.receivers.in_turns import in_turns, parts_of
from tests.benchmarks.bench_overload import message

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


def read(request: Any) -> list[Any]:
    """Every point as the judge reads it."""
    said: list[Any] = []
    points = [
        (one.kind, one.metric, one.stream, one.time, one.attributes)
        for one in walk(request, (), lambda *of: said.append(of))
    ]
    return [*points, *sorted(said)]


@pytest.mark.parametrize("most", [1, 2, 5, 6, 7, 13, 34])
def test_parts_hold_the_same_points_of_the_same_streams_in_order(most: int) -> None:
    """Wherever it is cut."""
    whole = mixed()
    parts = list(parts_of(whole, METRICS, most))
    counts = [sum(METRICS.items(part)) for part in parts]
    assert len(parts) > 1
    assert min(counts) > 0
    points = [one for part in parts for one in read(part) if len(one) == 5]
    assert points == [one for one in read(whole) if len(one) == 5]
    ignored = [sum(one[1] for one in read(part) if one[0] == "ignored") for part in parts]
    assert sum(ignored) == sum(one[1] for one in read(whole) if one[0] == "ignored")


def test_what_is_small_stays_whole() -> None:
    """As do spans, and what would repeat large resources again and again."""
    whole, spans = mixed(), ExportTraceServiceRequest()
    assert list(parts_of(whole, METRICS)) == [whole]
    assert next(parts_of(spans, TRACES)) is spans
    whole.resource_metrics[0].resource.attributes.add(key="large").value.string_value = "x" * 2**24
    parts = list(parts_of(whole, METRICS, 1))
    assert sum(part.ByteSize() for part in parts) < 100 * 2**20


@pytest.mark.slow
def test_a_request_of_many_points_holds_nobody_up(make_core: Callable[..., Core]) -> None:
    """Eight thousand new streams in one message: who sends one point meanwhile is answered long before they are."""
    core, counts = make_core(), RequestCounts()
    app = http_app(core, counts=counts, turns=FairTurns())
    began = time.time_ns() - 10**9
    large = message([f"v{number:09d}" for number in range(8000)], began, 1000)
    waits: list[float] = []

    async def send() -> tuple[Any, float]:
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
        return answer, time.monotonic() - first

    answer, took = asyncio.run(send())
    assert answer.status_code == 200
    said = ExportMetricsServiceResponse.FromString(answer.content).partial_success
    counted = core.evaluator.counters
    assert sum(counted.values()) == 8000 + len(waits)
    assert said.rejected_data_points == counted["over_cap"] + counted["unknown_contract"]
    assert said.error_message
    assert len(waits) > 10
    assert max(waits) < took / 5, (max(waits), took)


class Trace:
    """Takes everything, and remembers how large it was."""

    def __init__(self) -> None:
        self.taken: list[int] = []

    def traces(self, request: Any) -> ExportResult:
        self.taken.append(request.ByteSize())
        return ExportResult()


class OneByOne(FairTurns):
    """As where each request takes longer than a tenth of a second."""

    def _room(self) -> float:
        return 0.0


def spans(size: int) -> bytes:
    """A request of so many bytes or so."""
    request = ExportTraceServiceRequest()
    for _ in range(size // 100):
        request.resource_spans.add().resource.attributes.add(key="k").value.string_value = "x" * 86
    return request.SerializeToString()


async def parsed(body: bytes) -> Any:
    return ExportTraceServiceRequest.FromString(body)


@pytest.mark.parametrize("size", [100_000, 1_000_000])
def test_what_is_compressed_waits_as_what_it_is(size: int) -> None:
    """A thousandth of it arrived; others whose requests are larger than that, and smaller than it, come first."""

    async def sent() -> list[int]:
        turns, sink = OneByOne(), Trace()

        def ask(sender: str, body: bytes, encoding: str) -> asyncio.Task[Any]:
            asking = in_turns(turns, sender, body, encoding, parsed, sink, TRACES, Limits(), "grpc")
            return asyncio.create_task(asking)

        async with turns.turn("busy", 1):
            asked = [ask(f"packed {number}", gzip.compress(spans(size)), "gzip") for number in range(3)]
            asked += [ask(f"plain {number}", spans(50_000), "") for number in range(3)]
            await asyncio.sleep(0)
        await asyncio.gather(*asked)
        assert turns.waiting == 0
        return sink.taken

    taken = asyncio.run(sent())
    assert max(taken[:3]) < 60_000
    assert min(taken[3:]) > 90_000


@pytest.mark.parametrize("how", ["refused", "cancelled", "not inflated"])
def test_what_fails_counts_for_who_sent_it_too(how: str) -> None:
    """Work that is thrown away was work: who sends such things is not next for ever."""

    async def dear(_: bytes) -> Any:
        time.sleep(0.05)  # noqa: ASYNC251 - as work does
        if how == "refused":
            raise BadRequestError("it is not")
        await asyncio.sleep(60)

    async def sent() -> tuple[float, float]:
        turns = FairTurns()
        body, encoding = (b"x" * 99, "gzip") if how == "not inflated" else (b"", "")
        asking = asyncio.create_task(in_turns(turns, "a", body, encoding, dear, Trace(), TRACES, Limits(), "grpc"))
        await asyncio.sleep(0.1)
        asking.cancel()
        await asyncio.wait([asking])
        return turns._due["a"], turns._taken

    due, taken = asyncio.run(sent())
    assert (due > 300_000) is (how != "not inflated")
    assert taken == 0


def test_a_turn_lasts_until_the_thread_that_has_it_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever hangs up amid decoding, and once more: else there would be as many threads at work as calls that end."""
    running, most = 0, 0

    def slow(*_: Any) -> Any:
        nonlocal running, most
        running += 1
        most = max(most, running)
        busy = time.thread_time() + 0.02
        while time.thread_time() < busy:
            pass
        running -= 1
        raise BadRequestError("it is not")

    monkeypatch.setattr(decoding, "from_protobuf", slow)

    async def sent() -> tuple[int, int, list[Any]]:
        turns, body = OneByOne(), bytes(300_000)

        async def decode(plain: bytes) -> Any:
            return await decoding.decoded(None, plain, TRACES, Limits(), turns.elsewhere)

        asked: list[asyncio.Task[Any]] = []
        for number in range(5):
            asking = in_turns(turns, number, body, "", decode, Trace(), TRACES, Limits(), "grpc")
            asked.append(asyncio.create_task(asking))
            await asyncio.sleep(0.001)
            asked[0].cancel()
        held = turns._taken
        asked[3].cancel()
        return most, held, await asyncio.gather(*asked, return_exceptions=True)

    together, held, ended = asyncio.run(sent())
    assert together == most == 1
    assert held > 300_000
    assert [type(one) for one in ended] == [
        asyncio.CancelledError, BadRequestError, BadRequestError, asyncio.CancelledError, BadRequestError
    ]  # fmt: skip


def test_a_part_that_is_refused_refuses_the_request() -> None:
    """Its sender sends all of it again; nothing is told to be taken that is not."""

    class Full:
        taken = 0

        def metrics(self, request: Any) -> ExportResult:
            from kc_otel.judge.otlp import ThrottledError

            if self.taken:
                raise ThrottledError("full", 1.0)
            self.taken += sum(METRICS.items(request))
            return ExportResult()

    sink, counts = Full(), RequestCounts()

    async def send() -> int:
        transport = httpx.ASGITransport(http_app(sink, counts=counts))  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://evaluator") as client:
            body = message([f"v{number}" for number in range(900)], time.time_ns(), 1)
            return (await client.post("/v1/metrics", content=body, headers=PROTOBUF)).status_code

    assert asyncio.run(send()) == 503
    assert 0 < sink.taken < 900
    assert counts.snapshot() == {("http", "throttled"): 1}


def test_what_a_sink_has_divided_itself_is_whole() -> None:
    """A sink's own reading of a body, such as one by shards, has no points to be counted here."""
    divided = object()
    assert list(parts_of(divided, METRICS)) == [divided]
