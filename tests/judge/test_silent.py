"""What has been silent for too long is forgotten when it is, though nobody looks for it all the time."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from kc_otel.judge.evaluator import Evaluator
from kc_otel.judge.series import SeriesTable
from tests.judge.conftest import NOW, Sender, make_contract, merge

steps = st.lists(
    st.tuples(
        st.sampled_from([1.0, 10.0, 40.0, 100.0, 300.0, 500.0, -8.0, -200.0]),
        st.sets(st.integers(0, 5)),
        st.sampled_from([0.0, 0.0, 0.0, 50.0, 250.0]),
    ),
    min_size=1,
    max_size=25,
)


@pytest.mark.slow
@settings(max_examples=60, deadline=None, phases=[Phase.explicit, Phase.generate])
@pytest.mark.parametrize("columns", [False, True])
@given(steps)
@example(
    [*((pause, {0}, 0.0) for pause in (10.0, 300.0, 100.0)), (1.0, {3}, 250.0), (100.0, {0}, 0.0), (40.0, {0}, 0.0)]
)
def test_the_same_is_forgotten_as_if_everything_were_looked_at_each_time(columns: bool, taken: Any) -> None:
    """Streams, series, pairs of kernels and the newest of each metric, also of late points and clocks that go back."""
    made = make_contract(observability={"window": "1m", "long_window": "5m", "min_samples": 30, "max_series": 5})
    evaluators, now, begun = [Evaluator([made]), Evaluator([made])], NOW, list[Any]()
    (state, other) = (evaluator.states[made.name] for evaluator in evaluators)
    other.has_silent = lambda _now: True  # type: ignore[method-assign]
    senders = [Sender(slice=slice, inference=kernel * 12) for slice in ("all", "code") for kernel in "bcd"]
    for evaluator in evaluators if columns else ():
        evaluator.use_columns()
    begin = SeriesTable.begin

    def counted(table: SeriesTable, key: Any) -> Any:
        begun.extend([key] * (table is state._table))
        return begin(table, key)

    with patch.object(SeriesTable, "begin", counted):
        for pause, speaking, late in taken:
            now += pause
            if speaking:
                for index in speaking:
                    if not senders[index].samples:
                        senders[index].restart(now - late - 1.0)
                request = merge(*(senders[index].request(now - late, np.full(9, 0.01)) for index in sorted(speaking)))
                for evaluator in evaluators:
                    body = evaluator.columns_of(request.SerializeToString(), 1000) if columns else None
                    evaluator.ingest_metrics(request if body is None else body, now)
            for evaluator in evaluators:
                evaluator.evaluate(now)
            assert state.events["series_evicted"] == len(begun) - len(state.series)
            assert state.streams.keys() == other.streams.keys()
            assert state.series.keys() == other.series.keys()
            assert state.heard.keys() == other.heard.keys()
            assert state.newest == other.newest
            assert state.events == other.events


@pytest.mark.slow
def test_a_slice_is_absent_from_when_no_pane_of_the_long_window_has_it() -> None:
    """Not one pane sooner or later: until then there is something to judge; then the reason says that nothing came."""
    made = make_contract(observability={"window": "1m", "long_window": "5m", "min_samples": 30})
    evaluator, clause, pane = Evaluator([made]), made.clauses[0].id, 300.0 / 12
    every, code = Sender(slice="all"), Sender(slice="code")
    evaluator.ingest_metrics(code.request(NOW, np.full(90, 0.01)), NOW)
    gone = (NOW // pane + 12) * pane
    seen = {}
    for now in np.arange(NOW, gone + 2 * pane, 5.0).tolist():
        evaluator.ingest_metrics(every.request(now, np.full(90, 0.01)), now)
        (verdict,) = (row for row in evaluator.evaluate(now)[made.name].verdicts if row.cell[1:3] == (clause, "code"))
        seen[now] = verdict.reason.startswith("no observations of")
    assert seen == {now: now >= gone for now in seen}
    assert {*seen.values()} == {False, True}
