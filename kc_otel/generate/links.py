"""Where the dashboards are: identities that alerts, rules and dashboards have to agree on."""

from __future__ import annotations

import hashlib
from typing import Final
from urllib.parse import quote

__all__ = [
    "FOLDER",
    "HEALTH_UID",
    "MEANING_UID",
    "OVERVIEW_UID",
    "PROMOTION_UID",
    "RL_UID",
    "SLICE_UID",
    "meaning_link",
    "overview_link",
    "panel_id",
    "slice_link",
]

OVERVIEW_UID: Final = "kc-overview"
SLICE_UID: Final = "kc-slice"
RL_UID: Final = "kc-rl"
PROMOTION_UID: Final = "kc-promotion"
HEALTH_UID: Final = "kc-health"
MEANING_UID: Final = "kc-meaning"
FOLDER: Final = "Kernel contracts"

_FIRST_HASHED: Final = 1000


def panel_id(contract: str, clause: str) -> int:
    """Id of a clause's panel on the overview and of its meaning, whichever other contracts are generated with it.

    Ids below 1000 are left to panels that belong to no clause.
    """
    digest = hashlib.sha256(f"{contract}/{clause}".encode()).digest()
    return _FIRST_HASHED + int.from_bytes(digest[:4], "big") // 4


def overview_link(contract: str, slice_text: str) -> str:
    """Path of the overview for a contract and a slice; `slice_text` is put in as it is, and may be a template."""
    return f"/d/{OVERVIEW_UID}?var-contract={quote(contract)}&var-slice={slice_text}"


def slice_link(contract_text: str, clause_text: str, slice_text: str) -> str:
    """Path of the Slice dashboard for one cell; all three are put in as they are, and may be templates."""
    return f"/d/{SLICE_UID}?var-contract={contract_text}&var-clause={clause_text}&var-slice={slice_text}"


def meaning_link(panel_text: object) -> str:
    """Path of what a clause means, alone on the screen; the panel's id may be a template."""
    return f"/d/{MEANING_UID}?viewPanel={panel_text}"
