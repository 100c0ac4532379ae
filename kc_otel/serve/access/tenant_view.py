"""The evaluator as one tenant sees it: its own contracts, and nothing that tells of others.

What the API reads of a core it reads of this one instead. Whatever a core has that is not said here is not there for
tenants: a route that asks for it fails, and shows nothing.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Never

from kc_otel.judge.decisions.table import DecisionTable
from kc_otel.judge.escalation.escalate import EscalationState
from kc_otel.judge.escalation.people import People
from kc_otel.judge.incidents.incident import Incident
from kc_otel.judge.verdict import Evaluation
from kc_otel.serve.core import Core
from kc_otel.serve.store.policy_store import Event
from kc_otel.serve.webhooks.outbox import EndpointStatus

__all__ = ["TenantView"]


class TenantView(Core):
    """A core that has only some contracts. It reads; orders go to the core that `whole` gives.

    Args:
        core: Has all of them.
        contracts: Names of those that are shown; others than the core's are none.
    """

    def __init__(self, core: Core, contracts: Collection[str]) -> None:  # not made as a core is: it has no state
        self._core = core
        self._own = frozenset(contracts) & core.contracts.keys()
        self.contracts = {name: contract for name, contract in core.contracts.items() if name in self._own}
        self.dry_run = core.dry_run & self._own
        self.listeners = core.listeners  # says and takes nothing but of the contracts that it is asked about
        self.started_at = core.started_at
        self.external_url = core.external_url
        self.otlp_port = core.otlp_port
        self.log = None
        self.shards, self.resize = (), None  # they are of all tenants together
        self.worst = core.worst  # is asked about one of these contracts at a time
        self.evaluator: Any = _Judge(core, self._own)
        self.history: Any = _History(core, self._own)
        self.events: Any = _Events(core, self._own)
        self.outbox: Any = SimpleNamespace(status=self._endpoints)  # orders go to the whole core
        self.gate_history: Any = SimpleNamespace(since=self._gates)
        self.promotions: Any = _Promotions(core, self._own)
        self._decisions: dict[str, DecisionTable] = {}

    def whole(self, contract: str) -> Core:
        """The core to give an order about a contract to.

        Raises:
            LookupError: If this tenant has no such contract.
        """
        _check(contract, self._own)
        return self._core.whole(contract)

    def resume(self, contract: str, slice: str | None, by: str, why: str, now: float) -> int:
        """A person lifts routes; returns how many."""
        return self.whole(contract).resume(contract, slice, by, why, now)

    def amend(self, *_args: Any, **_options: Any) -> Never:
        """Nothing is put in force here: what others decided would be lost."""
        raise TypeError("a tenant's view puts nothing in force; use whole()")

    @property
    def sync_seconds(self) -> float | None:
        """How long the disk took for the state at last, seconds."""
        return self._core.sync_seconds

    async def on_disk(self) -> None:
        """Wait until all that was decided is on the disk."""
        await self._core.on_disk()

    @property
    def evaluated_at(self) -> float | None:  # type: ignore[override]
        """Unix time of the last evaluation."""
        return self._core.evaluated_at

    @property
    def tick_seconds(self) -> float:  # type: ignore[override]
        """How long the last evaluation took, seconds."""
        return self._core.tick_seconds

    @property
    def escalation(self) -> EscalationState:  # type: ignore[override]
        """What holds of its contracts."""
        whole = self._core.escalation
        return EscalationState(
            policies={name: one for name, one in whole.policies.items() if name in self._own},
            notifications={name: one for name, one in whole.notifications.items() if name in self._own},
            decisions=self._narrowed("published", whole.decisions),
            dry_run_decisions=self._narrowed("dry", whole.dry_run_decisions),
            people=People(
                silences=tuple(one for one in whole.people.silences if one.contract in self._own),
                acknowledgements=tuple(one for one in whole.people.acknowledgements if one.contract in self._own),
            ),
            incidents={name: found for name, found in whole.incidents.items() if name in self._own},
        )

    def past_incidents(self, contract: str | None, since: float, limit: int) -> tuple[Incident, ...]:
        """Incidents that ended at or after a Unix time, newest first; of one contract, or of all its own."""
        names = sorted(self._own if contract is None else {contract} & self._own)
        found = [one for name in names for one in self._core.past_incidents(name, since, limit)]
        return tuple(sorted(found, key=lambda one: -(one.resolved_at or 0.0))[:limit])

    def incident(self, id: str) -> Incident | None:
        """An incident by its id; None when there is none, or it is not this tenant's."""
        found = self._core.incident(id)
        return found if found is not None and found.contract in self._own else None

    def evidence(self, id: str, digest: str) -> str | None:
        """Evidence of a diagnosis of an incident; None when there is none, or it is not this tenant's."""
        return self._core.evidence(id, digest) if self.incident(id) is not None else None

    def diagnose(self, *_args: Any, **_options: Any) -> Never:
        """Nothing is kept here."""
        raise TypeError("a tenant's view keeps nothing; use whole()")

    def announce_all(self, announcements: Any) -> None:
        """Say what has been written."""
        self._core.announce_all(announcements)

    def _narrowed(self, which: str, table: DecisionTable) -> DecisionTable:
        """The table without what it says of others. What others decide changes neither its version nor its time."""
        own = DecisionTable(
            version=table.version,
            at=table.at,
            routes=tuple(one for one in table.routes if one.contract in self._own),
            directives=tuple(one for one in table.directives if one.contract in self._own),
            resumptions=tuple(one for one in table.resumptions if one.contract in self._own),
            pins=tuple(one for one in table.pins if one.contract in self._own),
            canaries=tuple(one for one in table.canaries if one.contract in self._own),
        )
        last = self._decisions.get(which)
        if last is not None and replace(own, version=last.version, at=last.at) == last:
            return last
        self._decisions[which] = own
        return own

    def _endpoints(self) -> tuple[EndpointStatus, ...]:
        return self._core.outbox.status(self._own)

    def _gates(self, contract: str, at: float) -> tuple[Evaluation, ...]:
        return self._core.gate_history.since(_check(contract, self._own), at)


def _check(contract: str, own: Collection[str]) -> str:
    if contract not in own:
        raise LookupError(f"no contract {contract!r}; there are {', '.join(sorted(own))}")
    return contract


class _Judge:
    """What the evaluator knows of some contracts."""

    def __init__(self, core: Core, own: frozenset[str]) -> None:
        self._core, self._own = core, own
        self.counters: Counter[str] = Counter()  # of all senders together

    @property
    def faults(self) -> Any:
        whole = self._core.evaluator.faults
        return SimpleNamespace(
            present={name: said for name, said in whole.present.items() if name in self._own},
            counts=Counter({name: count for name, count in whole.counts.items() if name in self._own}),
        )

    @property
    def events(self) -> Mapping[str, int]:
        found: Counter[str] = Counter()
        for name in self._own:
            found.update(self._core.evaluator.states[name].events)
        return found

    @property
    def steps(self) -> Mapping[str, Any]:
        return {name: steps for name, steps in self._core.evaluator.steps.items() if name in self._own}

    @property
    def series_count(self) -> int:
        return sum(len(self._core.evaluator.states[name].series) for name in self._own)

    @property
    def stream_count(self) -> int:
        return sum(len(self._core.evaluator.states[name].streams) for name in self._own)

    def kernels(self, contract: str) -> Any:
        return self._core.evaluator.kernels(_check(contract, self._own))

    def invalid_input(self, contract: str, now: float, window: float) -> dict[str, int]:
        return self._core.evaluator.invalid_input(_check(contract, self._own), now, window)

    def examples(self, contract: str, now: float) -> Any:
        return self._core.evaluator.examples(_check(contract, self._own), now)

    def distribution(self, of: Any, window: float, now: float) -> Any:
        _check(of.contract, self._own)
        return self._core.evaluator.distribution(of, window, now)


class _History:
    """The past of some contracts' cells."""

    def __init__(self, core: Core, own: frozenset[str]) -> None:
        self._core, self._own = core, own

    def cells(self, contract: str | None = None, glances: int = 0) -> list[Any]:
        names = sorted(self._own) if contract is None else sorted({contract} & self._own)
        return [cell for name in names for cell in self._core.history.cells(name, glances)]

    def step(self, contract: str) -> float:
        return self._core.history.step(_check(contract, self._own))

    def past(self, contract: str, clause: str, slice: str, start: float, end: float) -> Any:
        return self._core.history.past(_check(contract, self._own), clause, slice, start, end)


class _Events:
    """What happened to some contracts."""

    def __init__(self, core: Core, own: frozenset[str]) -> None:
        self._core, self._own = core, own

    def events(self, contract: str | None = None, after_id: int = 0, limit: int = 100) -> tuple[Event, ...]:
        found = (self._core.events.events(name, after_id, limit) for name in self._names(contract))
        return tuple(heapq.merge(*found, key=lambda event: event.id))[:limit]

    def newest(self, contract: str | None = None, limit: int = 100, *, verdicts: bool = True) -> tuple[Event, ...]:
        found = (self._core.events.newest(name, limit, verdicts=verdicts) for name in self._names(contract))
        return tuple(heapq.merge(*found, key=lambda event: event.id))[-limit:]

    def _names(self, contract: str | None) -> list[str]:
        return sorted(self._own if contract is None else {contract} & self._own)


class _Promotions:
    """The promotions of some contracts."""

    def __init__(self, core: Core, own: frozenset[str]) -> None:
        self._core, self._own = core, own

    def all(self, contract: str | None = None) -> list[Any]:
        return [one for one in self._core.promotions.all(contract) if one.contract in self._own]

    def __getattr__(self, name: str) -> Any:
        """Whatever else there is takes the contract's name first."""
        if name not in {"of", "evidence", "latest", "start", "admit", "tell"}:
            raise AttributeError(name)
        method = getattr(self._core.promotions, name)
        return lambda contract, *args, **options: method(_check(contract, self._own), *args, **options)
