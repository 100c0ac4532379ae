"""What locating found as a document: the answer, the picture of drift along depth, shares and every boundary."""

from __future__ import annotations

from collections.abc import Iterator

from kc_otel.diagnose.depth_picture import depth_chart
from kc_otel.diagnose.located import Located, located_json
from kc_otel.diagnose.located_text import (
    HEADER,
    SHARES_HEADER,
    answer_lines,
    located_sentence,
    rows_of,
    share_rows,
)
from kc_otel.report.document import Block, Bullets, Figure, Heading, Table, Text

__all__ = ["located_blocks"]


def located_blocks(located: Located) -> list[Block]:
    """The document; the first paragraph is what stands on an incident."""
    chart = depth_chart(located_json(located))
    asked, *answer = answer_lines(located)
    return [
        Heading(1, "Which operator it is"),
        Text(_sentence(located_sentence(located))),
        Text(_sentence(asked)),
        Bullets(tuple(each.strip() for each in answer)),
        Figure(chart, chart.text),
        *_shares(located),
        Heading(2, "Every boundary"),
        Table(HEADER, tuple(rows_of(located))),
        Text(
            "* is above noise. Own error: on the training kernel's inputs; drift: as both run, with all from upstream."
        ),
        *(Text(_sentence(f"Note: {each}")) for each in located.notes),
    ]


def _shares(located: Located) -> Iterator[Block]:
    for index, shares in enumerate(located.shares):
        where = "which layer" if index else "which operator"
        yield Heading(2, f"From {where} {located.metric} on {located.slice} comes")
        yield Table(SHARES_HEADER, tuple(share_rows(shares)))


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."
