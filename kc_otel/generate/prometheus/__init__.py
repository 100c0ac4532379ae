"""Prometheus rules made from contracts, and tests of them for `promtool test rules`."""

from __future__ import annotations

from collections.abc import Iterable

from kc_otel.contract.model import Contract
from kc_otel.generate.files import GeneratedFile
from kc_otel.generate.ladder import unique_names
from kc_otel.generate.prometheus.rule_tests import rule_test_file
from kc_otel.generate.prometheus.rules import rule_file

__all__ = ["prometheus_files"]


def prometheus_files(contracts: Iterable[Contract]) -> tuple[GeneratedFile, ...]:
    """For each contract a file of alerting rules and a file that tests them, sorted by the contracts' names.

    Raises:
        ValueError: If two contracts have the same name.
    """
    ordered = unique_names(contracts)
    return tuple(make(contract) for contract in ordered for make in (rule_file, rule_test_file))
