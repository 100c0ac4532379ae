"""Addresses of dashboards and of the handbook, on which alerts, rules and dashboards agree for every contract."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote

from kc_otel.judge.escalation.webhook_body import runbook_page

OVERVIEW_UID: Final = "kc-overview"
SLICE_UID: Final = "kc-slice"
RL_UID: Final = "kc-rl"
PROMOTION_UID: Final = "kc-promotion"
HEALTH_UID: Final = "kc-health"
FOLDER: Final = "Kernel contracts"

NOT_HOLDING_ID: Final = 7
"""Panel of the overview with the cells that are not PASS."""
EVALUATED_ID: Final = 36
"""Panel of the health dashboard: how long ago an evaluator judged last."""
INVALID_INPUT_ID: Final = 32
"""Panel of the health dashboard: sequences that failed an input check."""
MISSING_ID: Final = 46
"""Panel of the health dashboard: senders whose points are not judged."""
STAGE_ID: Final = 16
"""Panel of the promotion dashboard: the stage of each kernel version."""

_URL: Final = re.compile(r"https?://[^\s{}$<>\"'`]+")


@dataclass(frozen=True, slots=True)
class Sites:
    """Base URLs for the links of alerts; without one there is no such link. Raises ValueError if one is no URL."""

    grafana: str = ""
    evaluator: str = ""

    def __post_init__(self) -> None:
        for name in ("grafana", "evaluator"):
            given = getattr(self, name)
            if given and not _URL.fullmatch(given):
                raise ValueError(f"--{name}-url: {given!r} is not a URL; write one such as https://{name}.example.com")
            object.__setattr__(self, name, given.rstrip("/"))

    def dashboard(self, path: str) -> dict[str, str]:
        """The annotation that leads to a dashboard."""
        return {"dashboard": f"{self.grafana}{path}"} if self.grafana else {}

    def runbook(self, alert: str, own: str = "") -> dict[str, str]:
        """The annotation that leads to what to do: the contract's own runbook, or the handbook of the evaluator."""
        url = own or runbook_page(self.evaluator, alert)
        return {"runbook_url": url} if url else {}


NOWHERE: Final = Sites()
"""No base URL is known."""


def overview_link(contract: str, slice_text: str) -> str:
    """Path of the overview for a contract and a slice; `slice_text` is put in as it is, and may be a template."""
    return f"/d/{OVERVIEW_UID}?var-contract={quote(contract)}&var-slice={slice_text}"


def slice_link(contract_text: str, clause_text: str, slice_text: str) -> str:
    """Path of the Slice dashboard for one cell; all three are put in as they are, and may be templates."""
    return f"/d/{SLICE_UID}?var-contract={contract_text}&var-clause={clause_text}&var-slice={slice_text}"
