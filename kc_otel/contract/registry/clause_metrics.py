"""Metrics that a clause can limit: quantities, which are observed, and what is computed from their means."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace
from enum import StrEnum
from typing import Final


class Origin(StrEnum):
    """Data from which a quantity is computed."""

    LOGPROBS = "logprobs"
    LOGITS = "logits"
    ADVANTAGES = "advantages"
    TRUNCATION = "the mass that truncation kept"
    REWARDS = "rewards"
    OPERATORS = "operator outputs"
    RUNTIME = "runtime"


class Unit(StrEnum):
    """Unit that one observation of a quantity stands for."""

    TOKEN = "token"  # noqa: S105 - a unit, not a secret
    SEQUENCE = "sequence"
    PROMPT = "prompt"
    STEP = "step"
    ROW = "row"
    BATCH = "batch"


@dataclass(frozen=True, slots=True)
class Quantity:
    """A drift quantity: one real number per token, sequence, row or the like, recorded as an exponential histogram.

    `name` is `kc.drift.<key>` where none is given. Values lie in [low, high]. `cap` is where intervals for the mean of
    an unbounded quantity stop, `high` where none is given; they then speak of the mean of min(value, cap). `statistic`
    is that of a clause that names none. `meaning` is for a dashboard: w = P(y)/Q(y) is the importance ratio, l = log w,
    for tokens y sampled from Q. `two_valued` quantities are either low or high, so that their mean is a share. `base`
    is the key of what an observation is a mean of.
    """

    key: str
    per: Unit
    source: Origin
    _: KW_ONLY
    name: str = ""
    unit: str = "1"
    low: float = 0.0
    high: float = math.inf
    cap: float = math.inf
    statistic: str = "mean"
    two_valued: bool = False
    meaning: str
    citation: str = ""
    base: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.name or f"kc.drift.{self.key}")
        object.__setattr__(self, "cap", self.high if self.cap == math.inf else self.cap)


@dataclass(frozen=True, slots=True)
class Derived:
    """A metric that is `scale * mean(base) + offset`; `opposite` bounds it from the other side of 0, where one does."""

    key: str
    base: str
    unit: str
    needs: tuple[str, ...]
    factors: Callable[..., tuple[float, float]]
    meaning: str
    citation: str
    opposite: str | None = None


_XU_WU = "Xu and Wu 2026, arXiv:2606.07581"
_REWARD_SIDES = "E_Q[W(1-u)] <= E_P[1-u], with equality where Q can sample what P can"
_SCHULMAN = "Schulman 2020, Approximating KL Divergence"

_QUANTITIES: Final = (
    Quantity("log_ratio", Unit.TOKEN, Origin.LOGPROBS, unit="{nat}", low=-math.inf, cap=5.0, statistic="p99.9",
        meaning="Signed log ratio l = log P(y) - log Q(y) of a sampled token.", citation=_XU_WU),
    Quantity("abs_log_ratio", Unit.TOKEN, Origin.LOGPROBS, unit="{nat}", cap=5.0,
        meaning="Absolute log ratio |l| of a sampled token.", citation=_XU_WU),
    Quantity("ratio", Unit.TOKEN, Origin.LOGPROBS, cap=10.0, statistic="p99.9", citation=_XU_WU,
        meaning="Importance ratio w = P(y)/Q(y) of a sampled token; its mean is 1 minus the support deficit."),
    Quantity("tv_token", Unit.TOKEN, Origin.LOGPROBS, high=1.0,
        meaning="(1-w)+ of a sampled token; its mean is the total variation between the kernels' next-token "
        "distributions.", citation="TV(P,Q) = E_Q[(1-w)+]"),
    Quantity("k3", Unit.TOKEN, Origin.LOGPROBS, unit="{nat}", cap=5.0, citation=_SCHULMAN,
        meaning="k3 = w - 1 - l of a sampled token; its mean estimates KL(Q||P) with low variance."),
    Quantity("chi2_token", Unit.TOKEN, Origin.LOGPROBS, cap=10.0, citation="chi2(P,Q) = E_Q[(w-1)^2]",
        meaning="(w-1)^2 of a sampled token; its mean is the chi-square divergence that governs token-level variance."),
    Quantity("tv_seq", Unit.SEQUENCE, Origin.LOGPROBS, high=1.0,
        meaning="(1-W)+ of a sequence, where W is the product of its ratios; its mean is the total variation over "
        "whole sequences.", citation="TV(P,Q) = E_Q[(1-W)+]"),
    Quantity("log_ratio_seq", Unit.SEQUENCE, Origin.LOGPROBS, unit="{nat}", low=-math.inf, cap=20.0, statistic="p99",
        meaning="Sum of a sequence's log ratios, L = log W.", citation=_XU_WU),
    Quantity("geometric_ratio", Unit.SEQUENCE, Origin.LOGPROBS, cap=10.0, statistic="p99",
        meaning="exp(L/T): geometric mean of a sequence's token ratios.",
        citation="Zheng et al. 2025, arXiv:2507.18071"),
    Quantity("chi2_seq", Unit.SEQUENCE, Origin.LOGPROBS, cap=100.0, citation="chi2(P,Q) = E_Q[(W-1)^2]",
        meaning="(W-1)^2 of a sequence; its mean governs sequence-level variance: ESS/n = 1/(1+chi2)."),
    Quantity("advantage_drift_positive", Unit.TOKEN, Origin.ADVANTAGES, low=-math.inf, cap=10.0, citation=_XU_WU,
        meaning="(w-1)A of a token whose advantage A is positive: the mismatch's contribution to its gradient weight."),
    Quantity("advantage_drift_negative", Unit.TOKEN, Origin.ADVANTAGES, low=-math.inf, cap=10.0, citation=_XU_WU,
        meaning="(w-1)A of a token whose advantage A is negative: the mismatch's contribution to its gradient weight."),
    Quantity("outside_mass", Unit.TOKEN, Origin.TRUNCATION, high=1.0,
        meaning="1 - P(K): mass of the training kernel outside of the tokens K that top-p, top-k or min-p kept. Drift "
        "then compares both kernels over K and does not include this mass.", citation="TV(P, P/P(K)) = 1 - P(K)"),
    Quantity("reward_above", Unit.SEQUENCE, Origin.REWARDS, low=-math.inf, high=1.0, cap=1e7,
        meaning="(1-W)(1-u) of a sequence, where u is its reward as a share of reward_range; the mean is at least "
        "E_P[u] - E_Q[u].", citation=_REWARD_SIDES),
    Quantity("reward_below", Unit.SEQUENCE, Origin.REWARDS, low=-math.inf, high=1.0, cap=1e7,
        meaning="(1-W)u of a sequence, where u is its reward as a share of reward_range; the mean is at least E_Q[u] - "
        "E_P[u].", citation=_REWARD_SIDES),
    Quantity("logit_half_range", Unit.TOKEN, Origin.LOGITS, cap=20.0, statistic="p99.9",
        meaning="Half range of the logit difference, (max d - min d)/2: the part of logit drift that softmax sees.",
        citation="Reeb, Kastoryano and Wolf 2011, Hilbert's projective metric"),
    Quantity("tv_exact", Unit.TOKEN, Origin.LOGITS, high=1.0,
        meaning="Total variation between the two next-token distributions, from full logits.", citation=_XU_WU),
    Quantity("kl_train_inference", Unit.TOKEN, Origin.LOGITS, unit="{nat}", cap=20.0,
        meaning="KL(P||Q), training kernel against inference kernel, from full logits.",
        citation="Kullback and Leibler 1951"),
    Quantity("kl_inference_train", Unit.TOKEN, Origin.LOGITS, unit="{nat}", cap=20.0,
        meaning="KL(Q||P), inference kernel against training kernel, from full logits.",
        citation="Kullback and Leibler 1951"),
    Quantity("js", Unit.TOKEN, Origin.LOGITS, unit="{nat}", high=math.log(2.0), citation="Lin 1991",
        meaning="Jensen-Shannon divergence of the two next-token distributions, from full logits."),
    Quantity("top1_disagreement", Unit.TOKEN, Origin.LOGITS, high=1.0, two_valued=True,
        meaning="1 where the two kernels' most likely tokens differ, else 0.",
        citation="llama.cpp --kl-divergence, same top p"),
    Quantity("entropy_difference", Unit.TOKEN, Origin.LOGITS, unit="{nat}", low=-math.inf, cap=5.0, statistic="p99",
        meaning="H(P) - H(Q), from full logits.", citation="Shannon 1948"),
    Quantity("operator_max_abs", Unit.ROW, Origin.OPERATORS, cap=100.0, statistic="p99.9",
        meaning="Largest |a - b| of a row of an operator's output, a from the training kernel, b from the inference "
        "kernel.", citation="Higham 2002, Accuracy and Stability of Numerical Algorithms, 1.2"),
    Quantity("operator_relative", Unit.ROW, Origin.OPERATORS, cap=1.0, statistic="p99.9",
        meaning="||a - b|| / ||a|| of a row of an operator's output: normwise relative error against the training "
        "kernel.", citation="Higham 2002, Accuracy and Stability of Numerical Algorithms, 1.2"),
    Quantity("operator_ulp", Unit.ROW, Origin.OPERATORS, unit="{ulp}", cap=1000.0, statistic="p99.9",
        meaning="Largest |a - b| of a row of an operator's output, in units in the last place (ulp) of the row's "
        "largest |a|: rounding alone gives 0.5.",
        citation="Goldberg 1991, What Every Computer Scientist Should Know, 1.2"),
    Quantity("operator_cosine", Unit.ROW, Origin.OPERATORS, high=2.0, statistic="p99.9", citation="cosine distance",
        meaning="1 - cos(a, b) of a row of an operator's output: the change of its direction."),
    Quantity("operator_batch_dependence", Unit.ROW, Origin.OPERATORS, cap=1.0, statistic="max",
        meaning="||a - b|| / ||a|| of a row of an operator's output computed alone (a) and in a batch (b): 0 where the "
        "kernel is batch invariant.", citation="He et al. 2025, Defeating Nondeterminism in LLM Inference"),
    Quantity("route_disagreement", Unit.ROW, Origin.OPERATORS, high=1.0,
        meaning="Share of a token's experts, in a layer of a mixture of experts, that the other kernel did not choose; "
        "the operator is `router` for all layers together, and `router.3` for the fourth.",
        citation="Ma et al. 2025, Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers"),
    Quantity("weights_lag", Unit.BATCH, Origin.RUNTIME, name="kc.weights.lag", unit="{step}", cap=1000.0,
        statistic="max",
        meaning="Optimizer steps by which the inference kernel's weights are behind the training kernel's; one "
        "observation for each version that sampled tokens of the batch.", citation=_XU_WU),
    Quantity("weights_mismatch", Unit.BATCH, Origin.RUNTIME, name="kc.weights.mismatch", high=1.0, statistic="max",
        meaning="Share of the trainer's weights (elements) in tensors that differ in the engine after a sync; one "
        "observation for each comparison.", citation="digests of each tensor in the engine's number format"),
    Quantity("updates_rounded_away", Unit.BATCH, Origin.RUNTIME, name="kc.weights.updates_rounded_away", high=1.0,
        statistic="max",
        meaning="Share of the weights changed since the last sync whose change is lost by rounding to the engine's "
        "number format.", citation="Higham 2002, Accuracy and Stability of Numerical Algorithms, 2.1"),
)  # fmt: skip

QUANTITIES: Final[dict[str, Quantity]] = {q.key: q for q in _QUANTITIES}


OPERATORS: Final[dict[str, Quantity]] = {q.key: q for q in _QUANTITIES if q.source is Origin.OPERATORS}
"""Quantities of single operators: a clause on one names its operator, and so does each of its streams."""


_AVERAGING_UNITS: Final = {Unit.TOKEN: (Unit.SEQUENCE, Unit.PROMPT, Unit.STEP), Unit.SEQUENCE: (Unit.PROMPT, Unit.STEP)}
_AVERAGES: Final = {
    (Unit.TOKEN, Unit.SEQUENCE): "each sequence's tokens",
    (Unit.TOKEN, Unit.PROMPT): "each sequence's tokens, and these means over each prompt's sequences",
    (Unit.TOKEN, Unit.STEP): "each sequence's tokens, and these means over each prompt's sequences and each step's "
    "prompts",
    (Unit.SEQUENCE, Unit.PROMPT): "each prompt's sequences",
    (Unit.SEQUENCE, Unit.STEP): "each prompt's sequences, and these means over each step's prompts",
}


def _averaged(quantity: Quantity, unit: Unit) -> Quantity:
    """The mean of a quantity over a wider unit: it has the range of what it is a mean of."""
    return replace(
        quantity,
        key=f"{quantity.key}_by_{unit}",
        name=f"{quantity.name}_by_{unit}",
        per=unit,
        statistic="mean",
        two_valued=False,
        meaning=f"{quantity.meaning} Averaged over {_AVERAGES[quantity.per, unit]}: one observation per {unit}.",
        base=quantity.key,
    )


AVERAGED: Final[dict[tuple[str, Unit], Quantity]] = {
    (q.key, unit): _averaged(q, unit) for q in _QUANTITIES for unit in _AVERAGING_UNITS.get(q.per, ())
}
"""(key of a quantity, unit) -> its mean over that unit, one observation each.

Dependent observations are averaged before they count: the tokens of a sequence, the rollouts of a prompt, the prompts
of a step. They are recorded where a clause is judged by them, and no clause names them: a promise about tokens judged
by prompt is written `metric: tv_token`, so that `diff` can tell that nothing but the unit of a promise changed, and
`kc-otel reference metrics` lists each quantity once. An advantage-signed quantity is the mean over those tokens of a
sequence whose advantage has its sign; sequences without such tokens make no observation.
"""

SAMPLING: Final[dict[str, Quantity]] = {
    q.key: q
    for q in (
        Quantity("prompt_rollouts", Unit.PROMPT, Origin.LOGPROBS, name="kc.sampling.rollouts", unit="{sequence}",
            low=1.0,
            meaning="Rollouts of a prompt; nothing where the recorder knows no prompts."),
        Quantity("design_effect", Unit.BATCH, Origin.LOGPROBS, name="kc.sampling.design_effect", low=1.0,
            meaning="Design effect of sampling several rollouts of a prompt: so many sequences are worth one "
            "independent sequence; from the analysis of variance of the first mean that is judged by prompt.",
            citation="Kish 1965, Survey Sampling, 5.4"),
        Quantity("sequence_tokens", Unit.SEQUENCE, Origin.LOGPROBS, name="kc.sampling.tokens", unit="{token}", low=1.0,
            statistic="max",
            meaning="Tokens of a sequence that count, against `assumptions.horizon`."),
        Quantity("advantage_abs", Unit.SEQUENCE, Origin.ADVANTAGES, name="kc.sampling.advantage", statistic="max",
            meaning="Largest |A| of a sequence, against `assumptions.advantage_max`."),
        Quantity("score_norm", Unit.BATCH, Origin.RUNTIME, name="kc.sampling.score_norm", statistic="max",
            meaning="Norm of a token's score, grad log pi, against `assumptions.score_norm_max`; `Recorder.observe` "
            "takes it."),
    )
}  # fmt: skip
"""Known facts about the sampling of sequences, compared with the contract's assumptions; no clause names them."""

TV_PLACE: Final = replace(
    AVERAGED["tv_token", Unit.PROMPT],
    key="tv_place",
    name="kc.drift.tv_place",
    meaning="Mean of (1-w)+ over those tokens of a prompt's rollouts that lie in one part of the responses, which "
    "`kc.slice` names: `position:64` for the tokens 64 to 255, and so on by powers of four from 16; `turn:2` for the "
    "second run of tokens that count, where a rollout has several. No clause names it.",
)
"""Drift along the responses. Unlike a slice it is recorded of every contract, and takes no cell."""

RECORDED: Final[dict[str, Quantity]] = {
    **QUANTITIES,
    **{q.key: q for q in AVERAGED.values()},
    **SAMPLING,
    TV_PLACE.key: TV_PLACE,
}

_DERIVED: Final = (
    Derived("k1", "log_ratio", "{nat}", (), lambda: (-1.0, 0.0),
        "Mean of -l: the plain estimate of KL(Q||P).", _SCHULMAN),
    Derived("support_deficit", "ratio", "1", (), lambda: (-1.0, 1.0),
        "1 - E_Q[w]: probability of the training kernel that the inference kernel can never sample.", _XU_WU),
    Derived("clip_budget_share", "abs_log_ratio", "1", ("clip",), lambda clip: (1.0 / math.log1p(clip), 0.0),
        "E|l| / log(1+clip): share of the PPO clip range that the kernels spend before the policy has moved.", _XU_WU),
    Derived("reward_drift_bound", "tv_seq", "1", ("reward_range",), lambda span: (span[1] - span[0], 0.0),
        "(r_max - r_min) * TV_seq: upper bound on the difference of the kernels' expected rewards.", _XU_WU),
    Derived("reward_drift", "reward_above", "1", ("reward_range",), lambda span: (span[1] - span[0], 0.0),
        "|E_P[r] - E_Q[r]|: difference of the kernels' expected rewards, estimated from the rewards of sampled "
        "sequences; limited in both directions, without assuming common support.", _REWARD_SIDES,
        opposite="reward_below"),
    Derived("gradient_bias_bound", "tv_seq", "1", ("advantage_max", "score_norm_max", "horizon"),
        lambda advantage, norm, horizon: (2.0 * advantage * norm * horizon, 0.0),
        "2 A_max G_seq TV_seq with G_seq = horizon * score_norm_max: upper bound on the bias of the policy gradient "
        "from sampling with the inference kernel.", _XU_WU),
)  # fmt: skip

DERIVED: Final[dict[str, Derived]] = {d.key: d for d in _DERIVED}


def known_metrics() -> tuple[str, ...]:
    """Every name that a clause's `metric:` can have, apart from `gen_ai.*` metrics."""
    return (*QUANTITIES, *DERIVED)
