"""Clauses that are judged by sequence, in the words of dashboards and rules."""

from kc_otel.contract.clause import Clause
from kc_otel.contract.model import Contract
from kc_otel.contract.sentences import promise, reading
from kc_otel.generate.alert_steps import alert_steps
from kc_otel.generate.prometheus.alerting_rules import expression


def test_a_promise_says_what_counts_once() -> None:
    """By sequence it says how a sequence counts, and covers future traffic; by token, only the measured traffic."""
    clause = Clause(id="tv", metric="tv_token", unit="token", limit=0.05)
    by_sequence = clause.model_copy(update={"unit": "sequence"})
    assert promise(by_sequence).startswith("Mean of tv_token by sequence must not be above 0.05. ")
    assert promise(by_sequence).endswith(
        "Each sequence counts once, with the mean over its tokens. "
        "A verdict covers future traffic, too. The limit holds at every step: steps that exceed it are a breach, "
        "whatever their average. It assumes that sequences are independent."
    )
    assert "sequence" not in promise(clause)
    assert promise(clause).endswith(
        "A verdict covers only the measured traffic; later tokens may differ by more than its confidence says."
    )


def test_rules_of_both_units_differ_in_words_only(policy: Contract) -> None:
    """A rule reads the clause's verdict, whatever the verdict was made from."""
    first, *others = policy.statistical
    other = policy.model_copy(update={"statistical": (first.model_copy(update={"unit": "sequence"}), *others)})
    assert [expression(alert) for alert in alert_steps(policy)] == [expression(alert) for alert in alert_steps(other)]
    assert [alert.promise for alert in alert_steps(policy)] != [alert.promise for alert in alert_steps(other)]


def test_a_promise_says_whether_it_holds_at_every_step_or_on_average() -> None:
    """By prompt at every step, by step on average; a window's tokens have no such reading."""
    clause = Clause(id="tv", metric="tv_token", limit=0.05)
    by_step = clause.model_copy(update={"unit": "step"})
    assert "Each prompt counts once, with the mean over its rollouts and their tokens." in promise(clause)
    assert "The limit holds at every step: steps that exceed it are a breach, whatever their average." in promise(
        clause
    )
    assert "Each training step counts once, with the mean over its prompts." in promise(by_step)
    assert "The limit holds on average over steps: single steps may exceed it." in promise(by_step)
    assert reading(clause.model_copy(update={"unit": "token"})) == ""
