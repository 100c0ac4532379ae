"""Conditions as sets of values, against trying values one by one."""

from hypothesis import assume, given
from hypothesis import strategies as st

from kc_otel.contract.regions import covers, disjoint, satisfiable
from kc_otel.contract.slices import match, parse_condition

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
    """Conditions are satisfiable exactly when some value satisfies them."""
    conditions = parse_condition(raw)
    tried = any(all(condition.holds(value) for condition in conditions) for value in _GRID)
    assert satisfiable(conditions) == tried


@given(_WHERE, _WHERE)
def test_covers_agrees_with_trying_values(wide, narrow):
    """One slice covers another exactly when no sequence is in the other only."""
    wide, narrow = _parsed(wide), _parsed(narrow)
    assume(all(satisfiable(conditions) for conditions in narrow.values()))
    escapes = any(
        match(narrow, {"x": x, "y": y}) and not match(wide, {"x": x, "y": y})
        for x in (*_GRID, None)
        for y in (*_GRID, None)
        if x is not None or y is not None
    )
    assert covers(wide, narrow) != escapes


def test_a_slice_covers_itself_and_not_a_wider_one():
    """The plain cases."""
    long, longer = _parsed({"n": ">= 8"}), _parsed({"n": "> 8, < 20"})
    assert covers(long, long)
    assert covers(long, longer)
    assert not covers(longer, long)
    assert covers({}, long)
    assert not covers(long, {})


def test_open_and_closed_ends_are_told_apart():
    """An end that is excluded, by > or by !=, is not covered by one that is included the other way round."""
    assert not covers(_parsed({"n": "> 3"}), _parsed({"n": ">= 3"}))
    assert not covers(_parsed({"n": "< 3"}), _parsed({"n": "<= 3"}))
    assert covers(_parsed({"n": ">= 3"}), _parsed({"n": "> 3"}))
    assert covers(_parsed({"n": "> 3"}), _parsed({"n": ">= 3, != 3"}))
    assert covers(_parsed({"n": "< 3"}), _parsed({"n": "<= 3, != 3"}))
    assert covers(_parsed({"n": "!= 3"}), _parsed({"n": "> 3"}))
    assert not covers(_parsed({"n": "!= 3"}), _parsed({"n": ">= 3"}))


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
