"""Alerting rules on the verdicts that the evaluator exports: one rule per clause and step of the policy.

A chain of small steps: contract -> alert steps -> one rule each -> one group per contract -> YAML.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Final

from kc_otel.contract.model import Contract
from kc_otel.contract.prometheus_names import label, selector
from kc_otel.contract.sentences import REMEDIES, consequence
from kc_otel.contract.units import format_duration
from kc_otel.generate.alert_steps import (
    CELL_LABELS,
    HELD_BY,
    AlertStep,
    alert_steps,
    literal,
    pair_template,
    static_labels,
)
from kc_otel.generate.evaluator_alert import LIVING
from kc_otel.generate.files import GeneratedFile, as_yaml
from kc_otel.generate.links import NOWHERE, Sites, overview_link
from kc_otel.judge.verdict import Status

INTERVAL: Final = 15.0
"""Seconds between evaluations of a group."""


@dataclass(frozen=True, slots=True)
class VerdictSource:
    """Source of the verdicts.

    Attributes:
        verdict: Metric of the verdicts, by the codes of `kc.verdict`.
        bounds: Numbers shown by an alert, and their metrics.
        living: PromQL that is empty while no source publishes verdicts; empty text if the source is Prometheus itself.
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
_SLICE_TEXT: Final = (
    f'{{{{ if $labels.{_SLICE} }}}}{{{{ if eq $labels.{_SLICE} "all" }}}}all traffic'
    f"{{{{ else }}}}slice {{{{ $labels.{_SLICE} }}}}{{{{ end }}}}{{{{ else }}}}every slice{{{{ end }}}}"
)


_NOT_REFUTED: Final = "The last verdict does not show the breach, and nothing has refuted it."


@dataclass(frozen=True, slots=True)
class CellText:
    """Texts of a cell in an alert, as values or as templates.

    Attributes:
        slice: Name of the slice, for a link.
        where: The slice in words.
        kernels: The pair, as the end of a sentence.
        either: Of a text while the verdict is FAIL, and another while only the alert holds, the one for now.
        bounds: Value by the keys of a source's bounds.
    """

    slice: str
    where: str
    kernels: str
    either: Callable[[str, str], str]
    bounds: Mapping[str, str]


def rules_path(contract: Contract) -> PurePosixPath:
    """Place of a contract's rules below the output folder."""
    return PurePosixPath("prometheus", "rules", f"{contract.name}.yaml")


def rule_file(contract: Contract, sites: Sites = NOWHERE) -> GeneratedFile:
    """The rule file of a contract."""
    content = {"groups": [rule_group(contract, sites)] if alert_steps(contract) else []}
    return GeneratedFile(rules_path(contract), as_yaml(content, f"Alerting rules of {contract.name}."))


def rule_group(contract: Contract, sites: Sites = NOWHERE) -> dict[str, Any]:
    """One group, so that a contract's rules are evaluated at one time."""
    return {
        "name": f"kernel-contract-{contract.name}",
        "interval": format_duration(INTERVAL),
        "rules": [alert_rule(alert, sites=sites) for alert in alert_steps(contract)],
    }


def alert_rule(alert: AlertStep, source: VerdictSource = EVALUATOR, sites: Sites = NOWHERE) -> dict[str, Any]:
    """A rule with the step's own `for`, `clear_for` and severity, and labels named as in the evaluator's webhooks."""
    rule: dict[str, Any] = {"alert": alert.name, "expr": expression(alert, source)}
    if alert.step.after > 0:
        rule["for"] = format_duration(alert.step.after)
    if alert.step.clear_for > 0:
        rule["keep_firing_for"] = format_duration(alert.step.clear_for)
    return {**rule, "labels": _labels(alert), "annotations": annotation_texts(alert, source=source, sites=sites)}


def expression(alert: AlertStep, source: VerdictSource = EVALUATOR) -> str:
    """PromQL that is true while the step's verdict holds.

    A breach that is firing stays so while the verdict is none of PASS and FAIL, as in the evaluator. A clause that
    has no verdict has no data. While no evaluator lives, nothing is known: firing alerts continue, and no new ones
    begin.
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
    alert: AlertStep, shown: CellText | None = None, source: VerdictSource = EVALUATOR, sites: Sites = NOWHERE
) -> dict[str, str]:
    """Return the texts that the on-call person reads.

    Args:
        alert: The firing step.
        shown: Texts of the cell; by default templates, filled in when the alert fires.
        source: Source of the verdicts.
        sites: Targets of links.
    """
    text = literal if shown is None else str
    shown = shown or _templates(alert, source)
    with_numbers = alert.status in {Status.FAIL, Status.INCONCLUSIVE}
    numbers = ", ".join(f"{name} {value}" for name, value in shown.bounds.items())
    effect = consequence(alert.clause, alert.step.on, shown.where)
    description = (
        shown.either(effect, _NOT_REFUTED) if alert.step.on == "fail" else effect,
        alert.actions,
        f"Now: {REMEDIES[alert.step.on]}.",
        text(alert.promise),
        f"Measured: {numbers}." if with_numbers else "",
    )
    return {
        "summary": f"{alert.contract.name}: {alert.said(shown.where)}{shown.kernels}",
        "description": " ".join(filter(None, description)),
        "owner": text(alert.contract.metadata.owner),
        **sites.dashboard(overview_link(alert.contract.name, "$__all" if alert.clause is None else shown.slice)),
        **sites.runbook(alert.name, text(alert.contract.metadata.runbook or "")),
    }


def _labels(alert: AlertStep) -> dict[str, str]:
    of_cell = {
        "slice": "all" if alert.clause is None else f"{{{{ $labels.{_SLICE} }}}}",
        "kernel_train": f"{{{{ $labels.{_TRAIN} }}}}",
        "kernel_inference": f"{{{{ $labels.{_INFERENCE} }}}}",
    }
    return {**static_labels(alert), **of_cell}


def _templates(alert: AlertStep, source: VerdictSource) -> CellText:
    return CellText(
        slice=f"{{{{ or $labels.{_SLICE} `$__all` }}}}",
        where=_SLICE_TEXT,
        kernels=pair_template("$labels.{}"),
        either=lambda now, held: f"{{{{ if eq $value {Status.FAIL.code}.0 }}}}{now}{{{{ else }}}}{held}{{{{ end }}}}",
        bounds={name: _lookup(alert, metric) for name, metric in source.bounds.items()},
    )


def _lookup(alert: AlertStep, name: str) -> str:
    """A template that prints a bound of the alert's own cell, or a question mark where it is gone."""
    matchers = {"kc.contract": alert.contract.name, "kc.clause": alert.clause_id}
    cell = (f"{label(attribute)}=%q" for attribute in ("kc.slice", "kc.kernel.train", "kc.kernel.inference"))
    query = f"printf `{selector(name, matchers, *cell)}` $labels.{_SLICE} $labels.{_TRAIN} $labels.{_INFERENCE} | query"
    return f'{{{{ with {query} }}}}{{{{ . | first | value | printf "%.4g" }}}}{{{{ else }}}}?{{{{ end }}}}'
