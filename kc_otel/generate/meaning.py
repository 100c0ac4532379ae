"""What a clause means, as Markdown: the promise, its limits, what follows from it, and what happens when it breaks.

Everything but the policy's steps is `kc-otel explain`'s; this page is where dashboards and alerts link to.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from kc_otel.contract.clause import Clause
from kc_otel.contract.model import Contract
from kc_otel.contract.registry import DERIVED, QUANTITIES
from kc_otel.contract.sentences import number, promise
from kc_otel.contract.slices import ALL
from kc_otel.contract.units import format_duration
from kc_otel.explain import Explanation
from kc_otel.explain.chain import Chain, Level
from kc_otel.explain.explanation_text import lines
from kc_otel.explain.numbers import rounded_down, rounded_up
from kc_otel.generate.ladder import rungs
from kc_otel.generate.links import OVERVIEW_UID, panel_id, slice_link

__all__ = ["clause_meaning", "contract_meaning"]

_WAITS: Final = {"fail": "FAIL", "no-data": "NO_DATA", "inconclusive": "INCONCLUSIVE"}
_FROM_BELOW: Final[frozenset[Level]] = frozenset({"token ESS", "sequence ESS"})
_LEVELS: Final[dict[Level, str]] = {
    "token": "total variation of a token, on average",
    "sequence": "total variation of a whole sequence",
    "reward": "difference of the expected reward",
    "gradient": "bias of the policy gradient",
    "token ESS": "effective sample size of token weights, per sample",
    "sequence ESS": "effective sample size of sequence weights, per sample",
    "clip": "share of the clip range",
}


def contract_meaning(explanation: Explanation) -> str:
    """Everything that `kc-otel explain` says of a contract, in its own layout."""
    text = "\n".join(line.text for line in lines(explanation))
    return f"What `kc-otel explain` says of this contract:\n\n```\n{text}\n```\n"


def clause_meaning(contract: Contract, clause: Clause, explanation: Explanation) -> str:
    """What one clause promises and implies.

    Args:
        contract: The contract.
        clause: One of its clauses.
        explanation: Of the same contract.
    """
    parts = (
        f"**{promise(clause, tuple(contract.slices))}**",
        _limits(contract, clause),
        _section("What it guarantees on all traffic", _guarantees(clause, explanation)),
        _section("Beside the other clauses", _relations(clause, explanation)),
        _section("Before it can pass", _needed(clause, explanation)),
        _section("When it does not hold", _steps(contract, clause)),
        _links(contract, clause),
    )
    return "\n\n".join(part for part in parts if part) + "\n"


def _section(title: str, sentences: Iterator[str]) -> str:
    items = [f"- {sentence}" for sentence in sentences]
    return "\n".join((f"#### {title}", *items)) if items else ""


def _limits(contract: Contract, clause: Clause) -> str:
    rows = [
        f"| {'all traffic' if name == ALL else name} | {number(clause.limit_for(name), clause.limit_unit)} |"
        for name in (ALL, *contract.slices)
    ]
    source = QUANTITIES.get(clause.metric) or DERIVED.get(clause.metric)
    definition = f"\n\nDefinition: {source.source_text}." if source else ""
    return "\n".join(("| Slice | At most |", "| --- | --- |", *rows)) + definition


def _guarantees(clause: Clause, explanation: Explanation) -> Iterator[str]:
    chain: Chain = next(
        chain for entry in explanation.forwards[:1] for chain in entry.chains if chain.clause == clause.id
    )
    for rung in chain.rungs:
        what = _LEVELS[rung.level]
        if not rung.says:
            yield f"Nothing for the {what}: over the horizon the limit excludes nothing [{rung.by}]."
        elif rung.level in _FROM_BELOW:
            yield f"At least {rounded_down(rung.bound)} {what} [{rung.by}]."
        else:
            yield f"At most {rounded_up(rung.bound)} {what} [{rung.by}]."
    if chain.purpose:
        yield f"No distance between the kernels follows: {chain.purpose}."
    if chain.note:
        yield f"{chain.note}."
    if chain.evidence:
        yield f"It rests on {chain.evidence}."


def _relations(clause: Clause, explanation: Explanation) -> Iterator[str]:
    for relation in explanation.relations:
        if clause.id in relation.clauses:
            yield " ".join(filter(None, (relation.sentence, relation.suggestion)))


def _needed(clause: Clause, explanation: Explanation) -> Iterator[str]:
    for needed in explanation.needed:
        if needed.clause != clause.id:
            continue
        if needed.observations is None:
            yield f"No number of {needed.unit}s is enough, even for two identical kernels."
        else:
            yield f"At least {needed.observations:,} {needed.unit}s, even if the two kernels were identical."
        if needed.minimum_name:
            yield f"The contract asks for {needed.minimum:,} ({needed.minimum_name}) before any verdict."


def _steps(contract: Contract, clause: Clause) -> Iterator[str]:
    for rung in rungs(contract):
        if rung.clause is clause:
            after = f" for {format_duration(rung.step.after)}" if rung.step.after else ""
            clear = f" It resolves after {format_duration(rung.step.clear_for)}." if rung.step.clear_for else ""
            actions = ", ".join(map(str, rung.step.do))
            yield f"{_WAITS[rung.step.on]}{after}: step {rung.number}, {rung.step.severity}: {actions}.{clear}"


def _links(contract: Contract, clause: Clause) -> str:
    overview = f"/d/{OVERVIEW_UID}?viewPanel={panel_id(contract.name, clause.id)}&var-contract={contract.name}"
    links = [("Its panel", overview), ("Slice dashboard", slice_link(contract.name, clause.id, ALL))]
    if contract.metadata.runbook:
        links.append(("Runbook", contract.metadata.runbook))
    return " · ".join(f"[{title}]({url})" for title, url in links)
