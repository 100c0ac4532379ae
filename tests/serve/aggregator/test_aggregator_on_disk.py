"""What an aggregator has not on the disk it neither acknowledges nor passes on."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from kc_otel.judge.otlp import ThrottledError
from kc_otel.serve.aggregator.aggregator_sink import AggregatorSink
from kc_otel.serve.aggregator.aggregator_store import AggregatorStore
from kc_otel.serve.aggregator.forwarder import Forwarder
from kc_otel.serve.store.state_file import open_state
from tests.judge.conftest import NOW, Sender, ns
from tests.serve.test_on_disk import Disk, disk, still_waits

__all__ = ["disk"]

SPANS = ExportTraceServiceRequest()
SPANS.resource_spans.add().scope_spans.add().spans.add(name="kc.compare")


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AggregatorStore]:
    monkeypatch.setattr("kc_otel.serve.aggregator.aggregate.time.time_ns", lambda: ns(NOW))
    with closing(open_state(tmp_path / "state")) as connection:
        yield AggregatorStore(connection, ns(NOW - 5))


@pytest.mark.parametrize("what", ["sums", "deltas", "spans"])
def test_a_sender_is_answered_once_the_disk_has_it(store: AggregatorStore, disk: Disk, what: str) -> None:
    """Whatever it sent."""
    sink, sender = AggregatorSink(store), Sender(start=NOW - 1, cumulative=what == "sums")

    async def send() -> None:
        taking = sink.traces(SPANS) if what == "spans" else sink.metrics(sender.request(NOW, [0.1]))
        answering = asyncio.create_task(taking)
        assert await still_waits(answering)
        disk.takes.set()
        assert (await answering).rejected == 0

    asyncio.run(send())


@pytest.mark.parametrize("what", ["deltas", "spans"])
def test_what_is_refused_is_not_passed_on(store: AggregatorStore, disk: Disk, what: str) -> None:
    """Its sender sends it again, and it would be there twice."""
    sink, sender = AggregatorSink(store), Sender(start=NOW - 1, cumulative=False)
    request = SPANS if what == "spans" else sender.request(NOW, [0.1])
    disk.takes.set()

    async def send() -> None:
        disk.error = OSError(errno.EIO, "Input/output error")
        for _ in range(3):
            with pytest.raises(ThrottledError, match="cannot be kept on disk at the moment"):
                await (sink.traces(request) if what == "spans" else sink.metrics(request))
        assert (list(store.to_pass_on()), store.waiting) == ([], 0)
        disk.error = None
        await (sink.traces(request) if what == "spans" else sink.metrics(request))
        assert len(list(store.to_pass_on())) == 1

    asyncio.run(send())


def test_nothing_is_told_that_the_disk_has_not(store: AggregatorStore, disk: Disk) -> None:
    """A sum that a crash takes back would be less than was told."""
    merged = store.host.merged(Sender(start=NOW - 1).request(NOW, [0.1]), ns(NOW))
    store.keep(merged, merged.rest.SerializeToString())
    told: list[httpx.Request] = []

    async def forward() -> None:
        transport = httpx.MockTransport(lambda request: (told.append(request), httpx.Response(200))[1])
        async with httpx.AsyncClient(transport=transport) as client:
            forwarding = asyncio.create_task(Forwarder(store, "http://judge:4318", {}, client).forward())
            assert await still_waits(forwarding)
            assert not told
            disk.takes.set()
            await forwarding
            assert told

    asyncio.run(forward())
