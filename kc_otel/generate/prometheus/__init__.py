"""Prometheus rules made from contracts, tests of them for `promtool test rules`, and Alertmanager's routes.

There are four sets of rules, of which one is loaded: `rules/` alerts on the verdicts that the evaluator exports;
`standalone/rules/` finds the verdicts itself, from the histograms that recorders send, in Prometheus; `mimir/rules/`
has the same rules for Mimir's ruler; and `victoriametrics/rules/` does the same in VictoriaMetrics. Beside the first
stands a rule that an evaluator lives.
"""

from __future__ import annotations

from collections.abc import Iterable

from kc_otel.contract.model import Contract
from kc_otel.generate.alert_steps import unique_names
from kc_otel.generate.files import GeneratedFile
from kc_otel.generate.prometheus.alerting_rules import rule_file
from kc_otel.generate.prometheus.alertmanager_routes import routes_file
from kc_otel.generate.prometheus.evaluator_rule import evaluator_files
from kc_otel.generate.prometheus.mimir import mimir_file
from kc_otel.generate.prometheus.prometheus_rule_resources import kubernetes_file, kubernetes_standalone_file
from kc_otel.generate.prometheus.rule_tests import rule_test_file
from kc_otel.generate.prometheus.standalone_rules import standalone_file
from kc_otel.generate.prometheus.standalone_tests import standalone_test_file
from kc_otel.generate.prometheus.victoria import victoria_file

__all__ = ["prometheus_files"]

_OF_A_CONTRACT = (
    rule_file,
    rule_test_file,
    kubernetes_file,
    standalone_file,
    standalone_test_file,
    kubernetes_standalone_file,
    mimir_file,
    victoria_file,
)


def prometheus_files(contracts: Iterable[Contract]) -> tuple[GeneratedFile, ...]:
    """For each contract, sorted by name, rules, tests, resources; then the rule that an evaluator lives, and routes.

    Raises:
        ValueError: If two contracts have the same name, or a clause needs an assumption that its contract lacks.
    """
    ordered = unique_names(contracts)
    of_each = (make(contract) for contract in ordered for make in _OF_A_CONTRACT)
    return (*of_each, *evaluator_files(), routes_file(ordered))
