"""Decoding of both encodings and its limits: what is valid is read whole, what is not is refused with a reason."""

import gzip
import json
import tracemalloc
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kc_otel.judge.otlp.requests import (
    LOGS,
    METRICS,
    SIGNALS,
    TRACES,
    Limits,
    Signal,
    TooLargeError,
    from_json,
    from_protobuf,
    holds_more_than,
    inflate,
)
from tests.serve.receivers.conftest import wrapped

LIMITS = Limits()
FILES = {"metrics.json": METRICS, "trace.json": TRACES, "logs.json": LOGS, "events.json": LOGS}


@pytest.mark.parametrize("name", FILES)
def test_the_protocols_own_examples_are_read(examples: Path, name: str) -> None:
    """opentelemetry-proto's JSON examples are read, and survive the way through protobuf."""
    request = from_json((examples / name).read_bytes(), FILES[name], LIMITS)
    assert request.ByteSize() > 100
    assert from_protobuf(request.SerializeToString(), FILES[name], LIMITS) == request


def test_ids_of_links_and_exemplars_are_hex_too() -> None:
    """Wherever an id stands it is hex; attributes of the same name are left alone."""
    attribute = {"key": "traceId", "value": {"stringValue": "not hex"}}
    span = {"links": [{"traceId": "00" * 15 + "0a", "spanId": "00" * 7 + "0b"}], "attributes": [attribute]}
    body = {"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]}
    (span,) = from_json(json.dumps(body).encode(), TRACES, LIMITS).resource_spans[0].scope_spans[0].spans
    assert span.links[0].trace_id == bytes(15) + b"\x0a"
    assert span.attributes[0].value.string_value == "not hex"


def many(signal: Signal) -> Iterator[Any]:
    """Requests with too many of everything that nests, one kind at a time."""
    by_resource, by_scope, leaves = signal.groups
    for level in range(4 if signal is METRICS else 3):
        request = signal.request()
        where = request
        for place, name in enumerate((by_resource, by_scope, leaves)):
            for _ in range(60_001 if place == level else 1):
                last = getattr(where, name).add()
            where = last
        if level == 3:
            for _ in range(60_001):
                where.exponential_histogram.data_points.add()
        yield request


@pytest.mark.slow
@pytest.mark.parametrize("signal", SIGNALS, ids=lambda signal: signal.name)
def test_requests_of_too_many_things_are_refused(signal: Signal) -> None:
    """What a request holds is bounded in number too: empty messages take two bytes each, and an hour to look at."""
    for request in many(signal):
        with pytest.raises(TooLargeError, match="more than 60000 items; send smaller batches"):
            from_protobuf(request.SerializeToString(), signal, LIMITS)


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param((), id="resources"),
        pytest.param((1, 1), id="attributes of a resource"),
        pytest.param((1, 2, 2, 10), id="points"),
        pytest.param((1, 2, 2, 10, 1), id="attributes of a point"),
    ],
)
def test_a_bomb_is_refused_before_it_is_parsed(fields: tuple[int, ...]) -> None:
    """Millions of empty messages, a few kilobytes of gzip, would be a gigabyte and seconds."""

    class Never:
        DESCRIPTOR = METRICS.request.DESCRIPTOR

        def ParseFromString(self, _body: bytes) -> None:  # noqa: N802 - protobuf's name
            raise AssertionError("parsed")

    body = wrapped(b"\x0a\x00" * 2**19, *reversed(fields))
    with pytest.raises(TooLargeError, match="send smaller batches"):
        from_protobuf(body, replace(METRICS, request=Never), Limits(max_items=6000))


def test_what_recorders_send_is_no_bomb() -> None:
    """Points with what they usually have are not refused before they are read, as long as there are not too many."""
    request = METRICS.request()
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
    assert not holds_more_than(few, body, METRICS.request.DESCRIPTOR)
    assert from_protobuf(body, METRICS, replace(LIMITS, max_items=few)) == request
    assert holds_more_than(few // 3, body, METRICS.request.DESCRIPTOR)


def test_json_of_too_many_objects_is_refused_before_it_is_parsed() -> None:
    """Millions of empty objects fit into a request; they are counted as bytes, and no parser sees them."""
    body = b'{"resourceMetrics":[' + b",".join([b"{}"] * 1_300_000) + b"]}"
    tracemalloc.start()
    with pytest.raises(TooLargeError, match="send smaller batches"):
        from_json(body, METRICS, LIMITS)
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
