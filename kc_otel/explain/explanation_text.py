"""The explanation as lines of text, 100 columns wide, for a terminal or a file."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Literal

from kc_otel.contract.sentences import ABOUT
from kc_otel.contract.words import listed, one_in, rounded, rounded_down, rounded_up, with_unit
from kc_otel.explain.budget import Backwards, ClauseForBudget
from kc_otel.explain.chain import FARTHEST, LEVELS, BindingClause, Chain, Guarantee, Level, SliceGuarantee
from kc_otel.explain.explanation import Explanation
from kc_otel.explain.relations import CONDITIONS, Relation
from kc_otel.judge.sample_sizes import Needed

__all__ = ["WIDTH", "Line", "lines"]

WIDTH: Final = 100

Style = Literal["title", "heading", "clause", "plain", "quiet", "best"]

_LEVEL_NAMES: Final[dict[Level, str]] = {
    "token": "token",
    "sequence": "sequence",
    "reward": "reward",
    "gradient": "gradient",
    "token ESS": "ESS, token",
    "sequence ESS": "ESS, sequence",
    "clip": "clip range",
}
_DEPTHS: Final[dict[Level, int]] = {
    "token": 0,
    "sequence": 1,
    "reward": 2,
    "gradient": 2,
    "token ESS": 0,
    "sequence ESS": 0,
    "clip": 0,
}
_KINDS: Final = {
    "disagree": "DISAGREE",
    "implied": "IMPLIED",
    "nearly implied": "NEARLY IMPLIED",
    "never fails": "NEVER FAILS",
    "idle slice limit": "SLICE",
    "slow": "SLOW",
}


@dataclass(frozen=True, slots=True)
class Line:
    """One line and what it is, so that a terminal can colour it."""

    text: str
    style: Style = "plain"


def lines(explanation: Explanation) -> tuple[Line, ...]:
    """The explanation, line by line; no line is longer than WIDTH unless a name is."""
    return tuple(_all(explanation))


def _all(explanation: Explanation) -> Iterator[Line]:
    title = f"{explanation.contract}, version {explanation.version}"
    yield from _wrapped(f"{title}: {explanation.description}" if explanation.description else title, "", "title")
    yield Line("P is the training kernel, Q the inference kernel that samples; TV is total variation, 0 to 1.", "quiet")
    yield Line("")
    yield from _given(explanation)
    for entry in explanation.forwards:
        yield Line("")
        yield from _forwards(explanation, entry)
    for said in explanation.backwards:
        yield Line("")
        yield from _backwards(explanation, said)
    yield Line("")
    yield from _relations(explanation.relations)
    yield Line("")
    yield from _needed(explanation.needed)
    yield Line("")
    yield Line("WHAT A VERDICT CLAIMS", "heading")
    for claim in explanation.claims:
        yield from _wrapped(claim, "  ")


def _given(explanation: Explanation) -> Iterator[Line]:
    yield Line("TAKEN AS GIVEN", "heading")
    said = []
    if explanation.horizon is not None:
        said.append(f"horizon T = {explanation.horizon:,} tokens ({explanation.horizon_source})")
    known = explanation.assumptions
    if "reward_range" in known:
        low, high = known["reward_range"]
        said.append(f"reward in [{low:g}, {high:g}]")
    if "advantage_max" in known:
        said.append(f"|advantage| <= {known['advantage_max']:g}")
    if "score_norm_max" in known:
        said.append(f"norm of a token's score <= {known['score_norm_max']:g}")
    if "clip" in known:
        said.append(f"PPO clip {known['clip']:g}")
    if said:
        yield from _wrapped("; ".join(said) + ".", "  ")
    for name, lost in explanation.missing.items():
        yield from _wrapped(f"{name}: not stated, so {lost}.", "  ", "quiet")
    for need, text in explanation.needs.items():
        measured = " A clause of this contract limits it." if need == "support" and explanation.support_limited else ""
        yield from _wrapped(f"[{need}] {text}{measured}", "  ", "quiet")


def _forwards(explanation: Explanation, entry: SliceGuarantee) -> Iterator[Line]:
    what = "all traffic" if entry.slice == "all" else f"slice {entry.slice}"
    same = f" (the same on {', '.join(entry.like)})" if entry.like else ""
    yield from _wrapped(f"FORWARDS: what the limits guarantee on {what}{same}", "", "heading")
    if entry.chosen_by:
        names = ", ".join(entry.chosen_by)
        text = (
            f"Nothing of its own. {names} is known only once the answer is there, so these tokens are not what "
            "Q samples given a prompt, and TV = E_Q[(1-w)+] does not hold on them alone. The limits watch where drift "
            "sits; the guarantees are those of all traffic."
        )
        yield from _wrapped(text, "  ")
        return
    for chain in entry.chains:
        yield Line("")
        yield from _chain(explanation, chain)
    yield Line("")
    yield from _best(explanation, entry)


def _chain(explanation: Explanation, chain: Chain) -> Iterator[Line]:
    limit = with_unit(rounded(chain.limit, 4), chain.unit)
    yield from _wrapped(f"{chain.clause}: {chain.statistic} of {chain.metric} <= {limit}", "  ", "clause")
    deep = chain.rung("token") is not None
    sequence = chain.rung("sequence")
    for rung in chain.rungs:
        if rung.level in {"reward", "gradient"} and sequence is not None and not sequence.says:
            continue
        depth = _DEPTHS[rung.level] - (not deep and rung.level in {"sequence", "reward", "gradient"})
        branch = f"    {'  ' * depth}└ {_LEVEL_NAMES[rung.level]:<{16 - 2 * depth}} "
        yield from _wrapped(f"{_says(explanation, chain, rung)}  [{rung.by}]", branch)
    if chain.rungs and chain.reach is not None:
        yield from _wrapped(_reach(chain), "    ")
    if chain.purpose:
        yield from _wrapped(f"No distance between P and Q follows: {chain.purpose}.", "    ")
    if chain.note:
        yield from _wrapped(f"{chain.note}.", "    ")
    yield from _wrapped(_about(chain), "    ", "quiet")
    takes = f" Takes {' and '.join(f'[{need}]' for need in chain.needs)}." if chain.needs else ""
    yield from _wrapped(f"Rests on {chain.evidence}.{takes}", "    ", "quiet")


def _about(chain: Chain) -> str:
    """What a verdict on the clause is about, and where something acts on what says less than it seems to."""
    acts = chain.acting and chain.about == "traffic"
    acted_on = f", and this acts on it: {listed(chain.acting, 6)}" if acts else ""
    return f"A verdict is about the {chain.about}: {ABOUT[chain.about]}{acted_on}."


def _says(explanation: Explanation, chain: Chain, rung: Guarantee) -> str:  # noqa: PLR0911 - one per level
    bound = rounded_up(rung.bound)
    match rung.level:
        case "token":
            if not rung.says:
                return f"TV <= {bound} on average: says nothing"
            return f"TV <= {bound} on average: at most {one_in(rung.bound, 'token')} would be another one under P"
        case "sequence":
            over = "" if chain.reach is None else f" over {explanation.horizon:,} tokens"
            if not rung.says:
                return f"TV <= {bound}{over}: says nothing"
            return f"TV <= {bound}{over}: at most {one_in(rung.bound, 'sequence')} would be another one under P"
        case "reward":
            return f"the mean reward differs by at most {bound}"
        case "gradient":
            return f"the policy gradient's bias has a norm of at most {bound}"
        case "clip":
            return f"the kernels alone spend {rounded_up(100 * rung.bound)} % of the clip range, on average"
    what = "token" if rung.level == "token ESS" else "sequence"
    return f"{what} weights leave at least {rounded_down(100 * rung.bound)} % of the effective sample size"


def _reach(chain: Chain) -> str:
    tv = rounded(chain.reach_tv)
    if not chain.reach:
        return f"On its own it keeps not even one token within TV {tv}."
    more = " or more" if chain.reach >= FARTHEST else ""
    return f"On its own it keeps sequences of up to {_tokens(chain.reach)}{more} within TV {tv}."


def _tokens(count: int) -> str:
    return f"{count:,} {_plural('token', count)}"


def _best(explanation: Explanation, entry: SliceGuarantee) -> Iterator[Line]:
    yield Line("  All clauses together", "best")
    if not entry.best:
        yield from _wrapped("No clause bounds how far the two distributions are apart.", "    ")
        return
    for level in LEVELS:
        best = entry.of(level)
        if best is not None:
            yield from _wrapped(_best_text(best), f"    {_LEVEL_NAMES[level]:<14} ")
        elif level == "sequence" and any(chain.rung("sequence") for chain in entry.chains):
            at = f"nothing: at {explanation.horizon:,} tokens"
            text = f"{at} the limits allow two policies with hardly an answer in common."
            if (reward := entry.of("reward")) is not None:
                text += f" What {reward.clause} limits needs no such distance: the rewards themselves."
            elif "reward_range" in explanation.assumptions:
                text += " Where rewards are known, a clause on reward_drift limits what they differ by itself."
            longest = max(entry.chains, key=lambda chain: chain.reach or 0)
            if longest.reach:
                within = f"{_tokens(longest.reach)} within TV {rounded(longest.reach_tv)}"
                text += f" {longest.clause} reaches farthest: {within}."
            yield from _wrapped(text, f"    {_LEVEL_NAMES[level]:<14} ")


def _best_text(best: BindingClause) -> str:
    at_least = best.level.endswith("ESS")
    shown = rounded_down if at_least else rounded_up
    says = f"{'at least' if at_least else 'at most'} {shown(best.bound)}. {best.clause} binds ({best.by})"
    if "unobserved" in best.needs:
        says += ", and takes [unobserved], which no sample shows"
    if not best.next_clause or best.next_bound is None:
        return f"{says}; no other clause says anything."
    if best.next_bound == best.bound:
        return f"{says}; {best.next_clause} gives the same."
    text = f"{says}; without it {best.next_clause} gives {shown(best.next_bound)}"
    if best.loosen_to is not None:
        text += f", as {best.clause} would at a limit of {rounded_down(best.loosen_to)}"
    return f"{text}."


def _backwards(explanation: Explanation, said: Backwards) -> Iterator[Line]:
    what = "reward drift" if said.kind == "reward" else "gradient bias"
    where = "" if said.slice == "all" else f" on {said.slice}"
    yield from _wrapped(f"BACKWARDS: {what} of at most {rounded(said.budget)}{where} ({said.source})", "", "heading")
    if explanation.horizon is None:
        yield from _wrapped(f"Needs TV_seq <= {rounded_down(said.tv_seq)}. Any one of these is enough:", "  ")
    else:
        text = f"Needs B_TV = TV_seq <= {rounded_down(said.tv_seq)}. At {explanation.horizon:,} tokens"
        yield from _wrapped(f"{text} any one of these is enough:", "  ")
    for row in said.enough:
        limit = with_unit(rounded_down(row.limit), row.unit)
        yield Line(f"    {row.statistic:<4} of {row.metric:<18} <= {limit:<14} {row.by}")
    yield from _wrapped("What this contract has:", "  ")
    if not said.clauses:
        yield from _wrapped("no clause that says anything about sequences.", "    ")
    for clause in said.clauses:
        yield from _wrapped(_clause_for_budget(clause), f"    {clause.clause:<18} ")
    yield from _wrapped(_verdict(said), "  ", "best")


def _clause_for_budget(clause: ClauseForBudget) -> str:
    limit = rounded(clause.limit)
    how = ", measured on whole sequences" if clause.direct else " to guarantee it"
    if clause.guarantees:
        slack = ""
        if clause.needed is not None and clause.limit > 0.0 and clause.needed / clause.limit > 1.01:
            slack = f"; {rounded_down(clause.needed)} would still do"
        return f"{limit} is enough{how}{slack}"
    if clause.needed is None or not clause.needed:
        return f"{limit}: no limit on this statistic is enough, what lies beyond it is open"
    times = rounded(clause.limit / clause.needed)
    return f"{limit} is {times} times what would guarantee it, {rounded_down(clause.needed)}"


def _verdict(said: Backwards) -> str:
    direct = [clause.clause for clause in said.clauses if clause.guarantees and clause.direct]
    others = [clause.clause for clause in said.clauses if clause.guarantees and not clause.direct]
    if others:
        return f"The budget is guaranteed by {', '.join(others + direct)}."
    metric = "reward_drift_bound" if said.kind == "reward" else "gradient_bias_bound"
    why = (
        "That is the sharper way: (1-W)+ of whole sequences lies in [0, 1] and has the horizon and all cancelling in "
        "it, while a limit on tokens has to hold for the worst kernels that it allows."
    )
    if direct:
        return f"The budget rests on {', '.join(direct)}, which measures it. {why} The other clauses say where it goes."
    return (
        f"Nothing here guarantees the budget. Where it matters, write a clause on {metric}, which measures it. {why} "
        "Where TV_seq is near 1 for every pair of kernels, correct token by token and limit ESS and clip share instead."
    )


def _relations(relations: Iterable[Relation]) -> Iterator[Line]:
    yield Line("AMONG EACH OTHER", "heading")
    found = list(relations)
    if not found:
        yield from _wrapped("No clause implies, contradicts or idles another.", "  ")
    for relation in found:
        yield from _wrapped(f"{relation.sentence}.", f"  {_KINDS[relation.kind]:<15} ")
        takes = [CONDITIONS[condition] for condition in relation.conditions]
        if takes:
            yield from _wrapped(f"Holds {'; '.join(takes)}.", " " * 18, "quiet")
        yield from _wrapped(f"{relation.suggestion[:1].upper()}{relation.suggestion[1:]}.", " " * 18, "quiet")


def _needed(needed: Iterable[Needed]) -> Iterator[Line]:
    yield Line("BEFORE A PASS: fewest observations, even if the two kernels were identical", "heading")
    for one in needed:
        count = "never" if one.observations is None else f"{one.observations:,} {_plural(one.unit, one.observations)}"
        asked = f"the contract asks for {one.minimum:,}" if one.minimum_name else "decided by the first"
        yield Line(f"  {one.clause:<18} {count:<22} {asked}")


def _plural(noun: str, count: int) -> str:
    plural = {"batch": "batches"}.get(noun, f"{noun}s")
    return noun if count == 1 else plural


def _wrapped(text: str, indent: str, style: Style = "plain") -> Iterator[Line]:
    for line in textwrap.wrap(
        text, WIDTH, initial_indent=indent, subsequent_indent=" " * len(indent), break_long_words=False
    ):
        yield Line(line, style)
