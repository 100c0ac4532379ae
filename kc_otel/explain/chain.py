"""Forwards: from a clause's limit to what it guarantees about a token, a sequence, the reward and the gradient."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from kc_otel.contract.clause import About, Clause
from kc_otel.contract.model import Assumptions, Contract
from kc_otel.contract.slices import ALL
from kc_otel.explain.clause_facts import Assumption, Facts, facts_of, sequence_bounds
from kc_otel.explain.promise import promise_of
from kc_otel.explain.purpose import evidence, note, outcome_attributes, purpose
from kc_otel.stats.bound import Bound
from kc_otel.stats.gradients import clip_budget_share, ess_share, gradient_bias_from_tv
from kc_otel.stats.inverses import largest_limit
from kc_otel.stats.rewards import reward_drift_bound
from kc_otel.stats.tokens import chi2_from_log_ratio_range, ess_share_from_half_range

__all__ = [
    "FARTHEST",
    "LEVELS",
    "BindingClause",
    "Chain",
    "Guarantee",
    "Level",
    "SliceGuarantee",
    "chain",
    "facts_on",
    "guarantee",
    "reach",
]

Level = Literal["token", "sequence", "reward", "gradient", "token ESS", "sequence ESS", "clip"]
LEVELS: Final[tuple[Level, ...]] = (
    "token",
    "sequence",
    "reward",
    "gradient",
    "token ESS",
    "sequence ESS",
    "clip",
)

FARTHEST: Final = 10**9
"""Longest sequence that `reach` looks at, in tokens."""
_SAYS: Final = 0.99
"""A bound on a total variation that is not below this excludes nothing that anybody would act on."""


@dataclass(frozen=True, slots=True)
class Guarantee:
    """One step of the ladder.

    Attributes:
        level: What is bounded: mean total variation of a token; total variation of a sequence; reward drift; norm of
            the gradient's bias; effective sample size per sample of token or sequence weights (from below); share of
            the clip range.
        bound: The number.
        by: The statement that gave it.
        says: Whether it says anything: a total variation below 0.99, or what follows from one.
    """

    level: Level
    bound: float
    by: str
    says: bool


@dataclass(frozen=True, slots=True)
class Chain:
    """What one clause guarantees on one slice.

    Attributes:
        clause: Its id.
        metric: Its metric.
        statistic: Its statistic, as a contract writes it.
        unit: UCUM unit of the limit.
        limit: Its limit on the slice.
        rungs: From the token up; empty where the limit bounds no distance between distributions.
        needs: Assumptions that the rungs take.
        evidence: What the statistic can and cannot show.
        about: What a verdict is about: `population`, what the slice will show, or `traffic`, what its window saw.
        acting: What acts on its verdicts: actions and alerts above a warning of the policy, and promotion.
        purpose: What the clause is for, where it bounds no distance; else empty.
        note: What a reader may expect to follow and does not; else empty.
        reach: Longest sequence, in tokens, for which the clause alone keeps TV_seq within `reach_tv`; None where it
            has nothing to do with a horizon.
        reach_tv: The total variation that `reach` speaks of.
    """

    clause: str
    metric: str
    statistic: str
    unit: str
    limit: float
    rungs: tuple[Guarantee, ...]
    needs: tuple[Assumption, ...]
    evidence: str
    about: About
    acting: tuple[str, ...]
    purpose: str
    note: str
    reach: int | None
    reach_tv: float

    def rung(self, level: Level) -> Guarantee | None:
        """The rung of a level, if there is one."""
        return next((rung for rung in self.rungs if rung.level == level), None)


@dataclass(frozen=True, slots=True)
class BindingClause:
    """The sharpest guarantee of a level, and the clause that binds: the one it comes from.

    Attributes:
        level: The level.
        bound: The guarantee.
        by: The statement.
        clause: The binding clause.
        needs: Assumptions that its guarantee takes.
        next_clause: The clause that would bind without it; empty when none says anything.
        next_bound: What that one gives; None when there is none.
        loosen_to: The binding clause's limit at which the next one would take over; None without a next one.
    """

    level: Level
    bound: float
    by: str
    clause: str
    needs: tuple[Assumption, ...] = ()
    next_clause: str = ""
    next_bound: float | None = None
    loosen_to: float | None = None


@dataclass(frozen=True, slots=True)
class SliceGuarantee:
    """What the clauses guarantee on a slice.

    Attributes:
        slice: The slice; `all` for every token.
        like: Other slices with the same limits and the same guarantees.
        chosen_by: Attributes of the slice that are known only once the sequence is generated. Tokens of such a slice
            are no sample of Q given a prompt, so that identities such as TV = E_Q[(1-w)+] do not hold on it: it is
            watched, and guaranteed nothing of its own.
        chains: One for each clause.
        best: The sharpest guarantee of each level that has one.
    """

    slice: str
    like: tuple[str, ...]
    chosen_by: tuple[str, ...]
    chains: tuple[Chain, ...]
    best: tuple[BindingClause, ...]

    def of(self, level: Level) -> BindingClause | None:
        """The best guarantee of a level, if there is one."""
        return next((best for best in self.best if best.level == level), None)


def guarantee(
    contract: Contract, slice: str, horizon: int | None, *, like: Sequence[str] = (), reach_tv: float = 0.1
) -> SliceGuarantee:
    """What a contract's clauses guarantee on a slice.

    Args:
        contract: The contract.
        slice: Name of a slice, or `all`.
        horizon: T, tokens; None leaves out what needs one.
        like: Names of slices that the answer stands for too.
        reach_tv: Total variation of a sequence that `Chain.reach` speaks of.
    """
    chosen_by = outcome_attributes(contract, slice)
    deficit = _support_limit(contract, slice)
    chains = tuple(
        chain(
            clause,
            slice,
            contract.assumptions,
            horizon,
            deficit=deficit,
            reach_tv=reach_tv,
            silent=bool(chosen_by),
            acting=contract.acts_on(clause),
            tail=contract.tail_of(clause),
        )
        for clause in contract.clauses
    )
    best = () if chosen_by else tuple(_bests(contract, slice, chains, horizon, deficit))
    return SliceGuarantee(slice, tuple(like), chosen_by, chains, best)


def _support_limit(contract: Contract, slice: str) -> float | None:
    """The smallest limit on the support deficit that holds on a slice, if any clause sets one."""
    limits = [clause.limit_for(slice) for clause in contract.clauses if clause.metric == "support_deficit"]
    return max(0.0, min(limits)) if limits else None


def chain(
    clause: Clause,
    slice: str,
    assumptions: Assumptions,
    horizon: int | None,
    *,
    deficit: float | None = None,
    reach_tv: float = 0.1,
    silent: bool = False,
    acting: tuple[str, ...] = (),
    tail: Clause | None = None,
) -> Chain:
    """The ladder of one clause on one slice.

    Args:
        clause: The clause.
        slice: The slice whose limit counts.
        assumptions: The contract's constants.
        horizon: T, tokens.
        deficit: Limit on the support deficit, where the contract has one.
        reach_tv: Total variation of a sequence that `reach` speaks of.
        silent: Whether nothing may be guaranteed on this slice.
        acting: What acts on the clause's verdicts.
        tail: The clause that limits how often what it observes is above its cap.
    """
    promise = promise_of(clause, slice, assumptions)
    facts = Facts() if silent else facts_of(promise, deficit)
    rungs = tuple(_rungs(facts, assumptions, horizon))
    if clause.opposite is not None and not silent:  # no distance follows, and none is needed
        rungs = (Guarantee("reward", clause.limit_for(slice), "measured on the rewards themselves", True),)
    return Chain(
        clause=clause.id,
        metric=clause.metric_text,
        statistic=clause.statistic_text,
        unit=clause.limit_unit,
        limit=clause.limit_for(slice),
        rungs=rungs,
        needs=tuple(sorted(facts.needs)) if rungs else (),
        evidence=evidence(clause, promise, slice, tail),
        about=clause.about,
        acting=acting,
        purpose="" if rungs or silent else purpose(promise, horizon),
        note="" if silent else note(promise, horizon),
        reach=reach(facts, reach_tv) if facts.sequence_tv is None and rungs and clause.opposite is None else None,
        reach_tv=reach_tv,
    )


def reach(facts: Facts, tv: float) -> int:
    """Longest horizon at which the facts keep TV_seq within a number; 0 when not even one token is."""
    if not (bounds := sequence_bounds(facts, 1)) or bounds[0].value > tv:
        return 0
    low, high = 1, 2
    while high < FARTHEST and sequence_bounds(facts, high)[0].value <= tv:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if sequence_bounds(facts, middle)[0].value <= tv else (low, middle)
    return min(low, FARTHEST)


def _rungs(facts: Facts, assumptions: Assumptions, horizon: int | None) -> Iterable[Guarantee]:
    if facts.mean_tv is not None and not facts.per_sequence:
        yield Guarantee("token", facts.mean_tv.value, facts.mean_tv.name, facts.mean_tv.value < _SAYS)
    sequence = facts.sequence_tv
    if horizon is not None:
        bounds = sequence_bounds(facts, horizon)
        sequence = bounds[0] if bounds else None
    if sequence is not None:
        tv = Bound(min(1.0, sequence.value), sequence.name)
        yield Guarantee("sequence", tv.value, tv.name, tv.value < _SAYS)
        yield from _consequences(assumptions, horizon, tv)
    if facts.chi2_token is not None and not facts.per_sequence:
        yield Guarantee("token ESS", float(ess_share(facts.chi2_token)), "1 / (1 + chi2)", True)
    elif facts.every_half_range is not None:
        yield Guarantee("token ESS", float(ess_share_from_half_range(facts.every_half_range)), "sech(rho)^2", True)
    elif facts.every_log_ratio is not None:
        chi2 = float(chi2_from_log_ratio_range(facts.every_log_ratio))
        yield Guarantee("token ESS", float(ess_share(chi2)), "1 / (1 + (2 sinh(lam/2))^2)", True)
    if facts.chi2_seq is not None:
        yield Guarantee("sequence ESS", float(ess_share(facts.chi2_seq)), "1 / (1 + chi2)", True)
    if facts.mean_abs_log_ratio is not None and assumptions.clip is not None and not facts.per_sequence:
        share = float(clip_budget_share(facts.mean_abs_log_ratio, assumptions.clip))
        yield Guarantee("clip", share, "mean |l| / log(1 + clip)", True)


def _consequences(assumptions: Assumptions, horizon: int | None, tv: Bound) -> Iterable[Guarantee]:
    if assumptions.reward_range is not None:
        drift = reward_drift_bound(tv.value, assumptions.reward_range)
        yield Guarantee("reward", drift, "(r_max - r_min) TV_seq", tv.value < _SAYS)
    if assumptions.advantage_max and assumptions.score_norm_max and horizon is not None:
        bias = gradient_bias_from_tv(
            tv.value,
            advantage_max=assumptions.advantage_max,
            sequence_score_norm=horizon * assumptions.score_norm_max,
        )
        yield Guarantee("gradient", bias, "2 A_max G_seq TV_seq", tv.value < _SAYS)


def _ranked(chains: Sequence[Chain], level: Level) -> list[tuple[Guarantee, Chain]]:
    """The rungs of a level that say something, the sharpest first."""
    found = [(rung, one) for one in chains if (rung := one.rung(level)) is not None and rung.says]
    sign = -1.0 if level.endswith("ESS") else 1.0
    return sorted(found, key=lambda pair: sign * pair[0].bound)


def _bests(
    contract: Contract, slice: str, chains: Sequence[Chain], horizon: int | None, deficit: float | None
) -> Iterable[BindingClause]:
    clauses = {clause.id: clause for clause in contract.clauses}
    for level in LEVELS:
        ranked = _ranked(chains, level)
        if not ranked:
            continue
        rung, first = ranked[0]
        if len(ranked) == 1:
            yield BindingClause(level, rung.bound, rung.by, first.clause, first.needs)
            continue
        other, second = ranked[1]
        yield BindingClause(
            level,
            rung.bound,
            rung.by,
            first.clause,
            first.needs,
            second.clause,
            other.bound,
            _loosen(clauses[first.clause], slice, contract.assumptions, horizon, deficit, level, other.bound),
        )


def _loosen(
    clause: Clause,
    slice: str,
    assumptions: Assumptions,
    horizon: int | None,
    deficit: float | None,
    level: Level,
    target: float,
) -> float | None:
    """The limit of a clause at which its bound of a level reaches a target; None for what is bounded from below."""
    if level.endswith("ESS"):
        return None

    def bound(limit: float) -> float:
        changed = clause.model_copy(update={"limit": limit, "slices": {}})
        rung = chain(changed, ALL, assumptions, horizon, deficit=deficit).rung(level)
        return rung.bound if rung else float("inf")

    return largest_limit(bound, target, clause.limit_for(slice))


def facts_on(contract: Contract, clause: Clause, slice: str) -> Facts:
    """What a clause says about distributions on a slice; nothing where the sampled sequences choose the slice."""
    if outcome_attributes(contract, slice):
        return Facts()
    return facts_of(promise_of(clause, slice, contract.assumptions), _support_limit(contract, slice))
