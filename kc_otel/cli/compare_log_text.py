"""A comparison as text: for a terminal of any width, and for Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from kc_otel.contract.plain_text import plain
from kc_otel.judge.verdict import Verdict
from kc_otel.offline.compare_log.comparison import OURS, LogComparison, SliceReport, Tool
from kc_otel.offline.compare_log.definitions.llama_cpp import Printed
from kc_otel.stats import Interval

__all__ = ["as_markdown", "print_tables"]

_STYLE: Final = {"PASS": "green", "INCONCLUSIVE": "yellow", "NO_DATA": "magenta", "FAIL": "bold red"}
_WIDE: Final = 110
_GAP: Final = 2
_LOOK: Final[dict[str, Any]] = {
    "box": SIMPLE_HEAD,
    "title_justify": "left",
    "show_edge": False,
    "pad_edge": False,
    "padding": (0, _GAP, 0, 0),
}
_RAW: Final = " (before clipping)"
_TITLE: Final = {
    Tool.VERL: "verl",
    Tool.NEMO_RL: "NeMo-RL",
    Tool.TRL: "TRL, as by default: sequence_mask, clip_max 3",
    Tool.PRIME_RL: "prime-rl",
    Tool.LLAMA_CPP: "llama-perplexity --kl-divergence; base is the training kernel",
}


@dataclass(frozen=True, slots=True)
class _Group:
    """Rows of one tool: a name, what it is in our terms, a cell per slice."""

    title: str
    rows: list[tuple[str, str, list[str]]]


def as_markdown(comparison: LogComparison) -> str:
    """A heading, a table per tool, a table of verdicts."""
    shown = _shown(comparison)
    lines = [f"## {plain(_headline(comparison))}", ""]
    for group in _groups(shown):
        ours = any(each for _, each, _ in group.rows)
        heads = ["metric", *(["in our terms"] if ours else []), *(part.name for part in shown)]
        lines += [f"### {group.title}", "", *_markdown_head(heads)]
        lines += [_markdown_row([name, *([each] if ours else []), *cells]) for name, each, cells in group.rows]
        lines.append("")
    if comparison.judged is not None:
        lines += ["### Verdicts", "", *_markdown_head(["verdict", *_VERDICT_HEADS])]
        lines += [_markdown_row([str(v.status), *_verdict_cells(v)]) for v in comparison.judged.verdicts]
        lines.append("")
    return "\n".join([*lines, *(f"- {plain(note)}" for note in _notes(comparison))])


def print_tables(comparison: LogComparison, console: Console) -> None:
    """Tables that fit the console: where slices do not fit beside each other, they follow below each other."""
    shown = _shown(comparison)
    console.print(_text(_headline(comparison), style="bold"))
    for group in _groups(shown):
        for table in _tables(group, [part.name for part in shown], console.width):
            console.print(Text(), table)
    if comparison.judged is not None:
        console.print(Text(), *_verdict_tables(comparison.judged.verdicts, console.width), sep="\n")
    for note in _notes(comparison):
        console.print(_text(note, style="dim"))


def _text(said: str, style: str = "") -> Text:
    """What a terminal shows of a text that a recording, a file's name or a contract may have brought."""
    return Text(plain(said), style=style)


def _shown(comparison: LogComparison) -> list[SliceReport]:
    return [part for part in comparison.slices if part.tokens]


def _headline(comparison: LogComparison) -> str:
    masked = f"; {comparison.masked:,} more have no token that counts" if comparison.masked else ""
    return f"{comparison.source}: {comparison.sequences:,} sequences, {comparison.tokens:,} tokens{masked}"


def _groups(parts: Sequence[SliceReport]) -> Iterator[_Group]:
    own = [(name, "", [_interval(part.own.get(name)) for part in parts]) for name in _union(p.own for p in parts)]
    counts = [("sequences", "", [f"{p.sequences:,}" for p in parts]), ("tokens", "", [f"{p.tokens:,}" for p in parts])]
    yield _Group("kc-otel", [*counts, *own])
    for tool in Tool:
        numbers = [part.tools.get(tool, {}) for part in parts]
        names = _union(numbers)
        rows = [(name, OURS.get(name, ""), [_printed(each.get(name)) for each in numbers]) for name in names]
        # What a tool clips and what it clips it from have the same long names: a table each.
        printed = [row for row in rows if not row[0].endswith(_RAW)]
        raw = [(name.removesuffix(_RAW), ours, cells) for name, ours, cells in rows if name.endswith(_RAW)]
        if printed:
            yield _Group(_TITLE[tool], printed)
        if raw:
            yield _Group(f"{tool.upper()}, before it clips", raw)


def _union(mappings: Any) -> list[str]:
    """Every key once, in the order of first sight."""
    return list(dict.fromkeys(key for mapping in mappings for key in mapping))


def _tables(group: _Group, slices: Sequence[str], width: int) -> Iterator[Table]:
    names = max(len(name) for name, _, _ in group.rows)
    ours = max(len(each) for _, each, _ in group.rows) if width >= _WIDE else 0
    room = max(width - names - _GAP - (ours + _GAP if ours else 0), 1)
    first = 0
    while first < len(slices):
        last, used = first, 0
        while last < len(slices):
            used += max(len(slices[last]), *(len(cells[last]) for _, _, cells in group.rows)) + _GAP
            if used > room and last > first:
                break
            last += 1
        table = Table(title=group.title, **_LOOK)
        table.add_column("metric", overflow="fold")
        for name in slices[first:last]:
            table.add_column(_text(name), justify="right", overflow="fold")
        if ours:
            table.add_column("in our terms", style="dim", overflow="fold")
        for name, each, cells in group.rows:
            table.add_row(_text(name), *map(_text, cells[first:last]), *([_text(each)] if ours else []))
        yield table
        first = last


_VERDICT_HEADS: Final = ("clause", "slice", "estimate", "interval", "limit", "samples")


def _verdict_tables(verdicts: Sequence[Verdict], width: int) -> Iterator[RenderableType]:
    table = Table(title="Verdicts", **_LOOK)
    table.add_column("verdict", min_width=max(map(len, _STYLE)))
    kept = [place for place, head in enumerate(_VERDICT_HEADS) if head != "interval" or width >= _WIDE]
    for place in kept:
        table.add_column(_VERDICT_HEADS[place], justify="left" if place < 2 else "right", overflow="fold")
    for verdict in verdicts:
        cells = _verdict_cells(verdict)
        table.add_row(
            _text(str(verdict.status), style=_STYLE[verdict.status]), *(_text(cells[place]) for place in kept)
        )
    yield table
    for verdict in verdicts:
        if verdict.status in {"FAIL", "INCONCLUSIVE"}:
            yield _text(f"{verdict.cell.clause} on {verdict.cell.slice}: {verdict.reason}")


def _verdict_cells(verdict: Verdict) -> list[str]:
    interval = f"[{_bound(verdict.lower)}, {_bound(verdict.upper)}]"
    numbers = [_digits(verdict.estimate), interval] if verdict.samples else ["", ""]
    return [verdict.cell.clause, verdict.cell.slice, *numbers, f"{verdict.limit:.4g}", f"{verdict.samples:,}"]


def _notes(comparison: LogComparison) -> Iterator[str]:
    for part in comparison.slices:
        if not part.tokens:
            yield f"no sequence of this recording is in slice {part.name}"
    if comparison.judged is not None:
        yield from (f"not judged: {sentence}" for sentence in comparison.judged.left_out)
    if comparison.coarse is not None:
        yield str(comparison.coarse)
    yield (
        f"Each interval holds with {100 * comparison.confidence:g}% confidence and takes tokens as independent; that "
        f"of tv_seq takes sequences. A bound of inf is none: it needs more observations, or one was beyond the cap. "
        f"clip_budget_share is for a clip range of {comparison.clip:g}. ± is one standard error, as the tool has it."
    )


def _interval(of: Interval | None) -> str:
    if of is None:
        return "-"
    if of.lower == of.upper == of.estimate:
        return _digits(of.estimate)
    return f"{of.estimate:.3g} [{_bound(of.lower)}, {_bound(of.upper)}]"


def _printed(of: Printed | None) -> str:
    if of is None:
        return "-"
    return _digits(of.value) if of.error is None else f"{_digits(of.value)} ± {of.error:.2g}"


def _digits(number: float) -> str:
    return f"{number:.4g}"  # as many as tell two kernels apart; JSON has all of them


def _bound(number: float) -> str:
    return f"{number:.3g}"


def _markdown_head(heads: Sequence[str]) -> list[str]:
    return [_markdown_row(heads), _markdown_row(["---"] * len(heads))]


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(plain(cell).replace("|", "\\|") for cell in cells) + " |"
