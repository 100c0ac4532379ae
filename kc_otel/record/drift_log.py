"""What a trainer's own log can be given: verdicts as scalars, of this process or an evaluator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from opentelemetry.sdk.metrics.export import MetricExporter

from kc_otel.contract.model import Contract

__all__ = ["DriftLog"]


class DriftLog(Protocol):
    """Where a recorder's scalars come from; `kc_otel.TrainingLog` is one. Nothing of it may wait or raise."""

    def attach(self, contract: Contract) -> Sequence[MetricExporter]:
        """Begin in this process, for a contract: what the recorder exports goes to these exporters too."""

    def scalars(self) -> Mapping[str, float]:
        """Finite numbers by name, as of the newest verdicts."""
