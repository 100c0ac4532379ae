"""The one alert that no contract has: no evaluator lives, so that nothing is known of any of them.

It looks at the evaluator's own time of judging and not at `up`, whose job everybody names differently: gone from the
scrape, never scraped, hung and no longer pushing are one thing to whoever relies on verdicts.
"""

from __future__ import annotations

from typing import Final

from kc_otel.contract.prometheus_names import selector
from kc_otel.generate.links import HEALTH_UID

__all__ = ["AGE", "ANNOTATIONS", "FRESH", "LABELS", "LIVING", "NAME", "PATIENCE", "RUNBOOK"]

NAME: Final = "KernelContractEvaluatorDown"
FRESH: Final = 60
"""Seconds for which what an evaluator said last is what is the case."""
PATIENCE: Final = 30.0
"""Seconds for which the alert waits: a restart takes less, and with a scrape every 15 s it fires within a minute."""

AGE: Final = f"time() - max({selector('kc.evaluator.last_evaluation', None)})"
"""PromQL: seconds since the last evaluation; nothing where no evaluator has ever said that there was one."""
LIVING: Final = f"{selector('kc.evaluator.last_evaluation', None)} > time() - {FRESH}"
"""PromQL: one series for each evaluator that has judged within the last minute."""

LABELS: Final = {"severity": "critical"}
RUNBOOK: Final = (
    "Is the evaluator running? `curl http://HOST:4320/healthz`, and its log; start it again, it finds its state.",
    "Does it run? Then it is not scraped (Prometheus' page of targets), or it hangs: restart it.",
    "Until then alerts that fired go on, no new one comes, routes stay as they are, and recorders try again.",
)
ANNOTATIONS: Final = {
    "summary": "no evaluator of kernel contracts lives: nothing is known of any contract",
    "description": f"No evaluator has judged within the last {FRESH} seconds, or none is scraped. What alerts and "
    "dashboards say of contracts is what was the case before; a drift that begins now is not seen.",
    "runbook": "\n".join(f"{number}. {sentence}" for number, sentence in enumerate(RUNBOOK, start=1)),
    "dashboard": f"/d/{HEALTH_UID}",
}
