"""Backwards: which limits a budget on the reward or on the gradient needs, and what a contract's clauses say instead.

Any single limit of the table is enough on its own. A clause that is too loose to guarantee the budget is not wrong: the
guarantee has to hold for the worst distributions that the limit allows, and real kernels are rarely those. It only
means that the budget rests on a clause that measures whole sequences.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

from kc_otel.contract.clause import Clause
from kc_otel.contract.model import Assumptions, Contract
from kc_otel.contract.slices import ALL
from kc_otel.explain.chain import facts_on
from kc_otel.explain.clause_facts import sequence_bounds
from kc_otel.stats.inverses import (
    chi2_for_tv,
    largest_limit,
    mean_abs_log_ratio_for_sequence_tv,
    mean_half_range_for_sequence_tv,
    mean_token_tv_for_sequence_tv,
    tv_for_gradient_budget,
)
from kc_otel.stats.rewards import (
    half_range_for_sequence_tv,
    log_ratio_for_sequence_tv,
    token_kl_for_sequence_tv,
    token_tv_for_sequence_tv,
    tv_for_reward_budget,
)

__all__ = [
    "EXAMPLE_SHARE",
    "Backwards",
    "BudgetKind",
    "ClauseForBudget",
    "Enough",
    "backwards",
    "budgets",
    "enough",
    "tv_for",
]

BudgetKind = Literal["reward", "gradient"]

EXAMPLE_SHARE: Final = 0.05
"""Share of the reward range that is shown as an example where neither the contract nor the reader names a budget."""


@dataclass(frozen=True, slots=True)
class Enough:
    """A limit that guarantees the budget on its own.

    Attributes:
        metric: Metric that a clause would name.
        statistic: Statistic that it would name.
        limit: The largest limit that is enough.
        unit: UCUM unit of the limit.
        by: The bound that it is the inverse of.
    """

    metric: str
    statistic: str
    limit: float
    unit: str
    by: str


@dataclass(frozen=True, slots=True)
class ClauseForBudget:
    """What a clause of the contract does for the budget.

    Attributes:
        clause: Its id.
        limit: Its limit.
        needed: Largest limit with which it would guarantee the budget; None when no limit would.
        guarantees: Whether its limit does.
        direct: Whether it measures whole sequences, so that no horizon comes in.
    """

    clause: str
    limit: float
    needed: float | None
    guarantees: bool
    direct: bool

    @property
    def times_too_loose(self) -> float | None:
        """The limit over the one that would be enough; None where none would be."""
        return None if self.needed is None or self.needed == 0.0 else self.limit / self.needed


@dataclass(frozen=True, slots=True)
class Backwards:
    """A budget, what would be enough for it, and what the contract has.

    Attributes:
        kind: What the budget is on.
        budget: Its size, in the reward's unit or as a norm.
        source: Where it comes from: a clause, the command line, or an example.
        slice: The slice whose limits are compared.
        tv_seq: The total variation of sequences that is enough.
        enough: Limits that each guarantee it at the horizon.
        clauses: The contract's clauses that say something about sequences.
    """

    kind: BudgetKind
    budget: float
    source: str
    slice: str
    tv_seq: float
    enough: tuple[Enough, ...]
    clauses: tuple[ClauseForBudget, ...]

    @property
    def guaranteed_by(self) -> tuple[str, ...]:
        """Ids of the clauses that guarantee the budget."""
        return tuple(clause.clause for clause in self.clauses if clause.guarantees)


def budgets(
    contract: Contract, slice: str = ALL, *, reward: float | None = None, gradient: float | None = None
) -> list[tuple[BudgetKind, float, str]]:
    """Budgets to explain, with their source: those given, else the contract's own, else an example.

    Args:
        contract: The contract.
        slice: The slice whose limits count.
        reward: Budget on the reward drift, in the reward's unit.
        gradient: Budget on the norm of the gradient's bias.
    """
    found: list[tuple[BudgetKind, float, str]] = []
    asked: tuple[tuple[BudgetKind, float | None, tuple[str, ...]], ...] = (
        ("reward", reward, ("reward_drift_bound", "reward_drift")),
        ("gradient", gradient, ("gradient_bias_bound",)),
    )
    for kind, given, metrics in asked:
        own = [(clause.limit_for(slice), clause.id) for clause in contract.clauses if clause.metric in metrics]
        if given is not None:
            found.append((kind, given, "the command line"))
        elif own:
            limit, clause = min(own)
            found.append((kind, limit, f"clause {clause}"))
    if not found and contract.assumptions.reward_range is not None:
        low, high = contract.assumptions.reward_range
        example = f"an example, {100 * EXAMPLE_SHARE:g} % of the reward range: the contract states no budget"
        found.append(("reward", EXAMPLE_SHARE * (high - low), example))
    return found


def tv_for(kind: BudgetKind, budget: float, assumptions: Assumptions, horizon: int | None) -> float:
    """The TV_seq that is enough for a budget.

    Raises:
        ValueError: If an assumption that the budget takes is not stated, or the budget is negative or NaN.
    """
    if kind == "reward":
        if assumptions.reward_range is None:
            msg = "budget: a reward budget needs assumptions.reward_range; write `reward_range: [0, 1]` with your own"
            raise ValueError(msg)
        return tv_for_reward_budget(budget, assumptions.reward_range)
    if assumptions.advantage_max is None or assumptions.score_norm_max is None or horizon is None:
        msg = (
            "gradient budget: needs assumptions.advantage_max, assumptions.score_norm_max and a horizon; write "
            "`advantage_max: 5, score_norm_max: 40, horizon: 4096` with your own"
        )
        raise ValueError(msg)
    return tv_for_gradient_budget(
        budget, advantage_max=assumptions.advantage_max, sequence_score_norm=horizon * assumptions.score_norm_max
    )


def backwards(
    contract: Contract, horizon: int | None, kind: BudgetKind, budget: float, source: str, slice: str = ALL
) -> Backwards:
    """What a budget needs, and what a contract has for it.

    Args:
        contract: The contract.
        horizon: T, tokens.
        kind: What the budget is on.
        budget: Its size.
        source: Where it comes from, for the reader.
        slice: The slice whose limits are compared.

    Raises:
        ValueError: If an assumption that the budget takes is not stated, or the budget is negative or NaN.
    """
    tv = tv_for(kind, budget, contract.assumptions, horizon)
    return Backwards(
        kind=kind,
        budget=budget,
        source=source,
        slice=slice,
        tv_seq=tv,
        enough=tuple(enough(tv, horizon, contract.assumptions)),
        clauses=(*_measured(contract, kind, budget, slice), *_compare(contract, horizon, tv, slice)),
    )


def enough(tv: float, horizon: int | None, assumptions: Assumptions) -> Iterable[Enough]:
    """Limits that each keep TV_seq within a number at a horizon, from what is measured of whole sequences down.

    Args:
        tv: TV_seq, in [0, 1].
        horizon: T, tokens; None leaves out what needs one.
        assumptions: The contract's constants; `clip` turns mean |l| into a share of the clip range.
    """
    yield Enough("tv_seq", "mean", tv, "1", "measured on sequences, no horizon")
    yield Enough("chi2_seq", "mean", chi2_for_tv(tv), "1", "chi-square, P << Q")
    if horizon is None:
        return
    mean = mean_token_tv_for_sequence_tv(tv, horizon)
    kl = token_kl_for_sequence_tv(tv, horizon)
    log_ratio = mean_abs_log_ratio_for_sequence_tv(tv, horizon)
    yield Enough("tv_token", "mean", mean, "1", "on policy: B_TV / T")
    yield Enough("k3", "mean", kl.value, "{nat}", f"KL over steps, {kl.name}, P << Q")
    yield Enough("abs_log_ratio", "mean", log_ratio, "{nat}", "log ratios over steps: -log(1 - B_TV) / T")
    if assumptions.clip is not None:
        by = "the same, as a share of log(1 + clip)"
        yield Enough("clip_budget_share", "mean", log_ratio / math.log1p(assumptions.clip), "1", by)
    yield Enough("chi2_token", "mean", chi2_for_tv(mean), "1", "chi-square, on policy, P << Q")
    worst = half_range_for_sequence_tv(tv, horizon)
    half = mean_half_range_for_sequence_tv(tv, horizon)
    yield Enough("logit_half_range", "mean", half, "1", "on policy: 2 atanh(B_TV / T)")
    yield Enough("tv_token", "max", token_tv_for_sequence_tv(tv, horizon), "1", "worst case over steps")
    yield Enough("logit_half_range", "max", worst.value, "1", worst.name)
    yield Enough("abs_log_ratio", "max", log_ratio_for_sequence_tv(tv, horizon).value, "{nat}", worst.name)


def _measured(contract: Contract, kind: BudgetKind, budget: float, slice: str) -> Iterable[ClauseForBudget]:
    """The clauses that measure what a budget on the reward is about."""
    for clause in contract.clauses:
        if kind == "reward" and clause.metric == "reward_drift":
            limit = clause.limit_for(slice)
            yield ClauseForBudget(clause.id, limit, budget, limit <= budget * (1.0 + 1e-9), direct=True)


def _compare(contract: Contract, horizon: int | None, tv: float, slice: str) -> Iterable[ClauseForBudget]:
    for clause in contract.clauses:
        facts = facts_on(contract, clause, slice)
        direct = facts.sequence_tv is not None
        if not direct and (horizon is None or not sequence_bounds(facts, horizon)):
            continue

        def bound(limit: float, clause: Clause = clause) -> float:
            changed = clause.model_copy(update={"limit": limit, "slices": {}})
            return sequence_bounds(facts_on(contract, changed, slice), horizon or 1)[0].value

        limit = clause.limit_for(slice)
        needed = largest_limit(bound, tv, limit)
        yield ClauseForBudget(clause.id, limit, needed, bound(limit) <= tv * (1.0 + 1e-9), direct)
