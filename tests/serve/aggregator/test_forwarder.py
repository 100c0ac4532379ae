"""What an evaluator answers to an aggregator, and what becomes of what was acknowledged."""

from __future__ import annotations

import asyncio
import gzip
import logging
from collections.abc import Callable, Iterator

import httpx
import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from kc_otel.serve.aggregator.aggregator_store import AggregatorStore
from kc_otel.serve.aggregator.forwarder import Forwarder
from kc_otel.serve.store.state_file import open_state
from tests.judge.conftest import NOW, Sender, ns

OTLP = {"content-type": "application/x-protobuf"}


@pytest.fixture
def store() -> Iterator[AggregatorStore]:
    """One sum that is due, and four deltas that are passed on."""
    connection = open_state(None)
    store = AggregatorStore(connection, ns(NOW - 5))
    for number in range(5):
        request = Sender(cumulative=number == 0, instance=str(number)).request(NOW, [0.1])
        merged = store.host.merged(request, ns(NOW))
        store.keep(merged, merged.rest.SerializeToString())
    yield store
    connection.close()


def forwarded(store: AggregatorStore, answer: Callable[[ExportMetricsServiceRequest], httpx.Response]) -> list[int]:
    """Messages by how many resources they are of, in a round."""
    found = []

    def answered(request: httpx.Request) -> httpx.Response:
        message = ExportMetricsServiceRequest.FromString(gzip.decompress(request.content))
        found.append(len(message.resource_metrics))
        return answer(message)

    async def round() -> None:
        async with httpx.AsyncClient(transport=httpx.MockTransport(answered)) as client:
            await Forwarder(store, "http://judge:4318", {}, client).forward()

    asyncio.run(round())
    return found


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (httpx.Response(401, headers=OTLP), "401: give a token that it takes in OTEL_EXPORTER_OTLP_HEADERS"),
        (httpx.Response(403, headers=OTLP), "403: the token"),
        (httpx.Response(404), "404: --to has to be the URL"),
        (httpx.Response(400, html="The plain HTTP request was sent to HTTPS port"), "400"),
        (httpx.Response(413, html="proxy"), "413: raise the limit"),
        (httpx.Response(429), "429"),
        (httpx.Response(500, headers=OTLP), "500"),
        (httpx.Response(307, headers={"location": "https://judge"}), "307"),
        (httpx.Response(200, html="<html>a login page"), "not one of OTLP: --to"),
    ],
)
def test_what_may_be_mended_loses_nothing(
    answer: httpx.Response, said: str, store: AggregatorStore, caplog: pytest.LogCaptureFixture
) -> None:
    """A token that ran out, a proxy, an address that is no evaluator's: it waits, and it is said what to do."""
    before = store.waiting, set(store.due)
    forwarded(store, lambda _: answer)
    assert (store.waiting, store.due) == before
    assert said in caplog.text
    forwarded(store, lambda _: httpx.Response(200, headers=OTLP))
    assert (store.waiting, store.due) == (0, set())


@pytest.mark.parametrize("status", [400, 413])
def test_what_the_evaluator_never_takes_takes_nothing_else_with_it(
    status: int, store: AggregatorStore, caplog: pytest.LogCaptureFixture
) -> None:
    """Of what is passed on together, what is refused is found by halves, dropped, and named."""

    def refuses_one(message: ExportMetricsServiceRequest) -> httpx.Response:
        wrong = any(
            pair.value.string_value == "2" for one in message.resource_metrics for pair in one.resource.attributes
        )
        return httpx.Response(status if wrong else 200, headers=OTLP)

    caplog.set_level(logging.ERROR)
    assert forwarded(store, refuses_one) == [1, 4, 2, 1, 1, 2, 1]
    assert (store.waiting, store.due) == (0, set())
    (record,) = caplog.records
    assert "they are lost" in record.message
