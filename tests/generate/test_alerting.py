"""Grafana-managed alerts in provisioning form."""

import json

import jsonschema
import pytest
import yaml

from kc_otel.contract.model import Contract
from kc_otel.contract.sentences import REMEDIES
from kc_otel.contract.units import format_duration
from kc_otel.generate.alert_texts import alert_steps
from kc_otel.generate.grafana.alerting import alert_rule, alerting_file, evaluator_alerting_file
from kc_otel.generate.prometheus.alerting_rules import alert_rule as prometheus_rule
from tests.generate.test_dashboards import panels

GRAFANA = '{{ reReplaceAll "/*$" "" externalURL }}'


@pytest.fixture(scope="module")
def rules(policy: Contract) -> list[dict]:
    content = yaml.safe_load(alerting_file(policy).text)
    assert content["apiVersion"] == 1
    group, down = content["groups"]
    assert [rule["title"] for rule in down["rules"]] == ["KernelContractEvaluatorDown, policy-7b"]
    assert (group["orgId"], group["name"], group["folder"]) == (1, "policy-7b", "Kernel contracts")
    return group["rules"]


def test_rules_carry_the_same_policy_as_prometheus(policy, rules):
    assert len(rules) == len(alert_steps(policy))
    for alert, rule in zip(alert_steps(policy), rules, strict=True):
        other = prometheus_rule(alert)
        assert rule["for"] == format_duration(alert.step.after) == other.get("for", "0s")
        assert rule["keepFiringFor"] == format_duration(alert.step.clear_for) == other.get("keep_firing_for", "0s")
        assert rule["labels"].keys() == other["labels"].keys()
        assert rule["labels"]["severity"] == other["labels"]["severity"]
        assert "$" not in "".join(rule["labels"].values()), "Grafana takes what follows for an environment variable"
        assert "${" not in "".join(rule["annotations"].values())


def test_identities_fit_grafanas_columns_and_are_unique(rules):
    for key, longest in (("uid", 40), ("title", 190)):
        values = [rule[key] for rule in rules]
        assert len(set(values)) == len(values)
        assert max(map(len, values)) <= longest


def test_without_an_evaluator_one_rule_fires_and_the_others_stay_as_they_are(policy, rules):
    """No series, or a query that fails, clears nothing and sets off the rule that an evaluator lives, and no other.

    The code of no data stands where a clause has no series and an evaluator lives.
    """
    for alert, rule in zip(alert_steps(policy), rules, strict=True):
        assert rule["noDataState"] == ("OK" if alert.clause is None else "KeepLast")
        assert rule["execErrState"] == "KeepLast"
        asked = rule["data"][0]["model"]["expr"]
        assert ("2 * absent(" in asked and " and on () (" in asked) == (alert.step.on == "no-data")
    (group,) = yaml.safe_load(evaluator_alerting_file().text)["groups"]
    down, *states = group["rules"]
    assert {(rule["noDataState"], rule["execErrState"]) for rule in states} == {("KeepLast", "KeepLast")}
    assert (down["noDataState"], down["execErrState"], down["labels"]) == (
        "Alerting",
        "Alerting",
        {"severity": "critical"},
    )
    assert down["data"][0]["model"]["expr"] == "time() - max(kc_evaluator_last_evaluation_seconds{})"
    assert down["data"][1]["model"]["conditions"] == [{"evaluator": {"type": "gt", "params": [60]}}]
    # A scrape of 15 s that fails, an evaluation, and the wait are less than a minute.
    assert (group["interval"], down["for"]) == ("10s", "30s")


@pytest.mark.parametrize(
    ("on", "fires_at", "goes_on_at"), [("fail", 3, [1, 2, 3]), ("no-data", 2, [2]), ("inconclusive", 1, [1, 2])]
)
def test_one_verdict_fires_and_doubt_and_silence_clear_nothing(policy, on, fires_at, goes_on_at):
    alert = next(alert for alert in alert_steps(policy) if alert.step.on == on)
    (condition,) = alert_rule(alert, "prometheus")["data"][1]["model"]["conditions"]
    assert condition["evaluator"]["type"] == "within_range"
    low, high = condition["evaluator"]["params"]
    assert [code for code in range(4) if low < code < high] == [fires_at]
    recovery = condition.get("unloadEvaluator", {"type": "outside_range", "params": [low, high]})
    assert recovery["type"] == "outside_range"
    low, high = recovery["params"]
    assert [code for code in range(4) if not (code < low or code > high)] == goes_on_at


def test_the_parts_that_the_http_api_shares_satisfy_its_schema(rules, schemas):
    schema = json.loads((schemas / "grafana-jsonschema" / "alerting.jsonschema.json").read_text())
    validator = jsonschema.Draft7Validator({**schema, "$ref": "#/definitions/Rule"})
    common = yaml.safe_load(evaluator_alerting_file().text)["groups"][0]["rules"]
    for rule in (*rules, *common):
        shared = {key: value for key, value in rule.items() if key not in {"dashboardUid", "panelId", "keepFiringFor"}}
        api = {**shared, "orgID": 1, "folderUID": "f", "ruleGroup": "g"}
        assert list(validator.iter_errors(api)) == []
    assert list(validator.iter_errors({**api, "noDataState": "Maybe"}))


def test_the_data_source_can_be_another(policy):
    text = alerting_file(policy, "mimir").text
    assert "datasourceUid: mimir" in text
    assert "datasourceUid: prometheus" not in text
    assert "datasourceUid: __expr__" in text


def test_each_rule_leads_to_its_panel_and_slice(boards, policy, rules):
    titles = {(board["uid"], panel["id"]): panel["title"] for board in boards.values() for panel in panels(board)}
    for alert, rule in zip(alert_steps(policy), rules, strict=True):
        title = titles[rule["dashboardUid"], rule["panelId"]]
        assert title.startswith("Invalid sequences" if alert.clause is None else "What does not hold")
        assert rule["annotations"]["__panelId__"] == str(rule["panelId"])
        assert rule["annotations"]["__dashboardUid__"] == rule["dashboardUid"]
        if alert.clause is not None:
            cell = f"?var-contract={policy.name}&var-clause={rule['labels']['clause']}"
            assert rule["annotations"]["slice_dashboard"].startswith(f"{GRAFANA}/d/kc-slice{cell}&var-slice=")
            assert "{{ with index .Labels `kc_slice` }}" in rule["annotations"]["slice_dashboard"]


def test_people_read_the_same_in_grafana_as_in_prometheus(policy):
    """The consequence, the policy's actions, what to do now, and the promise; Grafana cannot ask for the numbers."""
    for alert in alert_steps(policy):
        ours, theirs = (rule["annotations"] for rule in (alert_rule(alert, "prometheus"), prometheus_rule(alert)))
        assert ours["owner"] == theirs["owner"]
        actions = f"Actions: {', '.join(map(str, alert.step.do))}. Now: {REMEDIES[alert.step.on]}"
        assert actions in ours["description"]
        _, _, rest = ours["description"].partition(actions)
        assert rest
        assert rest in theirs["description"]
        assert ours["description"].startswith("Unless the incident is contained: ") is (alert.step.on == "fail")
