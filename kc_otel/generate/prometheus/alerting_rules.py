"""Alerting rules on the verdicts that the evaluator exports, and Alertmanager's routes.

There is one rule per clause and step of the policy. Each step's webhooks get that step's alerts; the others are on
Alertmanager's own page. Addresses and credentials stay out of it: Alertmanager reads them from files, one pair per
endpoint.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Final

from kc_otel.contract.model import Contract
from kc_otel.contract.policy import REPEAT_SECONDS
from kc_otel.contract.registry.own_metrics import label, selector
from kc_otel.contract.units import format_duration
from kc_otel.generate.alert_texts import (
    CELL_LABELS,
    EVALUATOR_DOWN,
    STATE_ALERTS,
    AlertStep,
    StateAlert,
    alert_steps,
    annotation_texts,
    cell_labels,
    evaluator_down,
    literal,
    living,
    pair_template,
    static_labels,
)
from kc_otel.generate.files import NOWHERE, GeneratedFile, Sites, as_yaml
from kc_otel.judge.verdict import FAULTS, Status

INTERVAL_SECONDS: Final = 15.0
_STATE_INTERVAL_SECONDS: Final = 5.0
"""Seconds between evaluations of the states: three of other rules would be most of the minute."""
_FOLDER: Final = PurePosixPath("prometheus", "rules")
SECRETS: Final = "/etc/alertmanager/secrets"
"""Folder of the files `NAME.url` and `NAME.token`."""

_MAX_REPEAT_SECONDS: Final = 120 * 3600.0
"""Alertmanager forgets after 120 h whom it told (`--data.retention`), and knows no "never"."""
_PAGE_ONLY_RECEIVER: Final = "page-only"
_INCIDENT_LABELS: Final = ["alertname", "contract", "kernel_train", "kernel_inference"]
"""Labels that identify one incident, as in the evaluator: the kind of fault, and the pair of kernels."""
_SAME_CELL_LABELS: Final = ["alertname", "contract", "clause", "slice", "kernel_train", "kernel_inference"]


@dataclass(frozen=True, slots=True)
class VerdictSource:
    """Metrics of verdicts and their numbers, and whether they are those of an evaluator, which may be down."""

    verdict: str
    bound: str
    lives: bool = False


EVALUATOR: Final = VerdictSource("kc.verdict", "kc.bound", lives=True)

BOUNDS: Final = {"estimate": "estimate", "lower bound": "lower", "upper bound": "upper", "limit": "limit"}
_SLICE, _TRAIN, _INFERENCE = CELL_LABELS
_SLICE_TEXT: Final = (
    f'{{{{ if $labels.{_SLICE} }}}}{{{{ if eq $labels.{_SLICE} "all" }}}}all traffic'
    f"{{{{ else }}}}slice {{{{ $labels.{_SLICE} }}}}{{{{ end }}}}{{{{ else }}}}every slice{{{{ end }}}}"
)


def rule_file(contract: Contract, sites: Sites = NOWHERE) -> GeneratedFile:
    """The rule file of a contract: its rules are one group, so that they are evaluated at one time."""
    rules = [alert_rule(alert, sites=sites) for alert in alert_steps(contract)]
    group = {"name": f"kernel-contract-{contract.name}", "interval": format_duration(INTERVAL_SECONDS), "rules": rules}
    alive = {
        "name": f"kernel-contract-{contract.name}-evaluator",
        "interval": format_duration(_STATE_INTERVAL_SECONDS),
        "rules": [_state_rule(evaluator_down(contract.name), sites)],
    }
    content = {"groups": [group, alive] if rules else []}
    return GeneratedFile(_FOLDER / f"{contract.name}.yaml", as_yaml(content, f"Alerting rules of {contract.name}."))


def alert_rule(alert: AlertStep, source: VerdictSource = EVALUATOR, sites: Sites = NOWHERE) -> dict[str, Any]:
    """A rule with the step's own `for`, `clear_for` and severity, and labels named as in the evaluator's webhooks."""

    def choose(now: str, held: str, contained: str) -> str:
        text = f"{{{{ if eq $value {Status.FAIL.code}.0 }}}}{now}{{{{ else }}}}{held}{{{{ end }}}}"
        if source.lives:
            text = f"{{{{ with {_contained(alert)} }}}}{contained}{{{{ else }}}}{text}{{{{ end }}}}"
        return text

    texts = annotation_texts(
        alert,
        _SLICE_TEXT,
        pair_template("$labels.{}"),
        choose,
        slice=f"{{{{ or $labels.{_SLICE} `$__all` }}}}",
        bounds={name: _lookup(alert, f"{source.bound}.{end}") for name, end in BOUNDS.items()},
        # Boards show what an evaluator says.
        sites=sites if source.lives else Sites(evaluator=sites.evaluator),
        text=literal,
        actions="Actions" if source.lives else "Actions that need an evaluator",
    )
    rule: dict[str, Any] = {"alert": alert.name, "expr": expression(alert, source)}
    if alert.step.after > 0:
        rule["for"] = format_duration(alert.step.after)
    if alert.step.clear_for > 0:
        rule["keep_firing_for"] = format_duration(alert.step.clear_for)
    return {**rule, "labels": _labels(alert), "annotations": texts}


def expression(alert: AlertStep, source: VerdictSource = EVALUATOR) -> str:
    """PromQL that is true while the step's verdict holds.

    A firing breach stays while the verdict is neither PASS nor FAIL, until the evaluator closes its incident; a clause
    without verdict has no data. While no evaluator lives, firing alerts continue, and no new ones begin.
    """
    status = alert.status
    if status is None:
        return f"{alert.value if source.lives else alert.failed()} > 0"
    lives = f"on () ({living(alert.contract.name)})"
    verdicts = selector(source.verdict, {"kc.contract": alert.contract.name, "kc.clause": alert.clause_id})
    value = f"max by ({', '.join(CELL_LABELS)}) ({verdicts})"
    matches = f"{value} == {status.code}"
    own = ", ".join(f'{name}="{value}"' for name, value in {"alertname": alert.name, **static_labels(alert)}.items())
    firing = f'ALERTS{{alertstate="firing", {own}}}'
    cases, held = [matches], FAULTS[alert.step.on].held_by
    if held:
        still = f"{value} >= {held[0].code}" if len(held) > 1 else f"{value} == {held[0].code}"
        still += f" and {alert.incident}" * source.lives  # a run that has ended is not judged any more
        cases.append(f"{still} and on ({', '.join(CELL_LABELS)}) {firing}")
    else:
        # The silence of a slice whose requests are kept away, as ordered, is none.
        cases = [f"{matches} unless on ({', '.join(CELL_LABELS)}) {alert.excused}" if source.lives else matches]
        cases.append(f"absent({verdicts})" + f" and {lives}" * source.lives)
    if source.lives:
        # An alert is known by its labels: without those that the rule gives it they are what the cases above find.
        given = ("alertname", "alertstate", *_labels(alert))
        cases.append(f"max without ({', '.join(given)}) ({firing}) unless {lives}")
    return "\nor\n".join(cases)


def _labels(alert: AlertStep) -> dict[str, str]:
    return cell_labels(alert, "{{{{ $labels.{} }}}}".format)


def _lookup(alert: AlertStep, name: str) -> str:
    """A template that prints a bound of the alert's own cell, or a question mark where it is gone."""
    matchers = {"kc.contract": alert.contract.name, "kc.clause": alert.clause_id}
    cell = (f"{label(attribute)}=%q" for attribute in ("kc.slice", "kc.kernel.train", "kc.kernel.inference"))
    query = f"printf `{selector(name, matchers, *cell)}` $labels.{_SLICE} $labels.{_TRAIN} $labels.{_INFERENCE} | query"
    return f'{{{{ with {query} }}}}{{{{ . | first | value | printf "%.4g" }}}}{{{{ else }}}}?{{{{ end }}}}'


def _contained(alert: AlertStep) -> str:
    """A query that finds a series while the breach of the alert's kernels is contained, as every evaluator says."""
    matchers = {"kc.contract": alert.contract.name, "kc.incident.on": alert.step.on}
    pair = (f"{label(attribute)}=%q" for attribute in ("kc.kernel.train", "kc.kernel.inference"))
    contained = f"max({selector('kc.incident', matchers, *pair)}) == 1"
    return f"printf `{contained}` $labels.{_TRAIN} $labels.{_INFERENCE} | query"


def evaluator_file(sites: Sites = NOWHERE) -> GeneratedFile:
    """Return the rule file, which is the same for all contracts."""
    rules = [_state_rule(alert, sites) for alert in (EVALUATOR_DOWN, *STATE_ALERTS)]
    group = {"name": "kernel-contracts-evaluator", "interval": format_duration(_STATE_INTERVAL_SECONDS), "rules": rules}
    text = as_yaml(
        {"groups": [group]}, "Whether an evaluator lives, and what nobody judges; the same for every contract."
    )
    return GeneratedFile(_FOLDER / "_evaluator.yaml", text)  # no contract's name begins so


def _state_rule(alert: StateAlert, sites: Sites) -> dict[str, Any]:
    def of(label: str) -> str:
        return f"{{{{ $labels.{label} }}}}"

    links = {**sites.dashboard(f"/d/{alert.panel[0]}"), **sites.runbook(alert.name)}
    return {
        "alert": alert.name,
        "expr": alert.held if alert in STATE_ALERTS else alert.expression,
        **({"for": format_duration(alert.after)} if alert.after else {}),
        "labels": alert.labels(of),
        "annotations": {**alert.texts(of), **links},
    }


def routes_file(contracts: Iterable[Contract]) -> GeneratedFile:
    """The configuration for all contracts together."""
    routes: list[dict[str, Any]] = []
    endpoints: set[str] = set()
    names = "|".join(dict.fromkeys(alert.name for alert in STATE_ALERTS))
    for contract in contracts:
        own, callees = f'contract="{contract.name}"', set[str]()
        for number, step in enumerate(contract.escalation, start=1):
            targets = {str(action.target) for action in step.do if action.kind == "webhook"}
            for endpoint in sorted(targets):
                route = {"receiver": endpoint, "matchers": [own, f'step="{number}"'], "continue": True}
                routes.append(route | {"repeat_interval": _interval(step.repeat)})
            endpoints |= targets
            callees |= targets if step.on == "fail" else set()
        at_once = {"matchers": [own, f'alertname=~"{names}"'], "group_wait": "0s", "continue": True}
        routes += [{"receiver": endpoint, **at_once} for endpoint in sorted(callees)]
    # Whoever acts on a contract's verdicts has to know that there are none; it has waited by itself.
    down = {
        "matchers": [f'alertname="{EVALUATOR_DOWN.name}"'],
        "group_by": ["alertname"],
        "group_wait": "0s",
        "group_interval": "1m",
    }
    routes += [{"receiver": endpoint, **down, "continue": True} for endpoint in sorted(endpoints)]
    content = {
        "route": {
            "receiver": _PAGE_ONLY_RECEIVER,
            "group_by": _INCIDENT_LABELS,
            "group_wait": "30s",
            "group_interval": "5m",
            "repeat_interval": _interval(REPEAT_SECONDS),
            "routes": routes,
        },
        # A critical step says all that the warning before it says.
        "inhibit_rules": [
            {
                "source_matchers": ['severity="critical"'],
                "target_matchers": ['severity=~"warning|info"'],
                "equal": _SAME_CELL_LABELS,
            }
        ],
        "receivers": [{"name": _PAGE_ONLY_RECEIVER}, *map(_receiver, sorted(endpoints))],
    }
    notes = (
        f"Routes from the contracts' policies. For each receiver NAME put its address into {SECRETS}/NAME.url and the",
        f"bearer token that it expects into {SECRETS}/NAME.token.",
    )
    return GeneratedFile(PurePosixPath("prometheus", "alertmanager", "alertmanager.yaml"), as_yaml(content, *notes))


def _receiver(name: str) -> dict[str, Any]:
    credentials = {"type": "Bearer", "credentials_file": f"{SECRETS}/{name}.token"}
    webhook = {
        "url_file": f"{SECRETS}/{name}.url",
        "send_resolved": True,
        "http_config": {"authorization": credentials},
    }
    return {"name": name, "webhook_configs": [webhook]}


def _interval(repeat: float) -> str:
    """Return the interval of reminders; the longest without any (0)."""
    return format_duration(min(repeat, _MAX_REPEAT_SECONDS) or _MAX_REPEAT_SECONDS)
