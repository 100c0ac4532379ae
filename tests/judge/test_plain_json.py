"""One serialiser for everything that is stored: what is written is read back, whatever its numbers are."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kc_otel.contract.policy import Action
from kc_otel.judge.decisions import Canary, DecisionTable, Directive, Pin, Route
from kc_otel.judge.escalation.alerts import Acknowledgement, Alert, People, PolicyState, Silence
from kc_otel.judge.plain_json import read_json, read_plain, to_json, to_plain
from kc_otel.judge.promotion.stages import Hold, Position, Promotion, Tally
from kc_otel.judge.recorders import KernelInfo
from kc_otel.judge.verdict import Cell, Verdict

STORED = (
    Acknowledgement, Alert, Canary, Cell, DecisionTable, Directive, Hold, KernelInfo, People,
    Pin, PolicyState, Position, Promotion, Route, Silence, Tally, Verdict,
)  # fmt: skip

st.register_type_strategy(float, st.floats())
st.register_type_strategy(
    Action,
    st.sampled_from(["notify", "halt", {"webhook": "pager"}, {"route": "train-kernel"}]).map(Action.model_validate),
)


def same(left: Any, other: Any) -> bool:
    """Equal, where nan is nan; and of the same type."""
    if dataclasses.is_dataclass(left):
        return type(left) is type(other) and all(
            same(getattr(left, field.name), getattr(other, field.name)) for field in dataclasses.fields(left)
        )
    if isinstance(left, tuple | list):
        return type(left) is type(other) and len(left) == len(other) and all(map(same, left, other))
    if isinstance(left, dict):
        return left.keys() == other.keys() and all(same(value, other[name]) for name, value in left.items())
    if isinstance(left, float) and math.isnan(left):
        return isinstance(other, float) and math.isnan(other)
    return type(left) is type(other) and left == other


@pytest.mark.slow
@pytest.mark.parametrize("kind", STORED)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_what_is_stored_is_read_back(kind: type, data: st.DataObject) -> None:
    """Of every persisted dataclass, every value: nan and infinities, empty texts, control characters, enumerations."""
    value = data.draw(st.from_type(kind))
    text = to_json(value)
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert same(read_json(kind, text), value)
    assert same(read_plain(kind, to_plain(value)), value)


def test_what_a_later_version_added_is_ignored() -> None:
    """A field that is not known here costs nothing; one that is missing is an error that names it."""
    plain = {"stage": "canary", "share": 0.05, "colour": "red"}
    assert str(read_plain(Position, plain)) == "canary at 5%"
    with pytest.raises(ValueError, match="stage"):
        read_plain(Position, {"share": 0.05})
