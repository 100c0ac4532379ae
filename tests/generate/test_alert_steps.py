"""Alert steps: one per step of the policy and clause."""

import pytest

from kc_otel.contract.clause import Clause
from kc_otel.contract.model import Contract
from kc_otel.contract.sentences import promise
from kc_otel.generate.alert_steps import alert_steps, static_labels, unique_names
from kc_otel.judge.escalation.alert_lifecycle import INPUT_CLAUSE


def test_every_clause_has_every_step_that_is_meant_for_it(policy: Contract) -> None:
    found = {(alert.clause_id, alert.number) for alert in alert_steps(policy)}
    clauses = [clause.id for clause in policy.clauses]
    assert found == {
        *((clause, number) for clause in clauses for number in (1, 2, 3)),
        ("token-tv", 4),
        (INPUT_CLAUSE, 5),
    }


def test_keys_and_labels_tell_alert_steps_apart(policy: Contract) -> None:
    every = alert_steps(policy)
    assert len({alert.key for alert in every}) == len(every)
    assert len({tuple(static_labels(alert).items()) for alert in every}) == len(every)


def test_the_promise_names_limits_units_and_reason(policy: Contract) -> None:
    promises = {alert.clause_id: alert.promise for alert in alert_steps(policy)}
    assert promises["token-tv"].startswith(
        "Mean of tv_token must not be above 0.004 (0.008 on long-context). (1-w)+ of"
    )
    assert promises["token-tv"].endswith("Above it {{ rewards }} and ${HOME} drift.")
    assert promises["ttft"].startswith("99th percentile of gen_ai.server.time_to_first_token must not be above 0.8 s.")
    assert promises["weights-lag"].startswith("Largest weights_lag must not be above 1 step.")


def test_contracts_are_sorted_and_may_not_share_a_name(policy: Contract) -> None:
    other = policy.model_copy(update={"metadata": policy.metadata.model_copy(update={"name": "a-first"})})
    assert [contract.name for contract in unique_names([policy, other])] == ["a-first", "policy-7b"]
    with pytest.raises(ValueError, match="two contracts are named 'policy-7b'"):
        unique_names([policy, policy])


@pytest.mark.parametrize(
    ("unit", "said"),
    [
        (
            "token",
            "A verdict covers only the measured traffic; later tokens may differ by more than its confidence says.",
        ),
        ("sequence", "Each sequence counts once, with the mean over its tokens. A verdict covers future traffic, too."),
        ("sequence", "whatever their average. It assumes that sequences are independent."),
        ("prompt", "Each prompt counts once, with the mean over its rollouts and their tokens."),
        ("prompt", "The limit holds at every step: steps that exceed it are a breach, whatever their average."),
        ("step", "Each training step counts once, with the mean over its prompts."),
        ("step", "The limit holds on average over steps: single steps may exceed it."),
    ],
)
def test_a_promise_says_what_counts_once_and_what_a_verdict_covers(unit: str, said: str) -> None:
    written = promise(Clause(id="tv", metric="tv_token", unit=unit, limit=0.05))
    assert said in written
    assert ("by sequence" in written, " step" in written) == (unit == "sequence", unit != "token")
