"""Grafana dashboards and alerts made from contracts. Needs the extra `grafana`."""

from __future__ import annotations

from collections.abc import Iterable

from kc_otel.contract.model import Contract
from kc_otel.generate.files import GeneratedFile
from kc_otel.generate.grafana.alerting import DATASOURCE_UID, alerting_file
from kc_otel.generate.ladder import unique_names

__all__ = ["DATASOURCE_UID", "grafana_files"]


def grafana_files(contracts: Iterable[Contract], datasource_uid: str = DATASOURCE_UID) -> tuple[GeneratedFile, ...]:
    """One overview of all contracts, and for each contract a file of alerts, sorted by the contracts' names.

    Args:
        contracts: The contracts.
        datasource_uid: UID of the data source that the alerts query; dashboards let a person choose.

    Raises:
        ValueError: If two contracts have the same name.
        ModuleNotFoundError: If the Grafana SDK is not installed.
    """
    from kc_otel.generate.grafana.overview import overview_file  # noqa: PLC0415 - the SDK is an extra

    ordered = unique_names(contracts)
    return (overview_file(ordered), *(alerting_file(contract, datasource_uid) for contract in ordered))
