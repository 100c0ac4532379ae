"""OTLP/gRPC."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from tests.conformance.clients import PERMANENT, TIMEOUT, call, failure, retry_info
from tests.conformance.payloads import (
    A_MEGABYTE,
    METRICS,
    NEW_FIELD,
    NOT_PROTOBUF,
    PROTOBUF,
    SIGNALS,
    Signal,
    too_large,
)

of_each_signal = pytest.mark.parametrize("signal", SIGNALS, ids=lambda signal: signal.name)
with_and_without_gzip = pytest.mark.parametrize("compressed", [False, True], ids=["plain", "gzip"])


def taken_in_full(signal: Signal, answer: bytes) -> bool:
    return not signal.response.FromString(answer).HasField("partial_success")


@with_and_without_gzip
@of_each_signal
@pytest.mark.must("Protocol Details; OTLP/gRPC Response, Full Success")
def test_success(channel: grpc.Channel, signal: Signal, compressed: bool) -> None:
    """Data, compressed or not, is answered with the signal's response message and no partial success in it."""
    assert taken_in_full(signal, call(channel, signal.method, signal.body(PROTOBUF), compressed=compressed))


@of_each_signal
@pytest.mark.must("Future Versions and Interoperability")
@pytest.mark.should("OTLP/gRPC Response, Full Success")
def test_success_of_unusual_requests(channel: grpc.Channel, signal: Signal) -> None:
    """A request without any telemetry is a success; a field that nobody knows yet is ignored."""
    assert taken_in_full(signal, call(channel, signal.method, b""))
    assert taken_in_full(signal, call(channel, signal.method, signal.body(PROTOBUF) + NEW_FIELD))


@pytest.mark.should("OTLP/gRPC Response, Failures")
def test_bad_data_is_an_invalid_argument(channel: grpc.Channel) -> None:
    """What cannot be decoded is refused with the code recommended for it, of those that no client sends again."""
    assert failure(channel, METRICS.method, NOT_PROTOBUF).code() is grpc.StatusCode.INVALID_ARGUMENT


@with_and_without_gzip
@pytest.mark.must("OTLP/gRPC Request")
def test_limit(channel: grpc.Channel, target: Any, compressed: bool) -> None:
    """A message over the limit, as sent or decompressed, is refused with RESOURCE_EXHAUSTED and not to be retried."""
    error = failure(channel, METRICS.method, too_large(PROTOBUF, target.limit + 1024), compressed=compressed)
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED, error
    assert retry_info(error) is None


@pytest.mark.must("gRPC, status codes")
def test_unknown_methods(channel: grpc.Channel) -> None:
    """A service that is not there is answered with UNIMPLEMENTED, which no client sends again."""
    error = failure(channel, "/opentelemetry.proto.collector.weather.v1.WeatherService/Export", b"")
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.should("OTLP/gRPC Concurrent Requests")
def test_concurrent_calls(channel: grpc.Channel) -> None:
    """A client may have many calls in flight on one channel, and each gets its own answer."""

    def answered(number: int) -> Any:
        signal = SIGNALS[number % 3]
        if number % 5:
            return taken_in_full(signal, call(channel, signal.method, signal.body(PROTOBUF)))
        return failure(channel, METRICS.method, NOT_PROTOBUF).code() in PERMANENT

    with ThreadPoolExecutor(40) as pool:
        assert all(pool.map(answered, range(100)))


def crowded(channel: grpc.Channel) -> Any:
    """The first error of a server that waits for the messages of forty calls, of four megabytes each."""
    body = METRICS.body(PROTOBUF) + A_MEGABYTE * 4
    refused = threading.Event()

    def late() -> Iterator[bytes]:
        refused.wait(3.0)
        yield body

    def refusal(_: int) -> Any:
        try:
            channel.stream_unary(METRICS.method)(late(), timeout=TIMEOUT)
        except grpc.RpcError as error:
            refused.set()
            return error
        return None

    with ThreadPoolExecutor(40) as pool:
        errors = [error for error in pool.map(refusal, range(40)) if error is not None]
    assert errors, "forty calls whose messages are late do not fill this server"
    return errors[0]


@pytest.mark.should("OTLP/gRPC Throttling; Failures")
def test_throttling(channel: grpc.Channel) -> None:
    """A server with more calls than it takes answers what a client sends again, and may say when to come back."""
    error = crowded(channel)
    assert error.code() in {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE}
    info = retry_info(error)
    assert info is not None
    assert 0 < info.retry_delay.seconds + info.retry_delay.nanos / 1e9 < 3600
