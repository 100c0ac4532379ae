"""The standalone rules as Mimir's ruler takes them: in a namespace, and in groups that its default limits let in.

Mimir refuses a group of more than 20 rules and a tenant's 71st group (`ruler_max_rules_per_rule_group`,
`ruler_max_rule_groups_per_tenant`). A clause's rules read each other's results and fit into one group, which runs them
in order; clauses do not wait for each other. Alerts read what the clauses' groups recorded, so they are up to an
interval later than in Prometheus, where all is one group.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any, Final

from kc_otel.contract.model import Contract
from kc_otel.contract.units import format_duration
from kc_otel.generate.files import GeneratedFile, as_yaml
from kc_otel.generate.prometheus.alerting_rules import INTERVAL, alert_rule
from kc_otel.generate.prometheus.recording_rules import clause_rules, expressible
from kc_otel.generate.prometheus.standalone_rules import RULES, notes, standalone_steps

__all__ = ["mimir_file"]

_MOST: Final = 20
"""Rules of a group: Mimir's default."""
_USED: Final = (
    "",
    "One namespace for each contract. Loading it again replaces it, and no other:",
    "  mimirtool rules load FILE --address=MIMIR --id=TENANT",
)


def mimir_file(contract: Contract) -> GeneratedFile:
    """The rule file of a contract for Mimir's ruler."""
    groups = {clause.id: list(clause_rules(clause, contract)) for clause in expressible(contract)}
    alerts = [alert_rule(alert, RULES) for alert in standalone_steps(contract)]
    groups |= {f"alerts-{1 + at // _MOST}": alerts[at : at + _MOST] for at in range(0, len(alerts), _MOST)}
    prefix = f"kernel-contract-{contract.name}"
    content: dict[str, Any] = {
        "namespace": prefix,
        "groups": [
            {"name": f"{prefix}-{name}", "interval": format_duration(INTERVAL), "rules": rules}
            for name, rules in groups.items()
        ],
    }
    path = PurePosixPath("prometheus", "mimir", "rules", f"{contract.name}.yaml")
    return GeneratedFile(path, as_yaml(content, *notes(contract), *_USED))
