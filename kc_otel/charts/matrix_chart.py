"""A table of states as a picture: rows and columns with names, each cell with its state in colour and in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kc_otel.charts.chart import TOP, Chart, drawing, label

__all__ = ["MatrixSquare", "draw_matrix"]

_ROW: Final = 52
_GAP: Final = 4.0


@dataclass(frozen=True, slots=True)
class MatrixSquare:
    """A cell.

    Attributes:
        kind: `pass`, `open`, `silent` or `fail`: its colour.
        words: The same in a word.
        below: What stands below it, smaller.
    """

    kind: str
    words: str
    below: str


def draw_matrix(
    title: str, rows: Sequence[str], columns: Sequence[str], squares: Mapping[tuple[str, str], MatrixSquare]
) -> Chart | None:
    """The chart; None without rows or columns. Pairs that have no square stay empty.

    Args:
        title: What is drawn.
        rows: Names, from above.
        columns: Names, from the left; they stand above.
        squares: By row and column.
    """
    if not rows or not columns:
        return None
    width, height = 100 / (len(columns) + 1), _ROW * len(rows)
    behind, above = [], []
    for index, column in enumerate(columns):
        above.append(label(column, f"{(index + 1.5) * width:.2f}%", TOP - 6, anchor="middle"))
    for line, row in enumerate(rows):
        top = TOP + _ROW * line
        above.append(label(row, f"{0.9 * width:.2f}%", top + 30, anchor="end"))
        for index, column in enumerate(columns):
            square = squares.get((row, column))
            if square is None:
                continue
            behind.append(
                f'<rect class="c-{square.kind}" x="{(index + 1.02) * width:.2f}%" y="{top + _GAP / 2:g}" '
                f'width="{0.96 * width:.2f}%" height="{_ROW - _GAP:g}" rx="3"/>'
            )
            middle = f"{(index + 1.5) * width:.2f}%"
            above.append(label(square.words, middle, top + 23, anchor="middle", kind="c-sign"))
            above.append(label(square.below, middle, top + 39, anchor="middle", kind="c-sign"))
    text = "; ".join(f"{row} with {column}: {one.words}, {one.below}" for (row, column), one in squares.items())
    return Chart(svg=drawing(height, title, text, behind, (), above), text=text)
