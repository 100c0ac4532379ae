"""The standalone rules keep within what Mimir's ruler takes.

Mimir is in no package registry. What its ruler takes is from its source: `RuleNamespace` of mimirtool, and the defaults
of `ruler.max-rules-per-rule-group` and `ruler.max-rule-groups-per-tenant`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from kc_otel.contract.load import load_all
from kc_otel.contract.model import Contract
from kc_otel.contract.prometheus_names import prometheus_name
from kc_otel.contract.registry.clause_metrics import RECORDED
from kc_otel.generate.prometheus.standalone_rules import standalone_file, standalone_path
from tests.handbook.snippets import HANDBOOK, commands, snippets

RULES_IN_A_GROUP, GROUPS_OF_A_TENANT = 20, 70


def groups_of(contract: Contract) -> list[dict]:
    return yaml.safe_load(standalone_file(contract).text)["groups"]


def test_what_a_rule_reads_is_recorded_before_it_in_its_group(policy: Contract) -> None:
    """A group has one clause's rules, and its alerts after what they read; only alerts overflow into another group."""
    for group in groups_of(policy):
        kinds = ["record" if "record" in rule else "alert" for rule in group["rules"]]
        assert kinds == sorted(kinds, reverse=True)
        clauses = {rule["labels"].get("kc_clause", rule["labels"].get("clause")) for rule in group["rules"]}
        assert len(clauses) == 1


@pytest.mark.slow
def test_the_default_limits_let_every_example_in(repository: Path, policy: Contract) -> None:
    groups = [group for contract in (policy, *load_all([repository / "contracts"])) for group in groups_of(contract)]
    assert max(len(group["rules"]) for group in groups) <= RULES_IN_A_GROUP
    assert len(groups) <= GROUPS_OF_A_TENANT
    assert len({group["name"] for group in groups}) == len(groups)


def test_names_need_no_suffix_that_mimir_leaves_off() -> None:
    """Prometheus adds units and `_total` to what arrives over OTLP, Mimir does not unless told."""
    assert {prometheus_name(quantity) for quantity in RECORDED.values()} == {
        quantity.name.replace(".", "_") for quantity in RECORDED.values()
    }


@pytest.mark.slow
def test_the_handbooks_commands_name_files_that_are_generated(repository: Path) -> None:
    (snippet,) = (block for block in snippets(HANDBOOK / "run" / "scaling.md") if "mimirtool" in block.text)
    written = {f"dashboards/{standalone_path(contract)}" for contract in load_all([repository / "contracts"])}
    named = {word for words in commands(snippet.text) for word in words if word.startswith("dashboards/")}
    assert named
    assert named <= written
