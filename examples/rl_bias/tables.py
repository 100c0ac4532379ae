"""The results as Markdown: each table is a list of rows, each row begins with the kernel and the horizon."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from examples.rl_bias import claims
from examples.rl_bias.exact import Pair
from examples.rl_bias.gradient_bounds import clip_budget_share
from examples.rl_bias.kernels import FAMILIES, Family

CLIP = 0.2
REWARDS = ("random", "verifier", "adversarial")

Pairs = Callable[[Family, float, int], Pair]
"""The pair of a family at a scale and a horizon."""


@dataclass(frozen=True)
class Table:
    """Rows of cells under a title and a sentence on how to read them."""

    title: str
    reads: str
    header: tuple[str, ...]
    rows: list[tuple[str, ...]]

    def markdown(self) -> str:
        """As README has it."""
        lines = [self.header, ("---",) * len(self.header), *self.rows]
        body = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        return f"**{self.title}.** {self.reads}\n\n{body}\n"


def number(value: float) -> str:
    """Three digits; large bounds as what they are."""
    if math.isinf(value):
        return "inf"
    return f"{value:.3g}" if value < 1e4 else f"{value:.0e}"


def references(pairs: Pairs, horizons: Iterable[int]) -> list[tuple[Family, Pair]]:
    """Every family at its reference scale, over the horizons."""
    steps = list(horizons)
    return [(family, pairs(family, family.reference, horizon)) for family in FAMILIES for horizon in steps]


def drift(cases: list[tuple[Family, Pair]]) -> Table:
    """How far apart the kernels are."""
    rows = []
    for family, pair in cases:
        share = clip_budget_share(pair.mean_abs_log_ratio, CLIP)
        rows.append(
            (
                family.label,
                str(pair.horizon),
                number(pair.half_range),
                number(pair.log_ratio),
                number(pair.token_tv_mean),
                number(float(pair.token_tv_of_steps.max())),
                number(pair.token_kl_mean),
                f"{share:.1%}",
                number(2.0 * pair.token_tv_mean / pair.mean_abs_log_ratio),
                number(pair.sequence_tv),
                *(number(pair.reward_drift(reward)) for reward in REWARDS[:2]),
            )
        )
    return Table(
        "Drift",
        f"rho and |l| are extremes over every prefix, TV and KL of a token means over Q's rollouts (worst: over every "
        f"prefix). Clip budget is E|l| / log(1 + {CLIP}); beside it TV over half of E|l|. Reward drift is for rewards "
        "in [0, 1]; the largest possible one is TV_seq itself.",
        (
            "kernel",
            "T",
            "rho",
            "max abs l",
            "TV token",
            "worst",
            "KL token",
            "clip budget",
            "TV / (E abs l / 2)",
            "TV_seq",
            *(f"reward drift, {name}" for name in REWARDS[:2]),
        ),
        rows,
    )


def bias(cases: list[tuple[Family, Pair]]) -> Table:
    """True bias of the uncorrected gradient against the bounds."""
    rows = []
    for family, pair in cases:
        true = {reward: pair.bias(reward) for reward in REWARDS}
        rollouts = claims.from_rollouts(pair)
        best = min(rollouts, key=rollouts.__getitem__)
        promised, product = claims.offline(pair), claims.paper(pair)["exp(T lam) - 1"]
        bounds = (claims.from_sequences(pair), rollouts[best], promised.value, product)
        held = [_against(bound, true["adversarial"]) for bound in bounds]
        if not claims.covered(pair):
            held[3] = f"({number(product)}: needs P << Q)"
        rows.append(
            (
                family.label,
                str(pair.horizon),
                *(number(value) for value in true.values()),
                number(claims.norm_share(pair)),
                held[0],
                f"{held[1]} {best}",
                f"{held[2]} {promised.name}",
                held[3],
            )
        )
    return Table(
        "Bias of the uncorrected policy gradient",
        "In units of A_max G_seq, so that 2 is trivial. Norm share is the mean length of a sequence's score where P "
        "and Q differ, over the largest, G_seq. In brackets: the bound divided by the adversarial bias.",
        (
            "kernel",
            "T",
            *(f"bias, {reward}" for reward in REWARDS),
            "norm share",
            "2 TV_seq",
            "best of other averages",
            "best from worst cases",
            "exp(T lam) - 1",
        ),
        rows,
    )


def corrected(cases: list[tuple[Family, Pair]]) -> Table:
    """What importance weights leave of the adversarial bias."""
    rows = []
    for family, pair in cases:
        cells = [number(pair.bias("adversarial"))]
        for cut in (1.0, 2.0):
            bound = claims.truncated(pair, cut, deficit=True)
            cells.append(f"{number(_clean(pair.bias_truncated('adversarial', cut)))} <= {number(_clean(bound))}")
        token, bound = pair.bias_token_corrected("adversarial"), claims.token_corrected(pair)
        cells.append(f"{number(_clean(token))} <= {number(_clean(bound))}")
        share = 0.0 if math.isinf(pair.sequence_chi2) else 1.0 / (1.0 + pair.sequence_chi2)
        cells.append(number(share) if share else "none: E_Q[W] < 1")
        rows.append((family.label, str(pair.horizon), *cells))
    return Table(
        "Corrected estimators",
        "Bias with adversarial advantages <= its bound, which includes the support deficit.",
        ("kernel", "T", "no weights", "min(W, 1)", "min(W, 2)", "token ratios w_t", "ESS / n of W"),
        rows,
    )


def support(pairs: Pairs, horizons: Iterable[int]) -> Table:
    """A dropped tail against statements that assume P << Q."""
    family = next(family for family in FAMILIES if family.name == "dropped tail")
    rows = []
    for scale in (0.99, 0.95, 0.8):
        for horizon in horizons:
            pair = pairs(family, scale, horizon)
            left, seen = pair.bias_truncated("adversarial", 2.0), claims.tv_from_seen_ratios(pair)
            rows.append(
                (
                    f"top-p {scale:g}",
                    str(horizon),
                    number(pair.mean_weight),
                    number(pair.sequence_tv),
                    number(pair.half_mean_deviation),
                    number(seen) + (" *" if seen < pair.sequence_tv else ""),
                    number(claims.tv_from_worst_steps(pair)),
                    f"{number(_clean(left))} > {number(_clean(claims.truncated(pair, 2.0, deficit=False)))}",
                )
            )
    return Table(
        "A dropped tail breaks bounds that assume P << Q",
        "Half of E_Q|1 - W| is half of the TV_seq that it should be, and the log-ratio form falls below it where much "
        "is dropped (*); the bound from token TV holds. Last: bias that min(W, 2) leaves, against its bound without "
        "the support deficit.",
        (
            "kernel",
            "T",
            "E_Q[W]",
            "TV_seq",
            "E_Q abs(1 - W) / 2",
            "1 - (1 - tanh(lam/2))^T",
            "1 - prod (1 - tau_t)",
            "truncated weights",
        ),
        rows,
    )


def estimates(cases: list[tuple[Family, Pair]], sizes: Iterable[int]) -> Table:
    """What sampled sequences say about TV_seq."""
    steps = list(sizes)
    rows = []
    for family, pair in cases:
        cells = []
        for n in steps:
            interval = claims.sampled(pair, n, seed=pair.horizon)
            cells.append(f"{number(interval.estimate)} [{number(interval.lower)}, {number(interval.upper)}]")
        rows.append((family.label, str(pair.horizon), number(pair.sequence_tv), *cells))
    return Table(
        "TV_seq from samples",
        "Mean of (1 - W)_+ over n sequences drawn from Q and its 99% interval.",
        ("kernel", "T", "TV_seq", *(f"n = {n:,}" for n in steps)),
        rows,
    )


def summary(cases: list[tuple[Family, Pair]]) -> Table:
    """Each bound over all cases: how loose, how often vacuous, how often broken."""
    ratios: dict[str, list[tuple[float, float]]] = {}
    for _, pair in cases:
        true = pair.bias("adversarial")
        if true < 1e-9:  # a tail that is not there yet cannot be dropped: P and Q are one
            continue
        found = {"2 TV_seq": claims.from_sequences(pair), **claims.from_rollouts(pair)}
        found |= {f"worst cases: {name.replace('_', ' ')}": v for name, v in claims.worst_cases(pair).items()}
        if claims.covered(pair):
            found |= claims.paper(pair)
        for name, bound in found.items():
            ratios.setdefault(name, []).append((bound, bound / true))
    rows = []
    for name, seen in ratios.items():
        loose = sorted(ratio for _, ratio in seen)
        vacuous = sum(claims.is_vacuous(bound) for bound, _ in seen)
        rows.append(
            (
                name,
                str(len(seen)),
                number(loose[0]),
                number(loose[len(loose) // 2]),
                number(loose[-1]),
                str(vacuous),
                str(sum(ratio < 1.0 - 1e-9 for ratio in loose)),
            )
        )
    return Table(
        "Every bound over every kernel, scale and horizon",
        "The bound divided by the adversarial bias. Vacuous: 2 A_max G_seq or more.",
        ("bound", "cases", "least", "median", "most", "vacuous", "broken"),
        rows,
    )


def _against(bound: float, true: float) -> str:
    return f"{number(bound)} ({number(bound / true)}x)"


def _clean(value: float) -> float:
    """Sums over all sequences are exact to about 1e-15: what is left of a difference below that is rounding."""
    return value if value > 1e-12 else 0.0
