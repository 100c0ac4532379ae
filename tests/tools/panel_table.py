"""What every query of every dashboard must answer: board -> panel -> a function of the world for each of its queries.

A panel is named by its id and title. The functions say again, over objects and arrays, what
a panel promises; where a histogram's resolution or a bound's form leaves room, the answer is a `Within`.
"""

from __future__ import annotations

import re

from kc_otel.judge.verdict import Status
from tests.tools.panel_answers import Answer, per_second
from tests.tools.panel_cells import (
    PLACE,
    Expected,
    Of,
    acting,
    against,
    alone,
    broken,
    cells,
    code,
    count_of,
    done,
    estimate,
    ever_broken,
    firing,
    held,
    in_words,
    limit,
    lower,
    margin,
    milliseconds,
    passing,
    passing_since,
    promised,
    promotions,
    routes,
    samples,
    severity,
    spread,
    upper,
)
from tests.tools.panel_counters import (
    REASON,
    age,
    alive,
    answered,
    attempts,
    dropped,
    failures,
    grouped,
    in_range,
    invalid,
    kernels,
    known,
    points,
    rates,
    refused,
    requests,
    sampling,
    tokens,
    total,
    waiting,
    without,
)
from tests.tools.panel_rows import CELL, PAIR, Labels, World, by, captured
from tests.tools.panel_table_drift import RL, SLICE

_CONTRACT = ("kc_contract",)
_KEPT_BACK = ("hold-promotion", "quarantine-rollouts", "halt")


def _promised_and_broken(world: World) -> dict[Labels, Answer]:
    """What is promised of the cells that are not PASS."""
    at = cells(code)(world)
    return {key: value for key, value in promised(world).items() if at[without(key, ["kc_clause_promise"])] > 0}


def _allowed(world: World) -> dict[Labels, Answer]:
    """Streams that the contracts allow, by every evaluator."""
    every = sum(contract.observability.max_series for contract in world.contracts)
    return alone(every * len(list(world.now()))) if list(world.now()) else {}


def _of_picked(of: Of) -> Expected:
    """The largest number of the picked clauses, by slice."""

    def found(world: World) -> dict[Labels, Answer]:
        rows = [row for row in world.cells(of) if re.fullmatch(world.picked["clause"], row[0]["kc_clause"])]
        return by(PLACE, rows)

    return found


OVERVIEW: dict[str, tuple[Expected, ...]] = {
    "1 Broken": (alive(count_of(Status.FAIL)),),
    "2 No data": (alive(count_of(Status.NO_DATA)),),
    "3 Undecided": (alive(count_of(Status.INCONCLUSIVE)),),
    "4 Holding": (alive(count_of(Status.PASS)),),
    "5 Alerts firing": (alive(lambda world: alone(len(by((*PLACE, "kc_severity"), firing(world))))),),
    "6 Routed away": (alive(lambda world: alone(sum(routes(world).values()))),),
    "12 Invalid input": (in_range(invalid),),
    "13 Points received": (alive(total(points(lambda outcome: outcome == "accepted"))),),
    "15 Evaluated": (age,),
    "7 What does not hold: since when, for whom, and what was done about it": (
        broken(cells(code)), broken(cells(milliseconds, min)), broken(cells(margin, min)),
        broken(spread(done)), broken(spread(severity)), _promised_and_broken,
    ),
    "8 Verdicts over time": (ever_broken(True), ever_broken(False)),
    "9 Alerts over time": (grouped((*PLACE, "kc_severity"), firing, max),),
    "10 What was done": (grouped((*PLACE, "kc_action"), acting, max),),
    "11 Every cell: state, since when, margin": (
        cells(code), cells(milliseconds, min), cells(margin, min), cells(estimate), cells(lower), cells(upper),
        cells(limit), cells(samples), cells(against),
    ),
    "14 $contract: margin of each clause": (cells(margin, min, CELL[:2]),),
}  # fmt: skip
PROMOTION: dict[str, tuple[Expected, ...]] = {
    "2 Routed away": OVERVIEW["6 Routed away"],
    "3 Promotions held": (alive(held("hold-promotion")),),
    "4 Roll-outs quarantined": (alive(held("quarantine-rollouts")),),
    "5 Training halted": (alive(held("halt")),),
    "10 Routes over time": (routes,),
    "11 Holds, quarantines and halts over time": (
        grouped((*PLACE, "kc_action"), lambda world: acting(world, *_KEPT_BACK), max),
    ),
    "12 Evidence by kernel version": (
        cells(code, names=PAIR), passing_since, passing, cells(margin, min, PAIR), cells(samples, min, PAIR),
        lambda world: by(PAIR, cells(code)(world), len),
    ),
    "13 Worst verdict of each kernel version over time": (cells(code, names=PAIR),),
    "14 Smallest margin of each kernel version": (cells(margin, min, PAIR),),
    "16 Stage of each kernel version": (promotions(lambda one: {"canary": 2}[one.position.stage], -1.0),),
    "17 Share of requests it may serve": (promotions(lambda one: one.position.share, 0.0),),
    "18 Windows of PASS in a row": (promotions(lambda one: one.tally.passed, 0.0),),
}  # fmt: skip
HEALTH: dict[str, tuple[Expected, ...]] = {
    "36 Evaluated": (age,),
    "1 Points used": (alive(total(points(lambda outcome: outcome in {"accepted", "baseline"}))),),
    "2 Points not used": (alive(total(points(lambda outcome: outcome not in {"accepted", "baseline"}))),),
    "3 Webhooks waiting": (alive(total(waiting)),),
    "4 Evaluation takes": (alive(grouped((), known(lambda moment: moment.tick_seconds), max)),),
    "5 Invalid input": (in_range(invalid),),
    "6 Batches dropped": (in_range(dropped),),
    "7 Exports refused": (in_range(refused),),
    "8 Measured share": (grouped((), sampling, min),),
    "20 Points received": (grouped(("kc_outcome",), points()),),
    "21 OTLP requests": (rates(("kc_transport", "kc_outcome"), requests),),
    "22 Streams": (grouped((), known(lambda moment: moment.series)), _allowed),
    "23 Duration of an evaluation": (grouped((), known(lambda moment: moment.tick_seconds), max),),
    "35 Failures to judge": (rates(_CONTRACT, failures),),
    # The evaluators that are played have no log, and no state on a disk.
    "37 Log of what was received": (lambda _: {}, lambda _: {}),
    "40 Time to an answer": (answered(0.5), answered(0.99)),
    "41 Requests that wait": (grouped((), known(lambda _: 0.0)),),
    "42 Left on the disk": (lambda _: {},),
    "43 The disk takes for the state": (lambda _: {},),
    "38 Shards: bytes behind": (lambda _: {},),
    "39 Shards: streams": (lambda _: {},),
    "24 Webhooks waiting, by endpoint": (grouped(("kc_endpoint",), waiting),),
    "25 Webhook deliveries": (rates(("kc_endpoint", "kc_outcome"), attempts),),
    "26 Tokens measured": (rates(_CONTRACT, tokens),),
    "31 Tokens counted as `other`": (
        lambda world: per_second(world.but(picked=world.picked | {"slice": "other"}), "tv_token", _CONTRACT),
    ),
    "29 Share of batches measured": (grouped(_CONTRACT, sampling, min),),
    "32 Invalid sequences, by reason": (rates(REASON, invalid),),
    "27 Batches dropped, by reason": (rates(REASON, dropped),),
    "28 Exports refused, per second": (rates(_CONTRACT, refused),),
    "33 Requests captured in engines": (rates(_CONTRACT, lambda world: captured(world, kept=True)),),
    "34 Requests not captured, by reason": (rates(REASON, lambda world: captured(world, kept=False)),),
    "30 Kernel versions": (kernels,),
    # No aggregator is played.
    "50 Aggregators: points": (lambda _: {},),
    "51 Aggregators: requests": (lambda _: {},),
    "52 Aggregators: time to an answer": (lambda _: {},),
    "53 Aggregators: messages": (lambda _: {},),
    "54 Aggregators: streams": (lambda _: {}, lambda _: {}, lambda _: {}),
    "55 Aggregators: bytes that wait": (lambda _: {}, lambda _: {}),
    "56 Aggregators: last message": (lambda _: {},),
    "57 Aggregators: left on the disk": (lambda _: {},),
}
_PROMISE = ("kc_contract", "kc_clause", "kc_clause_promise", "kc_clause_metric", "kc_clause_statistic", "definition")
MEANING: dict[str, tuple[Expected, ...]] = {
    "2 What each clause promises": (in_words(*_PROMISE),),
    "3 Limits by slice": tuple(_of_picked(of) for of in (code, limit)),
}
TABLE = {
    "overview": OVERVIEW, "slice": SLICE, "rl": RL, "promotion": PROMOTION, "health": HEALTH, "meaning": MEANING,
}  # fmt: skip
"""The expectations, by dashboard and by panel, in the order of the panel's queries."""
