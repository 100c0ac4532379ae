"""Alerting rules on the verdicts that the evaluator exports: one rule per clause and step of the policy.

A chain of small steps: contract -> alert steps -> one rule each -> one group per contract -> YAML.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Final

from kc_otel.contract.model import Contract
from kc_otel.contract.prometheus_names import label, selector
from kc_otel.contract.units import format_duration
from kc_otel.generate.alert_steps import CELL_LABELS, HELD_BY, AlertStep, alert_steps, literal, static_labels
from kc_otel.generate.evaluator_alert import LIVING
from kc_otel.generate.files import GeneratedFile, as_yaml
from kc_otel.generate.links import overview_link
from kc_otel.judge.verdict import Status

__all__ = [
    "EVALUATOR",
    "INTERVAL",
    "CellText",
    "VerdictSource",
    "alert_rule",
    "annotation_texts",
    "expression",
    "rule_file",
    "rule_group",
    "rules_path",
]

INTERVAL: Final = 15.0
"""Seconds between evaluations of a group."""


@dataclass(frozen=True, slots=True)
class VerdictSource:
    """Who says what the verdicts are.

    Attributes:
        verdict: Metric of the verdicts, by the codes of `kc.verdict`.
        bounds: Numbers that an alert tells, and the metrics that they come from.
        living: PromQL that finds nothing while nobody says verdicts; empty where that is Prometheus itself.
    """

    verdict: str
    bounds: Mapping[str, str]
    living: str = ""


EVALUATOR: Final = VerdictSource(
    "kc.verdict",
    {
        "estimate": "kc.bound.estimate",
        "lower bound": "kc.bound.lower",
        "upper bound": "kc.bound.upper",
        "limit": "kc.bound.limit",
    },
    LIVING,
)
"""The evaluator's own metrics."""

_SLICE, _TRAIN, _INFERENCE = CELL_LABELS
_WHERE: Final = (
    f'{{{{ if $labels.{_SLICE} }}}}{{{{ if eq $labels.{_SLICE} "all" }}}}all traffic'
    f"{{{{ else }}}}slice {{{{ $labels.{_SLICE} }}}}{{{{ end }}}}{{{{ else }}}}every slice{{{{ end }}}}"
)


@dataclass(frozen=True, slots=True)
class CellText:
    """What an alert says of its cell, as values or as templates.

    Attributes:
        slice: Name of the slice, for a link.
        where: The slice in words.
        bounds: Value by the keys of a source's bounds.
    """

    slice: str
    where: str
    bounds: Mapping[str, str]


def rules_path(contract: Contract) -> PurePosixPath:
    """Place of a contract's rules below the output folder."""
    return PurePosixPath("prometheus", "rules", f"{contract.name}.yaml")


def rule_file(contract: Contract) -> GeneratedFile:
    """The rule file of a contract."""
    content = {"groups": [rule_group(contract)] if alert_steps(contract) else []}
    return GeneratedFile(rules_path(contract), as_yaml(content, f"Alerting rules of {contract.name}."))


def rule_group(contract: Contract) -> dict[str, Any]:
    """One group, so that a contract's rules are evaluated at one time."""
    return {
        "name": f"kernel-contract-{contract.name}",
        "interval": format_duration(INTERVAL),
        "rules": [alert_rule(alert) for alert in alert_steps(contract)],
    }


def alert_rule(alert: AlertStep, source: VerdictSource = EVALUATOR) -> dict[str, Any]:
    """A rule with the step's own `for`, `clear_for` and severity, and labels named as in the evaluator's webhooks."""
    rule: dict[str, Any] = {"alert": alert.name, "expr": expression(alert, source)}
    if alert.step.after > 0:
        rule["for"] = format_duration(alert.step.after)
    if alert.step.clear_for > 0:
        rule["keep_firing_for"] = format_duration(alert.step.clear_for)
    return {**rule, "labels": _labels(alert), "annotations": annotation_texts(alert, source=source)}


def expression(alert: AlertStep, source: VerdictSource = EVALUATOR) -> str:
    """PromQL that is true while the step's verdict holds.

    A breach that is firing stays so while the verdict is INCONCLUSIVE or NO_DATA, as in the evaluator. A clause that
    has no verdict has no data. While no evaluator lives nothing is known: what fires goes on, and nothing begins.
    """
    status = alert.status
    if status is None:
        return f"{alert.value} > 0"
    verdicts = selector(source.verdict, {"kc.contract": alert.contract.name, "kc.clause": alert.clause_id})
    value = f"max by ({', '.join(CELL_LABELS)}) ({verdicts})"
    matches = f"{value} == {status.code}"
    own = ", ".join(f'{name}="{value}"' for name, value in {"alertname": alert.name, **static_labels(alert)}.items())
    firing = f'ALERTS{{alertstate="firing", {own}}}'
    cases, held = [matches], HELD_BY[status]
    if held:
        still = f"{value} >= {held[0].code}" if len(held) > 1 else f"{value} == {held[0].code}"
        cases.append(f"{still} and on ({', '.join(CELL_LABELS)}) {firing}")
    else:
        cases.append(f"absent({verdicts}){f' and on () ({source.living})' if source.living else ''}")
    if source.living:
        # An alert is known by its labels: without those that the rule gives it they are what the cases above find.
        given = ("alertname", "alertstate", *_labels(alert))
        cases.append(f"max without ({', '.join(given)}) ({firing}) unless on () ({source.living})")
    return "\nor\n".join(cases)


def annotation_texts(
    alert: AlertStep, shown: CellText | None = None, source: VerdictSource = EVALUATOR
) -> dict[str, str]:
    """What the person who is woken reads.

    Args:
        alert: What fires.
        shown: What is known of the cell; templates, filled in when the alert fires, by default.
        source: Who says what the verdicts are.
    """
    text = literal if shown is None else str
    shown = shown or _templates(alert, source)
    said = {
        "fail": f"{alert.clause_id} is broken on {shown.where}",
        "no-data": f"no data for {alert.clause_id} on {shown.where}",
        "inconclusive": f"{alert.clause_id} cannot be decided on {shown.where}",
        "invalid-input": "sequences fail the input checks",
    }[alert.step.on]
    with_numbers = alert.status in {Status.FAIL, Status.INCONCLUSIVE}
    numbers = ", ".join(f"{name} {value}" for name, value in shown.bounds.items())
    description = (text(alert.promise), f"Now: {numbers}." if with_numbers else "", alert.actions)
    texts = {
        "summary": f"{alert.contract.name}: {said}",
        "description": " ".join(filter(None, description)),
        "owner": text(alert.contract.metadata.owner),
        "dashboard": overview_link(alert.contract.name, "$__all" if alert.clause is None else shown.slice),
    }
    if alert.contract.metadata.runbook:
        texts["runbook_url"] = text(alert.contract.metadata.runbook)
    return texts


def _labels(alert: AlertStep) -> dict[str, str]:
    if alert.clause is None:
        return {**static_labels(alert), "slice": "all"}
    of_cell = {
        "slice": f"{{{{ $labels.{_SLICE} }}}}",
        "kernel_train": f"{{{{ $labels.{_TRAIN} }}}}",
        "kernel_inference": f"{{{{ $labels.{_INFERENCE} }}}}",
    }
    return {**static_labels(alert), **of_cell}


def _templates(alert: AlertStep, source: VerdictSource) -> CellText:
    return CellText(
        slice=f"{{{{ or $labels.{_SLICE} `$__all` }}}}",
        where=_WHERE,
        bounds={name: _lookup(alert, metric) for name, metric in source.bounds.items()},
    )


def _lookup(alert: AlertStep, name: str) -> str:
    """A template that prints a bound of the alert's own cell, or a question mark where it is gone."""
    matchers = {"kc.contract": alert.contract.name, "kc.clause": alert.clause_id}
    cell = (f"{label(attribute)}=%q" for attribute in ("kc.slice", "kc.kernel.train", "kc.kernel.inference"))
    query = f"printf `{selector(name, matchers, *cell)}` $labels.{_SLICE} $labels.{_TRAIN} $labels.{_INFERENCE} | query"
    return f'{{{{ with {query} }}}}{{{{ . | first | value | printf "%.4g" }}}}{{{{ else }}}}?{{{{ end }}}}'
