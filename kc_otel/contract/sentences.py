"""Clauses in words: the sentences that panels, alerts and rules share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

from kc_otel.contract.clause import About, Clause
from kc_otel.contract.measuring_paths import TRAINING
from kc_otel.contract.model import Contract, Observability
from kc_otel.contract.registry.clause_metrics import DERIVED, QUANTITIES, Unit
from kc_otel.contract.slices import ALL
from kc_otel.contract.units import format_duration
from kc_otel.contract.words import with_unit

ABOUT: Final[Mapping[About, str]] = MappingProxyType(
    {"population": "future traffic, too", "traffic": "only the measured traffic"}
)
"""Scope of a verdict, in the same words everywhere."""

REMEDIES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "fail": "check for invalid input and stale weights, then roll the kernel version back or pin the slice to the "
        "training kernel",
        "train-kernel": "compare the training kernels, and roll back the one that changed: the same version passed "
        "against another",
        "no-data": "check the traffic, the recorders' exports and the contract that they apply",
        "inconclusive": "wait for more samples, or raise `sampling`",
        "invalid-input": "fix the input that the checks name, and do not judge drift before that",
        "rolled-back": "check that no router, pin or mirror sends it traffic",
        "unproven": "`kc-otel status` names points that are not judged; restart a recorder that fell silent under the "
        "same `service.instance.id`, and shut down one that is done; if the kernel serves nobody, roll it back, or "
        "close the incident with `kc-otel alerts ack {contract} --close --why '...'`",
        "run-over": "nothing, if that was intended; otherwise start it again",
        "run-ended": "find what broke before these kernels run again, for instance with `kc-otel locate`",
        "clause-gone": "roll the kernel back if it is in doubt, or close the incident with `kc-otel alerts ack "
        "{contract} --close --why '...'`",
        "trainer": "check for invalid input and stale weights, then stop the run or correct its rollouts with `kc-otel "
        "remedy`",
    }
)
"""First action by the subject of an alert, as the end of a sentence that begins with `Now:`."""


def remedy_of(contract: Contract, about: str) -> str:
    """Return the first action; of a breach under a contract that asks trainers to act and no router, a trainer's."""
    kinds = {action.kind for step in contract.escalation for action in step.do}
    trains = about == "fail" and "route" not in kinds and not kinds.isdisjoint(TRAINING)
    return REMEDIES["trainer" if trains else about]


def consequence(clause: Clause | None, on: str, where: str, estimate: float = math.nan) -> str:
    """Return what users suffer while an alert fires, as a sentence; `estimate` is NaN where it is not known.

    >>> consequence(None, "no-data", "slice code")
    'Nothing monitors slice code: a fault there goes unseen.'
    """
    if on != "fail":
        return {
            "no-data": f"Nothing monitors {where}: a fault there goes unseen.",
            "inconclusive": f"The data do not decide whether {where} keeps its limit.",
            "invalid-input": "Nothing monitors sequences that fail the input checks: a fault in them goes unseen.",
        }[on]
    metric = "" if clause is None else clause.metric
    mean = clause is not None and clause.parsed_statistic.kind == "mean" and math.isfinite(estimate)
    said = f"Requests on {where} are answered by a kernel that has drifted too far from the trained one."
    match metric:
        case "reward_drift" if mean:
            said = f"Training and serving differ by {abs(estimate):.2g} in mean reward on {where}."
        case "reward_drift" | "reward_drift_bound":
            said = f"Training and serving may differ in mean reward by more than the budget on {where}."
        case "tv_token" if mean:
            said = f"About {estimate:.2%} of the tokens on {where} would differ under the training kernel."
        case "weights_lag":
            said = f"Requests on {where} are answered with stale weights."
        case "weights_mismatch":
            said = f"Requests on {where} are answered with weights that differ from the trained ones."
        case _ if metric.startswith("gen_ai."):
            said = f"Requests on {where} take longer than the contract allows."
    return said


def kept_away(where: str) -> str:
    """Return the effect of a breach that is contained, as a sentence."""
    return f"Routers keep requests on {where} away from the kernel that broke it, which is no longer measured there."


def limitation(clause: Clause, slices: Sequence[str] = ()) -> str:
    """Return the limit without the full stop, and those that slices have of their own."""
    limit = _limit(clause, ALL)
    own = [f"{_limit(clause, name)} on {name}" for name in slices if name in clause.slices]
    except_on = f" ({', '.join(own)})" if own else ""
    return f"{statistic_words(clause)} {clause.metric_text} must not be above {limit}{except_on}"


def promise(clause: Clause, slices: Sequence[str] = ()) -> str:
    """The clause as sentences: its limit, the slices with other limits, the meaning of the metric, and the reason."""
    known = QUANTITIES.get(clause.metric) or DERIVED.get(clause.metric)
    sentences = [
        f"{limitation(clause, slices)}.",
        known.meaning if known else f"The OpenTelemetry histogram {clause.metric}.",
        counted(clause),
        claim(clause),
        clause.description.strip(),
    ]
    return " ".join(" ".join(sentence.split()) for sentence in sentences if sentence)


def counted(clause: Clause) -> str:
    """Return the unit that counts once, as a sentence; empty where every observation of the metric counts."""
    if clause.averaged is None or clause.quantity is None:
        return ""
    of_tokens = QUANTITIES[clause.quantity.base].per is Unit.TOKEN
    match clause.averaged:
        case Unit.SEQUENCE:
            return "Each sequence counts once, with the mean over its tokens."
        case Unit.PROMPT:
            over = "its rollouts and their tokens" if of_tokens else "its rollouts"
            return f"Each prompt counts once, with the mean over {over}."
    return "Each training step counts once, with the mean over its prompts."


def claim(clause: Clause) -> str:
    """Return the scope of a verdict on a clause, as a sentence."""
    quantity = clause.quantity
    tokens = clause.parsed_statistic.kind != "max" and quantity is not None and quantity.per is Unit.TOKEN
    more = "; later tokens may differ by more than its confidence says" if tokens else ""
    return " ".join(filter(None, (f"A verdict covers {ABOUT[clause.about]}{more}.", reading(clause))))


def reading(clause: Clause) -> str:
    """Return the reading of the limit, at every step or on average, as a sentence; empty for a window only."""
    if clause.about != "population":
        return ""
    if clause.averaged is Unit.STEP:
        return "The limit holds on average over steps: single steps may exceed it."
    assumed = " It assumes that sequences are independent." if clause.unit == "sequence" else ""
    return f"The limit holds at every step: steps that exceed it are a breach, whatever their average.{assumed}"


def scopes(abouts: Mapping[str, About]) -> list[str]:
    """Return the scopes of clauses' verdicts, a line each: `that cover future traffic, too: tv`."""
    return [
        f"that cover {says}: {', '.join(ids)}"
        for about, says in ABOUT.items()
        if (ids := [clause for clause, of in abouts.items() if of == about])
    ]


def assurances(seen: Observability) -> tuple[str, str]:
    """Return the claims of verdicts: an interval and a PASS by `confidence`, a FAIL by `false_alarms`."""
    sure = (
        "At one evaluation and for one cell, the probability that a window's interval contains the true value, and "
        f"that a PASS is right, is at least {100.0 * seen.confidence:.10g} %."
    )
    apart = (
        "The expected time between false alarms, FAILs of cells that keep their limits, is at least "
        f"{format_duration(seen.false_alarms)} for all cells of the contract together."
    )
    return sure, apart


def _limit(clause: Clause, slice: str) -> str:
    """Four digits and the unit: `0.004`, `0.15 nat`, `0.8 s`."""
    return with_unit(f"{clause.limit_for(slice):.4g}", clause.limit_unit)


def statistic_words(clause: Clause) -> str:
    """Return the limited statistic, to be read before the metric's name: `Mean of`, `99.9th percentile of`."""
    parsed = clause.parsed_statistic
    return {
        "mean": "Mean of",
        "max": "Largest",
        "quantile": f"{parsed.argument * 100:.6g}th percentile of",
        "fraction": f"Share above {parsed.argument:g} of",
    }[parsed.kind]
