"""OTLP/JSON: where it differs from protobuf's own mapping to JSON, and what that mapping asks of a reader."""

import json
from typing import Any

import pytest

from tests.conformance.clients import Answer, HttpClient
from tests.conformance.payloads import JSON, LOGS, METRICS, SIGNALS, TIME, TRACES, Signal

IDS = {"traceId": "5B8EFFF798038103D269B633813FC60C", "spanId": "EEE19B7EC3C1B174"}
TEXT = {"body": {"stringValue": "Ω 😀"}}
WHEN = {"metrics": "timeUnixNano", "traces": "startTimeUnixNano", "logs": "timeUnixNano"}
TAKEN: dict[str, list[tuple[Signal, dict[str, Any]]]] = {
    "ids are hex, in upper or lower case": [
        (signal, {name: spell(id) for name, id in IDS.items()})
        for signal in (TRACES, LOGS)
        for spell in (str.upper, str.lower)
    ],
    "a 64-bit integer is a decimal string, or a number": [
        (signal, {WHEN[signal.name]: spell(TIME)}) for signal in SIGNALS for spell in (str, int)
    ],
    "values of enums are integers, also those that no version has yet": [
        (TRACES, {"kind": 3, "status": {"code": 2}}),
        (TRACES, {"kind": 77}),
        (LOGS, {"severityNumber": 17}),
    ],
    "an unknown key is ignored, whatever its value": [
        (signal, {"newField": value}) for signal in SIGNALS for value in (None, 1, "x", [1], {"a": {"b": []}})
    ],
    "a field that is null has its default value": [(signal, {"attributes": None}) for signal in SIGNALS],
    "a double is a number, or a string that is one, NaN or an infinity": [
        (METRICS, {"asInt": None, "asDouble": value}) for value in ("NaN", "Infinity", "-Infinity", 1e-300, "1.5")
    ],
    "text may be escaped": [(LOGS, TEXT)],
}


def taken_in_full(answer: Answer, signal: Signal) -> bool:
    return answer.status == 200 and not answer.message(signal.response).HasField("partial_success")


@pytest.mark.must("JSON Protobuf Encoding; Future Versions and Interoperability; protobuf's JSON mapping")
@pytest.mark.parametrize("rule", TAKEN)
def test_what_is_taken(http: HttpClient, rule: str) -> None:
    for signal, fields in TAKEN[rule]:
        answer = http.post(signal.path, json.dumps(signal.changed(**fields)).encode(), JSON)
        assert taken_in_full(answer, signal), (fields, answer)


@pytest.mark.must("JSON Protobuf Encoding; RFC 8259, 8.1")
def test_text_is_unicode(http: HttpClient) -> None:
    """Text beyond ASCII is taken as UTF-8, and an unknown key beside the resources is ignored."""
    tree = {**LOGS.changed(**TEXT), "anotherField": [1]}
    assert taken_in_full(http.post(LOGS.path, json.dumps(tree, ensure_ascii=False).encode(), JSON), LOGS)


@pytest.mark.must("OTLP/HTTP Response, Bad Data")
@pytest.mark.parametrize(
    "tree",
    [
        *(signal.changed(traceId=id) for signal in (TRACES, LOGS) for id in ("W47/95gDgQPSabYzgT/GDA==", "5B8EF")),
        *(METRICS.changed(timeUnixNano=value) for value in ("noon", "18446744073709551616", "-1", {})),
        *({key: 5} for signal in SIGNALS for key in signal.json),  # in lowerCamelCase it is no unknown field
        *([], "x", 5, {"resourceMetrics": {}}),
    ],
)
def test_what_is_bad_data(http: HttpClient, tree: Any) -> None:
    """An id in base64 or of half a byte, no integer of 64 bits, another value than the field's, no object."""
    signal = next((signal for signal in SIGNALS if isinstance(tree, dict) and {*signal.json} & {*tree}), METRICS)
    assert http.post(signal.path, json.dumps(tree).encode(), JSON).status == 400


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
