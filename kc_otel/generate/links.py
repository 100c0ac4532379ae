"""Where the dashboards are: identities that alerts, rules and dashboards have to agree on, for every contract alike."""

from __future__ import annotations

from typing import Final
from urllib.parse import quote

__all__ = [
    "EVALUATED_ID",
    "FOLDER",
    "HEALTH_UID",
    "INVALID_INPUT_ID",
    "MEANING_UID",
    "NOT_HOLDING_ID",
    "OVERVIEW_UID",
    "PROMOTION_UID",
    "RL_UID",
    "SLICE_UID",
    "meaning_link",
    "overview_link",
    "slice_link",
]

OVERVIEW_UID: Final = "kc-overview"
SLICE_UID: Final = "kc-slice"
RL_UID: Final = "kc-rl"
PROMOTION_UID: Final = "kc-promotion"
HEALTH_UID: Final = "kc-health"
MEANING_UID: Final = "kc-meaning"
FOLDER: Final = "Kernel contracts"

NOT_HOLDING_ID: Final = 7
"""Panel of the overview: what does not hold."""
EVALUATED_ID: Final = 36
"""Panel of the health dashboard: how long ago an evaluator judged last."""
INVALID_INPUT_ID: Final = 32
"""Panel of the health dashboard: sequences that failed an input check."""


def overview_link(contract: str, slice_text: str) -> str:
    """Path of the overview for a contract and a slice; `slice_text` is put in as it is, and may be a template."""
    return f"/d/{OVERVIEW_UID}?var-contract={quote(contract)}&var-slice={slice_text}"


def slice_link(contract_text: str, clause_text: str, slice_text: str) -> str:
    """Path of the Slice dashboard for one cell; all three are put in as they are, and may be templates."""
    return f"/d/{SLICE_UID}?var-contract={contract_text}&var-clause={clause_text}&var-slice={slice_text}"


def meaning_link(contract_text: str, clause_text: str) -> str:
    """Path of what a clause means; both are put in as they are, and may be templates."""
    return f"/d/{MEANING_UID}?var-contract={contract_text}&var-clause={clause_text}"
