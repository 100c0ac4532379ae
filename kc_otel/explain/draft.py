"""A new contract from a reward budget: which clauses, which limits, and how each limit follows.

The budget itself is one clause, measured on whole sequences. The clauses on the tokens' means are early warnings with a
meaning: each would guarantee the budget at the horizon by itself, so that a breach of both says that the guarantee is
gone while the measured budget may still hold.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Final

from kc_otel.contract.measuring_paths import MeasuringPath
from kc_otel.contract.words import rounded, rounded_down
from kc_otel.stats.inverses import mean_token_tv_for_sequence_tv
from kc_otel.stats.rewards import token_kl_for_sequence_tv, tv_for_reward_budget

__all__ = ["CAP_IN_LIMITS", "Draft", "DraftClause", "clauses_of", "cut", "exact"]

CAP_IN_LIMITS: Final = 5.0
"""Where a capped mean is cut: it takes a fiftieth of the sequences, and kernels within the limit seldom reach it."""
_TAIL: Final = 0.01
_FAR: Final = 0.5
"""(1-w)+ above which a token is another one more often than not."""


@dataclass(frozen=True, slots=True)
class Draft:
    """What a new contract is made from.

    Attributes:
        name: metadata.name.
        owner: metadata.owner.
        train: Fields of the training kernel, such as `{"engine": "torch", "dtype": "bfloat16"}`.
        inference: Fields of the inference kernel.
        reward_budget: Largest drift of the mean reward that is acceptable, in the reward's unit.
        reward_range: Smallest and largest reward of a sequence.
        horizon: T, longest sequence in generated tokens.
        clip: PPO clip range; None where there is none.
        slices: Name of each slice, and its conditions by attribute.
        confidence: Confidence of verdicts.
        data: How the kernels are measured; clauses that this cannot measure are left out.
        capped: Whether the mean of tv_token is promised by sequence and cut at five limits, with a clause on what is
            above, so that a gate can decide it.
    """

    name: str
    owner: str
    train: Mapping[str, str]
    inference: Mapping[str, str]
    reward_budget: float
    reward_range: tuple[float, float] = (0.0, 1.0)
    horizon: int = 4096
    clip: float | None = None
    slices: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    confidence: float = 0.99
    data: MeasuringPath = MeasuringPath.LOOP
    capped: bool = False


@dataclass(frozen=True, slots=True)
class DraftClause:
    """One clause of a new contract.

    Attributes:
        id: Its id.
        metric: Its metric.
        statistic: Its statistic; empty for the metric's default.
        unit: Its unit; empty for the metric's default.
        limit: Its limit.
        derivation: How the limit follows, with numbers.
        breaks: What is wrong beyond it: the clause's description.
        slices: Limits of single slices, where they differ.
        cap: Where what is observed is cut; None where it is not.
    """

    id: str
    metric: str
    statistic: str
    unit: str
    limit: float
    derivation: str
    breaks: str
    slices: Mapping[str, float] = field(default_factory=dict)
    cap: float | None = None


def clauses_of(draft: Draft) -> tuple[DraftClause, ...]:
    """The statistical clauses of a new contract, the budget first. Limits are cut to three digits, never raised.

    Raises:
        ValueError: If the budget is not positive or not below the width of the reward range, the range is not one, or
            the horizon is not a number of steps.
    """
    budget, (low, high), horizon = draft.reward_budget, draft.reward_range, draft.horizon
    tv = tv_for_reward_budget(budget, draft.reward_range)
    if not 0.0 < tv < 1.0:
        msg = (
            f"reward budget: {budget!r} is not above 0 and below the width of the reward range, {high - low:g}; write "
            f"what may be lost, such as {0.02 * (high - low):g}"
        )
        raise ValueError(msg)
    mean = mean_token_tv_for_sequence_tv(tv, horizon)
    kl = token_kl_for_sequence_tv(tv, horizon)
    width = f"{high:g} - {low:g}" if low >= 0 else f"{high:g} - ({low:g})"
    kl_formula = "2 TV^2 / T" if kl.name == "Pinsker" else "-log(1 - TV^2) / T"
    b_tv = rounded(tv)
    return (
        DraftClause(
            "reward",
            "reward_drift_bound",
            "",
            "",
            budget,
            f"The budget itself: |E_P r - E_Q r| <= (r_max - r_min) TV_seq, so TV_seq <= {budget:g} / ({width}) = "
            f"{b_tv}. Measured on whole sequences, TV_seq = E_Q[(1-W)+]: no horizon and no worst case comes in.",
            "The mean reward under the two kernels may differ by more than the budget.",
        ),
        *_token_tv(draft, mean, f"{b_tv} / {horizon} = {rounded(mean)}"),
        DraftClause(
            "token-kl",
            "k3",
            "",
            "token",
            cut(kl.value),
            f"Enough for the budget by itself, P << Q: KL adds up over tokens, then {kl.name}: {kl_formula} = "
            f"{rounded(kl.value)} nat.",
            "The tokens' KL divergences no longer guarantee the budget; KL sees rare tokens, which TV forgives.",
        ),
        DraftClause(
            "tail",
            "tv_token",
            f"fraction > {_FAR:g}",
            "token",
            cut(mean / 2.0),
            f"Tokens that are another one more often than not may spend half of the token budget: a share f of them "
            f"adds at most f to the mean, so f <= {rounded(mean)} / 2 = {rounded(mean / 2.0)}.",
            "Single tokens are far off: suspect an expert, a mask, a cached prefix or a quantisation scale.",
        ),
    )


def _token_tv(draft: Draft, mean: float, formula: str) -> Iterator[DraftClause]:
    """The mean total variation of a token; capped, with what it leaves open."""
    breaks = "Token by token the budget is no longer guaranteed at this horizon; see whether reward still holds."
    limit = cut(mean)
    cap = CAP_IN_LIMITS * limit
    if not draft.capped or cap >= 1.0:
        derivation = f"Enough for the budget by itself: TV_seq <= T x mean (on policy), so mean <= {formula}."
        yield DraftClause("token-tv", "tv_token", "", "token", limit, derivation, breaks)
        return
    yield DraftClause(
        "token-tv",
        "tv_token",
        "",
        "",
        limit,
        f"TV_seq <= T x mean (on policy), so mean <= {formula} is enough for the budget where none is above the cap. "
        f"A sequence counts with at most {rounded(cap)}, {CAP_IN_LIMITS:g} limits: some hundred are then enough.",
        breaks,
        cap=cap,
    )
    yield DraftClause(
        "token-tv-tail",
        "tv_token",
        f"fraction > {exact(cap)}",
        "sequence",
        _TAIL,
        f"What token-tv leaves open: how many sequences are above its cap, and by how much they are. {100 * _TAIL:g} % "
        "is a choice: write what you can bear.",
        "More sequences than that are more than five limits off; see which.",
    )


def cut(value: float) -> float:
    """A limit cut to three significant digits, so that it is still enough."""
    return float(rounded_down(value).replace(",", ""))


def exact(value: float) -> str:
    """A number as YAML reads back the same one, without an exponent.

    >>> exact(4.88e-06), exact(0.02), exact(1.0)
    ('0.00000488', '0.02', '1')
    """
    if not math.isfinite(value):
        msg = f"value: {value!r} cannot be written as a limit; give a finite number"
        raise ValueError(msg)
    text = format(Decimal(repr(float(value))), "f")
    return text.removesuffix(".0")
