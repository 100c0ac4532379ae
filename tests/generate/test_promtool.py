"""Rules and queries under Prometheus' own tool: what it accepts, when alerts fire, and what queries answer."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from kc_otel.contract.load import load_all
from kc_otel.contract.model import Contract
from kc_otel.generate.files import write
from kc_otel.generate.grafana import queries
from kc_otel.generate.grafana.alerting import alerting_file, evaluator_alerting_file
from kc_otel.generate.prometheus import prometheus_files
from tests.generate.rule_tests import STEP, rule_tests, state_tests

TRAIN, INFERENCE = "0123456789ab", "ba9876543210"


LIVING = ('kc_evaluator_last_evaluation_seconds{kc_contract="policy-7b"}', "0+60x40")
"""An evaluator that judges at every minute."""


def cell(metric: str, slice: str = "all", clause: str = "token-tv", more: str = "") -> str:
    kernels = f'kc_kernel_train="{TRAIN}", kc_kernel_inference="{INFERENCE}"'
    return f'{metric}{{kc_contract="policy-7b", kc_clause="{clause}", kc_slice="{slice}", {kernels}{more}}}'


def info(
    contract: str = "policy-7b",
    clause: str = "token-tv",
    metric: str = "tv_token",
    statistic: str = "mean",
    unit: str = "1",
    promise: str = "p",
    instance: str = "a",
) -> str:
    said = {"metric": metric, "statistic": statistic, "unit": unit, "promise": promise}
    words = "".join(f', kc_clause_{name}="{text}"' for name, text in said.items())
    return f'kc_clause_info{{kc_contract="{contract}", kc_clause="{clause}"{words}, instance="{instance}"}}'


def as_in_grafana(expression: str, *, range: str = "1h", interval: str = "5m") -> str:
    """A query with the dashboard's variables filled in as Grafana does when all is picked."""
    filled = expression.replace("$__range", range).replace("$__rate_interval", interval)
    return re.sub(r"\$(contract|slice|kernel_train|kernel_inference)", ".*", filled)


def passes(promtool, path: Path, tests: list[dict], rules: list[Path] = (), interval: str = "15s") -> None:
    """Run `promtool test rules`."""
    content = {"rule_files": list(map(str, rules)), "evaluation_interval": interval, "tests": tests}
    path.write_text(yaml.dump(content, width=10**6))
    code, said = promtool("test", "rules", path)
    assert code == 0, said


@pytest.mark.slow
def test_every_rule_file_passes_lint(promtool, repository: Path, policy: Contract, tmp_path: Path) -> None:
    write(prometheus_files([policy, *load_all([repository / "contracts"])]), tmp_path)
    code, said = promtool("check", "rules", "--lint=all", "--lint-fatal", *tmp_path.glob("prometheus/**/rules/*"))
    assert code == 0, said


@pytest.mark.slow
def test_what_grafana_asks_is_promql(promtool, policy: Contract, tmp_path: Path) -> None:
    groups = [
        *yaml.safe_load(alerting_file(policy).text)["groups"],
        *yaml.safe_load(evaluator_alerting_file().text)["groups"],
    ]
    asked = [rule["data"][0]["model"]["expr"] for group in groups for rule in group["rules"]]
    rules = [{"record": f"asked_{place}", "expr": text} for place, text in enumerate(asked)]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "grafana", "rules": rules}]}))
    code, said = promtool("check", "rules", "--lint=none", tmp_path / "rules.yaml")
    assert (code, f"{len(asked)} rules found" in said) == (0, True), said


@pytest.mark.slow
def test_each_alert_fires_and_clears_in_time(promtool, policy: Contract, tmp_path: Path) -> None:
    """It is quiet just before its `for`, fires after it, tells the numbers, and clears after `clear_for`."""
    write(prometheus_files([policy]), tmp_path)
    rules = tmp_path / "prometheus" / "rules"
    passes(promtool, tmp_path / "policy.yaml", list(rule_tests(policy)), [rules / "policy-7b.yaml"], f"{STEP}s")
    passes(promtool, tmp_path / "states.yaml", list(state_tests()), [rules / "_evaluator.yaml"], "5s")


@pytest.mark.slow
def test_what_fires_goes_on_while_no_evaluator_lives(promtool, policy: Contract, tmp_path: Path) -> None:
    """A breach and a silence are neither over nor new because the evaluator died; its end is one alert of its own."""
    write(prometheus_files([policy]), tmp_path)
    lived = "0+15x39 stale"  # ten minutes
    cells = {
        cell("kc_verdict"): "3x39 stale",
        cell("kc_verdict", "code"): "2x39 stale",
        cell("kc_verdict", clause="reward"): "0x39 stale",
        LIVING[0]: lived,
    }

    def firing(at: str, name: str, slices: list[str]) -> dict:
        """That alerts of this name fire on these slices, and on no others."""
        of = 'alertstate="firing", clause="token-tv", step=~"1|3"'
        expr = f'group by (clause, slice) (ALERTS{{alertname="{name}", {of}}})'
        expected = [{"labels": f'{{clause="token-tv", slice="{slice}"}}', "value": 1} for slice in slices]
        return {"expr": expr, "eval_time": at, "exp_samples": expected}

    test = {
        "interval": "15s",
        "input_series": [{"series": series, "values": values} for series, values in cells.items()],
        "promql_expr_test": [
            firing(at, name, slices)
            for at in ("9m45s", "60m")
            for name, slices in (("KernelContractBroken", ["all"]), ("KernelContractNoData", ["code"]))
        ]
        + [{"expr": 'count(ALERTS{alertname="KernelContractEvaluatorDown", alertstate="firing"})',
            "eval_time": "60m", "exp_samples": [{"value": 1}]}],
    }  # fmt: skip
    rules = [tmp_path / "prometheus" / "rules" / name for name in ("policy-7b.yaml", "_evaluator.yaml")]
    passes(promtool, tmp_path / "test.yaml", [test], rules)


LIVES = 'kc_evaluator_last_evaluation_seconds{kc_contract="policy-7b"'
PAIR = 'kc_contract="policy-7b",kc_kernel_train="a",kc_kernel_inference="b"'


@pytest.mark.parametrize("another", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_states_go_on_while_nobody_judges_their_contract(
    promtool, policy: Contract, tmp_path: Path, another: bool
) -> None:
    """They are neither over nor new because its evaluator died; one that judges another contract says nothing of it."""
    write(prometheus_files([policy]), tmp_path)
    series = {
        f"{LIVES}}}": "0+15x20 stale _x39 900+15x20",
        f'kc_incident{{{PAIR},kc_incident="i",kc_incident_on="fail"}}': "0x20 stale _x39 0x5 1x20",
        'kc_promotion_stage{kc_contract="policy-7b",kc_kernel_inference="b"}': "-2x20 stale _x39 -2x5 -1x20",
        f'kc_evaluator_missing{{{PAIR},kc_outcome="future"}}': "1x20 stale _x39 1x5 0x20",
        cell("kc_verdict"): "3x20 stale _x39 3x5 0x20",
    }
    if another:
        series['kc_evaluator_last_evaluation_seconds{kc_contract="other"}'] = "0+15x80"
    names = ("Broken", "PointsMissing", "RolledBack", "Unproven")

    def firing(at: str, *names: str) -> dict:
        expected = [{"labels": f'{{alertname="KernelContract{name}"}}', "value": 1} for name in names]
        firing = 'ALERTS{alertstate="firing", severity!="warning"} or ALERTS{alertstate="firing", clause=""}'
        return {"expr": f"group by (alertname) ({firing})", "eval_time": at, "exp_samples": expected}

    test = {
        "interval": "15s",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            firing("4m45s", *names), firing("8m", *sorted((*names, "EvaluatorDown"))), firing("15m30s", *names)
        ],
    }  # fmt: skip
    rules = [tmp_path / "prometheus" / "rules" / name for name in ("policy-7b.yaml", "_evaluator.yaml")]
    passes(promtool, tmp_path / "test.yaml", [test], rules)


def test_the_silence_of_a_slice_that_is_kept_away_as_ordered_is_no_alert(
    promtool, policy: Contract, tmp_path: Path
) -> None:
    write(prometheus_files([policy]), tmp_path)
    series = {
        f"{LIVES}}}": "0+15x80",
        cell("kc_verdict"): "2x80",
        cell("kc_verdict", "code"): "2x80",
        cell("kc_verdict_no_traffic", "code"): "1x80",
    }
    expr = 'group by (slice) (ALERTS{alertname="KernelContractNoData", alertstate="firing", clause="token-tv"})'
    test = {
        "interval": "15s",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {"expr": expr, "eval_time": "19m", "exp_samples": [{"labels": '{slice="all"}', "value": 1}]}
        ],
    }
    passes(promtool, tmp_path / "test.yaml", [test], [tmp_path / "prometheus" / "rules" / "policy-7b.yaml"])


def route(slice: str, version: str, kernel: str) -> str:
    where = f'kc_contract="c", kc_slice="{slice}", kc_kernel_inference="{version}"'
    return f'kc_route{{{where}, kc_route_kernel="{kernel}"}}'


CASES = {
    "a limit of zero has no margin share": (
        queries.margin_share(),
        [(cell("kc_bound_margin"), "-1x40"), (cell("kc_bound_limit"), "0x40")],
        [],
    ),
    "the worst pair of kernels is shown": (
        queries.VERDICTS,
        [(cell("kc_verdict"), "0x40"), (cell("kc_verdict").replace(INFERENCE, "cc"), "3x40")],
        [('{kc_contract="policy-7b", kc_clause="token-tv", kc_slice="all"}', 3)],
    ),
    "a route to the training kernel is one, to the inference kernel zero": (
        queries.ROUTES,
        [
            (route("all", "v2", "inference-kernel"), "1x40"),
            (route("code", "v2", "inference-kernel"), "1x40"),
            (route("code", "v1", "train-kernel"), "_x20 1x20"),
        ],
        [
            ('{kc_contract="c", kc_slice="all", kc_kernel_inference="v2"}', 0),
            ('{kc_contract="c", kc_slice="code", kc_kernel_inference="v1"}', 1),
            ('{kc_contract="c", kc_slice="code", kc_kernel_inference="v2"}', 0),
        ],
    ),
    "a firing step is one, a quiet one is not there": (
        queries.ALERTS,
        [
            ('kc_alert_firing{kc_contract="c", kc_clause="k", kc_slice="s", kc_severity="critical"}', "1x40"),
            ('kc_alert_firing{kc_contract="c", kc_clause="k", kc_slice="s", kc_severity="warning"}', "0x40"),
        ],
        [('{kc_contract="c", kc_clause="k", kc_slice="s", kc_severity="critical"}', 1)],
    ),
    "a promise is a label of every cell of its clause": (
        queries.promises(),
        [
            (cell("kc_verdict"), "3x40"),
            (cell("kc_verdict", "code"), "0x40"),
            (info(instance="a"), "1x40"),
            (info(instance="b"), "1x40"),
            (info(contract="another", promise="something else"), "1x40"),
        ],
        [(cell("", more=', kc_clause_promise="p"'), 1), (cell("", "code", more=', kc_clause_promise="p"'), 1)],
    ),
    "two versions of a promise are one row": (
        f"count({queries.promises()})",
        [
            (cell("kc_verdict"), "3x40"),
            (info(promise="old", instance="a"), "1x40"),
            (info(promise="new", instance="b"), "1x40"),
        ],
        [("{}", 1)],
    ),
    "a limit is the smallest of the clauses on its metric and statistic": (
        queries.limits("tv_token", statistic="mean"),
        [
            (cell("kc_bound_limit"), "0.5x40"),
            (cell("kc_bound_limit", clause="other-mean"), "0.25x40"),
            (cell("kc_bound_limit", clause="tail"), "0.125x40"),
            (cell("kc_bound_limit", clause="reward"), "0.1x40"),
            (info(), "1x40"),
            (info(clause="other-mean"), "1x40"),
            (info(clause="tail", statistic="p99"), "1x40"),
            (info(clause="reward", metric="reward_drift_bound"), "1x40"),
        ],
        [('{kc_contract="policy-7b", kc_slice="all"}', 0.25)],
    ),
    "a step is known without an evaluator": (queries.minimum_step(), [], [("{}", 30)]),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_dashboard_queries_answer_what_they_say(promtool, tmp_path: Path, case: str) -> None:
    expression, series, expected = CASES[case]
    asked = {
        "expr": as_in_grafana(expression),
        "eval_time": "30m",
        "exp_samples": [{"labels": labels, "value": value} for labels, value in expected],
    }
    rows = [{"series": name, "values": values} for name, values in series]
    passes(promtool, tmp_path / "queries.yaml", [{"interval": "1m", "input_series": rows, "promql_expr_test": [asked]}])


@pytest.mark.slow
def test_vmalert_takes_the_rules_on_verdicts(program, repository: Path) -> None:
    command = [program("vmalert"), "-dryRun", f"-rule={repository}/dashboards/prometheus/rules/*.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
