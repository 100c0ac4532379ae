"""A contract with errors made whole, so that lint can look at the rest of it and everything is said at once.

What is broken is replaced by something harmless of the same name in the same place: an index still means the same
clause, and a reference to a broken slice still leads somewhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final

from kc_otel.contract.errors import Loc
from kc_otel.contract.fields import NAME_PATTERN
from kc_otel.contract.model import Contract

__all__ = ["repair"]

_WHOLE: Final[dict[str, Any]] = {
    "apiVersion": "kernel-contract/v1",
    "kind": "KernelContract",
    "metadata": {"name": "broken", "version": 1, "owner": "broken"},
    "kernels": {"train": {"engine": "broken-train"}, "inference": {"engine": "broken-inference"}},
    "observability": {},
    "promotion": {},
}
_METRIC: Final = {"numerical": "tv_exact", "statistical": "tv_token", "runtime": "weights_lag"}
# So wide that no limit is out of range because of them.
_ASSUMPTIONS: Final[dict[str, Any]] = {
    "reward_range": [-1e9, 1e9],
    "horizon": 10**9,
    "advantage_max": 1e9,
    "score_norm_max": 1e9,
    "clip": 1e-9,
}


def repair(data: dict[str, Any], broken: Iterable[Loc]) -> tuple[dict[str, Any], set[Loc]] | None:
    """Data without its broken places, and which these are.

    Args:
        data: What the file says.
        broken: Places that have errors.

    Returns:
        The data, and every place in it whose content is made up; None when a whole list or mapping is unusable.
    """
    result = {key: value for key, value in data.items() if key in Contract.model_fields}
    made_up: set[Loc] = set()
    for loc in broken:
        place = _repair_one(result, loc)
        if place is None:
            return None
        made_up.add(place)
    return result, made_up


def _repair_one(data: dict[str, Any], loc: Loc) -> Loc | None:
    section = str(loc[0]) if loc else ""
    if section in _WHOLE:
        data[section] = _WHOLE[section]
        return (section,)
    if section not in Contract.model_fields:
        return loc or None
    if len(loc) < 2:
        return None
    name, container = loc[1], data[section]
    if section == "slices" and "[key]" in loc:
        data[section] = {key: value for key, value in container.items() if key != name}
    elif section == "assumptions":
        known = {key: value for key, value in container.items() if key in _ASSUMPTIONS}
        data[section] = {**known, **({name: _ASSUMPTIONS[name]} if name in _ASSUMPTIONS else {})}
    elif isinstance(container, list) and isinstance(name, int):
        data[section] = [*container[:name], _item(section, name, container[name]), *container[name + 1 :]]
    else:
        data[section] = {**container, name: {"where": {"broken": str(name)}}}
    return (section, name)


def _item(section: str, index: int, written: Any) -> dict[str, Any]:
    if section == "escalation":
        return {"on": "fail", "do": [{"webhook": f"broken-{index}"}]}
    wanted = written.get("id") if isinstance(written, dict) else None
    usable = isinstance(wanted, str) and re.fullmatch(NAME_PATTERN, wanted)
    return {"id": wanted if usable else f"broken-{section}-{index}", "metric": _METRIC[section], "limit": 0.5}
