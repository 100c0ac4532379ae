"""Grafana-managed alerts in provisioning form."""

import json
from pathlib import Path

import jsonschema
import pytest
import yaml

from kc_otel.contract import Contract
from kc_otel.contract.units import format_duration
from kc_otel.generate.grafana.alerting import alert_rule, alerting_file
from kc_otel.generate.ladder import rungs
from kc_otel.generate.prometheus.rules import alert_rule as prometheus_rule
from kc_otel.generate.runbook import runbook


@pytest.fixture(scope="module")
def rules(policy: Contract) -> list[dict]:
    """The rules of the contract's group, as Grafana reads them."""
    content = yaml.safe_load(alerting_file(policy).text)
    assert content["apiVersion"] == 1
    (group,) = content["groups"]
    assert (group["orgId"], group["name"], group["folder"]) == (1, "policy-7b", "Kernel contracts")
    return group["rules"]


def test_rules_carry_the_same_ladder_as_prometheus(policy: Contract, rules: list[dict]) -> None:
    """Same `for`, same `clear_for`, same labels, one rule per rung."""
    assert len(rules) == len(rungs(policy))
    for rung, rule in zip(rungs(policy), rules, strict=True):
        other = prometheus_rule(rung)
        assert rule["for"] == format_duration(rung.step.after) == other.get("for", "0s")
        assert rule["keepFiringFor"] == format_duration(rung.step.clear_for) == other.get("keep_firing_for", "0s")
        assert rule["labels"].keys() == other["labels"].keys()
        assert rule["labels"]["severity"] == other["labels"]["severity"]


def test_identities_fit_grafanas_columns_and_are_unique(rules: list[dict]) -> None:
    """A uid has at most 40 characters, a title at most 190, and none occurs twice in a folder."""
    for key, longest in (("uid", 40), ("title", 190)):
        values = [rule[key] for rule in rules]
        assert len(set(values)) == len(values)
        assert max(map(len, values)) <= longest


def test_silence_and_errors_mean_what_the_step_says(policy: Contract, rules: list[dict]) -> None:
    """Without series a no-data step fires and the others are calm; a failing query pages for the former alone."""
    for rung, rule in zip(rungs(policy), rules, strict=True):
        states = (rule["noDataState"], rule["execErrState"])
        assert states == (("Alerting", "Alerting") if rung.step.on == "no-data" else ("OK", "KeepLast"))
    uncovered = policy.model_copy(update={"escalation": policy.escalation[:1]})
    assert alert_rule(rungs(uncovered)[0], "prometheus")["noDataState"] == "NoData"


@pytest.mark.parametrize(
    ("on", "fires_at", "goes_on_at"), [("fail", 3, [1, 2, 3]), ("no-data", 2, [2]), ("inconclusive", 1, [1, 2])]
)
def test_one_verdict_fires_and_doubt_and_silence_clear_nothing(
    policy: Contract, on: str, fires_at: int, goes_on_at: list[int]
) -> None:
    """Of the codes 0 to 3 exactly the step's own sets the alert off; it recovers only at one that proves it over."""
    rung = next(rung for rung in rungs(policy) if rung.step.on == on)
    (condition,) = alert_rule(rung, "prometheus")["data"][1]["model"]["conditions"]
    assert condition["evaluator"]["type"] == "within_range"
    low, high = condition["evaluator"]["params"]
    assert [code for code in range(4) if low < code < high] == [fires_at]
    recovery = condition.get("unloadEvaluator", {"type": "outside_range", "params": [low, high]})
    assert recovery["type"] == "outside_range"
    low, high = recovery["params"]
    assert [code for code in range(4) if not (code < low or code > high)] == goes_on_at


def test_the_parts_that_the_http_api_shares_satisfy_its_schema(rules: list[dict], schemas: Path) -> None:
    """Queries and states are those of Grafana's own model; only the wrappers differ in files."""
    schema = json.loads((schemas / "grafana-jsonschema" / "alerting.jsonschema.json").read_text())
    validator = jsonschema.Draft7Validator({**schema, "$ref": "#/definitions/Rule"})
    for rule in rules:
        shared = {key: value for key, value in rule.items() if key not in {"dashboardUid", "panelId", "keepFiringFor"}}
        api = {**shared, "orgID": 1, "folderUID": "f", "ruleGroup": "g"}
        assert list(validator.iter_errors(api)) == []
    assert list(validator.iter_errors({**api, "noDataState": "Maybe"}))


def test_the_data_source_can_be_another(policy: Contract) -> None:
    """Every query goes to the data source that was asked for; expressions stay with Grafana."""
    text = alerting_file(policy, "mimir").text
    assert "datasourceUid: mimir" in text
    assert "datasourceUid: prometheus" not in text
    assert "datasourceUid: __expr__" in text


def test_each_rule_leads_to_its_panel_slice_and_meaning(boards: dict, policy: Contract, rules: list[dict]) -> None:
    """Panel ids exist on the overview and on the dashboard of meanings; the slice link carries the alert's slice."""

    def ids(name: str) -> set[int]:
        board = boards[name]
        return {inner["id"] for panel in board["panels"] for inner in (panel, *panel.get("panels", []))}

    for rung, rule in zip(rungs(policy), rules, strict=True):
        assert rule["panelId"] in ids("overview")
        assert rule["annotations"]["__panelId__"] == str(rule["panelId"])
        assert rule["dashboardUid"] == rule["annotations"]["__dashboardUid__"] == boards["overview"]["uid"]
        if rung.clause is not None:
            meaning = rule["annotations"]["meaning"]
            assert meaning == f"/d/kc-meaning?viewPanel={rule['panelId']}"
            assert rule["panelId"] in ids("meaning")
            assert f"var-clause={rule['labels']['clause']}&" in rule["annotations"]["slice_dashboard"]
            assert "{{ with index .Labels `kc_slice` }}" in rule["annotations"]["slice_dashboard"]


def test_the_runbook_says_what_was_done_and_what_to_do(policy: Contract) -> None:
    """Numbered, with the step's own actions first, and the owner to turn to last."""
    for rung in rungs(policy):
        lines = runbook(rung).splitlines()
        assert [line.partition(". ")[0] for line in lines] == [str(number + 1) for number in range(len(lines))]
        assert lines[0].startswith(f"1. Done already by step {rung.number}: ")
        assert lines[-1].endswith("Owner: rl-infra.")
        assert len(lines) >= 4
    (route,) = {runbook(rung).splitlines()[0] for rung in rungs(policy) if rung.number == 2}
    assert "served by the training kernel" in route
    assert "a webhook was sent" in route
