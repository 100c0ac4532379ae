"""Numbers, units, spans of time and slices: what is read, and how they are worded."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kc_otel.contract import words
from kc_otel.contract.slices import covers, disjoint, match, parse_condition, satisfiable
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


_GRID = [*(number / 2 for number in range(-3, 14)), -1e9, 1e9, "a", "b", "c", "other text"]
_COMPARISON = st.tuples(st.sampled_from([">=", "<=", ">", "<", "!=", "=="]), st.integers(0, 5)).map(
    lambda pair: f"{pair[0]} {pair[1]}"
)
_RAW = st.one_of(
    st.lists(_COMPARISON, min_size=1, max_size=3).map(", ".join),
    st.sampled_from(["a", "!= a", "!= b"]),
    st.integers(0, 5),
    st.lists(st.one_of(st.integers(0, 5), st.sampled_from(["a", "b"])), min_size=1, max_size=3),
)
_WHERE = st.dictionaries(st.sampled_from(["x", "y"]), _RAW, max_size=2)


def _parsed(where):
    return {name: parse_condition(raw) for name, raw in where.items()}


@given(_RAW)
def test_satisfiable_agrees_with_trying_values(raw):
    conditions = parse_condition(raw)
    tried = any(all(condition.holds(value) for condition in conditions) for value in _GRID)
    assert satisfiable(conditions) == tried


@given(_WHERE, _WHERE)
def test_covers_agrees_with_trying_values(wide, narrow):
    wide, narrow = _parsed(wide), _parsed(narrow)
    assume(all(satisfiable(conditions) for conditions in narrow.values()))
    escapes = any(
        match(narrow, {"x": x, "y": y}) and not match(wide, {"x": x, "y": y})
        for x in (*_GRID, None)
        for y in (*_GRID, None)
        if x is not None or y is not None
    )
    assert covers(wide, narrow) != escapes


@given(_WHERE, _WHERE)
def test_disjoint_agrees_with_trying_values(first, second):
    """Slices are disjoint exactly when no request belongs to both; text that spells a number is one."""
    first, second = _parsed(first), _parsed(second)
    shared = any(
        match(first, {"x": x, "y": y}) and match(second, {"x": x, "y": y}) for x in _GRID for y in [*_GRID[:12], "a"]
    )
    assert not (disjoint(first, second) and shared)
    conditions = [*first.get("x", ()), *second.get("x", ())]
    if first.keys() == second.keys() == {"x"}:
        assert disjoint(first, second) == (not satisfiable(conditions))


def test_what_nobody_knows_before_an_answer_keeps_no_slices_apart():
    def parts(name, one, other):
        return disjoint(_parsed({name: one}), _parsed({name: other}))

    assert parts("task", "code", "prose")
    assert not any(parts(name, "< 16", ">= 1024") for name in ("position", "completion_tokens", "lag"))
    assert not parts("size", ["1"], ">= 0")
    assert not parts("size", [1.0], ["1"])


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (words.number(0.12345), "0.123"),
        (words.number(-0.0), "0"),
        (words.number(None), "-"),
        (words.rounded(0.0707106), "0.0707"),
        (words.rounded(4.8828125e-06), "4.88e-06"),
        (words.rounded(16384.2), "16,384"),
        (words.rounded_down(0.003125), "0.00312"),
        (words.rounded_down(0.05), "0.05"),
        (words.with_unit("0.15", "{nat}"), "0.15 nat"),
        (words.with_unit("2", "{step}"), "2 steps"),
        (words.with_unit("0.004", "1"), "0.004"),
        (words.duration(42), "42 s"),
        (words.duration(90000), "1 d 1 h"),
        (words.interval(0.1, None), "0.1 to unbounded"),
        (words.interval(None, None), "-"),
        (words.moment(0), "1970-01-01 00:00:00 UTC"),
        (words.place("all"), "all traffic"),
        (words.listed(["a", "b"]), "a and b"),
        (words.listed(["a", "b", "c", "d", "e"]), "a, b, c and 2 more"),
    ],
)
def test_what_is_written_reads_alike_everywhere(said: str, expected: str) -> None:
    assert said == expected
