"""Checks of a contract's assumptions against the data; a clause does not PASS on an assumption that the data breaks.

A derived metric is a mean times factors that the contract states: the range of rewards, the longest sequence, the
largest advantage, the largest norm of a token's score. Recorders send what can be measured of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kc_otel.contract.clause import Clause
from kc_otel.contract.model import Assumptions
from kc_otel.contract.registry.clause_metrics import DERIVED, SAMPLING, Unit
from kc_otel.contract.slices import ALL
from kc_otel.judge.contract_state import ContractState
from kc_otel.judge.series import LONG, Pair
from kc_otel.stats import Binned

_MEASURED: Final = {
    "horizon": ("sequence_tokens", "a sequence had {seen:,.0f} tokens or more"),
    "advantage_max": ("advantage_abs", "an advantage of {seen:.3g} or more occurred"),
    "score_norm_max": ("score_norm", "a token's score had a norm of {seen:.3g} or more"),
}
"""Assumption -> key in `SAMPLING` of what is measured of it, and what breaks it."""


def measurable(clause: Clause) -> tuple[str, ...]:
    """Assumptions that a clause rests on and that can be compared with what arrives."""
    needs = DERIVED[clause.metric].needs if clause.metric in DERIVED else ()
    return tuple(name for name in needs if name in _MEASURED or name == "reward_range")


def broken_assumption(
    clause: Clause, assumptions: Assumptions, observed: Callable[[str], Binned | None], outside: Callable[[], int]
) -> str:
    """Return the first assumption of a clause that the data breaks, as a phrase for the verdict; empty if none.

    Args:
        clause: The clause.
        assumptions: Assumptions of the contract.
        observed: Returns the observations of a quantity of `SAMPLING`, by its key.
        outside: How many rewards were outside of their range.
    """
    for name in measurable(clause):
        if name == "reward_range":
            if count := outside():
                low, high = assumptions.reward_range or (0.0, 0.0)
                what = "a reward is" if count == 1 else f"{count:,} rewards are"
                return f"assumptions.reward_range is [{low:g}, {high:g}], but {what} outside of it"
            continue
        quantity, breach = _MEASURED[name]
        assumed, sample = getattr(assumptions, name), observed(quantity)
        if assumed is None or sample is None or not sample.total:
            continue
        seen = float(sample.lower[-1])  # no observation of the last bucket is below its lower edge
        if seen > assumed:
            return f"assumptions.{name} is {assumed:g}, but {breach.format(seen=seen)}"
    return ""


_JUDGED_UNITS: Final = frozenset({Unit.PROMPT, Unit.STEP})


def sampling_notes(state: ContractState) -> list[str]:
    """A sentence for each pair of kernel versions with prompts, or steps, in the long window."""
    judged = [clause.quantity for clause in state.contract.clauses if clause.averaged in _JUDGED_UNITS]
    names = {quantity.name for quantity in judged if quantity is not None}
    pairs = {pair for name in names for pair in state.pairs(name, ALL) if _held(state, name, pair) is not None}
    return [_said(state, pair, several=len(pairs) > 1) for pair in sorted(pairs)]


def _said(state: ContractState, pair: Pair, *, several: bool) -> str:
    whose = f" of kernel {pair[1]}" if several else ""
    rollouts = _held(state, SAMPLING["prompt_rollouts"].name, pair)
    if rollouts is None:
        return (
            f"Assumes that sequences{whose} are independent: no recorder says which of them answer one prompt "
            "(`groups=` or `prompt_ids=`)."
        )
    effect, mean = _held(state, SAMPLING["design_effect"].name, pair), rollouts.sum / rollouts.total
    said = f"Prompts{whose} count once, with {mean:.3g} rollouts on average"
    if effect is not None:
        said += f"; {effect.sum / effect.total:.2g} of these are worth one independent sequence (design effect)"
    return f"{said}."


def _held(state: ContractState, metric: str, pair: Pair) -> Binned | None:
    """Return the long window's content of a metric; None if empty."""
    series = state.pairs(metric, ALL).get(pair)
    held = None if series is None else series.histories[LONG].binned(state.clock)
    return None if held is None or not held.total else held
