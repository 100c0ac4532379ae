"""Alerts that are the same for every contract, as no ladder waits for them: on versions rolled back, and on unknowns.

Each fires on a state that the evaluator exports and that lasts until it is known to be over.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kc_otel.contract.prometheus_names import label, selector
from kc_otel.generate.links import HEALTH_UID, MISSING_ID, NOT_HOLDING_ID, OVERVIEW_UID, PROMOTION_UID, STAGE_ID
from kc_otel.judge.escalation.alerts import ROLLED_BACK
from kc_otel.judge.escalation.webhook_body import ALERT_NAMES

_LABELS: Final = {
    "contract": "kc.contract",
    "kernel_train": "kc.kernel.train",
    "kernel_inference": "kc.kernel.inference",
    "outcome": "kc.outcome",
}
"""Labels of an alert, as in the evaluator's webhooks, and the attributes that they are taken from."""
_STAGE_QUERY: Final = selector("kc.promotion.stage", None)
_ROLL_BACK: Final = ("contract", "kernel_inference")
_PAIR_LABELS: Final = ("contract", "kernel_train", "kernel_inference")
_MISSING_LABELS: Final = (*_PAIR_LABELS, "outcome")
_ALERT_DURATION: Final = "1h"
"""For how long a roll-back is news; that the version serves is said for as long as it does."""


@dataclass(frozen=True, slots=True)
class StateAlert:
    """Words about a state of the evaluator.

    Attributes:
        name: `alertname`.
        uid: Identity in Grafana.
        severity: As in the evaluator's webhooks.
        expression: PromQL: a series for each such state, and nothing otherwise.
        given: Names of its labels.
        panel: UID of the dashboard that shows it, and id of the panel.
        summary: One line; each label's name in braces stands for its value.
        description: Meaning, and what to do; likewise.
    """

    name: str
    uid: str
    severity: str
    expression: str
    given: tuple[str, ...]
    panel: tuple[str, int]
    summary: str
    description: str

    def labels(self, of: Callable[[str], str]) -> dict[str, str]:
        """Labels, where `of` is a template of the label that it is given."""
        return {"severity": self.severity} | {name: of(label(_LABELS[name])) for name in self.given}

    def texts(self, of: Callable[[str], str]) -> dict[str, str]:
        """Annotations."""
        values = {name: of(label(_LABELS[name])) for name in self.given}
        return {"summary": self.summary.format(**values), "description": self.description.format(**values)}


def _by(given: tuple[str, ...], expression: str, how: str = "max") -> str:
    """PromQL by the labels given: evaluators that run side by side count once."""
    return f"{how} by ({', '.join(label(_LABELS[name]) for name in given)}) ({expression})"


_ADVICE: Final = "`kc-otel promote {contract} {kernel_inference}` says why it was rolled back."
STATE_ALERTS: Final = (
    StateAlert(
        ALERT_NAMES[ROLLED_BACK],
        "kc-rolled-back-warning",
        "warning",
        f"{_by(_ROLL_BACK, _STAGE_QUERY, 'min')} < 0 and "
        f"{_by(_ROLL_BACK, f'max_over_time({_STAGE_QUERY}[{_ALERT_DURATION}])')} >= 0",
        _ROLL_BACK,
        (PROMOTION_UID, STAGE_ID),
        "{contract}: {kernel_inference} was rolled back",
        f"It failed in its promotion, or a person decided so: it should serve nobody. {_ADVICE}",
    ),
    StateAlert(
        ALERT_NAMES[ROLLED_BACK],
        "kc-rolled-back-critical",
        "critical",
        f"{_by(_ROLL_BACK, _STAGE_QUERY, 'min')} == -2",
        _ROLL_BACK,
        (PROMOTION_UID, STAGE_ID),
        "{contract}: {kernel_inference} served after it was rolled back",
        "Its drift was measured more than a heartbeat after the rollback: a serving process does not ask a router, or "
        "a mirror sends it requests. Silence does not end this alert; `kc-otel promote CONTRACT KERNEL --rollback "
        f"--why ...` does. {_ADVICE}",
    ),
    StateAlert(
        "KernelContractUnproven",
        "kc-unproven",
        "warning",
        f"{_by(_PAIR_LABELS, selector('kc.incident', None), 'min')} == 0",
        _PAIR_LABELS,
        (OVERVIEW_UID, NOT_HOLDING_ID),
        "{contract}: a breach of {kernel_inference} against {kernel_train} went away without proof of recovery",
        "The kernel, or a recorder of it, fell silent beside others, and no verdict has refuted the breach or the "
        "invalid input: it may still serve. Silence does not end this alert; its recorder's return, `kc-otel promote "
        "{contract} {kernel_inference} --rollback --why ...` or, once it is known to serve nobody, `kc-otel alerts ack "
        "{contract} --why ...` does.",
    ),
    StateAlert(
        "KernelContractPointsMissing",
        "kc-points-missing",
        "warning",
        f"{_by(_MISSING_LABELS, selector('kc.evaluator.missing', None))} > 0",
        _MISSING_LABELS,
        (HEALTH_UID, MISSING_ID),
        "{contract}: points of {kernel_inference} against {kernel_train} arrive and are not judged ({outcome})",
        "Verdicts say nothing about what these senders measure, though others of the kernels may pass. `kc-otel "
        "status` names the senders and says what to do.",
    ),
)
