"""Alerts on versions that were rolled back; the same for every contract, as no contract's ladder waits for that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kc_otel.contract.prometheus_names import label, selector
from kc_otel.judge.escalation.alerts import ROLLED_BACK
from kc_otel.judge.escalation.webhook_body import ALERT_NAMES

NAME: Final = ALERT_NAMES[ROLLED_BACK]
_LABELS: Final = f"{label('kc.contract')}, {label('kc.kernel.inference')}"
_STAGE: Final = selector("kc.promotion.stage", None)
_ALERT_DURATION: Final = "1h"
"""For how long a roll-back is news; that the version serves is said for as long as it does."""


@dataclass(frozen=True, slots=True)
class RolledBackAlert:
    """Words about a version that was rolled back.

    Attributes:
        severity: As in the evaluator's webhooks.
        expression: PromQL: a series for each such contract and version, and nothing otherwise.
        said: Outcome of the version, after its name.
        about: Meaning of that outcome.
    """

    severity: str
    expression: str
    said: str
    about: str

    def labels(self, of: Callable[[str], str]) -> dict[str, str]:
        """Labels, where `of` is a template of the label that it is given."""
        contract, version = of(label("kc.contract")), of(label("kc.kernel.inference"))
        return {"severity": self.severity, "contract": contract, "kernel_inference": version}

    def texts(self, of: Callable[[str], str]) -> dict[str, str]:
        """Annotations."""
        contract, version = of(label("kc.contract")), of(label("kc.kernel.inference"))
        advice = f"`kc-otel promote {contract} {version}` says why it was rolled back."
        return {"summary": f"{contract}: {version} {self.said}", "description": f"{self.about} {advice}"}


ROLLED_BACK_ALERTS: Final = (
    RolledBackAlert(
        "warning",
        f"min by ({_LABELS}) ({_STAGE}) < 0 and max by ({_LABELS}) (max_over_time({_STAGE}[{_ALERT_DURATION}])) >= 0",
        "was rolled back",
        "It failed in its promotion, or a person rolled it back: it should serve no requests.",
    ),
    RolledBackAlert(
        "critical",
        f"min by ({_LABELS}) ({_STAGE}) == -2",
        "served after it was rolled back",
        "Its drift was measured more than a heartbeat after the rollback: a serving process does not ask a router, or "
        "a mirror sends it requests. "
        "Silence does not end this alert; `kc-otel promote CONTRACT KERNEL --rollback --why ...` does.",
    ),
)
