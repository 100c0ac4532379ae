"""Every alerting rule, of Prometheus and of Grafana, finds on a real Prometheus what the evaluator itself says."""

import pytest
import yaml

from kc_otel.contract.model import Contract
from kc_otel.generate.alert_steps import CELL_LABELS, AlertStep, alert_steps
from kc_otel.generate.grafana.alerting import alerting_file
from kc_otel.generate.prometheus.alerting_rules import rule_file
from tests.tools.panel_store import Labels, Store, World, by

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
