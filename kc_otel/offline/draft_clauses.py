"""A new contract from a reward budget: which clauses, which limits, and how each limit follows.

The budget itself is one clause. The conditions on tokens are explanations: each would guarantee the budget at the
horizon by itself, and real kernels break them while the measured budget holds, so that a gate must not ask for them. A
baseline, a recording of an accepted pair, makes them clauses with limits of its own: one that it already breaks would
fail forever.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Final

import numpy as np

from kc_otel.contract.clause import Clause
from kc_otel.contract.measuring_paths import MeasuringPath
from kc_otel.contract.model import Contract
from kc_otel.contract.slices import ALL
from kc_otel.contract.words import rounded, rounded_down
from kc_otel.judge.statistics import clause_interval
from kc_otel.offline.gate.recorded_verdicts import RecordingObservations
from kc_otel.recordings.recording import Recording
from kc_otel.stats import Interval
from kc_otel.stats.rewards import mean_token_tv_for_sequence_tv, token_kl_for_sequence_tv, tv_for_reward_budget

BUDGET: Final = "reward"
"""The clause that is the budget itself: no baseline changes it."""
TAIL_OF_TV: Final = "token-tv-tail"
CAP_IN_LIMITS: Final = 5.0
"""Cap of a capped mean, in limits: it needs a fiftieth of the prompts, and kernels within the limit seldom reach it."""
_TAIL_SHARE: Final = 0.01
_FAR_TV: Final = 0.5
"""(1-w)+ above which a token is another one more often than not."""


@dataclass(frozen=True, slots=True)
class Draft:
    """Inputs of a new contract: both kernels' fields, the largest acceptable drift of the mean reward, and its range.

    `horizon` is in generated tokens; clauses that the measuring path `data` cannot measure are left out.
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
    rewards: bool = False


@dataclass(frozen=True, slots=True)
class DraftClause:
    """A clause of a new contract, and how its limit follows; one that `explains` would be enough, and is not asked for.

    The clause's description says what breaks beyond the limit.
    """

    clause: Clause
    derivation: str
    explains: bool = False

    def changed(self, derivation: str, *, explains: bool = False, **fields: Any) -> DraftClause:
        """Return the clause with other fields, and how its limit follows then."""
        return DraftClause(Clause(**(self.clause.model_dump(exclude_unset=True) | fields)), derivation, explains)


def clauses_of(draft: Draft, *, capped: bool = False) -> tuple[DraftClause, ...]:
    """The statistical clauses of a new contract, the budget first; limits are cut to three digits, never raised.

    With `capped` the mean of tv_token is judged by prompt and cut at five limits, so that a gate can decide it.
    """
    budget, (low, high), horizon = draft.reward_budget, draft.reward_range, draft.horizon
    tv = tv_for_reward_budget(budget, draft.reward_range)
    if not 0.0 < tv < 1.0:
        raise ValueError(
            f"reward budget: {budget!r} is not above 0 and below the width of the reward range, {high - low:g}; write "
            f"the largest acceptable loss, such as {0.02 * (high - low):g}"
        )
    mean = mean_token_tv_for_sequence_tv(tv, horizon)
    kl = token_kl_for_sequence_tv(tv, horizon)
    width = f"{high:g} - {low:g}" if low >= 0 else f"{high:g} - ({low:g})"
    kl_formula = "2 TV^2 / T" if kl.name == "Pinsker" else "-log(1 - TV^2) / T"
    b_tv = rounded(tv)
    if draft.rewards:
        measured = (
            "The budget itself, measured from the rewards of the sampled sequences: |E_P r - E_Q r| = |E_Q[(W-1) r]|. "
            "It needs no horizon and no worst case."
        )
    else:
        measured = (
            f"The budget itself: |E_P r - E_Q r| <= (r_max - r_min) TV_seq, so TV_seq <= {budget:g} / ({width}) = "
            f"{b_tv}. Measured on whole sequences, TV_seq = E_Q[(1-W)+]: this needs no horizon and no worst case."
        )
    reward = Clause(
        id=BUDGET,
        metric="reward_drift" if draft.rewards else "reward_drift_bound",
        limit=budget,
        description="The mean reward under the two kernels may differ by more than the budget.",
    )
    token_kl = Clause(
        id="token-kl",
        metric="k3",
        unit="token",
        limit=cut(kl.value),
        description="The tokens' KL divergences no longer guarantee the budget; KL weighs rare tokens more than TV "
        "does.",
    )
    tail = Clause(
        id="tail",
        metric="tv_token",
        statistic=f"fraction > {_FAR_TV:g}",
        unit="token",
        limit=cut(mean / 2.0),
        description="Single tokens are far off: suspect an expert, a mask, a cached prefix or a quantisation scale.",
    )
    return (
        DraftClause(reward, measured),
        DraftClause(
            token_kl,
            f"Enough for the budget by itself, P << Q: KL adds up over tokens, then {kl.name}: {kl_formula} = "
            f"{rounded(kl.value)} nat.",
            explains=True,
        ),
        *_token_tv(mean, f"{b_tv} / {horizon} = {rounded(mean)}", capped=capped),
        DraftClause(
            tail,
            f"Tokens that probably differ may use half of the token budget: a share f of them adds at most f to the "
            f"mean, so f <= {rounded(mean)} / 2 = {rounded(mean / 2.0)}.",
            explains=True,
        ),
    )


def _token_tv(mean: float, formula: str, *, capped: bool) -> Iterator[DraftClause]:
    """The mean total variation of a token; capped, with what it leaves open."""
    breaks = "Token limits no longer guarantee the budget at this horizon; check whether reward still holds."
    limit = cut(mean)
    cap = CAP_IN_LIMITS * limit
    if not capped or cap >= 1.0:
        clause = Clause(id="token-tv", metric="tv_token", unit="token", limit=limit, description=breaks)
        derivation = f"Enough for the budget by itself: TV_seq <= T x mean (on policy), so mean <= {formula}."
        yield DraftClause(clause, derivation, explains=True)
        return
    yield DraftClause(
        Clause(id="token-tv", metric="tv_token", cap=cap, limit=limit, description=breaks),
        f"TV_seq <= T x mean (on policy), so mean <= {formula} is enough for the budget if none is above the cap. "
        f"A prompt counts with at most {rounded(cap)}, {CAP_IN_LIMITS:g} limits, so a few hundred are enough.",
    )
    yield DraftClause(
        Clause(
            id=TAIL_OF_TV,
            metric="tv_token",
            statistic=f"fraction > {exact(cap)}",
            unit="prompt",
            limit=_TAIL_SHARE,
            description="More prompts than that drift by more than five limits; see which.",
        ),
        f"The share of prompts above the cap of token-tv, which that clause does not limit. {100 * _TAIL_SHARE:g} % "
        "is a choice.",
    )


def cut(value: float) -> float:
    """A limit cut to three significant digits, so that it is still enough."""
    return float(rounded_down(value).replace(",", ""))


def exact(value: float) -> str:
    """A number as YAML reads back the same one, without an exponent."""
    if not math.isfinite(value):
        raise ValueError(f"value: {value!r} cannot be written as a limit; give a finite number")
    text = format(Decimal(repr(float(value))), "f")
    return text.removesuffix(".0")


@dataclass(frozen=True, slots=True)
class NoiseFloor:
    """A clause's statistic on a recording, with its bounds: the upper one is the floor."""

    clause: str
    slice: str
    limit: float
    interval: Interval
    unit: str

    @property
    def breaks_limit(self) -> bool:
        """Return whether the recording surely exceeds the limit, so that it could never pass."""
        return self.interval.lower > self.limit


def floors(contract: Contract, recording: Recording) -> Iterator[NoiseFloor]:
    """The floor of each clause that log-probabilities decide, on every slice of which the recording has sequences."""
    alpha = (1.0 - contract.observability.confidence) / 2.0
    members = [contract.slices_of(attributes) for attributes in recording.attributes]
    for slice in (ALL, *contract.slices):
        inside = np.array([slice in names for names in members], dtype=np.bool_)
        if not inside.any():
            continue
        observed = RecordingObservations(recording.only(inside))
        for clause in contract.clauses:
            sample = None if clause.quantity is None else observed.of(clause.quantity.key)
            if clause.quantity is None or sample is None:
                continue
            found = clause_interval(clause, contract.assumptions, sample, alpha_lower=alpha, alpha_upper=alpha)
            yield NoiseFloor(clause.id, slice, clause.limit_for(slice), found, str(clause.quantity.per))
