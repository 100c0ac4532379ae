"""Differences between two versions of a contract: promises that are tighter, looser, or other ones.

The question is what a reviewer must look at, so whatever can let more drift through counts as loosening, even when
something else is tightened in the same change. Clauses are told apart by their id, slices by their name, steps of the
ladder by what they wait for.

- A promise whose metric or statistic changed so that the two cannot be compared is dropped, and another one added.
- So is one that is judged by sequence instead of by token, or back: long sequences weigh differently in the two means;
  and one that is about another operator.
- Less evidence for a PASS (confidence, min_samples, min_sequences, sampling down) loosens; a longer silence before
  NO_DATA does too, and so does more time between false alarms: what is wrong is then found later.
- An assumption is a factor of a bound: a narrower reward range makes the same drift count for less, which loosens.
- A slice loosens when some traffic that was in it no longer is; more traffic in it is a change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, Literal

from kc_otel.contract.clause import Clause, Statistic
from kc_otel.contract.limits import scale_of
from kc_otel.contract.model import Contract
from kc_otel.contract.policy import EscalationStep
from kc_otel.contract.promotion import PromotionTerms, shown_share
from kc_otel.contract.regions import covers
from kc_otel.contract.registry.clause_metrics import DERIVED, QUANTITIES
from kc_otel.contract.slices import ALL
from kc_otel.contract.units import format_duration

ChangeKind = Literal["tightens", "loosens", "adds", "drops", "changes"]

_MORE_IS_TIGHTER: Final = ("confidence", "min_samples", "min_sequences", "sampling", "max_series")
_LESS_IS_TIGHTER: Final = ("heartbeat", "false_alarms")


@dataclass(frozen=True, slots=True)
class ContractChange:
    """One difference between two versions of a contract.

    Attributes:
        kind: Effect on the promise.
        field: Where: clauses, slices and steps by name, such as `statistical[token-tv].limit`.
        old: Old value; None where there was none.
        new: New value; None where there is none.
        sentence: Meaning, for the reviewer.
    """

    kind: ChangeKind
    field: str
    old: Any
    new: Any
    sentence: str

    @property
    def loosening(self) -> bool:
        """True if the new version can pass something that the old one would not."""
        return self.kind in {"loosens", "drops"}


def diff(old: Contract, new: Contract) -> list[ContractChange]:
    """Every difference, in the order of a contract's sections; empty when nothing but spelling differs."""
    return [
        *_metadata(old, new),
        *_plain("kernels.train", old.kernels.train, new.kernels.train),
        *_plain("kernels.inference", old.kernels.inference, new.kernels.inference),
        *_assumptions(old, new),
        *_slices(old, new),
        *_clauses(old, new),
        *_observability(old, new),
        *_escalation(old.escalation, new.escalation),
        *_promotion(old.promotion, new.promotion),
    ]


def _tighter(is_tighter: bool) -> Literal["tightens", "loosens"]:
    return "tightens" if is_tighter else "loosens"


def _metadata(old: Contract, new: Contract) -> Iterator[ContractChange]:
    yield from _plain("metadata", old.metadata, new.metadata)
    if old.metadata.version == new.metadata.version and old.hash != new.hash:
        version = old.metadata.version
        sentence = f"the content differs, but version is still {version}"
        yield ContractChange("changes", "metadata.version", version, version, sentence)


def _plain(path: str, old: Any, new: Any) -> Iterator[ContractChange]:
    for name in type(old).model_fields:
        before, after = getattr(old, name), getattr(new, name)
        if before != after:
            sentence = f"{_shown(before)} becomes {_shown(after)}"
            yield ContractChange("changes", f"{path}.{name}", before, after, sentence)


def _assumptions(old: Contract, new: Contract) -> Iterator[ContractChange]:
    kept = {clause.metric for clause in old.clauses} & {clause.metric for clause in new.clauses} & set(DERIVED)
    for name in type(old.assumptions).model_fields:
        before, after = getattr(old.assumptions, name), getattr(new.assumptions, name)
        if before == after:
            continue
        path = f"assumptions.{name}"
        users = sorted(metric for metric in kept if name in DERIVED[metric].needs)
        if not users or before is None or after is None:
            yield ContractChange("changes", path, before, after, "no bound in both versions depends on it")
            continue
        metric = users[0]
        # Only this assumption is changed, so that each one is judged on its own.
        scale = scale_of(metric, old.assumptions) or 0.0
        scale_after = scale_of(metric, old.assumptions.model_copy(update={name: after})) or 0.0
        factor = scale_after / scale
        if factor == 1.0:
            yield ContractChange("changes", path, before, after, "shifts the range, which leaves every bound as it is")
            continue
        sentence = f"the same drift counts {factor:.3g} times as much in {', '.join(users)}"
        yield ContractChange(_tighter(factor > 1.0), path, before, after, sentence)


def _slices(old: Contract, new: Contract) -> Iterator[ContractChange]:
    for name, spec in old.slices.items():
        path = f"slices.{name}"
        if name not in new.slices:
            yield ContractChange("drops", path, spec.where, None, f"{name} is no longer judged on its own")
            continue
        after = new.slices[name]
        if not covers(after.conditions, spec.conditions):
            yield ContractChange("loosens", f"{path}.where", spec.where, after.where, f"some traffic leaves {name}")
        elif not covers(spec.conditions, after.conditions):
            yield ContractChange("changes", f"{path}.where", spec.where, after.where, f"more traffic belongs to {name}")
        yield from _description(path, spec.description, after.description)
    for name, spec in new.slices.items():
        if name not in old.slices:
            yield ContractChange("adds", f"slices.{name}", None, spec.where, f"{name} is judged on its own")


def _description(path: str, old: str, new: str) -> Iterator[ContractChange]:
    if old != new:
        yield ContractChange("changes", f"{path}.description", old, new, "described differently")


def _clauses(old: Contract, new: Contract) -> Iterator[ContractChange]:
    before, after = _by_id(old), _by_id(new)
    for name, (section, clause) in before.items():
        path = f"{section}[{name}]"
        other_section, other = after.get(name, ("", None))
        kind = "other" if other is None else _compare(clause, other)
        if kind == "other":
            yield ContractChange("drops", path, _promise(clause), None, f"{_promise(clause)} is no longer promised")
        if other is None:
            continue
        if kind == "other":
            path = f"{other_section}[{name}]"
            yield ContractChange("adds", path, None, _promise(other), f"{_promise(other)} is promised instead")
            continue
        if kind != "same":
            wording = "a statistic that is never smaller" if kind == "tightens" else "a statistic that is never larger"
            yield ContractChange(kind, f"{path}.statistic", _named(clause), _named(other), f"{wording} is limited")
        yield from _limits(path, clause, other, {ALL, *(set(old.slices) & set(new.slices))})
        yield from _description(path, clause.description, other.description)
    for name, (section, clause) in after.items():
        if name not in before:
            promised = _promise(clause)
            yield ContractChange("adds", f"{section}[{name}]", None, promised, f"{promised} is promised")


def _by_id(contract: Contract) -> dict[str, tuple[str, Clause]]:
    sections = ("numerical", "statistical", "runtime")
    return {clause.id: (section, clause) for section in sections for clause in getattr(contract, section)}


def _limits(path: str, old: Clause, new: Clause, slices: set[str]) -> Iterator[ContractChange]:
    """Yield changed limits of slices; `limit` covers those that have the clause's own limit in both versions."""
    own = {name for name in slices - {ALL} if name in old.slices or name in new.slices}
    for name in (ALL, *sorted(own)):
        before, after = old.limit_for(name), new.limit_for(name)
        if before == after:
            continue
        field = f"{path}.limit" if name == ALL else f"{path}.slices.{name}"
        where = f"on {name}" if name != ALL else "everywhere else" if own else "everywhere"
        sentence = f"{old.metric} may be {after:g} instead of {before:g} {where}"
        yield ContractChange(_tighter(after < before), field, before, after, sentence)


def _compare(old: Clause, new: Clause) -> Literal["same", "tightens", "loosens", "other"]:
    """Compare the new clause's statistic with the old one's on the same data."""
    if (old.metric, old.operator, old.averaged) != (new.metric, new.operator, new.averaged):
        return "other"
    before, after = _rank(old), _rank(new)
    if before == after:
        return "same"
    if before[0] != after[0]:
        return "other"
    return _tighter(after[1] > before[1])


def _rank(clause: Clause) -> tuple[str, float]:
    """A family of statistics that order themselves, and the place in it: a larger one is never smaller on any data."""
    statistic: Statistic = clause.parsed_statistic
    if statistic.kind == "fraction":
        return "fraction", -statistic.argument
    if statistic.kind == "mean":
        base = DERIVED[clause.metric].base if clause.metric in DERIVED else clause.metric
        cap = QUANTITIES[base].cap if base in QUANTITIES else 0.0
        return "mean", clause.cap or cap
    return "quantile", 1.0 if statistic.kind == "max" else statistic.argument


def _named(clause: Clause) -> str:
    statistic = clause.parsed_statistic
    if statistic.kind == "quantile":
        return f"p{100 * statistic.argument:g}"
    if statistic.kind == "fraction":
        return f"fraction > {statistic.argument:g}"
    return f"mean of min(value, {_rank(clause)[1]:g})" if clause.cap else statistic.kind


def _promise(clause: Clause) -> str:
    return f"{_named(clause)} of {clause.metric_text} <= {clause.limit_for(ALL):g}"


def _observability(old: Contract, new: Contract) -> Iterator[ContractChange]:
    for name in type(old.observability).model_fields:
        before, after = getattr(old.observability, name), getattr(new.observability, name)
        if before == after:
            continue
        kind: ChangeKind = "changes"
        if name in _MORE_IS_TIGHTER or name in _LESS_IS_TIGHTER:
            kind = _tighter((after > before) == (name in _MORE_IS_TIGHTER))
        if name not in _MORE_IS_TIGHTER:
            before, after = format_duration(before), format_duration(after)
        sentence = f"{before} becomes {after}: {_EFFECT_OF_FIELD[name]}"
        yield ContractChange(kind, f"observability.{name}", before, after, sentence)


_EFFECT_OF_FIELD: Final = {
    "window": "a PASS rests on another span of time",
    "long_window": "verdicts that the window leaves open rest on another span of time",
    "confidence": "a PASS requires this confidence",
    "false_alarms": "this is the expected time between false alarms; a shorter one finds faults sooner",
    "min_samples": "a verdict on tokens needs this many of them",
    "min_sequences": "a verdict on sequences needs this many of them",
    "sampling": "this share of batches is measured",
    "heartbeat": "silence is noticed after this long",
    "max_series": "streams beyond this number count as slice 'other'",
}


def _shown(value: Any) -> str:
    return "nothing" if value is None or value == "" else repr(value)


_SEVERITY: Final = {"info": 0, "warning": 1, "critical": 2}

_PairingKey = Callable[[EscalationStep], object]

_KEYS: Final[tuple[_PairingKey, ...]] = (
    lambda step: (step.on, frozenset(step.clauses), step.severity, step.after, frozenset(map(str, step.do))),
    lambda step: (step.on, frozenset(step.clauses), step.severity),
    lambda step: (step.on, frozenset(step.clauses)),
    lambda step: (step.on, step.severity),
    lambda step: step.on,
)


def _escalation(old: Sequence[EscalationStep], new: Sequence[EscalationStep]) -> Iterator[ContractChange]:
    left, right = list(range(len(old))), list(range(len(new)))
    pairs: list[tuple[int, int]] = []
    for key in _KEYS:
        for index in tuple(left):
            match = next((other for other in right if key(new[other]) == key(old[index])), None)
            if match is not None:
                pairs.append((index, match))
                left.remove(index)
                right.remove(match)
    for index, match in sorted(pairs):
        yield from _step(f"escalation[{match}]", old[index], new[match])
    for index in left:
        said = _said(old[index])
        yield ContractChange("drops", f"escalation[{index}]", said, None, f"{said} no longer happens")
    for index in right:
        said = _said(new[index])
        yield ContractChange("adds", f"escalation[{index}]", None, said, f"{said} happens too")


def _step(path: str, old: EscalationStep, new: EscalationStep) -> Iterator[ContractChange]:
    rarer = new.repeat == 0 or (old.repeat > 0 and new.repeat > old.repeat)
    how = f"reminds every {format_duration(new.repeat)}" if new.repeat else "reminds nobody"
    for name, before, after, tighter, sentence in (
        ("for", old.after, new.after, new.after < old.after, "fires after {after} instead of {before}"),
        ("clear_for", old.clear_for, new.clear_for, new.clear_for > old.clear_for,
         "resolves after {after} instead of {before}"),
        ("repeat", old.repeat, new.repeat, not rarer, how + " ({before} before)"),
    ):  # fmt: skip
        if before != after:
            was, becomes = format_duration(before), format_duration(after)
            said = sentence.format(before=was, after=becomes)
            yield ContractChange(_tighter(tighter), f"{path}.{name}", was, becomes, said)
    if old.severity != new.severity:
        kind = _tighter(_SEVERITY[new.severity] > _SEVERITY[old.severity])
        sentence = f"is {new.severity} instead of {old.severity}"
        yield ContractChange(kind, f"{path}.severity", old.severity, new.severity, sentence)
    if set(old.clauses) != set(new.clauses):
        # No clauses means all of them.
        left_out = bool(new.clauses) and (not old.clauses or not set(old.clauses) <= set(new.clauses))
        waited, waits = (sorted({*step.clauses}) or ["all"] for step in (old, new))
        sentence = f"waits for {', '.join(waits)} instead of {', '.join(waited)}"
        yield ContractChange(_tighter(not left_out), f"{path}.clauses", waited, waits, sentence)
    before_do, after_do = {str(action) for action in old.do}, {str(action) for action in new.do}
    for action in sorted(before_do - after_do):
        yield ContractChange("drops", f"{path}.do", action, None, f"on {old.on}, {action} no longer happens")
    for action in sorted(after_do - before_do):
        yield ContractChange("adds", f"{path}.do", None, action, f"on {new.on}, {action} happens too")


def _said(step: EscalationStep) -> str:
    after = f" for {format_duration(step.after)}" if step.after else ""
    return f"{', '.join(map(str, step.do))} on {step.on}{after} ({step.severity})"


def _promotion(before: PromotionTerms, after: PromotionTerms) -> Iterator[ContractChange]:
    if before.windows != after.windows:
        kind = _tighter(after.windows > before.windows)
        sentence = f"a step asks for {after.windows} windows of PASS instead of {before.windows}"
        yield ContractChange(kind, "promotion.windows", before.windows, after.windows, sentence)
    if before.failure_limit != after.failure_limit:
        kind = _tighter(after.failure_limit < before.failure_limit)
        sentence = f"a version is rolled back after {after.failure_limit} failing windows, not {before.failure_limit}"
        yield ContractChange(kind, "promotion.failure_limit", before.failure_limit, after.failure_limit, sentence)
    if before.steps != after.steps:
        # A jump between two shares that no gate stands between any more is a loosening, wherever it is.
        jumps = pairwise((0.0, *after.steps, 1.0))
        kind = _tighter(not any(low < share < high for low, high in jumps for share in before.steps))
        served, serves = (", ".join(map(shown_share, terms.steps)) for terms in (before, after))
        sentence = f"a canary serves {serves} instead of {served}"
        yield ContractChange(kind, "promotion.steps", served, serves, sentence)
    for stage in sorted({*before.approve} ^ {*after.approve}):
        dropped = stage in before.approve
        sentence = f"{'nobody has to' if dropped else 'a person has to'} approve stage {stage}"
        approve = list(before.approve), list(after.approve)
        yield ContractChange(_tighter(not dropped), "promotion.approve", *approve, sentence)
    for skipped in sorted({*before.skip} ^ {*after.skip}):
        again = skipped in before.skip
        sentence = f"stage {skipped} is {'required again' if again else 'skipped'}"
        yield ContractChange(_tighter(again), "promotion.skip", list(before.skip), list(after.skip), sentence)
    if before.sampling != after.sampling:
        sentence = "recordings may be made with other sampling parameters"
        kind = _sampling(before.sampling, after.sampling)
        yield ContractChange(kind, "promotion.sampling", before.sampling, after.sampling, sentence)


def _sampling(before: dict[str, Any], after: dict[str, Any]) -> Literal["tightens", "loosens"]:
    """Values that might not be used before loosen, and so does what need not be said any more.

    A parameter that was not listed might not be used at all, so that listing it loosens too, whatever its values.
    """
    more = not after or (before and any({*values} - {*before.get(name, ())} for name, values in after.items()))
    return _tighter(not (more or {*before} - {*after}))
