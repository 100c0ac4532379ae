"""Where the dashboards are: identities that alerts, rules and dashboards have to agree on."""

from __future__ import annotations

import hashlib
from typing import Final
from urllib.parse import quote

__all__ = ["FOLDER", "OVERVIEW_UID", "overview_link", "panel_id"]

OVERVIEW_UID: Final = "kc-overview"
FOLDER: Final = "Kernel contracts"

_FIRST_HASHED: Final = 1000


def panel_id(contract: str, clause: str) -> int:
    """Id of a clause's panel on the overview, the same whichever other contracts are generated with it.

    Ids below 1000 are left to panels that belong to no clause.
    """
    digest = hashlib.sha256(f"{contract}/{clause}".encode()).digest()
    return _FIRST_HASHED + int.from_bytes(digest[:4], "big") // 4


def overview_link(contract: str, slice_text: str) -> str:
    """Path of the overview for a contract and a slice; `slice_text` is put in as it is, and may be a template."""
    return f"/d/{OVERVIEW_UID}?var-contract={quote(contract)}&var-slice={slice_text}"
