"""Differences between two escalation policies.

Steps have no name, so they are paired: equal ones first, then those that wait for the same verdict on the same clauses
with the same severity, then with fewer of these in common. What is left over was dropped or added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Literal

from kc_otel.contract.policy import EscalationStep
from kc_otel.contract.units import format_duration

__all__ = ["diff_escalation"]

_SEVERITY: Final = {"info": 0, "warning": 1, "critical": 2}

_Difference = tuple[Literal["tightens", "loosens", "adds", "drops", "changes"], str, Any, Any, str]
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
        yield "drops", f"escalation[{index}]", _shown(old[index]), None, f"{_shown(old[index])} no longer happens"
    for index in right:
        yield "adds", f"escalation[{index}]", None, _shown(new[index]), f"{_shown(new[index])} happens too"


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
    yield from _clauses(path, set(old.clauses), set(new.clauses))
    before_do, after_do = {str(action) for action in old.do}, {str(action) for action in new.do}
    for action in sorted(before_do - after_do):
        yield "drops", f"{path}.do", action, None, f"on {old.on}, {action} no longer happens"
    for action in sorted(after_do - before_do):
        yield "adds", f"{path}.do", None, action, f"on {new.on}, {action} happens too"


def _clauses(path: str, old: set[str], new: set[str]) -> Iterator[_Difference]:
    if old == new:
        return
    # No clauses means all of them.
    left_out = bool(new) and (not old or bool(old - new))
    before, after = sorted(old) or ["all"], sorted(new) or ["all"]
    sentence = f"waits for {', '.join(after)} instead of {', '.join(before)}"
    yield "loosens" if left_out else "tightens", f"{path}.clauses", before, after, sentence


def _shown(step: EscalationStep) -> str:
    after = f" for {format_duration(step.after)}" if step.after else ""
    return f"{', '.join(map(str, step.do))} on {step.on}{after} ({step.severity})"
