"""The one alert that no contract has: no evaluator lives, so that nothing is known of any of them.

It looks at the evaluator's own time of judging and not at `up`, whose job everybody names differently: gone from the
scrape, never scraped, hung and no longer pushing are the same for users of verdicts.
"""

from __future__ import annotations

from typing import Final

from kc_otel.contract.prometheus_names import selector

NAME: Final = "KernelContractEvaluatorDown"
FRESH_SECONDS: Final = 60
"""Seconds for which what an evaluator said last is what is the case."""
PENDING_SECONDS: Final = 30.0
"""Seconds for which the alert waits: a restart takes less, and with a scrape every 15 s it fires within a minute."""

AGE: Final = f"time() - max({selector('kc.evaluator.last_evaluation', None)})"
"""PromQL: seconds since the last evaluation; nothing where no evaluator has ever said that there was one."""
LIVING: Final = f"{selector('kc.evaluator.last_evaluation', None)} > time() - {FRESH_SECONDS}"
"""PromQL: one series for each evaluator that has judged within the last minute."""

LABELS: Final = {"severity": "critical"}
RUNBOOK: Final = (
    "Run `curl http://HOST:4320/healthz`. If it fails, read the log and restart it: the evaluator restores its state.",
    "If it answers, check the scrape target in Prometheus; if the evaluator hangs, restart it.",
    "Until then firing alerts stay, new breaches go unseen, routes stay as they are, and recorders retry.",
)
ANNOTATIONS: Final = {
    "summary": "no evaluator of kernel contracts is running: nothing monitors any contract",
    "description": f"No evaluator has judged within the last {FRESH_SECONDS} seconds, or Prometheus scrapes none. "
    "Alerts and dashboards show the past; a drift that begins now goes unseen.",
    "runbook": "\n".join(f"{number}. {sentence}" for number, sentence in enumerate(RUNBOOK, start=1)),
}
