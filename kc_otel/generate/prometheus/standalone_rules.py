"""Rules with which Prometheus, or what speaks its language, judges a contract and alerts, without the evaluator.

Per clause, in this order, because each rule reads the ones before it: the content of either window; its certain number
of observations; and then the steps of `judging`.

`increase` extrapolates to the ends of its range: by less than 1.1 steps at either end, so with k samples in the range a
count is at most 1 + 2.2/(k - 1) times what was counted. A mean, a share or a quantile is not touched by that; a number
of observations is divided by it, and so never too large.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import PurePosixPath
from typing import Any, Final

from kc_otel.contract.clause import Clause
from kc_otel.contract.limits import bucket_layout
from kc_otel.contract.model import Contract
from kc_otel.contract.registry.own_metrics import label, metric, prometheus_name, selector
from kc_otel.contract.slices import ALL, UNJUDGED
from kc_otel.contract.units import format_duration
from kc_otel.generate.alert_texts import CELL_LABELS, alert_steps
from kc_otel.generate.files import NOWHERE, GeneratedFile, Sites, as_yaml
from kc_otel.generate.prometheus.alerting_rules import INTERVAL_SECONDS, VerdictSource, alert_rule
from kc_otel.generate.prometheus.closed_forms import EDGE_ROUNDING, NOT_ONE, PLANNED_PAIRS, Native, alphas, forms
from kc_otel.judge.statistics import samples_needed
from kc_otel.judge.verdict import Status

_RULES: Final = VerdictSource("kc.rule.status", "kc.rule")
_MAX_RULES_PER_GROUP: Final = 20
_EXTRAPOLATION_FACTOR: Final = 2.2
_CELL: Final = ", ".join(CELL_LABELS)
_PAIR: Final = ", ".join(CELL_LABELS[1:])

_Own = Callable[..., str]
"""From a metric, and optionally a window and a slice, to the selector of an earlier step of the same clause."""


def standalone_file(contract: Contract, sites: Sites = NOWHERE) -> GeneratedFile:
    """The rule file of a contract for a Prometheus that judges by itself."""
    path = PurePosixPath("prometheus", "standalone", "rules", f"{contract.name}.yaml")
    return GeneratedFile(path, as_yaml({"groups": _groups(contract, sites)}, *_notes(contract)))


def _groups(contract: Contract, sites: Sites) -> list[dict[str, Any]]:
    """A group for each clause: its rules, in the order in which they read each other, then alerts; Mimir takes 20."""
    rules = {clause.id: list(_clause_rules(clause, contract)) for clause in expressible(contract)}
    for alert in alert_steps(contract):
        if alert.clause is None or alert.clause_id in rules:
            rules.setdefault(alert.clause_id, []).append(alert_rule(alert, _RULES, sites))
    return [
        {
            "name": f"kernel-contract-{contract.name}-standalone-{name}" + (f"-{start}" if start else ""),
            "interval": format_duration(INTERVAL_SECONDS),
            "rules": found[start : start + _MAX_RULES_PER_GROUP],
        }
        for name, found in rules.items()
        for start in range(0, len(found), _MAX_RULES_PER_GROUP)
    ]


def _notes(contract: Contract) -> tuple[str, ...]:
    """Return comment lines: the limits of the rules' statistics, and what is left to the evaluator."""
    levels = alphas(contract)
    apart = format_duration(contract.observability.false_alarms)
    split = f"{len(contract.clauses)} clauses x {1 + len(contract.slices)} slices x {PLANNED_PAIRS} kernel pairs"
    return (
        f"Verdicts on {contract.name} from the recorders' histograms, without the evaluator. Load these rules or those",
        "that alert on the evaluator's verdicts, not both: they raise the same alerts.",
        "",
        f"Error probabilities, per window and cell: {levels.upper:.4g} of a PASS that is none; of a FAIL that is none",
        f"{levels.lower:.4g}, which is alpha split evenly over {split}. Nothing is claimed of",
        f"the time between false alarms, which is {apart} or more for all cells of the evaluator together.",
        "",
        "Left to the evaluator: a slice that was never seen, the first export of a new series (of sequences that fail",
        "the input checks it counts, old ones too where Prometheus has no history), extremes finer than a",
        "bucket, equal weights of senders that export at different intervals, all actions, and the boards.",
        *(
            f"Left out: {clause.id}, for {clause.metric} carries no contract, slice or kernels as labels."
            for clause in left_out(contract)
        ),
    )


def expressible(contract: Contract) -> tuple[Clause, ...]:
    """The clauses that rules can judge: those on one histogram that recorders send."""
    return tuple(clause for clause in contract.clauses if clause.quantity is not None and clause.opposite is None)


def left_out(contract: Contract) -> tuple[Clause, ...]:
    """The clauses that rules cannot judge: on others' histograms, or on two histograms, which has no closed form."""
    judged = expressible(contract)
    return tuple(clause for clause in contract.clauses if clause not in judged)


def _clause_rules(clause: Clause, contract: Contract) -> Iterator[dict[str, Any]]:
    """Yield the recording rules of a clause on a recorded quantity, in the order in which they have to run."""
    of_clause = {label("kc.contract"): contract.name, label("kc.clause"): clause.id}
    seen = contract.observability
    windows = {"short": seen.window, "long": max(seen.long_window, seen.window)}  # the first decides where it can

    def own(name: str, window: str = "", slice: str = "") -> str:
        matchers = {"kc.contract": contract.name, "kc.clause": clause.id}
        matchers |= {"kc.window": window} if window else {}
        return selector(name, matchers | ({"kc.slice": slice} if slice else {}))

    def rule(name: str, expr: str, window: str = "") -> dict[str, Any]:
        of_window = {label("kc.window"): window} if window else {}
        return {"record": metric(name), "expr": expr, "labels": {**of_clause, **of_window}}

    assert clause.quantity is not None
    operator = "" if clause.operator is None else f', {label("kc.operator")}="{clause.operator}"'
    judged = f'{label("kc.slice")}!~"{"|".join(sorted(UNJUDGED))}"{operator}'
    raw = f'{prometheus_name(clause.quantity)}{{{label("kc.contract")}="{contract.name}", {judged}}}'
    for window, seconds in windows.items():
        counted = f"sum by ({_CELL}) (increase({raw}[{format_duration(seconds)}]))"
        yield rule("kc.rule.window.histogram", counted, window)
    for window, seconds in windows.items():
        exports = f"min by ({_CELL}) (count_over_time({raw}[{format_duration(seconds)}]) > 1)"
        counted = f"sum by ({_CELL}) (histogram_count({own('kc.rule.window.histogram', window)}))"
        yield rule("kc.rule.window.samples", f"{counted}\n/ (1 + {_EXTRAPOLATION_FACTOR} / ({exports} - 1))", window)
    histogram = Native(own("kc.rule.window.histogram"), bucket_layout(contract, clause.quantity))
    found = forms(clause, contract, histogram, own("kc.rule.window.samples"))
    yield rule("kc.rule.window.estimate", found.estimate)
    yield rule("kc.rule.window.lower", found.lower)
    yield rule("kc.rule.window.upper", found.upper)
    yield rule("kc.rule.limit", _limits(clause, contract, own))
    yield rule("kc.rule.window.status", _judged(clause, contract, own))
    yield rule("kc.rule.status", _decided(contract, own, raw))
    short = own("kc.rule.window.status", "short")
    for name in ("estimate", "lower", "upper", "samples"):  # of the window that decided
        whole = f"kc.rule.window.{name}"
        deciding = f"{own(whole, 'short')} and on ({_CELL}) {short} != {Status.INCONCLUSIVE.code}"
        either = f"(\n  max by ({_CELL}) ({deciding})\n  or\n  max by ({_CELL}) ({own(whole, 'long')})\n)"
        yield rule(f"kc.rule.{name}", f"{either}\nand on ({_CELL}) {own('kc.rule.status')}")


def _limits(clause: Clause, contract: Contract, own: _Own) -> str:
    def limited(slice: str, limit: float) -> str:
        return f"max by ({_CELL}) ({own('kc.rule.window.samples', 'long', slice)}) * 0 + {limit!r}"

    special = [
        limited(name, clause.limit_for(name))
        for name in contract.slices
        if clause.limit_for(name) != clause.limit_for(ALL)
    ]
    return "\nor ".join([*special, limited("", clause.limit_for(ALL))])


def _judged(clause: Clause, contract: Contract, own: _Own) -> str:
    """FAIL above the limit, PASS at or below it, and INCONCLUSIVE between or with too few observations.

    A maximum is broken by any number of them. A share of none is kept while none is seen; it takes more than one to
    break it here, because a store may count what is 0 as a little above.
    """
    limit = f"on ({_CELL}) group_left () {own('kc.rule.limit')}"
    needed = samples_needed(clause, contract.observability)
    enough = f"({own('kc.rule.window.samples')} >= bool {needed})"
    any_ = f"({own('kc.rule.window.samples')} >= bool 1)" if clause.parsed_statistic.kind == "max" else enough
    fails = f"({own('kc.rule.window.lower')} > bool {limit})"
    passes = f"({own('kc.rule.window.upper')} <= bool {limit})"
    if all(clause.allows_none(slice) for slice in (ALL, *contract.slices)):
        seen = f"{own('kc.rule.window.estimate')} * {own('kc.rule.window.samples')}"
        passes = f"({seen} <= bool {NOT_ONE!r})"
    elif clause.parsed_statistic.kind == "max" and not any(map(clause.limit_for, (ALL, *contract.slices))):
        assert clause.quantity is not None
        zero = bucket_layout(contract, clause.quantity).zero_threshold
        passes = f"({own('kc.rule.window.estimate')} <= bool {zero * (1.0 + EDGE_ROUNDING)!r})"  # 0, to its resolution
    doubt = Status.INCONCLUSIVE.code
    return (
        f"{doubt} + {Status.FAIL.code - doubt} * {fails} * {any_}\n- {doubt - Status.PASS.code} * {passes} * {enough}"
    )


def _decided(contract: Contract, own: _Own, heard: str) -> str:
    """The verdict of each cell of the current kernel pairs: those observed in the short window, or all if none is."""
    status, samples = "kc.rule.window.status", "kc.rule.window.samples"
    observed = f"max by ({_CELL}) ({own(samples, 'long')})"
    verdict = (
        f"    max by ({_CELL}) ({own(status, 'short')} != {Status.INCONCLUSIVE.code})\n"
        f"    or\n    max by ({_CELL}) ({own(status, 'long')})"
    )
    lately = f"count(count_over_time({heard}[{format_duration(2 * contract.observability.heartbeat)}]))"
    current = f"max by ({_PAIR}) ({own(samples, 'short', ALL)} > 0)"
    cells = (
        f"  (\n{verdict}\n  )\n  and on ({_CELL}) ({observed} > 0)\n  and on () {lately}\n"
        f"  or\n  {observed} * 0 + {Status.NO_DATA.code}"
    )
    return (
        f"(\n{cells}\n)\nunless on ({_PAIR}) (\n  {observed}\n  unless on ({_PAIR}) {current}\n  and on () {current}\n)"
    )
