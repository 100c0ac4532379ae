"""Rules and queries under Prometheus' own tool: what it accepts, when alerts fire, and what queries answer."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from kc_otel.contract.clause import Clause
from kc_otel.contract.load import load_all
from kc_otel.contract.model import Contract
from kc_otel.contract.registry.own_metrics import label, selector
from kc_otel.generate.alert_texts import (
    EVALUATOR_DOWN,
    FRESH_SECONDS,
    STATE_ALERTS,
    AlertStep,
    StateAlert,
    alert_steps,
    annotation_texts,
    static_labels,
)
from kc_otel.generate.files import write
from kc_otel.generate.grafana import queries
from kc_otel.generate.grafana.alerting import alert_rule, alerting_file, evaluator_alerting_file
from kc_otel.generate.grafana.promotion_board import promotion_file
from kc_otel.generate.prometheus import prometheus_files
from kc_otel.generate.prometheus.alerting_rules import BOUNDS
from kc_otel.generate.prometheus.standalone_rules import standalone_file
from kc_otel.judge.verdict import FAULTS, Status
from tests.generate.test_dashboards import panels

STEP = 10
"""Seconds between evaluations: every duration of the contract is a multiple of it."""
CALM = 4 * STEP
CELL = {"kc.slice": "all", "kc.kernel.train": "0123456789ab", "kc.kernel.inference": "ba9876543210"}
BEYOND = {"estimate": 1.5, "lower bound": 1.25, "upper bound": 1.75, "limit": 1.0}


def rule_tests(contract: Contract) -> Iterator[dict[str, Any]]:
    """Tests of a contract's rules, for `promtool test rules`.

    One per clause and verdict that a step waits for: every cell passes, then the clause gets that verdict on all
    traffic for as long as its slowest step needs, then the verdicts that keep it firing (if any), then PASS until every
    alert has cleared. Each step is quiet just before its `for` is over and fires when it is, fires just before its
    `clear_for` is over and is quiet when it is; nothing else fires.
    """
    every = alert_steps(contract)
    for clause in contract.clauses:
        for status in Status:
            if steps := [alert for alert in every if alert.clause is clause and alert.status is status]:
                yield _test(contract, clause, status, steps)


def _test(contract: Contract, clause: Clause, status: Status, steps: list[AlertStep]) -> dict[str, Any]:
    held_by = FAULTS[steps[0].step.on].held_by
    hold = round(CALM + max(alert.step.after for alert in steps) + CALM)
    over = hold + CALM * len(held_by)
    end = round(over + max(alert.step.clear_for for alert in steps) + CALM)
    spans = [(alert, CALM + alert.step.after, over + alert.step.clear_for) for alert in steps]
    edges = {float(hold), *(edge for _, *span in spans for edge in span)}

    def fired(at: float) -> list[dict[str, Any]]:
        return [_alert(alert, clause, held=at >= hold) for alert, up, down in spans if up <= at < down]

    names = {alert.name for alert in alert_steps(contract) if alert.clause is not None}
    verdicts = [(Status.PASS, CALM), (status, hold - CALM), *((held, CALM) for held in held_by)]
    verdicts.append((Status.PASS, end - over))
    moves = " ".join(f"{of.code}x{seconds // STEP - 1}" for of, seconds in verdicts)  # `0x3` is four samples
    lasts = f"_x{CALM // STEP} 2x{(over - CALM) // STEP - 1} stale"
    return {
        "name": f"{clause.id}: {status}",
        "interval": f"{STEP}s",
        "input_series": [
            *_series(contract, clause, moves, end // STEP),
            {"series": _incident(contract, steps[0]), "values": lasts},
        ],
        "alert_rule_test": [
            *(
                {"eval_time": f"{at:g}s", "alertname": steps[0].name, "exp_alerts": fired(at)}
                for edge in sorted(edges)
                for at in (edge - STEP, edge)
            ),
            *({"eval_time": f"{hold - STEP}s", "alertname": name} for name in names - {steps[0].name}),
        ],
    }


def _incident(contract: Contract, alert: AlertStep) -> str:
    pair = {name: CELL[name] for name in ("kc.kernel.train", "kc.kernel.inference")}
    return selector("kc.incident", {"kc.contract": contract.name, "kc.incident.on": alert.step.on, **pair})


def _series(contract: Contract, moving: Clause, verdicts: str, steps: int) -> list[dict[str, str]]:
    found = {selector("kc.evaluator.last_evaluation", {"kc.contract": contract.name}): f"0+{STEP}x{steps}"}
    for clause in contract.clauses:
        cell = {"kc.contract": contract.name, "kc.clause": clause.id, **CELL}
        found[selector("kc.verdict", cell)] = verdicts if clause is moving else f"{Status.PASS.code}x{steps}"
    cell = {"kc.contract": contract.name, "kc.clause": moving.id, **CELL}
    found |= {selector("kc.verdict", {**cell, "kc.slice": name}): f"0x{steps}" for name in contract.slices}
    found |= {selector(f"kc.bound.{BOUNDS[name]}", cell): f"{v!r}x{steps}" for name, v in _bounds(moving).items()}
    return [{"series": series, "values": values} for series, values in found.items()]


def _bounds(clause: Clause) -> dict[str, float]:
    return {name: clause.limit_for("all") * factor for name, factor in BEYOND.items()}


def _alert(alert: AlertStep, clause: Clause, *, held: bool = False, contained: bool = False) -> dict[str, Any]:
    slice, train, inference = CELL.values()
    bounds = {name: f"{value:.4g}" for name, value in _bounds(clause).items()}
    kernels = f" for {inference} against {train}"
    return {
        "exp_labels": {
            **{label(name): value for name, value in CELL.items()},
            **static_labels(alert),
            "slice": slice,
            "kernel_train": train,
            "kernel_inference": inference,
        },
        "exp_annotations": annotation_texts(
            alert, "all traffic", kernels, lambda *texts: texts[2 if contained else held], slice=slice, bounds=bounds
        ),
    }


def state_tests() -> Iterator[dict[str, Any]]:
    """An evaluator that goes away and comes back, one that hangs, and two of which one goes on; and states that end."""
    first, other = (selector("kc.evaluator.last_evaluation", None, f'instance="{name}"') for name in "ab")
    hung = FRESH_SECONDS + EVALUATOR_DOWN.after
    for name, series, expected in (
        ("it goes away at 2m and is back at 4m", {first: "0+5x23 stale _x23 240+5x12"},
         {120: 0, 145: 0, 150: 1, 235: 1, 240: 0}),
        ("it hangs at 2m", {first: "0+5x24 120x40"}, {120 + hung - 5: 0, 120 + hung: 1}),
        ("one of two goes away at 2m", {first: "0+5x23 stale", other: "0+5x60"}, {200: 0, 300: 0}),
        ("there never was one", {}, {25: 0, 30: 1}),
    ):  # fmt: skip
        yield _state_test(
            name, series, EVALUATOR_DOWN.name, {at: [(EVALUATOR_DOWN, {})] * n for at, n in expected.items()}
        )
    # A state begins at 2m and ends at 4m, beside one of another kind that does not fire.
    pair = {"kc.contract": "policy-7b", "kc.kernel.train": "t1", "kc.kernel.inference": "v2"}
    for alert, name, of, fires, quiet, values, still in (
        (STATE_ALERTS[2], "kc.incident", "kc.incident.on", "fail", "no-data", "2x23 0x23 1x23", "2x69"),
        (STATE_ALERTS[3], "kc.evaluator.missing", "kc.outcome", "future", "late", "0x23 3x23 0x23", "0x69"),
    ):
        series = {selector(name, {**pair, of: fires}): values, selector(name, {**pair, of: quiet}): still}
        where = pair | ({of: fires} if "outcome" in alert.given else {})
        times = {at: [(alert, where)] * firing for at, firing in {115: 0, 120: 1, 235: 1, 240: 0}.items()}
        yield _state_test(f"{alert.name} begins and ends", series, alert.name, times)
    # One version is rolled back at 2m and serves from 4m to 6m; another was rolled back long before.
    values = {"v2": "2x23 -1x23 -2x23 -1x2000", "v1": "-1x2072"}
    of = {"kc.contract": "policy-7b"}
    series = {
        selector("kc.promotion.stage", {**of, "kc.kernel.inference": name}): text for name, text in values.items()
    }
    since = {"v2": "0x23 120x23 120x23 120x2000", "v1": "-7200x2072"}
    series |= {selector("kc.promotion.since", {**of, "kc.kernel.inference": name}): t for name, t in since.items()}
    warning, critical = ((alert, {**of, "kc.kernel.inference": "v2"}) for alert in STATE_ALERTS[:2])
    times = {115: [], 120: [warning], 235: [warning], 240: [warning, critical], 360: [warning], 3720: []}
    yield _state_test("a version is rolled back", series, STATE_ALERTS[0].name, times)


def _state_test(
    name: str, series: Mapping[str, str], alert: str, times: Mapping[float, list[tuple[StateAlert, dict[str, str]]]]
) -> dict[str, Any]:
    lives = {selector("kc.evaluator.last_evaluation", {"kc.contract": "policy-7b"}): "0+5x2072"}
    series = {**series, **(lives if alert != EVALUATOR_DOWN.name else {})}
    return {
        "name": name,
        "interval": "5s",
        "input_series": [{"series": written, "values": values} for written, values in series.items()],
        "alert_rule_test": [
            {"eval_time": f"{at:g}s", "alertname": alert, "exp_alerts": [_fired(*fired) for fired in firing]}
            for at, firing in times.items()
        ],
    }


def _fired(alert: StateAlert, where: Mapping[str, str]) -> dict[str, Any]:
    labels = {label(name): value for name, value in where.items()}
    return {
        "exp_labels": {**labels, **alert.labels(labels.__getitem__)},
        "exp_annotations": alert.texts(labels.__getitem__),
    }


TRAIN, INFERENCE = CELL["kc.kernel.train"], CELL["kc.kernel.inference"]
PAIR = 'kc_contract="policy-7b",kc_kernel_train="a",kc_kernel_inference="b"'


def lives(contract: str = "policy-7b") -> str:
    return selector("kc.evaluator.last_evaluation", {"kc.contract": contract})


def cell(metric: str, slice: str = "all", clause: str = "token-tv", more: str = "") -> str:
    kernels = f'kc_kernel_train="{TRAIN}", kc_kernel_inference="{INFERENCE}"'
    return f'{metric}{{kc_contract="policy-7b", kc_clause="{clause}", kc_slice="{slice}", {kernels}{more}}}'


def info(contract: str = "policy-7b", clause: str = "token-tv", instance: str = "a", **said: str) -> str:
    said = {"metric": "tv_token", "statistic": "mean", "unit": "1", "promise": "p"} | said
    words = "".join(f', kc_clause_{name}="{text}"' for name, text in said.items())
    return f'kc_clause_info{{kc_contract="{contract}", kc_clause="{clause}"{words}, instance="{instance}"}}'


def as_in_grafana(expression: str) -> str:
    """A query with the dashboard's variables filled in as Grafana does when all is picked."""
    filled = expression.replace("$__range", "1h").replace("$__rate_interval", "5m")
    return re.sub(r"\$(contract|slice|kernel_train|kernel_inference)", ".*", filled)


def found(expression: str, at: str, *expected: str, value: float = 1) -> dict[str, Any]:
    """That a query finds series with these labels and this value at a time, and no others."""
    samples = [{"labels": labels, "value": value} for labels in expected]
    return {"expr": expression, "eval_time": at, "exp_samples": samples}


@pytest.fixture
def passes(promtool, tmp_path: Path):
    """A function that runs `promtool test rules`."""

    def run(tests: list[dict], *rules: Path, interval: str = "15s") -> None:
        content = {"rule_files": list(map(str, rules)), "evaluation_interval": interval, "tests": tests}
        (tmp_path / "tests.yaml").write_text(yaml.dump(content, width=10**6))
        code, said = promtool("test", "rules", tmp_path / "tests.yaml")
        assert code == 0, said

    return run


@pytest.fixture
def answer(passes):
    """A function that asks queries where there are these series."""

    def ask(series: Mapping[str, str], asked: list[dict], *rules: Path, interval: str = "15s") -> None:
        rows = [{"series": name, "values": values} for name, values in series.items()]
        passes([{"interval": interval, "input_series": rows, "promql_expr_test": asked}], *rules)

    return ask


@pytest.fixture
def rules(policy: Contract, tmp_path: Path) -> tuple[Path, Path]:
    """The files of rules of the contract, and of all contracts."""
    write(prometheus_files([policy]), tmp_path)
    return tuple(tmp_path / "prometheus" / "rules" / name for name in ("policy-7b.yaml", "_evaluator.yaml"))


@pytest.mark.slow
def test_every_rule_file_passes_lint(promtool, repository, policy, tmp_path):
    write(prometheus_files([policy, *load_all([repository / "contracts"])]), tmp_path)
    code, said = promtool("check", "rules", "--lint=all", "--lint-fatal", *tmp_path.glob("prometheus/**/rules/*"))
    assert code == 0, said


@pytest.mark.slow
def test_what_grafana_asks_is_promql(promtool, policy, tmp_path):
    files = alerting_file(policy), evaluator_alerting_file()
    groups = [group for file in files for group in yaml.safe_load(file.text)["groups"]]
    asked = [rule["data"][0]["model"]["expr"] for group in groups for rule in group["rules"]]
    rules = [{"record": f"asked_{place}", "expr": text} for place, text in enumerate(asked)]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "grafana", "rules": rules}]}))
    code, said = promtool("check", "rules", "--lint=none", tmp_path / "rules.yaml")
    assert (code, f"{len(asked)} rules found" in said) == (0, True), said


@pytest.mark.slow
def test_each_alert_fires_and_clears_in_time(passes, policy, rules):
    """It is quiet just before its `for`, fires after it, tells the numbers, and clears after `clear_for`."""
    passes(list(rule_tests(policy)), rules[0], interval=f"{STEP}s")
    passes(list(state_tests()), rules[1], interval="5s")


@pytest.mark.slow
def test_the_alert_of_a_contained_breach_says_that_requests_are_kept_away(passes, policy, rules):
    """Also once the verdict is NO_DATA, as nothing is measured; two evaluators have to agree, of these kernels."""
    clause = next(clause for clause in policy.clauses if clause.id == "token-tv")
    steps = [alert for alert in alert_steps(policy) if alert.clause is clause and alert.step.on == "fail"]
    ready = max(alert.step.after for alert in steps) + STEP
    size = round(ready / STEP) + 12
    series = _series(policy, clause, f"3x{size - 3} 2x3", size)
    for instance, kernels, states in (
        ("a", CELL, f"2x{size - 9} 1x8"), ("b", CELL, f"2x{size - 5} 1x4"),
        ("a", CELL | {"kc.kernel.inference": "another"}, f"1x{size}"),
    ):  # fmt: skip
        pair = {name: kernels[name] for name in ("kc.kernel.train", "kc.kernel.inference")}
        of = {"kc.contract": policy.name, "kc.incident.on": "fail", **pair}
        series.append({"series": selector("kc.incident", of, f'instance="{instance}"'), "values": states})
    asked = [
        {
            "eval_time": f"{at * STEP}s", "alertname": steps[0].name,
            "exp_alerts": [_alert(alert, clause, contained=contained) for alert in steps],
        }
        for at, contained in ((size - 6, False), (size - 3, True), (size - 1, True))
    ]  # fmt: skip
    passes([{"interval": f"{STEP}s", "input_series": series, "alert_rule_test": asked}], rules[0], interval=f"{STEP}s")


def test_the_alert_of_a_breach_that_is_not_judged_now_claims_nothing_of_its_last_verdict(policy):
    """An evaluator that died after a FAIL has shown no other verdict; nor may the version still wait for a rollback."""
    alert = next(alert for alert in alert_steps(policy) if alert.step.on == "fail")
    text = annotation_texts(alert, "all traffic", "", lambda _now, held, _contained: held)["description"]
    assert text.startswith("Nothing has refuted the breach, though the last verdict may no longer show it. Actions: ")
    assert "roll the kernel version back or pin the slice to the training kernel, unless that was done. " in text


def test_the_alert_of_missing_data_does_not_say_that_a_run_that_ended_goes_unseen(policy):
    alert = next(alert for alert in alert_steps(policy) if alert.step.on == "no-data")
    text = annotation_texts(alert, "all traffic", "", lambda *_: "")["description"]
    assert text.startswith("Unless its run has ended, nothing monitors all traffic: a fault there goes unseen. ")


@pytest.mark.slow
def test_what_fires_goes_on_while_no_evaluator_lives(answer, rules):
    """A breach and a silence are neither over nor new because the evaluator died; its end is one alert of its own."""
    series = {
        lives(): "0+15x39 stale",  # ten minutes
        cell("kc_verdict"): "3x39 stale",
        cell("kc_verdict", "code"): "2x39 stale",
        cell("kc_verdict", clause="reward"): "0x39 stale",
    }
    of = 'alertstate="firing", clause="token-tv", step=~"1|3"'
    asked = [
        found(f'group by (slice) (ALERTS{{alertname="KernelContract{name}", {of}}})', at, f'{{slice="{slice}"}}')
        for at in ("9m45s", "60m")
        for name, slice in (("Broken", "all"), ("NoData", "code"))
    ]
    down = found('count(ALERTS{alertname="KernelContractEvaluatorDown", alertstate="firing"})', "60m", "{}")
    answer(series, [*asked, down], *rules)


@pytest.mark.slow
def test_a_breach_whose_run_has_ended_fires_until_the_evaluator_closes_it(answer, policy, rules) -> None:
    """Without data its cell proves nothing for ever after; another kind of incident of its kernels goes on."""
    alert = next(of for of in alert_steps(policy) if of.clause_id == "token-tv" and of.step.on == "fail")
    series = {
        lives(): "0+15x160",
        cell("kc_verdict"): "3x19 2x140",
        _incident(policy, alert): "2x39 stale",
        _incident(policy, alert).replace('"fail"', '"no-data"'): "_x40 2x120",
    }
    for expression in (
        f'count(ALERTS{{alertname="{alert.name}", alertstate="firing", step="{alert.number}"}})',
        f"count({alert_rule(alert, 'prometheus')['data'][0]['model']['expr']} > 0)",
    ):
        answer(series, [found(expression, "9m45s", "{}"), found(expression, "25m")], rules[0])


@pytest.mark.slow
@pytest.mark.parametrize("another", [{}, {lives("other"): "0+15x80"}], ids=["alone", "beside another"])
def test_states_go_on_while_nobody_judges_their_contract(answer, rules, another: dict) -> None:
    """They are neither over nor new because its evaluator died; one that judges another contract says nothing of it."""
    series = {
        lives(): "0+15x20 stale _x39 900+15x20",
        f'kc_incident{{{PAIR},kc_incident="i",kc_incident_on="fail"}}': "0x20 stale _x39 0x5 1x20",
        'kc_promotion_stage{kc_contract="policy-7b",kc_kernel_inference="b"}': "-2x20 stale _x39 -2x5 -1x20",
        f'kc_evaluator_missing{{{PAIR},kc_outcome="future"}}': "1x20 stale _x39 1x5 0x20",
        cell("kc_verdict"): "3x20 stale _x39 3x5 0x20",
    }
    names = [f'{{alertname="KernelContract{name}"}}' for name in ("Broken", "PointsMissing", "RolledBack", "Unproven")]
    firing = 'ALERTS{alertstate="firing", severity!="warning"} or ALERTS{alertstate="firing", clause=""}'
    query, down = f"group by (alertname) ({firing})", '{alertname="KernelContractEvaluatorDown"}'
    asked = [found(query, "4m45s", *names), found(query, "8m", *names, down), found(query, "15m30s", *names)]
    answer(series | another, asked, *rules)


@pytest.mark.slow
def test_states_of_a_contract_that_was_retired_end_a_day_later(answer, rules) -> None:
    """Its evaluators judge another contract, such as one that it was renamed to."""
    series = {
        lives(): "0+600x6 stale",
        lives("policy-8b"): "0+600x300",
        f'kc_incident{{{PAIR},kc_incident="i",kc_incident_on="fail"}}': "0x6 stale",
        'kc_promotion_stage{kc_contract="policy-7b",kc_kernel_inference="b"}': "-2x6 stale",
        f'kc_evaluator_missing{{{PAIR},kc_outcome="future"}}': "1x6 stale",
    }
    fires = 'count(ALERTS{alertstate="firing", contract="policy-7b", alertname!="KernelContractEvaluatorDown"})'
    answer(series, [found(fires, "24h", "{}", value=3), found(fires, "26h")], rules[1], interval="10m")


@pytest.mark.slow
def test_what_is_known_to_be_broken_is_shown_beside_a_contract_that_is_not_judged(answer) -> None:
    """One that was retired within a day, say; there is a 0 only where all are judged."""
    query = as_in_grafana(queries.known("kc_verdict == 3"))
    for verdict, then, later in ((3, 1, ["{}"]), (0, 0, [])):
        series = {lives("other"): "0+60x10 stale", lives(): "0+60x200", cell("kc_verdict"): f"{verdict}x200"}
        answer(series, [found(query, "5m", "{}", value=then), found(query, "190m", *later)], interval="1m")


@pytest.mark.slow
def test_the_silence_of_a_slice_that_is_kept_away_as_ordered_is_no_alert(answer, rules) -> None:
    series = {
        lives(): "0+15x80",
        cell("kc_verdict"): "2x80",
        cell("kc_verdict", "code"): "2x80",
        cell("kc_verdict_no_traffic", "code"): "1x80",
    }
    query = 'group by (slice) (ALERTS{alertname="KernelContractNoData", alertstate="firing", clause="token-tv"})'
    answer(series, [found(query, "19m", '{slice="all"}')], rules[0])


@pytest.mark.slow
def test_the_first_sequences_that_fail_are_an_alert_and_those_before_an_outage_are_none(answer, rules) -> None:
    """A series begins with them: `increase` counts what comes after its first value."""
    failed = f'kc_input_invalid_total{{{PAIR},kc_slice="all",kc_reason="nan_logprob"}}'
    fires = 'count(ALERTS{alertstate="firing", alertname="KernelContractInvalidInput"})'
    series = {lives(): "0+15x400", failed: "_x40 32x320"}
    answer(series, [found(fires, "12m", "{}"), found(fires, "30m")], rules[0])
    old = {lives(): "_x40 600+15x320", failed: "_x40 32x160 33x200"}  # Prometheus is new, and they are not
    answer(old, [found(fires, "12m"), found(fires, "52m", "{}")], rules[0])
    series = {lives(): "0+15x400", failed: "32x80 stale _x80 32x240"}
    answer(series, [found(fires, "42m")], rules[0])


@pytest.mark.slow
def test_a_maximum_of_none_passes_in_standalone_rules_while_none_is_seen(answer, policy, tmp_path) -> None:
    """Steps of a lag are whole numbers: what the zero bucket holds is 0."""
    lag = {"id": "lag", "metric": "weights_lag", "statistic": "max", "limit": 0}
    contract = Contract.model_validate(policy.model_dump(by_alias=True) | {"statistical": [], "runtime": [lag]})
    write([standalone_file(contract)], tmp_path)
    names = f'kc_contract="{policy.name}",kc_slice="all",{PAIR.partition(",")[2]}'
    none = "{{schema:4 count:%d sum:0 z_bucket:%d z_bucket_w:0.5 buckets:[0]}}"
    counts = [none % (100 * at, 100 * at) for at in range(1, 60)]
    one = "{{schema:4 count:%d sum:1 z_bucket:%d z_bucket_w:0.5 offset:-1 buckets:[0 1]}}"
    counts += [one % (100 * at + 1, 100 * at) for at in range(60, 81)]
    status = f'kc_rule_status{{kc_contract="{policy.name}", kc_clause="lag"}}'
    cell_of = f'{{__name__="kc_rule_status",kc_clause="lag",{names}}}'
    asked = [found(status, "14m", cell_of, value=0), found(status, "18m", cell_of, value=3)]
    answer(
        {f"kc_weights_lag{{{names}}}": " ".join(counts)}, asked, tmp_path / "prometheus/standalone/rules/policy-7b.yaml"
    )


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
    "what failed before and after a restart counts": (
        f"({queries.increase('kc.input.invalid')}) >= bool 35",
        [(f'kc_input_invalid_total{{{PAIR},kc_slice="all"}}', "_x5 10 20 30 5 10 15x14")],
        [("{}", 1)],
    ),
    "a step is known without an evaluator": (queries.minimum_step(), [], [("{}", 30)]),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_dashboard_queries_answer_what_they_say(answer, case):
    expression, series, expected = CASES[case]
    asked = found(as_in_grafana(expression), "30m")
    asked["exp_samples"] = [{"labels": labels, "value": value} for labels, value in expected]
    answer(dict(series), [asked], interval="1m")


@pytest.mark.slow
def test_evidence_of_kernels_that_are_gone_is_no_row_of_the_promotion_board(answer) -> None:
    (table,) = [
        panel for panel in panels(json.loads(promotion_file().text)) if panel["title"].startswith("Evidence by")
    ]
    series = {cell("kc_verdict"): "0x40", cell("kc_verdict").replace(INFERENCE, "cc"): "0x20 stale"}
    pair = f'{{kc_contract="policy-7b", kc_kernel_train="{TRAIN}", kc_kernel_inference="{INFERENCE}"}}'
    share = [target["expr"] for target in table["targets"] if "avg_over_time" in target["expr"]]
    asked = found(as_in_grafana(share[0]), "35m") | {"exp_samples": [{"labels": pair, "value": 1}]}
    answer(series, [asked], interval="1m")


@pytest.mark.slow
def test_vmalert_takes_the_rules_on_verdicts(program, repository):
    command = [program("vmalert"), "-dryRun", f"-rule={repository}/dashboards/prometheus/rules/*.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
