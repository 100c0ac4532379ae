"""OTLP/HTTP: what is taken, and how that is said."""

from __future__ import annotations

import gzip
from typing import Any

import pytest

from tests.conformance.clients import HttpClient
from tests.conformance.payloads import ENCODINGS, JSON, METRICS, NEW_FIELD, PROTOBUF, SIGNALS, Signal

EMPTY = {PROTOBUF: b"", JSON: b"{}"}
pytestmark = pytest.mark.parametrize("encoding", ENCODINGS, ids=["protobuf", "json"])
of_each_signal = pytest.mark.parametrize("signal", SIGNALS, ids=lambda signal: signal.name)


def taken_in_full(http: HttpClient, signal: Signal, body: bytes, encoding: str, **headers: str) -> Any:
    answer = http.post(signal.path, body, encoding, **headers)
    assert answer.status == 200, answer
    message = answer.message(signal.response)
    assert not message.HasField("partial_success"), message
    return answer


@of_each_signal
@pytest.mark.must("OTLP/HTTP Response, Full Success")
def test_success(http: HttpClient, signal: Signal, encoding: str) -> None:
    """Data on a default path is answered with 200, the signal's response message, and no partial success in it."""
    taken_in_full(http, signal, signal.body(encoding), encoding)


@of_each_signal
@pytest.mark.must("OTLP/HTTP Response")
def test_content_type_of_success(http: HttpClient, signal: Signal, encoding: str) -> None:
    """The answer has the content type of the request."""
    assert http.post(signal.path, signal.body(encoding), encoding).media == encoding


@of_each_signal
@pytest.mark.must("Protocol Details")
def test_gzip(http: HttpClient, signal: Signal, encoding: str) -> None:
    """A body that is compressed with gzip is taken like any other."""
    taken_in_full(http, signal, gzip.compress(signal.body(encoding)), encoding, content_encoding="gzip")


@of_each_signal
@pytest.mark.should("OTLP/HTTP Response, Full Success")
def test_empty_request(http: HttpClient, signal: Signal, encoding: str) -> None:
    """A request without any telemetry is a success."""
    taken_in_full(http, signal, EMPTY[encoding], encoding)


@pytest.mark.should("OTLP/HTTP Response, Full Success")
def test_empty_request_in_gzip(http: HttpClient, encoding: str) -> None:
    """A compressed request without any telemetry is a success."""
    taken_in_full(http, METRICS, gzip.compress(EMPTY[encoding]), encoding, content_encoding="gzip")


@pytest.mark.may("Empty Telemetry Envelopes")
def test_empty_envelopes(http: HttpClient, encoding: str) -> None:
    """A resource without scopes and a scope without metrics may be ignored; they are no error."""
    message = METRICS.request()
    message.resource_metrics.add()
    message.resource_metrics.add().scope_metrics.add()
    tree = b'{"resourceMetrics":[{},{"scopeMetrics":[{}]}]}'
    taken_in_full(http, METRICS, message.SerializeToString() if encoding == PROTOBUF else tree, encoding)


@of_each_signal
@pytest.mark.must("Future Versions and Interoperability; JSON Protobuf Encoding")
def test_unknown_fields(http: HttpClient, signal: Signal, encoding: str) -> None:
    """A field that no version knows yet is ignored, and the rest is taken as if it were not there."""
    body = signal.body(encoding)
    later = body + NEW_FIELD if encoding == PROTOBUF else b'{"newField":{"deep":[1]},' + body[1:]
    taken_in_full(http, signal, later, encoding)


@pytest.mark.should("All Other Responses; RFC 9110, 8.3.1")
@pytest.mark.parametrize("spelling", ["parameter", "upper case"])
def test_spelling_of_the_content_type(http: HttpClient, encoding: str, spelling: str) -> None:
    """A content type is one whatever its case and its parameters."""
    given = f"{encoding}; charset=utf-8" if spelling == "parameter" else encoding.upper()
    assert http.post(METRICS.path, METRICS.body(encoding), given).status == 200


@pytest.mark.must("RFC 9112, 7.1")
def test_chunks(http: HttpClient, encoding: str) -> None:
    """A body that comes in chunks, its length unknown before, is taken."""
    body = METRICS.body(encoding)
    parts = iter([body[:10], body[10:11], body[11:]])
    answer = http.send("POST", METRICS.path, parts, content_type=encoding, transfer_encoding="chunked")
    assert answer.status == 200, answer
