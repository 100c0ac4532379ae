"""OTLP/HTTP: what is taken and how that is said, and what is refused, in the request's own encoding."""

import gzip
import json
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2

from tests.conformance.clients import HttpClient, call
from tests.conformance.payloads import (
    ENCODINGS,
    JSON,
    METRICS,
    NEW_FIELD,
    NOT_PROTOBUF,
    PROTOBUF,
    SIGNALS,
    Signal,
    encoded,
    metrics_with,
    to_protobuf,
    too_large,
)

EMPTY = {PROTOBUF: b"", JSON: b"{}"}
of_each_encoding = pytest.mark.parametrize("encoding", ENCODINGS, ids=["protobuf", "json"])
of_each_signal = pytest.mark.parametrize("signal", SIGNALS, ids=lambda signal: signal.name)


def taken_in_full(http: HttpClient, signal: Signal, body: bytes, encoding: str, **headers: str) -> Any:
    answer = http.post(signal.path, body, encoding, **headers)
    assert answer.status == 200, answer
    message = answer.message(signal.response)
    assert not message.HasField("partial_success"), message
    return answer


@of_each_encoding
@of_each_signal
@pytest.mark.must("OTLP/HTTP Response, Full Success; Protocol Details")
@pytest.mark.parametrize("compressed", [False, True], ids=["plain", "gzip"])
def test_success(http: HttpClient, signal: Signal, encoding: str, compressed: bool) -> None:
    """Data on a default path, compressed or not, is answered in its own content type, without a partial success."""
    body = signal.body(encoding)
    headers = {"content_encoding": "gzip"} if compressed else {}
    answer = taken_in_full(http, signal, gzip.compress(body) if compressed else body, encoding, **headers)
    assert answer.media == encoding


@of_each_encoding
@of_each_signal
@pytest.mark.must("Future Versions and Interoperability; JSON Protobuf Encoding")
@pytest.mark.should("OTLP/HTTP Response, Full Success; All Other Responses; RFC 9110, 8.3.1")
def test_success_of_unusual_requests(http: HttpClient, signal: Signal, encoding: str) -> None:
    """No telemetry, also compressed, a field that no version knows yet, and another spelling of the content type."""
    body = signal.body(encoding)
    later = body + NEW_FIELD if encoding == PROTOBUF else b'{"newField":{"deep":[1]},' + body[1:]
    taken_in_full(http, signal, EMPTY[encoding], encoding)
    taken_in_full(http, signal, gzip.compress(EMPTY[encoding]), encoding, content_encoding="gzip")
    taken_in_full(http, signal, later, encoding)
    for spelling in (f"{encoding}; charset=utf-8", encoding.upper()):
        assert http.post(signal.path, body, spelling).status == 200


@of_each_encoding
@pytest.mark.may("Empty Telemetry Envelopes")
def test_empty_envelopes(http: HttpClient, encoding: str) -> None:
    """A resource without scopes and a scope without metrics may be ignored; they are no error."""
    tree = {"resourceMetrics": [{}, {"scopeMetrics": [{}]}]}
    taken_in_full(http, METRICS, encoded(METRICS, tree, encoding), encoding)


@of_each_encoding
@pytest.mark.must("RFC 9112, 7.1")
def test_chunks(http: HttpClient, encoding: str) -> None:
    """A body that comes in chunks, its length unknown before, is taken."""
    body = METRICS.body(encoding)
    parts = iter([body[:10], body[10:11], body[11:]])
    answer = http.send("POST", METRICS.path, parts, content_type=encoding, transfer_encoding="chunked")
    assert answer.status == 200, answer


def points(tree: dict[str, Any]) -> int:
    message = METRICS.request.FromString(to_protobuf(METRICS, tree))
    metrics = [m for r in message.resource_metrics for s in r.scope_metrics for m in s.metrics]
    return sum(len(getattr(metric, metric.WhichOneof("data")).data_points) for metric in metrics)


@pytest.fixture(params=[*ENCODINGS, "grpc"], ids=["protobuf", "json", "grpc"])
def answered(request: pytest.FixtureRequest, partly_wrong: dict[str, Any]) -> Any:
    """The response message to metrics of which only a part is taken."""
    if request.param == "grpc":
        channel: grpc.Channel = request.getfixturevalue("channel")
        return METRICS.response.FromString(call(channel, METRICS.method, to_protobuf(METRICS, partly_wrong)))
    http: HttpClient = request.getfixturevalue("http")
    answer = http.post(METRICS.path, encoded(METRICS, partly_wrong, request.param), request.param)
    assert answer.status == 200, answer
    return answer.message(METRICS.response)


@pytest.mark.must("Partial Success")
def test_a_part_is_counted(answered: Any, partly_wrong: dict[str, Any]) -> None:
    """Where a part is taken the answer is a success that counts the data points which were not, and says why."""
    assert answered.HasField("partial_success")
    assert 0 < answered.partial_success.rejected_data_points < points(partly_wrong)
    assert answered.partial_success.error_message, "should"


BAD = {PROTOBUF: NOT_PROTOBUF, JSON: b'{"resourceMetrics": ['}


@of_each_encoding
@pytest.mark.must("OTLP/HTTP Response, Failures; Bad Data")
def test_bad_data(http: HttpClient, encoding: str) -> None:
    """What cannot be decoded is a 400, which no client sends again, with a google.rpc.Status in its own encoding.

    It should have a message for a developer, and a google.rpc.BadRequest among its details.
    """
    answer = http.post(METRICS.path, BAD[encoding], encoding)
    assert (answer.status, answer.media) == (400, encoding)
    assert answer.problem().message
    assert any(detail.Is(error_details_pb2.BadRequest.DESCRIPTOR) for detail in answer.problem().details)


@of_each_encoding
@pytest.mark.must("OTLP/HTTP Response, Bad Data")
@pytest.mark.parametrize("broken", ["not gzip", "cut off"])
def test_broken_gzip(http: HttpClient, encoding: str, broken: str) -> None:
    """A body that is not the gzip it is said to be, or only its beginning, is bad data."""
    body = METRICS.body(encoding)
    wire = body if broken == "not gzip" else gzip.compress(body)[:-9]
    answer = http.post(METRICS.path, wire, encoding, content_encoding="gzip")
    assert answer.status == 400, answer
    answer.problem()


@of_each_encoding
@pytest.mark.must("OTLP/HTTP Request; OTLP/HTTP Response, Failures")
@pytest.mark.parametrize("compressed", [False, True], ids=["plain", "gzip"])
def test_limit(http: HttpClient, target: Any, encoding: str, compressed: bool) -> None:
    """A body over the limit, as sent or inflated, is answered with 413 and a google.rpc.Status in its own encoding."""
    body = too_large(encoding, target.limit + 1024)
    headers = {"content_encoding": "gzip"} if compressed else {}
    answer = http.post(METRICS.path, gzip.compress(body, 1) if compressed else body, encoding, **headers)
    assert (answer.status, answer.media) == (413, encoding)
    answer.problem()


@pytest.mark.must("OTLP/HTTP Response")
@pytest.mark.parametrize("field", ["flags", "asDouble", "startTimeUnixNano", "attributes"])
def test_limit_of_answers(http: HttpClient, field: str) -> None:
    """An answer stays under 4 MiB, also where it is about something larger in the request."""
    answer = http.post(METRICS.path, json.dumps(metrics_with(**{field: "x" * (6 << 20)})).encode(), JSON)
    assert len(answer.body) < 4 << 20


@pytest.mark.must("OTLP/HTTP Response, Failures; RFC 9110, 15.5.6")
@pytest.mark.parametrize(
    ("method", "path", "media", "encoding", "status"),
    [
        *(("POST", METRICS.path, media, "", 415) for media in ("text/plain", "application/xml", "")),
        *(("POST", METRICS.path, media, "rot13", 415) for media in ENCODINGS),
        *(("POST", "/v1/weather", media, "", 404) for media in ENCODINGS),
        *(("GET", signal.path, PROTOBUF, "", 405) for signal in SIGNALS),
    ],
)
def test_what_is_not_there(http: HttpClient, method: str, path: str, media: str, encoding: str, status: int) -> None:
    """Another type, encoding, path or method is refused with a google.rpc.Status; 405 says what is allowed."""
    headers = {"content_encoding": encoding} if encoding else {}
    body = METRICS.body(media if media in ENCODINGS else PROTOBUF) if method == "POST" else None
    answer = http.send(method, path, body, content_type=media, **headers)
    assert (answer.status, answer.headers.get("allow")) == (status, "POST" if status == 405 else None)
    answer.problem()
