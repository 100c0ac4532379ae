"""PromQL of the dashboards on what the evaluator and the recorders export.

`$contract`, `$slice`, `$kernel_train` and `$kernel_inference` are variables of the dashboards, and a selector uses
those whose attribute its metric has. Numbers from drift histograms carry no confidence: verdicts do.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from kc_otel.contract.registry.clause_metrics import AVERAGED, RECORDED, Unit
from kc_otel.contract.registry.own_metrics import INVALID_ONCE, METRICS, label, prometheus_name, selector
from kc_otel.generate.alert_texts import FRESH_SECONDS, RETIRED_AFTER
from kc_otel.judge.verdict import Status

CELL: Final = ("kc.contract", "kc.clause", "kc.slice", "kc.kernel.train", "kc.kernel.inference")
PAIR: Final = ("kc.contract", "kc.kernel.train", "kc.kernel.inference")
ROUTE: Final = ("kc.contract", "kc.slice", "kc.kernel.inference")
STREAM: Final = ("kc.contract", "kc.slice", "kc.kernel.train", "kc.kernel.inference")
_CLAUSE: Final = CELL[:2]
_OF_SLICE: Final = CELL[:3]
SEVERITIES: Final = ("info", "warning", "critical")
"""From the least to the worst; the code of a severity is its place, from 1."""

ACTION_BITS: Final = (
    ("halt", "halt"),
    ("route:.*", "route to training kernel"),
    ("quarantine-rollouts", "quarantine of rollouts"),
    ("hold-promotion", "hold of promotion"),
    ("resync-weights", "resync of weights"),
    ("sample-more|locate", "closer measurement"),
    ("notify|webhook:.*", "message"),
)
"""(regular expression of `kc.action`, in words) of what a step can do; the first has the highest bit."""

_VARIABLES: Final = {
    "kc.contract": "contract",
    "kc.slice": "slice",
    "kc.kernel.train": "kernel_train",
    "kc.kernel.inference": "kernel_inference",
}


def picked(attributes: Iterable[str]) -> tuple[str, ...]:
    """Matchers of what a person picked, for those of the attributes that there is a variable for."""
    return tuple(f'{label(name)}=~"${_VARIABLES[name]}"' for name in attributes if name in _VARIABLES)


def of_picked(metric: str, *more: str) -> str:
    """The series of a metric that a person picked; `more` are further matchers."""
    return selector(metric, None, *picked(METRICS[metric].attributes), *more)


def labels(attributes: Iterable[str]) -> str:
    """The labels of attributes, as PromQL lists them."""
    return ", ".join(map(label, attributes))


def by(attributes: Iterable[str], expression: str, how: str = "max") -> str:
    """`expression` aggregated by attributes, or as a whole; evaluators that run side by side then count once."""
    names = labels(attributes)
    return f"{how} by ({names}) ({expression})" if names else f"{how}({expression})"


def cells(metric: str, *more: str, attributes: Iterable[str] = CELL, how: str = "max") -> str:
    """A metric of the picked cells; `more` are further matchers."""
    return by(attributes, of_picked(metric, *more), how)


def own(metric: str) -> str:
    """A metric by all of its attributes."""
    return cells(metric, attributes=METRICS[metric].attributes)


def _spread(of_slice: str) -> str:
    """A value of a clause on a slice, for every cell of it."""
    return f"0 * {cells('kc.verdict')} + on ({labels(_OF_SLICE)}) group_left () ({of_slice})"


_JUDGED: Final = f"last_over_time({of_picked('kc.evaluator.last_evaluation')}[{RETIRED_AFTER}])"
_OLDEST: Final = by(("kc.contract",), _JUDGED)
AGE: Final = f"time() - min({_OLDEST})"
"""Seconds since the last evaluation of the picked contract that has waited longest."""
_LIVING: Final = f"{of_picked('kc.evaluator.last_evaluation')} > time() - {FRESH_SECONDS}"
_LIVES: Final = f"{_LIVING} unless on () ({_OLDEST} unless on ({label('kc.contract')}) ({_LIVING}))"
"""Some series while evaluators judge every picked contract."""
VERDICTS: Final = cells("kc.verdict", attributes=_OF_SLICE)
ALERTS: Final = f"{own('kc.alert.firing')} >= 1"
ACTIONS: Final = f"{own('kc.action.active')} >= 1"
SEVERITY: Final = _spread(
    by(
        _OF_SLICE,
        " or ".join(
            f"{code} * ({cells('kc.alert.firing', matcher, attributes=(*_OF_SLICE, 'kc.severity'))} >= 1)"
            for code, name in enumerate(SEVERITIES, start=1)
            for matcher in [f'{label("kc.severity")}="{name}"']
        ),
    )
)


def action_bits() -> str:
    """Everything that the firing steps do for each cell, one bit for each of ACTION_BITS."""
    parts = []
    for place, (pattern, _) in enumerate(reversed(ACTION_BITS)):
        part = cells("kc.action.active", f'{label("kc.action")}=~"{pattern}"', attributes=_OF_SLICE)
        # A label of its own keeps the parts apart, or `or` would drop all but the first.
        parts.append(f'label_replace({2**place} * ({part} >= bool 1), "{label("kc.action")}", "{place}", "", "")')
    return _spread(by(_OF_SLICE, " or ".join(parts), "sum"))


def promises() -> str:
    """Every cell, with what its clause allows as a label; of several versions of a contract one counts."""
    on, said = labels(_CLAUSE), "kc.clause.promise"
    single = f"topk by ({on}) (1, {by((*_CLAUSE, said), selector('kc.clause.info', None, *picked(_CLAUSE)))})"
    return f"0 * {cells('kc.verdict')} + on ({on}) group_left ({label(said)}) {single}"


def verdicts_broken(*, ever: bool) -> str:
    """Those of clauses and slices that were FAIL or INVALID_INPUT at any time in the range; or that never were."""
    worst = by(_OF_SLICE, f"max_over_time({of_picked('kc.verdict')}[$__range] @ end())")
    failed = f"on ({labels(_OF_SLICE)}) {worst} >= {Status.FAIL.code}"
    return f"{VERDICTS} {'and' if ever else 'unless'} {failed}"


def now(expression: str) -> str:
    """A number that evaluators say, 0 where they have nothing to say, nothing while a picked contract is not judged."""
    return f"({expression} or vector(0)) and on () ({_LIVES})"


def known(series: str) -> str:
    """Number of series of contracts that are judged; 0 only while every picked contract is."""
    return f"count(({series}) and on ({label('kc.contract')}) ({_LIVING})) or (vector(0) and on () ({_LIVES}))"


def since(*more: str) -> str:
    """Unix time, milliseconds, of each cell's present verdict, by the evaluator that has known it longest."""
    return f"1000 * {cells('kc.verdict.since', *more, how='min')}"


def margin_share(*more: str) -> str:
    """The smallest margin as a share of the limit, where the limit is not zero."""
    return f"{cells('kc.bound.margin', *more, how='min')} / (abs({cells('kc.bound.limit', *more)}) > 0)"


def of_metrics(expression: str, *metrics: str, statistic: str = "") -> str:
    """Restrict an expression to clauses on these metrics and, by a regular expression, statistics."""
    matchers = [f'{label("kc.clause.metric")}=~"{"|".join(metrics)}"']
    if statistic:
        matchers.append(f'{label("kc.clause.statistic")}=~"{statistic}"')
    return f"{expression} and on ({labels(_CLAUSE)}) {selector('kc.clause.info', None, *matchers)}"


def limits(*metrics: str, statistic: str = "") -> str:
    """The limits of the clauses on these metrics, the smallest by contract and slice."""
    return by(STREAM[:2], of_metrics(of_picked("kc.bound.limit"), *metrics, statistic=statistic), "min")


def minimum_step() -> str:
    """Smallest step of rates of what recorders send, seconds: four hold three exports, three of a heartbeat."""
    return f"ceil(clamp_min(max({of_picked('kc.contract.heartbeat')}), 120) / 4) or vector(30)"


_TO_TRAIN: Final = f'{label("kc.route.kernel")}="train-kernel"'
ROUTES: Final = f"({cells('kc.route', _TO_TRAIN, attributes=ROUTE)} == 1) or 0 * {cells('kc.route', attributes=ROUTE)}"
"""1 for slices that the decision table sends to the training kernel instead of a version, 0 for the others."""


def _of_contract(metric: str, *more: str) -> str:
    """A counter of the picked contract: counters are of all its kernels, and some senders name none."""
    once = (INVALID_ONCE,) if metric == "kc.input.invalid" else ()
    return selector(metric, None, *picked({"kc.contract"}.intersection(METRICS[metric].attributes)), *once, *more)


def _rate(selected: str) -> str:
    return f"rate({selected}[$__rate_interval])"


def rate(metric: str, attributes: Iterable[str], *more: str) -> str:
    """Increase per second of a counter."""
    return by(attributes, _rate(_of_contract(metric, *more)), "sum")


def increase(metric: str) -> str:
    """Increase of a recorders' counter over the dashboard's range; nothing where no recorder or evaluator is heard."""
    of, recorders = _of_contract(metric), health("kc.recorder.sampling")
    # `increase` does not count the first value of a series that appears, and a store forgets what was before a day.
    seen, before = f"last_over_time({of}[$__range])", f"last_over_time({of}[1d] offset $__range)"
    # It does count what came after a restart: of a series that began within the range, the larger one counts.
    grown, new = f"increase({of}[$__range])", f"({seen} unless {before})"
    return f"sum({grown} >= {new} or {new} or {grown}) or (0 * {recorders} and on () ({_LIVES}))"


def health(metric: str, attributes: Iterable[str] = (), how: str = "sum") -> str:
    """A gauge of the evaluator or the recorders."""
    kernels = {"kc.kernel.train", "kc.kernel.inference"}  # nobody picks one on the board of health
    selected = selector(metric, None, *picked(name for name in METRICS[metric].attributes if name not in kernels))
    return by(attributes, selected, how)


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
    of = ("kc.contract",)
    factor = by(of, selector("kc.contract.factor", {"kc.clause.metric": metric}))
    return f"{mean(quantity)} * on ({labels(of)}) group_left () {factor}"
