"""Rungs: one per step of the policy and clause."""

import pytest

from kc_otel.contract import Contract
from kc_otel.generate.ladder import rungs, static_labels, unique_names
from kc_otel.generate.links import panel_id
from kc_otel.judge.escalation.alert_lifecycle import INPUT_CLAUSE


def test_every_clause_climbs_every_step_that_is_meant_for_it(policy: Contract) -> None:
    """Steps that name clauses are for those alone, and invalid input belongs to no clause."""
    found = {(rung.clause_id, rung.number) for rung in rungs(policy)}
    clauses = [clause.id for clause in policy.clauses]
    assert found == {
        *((clause, number) for clause in clauses for number in (1, 2, 3)),
        ("token-tv", 4),
        (INPUT_CLAUSE, 5),
    }


def test_keys_and_labels_tell_rungs_apart(policy: Contract) -> None:
    """No two rungs of a contract share a key or a set of labels."""
    all_rungs = rungs(policy)
    assert len({rung.key for rung in all_rungs}) == len(all_rungs)
    assert len({tuple(static_labels(rung).items()) for rung in all_rungs}) == len(all_rungs)


def test_the_promise_names_limits_units_and_reason(policy: Contract) -> None:
    """A person who never saw the contract reads what is limited, where it differs, and why."""
    promises = {rung.clause_id: rung.promise for rung in rungs(policy)}
    assert promises["token-tv"].startswith(
        "Mean of tv_token must not be above 0.004 (0.008 on long-context). (1-w)+ of"
    )
    assert promises["token-tv"].endswith("Above it {{ rewards }} and ${HOME} drift.")
    assert promises["ttft"].startswith("99th percentile of gen_ai.server.time_to_first_token must not be above 0.8 s.")
    assert promises["weights-lag"].startswith("Largest weights_lag must not be above 1 step.")


def test_contracts_are_sorted_and_may_not_share_a_name(policy: Contract) -> None:
    """Files and series of two contracts of one name would overwrite each other."""
    other = policy.model_copy(update={"metadata": policy.metadata.model_copy(update={"name": "a-first"})})
    assert [contract.name for contract in unique_names([policy, other])] == ["a-first", "policy-7b"]
    with pytest.raises(ValueError, match="two contracts are named 'policy-7b'"):
        unique_names([policy, policy])


def test_a_panel_keeps_its_id_whatever_is_generated_with_it() -> None:
    """Ids depend on the contract's and the clause's name alone, and stay clear of the fixed panels."""
    assert panel_id("policy-7b", "token-tv") == panel_id("policy-7b", "token-tv")
    assert panel_id("policy-7b", "token-tv") != panel_id("policy-7b", "reward")
    assert 1000 <= panel_id("policy-7b", "token-tv") < 2**31
