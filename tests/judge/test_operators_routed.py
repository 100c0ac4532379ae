"""Points of operators on their way to clauses: each to its own operator's, and nothing to anybody else's."""

from __future__ import annotations

import pytest

from kc_otel.judge.evaluator import Evaluator
from kc_otel.judge.verdict import Status
from tests.tools.verdicts import verdicts_of, windows_of

METRIC = "kc.drift.operator_ulp"
CLAUSES = [
    {"id": "attention", "metric": "operator_ulp", "operator": "attention", "statistic": "p90", "limit": 4},
    {"id": "mlp", "metric": "operator_ulp", "operator": "layers.0.mlp", "statistic": "p90", "limit": 4},
]


@pytest.fixture
def of(sender):
    """A sender of one operator's ULPs."""

    def make(operator, slice="all", metric=METRIC):
        made = sender(metric, slice=slice)
        made.attributes |= {} if operator is None else {"kc.operator": operator}
        return made

    return make


@pytest.fixture
def judged(contract):
    """An evaluator of a contract with a clause on each of two operators."""
    return Evaluator([contract(numerical=CLAUSES, statistical=[])])


def statuses(evaluator, now):
    return {
        (verdict.cell.clause, verdict.cell.slice): verdict
        for verdict in verdicts_of(evaluator, now)
        if verdict.status is not Status.NO_DATA
    }


def test_each_clause_judges_its_own_operator(judged, of, now):
    """A bad operator fails exactly its clause, on its slice; the other operator's clause passes on the same metric."""
    for operator, slice, values in (
        ("attention", "all", [0.5] * 500 + [1.0] * 500),
        ("layers.0.mlp", "all", [0.5] * 500 + [64.0] * 500),
        ("attention", "code", [0.5] * 500),
        ("layers.0.mlp", "code", [64.0] * 500),
        ("nobody.asked", "all", [1e6] * 1000),
    ):
        outcome = judged.ingest_metrics(of(operator, slice).request(now + 1, values), now + 1)
        assert outcome.rejected == 0, outcome
    found = statuses(judged, now + 2)
    assert {cell: verdict.status for cell, verdict in found.items()} == {
        ("attention", "all"): Status.PASS,
        ("attention", "code"): Status.PASS,
        ("mlp", "all"): Status.FAIL,
        ("mlp", "code"): Status.FAIL,
    }
    assert found["mlp", "all"].samples == 1000
    assert {key.metric for key in judged.states["policy"].series} == {
        f"{METRIC}[{name}]" for name in ("attention", "layers.0.mlp", "nobody.asked")
    }


def test_points_that_name_no_operator_are_refused(judged, of, now):
    for operator, said in (
        (None, "it has no attribute kc.operator"),
        ("", "'' cannot name an operator"),
        ("x" * 200, "cannot name an operator"),
        ("a b", "'a b' cannot name an operator"),
    ):
        outcome = judged.ingest_metrics(of(operator).request(now + 1, [1.0]), now + 1)
        assert outcome.rejected == 1
        assert METRIC in outcome.message
        assert said in outcome.message
    assert judged.series_count == 0
    assert judged.counters == {"malformed": 4}


def test_the_attribute_means_nothing_on_other_metrics(contract, of, now):
    evaluator = Evaluator([contract()])
    evaluator.ingest_metrics(of("attention", metric="kc.drift.tv_token").request(now + 1, [0.001] * 200), now + 1)
    assert [key.metric for key in evaluator.states["policy"].series] == ["kc.drift.tv_token"]


def test_a_clause_without_its_operator_says_which_ones_arrive(judged, of, now):
    (verdict, *_) = verdicts_of(judged, now)
    assert "nothing received for kc.drift.operator_ulp[attention] yet" in verdict.reason
    for name in ("atention", *(f"layers.{i}.mlp" for i in range(1, 7))):
        judged.ingest_metrics(of(name).request(now + 1, [1.0]), now + 1)
    (verdict, *_) = verdicts_of(judged, now + 2)
    assert verdict.status is Status.NO_DATA
    assert verdict.reason == (
        "nothing received for kc.drift.operator_ulp[attention], only for atention, layers.1.mlp, layers.2.mlp, "
        "layers.3.mlp, layers.4.mlp and 2 more; do the names in both places agree?"
    )


def test_operators_without_end_take_no_memory_without_end(contract, of, now):
    """Names are the senders': over the cap they are counted together, and forgotten once no window holds them."""
    made = contract(
        numerical=CLAUSES,
        statistical=[],
        observability={"window": "5m", "long_window": "1h", "min_samples": 100, "max_series": 10},
    )
    evaluator = Evaluator([made])
    state = evaluator.states["policy"]
    for number in range(100):
        name = f"layers.{number}.mlp" if number else "attention"
        evaluator.ingest_metrics(of(name).request(now + 1, [1.0] * 3), now + 1)
    assert evaluator.series_count == 11
    assert evaluator.events["series_over_cap"] == 90
    (other,) = (key for key in state.series if key.slice == "other")
    assert (other.metric, other.kernel_train, other.kernel_inference) == (METRIC, "", "")
    assert windows_of(evaluator, now + 1)["policy", other].total == 90 * 3
    assert len(state.newest) == 10  # what is counted together is no kernels'
    evaluator.evaluate(now + 7200)
    assert evaluator.series_count == 0
    assert set(state.newest) == {f"{METRIC}[attention]"}
