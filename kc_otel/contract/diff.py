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
        *(ContractChange(*found) for found in diff_escalation(old.escalation, new.escalation)),
        *(ContractChange(*found) for found in _promotion(old.promotion, new.promotion)),
    ]


def _metadata(old: Contract, new: Contract) -> Iterator[ContractChange]:
    yield from _plain("metadata", old.metadata, new.metadata)
    if old.metadata.version == new.metadata.version and old.hash != new.hash:
        version = old.metadata.version
        yield ContractChange(
            "changes", "metadata.version", version, version, f"the content differs, but version is still {version}"
        )


def _plain(path: str, old: Any, new: Any) -> Iterator[ContractChange]:
    for name in type(old).model_fields:
        before, after = getattr(old, name), getattr(new, name)
        if before != after:
            yield ContractChange(
                "changes", f"{path}.{name}", before, after, f"{_shown(before)} becomes {_shown(after)}"
            )


def _assumptions(old: Contract, new: Contract) -> Iterator[ContractChange]:
    kept = {clause.metric for clause in old.clauses} & {clause.metric for clause in new.clauses} & set(DERIVED)
    for name in type(old.assumptions).model_fields:
        before, after = getattr(old.assumptions, name), getattr(new.assumptions, name)
        if before == after:
            continue
        path = f"assumptions.{name}"
        users = sorted(metric for metric in kept if name in DERIVED[metric].needs)
        if not users or before is None or after is None:
            yield ContractChange("changes", path, before, after, "no bound of both versions is made of it")
            continue
        metric = users[0]
        # Only this assumption is changed, so that each one is judged on its own.
        scale = scale_of(metric, old.assumptions) or 0.0
        scale_after = scale_of(metric, old.assumptions.model_copy(update={name: after})) or 0.0
        factor = scale_after / scale
        if factor == 1.0:
            yield ContractChange("changes", path, before, after, "shifts the range, which leaves every bound as it is")
            continue
        kind: ChangeKind = "tightens" if factor > 1.0 else "loosens"
        yield ContractChange(
            kind, path, before, after, f"the same drift counts {factor:.3g} times as much in {', '.join(users)}"
        )


def _slices(old: Contract, new: Contract) -> Iterator[ContractChange]:
    for name, spec in old.slices.items():
        path = f"slices.{name}"
        if name not in new.slices:
            yield ContractChange("drops", path, spec.where, None, f"{name} is no longer judged on its own")
            continue
        after = new.slices[name]
        if spec.conditions != after.conditions:
            narrower, wider = (
                not covers(after.conditions, spec.conditions),
                not covers(spec.conditions, after.conditions),
            )
            if narrower:
                yield ContractChange("loosens", f"{path}.where", spec.where, after.where, f"some traffic leaves {name}")
            elif wider:
                yield ContractChange(
                    "changes", f"{path}.where", spec.where, after.where, f"more traffic belongs to {name}"
                )
        if spec.description != after.description:
            yield ContractChange(
                "changes", f"{path}.description", spec.description, after.description, "described differently"
            )
    for name, spec in new.slices.items():
        if name not in old.slices:
            yield ContractChange("adds", f"slices.{name}", None, spec.where, f"{name} is judged on its own")


def _clauses(old: Contract, new: Contract) -> Iterator[ContractChange]:
    before, after = _by_id(old), _by_id(new)
    for name, (section, clause) in before.items():
        path = f"{section}[{name}]"
        if name not in after:
            yield ContractChange("drops", path, _promise(clause), None, f"{_promise(clause)} is no longer promised")
            continue
        other_section, other = after[name]
        kind = _compare(clause, other)
        if kind == "other":
            yield ContractChange("drops", path, _promise(clause), None, f"{_promise(clause)} is no longer promised")
            path = f"{other_section}[{name}]"
            yield ContractChange("adds", path, None, _promise(other), f"{_promise(other)} is promised instead")
            continue
        if kind != "same":
            wording = "a statistic that is never smaller" if kind == "tightens" else "a statistic that is never larger"
            yield ContractChange(kind, f"{path}.statistic", _named(clause), _named(other), f"{wording} is limited")
        yield from _limits(path, clause, other, {ALL, *(set(old.slices) & set(new.slices))})
        if clause.description != other.description:
            yield ContractChange(
                "changes", f"{path}.description", clause.description, other.description, "described differently"
            )
    for name, (section, clause) in after.items():
        if name not in before:
            yield ContractChange(
                "adds", f"{section}[{name}]", None, _promise(clause), f"{_promise(clause)} is promised"
            )


def _by_id(contract: Contract) -> dict[str, tuple[str, Clause]]:
    sections = ("numerical", "statistical", "runtime")
    return {clause.id: (section, clause) for section in sections for clause in getattr(contract, section)}


def _limits(path: str, old: Clause, new: Clause, slices: set[str]) -> Iterator[ContractChange]:
    """Yield changed limits of slices; `limit` covers those that have the clause's own limit in both versions."""
    own = {name for name in slices if name in old.slices or name in new.slices}
    for name in (ALL, *sorted(own - {ALL})):
        before, after = old.limit_for(name), new.limit_for(name)
        if before == after:
            continue
        field = f"{path}.limit" if name == ALL else f"{path}.slices.{name}"
        kind: ChangeKind = "loosens" if after > before else "tightens"
        where = "everywhere else" if name == ALL and own else "everywhere" if name == ALL else f"on {name}"
        yield ContractChange(kind, field, before, after, f"{old.metric} may be {after:g} instead of {before:g} {where}")


def _compare(old: Clause, new: Clause) -> Literal["same", "tightens", "loosens", "other"]:
    """Compare the new clause's statistic with the old one's on the same data."""
    if (old.metric, old.operator, old.averaged) != (new.metric, new.operator, new.averaged):
        return "other"
    before, after = _rank(old), _rank(new)
    if before == after:
        return "same"
    if before[0] != after[0]:
        return "other"
    return "tightens" if after[1] > before[1] else "loosens"


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
        shown: Callable[[Any], str] = _shown
        if name in _MORE_IS_TIGHTER:
            kind = "tightens" if after > before else "loosens"
        elif name in _LESS_IS_TIGHTER:
            kind = "loosens" if after > before else "tightens"
        if name not in _MORE_IS_TIGHTER:
            before, after, shown = format_duration(before), format_duration(after), str
        yield ContractChange(
            kind,
            f"observability.{name}",
            before,
            after,
            f"{shown(before)} becomes {shown(after)}: {_EFFECT_OF_FIELD[name]}",
        )


_EFFECT_OF_FIELD: Final = {
    "window": "a PASS rests on another span of time",
    "long_window": "verdicts that the window leaves open rest on another span of time",
    "confidence": "a PASS requires this confidence",
    "false_alarms": "this is the expected time between false alarms; a shorter one finds faults sooner",
    "min_samples": "a verdict on tokens needs this many of them",
    "min_sequences": "a verdict on sequences needs this many of them",
    "sampling": "this share of batches is measured",
    "heartbeat": "silence is noticed after this long",
    "max_series": "slices beyond this many streams are lost to 'other'",
}


def _shown(value: Any) -> str:
    return "nothing" if value is None or value == "" else repr(value)


_SEVERITY: Final = {"info": 0, "warning": 1, "critical": 2}

_Difference = tuple[ChangeKind, str, Any, Any, str]
_PairingKey = Callable[[EscalationStep], object]

_KEYS: Final[tuple[_PairingKey, ...]] = (
    lambda step: (step.on, frozenset(step.clauses), step.severity, step.after, frozenset(map(str, step.do))),
    lambda step: (step.on, frozenset(step.clauses), step.severity),
    lambda step: (step.on, frozenset(step.clauses)),
    lambda step: (step.on, step.severity),
    lambda step: step.on,
)


def diff_escalation(old: Sequence[EscalationStep], new: Sequence[EscalationStep]) -> Iterator[_Difference]:
    """Kind, field, old, new and a sentence for every difference."""
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
        yield (
            "drops",
            f"escalation[{index}]",
            _said(old[index]),
            None,
            f"{_said(old[index])} no longer happens",
        )
    for index in right:
        yield "adds", f"escalation[{index}]", None, _said(new[index]), f"{_said(new[index])} happens too"


def _step(path: str, old: EscalationStep, new: EscalationStep) -> Iterator[_Difference]:
    if old.after != new.after:
        kind: Literal["tightens", "loosens"] = "loosens" if new.after > old.after else "tightens"
        before, after = format_duration(old.after), format_duration(new.after)
        yield kind, f"{path}.for", before, after, f"fires after {after} instead of {before}"
    if old.clear_for != new.clear_for:
        kind = "loosens" if new.clear_for < old.clear_for else "tightens"
        before, after = format_duration(old.clear_for), format_duration(new.clear_for)
        yield kind, f"{path}.clear_for", before, after, f"resolves after {after} instead of {before}"
    if old.repeat != new.repeat:
        rarer = new.repeat == 0 or (old.repeat > 0 and new.repeat > old.repeat)
        before, after = format_duration(old.repeat), format_duration(new.repeat)
        how = f"reminds every {after}" if new.repeat else "reminds nobody"
        yield "loosens" if rarer else "tightens", f"{path}.repeat", before, after, f"{how} ({before} before)"
    if old.severity != new.severity:
        kind = "loosens" if _SEVERITY[new.severity] < _SEVERITY[old.severity] else "tightens"
        yield kind, f"{path}.severity", old.severity, new.severity, f"is {new.severity} instead of {old.severity}"
    yield from _step_clauses(path, set(old.clauses), set(new.clauses))
    before_do, after_do = {str(action) for action in old.do}, {str(action) for action in new.do}
    for action in sorted(before_do - after_do):
        yield "drops", f"{path}.do", action, None, f"on {old.on}, {action} no longer happens"
    for action in sorted(after_do - before_do):
        yield "adds", f"{path}.do", None, action, f"on {new.on}, {action} happens too"


def _step_clauses(path: str, old: set[str], new: set[str]) -> Iterator[_Difference]:
    if old == new:
        return
    # No clauses means all of them.
    left_out = bool(new) and (not old or bool(old - new))
    before, after = sorted(old) or ["all"], sorted(new) or ["all"]
    sentence = f"waits for {', '.join(after)} instead of {', '.join(before)}"
    yield "loosens" if left_out else "tightens", f"{path}.clauses", before, after, sentence


def _said(step: EscalationStep) -> str:
    after = f" for {format_duration(step.after)}" if step.after else ""
    return f"{', '.join(map(str, step.do))} on {step.on}{after} ({step.severity})"


def _promotion(before: PromotionTerms, after: PromotionTerms) -> Iterator[_Difference]:
    if before.windows != after.windows:
        kind: Literal["tightens", "loosens"] = "loosens" if after.windows < before.windows else "tightens"
        sentence = f"a step asks for {after.windows} windows of PASS instead of {before.windows}"
        yield kind, "promotion.windows", before.windows, after.windows, sentence
    if before.failure_limit != after.failure_limit:
        kind = "loosens" if after.failure_limit > before.failure_limit else "tightens"
        sentence = f"a version is rolled back after {after.failure_limit} failing windows, not {before.failure_limit}"
        yield kind, "promotion.failure_limit", before.failure_limit, after.failure_limit, sentence
    if before.steps != after.steps:
        steps = [", ".join(map(shown_share, terms.steps)) for terms in (before, after)]
        sentence = f"a canary serves {steps[1]} instead of {steps[0]}"
        yield _steps(before.steps, after.steps), "promotion.steps", steps[0], steps[1], sentence
    for stage in sorted({*before.approve} ^ {*after.approve}):
        kind = "loosens" if stage in before.approve else "tightens"
        who = "nobody has to" if stage in before.approve else "a person has to"
        yield kind, "promotion.approve", list(before.approve), list(after.approve), f"{who} let a version into {stage}"
    for skipped in sorted({*before.skip} ^ {*after.skip}):
        kind = "tightens" if skipped in before.skip else "loosens"
        what = "asked for again" if skipped in before.skip else "skipped"
        yield kind, "promotion.skip", list(before.skip), list(after.skip), f"stage {skipped} is {what}"
    if before.sampling != after.sampling:
        yield (
            _sampling(before.sampling, after.sampling),
            "promotion.sampling",
            before.sampling,
            after.sampling,
            ("recordings may be made with other sampling parameters"),
        )


def _sampling(before: dict[str, Any], after: dict[str, Any]) -> Literal["tightens", "loosens"]:
    """Values that might not be used before loosen, and so does what need not be said any more.

    A parameter that was not listed might not be used at all, so that listing it loosens too, whatever its values.
    """
    more = not after or (before and any({*values} - {*before.get(name, ())} for name, values in after.items()))
    return "loosens" if more or {*before} - {*after} else "tightens"


def _steps(before: tuple[float, ...], after: tuple[float, ...]) -> Literal["tightens", "loosens"]:
    """A jump between two shares that no gate stands between any more is a loosening, wherever it is."""
    reached = (0.0, *after, 1.0)
    for low, high in pairwise(reached):
        if any(low < share < high for share in before):
            return "loosens"
    return "tightens"
