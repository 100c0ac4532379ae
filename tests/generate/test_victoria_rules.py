"""The rules for VictoriaMetrics, as data."""

import re

import pytest
import yaml

from kc_otel.contract import Contract
from kc_otel.contract.prometheus_names import prometheus_name
from kc_otel.contract.registry import METRICS, RECORDED
from kc_otel.generate.prometheus.recording_rules import expressible, left_out
from kc_otel.generate.prometheus.standalone_rules import standalone_file
from kc_otel.generate.prometheus.victoria import victoria_file

EARLIER = re.compile(r"(kc_rule_\w+)\{[^}]*\}\[10s\] offset (\d+)s")
STAGE = {
    **dict.fromkeys(("kc_rule_window_histogram", "kc_rule_window_samples", "kc_rule_window_total"), 0),
    **dict.fromkeys(("kc_rule_window_estimate", "kc_rule_window_lower", "kc_rule_window_upper"), 1),
    **dict.fromkeys(("kc_rule_limit", "kc_rule_window_status", "kc_rule_status"), 2),
    **dict.fromkeys(("kc_rule_estimate", "kc_rule_lower", "kc_rule_upper", "kc_rule_samples"), 3),
}


@pytest.fixture(scope="module")
def groups(policy: Contract) -> list[dict]:
    """The groups of the contract's file."""
    return yaml.safe_load(victoria_file(policy).text)["groups"]


@pytest.mark.slow
def test_a_group_for_each_clause_and_one_for_the_alerts(policy: Contract, groups: list[dict]) -> None:
    """The rules of a clause run one after the other; alerts are those of the rules for Prometheus."""
    prefix = "kernel-contract-policy-7b-victoriametrics"
    clauses = [f"{prefix}-{clause.id}" for clause in expressible(policy)]
    assert [group["name"] for group in groups] == [*clauses, prefix]
    (standalone,) = yaml.safe_load(standalone_file(policy).text)["groups"]
    assert groups[-1]["rules"] == [rule for rule in standalone["rules"] if "alert" in rule]
    for group in groups[:-1]:
        stages = [STAGE[rule["record"]] for rule in group["rules"]]
        assert stages == sorted(stages)
        assert {rule["record"] for rule in group["rules"]} == STAGE.keys()


def test_everything_that_a_rule_reads_is_of_one_evaluation(groups: list[dict]) -> None:
    """What was recorded some stages before is read as many intervals late, and nothing else is."""
    read = 0
    for rule in (rule for group in groups[:-1] for rule in group["rules"]):
        found = EARLIER.findall(rule["expr"])
        assert rule["expr"].count("offset") == len(found)
        for name, offset in found:
            assert int(offset) == 15 * (STAGE[rule["record"]] - STAGE[name])
            read += 1
    assert read > 50


def test_what_a_query_names_is_defined_before_and_used(groups: list[dict]) -> None:
    """Each name of a query's list stands for something that a later one, or the result, needs."""
    for rule in (rule for group in groups[:-1] for rule in group["rules"] if STAGE[rule["record"]]):
        definitions, result = re.fullmatch(r"WITH \(\n(.*)\n\)\n(\w+)", rule["expr"], re.DOTALL).groups()
        assert result == rule["record"]
        lines = re.findall(r"^  (\w+) = ((?:.|\n    )*)", definitions, re.MULTILINE)
        names = [name for name, _ in lines]
        assert names[-1] == result
        for place, name in enumerate(names[:-1]):
            assert any(re.search(rf"\b{name}\b", text) for _, text in lines[place + 1 :]), name


def test_every_name_is_in_the_registry(groups: list[dict]) -> None:
    """What is read is a metric of the registry, or the part of a quantity's histogram that the store makes of it."""
    parts = {f"{prometheus_name(one)}_{part}" for one in RECORDED.values() for part in ("bucket", "count", "sum")}
    known = parts | {prometheus_name(one) for one in METRICS.values()}
    used = {name for group in groups for rule in group["rules"] for name in re.findall(r"\b(kc_\w+)\{", rule["expr"])}
    assert used <= known
    assert used & parts


def test_the_file_says_how_it_is_used_and_what_it_leaves_out(policy: Contract) -> None:
    """Flags of the programs, clauses without rules, and senders that restart."""
    text = victoria_file(policy).text
    for said in ("-opentelemetry.usePrometheusNaming", "-remoteRead.url", "# - ttft: gen_ai", "service.instance.id"):
        assert said in text


def test_a_contract_that_rules_cannot_judge_has_no_group(policy: Contract) -> None:
    """Nothing on recorded quantities and no policy: no group."""
    nothing = {"numerical": (), "statistical": (), "runtime": left_out(policy), "escalation": ()}
    assert yaml.safe_load(victoria_file(policy.model_copy(update=nothing)).text) == {"groups": []}
