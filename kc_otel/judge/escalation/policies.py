"""From verdicts to what holds and what is said: the policies of all contracts as one pure function.

A contract that runs dry is judged like any other. What it decides goes into a decision table of its own that nobody
acts on, and nobody is told.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from kc_otel.contract.model import Contract
from kc_otel.judge.decisions.table import DecisionTable, Pin, apply
from kc_otel.judge.escalation.alerts import PolicyState, Transition
from kc_otel.judge.escalation.notices import Notice, NotificationLog, notices
from kc_otel.judge.escalation.people import People, Silence, current
from kc_otel.judge.escalation.policy import advance
from kc_otel.judge.verdict import Verdict

__all__ = ["Escalation", "EscalationState", "judge"]


@dataclass(frozen=True, slots=True)
class EscalationState:
    """What holds between two evaluations.

    Attributes:
        policies: Alerts, by the contract's name.
        books: What has been said of them, by the contract's name.
        decisions: The table that is published.
        would: What contracts that run dry would have published.
        people: Silences and acknowledgements.
    """

    policies: Mapping[str, PolicyState] = field(default_factory=dict)
    books: Mapping[str, NotificationLog] = field(default_factory=dict)
    decisions: DecisionTable = field(default_factory=DecisionTable)
    would: DecisionTable = field(default_factory=DecisionTable)
    people: People = field(default_factory=People)


@dataclass(frozen=True, slots=True)
class Escalation:
    """What an evaluation makes of what held before.

    Attributes:
        standing: What holds from now on.
        transitions: What fired and resolved, of contracts that run dry too.
        notices: What has to be said.
        silences: Silences that have come to their end.
        pins: Pins that have come to their end.
    """

    standing: EscalationState
    transitions: tuple[Transition, ...]
    notices: tuple[Notice, ...]
    silences: tuple[Silence, ...]
    pins: tuple[Pin, ...]


def judge(
    contracts: Sequence[Contract],
    before: EscalationState,
    verdicts: Sequence[Verdict],
    invalid: Callable[[Contract], Mapping[str, int]],
    dry_run: Collection[str],
    now: float,
) -> Escalation:
    """One evaluation of every policy.

    Args:
        contracts: The contracts in force.
        before: What held until now.
        verdicts: The verdict of every cell of every contract.
        invalid: Sequences of a contract that failed an input check within its window, by reason.
        dry_run: Names of the contracts that run dry.
        now: Unix time, seconds.
    """
    policies: dict[str, PolicyState] = {}
    edges: dict[str, tuple[Transition, ...]] = {}
    for contract in contracts:
        name = contract.name
        own = [verdict for verdict in verdicts if verdict.cell.contract == name]
        state = before.policies.get(name, PolicyState(name))
        policies[name], edges[name] = advance(contract, state, own, invalid(contract), now)
    fires = {alert.fingerprint for state in policies.values() for alert in state.firing}
    people, ended = current(before.people, fires, now)
    books: dict[str, NotificationLog] = {}
    decisions, would, told = before.decisions, before.would, list[Notice]()
    for contract in contracts:
        name, transitions = contract.name, edges[contract.name]
        book = before.books.get(name, NotificationLog(name))
        if name in dry_run:
            decisions, would = apply(decisions, (), contract, now), apply(would, transitions, contract, now)
            books[name] = book
            continue
        decisions = apply(decisions, transitions, contract, now)
        books[name], said = notices(contract, book, policies[name].firing, transitions, people, now)
        told += said
    return Escalation(
        standing=EscalationState(policies, books, decisions, would, people),
        transitions=tuple(edge for contract in contracts for edge in edges[contract.name]),
        notices=tuple(told),
        silences=ended,
        pins=tuple(pin for pin in before.decisions.pins if pin not in decisions.pins),
    )
