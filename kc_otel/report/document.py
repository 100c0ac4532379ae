"""A document as blocks, and the same blocks as one HTML file or as Markdown.

The HTML carries its style and its pictures in itself and asks for nothing else, so that it can be attached, mailed and
archived. Equal blocks give equal bytes.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

__all__ = ["Block", "Bullets", "Heading", "Picture", "Table", "Text", "to_html", "to_markdown"]

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
class Picture:
    """A drawing and the sentence that says the same; Markdown has only the sentence, unless what is there says it."""

    svg: str
    says: str
    repeated: bool = False


Block = Heading | Text | Bullets | Table | Picture

_STYLE: Final = """\
:root{color-scheme:light dark;--ground:#fff;--text:#14171f;--quiet:#5a6272;--line:#dfe3ea;--accent:#3b5bdb;
--band:rgba(59,91,219,.18);--fail:#c01c28;--silent:#7a3ea8;--open:#8a5a00;--pass:#1a7340}
@media (prefers-color-scheme:dark){:root{--ground:#12151b;--text:#e8ebf1;--quiet:#9aa4b5;--line:#2f3644;
--accent:#8da2fb;--band:rgba(141,162,251,.22);--fail:#ff8a8f;--silent:#cfa3f3;--open:#f0c363;--pass:#6fd393}}
body{font:15px/1.5 system-ui,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;background:var(--ground);color:var(--text);
max-width:72rem;margin:0 auto;padding:2rem 1rem 4rem;overflow-wrap:anywhere;font-variant-numeric:tabular-nums}
h1{font-size:1.6rem;line-height:1.25;margin:0 0 .25rem}
h2{font-size:1.2rem;margin:2.2rem 0 .4rem;padding-top:1.2rem;border-top:1px solid var(--line)}
h3{font-size:1rem;margin:1.4rem 0 .3rem}p,ul{margin:.4rem 0}ul{padding-left:1.2rem}
.scroll{overflow-x:auto}table{border-collapse:collapse;width:100%;font-size:.88rem;margin:.5rem 0;overflow-wrap:normal}
th,td{text-align:left;padding:.3rem .9rem .3rem 0;border-bottom:1px solid var(--line);vertical-align:top}
td:not(:last-child){white-space:nowrap}td:last-child{min-width:13rem}th{font-weight:500;color:var(--quiet)}.state{font-weight:650;white-space:nowrap}
.fail{color:var(--fail)}.silent{color:var(--silent)}.open{color:var(--open)}.pass{color:var(--pass)}
figure{margin:.75rem 0}figcaption{font-size:.88rem;color:var(--quiet)}
.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,27rem),1fr));gap:.25rem 2rem}
svg{width:100%;height:auto;max-width:40rem;display:block}svg text{font:12px system-ui,sans-serif;fill:var(--quiet)}
svg .grid{stroke:var(--line)}svg .band{fill:var(--band)}svg .line{fill:none;stroke:var(--accent);stroke-width:2}
svg .over{fill:none;stroke:var(--fail);stroke-width:2.5}svg .bar{fill:var(--band);stroke:var(--accent)}
svg .other{fill:none;stroke:var(--open);stroke-dasharray:4 3}
svg .limit{stroke:var(--fail);stroke-width:1.5;stroke-dasharray:5 4;fill:none}svg .limit-text{fill:var(--fail)}
svg .interval{stroke:var(--accent);stroke-width:6;stroke-opacity:.45}svg .dot{fill:var(--accent)}
@media print{:root{color-scheme:light;--ground:#fff;--text:#14171f;--quiet:#5a6272;--line:#dfe3ea;--accent:#3b5bdb;
--band:rgba(59,91,219,.18);--fail:#c01c28;--silent:#7a3ea8;--open:#8a5a00;--pass:#1a7340}figure,tr{break-inside:avoid}
.scroll{overflow:visible}td:not(:last-child){white-space:normal}td:last-child{min-width:0}}
"""


def to_html(title: str, blocks: Sequence[Block]) -> str:
    """One file with everything in it."""
    body = "\n".join(_together(drawn, run) for drawn, run in groupby(blocks, lambda one: isinstance(one, Picture)))
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_escaped(title)}</title>\n<style>\n{_STYLE}</style>\n</head>\n<body>\n<main>\n{body}\n"
        "</main>\n</body>\n</html>\n"
    )


def to_markdown(blocks: Sequence[Block]) -> str:
    """The same as text, for a pull request or an issue."""
    told = [block for block in blocks if not (isinstance(block, Picture) and block.repeated)]
    return "\n\n".join(_markdown(block) for block in told) + "\n"


def _together(drawn: bool, run: Iterable[Block]) -> str:
    """Blocks one below the other; pictures that follow each other side by side where there is room."""
    text = "\n".join(_html(block) for block in run)
    return f'<div class="figures">\n{text}\n</div>' if drawn else text


def _html(block: Block) -> str:
    match block:
        case Heading(level, text):
            return f"<h{level}>{_escaped(text)}</h{level}>"
        case Text(text, state):
            return f"<p>{_state(state) + ' ' if state else ''}{_escaped(text)}</p>"
        case Bullets(items):
            return "<ul>\n" + "\n".join(f"<li>{_escaped(item)}</li>" for item in items) + "\n</ul>"
        case Picture(svg, says, _):
            return f"<figure>{svg}<figcaption>{_escaped(says)}</figcaption></figure>"
        case Table(header, rows):
            head = "".join(f'<th scope="col">{_escaped(cell)}</th>' for cell in header)
            lines = [f"<tr>{''.join(f'<td>{_cell(cell)}</td>' for cell in row)}</tr>" for row in rows]
            body = "\n".join(lines)
            return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>'


def _cell(text: str) -> str:
    return _state(text) if text in TONES else _escaped(text)


def _escaped(text: str) -> str:
    return html.escape(_visible(text))


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
        case Picture(_, says, _):
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
    line = re.sub(r"([\\`*_\[\]<>|#~&$])", r"\\\1", _visible(" ".join(text.split())))
    line = re.sub(r"^(?=[-+=])|^(\d+)(?=[.)](?:\s|$))", r"\1\\", line)  # no list, no underline
    return line.replace("@", "@\u200b")


def _visible(text: str) -> str:
    """Without characters that are not seen but change how the others are read."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e\u2066-\u2069]", "\ufffd", text)
