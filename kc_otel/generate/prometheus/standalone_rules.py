"""Rules with which Prometheus, or what speaks its language, judges a contract and alerts, without the evaluator."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any, Final

from kc_otel.contract.model import Contract
from kc_otel.contract.units import format_duration
from kc_otel.generate.alert_steps import AlertStep, alert_steps
from kc_otel.generate.files import GeneratedFile, as_yaml
from kc_otel.generate.prometheus.alerting_rules import INTERVAL, VerdictSource, alert_rule
from kc_otel.generate.prometheus.closed_forms import PAIRS, alphas
from kc_otel.generate.prometheus.recording_rules import clause_rules, expressible, left_out

__all__ = ["RULES", "notes", "standalone_file", "standalone_groups", "standalone_path", "standalone_steps"]

RULES: Final = VerdictSource(
    "kc.rule.status",
    {
        "estimate": "kc.rule.estimate",
        "lower bound": "kc.rule.lower",
        "upper bound": "kc.rule.upper",
        "limit": "kc.rule.limit",
    },
)
"""What the recording rules say."""


def standalone_path(contract: Contract) -> PurePosixPath:
    """Place of a contract's standalone rules below the output folder."""
    return PurePosixPath("prometheus", "standalone", "rules", f"{contract.name}.yaml")


def standalone_file(contract: Contract) -> GeneratedFile:
    """The rule file of a contract for a Prometheus that judges by itself."""
    return GeneratedFile(standalone_path(contract), as_yaml({"groups": standalone_groups(contract)}, *notes(contract)))


def standalone_groups(contract: Contract) -> list[dict[str, Any]]:
    """One group: the rules read each other's results, and a group runs them in order."""
    recording = [rule for clause in expressible(contract) for rule in clause_rules(clause, contract)]
    alerting = [alert_rule(alert, RULES) for alert in standalone_steps(contract)]
    if not recording and not alerting:
        return []
    return [
        {
            "name": f"kernel-contract-{contract.name}-standalone",
            "interval": format_duration(INTERVAL),
            "rules": [*recording, *alerting],
        }
    ]


def standalone_steps(contract: Contract) -> tuple[AlertStep, ...]:
    """The alert steps whose verdicts rules can find."""
    judged = {clause.id for clause in expressible(contract)}
    return tuple(alert for alert in alert_steps(contract) if alert.clause is None or alert.clause_id in judged)


def notes(contract: Contract, *, native: bool = True) -> tuple[str, ...]:
    """What a reader has to know of the rules' statistics, and what they leave to the evaluator; lines of a comment.

    Args:
        contract: The contract.
        native: Whether the rules read Prometheus' native histograms, not VictoriaMetrics' series of buckets.
    """
    levels = alphas(contract)
    apart = format_duration(contract.observability.false_alarms)
    split = f"{len(contract.clauses)} clauses x {1 + len(contract.slices)} slices x {PAIRS} kernel pairs"
    return (
        f"Verdicts on {contract.name} from the recorders' histograms, without the evaluator. Load these rules or those",
        "that alert on the evaluator's verdicts, not both: they raise the same alerts.",
        *(() if native else _FOR_VICTORIA),
        "",
        f"Error probabilities, per window and cell: {levels.upper:.4g} of a PASS that is none; of a FAIL that is none",
        f"{levels.lower:.4g}, which is alpha split evenly over {split}.",
        "That is about one evaluation of one window. Rules are evaluated again and again, and nothing is claimed of",
        f"the time between false alarms, which is {apart} or more for all cells of the evaluator together: it follows",
        "observations as they arrive. A FAIL of it may come sooner, stays until its evidence is gone, and ends on what",
        "came after the fault, while here the fault has to leave the windows. Its intervals are narrower, too (it",
        "inverts the tests that these bound), and may decide what is INCONCLUSIVE here.",
        "",
        "Left to the evaluator:",
        *(
            f"- {clause.id}: {clause.metric} carries no contract, slice or kernels as labels;"
            for clause in left_out(contract)
        ),
        "- a slice that was never seen: it has no series that could be NO_DATA; one that went silent has;",
        "- the first export of a new series: the rules need a second one to compare it with;",
        "- extremes finer than a bucket (4.4%): for `max` the edges of the highest bucket stand for it;",
        *(_OF_NATIVE if native else _OF_RANGES),
    )


_FOR_VICTORIA: Final = (
    "For vmalert and VictoriaMetrics, which takes OTLP with -opentelemetry.usePrometheusNaming. Start vmalert with",
    "-remoteWrite.url, and with -remoteRead.url so that it finds its alerts again after a restart.",
)
_OF_NATIVE: Final = (
    "- equal weights of senders that export at different intervals: increase() extrapolates each by its own, so",
    "  their shares of a slice are off by up to 2.2 / (exports in the window - 1).",
)
_OF_RANGES: Final = (
    "- a sender that restarts under the same service.instance.id: it is left out for a window. Recorders get new ones.",
)
