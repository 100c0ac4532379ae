"""Origins of a difference: the kernels or the age of the weights that sampled, and the place in the responses.

Tokens that the training kernel's own weights sampled, slice `all`, show the kernels' drift; those of older weights,
slice `stale`, show it and the change of the policy since then together. With a share s of stale observations, means m
of the former and n of the latter, the total is (1 - s) m + s n, of which m is the kernels' and s (n - m) is the
staleness'. Four one-sided bounds at a quarter of alpha bound all three at 1 - alpha, for the share that the window saw.
A prompt whose rollouts are of several ages is an observation at each of them: shares are those of tokens.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final

from kc_otel.contract.clause import Clause
from kc_otel.contract.model import Contract
from kc_otel.contract.registry.clause_metrics import QUANTITIES, TV_PLACE, Unit
from kc_otel.contract.slices import ALL, PLACES, STALE, STALE_BY_LAG
from kc_otel.judge.contract_state import ContractState
from kc_otel.judge.recorders import KernelInfo, kernel_names
from kc_otel.judge.series import LONG, SHORT, Pair
from kc_otel.judge.statistics import clause_interval, metric_name
from kc_otel.judge.verdict import Causes, Cell, OfLag, Part, Status, Verdict
from kc_otel.judge.verdicts import cells_of, selected
from kc_otel.stats import Binned, Interval, mean_interval

TOKENS: Final = "tv_token"
"""Key of the quantity that has an observation for each token, whatever a contract limits."""
_UNITS = frozenset({Unit.TOKEN, Unit.SEQUENCE, Unit.PROMPT})
_LAGS = dict(zip((ALL, *STALE_BY_LAG), ("0", "1", "2-3", "4-7", "8+"), strict=True))


def causes_of(state: ContractState, now: float) -> dict[Cell, Causes]:
    """Causes by the cell of each clause on a mean, where anything stale was observed; of a lag, the first clause's."""
    contract, found = state.contract, dict[Cell, Causes]()
    tokens = QUANTITIES[TOKENS].name

    def sample(metric: str, pair: Pair, window: int, slice: str) -> Binned | None:
        series = state.pairs(metric, slice).get(pair)
        return None if series is None else state.binned(series, window, now)

    for clause in contract.clauses:
        if not _additive(clause):
            continue
        metric = metric_name(clause)
        for pair in state.pairs(metric, STALE):
            for window in (SHORT, LONG):
                split = split_by_cause(
                    contract, clause, partial(sample, metric, pair, window), partial(sample, tokens, pair, window)
                )
                if split is not None:
                    found[Cell(contract.name, clause.id, ALL, *pair)] = split
                    break
    first = {cell.pair: of for cell, of in reversed(found.items())}
    for clause in contract.clauses:
        if clause.metric == "weights_lag":
            found |= {Cell(contract.name, clause.id, ALL, *pair): of for pair, of in first.items()}
    return found


def split_by_cause(
    contract: Contract, clause: Clause, sample: Callable[[str], Binned | None], tokens: Callable[[str], Binned | None]
) -> Causes | None:
    """Split a clause's mean into its causes; None where it is no mean, or older weights sampled none of it.

    `sample` returns what was observed on a slice: `all`, `stale`, or one of `STALE_BY_LAG`; `tokens` an observation for
    each token of a slice, None where tokens were not recorded.
    """
    if not _additive(clause):
        return None
    alpha = (1.0 - contract.observability.confidence) / 4.0

    def within(slice: str) -> Interval:
        of = sample(slice)
        if of is None:
            return Interval(math.nan, -math.inf, math.inf, 0, "")
        return clause_interval(clause, contract.assumptions, of, alpha_lower=alpha, alpha_upper=alpha)

    stale = within(STALE)
    if not stale.samples:
        return None
    by_lag = {slice: within(slice) for slice in _LAGS}
    own = by_lag[ALL]
    weight = {slice: of.samples for slice, of in (*by_lag.items(), (STALE, stale))}
    if clause.quantity is not None and clause.quantity.per is Unit.PROMPT:
        of_tokens = {slice: tokens(slice) if samples else None for slice, samples in weight.items()}
        if of_tokens[STALE] is not None:
            weight = {slice: 0 if of is None else of.total for slice, of in of_tokens.items()}
    observed = max(weight[ALL] + weight[STALE], 1)
    lags = tuple(
        OfLag(of.estimate, of.lower, of.upper, lag=_LAGS[slice], share=weight[slice] / observed)
        for slice, of in by_lag.items()
        if of.samples
    )
    limit, share = clause.limit_for(ALL), weight[STALE] / observed
    if not own.samples:
        unknown = Part(math.nan, -math.inf, math.inf)
        total = Part(stale.estimate, stale.lower, stale.upper)
        said = f"all of it was sampled by older weights, so kernel drift is not known; in total {total}"
        return Causes(clause.id, limit, 1.0, total, unknown, unknown, lags, said)

    def mixed(fresh: float, old: float) -> float:
        return (1.0 - share) * fresh + share * old

    kernel = Part(own.estimate, own.lower, own.upper)
    total = Part(mixed(own.estimate, stale.estimate), mixed(own.lower, stale.lower), mixed(own.upper, stale.upper))
    added = stale.estimate - own.estimate, stale.lower - own.upper, stale.upper - own.lower
    staleness = Part(*(share * side for side in added))
    return Causes(clause.id, limit, share, total, kernel, staleness, lags, to_blame(limit, total, kernel, staleness))


def to_blame(limit: float, total: Part, kernel: Part, staleness: Part) -> str:
    """Say which cause is to blame, with its numbers.

    A part is to blame for itself where it alone is above the limit. Staleness is to blame, too, where it takes a total
    above the limit whose kernels' part is not.
    """
    numbers = f"kernel drift {kernel}, weights' age adds {staleness}, in total {total}"
    if kernel.lower > limit:
        what = "both grew" if staleness.lower > limit else "the kernels' drift grew"
        return f"{what}: {numbers}"
    if not (staleness.lower > 0.0 and total.lower > limit):
        return numbers
    own = "not the kernels' drift" if kernel.upper <= limit else "and the kernels' drift is undecided"
    return f"staleness grew, {own}: {numbers}"


def passes_against(verdicts: Sequence[Verdict], kernels: Iterable[KernelInfo]) -> dict[Cell, str]:
    """For cells that FAIL, say against which other training kernel the same version passes.

    It is empty where another version passes against the one of the FAIL: the version may be to blame.
    """
    failing, found = selected(verdicts, {Status.FAIL}), dict[Cell, str]()
    if not failing:
        return found
    places, passing = {verdict.cell.place for verdict in failing}, defaultdict[tuple[str, str], list[Cell]](list)
    for verdict in selected(verdicts, (), [cell for cell in cells_of(verdicts) if cell.place in places]):
        if verdict.status is Status.PASS:
            passing[verdict.cell.place].append(verdict.cell)
    names: dict[tuple[str, str], str] = {}
    for cell in [verdict.cell for verdict in failing]:
        beside, train = passing[cell.place], cell.kernel_train
        others = [of.kernel_train for of in beside if of.kernel_inference == cell.kernel_inference]
        if any(of.kernel_train == train != of.kernel_inference for of in beside):
            found[cell] = ""
        elif others:
            names = names or kernel_names(kernels)
            found[cell] = f"the same version passed against {names.get(('train', others[0]), others[0])}"
    return found


def _additive(clause: Clause) -> bool:
    """Return whether a clause limits a mean, of which the parts of a sample have shares."""
    of = clause.quantity
    if of is None or clause.opposite is not None or clause.metric == "support_deficit":
        return False
    return clause.parsed_statistic.kind == "mean" and of.per in _UNITS


def drift_by_place(state: ContractState, pair: Pair, now: float) -> dict[str, Interval]:
    """The drift in each of PLACES that was observed, in the short window, and where that is empty in the long one."""
    alpha = (1.0 - state.contract.observability.confidence) / 2.0
    of = {place: state.pairs(TV_PLACE.name, place).get(pair) for place in PLACES}
    for window in (SHORT, LONG):
        found = {
            place: mean_interval(
                state.binned(series, window, now), low=0.0, high=1.0, alpha_lower=alpha, alpha_upper=alpha
            )
            for place, series in of.items()
            if series is not None
        }
        if any(interval.samples for interval in found.values()):
            return {place: interval for place, interval in found.items() if interval.samples}
    return {}
