"""The RL dashboard: what the mismatch does to policy-gradient training."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

from kc_otel.contract.clause import Clause
from kc_otel.contract.limits import scale_of
from kc_otel.contract.model import Contract
from kc_otel.contract.prometheus_names import label
from kc_otel.contract.registry import DERIVED, METRICS, QUANTITIES
from kc_otel.contract.slices import ALL
from kc_otel.generate.files import GeneratedFile
from kc_otel.generate.grafana import queries, raw
from kc_otel.generate.grafana.boards import board, board_file, scope
from kc_otel.generate.grafana.panels import (
    STATUS_COLOURS,
    Query,
    graph_panel,
    limit_line,
    status_mapping,
    timeline_panel,
)
from kc_otel.generate.grafana.sdk import models
from kc_otel.generate.links import RL_UID
from kc_otel.judge.verdict import Status

__all__ = ["rl_file"]

_CELL: Final = f"{{{{{label('kc.contract')}}}}} · {{{{{label('kc.slice')}}}}}"
_METRICS: Final = (
    "ratio",
    "tv_token",
    "tv_seq",
    "k3",
    "k1",
    "chi2_token",
    "chi2_seq",
    "support_deficit",
    "clip_budget_share",
    "advantage_drift_positive",
    "advantage_drift_negative",
    "reward_drift_bound",
    "gradient_bias_bound",
    "weights_lag",
)
_SOURCE: Final = (
    "Computed from the drift histograms that the recorders send by way of the Collector, without confidence bounds; "
    "the dashed line is the contract's limit, where a clause sets one."
)


def rl_file(contracts: Iterable[Contract]) -> GeneratedFile:
    """The dashboard; contracts give it the constants of their bounds, and their limits."""
    known = tuple(contracts)
    variables = scope()
    # Slices overlap with the whole of the traffic, which is where RL training looks first.
    variables[1].current(models.VariableOption(selected=True, text=[ALL], value=[ALL]))
    made = board(
        RL_UID,
        "What the difference between trainer and roll-out engine does to training: how much of the clip range, the "
        "sample and the gradient it costs.",
        variables,
    )
    for panel in _panels(known, raw.minimum_step(known)):
        made = made.with_panel(panel)
    return board_file("rl", made)


def _panels(contracts: tuple[Contract, ...], step: str) -> Iterator[Any]:
    if clauses := _clauses(contracts):
        names = " · ".join(f"{{{{{label(name)}}}}}" for name in queries.CELL[:3])
        yield timeline_panel(
            13,
            "Verdicts on what is shown below",
            "The clauses of the picked contracts on these metrics, over time: with confidence, from the evaluator.",
            Query(clauses, names),
            status_mapping(),
            STATUS_COLOURS[Status.PASS],
        )
    ratio = raw.histogram("ratio")
    yield _graph(
        1,
        "Importance ratio of sampled tokens",
        f"{QUANTITIES['ratio'].meaning} Far from 1 means that the update is about tokens that the trainer would hardly "
        "have sampled, or would have sampled far more often.",
        [(raw.quantile(rank, ratio), f"{_CELL} p{rank * 100:g}") for rank in (0.01, 0.5, 0.99, 0.999)],
        raw.limits(contracts, lambda clause: clause.metric == "ratio" and clause.parsed_statistic.kind == "quantile"),
        step,
    )
    scale = _constants(contracts, "clip_budget_share")
    if scale:
        yield _graph(
            2,
            "Share of the clip range that the kernels spend",
            f"{DERIVED['clip_budget_share'].meaning} At 100 % a token is clipped for the kernels' sake alone.",
            [(raw.scaled(raw.mean("abs_log_ratio"), scale), _CELL)],
            _mean_limits(contracts, "clip_budget_share"),
            step,
            "percentunit",
        )
    yield _graph(
        3,
        "Effective sample size, per sample",
        "1 / (1 + chi-square) of the importance weights: which share of the roll-outs is left to learn from. Token "
        "weights and whole-sequence weights; the latter fall much faster with length.",
        [
            (f"1 / (1 + {raw.mean('chi2_token')})", f"{_CELL} tokens"),
            (f"1 / (1 + {raw.mean('chi2_seq')})", f"{_CELL} sequences"),
        ],
        "",
        step,
        "percentunit",
    )
    for id, title, key in (
        (4, "Total variation per token", "tv_token"),
        (5, "Total variation per sequence", "tv_seq"),
        (6, "KL(Q||P), k3", "k3"),
    ):
        about = QUANTITIES[key].meaning
        yield _graph(id, title, about, [(raw.mean(key), _CELL)], _mean_limits(contracts, key), step)
    yield _graph(
        7,
        "Advantage-signed drift",
        "Mean of (w-1)A over tokens with a positive and with a negative advantage: what the mismatch adds to the push "
        "towards good tokens and away from bad ones. Of opposite signs and equal size they only slow training; of one "
        "sign they bias it. Recorded where advantages are given.",
        [
            (raw.mean("advantage_drift_positive"), f"{_CELL} A > 0"),
            (raw.mean("advantage_drift_negative"), f"{_CELL} A < 0"),
        ],
        _mean_limits(contracts, "advantage_drift_positive", "advantage_drift_negative"),
        step,
    )
    for id, title, key in (
        (8, "Most that the reward can differ", "reward_drift_bound"),
        (9, "Most that the gradient can be biased", "gradient_bias_bound"),
    ):
        constants = _constants(contracts, key)
        if constants:
            yield _graph(
                id,
                title,
                f"{DERIVED[key].meaning} With the assumptions of each contract; contracts that do not state them are "
                "left out.",
                [(raw.scaled(raw.mean(DERIVED[key].base), constants), _CELL)],
                _mean_limits(contracts, key),
                step,
            )
    yield _graph(
        10,
        "Support deficit",
        f"{DERIVED['support_deficit'].meaning} Below zero is sampling noise.",
        [(f"1 - {raw.mean('ratio')}", _CELL)],
        _mean_limits(contracts, "support_deficit"),
        step,
    )
    yield _graph(
        11,
        "Weight lag",
        f"{QUANTITIES['weights_lag'].meaning} Look here first: with stale weights every other number speaks of the "
        "policy's own change.",
        [
            (raw.quantile(1.0, raw.histogram("weights_lag")), f"{_CELL} largest"),
            (raw.mean("weights_lag"), f"{_CELL} mean"),
        ],
        raw.limits(contracts, lambda clause: clause.metric == "weights_lag"),
        step,
    )
    yield from _quarantine(step)
    yield _graph(
        12,
        "Tokens measured",
        "Tokens per second that the numbers here rest on.",
        [(f"histogram_count({raw.histogram('tv_token')})", _CELL)],
        "",
        step,
        "cps",
    )


def _quarantine(step: str) -> Iterator[Any]:
    """What is kept out of training. Without slices, as the trainer counts it."""
    attributes = ("kc.contract", "kc.outcome")
    legend = " · ".join(f"{{{{{label(name)}}}}}" for name in attributes)
    tv, tokens, sequences = (
        queries.rate(f"kc.quarantine.{name}", attributes) for name in ("tv", "tokens", "sequences")
    )
    source = "From the trainer, by way of the Collector; empty where it does not quarantine roll-outs."
    yield graph_panel(
        14,
        "Drift of what is trained on, and of what is quarantined",
        "Total variation per token of the sequences that were kept and of those that were not: what quarantine spares "
        f"the update. {source}",
        (Query(f"{tv} / {tokens}", legend, step=step),),
        "short",
    )
    yield graph_panel(
        15,
        "Sequences kept and quarantined",
        f"{METRICS['kc.quarantine.sequences'].meaning} Per second. {source}",
        (Query(sequences, legend, step=step),),
        "cps",
    )


def _graph(
    id: int, title: str, about: str, series: Iterable[tuple[str, str]], limit: str, step: str, unit: str = "short"
) -> Any:
    shown = [Query(expression, name, step=step) for expression, name in series]
    if limit:
        shown.append(Query(limit, f"{_CELL} limit"))
    return limit_line(graph_panel(id, title, f"{about} {_SOURCE}", shown, unit))


def _constants(contracts: Iterable[Contract], metric: str) -> dict[str, float]:
    scales = {contract.name: scale_of(metric, contract.assumptions) for contract in contracts}
    return {name: scale for name, scale in scales.items() if scale}


def _mean_limits(contracts: Iterable[Contract], *metrics: str) -> str:
    def wanted(clause: Clause) -> bool:
        return clause.metric in metrics and clause.parsed_statistic.kind == "mean"

    return raw.limits(contracts, wanted)


def _clauses(contracts: Iterable[Contract]) -> str:
    parts = []
    for contract in contracts:
        ids = [clause.id for clause in contract.clauses if clause.metric in _METRICS]
        if ids:
            one = f'{label("kc.contract")}="{contract.name}"'
            parts.append(queries.verdicts(one, queries.one_of("kc.clause", ids)))
    return " or ".join(parts)
