"""Differences between two versions of a contract: promises that are tighter, looser, or other ones.

Whatever can let more drift through counts as loosening, even when something else is tightened in the same change.
Clauses are told apart by their id, slices by their name, steps of the ladder by what they wait for. Two promises that
cannot be compared, such as one by sequence and one by token, are a drop and an addition. Less evidence for a PASS, a
longer silence before NO_DATA, more time between false alarms and a narrower reward range loosen; so does a slice that
some traffic leaves, and one that more traffic belongs to, unless every clause limits a maximum: it dilutes the rest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final, Literal

from kc_otel.contract.clause import Clause
from kc_otel.contract.limits import scale_of
from kc_otel.contract.model import Contract
from kc_otel.contract.policy import EscalationStep, PromotionTerms, shown_share
from kc_otel.contract.registry.clause_metrics import DERIVED, QUANTITIES
from kc_otel.contract.slices import ALL, covers
from kc_otel.contract.units import format_duration

ChangeKind = Literal["tightens", "loosens", "adds", "drops", "changes"]


@dataclass(frozen=True, slots=True)
class ContractChange:
    """One difference: its effect, its place such as `statistical[token-tv].limit`, both values, and a sentence."""

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
        *_declared("kernels.train", old.kernels.train, new.kernels.train),
        *_declared("kernels.inference", old.kernels.inference, new.kernels.inference),
        *_assumptions(old, new),
        *_slices(old, new),
        *_clauses(old, new),
        *_ordered("observability", old.observability, new.observability),
        *_escalation(old.escalation, new.escalation),
        *_promotion(old.promotion, new.promotion),
    ]


def _tighter(is_tighter: bool) -> Literal["tightens", "loosens"]:
    return "tightens" if is_tighter else "loosens"


_Parts = Mapping[Any, tuple[str, Any, str]]
"""Identity of a part of a contract -> its place, what it holds, and its name in a sentence."""


def _apart(old: _Parts, new: _Parts, dropped: str, added: str) -> Iterator[ContractChange]:
    """Yield the parts that only one version has, with what is said of them."""
    for key, (path, value, name) in old.items():
        if key not in new:
            yield ContractChange("drops", path, value, None, f"{name} {dropped}")
    for key, (path, value, name) in new.items():
        if key not in old:
            yield ContractChange("adds", path, None, value, f"{name} {added}")


def _metadata(old: Contract, new: Contract) -> Iterator[ContractChange]:
    yield from _plain("metadata", old.metadata, new.metadata)
    version = old.metadata.version
    if version == new.metadata.version and old.hash != new.hash:
        sentence = f"the content differs, but version is still {version}"
        yield ContractChange("changes", "metadata.version", version, version, sentence)


def _changed(old: Any, new: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield the fields of a part of a contract that differ, with both values."""
    for name in type(old).model_fields:
        if getattr(old, name) != getattr(new, name):
            yield name, getattr(old, name), getattr(new, name)


def _plain(path: str, old: Any, new: Any, only: str = "") -> Iterator[ContractChange]:
    for name, before, after in _changed(old, new):
        if not only or name == only:
            sentence = f"{_shown(before)} becomes {_shown(after)}"
            yield ContractChange("changes", f"{path}.{name}", before, after, sentence)


def _declared(path: str, old: Any, new: Any) -> Iterator[ContractChange]:
    """Compare the fields of a declared kernel; one that is not declared may be anything."""
    for change in _plain(path, old, new):
        if change.new is None:
            yield replace(change, kind="loosens", sentence=f"a kernel is no longer held to {_shown(change.old)}")
        elif change.old is None:
            yield replace(change, kind="tightens", sentence=f"a kernel is held to {_shown(change.new)}")
        else:
            yield change


def _assumptions(old: Contract, new: Contract) -> Iterator[ContractChange]:
    kept = {clause.metric for clause in old.clauses} & {clause.metric for clause in new.clauses} & set(DERIVED)
    for name, before, after in _changed(old.assumptions, new.assumptions):
        kind: ChangeKind = "changes"
        users = sorted(metric for metric in kept if name in DERIVED[metric].needs)
        sentence = "no bound in both versions depends on it"
        if name == "density":
            kind = _tighter(before)
            sentence = f"log-probabilities above 0 are {'refused' if before else 'accepted'}"
        if users and before is not None and after is not None:
            # Only this assumption is changed, so that each one is judged on its own.
            scale_after = scale_of(users[0], old.assumptions.model_copy(update={name: after})) or 0.0
            factor = scale_after / (scale_of(users[0], old.assumptions) or 0.0)
            sentence = "shifts the range, which leaves every bound as it is"
            if factor != 1.0:
                kind = _tighter(factor > 1.0)
                sentence = f"the same drift counts {factor:.3g} times as much in {', '.join(users)}"
        yield ContractChange(kind, f"assumptions.{name}", before, after, sentence)


def _slices(old: Contract, new: Contract) -> Iterator[ContractChange]:
    before, after = ({name: (f"slices.{name}", of.slices[name].where, name) for name in of.slices} for of in (old, new))
    yield from _apart(before, after, "is no longer judged on its own", "is judged on its own")
    for name in (name for name in before if name in after):
        was, becomes = old.slices[name], new.slices[name]
        where = f"slices.{name}.where", was.where, becomes.where
        if not covers(becomes.conditions, was.conditions):
            yield ContractChange("loosens", *where, f"some traffic leaves {name}")
        elif not covers(was.conditions, becomes.conditions):
            maxima = all(clause.parsed_statistic.kind == "max" for clause in (*old.clauses, *new.clauses))
            sentence = f"more traffic belongs to {name}"
            sentence += "" if maxima else ", which dilutes the drift of what was judged there"
            yield ContractChange(_tighter(maxima), *where, sentence)
        yield from _plain(f"slices.{name}", was, becomes, "description")


def _clauses(old: Contract, new: Contract) -> Iterator[ContractChange]:
    before, after = _promises(old), _promises(new)
    named, named_new = (
        {key: (path, _promise(clause), _promise(clause)) for key, (path, clause) in of.items()}
        for of in (before, after)
    )
    yield from _apart(named, named_new, "is no longer promised", "is promised")
    for key, (path, clause) in before.items():
        if key not in after:
            continue
        other = after[key][1]
        if (was := _place(clause)) != (becomes := _place(other)):
            kind = _tighter(becomes > was)
            wording = f"a statistic that is never {'smaller' if kind == 'tightens' else 'larger'} is limited"
            yield ContractChange(kind, f"{path}.statistic", _named(clause), _named(other), wording)
        yield from _limits(path, clause, other, {ALL, *(set(old.slices) & set(new.slices))})
        yield from _plain(path, clause, other, "description")


def _promises(contract: Contract) -> dict[tuple[object, ...], tuple[str, Clause]]:
    """Each clause and its place, by its id and what makes it comparable with another version of it."""
    return {
        (clause.id, clause.metric, clause.operator, clause.averaged, _family(clause)): (place, clause)
        for section in ("numerical", "statistical", "runtime")
        for clause in getattr(contract, section)
        for place in [f"{section}[{clause.id}]"]
    }


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


def _family(clause: Clause) -> str:
    """Statistics that order themselves: a maximum is the last of the quantiles."""
    kind = clause.parsed_statistic.kind
    return "quantile" if kind == "max" else kind


def _place(clause: Clause) -> float:
    """The place of a statistic in its family: a larger one is never smaller on any data."""
    kind, argument = clause.parsed_statistic.kind, clause.parsed_statistic.argument
    if kind == "mean":
        return clause.cap or (QUANTITIES[clause.base].cap if clause.base in QUANTITIES else 0.0)
    return {"fraction": -argument, "quantile": argument, "max": 1.0}[kind]


def _named(clause: Clause) -> str:
    return f"mean of min(value, {clause.cap:g})" if clause.cap else clause.statistic_text


def _promise(clause: Clause) -> str:
    return f"{_named(clause)} of {clause.metric_text} <= {clause.limit_for(ALL):g}"


_EFFECTS: Final = {
    "window": (0, "a PASS rests on another span of time"),
    "long_window": (0, "verdicts that the window leaves open rest on another span of time"),
    "confidence": (1, "a PASS requires this confidence"),
    "false_alarms": (-1, "this is the expected time between false alarms; a shorter one finds faults sooner"),
    "min_samples": (1, "a verdict on tokens needs this many of them"),
    "min_sequences": (1, "a verdict on sequences needs this many of them"),
    "sampling": (1, "this share of batches is measured"),
    "heartbeat": (-1, "silence is noticed after this long"),
    "max_series": (1, "streams beyond this number count as slice 'other'"),
    "after": (-1, "the step fires after this time"),
    "clear_for": (1, "the step resolves after this time"),
    "repeat": (-1, "the step reminds at this interval; 0s: never"),
    "severity": (1, "alerts of the step have this severity"),
    "windows": (1, "each step asks for this many windows of PASS"),
    "failure_limit": (-1, "a version is rolled back after this many failing windows"),
}
"""Effect of a field, and the direction of a larger value: tighter (1), looser (-1) or neither (0)."""
_DURATIONS: Final = frozenset({"window", "long_window", "false_alarms", "heartbeat", "after", "clear_for", "repeat"})
_SEVERITY: Final = {"info": 0, "warning": 1, "critical": 2}


def _ordered(path: str, old: Any, new: Any) -> Iterator[ContractChange]:
    """Yield changes of fields whose values are ordered."""
    for name, before, after in _changed(old, new):
        if name not in _EFFECTS or isinstance(before, dict):
            continue
        order, effect = _EFFECTS[name]
        larger = _size(name, after) > _size(name, before)
        kind: ChangeKind = _tighter(larger == (order > 0)) if order else "changes"
        was, becomes = (format_duration(value) if name in _DURATIONS else value for value in (before, after))
        field = "for" if name == "after" else name
        yield ContractChange(kind, f"{path}.{field}", was, becomes, f"{was} becomes {becomes}: {effect}")


def _size(name: str, value: Any) -> float:
    if name == "repeat":
        return value or math.inf
    return _SEVERITY[value] if name == "severity" else value


def _shown(value: Any) -> str:
    return "nothing" if value is None or value == "" else repr(value)


def _waits_for(step: EscalationStep) -> tuple[object, ...]:
    """Properties that tell steps apart, the most telling first."""
    return step.on, frozenset(step.clauses), step.severity, step.after, frozenset(map(str, step.do))


def _escalation(old: Sequence[EscalationStep], new: Sequence[EscalationStep]) -> Iterator[ContractChange]:
    left, right = list(range(len(old))), list(range(len(new)))
    pairs: list[tuple[int, int]] = []
    for alike in (5, 3, 2, 1):
        for index in tuple(left):
            wanted = _waits_for(old[index])[:alike]
            match = next((other for other in right if _waits_for(new[other])[:alike] == wanted), None)
            if match is not None:
                pairs.append((index, match))
                left.remove(index)
                right.remove(match)
    for index, match in sorted(pairs):
        yield from _step(f"escalation[{match}]", old[index], new[match])
    gone = {("-", at): (f"escalation[{at}]", said, said) for at in left for said in [_said(old[at])]}
    come = {("+", at): (f"escalation[{at}]", said, said) for at in right for said in [_said(new[at])]}
    yield from _apart(gone, come, "no longer happens", "happens too")


def _step(path: str, old: EscalationStep, new: EscalationStep) -> Iterator[ContractChange]:
    yield from _ordered(path, old, new)
    if set(old.clauses) != set(new.clauses):
        # No clauses means all of them.
        left_out = bool(new.clauses) and (not old.clauses or not set(old.clauses) <= set(new.clauses))
        waited, waits = (sorted({*step.clauses}) or ["all"] for step in (old, new))
        sentence = f"waits for {', '.join(waits)} instead of {', '.join(waited)}"
        yield ContractChange(_tighter(not left_out), f"{path}.clauses", waited, waits, sentence)
    before, after = (
        {said: (f"{path}.do", said, f"on {step.on}, {said}") for said in map(str, step.do)} for step in (old, new)
    )
    yield from _apart(before, after, "no longer happens", "happens too")


def _said(step: EscalationStep) -> str:
    after = f" for {format_duration(step.after)}" if step.after else ""
    return f"{', '.join(map(str, step.do))} on {step.on}{after} ({step.severity})"


def _promotion(before: PromotionTerms, after: PromotionTerms) -> Iterator[ContractChange]:
    yield from _ordered("promotion", before, after)
    if before.steps != after.steps:
        # A jump between two shares that no gate stands between any more is a loosening, wherever it is.
        jumps = list(pairwise((0.0, *after.steps, 1.0)))
        kind = _tighter(not any(low < share < high for low, high in jumps for share in before.steps))
        served, serves = (", ".join(map(shown_share, terms.steps)) for terms in (before, after))
        yield ContractChange(kind, "promotion.steps", served, serves, f"a canary serves {serves} instead of {served}")
    if before.sampling != after.sampling:
        kind = _tighter(_fewer(before.sampling, after.sampling))
        sentence = "recordings may be made with other sampling parameters"
        yield ContractChange(kind, "promotion.sampling", before.sampling, after.sampling, sentence)
    for name, tightens, added, removed in (
        ("approve", True, "a person has to approve stage", "nobody has to approve stage"),
        ("skip", False, "a version skips stage", "a version no longer skips stage"),
    ):
        was, becomes = list(getattr(before, name)), list(getattr(after, name))
        for stage in sorted({*was} ^ {*becomes}):
            more = stage in becomes
            sentence = f"{added if more else removed} {stage}"
            yield ContractChange(_tighter(more == tightens), f"promotion.{name}", was, becomes, sentence)


def _fewer(before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Return True if no new value is permitted, and no less has to be stated.

    A parameter that was not listed might not be used at all, so that listing it loosens too, whatever its values.
    """
    more = not after or (before and any({*values} - {*before.get(name, ())} for name, values in after.items()))
    return not (more or {*before} - {*after})
