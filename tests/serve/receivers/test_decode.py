"""Decoding of both encodings and its limits: what is valid is read whole, what is not is refused with a reason."""

import gzip
import tracemalloc
import zlib
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from kc_otel.judge.otlp import requests
from kc_otel.judge.otlp.requests import Limits, TooLargeError, from_json, from_protobuf, holds_more_than, inflate
from tests.serve.receivers.conftest import wrapped

LIMITS = Limits()


def test_the_protocols_own_example_is_read(examples: Path) -> None:
    """opentelemetry-proto's JSON example is read, and survives the way through protobuf."""
    request = from_json((examples / "metrics.json").read_bytes(), LIMITS)
    assert request.ByteSize() > 100
    assert from_protobuf(request.SerializeToString(), LIMITS) == request


@pytest.mark.slow
@pytest.mark.parametrize("level", range(4))
def test_requests_of_too_many_things_are_refused(level: int) -> None:
    """What a request holds is bounded in number too: empty messages take two bytes each, and an hour to look at."""
    request = ExportMetricsServiceRequest()
    where: Any = request
    for place, name in enumerate(("resource_metrics", "scope_metrics", "metrics", "exponential_histogram.data_points")):
        of = attrgetter(name)(where)
        for _ in range(60_001 if place == level else 1):
            where = of.add()
    with pytest.raises(TooLargeError, match="more than 60000 items; send smaller batches"):
        from_protobuf(request.SerializeToString(), LIMITS)


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param((), id="resources"),
        pytest.param((1, 1), id="attributes of a resource"),
        pytest.param((1, 2, 2, 10), id="points"),
        pytest.param((1, 2, 2, 10, 1), id="attributes of a point"),
    ],
)
def test_a_bomb_is_refused_before_it_is_parsed(fields: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Millions of empty messages, a few kilobytes of gzip, would be a gigabyte and seconds."""
    never = SimpleNamespace(DESCRIPTOR=ExportMetricsServiceRequest.DESCRIPTOR)
    monkeypatch.setattr(requests, "ExportMetricsServiceRequest", never)
    body = wrapped(b"\x0a\x00" * 2**19, *reversed(fields))
    with pytest.raises(TooLargeError, match="send smaller batches"):
        from_protobuf(body, Limits(max_items=6000))


def test_what_recorders_send_is_no_bomb() -> None:
    """Points with what they usually have are not refused before they are read, as long as there are not too many."""
    request = ExportMetricsServiceRequest()
    data = (
        request.resource_metrics.add().scope_metrics.add().metrics.add(name="kc.drift.tv_token").exponential_histogram
    )
    for number in range(500):
        point = data.data_points.add(time_unix_nano=number, count=3)
        for key in range(8):
            point.attributes.add(key=f"kc.{key}").value.string_value = "a"
        point.positive.bucket_counts.extend(range(80))
        point.exemplars.add(as_double=0.5)
    body, few = request.SerializeToString(), 503
    assert not holds_more_than(few, body)
    assert from_protobuf(body, replace(LIMITS, max_items=few)) == request
    assert holds_more_than(few // 3, body)


def test_json_of_too_many_objects_is_refused_before_it_is_parsed() -> None:
    """Millions of empty objects fit into a request; they are counted as bytes, and no parser sees them."""
    body = b'{"resourceMetrics":[' + b",".join([b"{}"] * 1_300_000) + b"]}"
    tracemalloc.start()
    with pytest.raises(TooLargeError, match="send smaller batches"):
        from_json(body, LIMITS)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1_000_000


SMALL = Limits(max_bytes=100_000)


@pytest.mark.parametrize(
    ("encoding", "compress"),
    [
        *(("", bytes), ("identity", bytes), ("gzip", gzip.compress), (" GZip ", gzip.compress)),
        *(("deflate", zlib.compress), ("gzip", lambda body: gzip.compress(body[:9]) + gzip.compress(body[9:]))),
    ],
)
def test_bodies_up_to_the_limit_are_inflated(encoding: str, compress: object) -> None:
    assert callable(compress)
    assert inflate(compress(b"x" * 100_000), encoding, SMALL) == b"x" * 100_000
    with pytest.raises(TooLargeError, match="100000 bytes; send smaller batches"):
        inflate(compress(b"x" * 100_001), encoding, SMALL)
