"""A document as blocks, and the same blocks as one HTML file or as Markdown.

The HTML carries its style and its pictures in itself and asks for nothing else, so that it can be attached, mailed and
archived. Equal blocks give equal bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from kc_otel.charts import Chart, chart_style, escaped
from kc_otel.contract.words import visible

__all__ = ["Block", "Bullets", "Figure", "Heading", "Table", "Text", "to_html", "to_markdown"]

TONES: Final = {"FAIL": "fail", "NO_DATA": "silent", "INCONCLUSIVE": "open", "PASS": "pass"}
_SHAPES: Final = {"FAIL": "✕", "NO_DATA": "○", "INCONCLUSIVE": "?", "PASS": "✓"}


@dataclass(frozen=True, slots=True)
class Heading:
    """A heading of level 1, 2 or 3."""

    level: int
    text: str


@dataclass(frozen=True, slots=True)
class Text:
    """A paragraph; `state` puts a verdict in front of it."""

    text: str
    state: str = ""


@dataclass(frozen=True, slots=True)
class Bullets:
    """A list."""

    items: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """A table; cells that say a verdict's status are set off as such."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Figure:
    """A chart and the sentence that says the same; Markdown has only the sentence, unless what is there says it."""

    chart: Chart
    says: str
    repeated: bool = False


Block = Heading | Text | Bullets | Table | Figure

_STYLE: Final = """\
:root{--ground:var(--card)}
body{font:15px/1.5 system-ui,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;background:var(--ground);color:var(--text);
max-width:72rem;margin:0 auto;padding:2rem 1rem 4rem;overflow-wrap:anywhere;font-variant-numeric:tabular-nums}
h1{font-size:1.6rem;line-height:1.25;margin:0 0 .25rem}
h2{font-size:1.2rem;margin:2.2rem 0 .4rem;padding-top:1.2rem;border-top:1px solid var(--line)}
h3{font-size:1rem;margin:1.4rem 0 .3rem}p,ul{margin:.4rem 0}ul{padding-left:1.2rem}
.scroll{overflow-x:auto}table{border-collapse:collapse;width:100%;font-size:.88rem;margin:.5rem 0;overflow-wrap:normal}
th,td{text-align:left;padding:.3rem .9rem .3rem 0;border-bottom:1px solid var(--line);vertical-align:top}
td:not(:last-child){white-space:nowrap}td:last-child{min-width:13rem}th{font-weight:500;color:var(--quiet)}
@media (max-width:64rem){td:not(:last-child){white-space:normal}td:last-child{min-width:9rem}}
.state{font-weight:650;white-space:nowrap}
.fail{color:var(--fail)}.silent{color:var(--silent)}.open{color:var(--open)}.pass{color:var(--pass)}
figure{margin:.75rem 0;min-width:0}figcaption{font-size:.88rem;color:var(--quiet)}
.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,27rem),1fr));gap:.25rem 2rem}
@media print{figure,tr{break-inside:avoid}.scroll{overflow:visible}td:not(:last-child){white-space:normal}
td:last-child{min-width:0}}
"""


def to_html(title: str, blocks: Sequence[Block]) -> str:
    """One file with everything in it."""
    body = "\n".join(_together(drawn, run) for drawn, run in groupby(blocks, lambda one: isinstance(one, Figure)))
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escaped(title)}</title>\n<style>\n{chart_style()}{_STYLE}</style>\n</head>\n<body>\n<main>\n{body}\n"
        "</main>\n</body>\n</html>\n"
    )


def to_markdown(blocks: Sequence[Block]) -> str:
    """The same as text, for a pull request or an issue."""
    new = [block for block in blocks if not (isinstance(block, Figure) and block.repeated)]
    return "\n\n".join(_markdown(block) for block in new) + "\n"


def _together(drawn: bool, run: Iterable[Block]) -> str:
    """Blocks one below the other; pictures that follow each other side by side where there is room."""
    text = "\n".join(_html(block) for block in run)
    return f'<div class="figures">\n{text}\n</div>' if drawn else text


def _html(block: Block) -> str:
    match block:
        case Heading(level, text):
            return f"<h{level}>{escaped(text)}</h{level}>"
        case Text(text, state):
            return f"<p>{_state(state) + ' ' if state else ''}{escaped(text)}</p>"
        case Bullets(items):
            return "<ul>\n" + "\n".join(f"<li>{escaped(item)}</li>" for item in items) + "\n</ul>"
        case Figure(chart, says, _):
            key = "".join(f"<span>{sign}{escaped(text)}</span>" for sign, text in chart.key)
            key = f'<p class="key">{key}</p>' if key else ""
            return f"<figure>{key}{chart.svg}<figcaption>{escaped(says)}</figcaption></figure>"
        case Table(header, rows):
            head = "".join(f'<th scope="col">{escaped(cell)}</th>' for cell in header)
            lines = [f"<tr>{''.join(f'<td>{_cell(cell)}</td>' for cell in row)}</tr>" for row in rows]
            body = "\n".join(lines)
            return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>'


def _cell(text: str) -> str:
    return _state(text) if text in TONES else escaped(text)


def _state(status: str) -> str:
    return f'<span class="state {TONES[status]}">{_SHAPES[status]} {status}</span>'


def _markdown(block: Block) -> str:
    match block:
        case Heading(level, text):
            return f"{'#' * level} {_plain(text)}"
        case Text(text, state):
            return f"**{state}** {_plain(text)}" if state else _plain(text)
        case Bullets(items):
            return "\n".join(f"- {_plain(item)}" for item in items)
        case Figure(_, says, _):
            return f"> {_plain(says)}"
        case Table(header, rows):
            return "\n".join(_lines(header, rows))


def _lines(header: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterable[str]:
    yield _row(header)
    yield "|" + " --- |" * len(header)
    for row in rows:
        yield _row([f"**{cell}**" if cell == "FAIL" else _plain(cell) for cell in row])


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _plain(text: str) -> str:
    """Text that Markdown shows as it is and that calls nobody: names come from contracts and senders."""
    line = re.sub(r"([\\`*_\[\]<>|#~&$])", r"\\\1", visible(" ".join(text.split())))
    line = re.sub(r"^(?=[-+=])|^(\d+)(?=[.)](?:\s|$))", r"\1\\", line)  # no list, no underline
    return line.replace("@", "@\u200b")
