"""PromQL of the dashboards on what the evaluator and the recorders export.

`$contract`, `$slice`, `$kernel_train` and `$kernel_inference` are variables of the dashboards, and a selector uses
those whose attribute its metric has. Numbers from drift histograms carry no confidence: verdicts do.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from kc_otel.contract.prometheus_names import INVALID_ONCE, label, prometheus_name, selector
from kc_otel.contract.registry.clause_metrics import AVERAGED, RECORDED, Unit
from kc_otel.contract.registry.own_metrics import METRICS
from kc_otel.generate.state_alerts import LIVING
from kc_otel.judge.verdict import Status

CELL: Final = ("kc.contract", "kc.clause", "kc.slice", "kc.kernel.train", "kc.kernel.inference")
PAIR: Final = ("kc.contract", "kc.kernel.train", "kc.kernel.inference")
SEVERITIES: Final = ("info", "warning", "critical")
"""From the least to the worst; the code of a severity is its place, from 1."""

ACTION_BITS: Final = (
    ("halt", "halt", "training halted"),
    ("route", "route:.*", "sent to training kernel"),
    ("quarantine", "quarantine-rollouts", "rollouts quarantined"),
    ("hold", "hold-promotion", "promotion held"),
    ("resync", "resync-weights", "weights asked for again"),
    ("sample", "sample-more|locate", "looking closer"),
    ("tell", "notify|webhook:.*", "people told"),
)
"""(name, regular expression of `kc.action`, in words) of what a step can do; the first has the highest bit."""

_VARIABLES: Final = {
    "kc.contract": "contract",
    "kc.slice": "slice",
    "kc.kernel.train": "kernel_train",
    "kc.kernel.inference": "kernel_inference",
}
_OF_SLICE: Final = ("kc.contract", "kc.clause", "kc.slice")
STREAM: Final = ("kc.contract", "kc.slice", "kc.kernel.train", "kc.kernel.inference")


def picked(attributes: Iterable[str]) -> tuple[str, ...]:
    """Matchers of what a person picked, for those of the attributes that there is a variable for."""
    return tuple(f'{label(name)}=~"${_VARIABLES[name]}"' for name in attributes if name in _VARIABLES)


def by(attributes: Iterable[str], expression: str, how: str = "max") -> str:
    """`expression` aggregated by attributes, or as a whole; evaluators that run side by side then count once."""
    names = ", ".join(map(label, attributes))
    return f"{how} by ({names}) ({expression})" if names else f"{how}({expression})"


def cells(metric: str, *more: str, attributes: Iterable[str] = CELL, how: str = "max") -> str:
    """A metric of the picked cells; `more` are further matchers."""
    return by(attributes, selector(metric, None, *picked(METRICS[metric].attributes), *more), how)


def verdicts() -> str:
    """Worst verdict of each clause and slice, over all pairs of kernel versions."""
    return cells("kc.verdict", attributes=_OF_SLICE)


def verdicts_broken(*, ever: bool) -> str:
    """Those of clauses and slices that were FAIL or INVALID_INPUT at any time in the range; or that never were."""
    selected = selector("kc.verdict", None, *picked(METRICS["kc.verdict"].attributes))
    worst = by(_OF_SLICE, f"max_over_time({selected}[$__range] @ end())")
    failed = f"on ({', '.join(map(label, _OF_SLICE))}) {worst} >= {Status.FAIL.code}"
    return f"{verdicts()} {'and' if ever else 'unless'} {failed}"


def now(expression: str) -> str:
    """A number that an evaluator says, 0 where it has nothing to say, and nothing where no evaluator lives."""
    return f"({expression} or vector(0)) and on () ({LIVING})"


def count(expression: str) -> str:
    """Number of series there are now, as in `now`."""
    return now(f"count({expression})")


def since(*more: str) -> str:
    """Unix time, milliseconds, of each cell's present verdict, by the evaluator that has known it longest."""
    return f"1000 * {cells('kc.verdict.since', *more, how='min')}"


def margin_share(*more: str) -> str:
    """The smallest margin as a share of the limit, where the limit is not zero."""
    return f"{cells('kc.bound.margin', *more, how='min')} / (abs({cells('kc.bound.limit', *more)}) > 0)"


def not_holding(expression: str) -> str:
    """Restrict an expression by cells to cells that are not PASS."""
    on = ", ".join(label(name) for name in CELL)
    return f"({expression}) and on ({on}) {cells('kc.verdict')} > {Status.PASS.code}"


def alerts() -> str:
    """1 for each step of the policy that fires."""
    return f"{cells('kc.alert.firing', attributes=METRICS['kc.alert.firing'].attributes)} >= 1"


def severity() -> str:
    """Code of the worst severity that fires for each cell."""
    worst = " or ".join(
        f"{code} * ({cells('kc.alert.firing', matcher, attributes=(*_OF_SLICE, 'kc.severity'))} >= 1)"
        for code, name in enumerate(SEVERITIES, start=1)
        if (matcher := f'{label("kc.severity")}="{name}"')
    )
    return _spread(by(_OF_SLICE, worst))


def actions() -> str:
    """1 for each action of the steps that fire."""
    return f"{cells('kc.action.active', attributes=METRICS['kc.action.active'].attributes)} >= 1"


def action_bits() -> str:
    """Everything that the firing steps do for each cell, one bit for each of ACTION_BITS."""
    parts = []
    for place, (_, pattern, _) in enumerate(reversed(ACTION_BITS)):
        matcher = f'{label("kc.action")}=~"{pattern}"'
        # A label of its own keeps the parts apart, or `or` would drop all but the first.
        part = cells("kc.action.active", matcher, attributes=_OF_SLICE)
        parts.append(f'label_replace({2**place} * ({part} >= bool 1), "{label("kc.action")}", "{place}", "", "")')
    return _spread(by(_OF_SLICE, " or ".join(parts), "sum"))


def promises() -> str:
    """Every cell, with what its clause allows as a label; of several versions of a contract one counts."""
    of, said = ("kc.contract", "kc.clause"), "kc.clause.promise"
    on = ", ".join(map(label, of))
    single = f"topk by ({on}) (1, {by((*of, said), selector('kc.clause.info', None, *picked(of)))})"
    return f"0 * {cells('kc.verdict')} + on ({on}) group_left ({label(said)}) {single}"


def of_metrics(expression: str, *metrics: str, statistic: str = "") -> str:
    """Restrict an expression to clauses on these metrics and, by a regular expression, statistics."""
    matchers = [f'{label("kc.clause.metric")}=~"{"|".join(metrics)}"']
    if statistic:
        matchers.append(f'{label("kc.clause.statistic")}=~"{statistic}"')
    on = ", ".join(map(label, ("kc.contract", "kc.clause")))
    return f"{expression} and on ({on}) {selector('kc.clause.info', None, *matchers)}"


def limits(*metrics: str, statistic: str = "") -> str:
    """The limits of the clauses on these metrics, the smallest by contract and slice."""
    limit = selector("kc.bound.limit", None, *picked(METRICS["kc.bound.limit"].attributes))
    return by(("kc.contract", "kc.slice"), of_metrics(limit, *metrics, statistic=statistic), "min")


def in_units(*matchers: str) -> str:
    """One series whose label `kc_clause_unit` is Grafana's name of a clause's unit: none, s, or a suffix."""
    unit = label("kc.clause.unit")
    single = f"topk(1, {by(('kc.clause.unit',), selector('kc.clause.info', None, *matchers), 'group')})"
    plain = f'label_replace({single}, "{unit}", "none", "{unit}", "1")'
    return f'label_replace({plain}, "{unit}", "suffix: $1", "{unit}", "[{{](.*)[}}]")'


def minimum_step() -> str:
    """Smallest step of rates of what recorders send, seconds: four of them, the rate interval, hold three exports.

    Recorders export three times per heartbeat, which is more seldom than the data source is told.
    """
    slowest = f"max({selector('kc.contract.heartbeat', None, *picked(('kc.contract',)))})"
    return f"ceil(clamp_min({slowest}, 120) / 4) or vector(30)"


ROUTE: Final = ("kc.contract", "kc.slice", "kc.kernel.inference")
"""Attributes that tell routes apart."""


def routes() -> str:
    """1 for slices that the decision table sends to the training kernel instead of a version, 0 for the others."""
    return f"({to_train()}) or 0 * {cells('kc.route', attributes=ROUTE)}"


def to_train(attributes: tuple[str, ...] = ROUTE) -> str:
    """1 for slices that the decision table sends to the training kernel."""
    matcher = f'{label("kc.route.kernel")}="train-kernel"'
    return f"{cells('kc.route', matcher, attributes=attributes)} == 1"


def _of_contract(metric: str) -> tuple[str, ...]:
    """Matchers of the picked contract: counters are of all its kernels, and some senders name none."""
    once = (INVALID_ONCE,) if metric == "kc.input.invalid" else ()
    return (*picked({"kc.contract"}.intersection(METRICS[metric].attributes)), *once)


def rate(metric: str, attributes: Iterable[str], *more: str) -> str:
    """Increase per second of a counter."""
    selected = selector(metric, None, *_of_contract(metric), *more)
    return by(attributes, _rate(selected), "sum")


def increase(metric: str) -> str:
    """Increase of a recorders' counter over the dashboard's range; nothing where no evaluator lives."""
    selected = selector(metric, None, *_of_contract(metric))
    return f"sum(increase({selected}[$__range])) or (vector(0) and on () ({LIVING}))"


def health(metric: str, attributes: Iterable[str] = (), how: str = "sum") -> str:
    """A gauge of the evaluator or the recorders."""
    kernels = {"kc.kernel.train", "kc.kernel.inference"}  # nobody picks one on the board of health
    selected = selector(metric, None, *picked(name for name in METRICS[metric].attributes if name not in kernels))
    return by(attributes, selected, how)


def _spread(of_slice: str) -> str:
    """A value of a clause on a slice, for every cell of it."""
    on = ", ".join(label(name) for name in _OF_SLICE)
    return f"0 * {cells('kc.verdict')} + on ({on}) group_left () ({of_slice})"


def histogram(quantity: str, attributes: Iterable[str] = STREAM[:2]) -> str:
    """Observations per second of a quantity of the registry, as a histogram."""
    return by(attributes, _rate(f"{prometheus_name(RECORDED[quantity])}{{{', '.join(picked(STREAM))}}}"), "sum")


def mean(quantity: str) -> str:
    """Exact mean of a quantity by contract and slice, in the first unit that clauses make recorders send."""
    averaged = (AVERAGED.get((quantity, unit)) for unit in (Unit.PROMPT, Unit.SEQUENCE, Unit.STEP))
    sent = (quantity, *(of.key for of in averaged if of is not None))
    means = [f"histogram_avg({histogram(key)})" for key in sent]
    return means[0] if len(means) == 1 else f"({' or '.join(means)})"


def quantile(rank: float, of: str) -> str:
    """A quantile of a histogram, to its resolution."""
    return f"histogram_quantile({rank:g}, {of})"


def scaled(quantity: str, metric: str) -> str:
    """A derived metric by contract and slice: the mean of its base times the contract's factor, where it has one."""
    of = label("kc.contract")
    factor = by(("kc.contract",), selector("kc.contract.factor", {"kc.clause.metric": metric}))
    return f"{mean(quantity)} * on ({of}) group_left () {factor}"


def _rate(selected: str) -> str:
    return f"rate({selected}[$__rate_interval])"
