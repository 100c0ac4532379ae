"""OTLP/JSON: where it differs from protobuf's own mapping to JSON, and what that mapping asks of a reader."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.conformance.clients import Answer, HttpClient
from tests.conformance.payloads import JSON, LOGS, METRICS, SIGNALS, TIME, TRACES, Signal

SECTION = "JSON Protobuf Encoding"


def sent(http: HttpClient, signal: Signal, tree: Any) -> Answer:
    return http.post(signal.path, json.dumps(tree).encode(), JSON)


def taken_in_full(answer: Answer, signal: Signal) -> bool:
    return answer.status == 200 and not answer.message(signal.response).HasField("partial_success")


@pytest.mark.must(SECTION)
@pytest.mark.parametrize("signal", [TRACES, LOGS], ids=lambda signal: signal.name)
@pytest.mark.parametrize("spell", [str.upper, str.lower], ids=["upper", "lower"])
def test_ids_are_hex(http: HttpClient, signal: Signal, spell: Any) -> None:
    """Trace and span ids are hex, in upper or lower case."""
    ids = {"traceId": spell("5B8EFFF798038103D269B633813FC60C"), "spanId": spell("EEE19B7EC3C1B174")}
    assert taken_in_full(sent(http, signal, signal.changed(**ids)), signal)


@pytest.mark.must(SECTION)
@pytest.mark.parametrize("signal", [TRACES, LOGS], ids=lambda signal: signal.name)
@pytest.mark.parametrize("id", ["W47/95gDgQPSabYzgT/GDA==", "5B8EFFF798038103D269B633813FC60"], ids=["base64", "odd"])
def test_ids_are_nothing_else(http: HttpClient, signal: Signal, id: str) -> None:
    """A trace id in base64, or in half a byte more or less, is not taken as one."""
    answer = sent(http, signal, signal.changed(traceId=id))
    assert not taken_in_full(answer, signal)
    assert answer.status in {200, 400}, answer


@pytest.mark.must(SECTION)
@pytest.mark.parametrize("spell", [str, int], ids=["string", "number"])
@pytest.mark.parametrize("signal", SIGNALS, ids=lambda signal: signal.name)
def test_64_bit_integers(http: HttpClient, signal: Signal, spell: Any) -> None:
    """A 64-bit integer is a decimal string; a number is taken as well."""
    field = "startTimeUnixNano" if signal is TRACES else "timeUnixNano"
    assert taken_in_full(sent(http, signal, signal.changed(**{field: spell(TIME)})), signal)


@pytest.mark.must("OTLP/HTTP Response, Bad Data")
@pytest.mark.parametrize(
    "value", ["noon", "18446744073709551616", "-1", {}], ids=["word", "2^64", "negative", "object"]
)
def test_what_is_no_64_bit_integer(http: HttpClient, value: Any) -> None:
    """What is no unsigned integer of 64 bits is bad data where a time is meant."""
    answer = sent(http, METRICS, METRICS.changed(timeUnixNano=value))
    assert answer.status == 400, answer


@pytest.mark.must(SECTION)
def test_enums_are_integers(http: HttpClient) -> None:
    """Values of enums come as integers."""
    assert taken_in_full(sent(http, TRACES, TRACES.changed(kind=3, status={"code": 2})), TRACES)
    assert taken_in_full(sent(http, LOGS, LOGS.changed(severityNumber=17)), LOGS)


@pytest.mark.must("Future Versions and Interoperability")
def test_enums_of_later_versions(http: HttpClient) -> None:
    """An integer that no value of the enum has yet is no reason to refuse the request."""
    assert taken_in_full(sent(http, TRACES, TRACES.changed(kind=77)), TRACES)


@pytest.mark.must(SECTION)
@pytest.mark.parametrize("signal", SIGNALS, ids=lambda signal: signal.name)
@pytest.mark.parametrize(
    "value", [None, 1, "x", [1], {"a": {"b": []}}], ids=["null", "number", "text", "list", "object"]
)
def test_unknown_keys(http: HttpClient, signal: Signal, value: Any) -> None:
    """An unknown key is ignored wherever it stands and whatever its value is."""
    tree = signal.changed(newField=value)
    tree["anotherField"] = value
    assert taken_in_full(sent(http, signal, tree), signal)


@pytest.mark.must(SECTION)
@pytest.mark.parametrize("signal", SIGNALS, ids=lambda signal: signal.name)
def test_keys_are_lower_camel_case(http: HttpClient, signal: Signal) -> None:
    """Keys in lowerCamelCase are understood: what cannot be under such a key is bad data and not an unknown field."""
    (key,) = signal.json
    answer = sent(http, signal, {key: 5})
    assert answer.status == 400, answer


@pytest.mark.must("JSON Protobuf Encoding; protobuf's JSON mapping")
@pytest.mark.parametrize("signal", SIGNALS, ids=lambda signal: signal.name)
def test_null_is_the_default(http: HttpClient, signal: Signal) -> None:
    """A field that is null has its default value, as if it were not there."""
    assert taken_in_full(sent(http, signal, signal.changed(attributes=None)), signal)


@pytest.mark.must("JSON Protobuf Encoding; protobuf's JSON mapping")
@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", 1e-300, "1.5"])
def test_doubles(http: HttpClient, value: Any) -> None:
    """A double is a number, a string that is one, or one of NaN, Infinity and -Infinity as strings."""
    tree = METRICS.changed(asDouble=value)
    METRICS.item(tree).pop("asInt")
    answer = sent(http, METRICS, tree)
    assert answer.status == 200, answer


@pytest.mark.must("JSON Protobuf Encoding; RFC 8259, 8.1")
def test_text_is_unicode(http: HttpClient) -> None:
    """Text beyond ASCII is taken, escaped and as UTF-8."""
    tree = LOGS.changed(body={"stringValue": "Ω 😀"})
    assert taken_in_full(sent(http, LOGS, tree), LOGS)
    answer = http.post(LOGS.path, json.dumps(tree, ensure_ascii=False).encode(), JSON)
    assert taken_in_full(answer, LOGS)
