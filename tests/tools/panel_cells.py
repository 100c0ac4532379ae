"""What panels say of cells, alerts, routes and promotions, from evaluators' objects."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from kc_otel.contract.sentences import limitation
from kc_otel.judge.incidents.incident import IncidentState
from kc_otel.judge.verdict import Status, Verdict
from tests.tools.panel_answers import Answer
from tests.tools.panel_evaluators import Moment
from tests.tools.panel_rows import CELL, PAIR, Labels, Rows, World, by

Expected = Callable[[World], dict[Labels, Answer]]
"""What a query must answer: a value for each series."""
Of = Callable[[Verdict, float], float]
"""A number of a cell, from its verdict and since when it has it."""
PLACE = CELL[:3]
INCIDENT = ("kc_contract", "kc_incident", "kc_incident_on", "kc_kernel_train", "kc_kernel_inference")
OF_SLICE = ("kc_contract", "kc_slice")
VERSION = ("kc_contract", "kc_kernel_inference")
CODES = (Status.PASS, Status.INCONCLUSIVE, Status.NO_DATA, Status.FAIL)
SEVERITIES = ("info", "warning", "critical")
BITS = {
    "halt": 64, "route": 32, "quarantine-rollouts": 16, "hold-promotion": 8, "resync-weights": 4, "sample-more": 2,
    "locate": 2, "notify": 1, "webhook": 1,
}  # fmt: skip
"""By kind of action; telling people is one, in whichever way."""


def code(verdict: Verdict, _: float) -> float:
    return CODES.index(verdict.status)


def estimate(verdict: Verdict, _: float) -> float:
    return verdict.estimate


def lower(verdict: Verdict, _: float) -> float:
    return verdict.lower


def upper(verdict: Verdict, _: float) -> float:
    return verdict.upper


def limit(verdict: Verdict, _: float) -> float:
    return verdict.limit


def samples(verdict: Verdict, _: float) -> float:
    return verdict.samples


def against(verdict: Verdict, _: float) -> float:
    return verdict.evidence


def margin(verdict: Verdict, _: float) -> float:
    """Distance from the bound that decides to the limit, as a share of the limit."""
    return (verdict.limit - (verdict.lower if verdict.status is Status.FAIL else verdict.upper)) / abs(verdict.limit)


def milliseconds(_: Verdict, since: float) -> float:
    return 1000.0 * since


def cells(of: Of, how: Any = max, names: Iterable[str] = CELL) -> Expected:
    """A number of each cell, or of several together."""
    return lambda world: by(names, world.cells(of), how)


def ever_broken(was: bool) -> Expected:
    """Verdicts now of the clauses and slices that were FAIL within the range, or of the others."""

    def found(world: World) -> dict[Labels, Answer]:
        moments = [one for every in world.evaluators.values() for one in every]
        times = {one.at for one in moments if world.at - world.range < one.at <= world.at}
        worst = by(PLACE, [row for at in times for row in world.but(at=at).cells(code)])
        now = cells(code, names=PLACE)(world)
        return {key: value for key, value in now.items() if (worst.get(key) == CODES.index(Status.FAIL)) == was}

    return found


def incidents(world: World) -> dict[Labels, Answer]:
    """2 for each incident that is broken, 1 for each that is contained."""
    codes = {IncidentState.BROKEN: 2.0, IncidentState.CONTAINED: 1.0}

    def rows(moment: Moment) -> Iterable[tuple[dict[str, str], float]]:
        for one in moment.incidents:
            kernels = {"kc_kernel_train": one.kernel_train, "kc_kernel_inference": one.kernel_inference}
            named = {"kc_contract": one.contract, "kc_incident": one.id, "kc_incident_on": one.on}
            yield named | kernels, codes[one.state]

    return by(INCIDENT, world.rows(rows, only=("contract",)))


GRAFANAS: dict[str, str] = {
    "1": "none",
    "s": "s",
    "{nat}": "suffix: nat",
    "{step}": "suffix: step",
    "{ulp}": "suffix: ulp",
}
"""Grafana's name of a unit."""


def unit_of(variable: str) -> Expected:
    """The unit of the picked clause, as Grafana calls it."""

    def found(world: World) -> dict[Labels, Answer]:
        (clause,) = (one for one in world.contract.clauses if one.id == world.picked[variable])
        return {frozenset({("kc_clause_unit", GRAFANAS[clause.limit_unit])}): 1.0}

    return found


def alone(value: Answer) -> dict[Labels, Answer]:
    """One series, without labels."""
    return {frozenset(): value}


def count_of(status: Status) -> Expected:
    """How many cells have a status."""
    return lambda world: alone(sum(at == CODES.index(status) for at in cells(code)(world).values()))


def broken(of: Expected) -> Expected:
    """What is said of cells that are not PASS."""

    def found(world: World) -> dict[Labels, Answer]:
        at = cells(code)(world)
        return {key: value for key, value in of(world).items() if at[key] > 0}

    return found


def spread(of: Callable[[World], dict[Labels, float]]) -> Expected:
    """A number of a clause on a slice, for each of its cells."""

    def found(world: World) -> dict[Labels, Answer]:
        there = of(world)
        places = {key: frozenset(pair for pair in key if pair[0] in PLACE) for key in cells(code)(world)}
        return {key: there[place] for key, place in places.items() if place in there}

    return found


def firing(world: World) -> Rows:
    """1 for each step that fires."""
    names = (*PLACE, "kc_severity")
    return world.rows(lambda moment: [(dict(zip(names, key, strict=True)), 1.0) for key in moment.firing])


def acting(world: World, *actions: str) -> Rows:
    """1 for each action of the steps that fire; of these actions, or of all."""
    names = (*PLACE, "kc_action")
    found = world.rows(lambda moment: [(dict(zip(names, key, strict=True)), 1.0) for key in moment.acting])
    return [row for row in found if not actions or row[0]["kc_action"] in actions]


def severity(world: World) -> dict[Labels, float]:
    """Code of the worst severity, from 1."""
    return by(PLACE, [(labels, 1 + SEVERITIES.index(labels["kc_severity"])) for labels, _ in firing(world)])


def done(world: World) -> dict[Labels, float]:
    """Everything that is done, as bits."""
    bits = [(labels, BITS[labels["kc_action"].partition(":")[0]]) for labels, _ in acting(world)]
    return by(PLACE, bits, lambda every: sum(set(every)))


def held(action: str) -> Expected:
    """For how many clauses and slices an action is in force."""
    return lambda world: alone(len(by(PLACE, acting(world, action))))


def promised(world: World) -> dict[Labels, Answer]:
    """Every cell with what its clause allows."""
    said = {
        (contract.name, clause.id): limitation(clause, tuple(contract.slices))
        for contract in world.contracts
        for clause in contract.clauses
    }

    def with_words(key: Labels) -> Labels:
        cell = dict(key)
        return key | {("kc_clause_promise", said[cell["kc_contract"], cell["kc_clause"]])}

    return {with_words(key): 1.0 for key in cells(code)(world)}


def in_words(*names: str) -> Expected:
    """A series for each picked clause, with its contract, its name, and what these labels say of it."""

    def found(world: World) -> dict[Labels, Answer]:
        rows = [
            {
                "kc_contract": contract.name,
                "kc_clause": clause.id,
                "kc_clause_promise": limitation(clause, tuple(contract.slices)),
                "kc_clause_metric": clause.metric,
                "kc_clause_statistic": clause.statistic_text,
                "definition": clause.metric,
            }
            for contract in world.contracts
            for clause in contract.clauses
            if re.fullmatch(world.picked["clause"], clause.id)
        ]
        return {frozenset((name, row[name]) for name in names): 1.0 for row in rows if world.takes(row)}

    return found


def of_clauses(of: Of, variable: str, how: Any = max) -> Expected:
    """One number over the cells of the clauses that a variable picks, on the picked slice."""

    def found(world: World) -> dict[Labels, Answer]:
        rows = [row for row in world.cells(of) if re.fullmatch(world.picked[variable], row[0]["kc_clause"])]
        return by((), by(CELL, rows, how), how)

    return found


def routes(world: World) -> dict[Labels, float]:
    """1 for slices that are sent to the training kernel, by a route of their own or of all traffic; else 0."""
    places = [(contract.name, slice) for contract in world.contracts for slice in ("all", *contract.slices)]

    def found(moment: Any) -> Rows:
        away = {(route.contract, route.slice) for route in moment.decisions.routes}
        return [
            (dict(zip(OF_SLICE, (name, slice), strict=True)), float(bool({(name, slice), (name, "all")} & away)))
            for name, slice in places
        ]

    return by(OF_SLICE, world.rows(found))


def promotions(of: Callable[[Any], float], when_rolled_back: float) -> Expected:
    """A number of each kernel version that is on its way or was rolled back."""

    def found(moment: Any) -> Rows:
        return [
            (
                dict(zip(VERSION, (one.contract, one.version), strict=True)),
                when_rolled_back if one.status == "rolled-back" else float(of(one)),
            )
            for one in moment.promotions
        ]

    return lambda world: by(VERSION, world.rows(found))


def passing_since(world: World) -> dict[Labels, Answer]:
    """When the last cell of a pair became PASS, where all are."""
    worst = cells(code, names=PAIR)(world)
    return {key: at for key, at in by(PAIR, cells(milliseconds, min)(world)).items() if worst[key] == 0}


def passing(world: World) -> dict[Labels, Answer]:
    """Share of the whole minutes in the range, of those that are known, in which all cells of a pair are PASS."""
    minutes: dict[Labels, list[bool]] = {}
    for minute in range(60 * int((world.at - world.range) // 60 + 1), int(world.at) + 1, 60):
        for pair, worst in cells(code, names=PAIR)(world.but(at=minute)).items():
            minutes.setdefault(pair, []).append(worst == 0)
    return {pair: sum(each) / len(each) for pair, each in minutes.items()}


def judged_pairs(world: World) -> dict[Labels, Answer]:
    """The pairs of kernel versions that are judged, by contract."""
    return dict.fromkeys(by(PAIR, world.cells(code, only=("contract",))), 1.0)
