"""The report of what each correction of the rollout mismatch would have done to a recording."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from kc_otel.charts import TradeoffPoint, draw_tradeoff
from kc_otel.contract.words import number, place
from kc_otel.offline.remedy.promises import RemedyBound, RemedyTarget
from kc_otel.offline.remedy.remedy import CorrectionReplay, Remedy
from kc_otel.offline.remedy.trainers import Trainer, line
from kc_otel.report.document import Block, Bullets, Figure, Heading, Table, Text

__all__ = ["remedy_blocks", "remedy_sentence"]

_COSTS: Final = ("Slice", "Variance", "ESS", "Tokens dropped", "with A > 0", "with A < 0", "Sequences dropped")


def remedy_blocks(of: Remedy) -> tuple[Block, ...]:
    """The report as blocks: what to paste, what it costs and leaves by slice, pictures, the best of each kind."""
    all_traffic = of.replayed[0].costs["all"]
    blocks: list[Block] = [
        Heading(1, f"Remedies for {of.source} under {of.contract}"),
        Text(
            f"{len(of.replayed)} corrections replayed on {all_traffic.sequences:,} sequences, {all_traffic.tokens:,} "
            f"tokens. All intervals hold together with {100 * of.confidence:g} % confidence; sequences are the unit."
        ),
    ]
    for trainer, chosen in of.chosen.items():
        blocks += [Heading(2, trainer), Text(_answer(of, trainer))]
        if chosen is not None:
            blocks.append(Text(line(trainer, chosen.correction) or ""))
    for each in of.replayed:
        if each.meets and any(each is chosen for chosen in of.chosen.values()):
            blocks += [Heading(2, each.correction.name), *_tables(each)]
    blocks += [Heading(2, "Bias against variance"), *_pictures(of)]
    blocks += [
        Heading(2, "The best of each kind"),
        Table(
            ("Correction", "Variance", "Tokens dropped", "Contract", "Farthest from its limit"),
            tuple(_kind_row(each) for each in _by_family(of)),
        ),
    ]
    if of.beyond:
        blocks += [Heading(2, "Not a correction's to keep"), Bullets(of.beyond)]
    return tuple(blocks)


def remedy_sentence(of: Remedy) -> str:
    """The answer in one line, for an incident's page and messages: for each trainer what to paste, or that none is."""
    said = [f"{trainer}: {_answer(of, trainer)}" for trainer in of.chosen]
    said += [f"paste: {line(trainer, each.correction)}" for trainer, each in of.chosen.items() if each is not None]
    return " ".join("; ".join(said).split())


def _answer(of: Remedy, trainer: Trainer) -> str:
    """What to do in a trainer, in a sentence."""
    if not of.promises:
        return "The contract has no clause that a correction could keep; add one on tv_token, tv_seq or reward drift."
    chosen = of.chosen[trainer]
    if chosen is not None:
        many = len(of.promises)
        return f"{chosen.correction.name} keeps {many} promise{'s' * (many != 1)} at the least variance."
    near = of.closest(trainer)
    assert near.worst is not None
    undecided = near.worst.state == "open"
    why = "this recording does not decide it; record more sequences" if undecided else "it is broken"
    return f"None keeps the contract. Closest is {near.correction.name}: {_left(near.worst)}, and {why}."


def _left(of: RemedyBound) -> str:
    """A promise with what is left of it: `tv on tables 0.012 [0.01, 0.015], limit 0.02`."""
    said = f"{number(of.interval.estimate)} [{number(of.interval.lower)}, {number(of.interval.upper)}]"
    return f"{of.promise.clause} on {place(of.promise.slice)} {said}, limit {number(of.promise.limit)}"


def _by_family(of: Remedy) -> list[CorrectionReplay]:
    """Of each kind of correction the one that keeps the contract at the least variance, or comes closest."""
    kinds: dict[str, list[CorrectionReplay]] = {}
    for each in of.replayed:
        kinds.setdefault(each.correction.family, []).append(each)
    best = [min(many, key=lambda one: one.rank) for many in kinds.values()]
    return sorted(best, key=lambda one: one.rank)


def _cost_row(name: str, of: CorrectionReplay) -> tuple[str, ...]:
    """What a correction costs on a slice, as `_COSTS` names it."""
    costs = of.costs[name]
    return (
        place(name),
        number(costs.variance),
        _percent(costs.ess),
        _percent(costs.dropped),
        _percent(costs.dropped_positive),
        _percent(costs.dropped_negative),
        _percent(costs.dropped_sequences),
    )


def _kind_row(of: CorrectionReplay) -> tuple[str, ...]:
    costs = of.costs["all"]
    worst = of.worst
    said = ("-", "-") if worst is None else (worst.state, _left(worst))
    return (of.correction.name, number(costs.variance), _percent(costs.dropped), *said)


def _tables(of: CorrectionReplay) -> Iterator[Block]:
    yield Table(_COSTS, tuple(_cost_row(name, of) for name in of.costs))
    yield Bullets(tuple(_left(each) for each in of.findings))


def _pictures(of: Remedy) -> Iterator[Block]:
    """For each clause the slice on which no correction leaves the most, in limits."""
    plain = {each.promise: each for each in of.replayed[0].findings}
    for clause in dict.fromkeys(promise.clause for promise in plain):
        mine = [promise for promise in plain if promise.clause == clause]
        worst = max(mine, key=lambda one: plain[one].interval.estimate / (one.limit or 1.0))
        chart = draw_tradeoff(f"{clause} on {place(worst.slice)}", list(_points(of, worst)), worst.limit)
        if chart is not None:
            yield Figure(chart, chart.text)


def _points(of: Remedy, promise: RemedyTarget) -> Iterator[TradeoffPoint]:
    chosen = {id(each) for each in of.chosen.values()}
    for each in of.replayed:
        found = next(one for one in each.findings if one.promise == promise)
        yield TradeoffPoint(
            each.correction.name,
            each.costs[promise.slice].variance,
            found.interval.estimate,
            found.interval.lower,
            found.interval.upper,
            found.state,
            chosen=id(each) in chosen,
        )


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{number(100 * share)} %"
