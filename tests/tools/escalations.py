"""A contract's policy, decisions, incidents and messages, an evaluation at a time, each written and read again."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kc_otel.contract.model import Contract
from kc_otel.contract.slices import ALL
from kc_otel.judge.decisions import DecisionTable
from kc_otel.judge.escalation.alerts import Alert, People, PolicyState, advance
from kc_otel.judge.escalation.escalate import Escalation, EscalationState, escalate
from kc_otel.judge.escalation.tick import Tick, TrafficSeen
from kc_otel.judge.incidents.incident import Incident
from kc_otel.judge.plain_json import read_json, to_json
from kc_otel.judge.series import Pair
from kc_otel.judge.verdict import Evaluation, Verdict


def tick_of(
    contract: Contract, verdicts: Sequence[Verdict], now: float, invalid: Mapping[Pair, Mapping[str, int]] | None = None
) -> Tick:
    """An evaluation; `invalid` counts sequences that fail an input check, by kernel pair and reason."""
    failing = {(pair, ALL): reasons for pair, reasons in (invalid or {}).items()}
    return Tick(contract, Evaluation(now, verdicts), traffic=TrafficSeen(failing=failing))


def advanced(
    contract: Contract, verdicts: Sequence[Verdict], now: float, before: PolicyState | None = None,
    invalid: Mapping[Pair, Mapping[str, int]] | None = None,
) -> tuple[PolicyState, tuple[Alert, ...]]:  # fmt: skip
    """The policy after an evaluation, and what fired or resolved."""
    return advance(tick_of(contract, verdicts, now, invalid), before or PolicyState(contract.name))


class Escalating:
    """What `escalate` makes of verdicts, with the options given."""

    def __init__(self, contract: Contract, **options: Any) -> None:
        self.contract, self.options, self.state = contract, options, EscalationState()

    def evaluate(self, now: float, verdicts: Sequence[Verdict], invalid: dict[str, int] | None = None) -> Escalation:
        """An evaluation; `invalid` counts sequences of the first verdict's kernels that fail an input check."""
        traffic = self.options.get("traffic", TrafficSeen())
        failing = {(verdicts[0].cell[-2:], ALL): invalid} if invalid else {}
        options = self.options | {"traffic": replace(traffic, failing=failing)}
        before = read_json(EscalationState, to_json(self.state))
        step = escalate(self.contract, before, Evaluation(now, verdicts), **options)
        self.state = step.state
        return step

    @property
    def firing(self) -> tuple[Alert, ...]:
        return self.state.policies[self.contract.name].firing if self.state.policies else ()

    @property
    def lasting(self) -> tuple[Incident, ...]:
        return self.state.incidents.get(self.contract.name, ())

    @lasting.setter
    def lasting(self, incidents: tuple[Incident, ...]) -> None:
        self.state = replace(self.state, incidents={self.contract.name: incidents})

    @property
    def table(self) -> DecisionTable:
        return self.state.decisions

    @table.setter
    def table(self, table: DecisionTable) -> None:
        self.state = replace(self.state, decisions=table)

    @property
    def people(self) -> People:
        return self.state.people

    @people.setter
    def people(self, people: People) -> None:
        self.state = replace(self.state, people=people)
