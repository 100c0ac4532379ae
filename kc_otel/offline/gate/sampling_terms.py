"""Check of a recording's sampling parameters against the contract's `promotion.sampling`.

Every sequence must state each parameter that the contract lists, with a listed value. Any other parameter must have a
neutral value. A row that states nothing is rejected: a missing top_p does not show that none was used.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from kc_otel.contract.promotion import SAMPLING_PARAMETERS
from kc_otel.contract.slices import Scalar
from kc_otel.recordings.recording import Recording
from kc_otel.recordings.request import NEUTRAL


def in_force(name: str, recording: Recording, allowed: Mapping[str, Sequence[Scalar]]) -> dict[str, list[Scalar]]:
    """Values of each sampling parameter that the sequences of a recording name, if `promotion.sampling` lists any.

    They are among the attributes of its sequences, by vLLM's names.

    Raises:
        ValueError: If a sequence does not say what is listed, or was sampled with what is not; one line a parameter.
    """
    found: dict[str, list[Scalar]] = {}
    problems: dict[str, str] = {}
    for row, attributes in enumerate(recording.attributes if allowed else ()):
        for parameter in SAMPLING_PARAMETERS:
            value = attributes.get(parameter)
            if value is not None:
                seen = found.setdefault(parameter, [])
                if any(_same(parameter, value, other, exact=True) for other in seen):
                    continue
                seen.append(value)
            if why := not_allowed(parameter, value, allowed):
                unread = f" (its {parameter} {recording.unread[parameter]})" if parameter in recording.unread else ""
                problems.setdefault(parameter, f"{name}: sequence {row}: {why}{unread}")
    if problems:
        raise ValueError("\n".join(problems.values()))
    return found


def not_allowed(parameter: str, value: Scalar | None, allowed: Mapping[str, Sequence[Scalar]]) -> str:
    """Return why `promotion.sampling` does not allow a value, None where nothing is said; empty if it does."""
    listed = allowed.get(parameter)
    if listed is None:
        neutral = NEUTRAL.get(parameter, (0, False, ""))
        if value is None or any(_same(parameter, value, other) for other in neutral):
            return ""
        return f"{parameter} is {value!r}, and promotion.sampling lists no {parameter}; list it, or sample without"
    said = ", ".join(map(repr, listed))
    if value is None:
        return f"says no {parameter}, of which promotion.sampling allows {said}; record it with each sequence"
    if any(_same(parameter, value, other) for other in listed):
        return ""
    return f"{parameter} is {value!r}, and promotion.sampling allows {said}"


def _same(parameter: str, value: Scalar, other: Scalar, *, exact: bool = False) -> bool:
    """Return True if two values are equal in single precision, or both neutral."""
    if isinstance(value, bool | str) or isinstance(other, bool | str):
        return type(value) is type(other) and value == other
    if exact:
        return value == other
    neutral = NEUTRAL.get(parameter, ())
    return math.isclose(value, other, rel_tol=1e-6) or (value in neutral and other in neutral)
