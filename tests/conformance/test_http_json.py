"""OTLP/JSON: where it differs from protobuf's own mapping to JSON, and what that mapping asks of a reader."""

import json
from typing import Any

import pytest

from tests.conformance.clients import Answer, HttpClient
from tests.conformance.payloads import JSON, METRICS, TIME, metrics_with

IDS = {"traceId": "5B8EFFF798038103D269B633813FC60C", "spanId": "EEE19B7EC3C1B174"}
TEXT = {"attributes": [{"key": "of", "value": {"stringValue": "Ω 😀"}}]}
TAKEN: dict[str, list[dict[str, Any]]] = {
    "ids are hex, in upper or lower case": [
        {"exemplars": [{**IDS, "traceId": spell(IDS["traceId"])}]} for spell in (str.upper, str.lower)
    ],
    "a 64-bit integer is a decimal string, or a number": [{"timeUnixNano": spell(TIME)} for spell in (str, int)],
    "an unknown key is ignored, whatever its value": [
        {"newField": value} for value in (None, 1, "x", [1], {"a": {"b": []}})
    ],
    "a field that is null has its default value": [{"attributes": None}],
    "a double is a number, or a string that is one, NaN or an infinity": [
        {"asInt": None, "asDouble": value} for value in ("NaN", "Infinity", "-Infinity", 1e-300, "1.5")
    ],
    "text may be escaped": [TEXT],
}


def taken_in_full(answer: Answer) -> bool:
    return answer.status == 200 and not answer.message(METRICS.response).HasField("partial_success")


@pytest.mark.must("JSON Protobuf Encoding; Future Versions and Interoperability; protobuf's JSON mapping")
@pytest.mark.parametrize("rule", TAKEN)
def test_what_is_taken(http: HttpClient, rule: str) -> None:
    for fields in TAKEN[rule]:
        answer = http.post(METRICS.path, json.dumps(metrics_with(**fields)).encode(), JSON)
        assert taken_in_full(answer), (fields, answer)


@pytest.mark.must("JSON Protobuf Encoding; RFC 8259, 8.1")
def test_text_is_unicode(http: HttpClient) -> None:
    """Text beyond ASCII is taken as UTF-8, and an unknown key beside the resources is ignored."""
    tree = {**metrics_with(**TEXT), "anotherField": [1]}
    assert taken_in_full(http.post(METRICS.path, json.dumps(tree, ensure_ascii=False).encode(), JSON))


@pytest.mark.must("OTLP/HTTP Response, Bad Data")
@pytest.mark.parametrize(
    "tree",
    [
        *(metrics_with(timeUnixNano=value) for value in ("noon", "18446744073709551616", "-1", {})),
        *([], "x", 5, {"resourceMetrics": {}}, {"resourceMetrics": 5}),
    ],
)
def test_what_is_bad_data(http: HttpClient, tree: Any) -> None:
    """No integer of 64 bits, another value than the field's, no object."""
    assert http.post(METRICS.path, json.dumps(tree).encode(), JSON).status == 400


@pytest.mark.must("OTLP/HTTP Response, Bad Data")
@pytest.mark.parametrize(
    "body",
    [
        *(b"{", b"{} {}", b"\xff\xfe", b"[" * 100_000, b'{"newField":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
        *(b'{"\\ud800resourceMetrics": []}', b'{"newField": ' + b"9" * 6000 + b"}"),
    ],
    ids=lambda body: f"{len(body)} bytes of {body[:9]!r}",
)
def test_what_is_no_json(http: HttpClient, body: bytes) -> None:
    """Nor what no parser follows, which is no fault of the server."""
    assert http.post(METRICS.path, body, JSON).status == 400
