"""Which components to keep in higher precision, as lines of text, in a line, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from kc_otel.contract.words import listed, number, place
from kc_otel.judge.plain_json import to_plain
from kc_otel.offline.remedy.precision import PrecisionRemedy, PrecisionTrial

__all__ = ["precision_json", "precision_lines", "precision_sentence", "size", "smallest"]


def precision_lines(name: str, of: PrecisionRemedy) -> Iterator[str]:
    """What each component gives back alone, and what to keep, a line each.

    Args:
        name: The candidate kernel, such as `int8`.
        of: What was tried of it.
    """
    yield f"{name}: {_cell(of, of.plain)}" + (", gate passes" if of.plain.passes else "")
    for trial in sorted(of.alone, key=of.gives_back, reverse=True):
        yield f"  {', '.join(trial.kept):20} gives back {of.gives_back(trial):+.4f} for {size(trial.bytes)}"
    yield f"  {_answer(of)}"


def precision_sentence(name: str, of: PrecisionRemedy) -> str:
    """The answer in one line, for an incident's page and messages."""
    return f"{name}: {_answer(of)}"


def precision_json(found: dict[str, PrecisionRemedy]) -> dict[str, Any]:
    """Every run with its verdicts, by candidate: evidence."""
    return {name: to_plain(asdict(each)) for name, each in found.items()}


def size(bytes: int) -> str:
    """Bytes for a reader.

    >>> size(1_234_000_000), size(999)
    ('1.23 GB', '999 bytes')
    """
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if bytes >= factor:
            return f"{number(bytes / factor)} {unit}"
    return f"{bytes} bytes"


def _answer(of: PrecisionRemedy) -> str:
    if of.found is None or of.verified is None:
        return f"no set of components passes the gate ({of.runs} runs); the worst cell is {_cell(of, _closest(of))}"
    proven = "every cheaper set was run" if of.proven else f"the cheapest of {of.runs} runs"
    kept = f"keep {listed(sorted(of.found.kept), most=12)} in 16 bits (+{size(of.found.bytes)})"
    return (
        f"{kept if of.found.kept else 'keep nothing'}, gate passes on new requests: {_cell(of, of.verified)} ({proven})"
    )


def _closest(of: PrecisionRemedy) -> PrecisionTrial:
    return min((of.plain, *of.alone), key=lambda each: each.excess)


def _cell(of: PrecisionRemedy, trial: PrecisionTrial) -> str:
    found = trial.of(of.worst.cell)
    return (
        f"{found.cell.clause} on {place(found.cell.slice)} is {number(found.estimate)}, at most {number(found.upper)}, "
        f"limit {number(found.limit)}"
    )


def smallest(found: dict[str, tuple[int, PrecisionRemedy]]) -> str | None:
    """Of candidates that pass with what is kept of them the one that takes the least memory; None where none does."""
    able = {name: base + one.found.bytes for name, (base, one) in found.items() if one.found is not None}
    return min(able, key=able.__getitem__) if able else None
