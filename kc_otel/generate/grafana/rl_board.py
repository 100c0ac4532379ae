"""The RL dashboard: effects of the mismatch on policy-gradient training."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

from kc_otel.contract.registry.clause_metrics import DERIVED, QUANTITIES
from kc_otel.contract.registry.own_metrics import METRICS, selector
from kc_otel.contract.slices import ALL
from kc_otel.generate.files import RL_UID, GeneratedFile
from kc_otel.generate.grafana import panels, queries, sdk
from kc_otel.generate.grafana.boards import STEP, board_file, scope, step
from kc_otel.generate.grafana.panels import legend, target

_SLICE_LEGEND: Final = legend("kc.contract", "kc.slice")
_METRICS: Final = (
    *("ratio", "tv_token", "tv_seq", "k3", "k1", "chi2_token", "chi2_seq", "support_deficit", "clip_budget_share"),
    *("advantage_drift_positive", "advantage_drift_negative", "reward_drift_bound", "gradient_bias_bound"),
    "weights_lag",
)
_ASSUMPTIONS: Final = "By the assumptions of each contract; contracts that do not state them are left out."
_SOURCE: Final = (
    "Computed from the drift histograms that the recorders send by way of the Collector, without confidence bounds; "
    "the dashed line is the contract's limit, where a clause sets one. Recorders send what clauses are about: where "
    "these are by prompt, means are over prompts, and without a clause the panel is empty."
)


def rl_file() -> GeneratedFile:
    """The dashboard; it is the same for all contracts."""
    variables = scope()
    # Slices overlap with the whole of the traffic, which is where RL training looks first.
    variables[1].current(sdk.models.VariableOption(True, [ALL], [ALL]))
    about = (
        "What the difference between trainer and rollout engine does to training: how much of the clip range, the "
        "sample and the gradient it costs."
    )
    return board_file(RL_UID, about, (*variables, step()), _panels())


def _panels() -> Iterator[Any]:
    names = legend(*queries.CELL[:3])
    verdict = selector("kc.verdict", None, *queries.picked(queries.CELL))
    about = "The clauses of the picked contracts on these metrics, over time: with confidence, from the evaluator."
    shown = (target(queries.by(queries.CELL[:3], queries.of_metrics(verdict, *_METRICS)), names),)
    yield panels.verdicts(13, "Verdicts on what is shown below", about, shown)
    bound, limit = (selector(f"kc.bound.{part}", None, *queries.picked(queries.CELL)) for part in ("estimate", "limit"))
    share = queries.by(queries.CELL[:3], queries.of_metrics(f"{bound} / ({limit} > 0)", *_METRICS))
    yield panels.graph_over(
        16,
        "Drift by training step",
        "What the clauses of the picked contracts on these metrics are estimated at, as a share of their limit, over "
        "the trainer's steps in the place of time; of several runs together, over the furthest step. Empty where no "
        "trainer tells its steps (weights= of the recorder).",
        "step",
        f"max({selector('kc.train.step', None, *queries.picked(queries.PAIR))})",
        target(share, names),
        "percentunit",
    )
    ratio = queries.histogram("ratio")
    about = (
        f"{QUANTITIES['ratio'].meaning} Far from 1 means that the update is about tokens that the trainer would hardly "
        "have sampled, or would have sampled far more often."
    )
    series = [(queries.quantile(rank, ratio), f"{_SLICE_LEGEND} p{rank * 100:g}") for rank in (0.01, 0.5, 0.99, 0.999)]
    yield _graph(1, "Importance ratio of sampled tokens", about, series, queries.limits("ratio", statistic="p.+"))
    yield _graph(
        2,
        "Share of the clip range that the kernels spend",
        f"{DERIVED['clip_budget_share'].meaning} At 100 % a token is clipped for the kernels' sake alone. "
        f"{_ASSUMPTIONS}",
        [(queries.scaled("abs_log_ratio", "clip_budget_share"), _SLICE_LEGEND)],
        _mean_limits("clip_budget_share"),
        "percentunit",
    )
    about = (
        "1 / (1 + chi-square) of the importance weights: which share of the rollouts is left to learn from. Token "
        "weights and whole-sequence weights; the latter fall much faster with length."
    )
    series = [
        (f"1 / (1 + {queries.mean('chi2_token')})", f"{_SLICE_LEGEND} tokens"),
        (f"1 / (1 + {queries.mean('chi2_seq')})", f"{_SLICE_LEGEND} sequences"),
    ]
    yield _graph(3, "Effective sample size, per sample", about, series, "", "percentunit")
    for id, title, key in (
        (4, "Total variation per token", "tv_token"),
        (5, "Total variation per sequence", "tv_seq"),
        (6, "KL(Q||P), k3", "k3"),
    ):
        about = QUANTITIES[key].meaning
        yield _graph(id, title, about, [(queries.mean(key), _SLICE_LEGEND)], _mean_limits(key))
    yield _graph(
        7,
        "Advantage-signed drift",
        "Mean of (w-1)A over tokens with a positive and with a negative advantage: what the mismatch adds to the push "
        "towards good tokens and away from bad ones. Of opposite signs and equal size they only slow training; of one "
        "sign they bias it. Recorded where advantages are given.",
        [
            (queries.mean("advantage_drift_positive"), f"{_SLICE_LEGEND} A > 0"),
            (queries.mean("advantage_drift_negative"), f"{_SLICE_LEGEND} A < 0"),
        ],
        _mean_limits("advantage_drift_positive", "advantage_drift_negative"),
    )
    for id, title, key in (
        (8, "Most that the reward can differ", "reward_drift_bound"),
        (9, "Most that the gradient can be biased", "gradient_bias_bound"),
    ):
        scaled = queries.scaled(DERIVED[key].base, key)
        yield _graph(id, title, f"{DERIVED[key].meaning} {_ASSUMPTIONS}", [(scaled, _SLICE_LEGEND)], _mean_limits(key))
    about = f"{DERIVED['support_deficit'].meaning} Below zero is sampling noise."
    yield _graph(
        10, "Support deficit", about, [(f"1 - {queries.mean('ratio')}", _SLICE_LEGEND)], _mean_limits("support_deficit")
    )
    about = (
        f"{QUANTITIES['weights_lag'].meaning} Look here first: with stale weights every other number speaks of the "
        "policy's own change."
    )
    series = [
        (queries.quantile(1.0, queries.histogram("weights_lag")), f"{_SLICE_LEGEND} largest"),
        (queries.mean("weights_lag"), f"{_SLICE_LEGEND} mean"),
    ]
    yield _graph(11, "Weight lag", about, series, queries.limits("weights_lag"))
    yield from _quarantine()


def _quarantine() -> Iterator[Any]:
    """Yield the panels of rollouts kept out of training; without slices, as the trainer counts them."""
    attributes = ("kc.contract", "kc.outcome")
    names = legend(*attributes)
    tv, tokens, sequences = (
        queries.rate(f"kc.quarantine.{name}", attributes) for name in ("tv", "tokens", "sequences")
    )
    source = "From the trainer, by way of the Collector; empty where it does not quarantine rollouts."
    about = (
        "Total variation per token of the sequences that were kept and of those that were not: what quarantine spares "
        f"the update. {source}"
    )
    yield panels.graph(
        14, "Drift of kept and of quarantined rollouts", about, (target(f"{tv} / {tokens}", names, step=STEP),), "short"
    )
    about = f"{METRICS['kc.quarantine.sequences'].meaning} Per second. {source}"
    yield panels.graph(15, "Sequences kept and quarantined", about, (target(sequences, names, step=STEP),), "cps")


def _graph(id: int, title: str, about: str, series: Iterable[tuple[str, str]], limit: str, unit: str = "short") -> Any:
    shown = [target(expression, name, step=STEP) for expression, name in series]
    if limit:
        shown.append(target(limit, f"{_SLICE_LEGEND} limit"))
    return panels.with_limit(panels.graph(id, title, f"{about} {_SOURCE}", shown, unit))


def _mean_limits(*metrics: str) -> str:
    return queries.limits(*metrics, statistic="mean")
