"""Every alerting rule, of Prometheus and of Grafana, on a real Prometheus finds what the evaluator itself says.

The store is that of `test_panel_values`; the recording rules that judge without the evaluator are in its panels.
"""

import pytest
import yaml

from kc_otel.contract.model import Contract
from kc_otel.generate.alert_steps import CELL_LABELS, AlertStep, alert_steps
from kc_otel.generate.grafana.alerting import alerting_file
from kc_otel.generate.prometheus.alerting_rules import rule_file
from kc_otel.judge.verdict import Status, Verdict
from tests.tools.panel_store import GRAFANA, Store
from tests.tools.panel_world import CELL, Labels, World, by

pytestmark = pytest.mark.slow


def found(store: Store, expression: str) -> dict[Labels, float]:
    rows = store.ask(expression, store.world)
    return {frozenset(row["metric"].items()): float(row["value"][1]) for row in rows}


def said(world: World, alert: AlertStep) -> dict[Labels, float]:
    """Code of the verdict on every cell of the clause; for invalid input, 1 for each pair that has some."""
    if alert.clause is None:
        pairs = world.recorded.kernels.values() if alert.contract.name == world.contract.name else ()
        names = ((train.fingerprint, inference.fingerprint) for train, inference in pairs)
        return {frozenset(zip(CELL_LABELS[1:], pair, strict=True)): 1.0 for pair in names}
    where = (alert.contract.name, alert.clause_id)
    rows = world.cells(lambda verdict, _: verdict.status.code)
    return by(CELL_LABELS, [row for row in rows if (row[0]["kc_contract"], row[0]["kc_clause"]) == where])


def both(text: str, contract: Contract) -> list[tuple[AlertStep, dict]]:
    (group,) = yaml.safe_load(text)["groups"]
    return list(zip(alert_steps(contract), group["rules"], strict=True))


def test_every_rule_of_prometheus_is_true_of_the_cells_that_it_waits_for(
    panel_store: Store, panel_contracts: tuple[Contract, ...]
) -> None:
    true = 0
    for contract in panel_contracts:
        for alert, rule in both(rule_file(contract).text, contract):
            expected = said(panel_store.world, alert)
            wanted = 0.0 if alert.status is None else alert.status.code
            holds = {key for key, value in expected.items() if (value > 0 if alert.status is None else value == wanted)}
            assert found(panel_store, rule["expr"]).keys() == holds, rule
            true += len(holds)
    assert true > 20


def test_every_rule_of_grafana_asks_for_the_verdicts(panel_store: Store, panel_contracts: tuple[Contract, ...]) -> None:
    for contract in panel_contracts:
        for alert, rule in both(alerting_file(contract).text, contract):
            expected = said(panel_store.world, alert)
            answer = found(panel_store, rule["data"][0]["model"]["expr"])
            if alert.clause is None:
                answer = {key: float(value > 0) for key, value in answer.items()}
            assert answer == expected, rule
            assert expected or contract is not panel_contracts[0]


def test_breaches_fire_with_their_numbers(panel_store: Store) -> None:
    rules = [rule for group in panel_store.groups for rule in group["rules"]]
    assert {(rule["health"], rule.get("lastError", "")) for rule in rules} == {("ok", "")}
    firing = [alert for rule in rules for alert in rule.get("alerts", []) if alert["state"] == "firing"]
    told = {
        tuple(alert["labels"][name.removeprefix("kc_")] for name in CELL): alert["annotations"]
        for alert in firing
        if (alert["labels"]["alertname"], alert["labels"]["severity"]) == ("KernelContractBroken", "warning")
    }
    broken: dict[tuple[str, ...], list[Verdict]] = {}
    for verdict in (verdict for moment in panel_store.world.now() for verdict, _ in moment.cells):
        if verdict.status is Status.FAIL:
            broken.setdefault(tuple(verdict.cell), []).append(verdict)
    assert told.keys() == broken.keys()
    assert {clause for _, clause, *_ in told} == {"token-tv", "reward"}
    for key, verdicts in broken.items():
        contract, clause, slice, train, inference = key
        pair = f"for {inference} against {train}"
        assert told[key]["summary"] == f"{contract}: {clause} broke its limit on slice {slice} {pair}"
        # Of evaluators side by side, those of either.
        for name in ("estimate", "lower", "upper", "limit"):
            title = name if name in {"estimate", "limit"} else f"{name} bound"
            assert any(f"{title} {getattr(failed, name):.4g}" in told[key]["description"] for failed in verdicts), title
        assert ("{{ rewards }} and ${HOME}" in told[key]["description"]) == (clause == "token-tv")
        assert told[key]["dashboard"] == f"{GRAFANA}/d/kc-overview?var-contract={contract}&var-slice={slice}"
