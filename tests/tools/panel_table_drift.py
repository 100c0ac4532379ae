"""What the queries of the dashboards Slice and RL must answer. Part of `panel_table`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from kc_otel.contract.sentences import limitation
from kc_otel.judge.verdict import Verdict
from tests.tools.panel_answers import (
    Answer,
    by_rules,
    constants,
    distribution,
    mean,
    per_second,
    quantile,
    status_by_rules,
)
from tests.tools.panel_cells import (
    OF_SLICE,
    PLACE,
    Expected,
    Of,
    against,
    alone,
    cells,
    code,
    estimate,
    limit,
    lower,
    margin,
    milliseconds,
    of_clauses,
    routes,
    samples,
    unit_of,
    upper,
)
from tests.tools.panel_counters import OUTCOME, drift_of_outcomes, outcomes, rates
from tests.tools.panel_rows import CELL, PAIR, Labels, Rows, World, by, observed
from tests.tools.panel_traffic import TRAINED

_VERSIONS = CELL[3:]


def _rows(world: World, of: Of, **where: Any) -> Rows:
    """Of the cells of the picked clause."""
    return [row for row in world.cells(of, **where) if row[0]["kc_clause"] == world.picked["clause"]]


def _picked(of: Of, how: Any = max, of_cell: Any = None) -> Expected:
    """One number for the picked clause and slice: of evaluators side by side, and then over kernel versions."""
    return lambda world: by((), by(CELL, _rows(world, of), of_cell or how), how)


def _by(names: tuple[str, ...], of: Of, **where: Any) -> Expected:
    """The largest number of the picked clause, by labels."""
    return lambda world: by(names, _rows(world, of, **where))


def _here(quantity: str, of: Callable[..., Answer], *arguments: Any) -> Expected:
    """Of all that was observed of a quantity on the picked slice, together."""
    return lambda world: by((), observed(world, quantity, world.rate), lambda parts: of(parts, *arguments))


def _chosen(of: Callable[..., Answer], *arguments: Any) -> Expected:
    """Of all that was observed of the quantity behind the picked clause."""
    return lambda world: _here(world.clause.quantity.key, of, *arguments)(world)


def _on_slice(of: Of, how: Any = max) -> Expected:
    """`_picked`, on the slice that `slices` picks."""
    return lambda world: _picked(of, how)(world.but(picked=world.picked | {"slice": world.picked["slices"]}))


def _promise(world: World) -> dict[Labels, Answer]:
    """What the picked clause allows."""
    return {frozenset({("kc_clause_promise", limitation(world.clause, tuple(world.contract.slices)))}): 1.0}


_UNIT = unit_of("clause")
_FAN = (0.001, 0.01, 0.25, 0.5, 0.75, 0.99, 0.999)
SLICE: dict[str, tuple[Expected, ...]] = {
    "1 State": (_picked(code),),
    "2 Since": (_picked(milliseconds, of_cell=min),),
    "3 Estimate": (_picked(estimate), _UNIT),
    "4 Limit": (_picked(limit), _UNIT),
    "5 Margin": (_picked(margin, min),),
    "6 Samples": (_picked(samples),),
    "7 Kernel that serves it": (routes,),
    "8 What it promises": (_promise,),
    "10 $clause on $slice: value with its confidence band, against the limit": (
        _picked(upper), _picked(lower, min), _picked(estimate), _picked(limit), _UNIT,
    ),
    "11 By kernel version": (_by(_VERSIONS, estimate), _picked(limit), _UNIT),
    "12 Evidence against the limit": (_by(_VERSIONS, against), lambda _: alone(1.0)),
    "20 Distribution of $quantity": (lambda world: distribution(world, world.clause.quantity.key),),
    "21 $quantity: mean and quantiles": (_chosen(mean), *(_chosen(quantile, rank) for rank in (0.5, 0.99, 0.999))),
    "22 Signed log ratio: where the tokens lie": tuple(_here("log_ratio", quantile, rank) for rank in _FAN),
    "23 Absolute log ratio, with the worst tokens": (lambda world: distribution(world, "abs_log_ratio"),),
    "40 This clause on every slice": (_by(("kc_slice",), code, only=("contract",)),),
    "41 Every clause on this slice": (cells(code, names=("kc_clause",)),),
    "42 Samples behind the verdict": (_by(_VERSIONS, samples), by_rules("samples", max)),
    "43 The same from Prometheus' own rules": (
        by_rules("upper", max), by_rules("lower", min), by_rules("estimate", max), by_rules("limit", max), _UNIT,
    ),
    "44 Evaluator and rules": (_picked(code), status_by_rules),
    "51 $clauses on $slice": (
        of_clauses(upper, "clauses"), of_clauses(lower, "clauses", min), of_clauses(estimate, "clauses"),
        of_clauses(limit, "clauses"), unit_of("clauses"),
    ),
    "61 $clause on $slices": (
        _on_slice(upper), _on_slice(lower, min), _on_slice(estimate), _on_slice(limit), _UNIT,
    ),
}  # fmt: skip


def _slices(quantity: str, of: Callable[..., Answer], *arguments: Any) -> Expected:
    """Of what was observed of a quantity, by slice."""
    return lambda world: by(OF_SLICE, observed(world, quantity, world.rate), lambda parts: of(parts, *arguments))


def _from_mean(quantity: str, of: Callable[[float], float]) -> Expected:
    """A function of the mean of a quantity, by slice."""
    return _slices(quantity, lambda parts: of(mean(parts)))


def _scaled(quantity: str, metric: str) -> Expected:
    """The mean of a quantity times the constant of a bound, which the contract's assumptions make."""
    return lambda world: _from_mean(quantity, lambda value: value * constants(world.contract)[metric])(world)


def _about(world: World, of: Of, clauses: Iterable[str], others: Iterable[str]) -> Rows:
    """Of some clauses of the contract that is recorded for, and of some of the other one."""
    wanted = dict(zip((contract.name for contract in world.contracts), (clauses, others), strict=True))
    return [row for row in world.cells(of) if row[0]["kc_clause"] in wanted[row[0]["kc_contract"]]]


def _limits(clauses: Iterable[str] = (), others: Iterable[str] = ()) -> Expected:
    """The smallest limit of these clauses of either contract, by contract and slice."""
    return lambda world: by(OF_SLICE, _about(world, limit, clauses, others), min)


def _of_rl(of: Of) -> Expected:
    """Of the clauses on ratios, divergences, reward and weight lag."""

    def found(world: World) -> dict[Labels, Answer]:
        clauses = ("token-tv", "reward", "weights-lag", "weights-far-behind")
        others = [clause.id for clause in world.contracts[1].clauses]
        return by(PLACE, _about(world, of, clauses, others))

    return found


def _share(verdict: Verdict, since: float) -> float:
    """The estimate as a share of the limit, where that is above 0."""
    return estimate(verdict, since) / limit(verdict, since) if verdict.limit > 0 else math.nan


def _trained(world: World) -> dict[Labels, Answer]:
    """The furthest step of the picked kernels' trainers."""
    pairs = (tuple(kernel.fingerprint for kernel in pair) for pair in world.recorded.kernels.values())
    of = (dict(zip(PAIR, (world.contract.name, *pair), strict=True)) for pair in pairs)
    return alone(TRAINED) if any(map(world.takes, of)) else {}


def _left(chi2: float) -> float:
    """Effective sample size, as a share of the samples."""
    return 1.0 / (1.0 + chi2)


RL: dict[str, tuple[Expected, ...]] = {
    "13 Verdicts on what is shown below": (_of_rl(code),),
    "16 Drift by training step": (_trained, _of_rl(_share)),
    "1 Importance ratio of sampled tokens": (
        *(_slices("ratio", quantile, at) for at in (0.01, 0.5, 0.99, 0.999)), _limits((), ["ratio"]),
    ),
    "2 Share of the clip range that the kernels spend": (
        _scaled("abs_log_ratio", "clip_budget_share"), _limits((), ["clip-share"]),
    ),
    "3 Effective sample size, per sample": (_from_mean("chi2_token", _left), _from_mean("chi2_seq", _left)),
    "4 Total variation per token": (_slices("tv_token", mean), _limits(["token-tv"], ["token-tv"])),
    "5 Total variation per sequence": (_slices("tv_seq", mean), _limits((), ["sequence-tv"])),
    "6 KL(Q||P), k3": (_slices("k3", mean), _limits((), ["token-kl"])),
    "7 Advantage-signed drift": (
        _slices("advantage_drift_positive", mean), _slices("advantage_drift_negative", mean),
        _limits((), ["push", "pull"]),
    ),
    "8 Most that the reward can differ": (_scaled("tv_seq", "reward_drift_bound"), _limits(["reward"])),
    "9 Most that the gradient can be biased": (
        _scaled("tv_seq", "gradient_bias_bound"), _limits((), ["gradient"]),
    ),
    "10 Support deficit": (_from_mean("ratio", lambda value: 1.0 - value), _limits((), ["deficit"])),
    "11 Weight lag": (
        _slices("weights_lag", quantile, 1.0), _slices("weights_lag", mean),
        _limits(["weights-lag", "weights-far-behind"], ["weights-lag"]),
    ),
    "14 Drift of what is trained on, and of what is quarantined": (drift_of_outcomes,),
    "15 Sequences kept and quarantined": (rates(OUTCOME, outcomes(0)),),
    "12 Tokens measured": (lambda world: per_second(world, "tv_token", OF_SLICE),),
}  # fmt: skip
