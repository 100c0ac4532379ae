"""What has been silent for too long is forgotten when it is, though nobody looks for it all the time."""

from __future__ import annotations

import numpy as np
import pytest

from kc_otel.judge.evaluator import Evaluator
from tests.judge.conftest import NOW, Sender, make_contract


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
