"""Numbers with units, and which sequence belongs to which slice."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kc_otel.contract.slices import parse_condition
from kc_otel.contract.units import format_duration, parse_duration, parse_limit


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("5m", 300.0),
        ("300s", 300.0),
        ("1h30m", 5400.0),
        ("800ms", 0.8),
        ("35ms", 0.035),
        ("1d", 86400.0),
        ("1.5s", 1.5),
    ],
)
def test_durations_are_seconds(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "5", 5, "m", "5 m", "-5m", "5y", None, "9" * 400 + "d"])
def test_what_is_not_a_duration_is_refused(text):
    with pytest.raises(ValueError, match="write"):
        parse_duration(text)


@pytest.mark.parametrize("text", ["500 ms", " 500ms", "5 m 30 s"])
def test_a_space_in_a_duration_is_said(text):
    closed = "".join(text.split())
    with pytest.raises(ValueError, match=f"write it without spaces: {closed}"):
        parse_duration(text)
    if text == text.strip():
        with pytest.raises(ValueError, match=f"write it without spaces: {closed}"):
            parse_limit(text, "s")


@given(st.integers(0, 400 * 86400 * 10**9))
def test_durations_survive_being_written(nanoseconds):
    seconds = nanoseconds / 1e9
    assert parse_duration(format_duration(seconds)) == pytest.approx(seconds, abs=1e-9)


@pytest.mark.parametrize(
    ("raw", "unit", "value"),
    [
        (0.004, "1", 0.004),
        ("0.7%", "1", 0.007),
        ("4e-3", "{nat}", 0.004),
        ("800ms", "s", 0.8),
        (2, "s", 2.0),
        (" 3 ", "1", 3.0),
    ],
)
def test_limits_are_in_the_unit_of_the_metric(raw, unit, value):
    assert parse_limit(raw, unit) == value


@pytest.mark.parametrize(
    ("raw", "unit"), [("2%", "s"), ("2%", "{nat}"), ("5m", "1"), ("x", "1"), (True, "1"), ([], "1")]
)
def test_limits_of_another_dimension_are_refused(raw, unit):
    with pytest.raises(ValueError, match=r"number"):
        parse_limit(raw, unit)


@pytest.mark.parametrize(
    ("raw", "inside", "outside"),
    [
        ("code", ["code"], ["prose", "Code ", None, 3]),
        (["code", "math"], ["code", "math"], ["prose"]),
        (">= 8192", [8192, 9000.5], [8191, "9000", True, None]),
        ("> 1, <= 2", [1.5, 2], [1, 2.5]),
        ("!= en", ["de", 3], ["en", None]),
        ("== 3", [3, 3.0], [4]),
        (True, [True, "true", "True"], [False, "yes"]),
    ],
)
def test_conditions_hold_for_what_they_say(raw, inside, outside):
    conditions = parse_condition(raw)
    assert all(all(condition.holds(value) for condition in conditions) for value in inside)
    assert not any(all(condition.holds(value) for condition in conditions) for value in outside)


def test_a_contract_puts_sequences_into_slices(contract):
    sound = contract("slices:", "  long: {where: {n: '>= 8'}}", "  code: {where: {task: code}}")
    assert sound.slices_of({"n": 9, "task": "code"}) == ("all", "long", "code")
    assert sound.slices_of({"n": 9}) == ("all", "long")
    assert sound.slices_of({}) == ("all",)
