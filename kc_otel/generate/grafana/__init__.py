"""Grafana dashboards, which fit every contract, and alerts made from contracts. Needs the extra `grafana`."""

from __future__ import annotations

from collections.abc import Iterable

from kc_otel.contract.model import Contract
from kc_otel.generate.alert_texts import unique_names
from kc_otel.generate.files import NOWHERE, GeneratedFile, Sites
from kc_otel.generate.grafana.alerting import DATASOURCE_UID, alerting_file, evaluator_alerting_file
from kc_otel.generate.grafana.health_board import health_file
from kc_otel.generate.grafana.overview_board import overview_file
from kc_otel.generate.grafana.promotion_board import promotion_file
from kc_otel.generate.grafana.rl_board import rl_file
from kc_otel.generate.grafana.slice_board import slice_file


def grafana_files(
    contracts: Iterable[Contract], datasource_uid: str = DATASOURCE_UID, sites: Sites = NOWHERE
) -> tuple[GeneratedFile, ...]:
    """The dashboards, and files of alerts that query the data source; ValueError if contracts share a name."""
    ordered = unique_names(contracts)
    return (
        overview_file(),
        slice_file(),
        rl_file(),
        promotion_file(),
        health_file(),
        evaluator_alerting_file(datasource_uid, sites),
        *(alerting_file(contract, datasource_uid, sites) for contract in ordered),
    )
