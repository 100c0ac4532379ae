"""Scoring served requests again with the training kernel, and recording how far the kernels are apart on them."""

from kc_otel.recordings.comparable import refusal
from kc_otel.recordings.rescore.rescorer import RescoreError, Rescorer, RescoreTotals

__all__ = ["RescoreError", "RescoreTotals", "Rescorer", "refusal"]
