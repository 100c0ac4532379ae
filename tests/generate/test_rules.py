"""Alerting rules on the evaluator's verdicts: one per step of the policy and clause."""

import pytest
import yaml

from kc_otel.contract.clause import Clause
from kc_otel.contract.model import Contract
from kc_otel.contract.sentences import promise
from kc_otel.generate.alert_texts import alert_steps, static_labels, unique_names
from kc_otel.generate.files import Sites
from kc_otel.generate.prometheus import evaluator_file, prometheus_files
from kc_otel.generate.prometheus.alerting_rules import VerdictSource, alert_rule, expression, rule_file
from kc_otel.generate.prometheus.standalone_rules import standalone_file
from kc_otel.judge.verdict import INPUT_CLAUSE


def _rule(policy: Contract, clause: str, number: int) -> dict:
    (alert,) = (alert for alert in alert_steps(policy) if (alert.clause_id, alert.number) == (clause, number))
    return alert_rule(alert)


def test_a_clause_without_any_verdict_has_no_data(policy):
    verdict, absent, held = _rule(policy, "reward", 3)["expr"].split("\nor\n")
    kept_away = 'kc_verdict_no_traffic{kc_contract="policy-7b", kc_clause="reward"}'
    assert verdict.endswith(f"== 2 unless on (kc_slice, kc_kernel_train, kc_kernel_inference) {kept_away}")
    living = 'on () (kc_evaluator_last_evaluation_seconds{kc_contract="policy-7b"} > time() - 60)'
    assert absent == f'absent(kc_verdict{{kc_contract="policy-7b", kc_clause="reward"}}) and {living}'
    assert held.endswith(f" unless {living}")


def test_invalid_input_is_counted_over_the_contracts_window(policy):
    """No clause owns it; the increase over the window is what the evaluator looks at, and a sequence counts once."""
    (alert,) = (alert for alert in alert_steps(policy) if alert.clause is None)
    kernels = "kc_kernel_train, kc_kernel_inference"
    failed = 'kc_input_invalid_total{kc_contract="policy-7b", kc_slice=~"all|"}'
    first = f"last_over_time({failed}[5m]) unless last_over_time({failed}[1d] offset 5m)"
    heard = 'last_over_time(kc_evaluator_last_evaluation_seconds{kc_contract="policy-7b"}[1d] offset 5m)'
    assert expression(alert) == f"sum by ({kernels}) (({first} and on () {heard}) or increase({failed}[5m])) > 0"
    assert heard not in expression(alert, VerdictSource("kc.rule.status", "kc.rule")), "no evaluator is heard there"
    assert alert_rule(alert)["labels"]["kernel_inference"] == "{{ $labels.kc_kernel_inference }}"


def test_links_of_alerts_lead_somewhere_from_a_pager(policy):
    own = policy.model_copy(update={"metadata": policy.metadata.model_copy(update={"runbook": None})})
    sites = Sites("https://grafana.example/", "https://kc.example")
    alone = [rule for group in yaml.safe_load(standalone_file(own, sites).text)["groups"] for rule in group["rules"]]
    rules = [
        *(rule for group in yaml.safe_load(rule_file(own, sites).text)["groups"] for rule in group["rules"]),
        *alone,
        *yaml.safe_load(evaluator_file(sites).text)["groups"][0]["rules"],
    ]
    alerts = [rule for rule in rules if "alert" in rule]
    assert {"KernelContractBroken", "KernelContractInvalidInput", "KernelContractEvaluatorDown"} <= {
        rule["alert"] for rule in alerts
    }
    for rule in alerts:
        found = rule["annotations"]
        assert found.get("dashboard", "").startswith("https://grafana.example/d/kc-") == (rule not in alone)
        assert found["runbook_url"] == f"https://kc.example/handbook/on-call.html#{rule['alert'].lower()}"
    (theirs, *_) = yaml.safe_load(rule_file(policy, sites).text)["groups"][0]["rules"]
    assert theirs["annotations"]["runbook_url"] == policy.metadata.runbook
    (nowhere, *_) = yaml.safe_load(rule_file(own).text)["groups"][0]["rules"]
    assert not {"dashboard", "runbook_url"} & nowhere["annotations"].keys()


@pytest.mark.slow
def test_the_same_contract_gives_the_same_bytes(policy):
    other = policy.model_copy(update={"metadata": policy.metadata.model_copy(update={"name": "other"})})
    assert prometheus_files([policy, other]) == prometheus_files([other, policy])


def test_a_contract_without_a_policy_has_no_groups(policy):
    """Prometheus refuses a group without rules in some versions, so there is none."""
    quiet = policy.model_copy(update={"escalation": ()})
    assert yaml.safe_load(rule_file(quiet).text) == {"groups": []}


def test_every_clause_has_every_step_that_is_meant_for_it_told_apart_by_key_and_labels(policy):
    every = alert_steps(policy)
    assert {(alert.clause_id, alert.number) for alert in every} == {
        *((clause.id, number) for clause in policy.clauses for number in (1, 2, 3)),
        ("token-tv", 4),
        (INPUT_CLAUSE, 5),
    }
    assert len({alert.key for alert in every}) == len(every)
    assert len({tuple(static_labels(alert).items()) for alert in every}) == len(every)


def test_the_promise_names_limits_units_and_reason(policy):
    promises = {alert.clause_id: alert.promise for alert in alert_steps(policy)}
    assert promises["token-tv"].startswith(
        "Mean of tv_token must not be above 0.004 (0.008 on long-context). (1-w)+ of"
    )
    assert promises["token-tv"].endswith("Above it {{ rewards }} and ${HOME} drift.")
    assert promises["ttft"].startswith("99th percentile of gen_ai.server.time_to_first_token must not be above 0.8 s.")
    assert promises["weights-lag"].startswith("Largest weights_lag must not be above 1 step.")


def test_contracts_are_sorted_and_may_not_share_a_name(policy):
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
def test_a_promise_says_what_counts_once_and_what_a_verdict_covers(unit, said):
    written = promise(Clause(id="tv", metric="tv_token", unit=unit, limit=0.05))
    assert said in written
    assert ("by sequence" in written, " step" in written) == (unit == "sequence", unit != "token")
