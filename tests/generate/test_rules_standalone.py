"""Rules that judge without the evaluator, the Kubernetes resources, and Alertmanager's routes, as data."""

import re
import subprocess

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from kc_otel.contract.limits import BucketLayout
from kc_otel.contract.load import load_all
from kc_otel.contract.model import Contract
from kc_otel.contract.registry.clause_metrics import RECORDED
from kc_otel.contract.registry.own_metrics import METRICS, prometheus_name
from kc_otel.generate.alert_texts import EVALUATOR_DOWN, living
from kc_otel.generate.prometheus.alerting_rules import SECRETS, routes_file, rule_file
from kc_otel.generate.prometheus.closed_forms import Native, alphas, forms, rank_shift
from kc_otel.generate.prometheus.standalone_rules import expressible, left_out, standalone_file
from tests.handbook.snippets import HANDBOOK, commands, snippets

RULES_IN_A_GROUP, GROUPS_OF_A_TENANT = 20, 70
"""What Mimir's ruler takes by default: `ruler.max-rules-per-rule-group` and `ruler.max-rule-groups-per-tenant` in its
source; Mimir is in no package registry."""


def _groups(contract: Contract) -> list[dict]:
    return yaml.safe_load(standalone_file(contract).text)["groups"]


def _rules(contract: Contract) -> list[dict]:
    return [rule for group in _groups(contract) for rule in group["rules"]]


def test_alerts_are_those_of_the_evaluators_rules(policy):
    group, _ = yaml.safe_load(rule_file(policy).text)["groups"]
    theirs = [rule for rule in group["rules"] if rule["labels"]["clause"] != "ttft"]
    ours = [rule for rule in _rules(policy) if "alert" in rule]
    assert len(ours) == len(theirs) > 10
    for rule, other in zip(ours, theirs, strict=True):
        assert {key: rule[key] for key in rule if key not in {"expr", "annotations"}} == {
            key: other[key] for key in other if key not in {"expr", "annotations"}
        }
        lives = living(policy.name)
        told = other["expr"].replace(f" and on () ({lives})", "")
        told = re.sub(rf"\nor\nmax without .* unless on \(\) \({re.escape(lives)}\)$", "", told)
        told = re.sub(r" (unless|and) on \([a-z_, ]*\) kc_(verdict_no_traffic|incident)\{[^}]*\}", "", told)
        assert (told != other["expr"]) == ("kc_verdict" in told)
        told = re.sub(r" and on \(\) last_over_time\(kc_evaluator[^)]*\)", "", told)  # an evaluator's history
        assert rule["expr"] == told.replace("kc_verdict", "kc_rule_status")
        assert rule["annotations"]["summary"] == other["annotations"]["summary"]
        described = rule["annotations"]["description"]
        assert "Actions that need an evaluator: " in described
        assert "Actions: " not in described


def test_every_name_is_in_the_registry(policy):
    known = {prometheus_name(metric) for metric in (*METRICS.values(), *RECORDED.values())}
    used = set()
    for rule in _rules(policy):
        used |= {rule["record"]} if "record" in rule else set()
        used |= set(re.findall(r"\b(kc_\w+)\{", rule["expr"]))
    assert used <= known
    assert {"kc_rule_lower", "kc_rule_upper", "kc_rule_estimate", "kc_rule_limit", "kc_rule_status"} <= used


LAYOUT = BucketLayout(4, 2.0**-30)


def test_what_rules_cannot_judge_is_said_in_the_file(policy):
    assert [clause.id for clause in left_out(policy)] == ["ttft"]
    text = standalone_file(policy).text
    assert (
        "# Left out: ttft, for gen_ai.server.time_to_first_token carries no contract, slice or kernels as labels.\n"
        in text
    )
    assert "kc_clause: ttft" not in text
    assert "5 clauses x 3 slices x 4 kernel pairs" in text
    with pytest.raises(ValueError, match="ttft: gen_ai"):
        forms(left_out(policy)[0], policy, Native("h", LAYOUT), "n")


def test_alpha_is_split_over_every_cell_below_and_whole_above(policy):
    """Half of alpha per window; below, the evaluator's strictest level and less."""
    assert alphas(policy).upper == pytest.approx(0.005)
    assert alphas(policy).lower == pytest.approx(0.005 / (5 * 3 * 4))


@given(rank=st.floats(0.001, 0.9999), n=st.integers(10, 10**6), alpha=st.floats(1e-6, 0.2))
def test_shifted_ranks_are_never_sharper_than_the_binomial(rank, n, alpha):
    """Bernstein's shift leaves at most alpha on either side, whatever the rank and the number of observations."""
    above = n * (rank + rank_shift(1 - rank, rank, n, alpha))
    below = n * (rank - rank_shift(rank, rank, n, alpha))
    assert binom.sf(above - 1e-9 * n, n, rank) <= alpha * (1 + 1e-6) or above >= n
    assert below < 0 or binom.cdf(below - 1e-9 * n, n, rank) <= alpha * (1 + 1e-6)


def test_each_steps_webhooks_get_its_alerts(policy):
    content = yaml.safe_load(routes_file([policy]).text)
    route, states, lost = content["route"]["routes"]
    assert not {"clause", "slice"} & {*content["route"]["group_by"]}  # a drift on many slices is one notification
    assert (states["receiver"], states["group_wait"]) == ("pager", "0s")
    assert (lost["receiver"], lost["matchers"], lost["group_wait"]) == (
        "pager",
        [f'alertname="{EVALUATOR_DOWN.name}"'],
        "0s",
    )
    assert route.pop("repeat_interval") == content["route"]["repeat_interval"] == "4h"
    assert route == {"receiver": "pager", "matchers": ['contract="policy-7b"', 'step="2"'], "continue": True}
    (page, pager) = content["receivers"]
    assert page == {"name": "page-only"}
    (webhook,) = pager["webhook_configs"]
    assert webhook["url_file"] == f"{SECRETS}/pager.url"
    assert webhook["http_config"]["authorization"]["credentials_file"] == f"{SECRETS}/pager.token"


@pytest.mark.parametrize(("repeat", "expected"), [(90.0 * 60, "1h30m"), (0.0, "5d"), (10.0 * 86400, "5d")])
def test_reminders_come_as_often_as_the_step_says(policy, repeat, expected):
    """None is as seldom as Alertmanager can: it forgets after five days whom it told."""
    first, second, *rest = policy.escalation
    steps = (first, second.model_copy(update={"repeat": repeat}), *rest)
    content = yaml.safe_load(routes_file([policy.model_copy(update={"escalation": steps})]).text)
    routes = [route for route in content["route"]["routes"] if 'step="2"' in route["matchers"]]
    assert [route["repeat_interval"] for route in routes] == [expected]


@pytest.mark.slow
def test_amtool_takes_the_routes_and_follows_them(program, policy, tmp_path):
    path = tmp_path / "alertmanager.yaml"
    path.write_text(routes_file([policy]).text)
    amtool = program("amtool")

    def ask(*arguments: str) -> str:
        return subprocess.run([amtool, *arguments], capture_output=True, text=True, timeout=60, check=True).stdout

    assert "SUCCESS" in ask("check-config", str(path))
    routed = ("config", "routes", "test", f"--config.file={path}")
    assert ask(*routed, "contract=policy-7b", "step=2").strip() == "pager"
    assert ask(*routed, "contract=policy-7b", "step=1").strip() == "page-only"
    assert ask(*routed, "contract=policy-7b", "alertname=KernelContractRolledBack").strip() == "pager"
    assert ask(*routed, "contract=other", "step=2").strip() == "page-only"


def test_a_contract_that_rules_cannot_judge_has_no_group(policy):
    """Nothing on recorded quantities and no policy: no group, as Prometheus refuses empty ones."""
    foreign = policy.model_copy(
        update={"numerical": (), "statistical": (), "runtime": left_out(policy), "escalation": ()}
    )
    assert expressible(foreign) == ()
    assert yaml.safe_load(standalone_file(foreign).text) == {"groups": []}


def test_a_share_of_none_is_kept_while_none_is_counted(policy):
    """What the zero bucket holds is not above 0, and a PASS asks for none above it: no bound can reach the limit."""
    none = {"id": "same", "metric": "abs_log_ratio", "statistic": "fraction > 0", "limit": 0}
    share = {**none, "limit": 0.5}
    made = (Contract.model_validate(policy.model_dump(by_alias=True) | {"statistical": [row]}) for row in (none, share))
    counted, bounded = (
        next(
            str(rule["expr"])
            for rule in _rules(contract)
            if rule.get("record") == "kc_rule_window_status" and rule["labels"].get("kc_clause") == "same"
        )
        for contract in made
    )
    assert "<= bool 1e-06" in counted
    assert "upper" not in counted
    assert "upper" in bounded
    assert "1e-06" not in bounded
    contract = Contract.model_validate(policy.model_dump(by_alias=True) | {"statistical": [none]})
    estimate = forms(contract.statistical[0], contract, Native("h", LAYOUT), "n").estimate
    assert f"histogram_fraction({LAYOUT.zero_threshold!r}, +Inf, h)" in estimate
    assert "histogram_fraction(-" not in estimate


@pytest.mark.parametrize(("cap", "voided"), [(None, True), (0.5, False)])
def test_what_a_clauses_own_cap_cuts_leaves_its_upper_bound(policy, cap, voided):
    """Beyond the registry's cap nothing is claimed; a cap that the clause writes is what it is about."""
    clause = {"id": "k3", "metric": "k3", "limit": 0.01} | ({} if cap is None else {"cap": cap})
    contract = Contract.model_validate(policy.model_dump(by_alias=True) | {"statistical": [clause]})
    (own,) = contract.statistical
    assert ("+ +Inf" in forms(own, contract, Native("h", LAYOUT), "n").upper) is voided


def test_what_a_rule_reads_is_recorded_before_it_in_its_group(policy):
    """A group has one clause's rules, and its alerts after what they read; only alerts overflow into another group."""
    for group in _groups(policy):
        kinds = ["record" if "record" in rule else "alert" for rule in group["rules"]]
        assert kinds == sorted(kinds, reverse=True)
        clauses = {rule["labels"].get("kc_clause", rule["labels"].get("clause")) for rule in group["rules"]}
        assert len(clauses) == 1


@pytest.mark.slow
def test_the_default_limits_let_every_example_in(repository, policy):
    groups = [group for contract in (policy, *load_all([repository / "contracts"])) for group in _groups(contract)]
    assert max(len(group["rules"]) for group in groups) <= RULES_IN_A_GROUP
    assert len(groups) <= GROUPS_OF_A_TENANT
    assert len({group["name"] for group in groups}) == len(groups)


def test_names_need_no_suffix_that_mimir_leaves_off():
    """Prometheus adds units and `_total` to what arrives over OTLP, Mimir does not unless told."""
    assert {prometheus_name(quantity) for quantity in RECORDED.values()} == {
        quantity.name.replace(".", "_") for quantity in RECORDED.values()
    }


@pytest.mark.slow
def test_the_handbooks_commands_name_files_that_are_generated(repository):
    (snippet,) = (block for block in snippets(HANDBOOK / "run" / "scaling.md") if "mimirtool" in block.text)
    written = {f"dashboards/{standalone_file(contract).path}" for contract in load_all([repository / "contracts"])}
    named = {word for words in commands(snippet.text) for word in words if word.startswith("dashboards/")}
    assert named
    assert named <= written
