"""Alerts that are the same for every contract, as no ladder waits for them: no evaluator, rolled back, unknown.

That no evaluator lives is seen by its own time of judging: gone from the scrape, never scraped, hung and no longer
pushing are the same for users of verdicts. The others fire on a state that lasts until it is known to be over.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kc_otel.contract.prometheus_names import label, selector
from kc_otel.contract.words import MEASURED_LATER
from kc_otel.generate.links import (
    EVALUATED_ID,
    HEALTH_UID,
    MISSING_ID,
    NOT_HOLDING_ID,
    OVERVIEW_UID,
    PROMOTION_UID,
    STAGE_ID,
)
from kc_otel.judge.escalation.alerts import ROLLED_BACK
from kc_otel.judge.escalation.webhook_body import ALERT_NAMES

FRESH_SECONDS: Final = 60
"""Seconds for which what an evaluator said last is what is the case."""
AGE: Final = f"time() - max({selector('kc.evaluator.last_evaluation', None)})"
"""PromQL: seconds since the last evaluation; nothing where no evaluator has ever said that there was one."""
LIVING: Final = f"{selector('kc.evaluator.last_evaluation', None)} > time() - {FRESH_SECONDS}"
"""PromQL: one series for each evaluator that has judged within the last minute."""

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
"""For how long a roll-back is news; measurements after it are said until a person acts on them."""


@dataclass(frozen=True, slots=True)
class StateAlert:
    """Words about a state of the evaluator.

    `expression` is PromQL with a series, with the labels `given`, for each such state; `panel` is a dashboard's UID and
    a panel's id; a label's name in braces stands for its value in the texts.
    """

    name: str
    uid: str
    severity: str
    expression: str
    given: tuple[str, ...]
    panel: tuple[str, int]
    summary: str
    description: str
    runbook: str = ""
    after: float = 0.0

    def labels(self, of: Callable[[str], str]) -> dict[str, str]:
        """Labels, where `of` is a template of the label that it is given."""
        return {"severity": self.severity} | {name: of(label(_LABELS[name])) for name in self.given}

    def texts(self, of: Callable[[str], str]) -> dict[str, str]:
        """Annotations."""
        values = {name: of(label(_LABELS[name])) for name in self.given}
        texts = {"summary": self.summary.format(**values), "description": self.description.format(**values)}
        return texts | ({"runbook": self.runbook} if self.runbook else {})


def _by(given: tuple[str, ...], expression: str, how: str = "max") -> str:
    """PromQL by the labels given: evaluators that run side by side count once."""
    return f"{how} by ({', '.join(label(_LABELS[name]) for name in given)}) ({expression})"


EVALUATOR_DOWN: Final = StateAlert(
    "KernelContractEvaluatorDown",
    "kc-evaluator-down",
    "critical",
    f"absent({LIVING})",
    (),
    (HEALTH_UID, EVALUATED_ID),
    "no evaluator of kernel contracts is running: nothing monitors any contract",
    f"No evaluator has judged within the last {FRESH_SECONDS} seconds, or Prometheus scrapes none. Alerts and "
    "dashboards show the past; a drift that begins now goes unseen.",
    "1. Run `curl http://HOST:4320/healthz`. If it fails, read the log and restart it: the evaluator restores its "
    "state.\n2. If it answers, check the scrape target in Prometheus; if the evaluator hangs, restart it.\n3. Until "
    "then firing alerts stay, new breaches go unseen, routes stay as they are, and recorders retry.",
    after=30.0,  # a restart takes less, and with a scrape every 15 s it fires within a minute
)
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
        "{contract}: {kernel_inference} was measured after its rollback",
        "Its drift was measured later than the longer of heartbeat and window after the rollback: "
        f"{MEASURED_LATER}. Check that every serving process asks a router, and that no mirror sends it requests. "
        "Silence does not end this alert; `kc-otel promote CONTRACT KERNEL --rollback --why ...` does. "
        f"{_ADVICE}",
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
        "{contract} --close --why ...` does.",
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
