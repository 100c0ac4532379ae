"""What locating found as lines of text."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

from kc_otel.contract.words import number
from kc_otel.diagnose.above_noise import BoundaryDrift
from kc_otel.diagnose.boundaries import by_operator
from kc_otel.diagnose.located import OPERATORS, Divergence, Located
from kc_otel.diagnose.shares import ComponentShare, Shares

__all__ = [
    "HEADER",
    "SHARES_HEADER",
    "answer_lines",
    "located_lines",
    "located_sentence",
    "rows_of",
    "share_rows",
]

HEADER: Final = ("boundary", "own error", "drift", "floor", "prompt", "completion", "above")
SHARES_HEADER: Final = ("where", "share", "alone", "swapped out")
_SHOWN: Final = 12
_WORTH_SAYING: Final = 0.05


def located_lines(located: Located) -> Iterator[str]:
    """The answer, its evidence and what a reader has to know, a line each."""
    yield from answer_lines(located)
    for index, shares in enumerate(located.shares):
        yield from _share_lines(located, shares, layers=bool(index))
    yield ""
    yield from _table(located)
    for note in located.notes:
        yield f"note: {note}"


def answer_lines(located: Located) -> Iterator[str]:
    """What was looked at, the culprit, the first divergence, and what else is above noise."""
    yield (
        f"{located.contract}, slice {located.slice}: {located.sequences} sequences, {located.tokens} tokens, "
        f"{len(located.boundaries)} boundaries, {located.forwards} forwards of a sequence, {located.seconds:.1f} s"
    )
    first = located.first
    if first is None or located.culprit is None:
        yield "no culprit: no boundary is above noise"
    else:
        yield f"culprit: {finding_name(located.culprit)}"
        yield f"  {located.culprit.sentence}"
        if located.shares and located.shares[0].whole:
            largest = located.shares[0].components[0]
            yield f"  {_share(largest)} of {located.metric} on {located.slice} comes from {largest.name}"
        if first is not located.culprit:
            yield f"first divergence: {finding_name(first)}"
            yield f"  {first.sentence}"
        others = [each for each in located.findings if each is not first and each is not located.culprit]
        for each in others:
            if each.kind not in {"drift", "batch"}:
                yield f"also: {finding_name(each)}: {each.sentence}"
        for kind, said in (("drift", "above noise"), ("batch", "depends on the batch")):
            if named := by_operator(each.boundary for each in others if each.kind == kind):
                yield f"also {said}: {'; '.join(named)}"


def located_sentence(located: Located) -> str:
    """The answer in one line, for an incident's page and messages."""
    first, culprit = located.first, located.culprit
    seen = f"{located.sequences} sequences of {located.slice}, {located.confidence * 100:g} % confidence"
    if first is None or culprit is None:
        return f"no operator differs by more than noise on {seen}"
    said = [f"{'first divergence' if culprit is first else 'culprit'}: {finding_name(culprit)}"]
    if culprit.tensors:
        said.append(next(each for each in culprit.sentence.split("; ") if each.startswith("tensor ")))
    if located.shares and located.shares[0].whole:
        said.append(_largest_shares(located) + (" (roughly)" if located.is_rough else ""))
    if culprit is not first:
        said.append(f"first divergence: {finding_name(first)}{_part_of(first, located)}")
    return f"{'; '.join(said)} ({seen})"


def _largest_shares(located: Located) -> str:
    """What comes from which operators, and most of that from which layer."""
    whole = located.shares[0].components
    said = [f"{_share(whole[0])} of {located.metric} comes from {whole[0].name}"]
    if len(located.shares) > 1:
        layer = next(
            each for each in located.shares[1].components if each.name.startswith(whole[0].name.split(" in ")[0])
        )
        said[0] += f", {_percent(layer.share.estimate)} % from {layer.name.rpartition(' in ')[2]} alone"
    said += [f"{_share(each)} from {each.name}" for each in whole[1:3] if each.share.estimate >= _WORTH_SAYING]
    return "; ".join(said)


def _part_of(finding: Divergence, located: Located) -> str:
    """How much of the drift comes from a finding's operator, in all layers."""
    operator = finding.boundary.operator
    shares = located.shares[0].components if located.shares else ()
    found = next((each for each in shares if each.name.split(" in ")[0] == operator), None)
    return "" if found is None else f", {_percent(found.share.estimate)} % of it"


def finding_name(finding: Divergence) -> str:
    """Boundary, in words where they are others, and module."""
    words = OPERATORS.get(finding.boundary.operator, finding.boundary.operator)
    said = str(finding.boundary) if words == finding.boundary.operator else f"{finding.boundary} ({words})"
    kind = ", depends on the batch" if finding.kind == "batch" else ""
    return f"{said}{kind}" + (f", module {finding.module}" if finding.module else "")


def rows_of(located: Located) -> list[tuple[str, ...]]:
    """A row for each boundary, as `HEADER` says, in the order of execution."""
    return [
        (
            str(each.boundary),
            _number(each.local.estimate),
            _number(each.drift.estimate),
            number(each.floor),
            _number(each.prefill),
            _number(each.decode),
            f"{100 * each.above.estimate:.0f} %{' *' if each.is_above else ''}",
        )
        for each in located.boundaries
    ]


def share_rows(shares: Shares) -> list[tuple[str, ...]]:
    """A row for each component, as `SHARES_HEADER` says, the largest share first."""
    return [
        (each.name, _share(each), f"{_percent(each.alone)} %", f"{_percent(each.without)} %")
        for each in shares.components
    ]


def _share_lines(located: Located, shares: Shares, *, layers: bool) -> Iterator[str]:
    amount = f"{number(shares.whole)} of {number(located.observed)} observed"
    yield "by layer:" if layers else f"shares of {located.metric} on {located.slice}, {amount}:"
    for each in shares.components:
        yield (
            f"  {_share(each):>15}  {each.name}  (alone {_percent(each.alone)} %, "
            f"swapped out {_percent(each.without)} %)"
        )
    if len(shares.components) > 1:
        yield f"  {_percent(shares.interaction)} % is interaction: beyond the sum of each alone"


def _table(located: Located) -> Iterator[str]:
    rows = located.boundaries
    if not rows:
        return
    cells = rows_of(located)
    ranked = sorted(range(len(rows)), key=lambda index: -_over(rows[index]))
    shown = sorted(ranked[:_SHOWN])
    widths = [max(len(row[column]) for row in [HEADER, *(cells[i] for i in shown)]) for column in range(len(HEADER))]
    for row in [HEADER, *(cells[index] for index in shown)]:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    if len(rows) > len(shown):
        yield f"... and {len(rows) - len(shown)} that are nearer to their floor; all are in --json and --html"


def _over(row: BoundaryDrift) -> float:
    return _either(row.local.estimate, row.drift.estimate) / row.floor


def _either(value: float, other: float) -> float:
    return other if math.isnan(value) else value


def _number(value: float) -> str:
    return "" if math.isnan(value) else number(value)


def _share(component: ComponentShare) -> str:
    share = component.share
    return f"{_percent(share.estimate)} % [{_percent(share.lower)}, {_percent(share.upper)}]"


def _percent(share: float) -> str:
    return f"{100 * share:.0f}".replace("-0", "0") if abs(share) < 0.005 else f"{100 * share:.0f}"
