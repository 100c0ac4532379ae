"""Alerting rules on the verdicts that the evaluator exports: one rule per clause and step of the policy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Final

from kc_otel.contract.model import Contract
from kc_otel.contract.prometheus_names import label, selector
from kc_otel.contract.units import format_duration
from kc_otel.generate.alert_steps import (
    CELL_LABELS,
    HELD_BY,
    AlertStep,
    CellText,
    alert_steps,
    annotation_texts,
    cell_labels,
    literal,
    pair_template,
    static_labels,
)
from kc_otel.generate.files import GeneratedFile, as_yaml
from kc_otel.generate.links import NOWHERE, Sites
from kc_otel.generate.state_alerts import LIVING
from kc_otel.judge.verdict import Status

INTERVAL_SECONDS: Final = 15.0
"""Seconds between evaluations of a group."""


@dataclass(frozen=True, slots=True)
class VerdictSource:
    """Metrics of verdicts and their numbers; `living` is PromQL that is empty while nobody publishes them."""

    verdict: str
    bound: str
    living: str = ""


EVALUATOR: Final = VerdictSource("kc.verdict", "kc.bound", LIVING)
"""The evaluator's own metrics."""

BOUNDS: Final = {"estimate": "estimate", "lower bound": "lower", "upper bound": "upper", "limit": "limit"}
"""Numbers that an alert shows, and how the metric of each ends."""
_SLICE, _TRAIN, _INFERENCE = CELL_LABELS
_SLICE_TEXT: Final = (
    f'{{{{ if $labels.{_SLICE} }}}}{{{{ if eq $labels.{_SLICE} "all" }}}}all traffic'
    f"{{{{ else }}}}slice {{{{ $labels.{_SLICE} }}}}{{{{ end }}}}{{{{ else }}}}every slice{{{{ end }}}}"
)


def rules_path(contract: Contract) -> PurePosixPath:
    """Place of a contract's rules below the output folder."""
    return PurePosixPath("prometheus", "rules", f"{contract.name}.yaml")


def rule_file(contract: Contract, sites: Sites = NOWHERE) -> GeneratedFile:
    """The rule file of a contract: one group, so that its rules are evaluated at one time."""
    rules = [alert_rule(alert, sites=sites) for alert in alert_steps(contract)]
    group = {"name": f"kernel-contract-{contract.name}", "interval": format_duration(INTERVAL_SECONDS), "rules": rules}
    content = {"groups": [group] if rules else []}
    return GeneratedFile(rules_path(contract), as_yaml(content, f"Alerting rules of {contract.name}."))


def alert_rule(alert: AlertStep, source: VerdictSource = EVALUATOR, sites: Sites = NOWHERE) -> dict[str, Any]:
    """A rule with the step's own `for`, `clear_for` and severity, and labels named as in the evaluator's webhooks."""
    texts = annotation_texts(alert, _templates(alert, source), sites, text=literal)
    rule: dict[str, Any] = {"alert": alert.name, "expr": expression(alert, source)}
    if alert.step.after > 0:
        rule["for"] = format_duration(alert.step.after)
    if alert.step.clear_for > 0:
        rule["keep_firing_for"] = format_duration(alert.step.clear_for)
    return {**rule, "labels": _labels(alert), "annotations": texts}


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


def _labels(alert: AlertStep) -> dict[str, str]:
    return cell_labels(alert, "{{{{ $labels.{} }}}}".format)


def _templates(alert: AlertStep, source: VerdictSource) -> CellText:
    return CellText(
        slice=f"{{{{ or $labels.{_SLICE} `$__all` }}}}",
        where=_SLICE_TEXT,
        kernels=pair_template("$labels.{}"),
        either=lambda now, held: f"{{{{ if eq $value {Status.FAIL.code}.0 }}}}{now}{{{{ else }}}}{held}{{{{ end }}}}",
        bounds={name: _lookup(alert, f"{source.bound}.{end}") for name, end in BOUNDS.items()},
    )


def _lookup(alert: AlertStep, name: str) -> str:
    """A template that prints a bound of the alert's own cell, or a question mark where it is gone."""
    matchers = {"kc.contract": alert.contract.name, "kc.clause": alert.clause_id}
    cell = (f"{label(attribute)}=%q" for attribute in ("kc.slice", "kc.kernel.train", "kc.kernel.inference"))
    query = f"printf `{selector(name, matchers, *cell)}` $labels.{_SLICE} $labels.{_TRAIN} $labels.{_INFERENCE} | query"
    return f'{{{{ with {query} }}}}{{{{ . | first | value | printf "%.4g" }}}}{{{{ else }}}}?{{{{ end }}}}'
