"""Clauses that are judged by sequence, in the words of dashboards and rules."""

from kc_otel.contract import Clause, Contract
from kc_otel.contract.sentences import promise
from kc_otel.generate.alert_steps import alert_steps
from kc_otel.generate.prometheus.alerting_rules import expression


def test_a_promise_says_what_counts_once() -> None:
    """By sequence it says how a sequence counts, and is about the slice; by token it is about those of the window."""
    clause = Clause(id="tv", metric="tv_token", unit="token", limit=0.05)
    by_sequence = clause.model_copy(update={"unit": "sequence"})
    assert promise(by_sequence).startswith("Mean of tv_token by sequence must not be above 0.05. ")
    assert promise(by_sequence).endswith(
        "Each sequence counts once, with the mean over its tokens. "
        "A verdict is about the population: what the slice will show."
    )
    assert "sequence" not in promise(clause)
    assert promise(clause).endswith(
        "A verdict is about the traffic: what its window saw only; tokens to come may differ by more than its "
        "confidence says."
    )


def test_rules_of_both_units_differ_in_words_only(policy: Contract) -> None:
    """A rule reads the clause's verdict, whatever the verdict was made from."""
    first, *others = policy.statistical
    other = policy.model_copy(update={"statistical": (first.model_copy(update={"unit": "sequence"}), *others)})
    assert [expression(alert) for alert in alert_steps(policy)] == [expression(alert) for alert in alert_steps(other)]
    assert [alert.promise for alert in alert_steps(policy)] != [alert.promise for alert in alert_steps(other)]
