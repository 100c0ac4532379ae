"""Rules for Mimir's ruler: those of Prometheus, in a namespace and in groups that its default limits let in.

Mimir is in no package registry: the rules run in promtool here, with the groups that Mimir gets. What its ruler takes
is from its source: `RuleNamespace` of mimirtool, and the defaults of `ruler.max-rules-per-rule-group` and
`ruler.max-rule-groups-per-tenant`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from kc_otel.contract import Contract, load_all
from kc_otel.contract.prometheus_names import prometheus_name
from kc_otel.contract.registry import RECORDED
from kc_otel.generate.prometheus.mimir import mimir_file
from kc_otel.generate.prometheus.standalone_rules import standalone_file
from kc_otel.generate.prometheus.standalone_tests import standalone_test_file
from tests.handbook.snippets import HANDBOOK, commands, snippets

RULES_IN_A_GROUP, GROUPS_OF_A_TENANT = 20, 70


def as_loaded(contract: Contract) -> dict:
    return yaml.safe_load(mimir_file(contract).text)


def test_it_is_every_rule_of_prometheus_in_its_order(policy: Contract) -> None:
    """Nothing left out, nothing changed; what a rule reads of its own clause is recorded before it in its group."""
    whole = as_loaded(policy)
    assert set(whole) == {"namespace", "groups"}, "mimirtool refuses other fields"
    (standalone,) = yaml.safe_load(standalone_file(policy).text)["groups"]
    assert [rule for group in whole["groups"] for rule in group["rules"]] == standalone["rules"]
    assert {group["interval"] for group in whole["groups"]} == {standalone["interval"]}
    for group in whole["groups"]:
        clauses = {rule["labels"]["kc_clause"] for rule in group["rules"] if "record" in rule}
        assert len(clauses) <= 1
        assert clauses in ({group["name"].removeprefix(f"{whole['namespace']}-")}, set())


@pytest.mark.slow
def test_the_default_limits_let_every_example_in(repository: Path, policy: Contract) -> None:
    """At most 20 rules in a group; all contracts of this repository together are one tenant's 70 groups or less."""
    files = [as_loaded(contract) for contract in [policy, *load_all([repository / "contracts"])]]
    groups = [group for file in files for group in file["groups"]]
    assert max(len(group["rules"]) for group in groups) <= RULES_IN_A_GROUP
    assert len(groups) <= GROUPS_OF_A_TENANT
    assert len({group["name"] for group in groups}) == len(groups)
    assert len({file["namespace"] for file in files}) == len(files)


def test_names_need_no_suffix_that_mimir_leaves_off() -> None:
    """Prometheus adds units and `_total` to what arrives over OTLP, Mimir does not unless told."""
    assert {prometheus_name(each) for each in RECORDED.values()} == {
        each.name.replace(".", "_") for each in RECORDED.values()
    }


@pytest.mark.slow
def test_the_handbooks_commands_name_files_that_are_generated(repository: Path) -> None:
    """What mimirtool is told to load is what the command before it wrote."""
    (snippet,) = (each for each in snippets(HANDBOOK / "run" / "scaling.md") if "mimirtool" in each.text)
    written = {f"dashboards/{mimir_file(contract).path}" for contract in load_all([repository / "contracts"])}
    named = {word for words in commands(snippet.text) for word in words if word.startswith("dashboards/")}
    assert named
    assert named <= written


@pytest.mark.slow
def test_alerts_fire_and_clear_as_the_tests_of_prometheus_say(promtool, policy: Contract, tmp_path: Path) -> None:
    """The generated tests of the standalone rules pass with Mimir's groups in their place.

    Here the alerts' groups run after the clauses' of the same instant. In Mimir each group has its own place in the
    interval, so that alerts may be one interval later.
    """
    groups = as_loaded(policy)["groups"]
    asked = {
        **yaml.safe_load(standalone_test_file(policy).text),
        "group_eval_order": [group["name"] for group in groups],
    }
    rules = tmp_path / standalone_file(policy).path
    tests = tmp_path / standalone_test_file(policy).path
    for path, content in ((rules, {"groups": groups}), (tests, asked)):
        path.parent.mkdir(parents=True)
        path.write_text(yaml.safe_dump(content))
    code, said = promtool("test", "rules", tests)
    assert code == 0, said
