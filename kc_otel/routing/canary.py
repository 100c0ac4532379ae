"""Canary weights in the decision table: what a promotion sets and takes away."""

from __future__ import annotations

from kc_otel.routing.entries import Canary
from kc_otel.routing.table import DecisionTable, changed

__all__ = ["remove_canary", "set_canary"]


def set_canary(table: DecisionTable, wanted: Canary) -> DecisionTable:
    """Give a version of the inference kernel a share of a slice's requests, in place of the share that it had.

    Raises:
        ValueError: If the weight is no share, the version or the reason is empty, or it has ended already.
    """
    if not 0.0 <= wanted.weight <= 1.0:
        raise ValueError(f"weight: {wanted.weight!r} is not a share; write a number from 0 to 1, such as 0.05 for 5 %")
    if not wanted.version.strip():
        raise ValueError("version: it is empty; give the short fingerprint of the inference kernel version")
    if not wanted.reason.strip():
        raise ValueError("reason: it is empty; say why the version serves this share")
    if wanted.until is not None and wanted.until <= wanted.since:
        raise ValueError("until: lies before since; give a later time, or none for a canary without an end")
    place = (wanted.contract, wanted.slice, wanted.version)
    others = [one for one in table.canaries if (one.contract, one.slice, one.version) != place]
    return changed(table, wanted.since, canaries=[*others, wanted])


def remove_canary(
    table: DecisionTable, contract: str, version: str, slice: str | None = None, *, now: float
) -> DecisionTable:
    """Lift the limit on a version of the inference kernel: from now on it serves every request that it is asked for.

    Args:
        table: The table in force.
        contract: metadata.name.
        version: Short fingerprint of the inference kernel version.
        slice: Name of the slice; None for every slice.
        now: Unix time, seconds.

    Returns:
        The table without it, or the same table where there is no such canary.
    """
    kept = [
        one
        for one in table.canaries
        if (one.contract, one.version) != (contract, version) or slice not in {None, one.slice}
    ]
    return changed(table, now, canaries=kept)
