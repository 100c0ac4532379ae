"""Everything that `kc-otel explain` says about a contract, as data; `as_json` is its stable form."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from kc_otel.contract.limits import scale_of
from kc_otel.contract.model import Assumptions, Contract
from kc_otel.contract.registry import DERIVED
from kc_otel.contract.sentences import assurances
from kc_otel.contract.slices import ALL
from kc_otel.contract.words import listed
from kc_otel.explain.budget import Backwards, backwards, budgets, tv_for
from kc_otel.explain.chain import SliceGuarantee, guarantee
from kc_otel.explain.clause_facts import ASSUMPTIONS, Assumption
from kc_otel.explain.purpose import outcome_attributes
from kc_otel.explain.relations import Relation, relations
from kc_otel.judge.mean_test import mean_test
from kc_otel.judge.sample_sizes import Needed, observations_to_pass

__all__ = ["SCHEMA", "Explanation", "as_json", "explain"]

SCHEMA: Final = "kc-otel.explain/v1"
"""Version of the JSON form; fields are added under one version, never renamed or removed."""
_DEFAULT_REACH: Final = 0.1


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a contract's limits promise.

    Attributes:
        contract: metadata.name.
        version: metadata.version.
        hash: Content hash.
        description: metadata.description.
        horizon: T, tokens; None when neither the contract nor the reader states one.
        horizon_source: Where T comes from.
        assumptions: The contract's constants that are stated.
        missing: Constants that are not stated, and what cannot be said without them.
        needs: Assumptions that some guarantee takes, with their text.
        support_limited: Whether a clause limits the support deficit, so that P << Q is measured.
        forwards: What the limits guarantee, by slice; slices with the same limits share one entry.
        backwards: What a budget needs, and what the contract has for it.
        relations: How the clauses stand to each other.
        needed: Observations that each clause needs before it can PASS.
        claims: What the contract's verdicts claim, as sentences.
    """

    contract: str
    version: int
    hash: str
    description: str
    horizon: int | None
    horizon_source: str
    assumptions: Mapping[str, Any]
    missing: Mapping[str, str]
    needs: Mapping[Assumption, str]
    support_limited: bool
    forwards: tuple[SliceGuarantee, ...]
    backwards: tuple[Backwards, ...]
    relations: tuple[Relation, ...]
    needed: tuple[Needed, ...]
    claims: tuple[str, ...]


def explain(
    contract: Contract,
    *,
    slice: str | None = None,
    horizon: int | None = None,
    reward_budget: float | None = None,
    gradient_budget: float | None = None,
) -> Explanation:
    """Explain a contract: forwards, backwards, and its clauses among each other.

    Args:
        contract: The contract.
        slice: The slice that is asked about; every one with limits of its own when None.
        horizon: T, tokens, instead of the contract's.
        reward_budget: Budget on the reward drift, instead of the contract's.
        gradient_budget: Budget on the norm of the gradient's bias, instead of the contract's.

    Raises:
        ValueError: If the slice is not one of the contract's, the horizon is not a number of steps, or a budget is
            negative or takes an assumption that the contract does not state.
    """
    if slice is not None and slice != ALL and slice not in contract.slices:
        declared = ", ".join((ALL, *contract.slices))
        msg = f"slice: {slice!r} is not one of the contract's; write one of {declared}"
        raise ValueError(msg)
    if horizon is not None and horizon < 1:
        msg = f"horizon: {horizon!r} is not a number of tokens; write a whole number of at least 1"
        raise ValueError(msg)
    steps = contract.assumptions.horizon if horizon is None else horizon
    chosen = ALL if slice is None else slice
    asked = budgets(contract, chosen, reward=reward_budget, gradient=gradient_budget)
    reach_tv = _DEFAULT_REACH
    if asked:
        kind, size, _ = asked[0]
        reach_tv = tv_for(kind, size, contract.assumptions, steps)
    groups = [(slice, ())] if slice is not None else _groups(contract)
    forwards = tuple(guarantee(contract, name, steps, like=like, reach_tv=reach_tv) for name, like in groups)
    needs = {need for entry in forwards for chain in entry.chains for need in chain.needs}
    return Explanation(
        contract=contract.name,
        version=contract.metadata.version,
        hash=contract.hash,
        description=contract.metadata.description,
        horizon=steps,
        horizon_source="the command line" if horizon is not None else "the contract" if steps else "",
        assumptions={key: value for key, value in contract.assumptions.model_dump().items() if value is not None},
        missing=_missing(contract.assumptions, steps),
        needs={need: text for need, text in ASSUMPTIONS.items() if need in needs},
        support_limited=any(clause.metric == "support_deficit" for clause in contract.clauses),
        forwards=forwards,
        backwards=tuple(backwards(contract, steps, kind, size, source, chosen) for kind, size, source in asked),
        relations=relations(contract, steps),
        needed=tuple(observations_to_pass(contract, clause, chosen) for clause in contract.clauses),
        claims=_claims(contract),
    )


def _claims(contract: Contract) -> tuple[str, ...]:
    """What verdicts claim, and which clauses nothing can be held against as observations arrive."""
    alone, facts = [], []
    for clause in contract.clauses:
        known = clause.metric not in DERIVED or scale_of(clause.metric, contract.assumptions) is not None
        if clause.parsed_statistic.kind == "max" or clause.allows_none(ALL):
            facts.append(clause.id)
        elif known and mean_test(clause, contract.assumptions) is None:
            alone.append(clause.id)
    said = list(assurances(contract.observability))
    if facts:
        said.append(f"Of {listed(facts, 6)} one observation beyond the limit is a fact, and a FAIL at once.")
    if alone:
        said.append(
            f"A FAIL of {listed(alone, 6)} rests on the interval of one evaluation, and no time between false alarms "
            "is claimed: what is limited has no smallest value, or that is the limit."
        )
    return tuple(said)


def as_json(explanation: Explanation) -> dict[str, Any]:
    """The explanation as JSON data: the dataclasses' fields under their names, and `schema`.

    Numbers that are infinite become null: JSON has none.
    """
    data = _plain(asdict(explanation))
    for entry, said in zip(data["backwards"], explanation.backwards, strict=True):
        entry["guaranteed_by"] = list(said.guaranteed_by)
        for row, clause in zip(entry["clauses"], said.clauses, strict=True):
            row["times_too_loose"] = _plain(clause.times_too_loose)
    return {"schema": SCHEMA, **data}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _groups(contract: Contract) -> list[tuple[str, tuple[str, ...]]]:
    """Slices by their limits, the ones that share all of them together; `all` first."""
    groups: dict[tuple[object, ...], list[str]] = {}
    for name in (ALL, *contract.slices):
        limits = tuple(clause.limit_for(name) for clause in contract.clauses)
        groups.setdefault((*limits, bool(outcome_attributes(contract, name))), []).append(name)
    return [(names[0], tuple(names[1:])) for names in groups.values()]


def _missing(assumptions: Assumptions, horizon: int | None) -> dict[str, str]:
    missing = {}
    if horizon is None:
        missing["horizon"] = "nothing follows for a sequence from its tokens"
    if assumptions.reward_range is None:
        missing["reward_range"] = "nothing follows for the reward"
    if assumptions.advantage_max is None or assumptions.score_norm_max is None:
        names = [name for name in ("advantage_max", "score_norm_max") if getattr(assumptions, name) is None]
        missing[", ".join(names)] = "nothing follows for the policy gradient"
    return missing
