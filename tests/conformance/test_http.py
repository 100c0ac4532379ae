"""OTLP/HTTP: what is taken and how that is said, and what is refused, in the request's own encoding."""

from __future__ import annotations

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
    TRACES,
    Signal,
    encoded,
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
@pytest.mark.should("OTLP/HTTP Response, Full Success")
def test_empty_request(http: HttpClient, signal: Signal, encoding: str) -> None:
    """A request without any telemetry, compressed or not, is a success."""
    taken_in_full(http, signal, EMPTY[encoding], encoding)
    taken_in_full(http, signal, gzip.compress(EMPTY[encoding]), encoding, content_encoding="gzip")


@of_each_encoding
@pytest.mark.may("Empty Telemetry Envelopes")
def test_empty_envelopes(http: HttpClient, encoding: str) -> None:
    """A resource without scopes and a scope without metrics may be ignored; they are no error."""
    message = METRICS.request()
    message.resource_metrics.add()
    message.resource_metrics.add().scope_metrics.add()
    tree = b'{"resourceMetrics":[{},{"scopeMetrics":[{}]}]}'
    taken_in_full(http, METRICS, message.SerializeToString() if encoding == PROTOBUF else tree, encoding)


@of_each_encoding
@of_each_signal
@pytest.mark.must("Future Versions and Interoperability; JSON Protobuf Encoding")
def test_unknown_fields(http: HttpClient, signal: Signal, encoding: str) -> None:
    """A field that no version knows yet is ignored, and the rest is taken as if it were not there."""
    body = signal.body(encoding)
    later = body + NEW_FIELD if encoding == PROTOBUF else b'{"newField":{"deep":[1]},' + body[1:]
    taken_in_full(http, signal, later, encoding)


@of_each_encoding
@pytest.mark.should("All Other Responses; RFC 9110, 8.3.1")
@pytest.mark.parametrize("spelling", ["parameter", "upper case"])
def test_spelling_of_the_content_type(http: HttpClient, encoding: str, spelling: str) -> None:
    """A content type is one whatever its case and its parameters."""
    given = f"{encoding}; charset=utf-8" if spelling == "parameter" else encoding.upper()
    assert http.post(METRICS.path, METRICS.body(encoding), given).status == 200


@of_each_encoding
@pytest.mark.must("RFC 9112, 7.1")
def test_chunks(http: HttpClient, encoding: str) -> None:
    """A body that comes in chunks, its length unknown before, is taken."""
    body = METRICS.body(encoding)
    parts = iter([body[:10], body[10:11], body[11:]])
    answer = http.send("POST", METRICS.path, parts, content_type=encoding, transfer_encoding="chunked")
    assert answer.status == 200, answer


def points(tree: dict[str, Any]) -> int:
    """Data points of a request."""
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
@of_each_signal
@pytest.mark.must("OTLP/HTTP Response, Failures; Bad Data")
def test_bad_data(http: HttpClient, signal: Signal, encoding: str) -> None:
    """What cannot be decoded is a 400, which no client sends again, with a google.rpc.Status in its own encoding.

    It should have a message for a developer, and a google.rpc.BadRequest among its details.
    """
    answer = http.post(signal.path, BAD[encoding], encoding)
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


@pytest.mark.must("OTLP/HTTP Response, Bad Data")
@pytest.mark.parametrize("body", [b"[]", b'"x"', b"5", b"{} {}", b"\xff\xfe", b'{"resourceMetrics":{}}'])
def test_json_that_is_no_message(http: HttpClient, body: bytes) -> None:
    """What is no JSON object, or another than the message's, is bad data."""
    assert http.post(METRICS.path, body, JSON).status == 400


@pytest.mark.must("OTLP/HTTP Response, Bad Data")
def test_deep_json(http: HttpClient) -> None:
    """JSON that is nested deeper than anything of OTLP is bad data, not a fault of the server."""
    deep = b'{"newField":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    assert http.post(METRICS.path, deep, JSON).status in {200, 400}


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
@pytest.mark.parametrize("field", ["traceId", "kind", "startTimeUnixNano", "name", "attributes"])
def test_limit_of_answers(http: HttpClient, field: str) -> None:
    """An answer stays under 4 MiB, also where it is about something larger in the request."""
    wrong: Any = ["x" * (6 << 20)] if field == "name" else "x" * (6 << 20)
    answer = http.post(TRACES.path, json.dumps(TRACES.changed(**{field: wrong})).encode(), JSON)
    assert len(answer.body) < 4 << 20


@pytest.mark.must("OTLP/HTTP Response, Failures")
@pytest.mark.parametrize(
    ("media", "encoding"), [("text/plain", ""), ("application/xml", ""), ("", ""), (PROTOBUF, "rot13"), (JSON, "rot13")]
)
def test_other_types_and_encodings(http: HttpClient, media: str, encoding: str) -> None:
    """A content type or encoding that the server does not have is a 4xx with a google.rpc.Status."""
    headers = {"content_encoding": encoding} if encoding else {}
    answer = http.post(METRICS.path, METRICS.body(media if media in ENCODINGS else PROTOBUF), media, **headers)
    assert 400 <= answer.status < 500
    answer.problem()


@of_each_encoding
@pytest.mark.must("OTLP/HTTP Response, Failures")
def test_other_paths(http: HttpClient, encoding: str) -> None:
    """A path that is not there is answered with 404 and a google.rpc.Status."""
    answer = http.post("/v1/weather", METRICS.body(encoding), encoding)
    assert answer.status == 404
    answer.problem()


@of_each_signal
@pytest.mark.must("RFC 9110, 15.5.6")
def test_other_methods(http: HttpClient, signal: Signal) -> None:
    """A path of OTLP takes POST; another method is answered with 405 and the header Allow."""
    answer = http.send("GET", signal.path)
    assert (answer.status, answer.headers.get("allow")) == (405, "POST")
