"""What the demo prints: a line per thing that happens, with its time, and tables of verdicts."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

STYLE = {"PASS": "green", "INCONCLUSIVE": "yellow", "NO_DATA": "magenta", "FAIL": "bold red"}


class Terminal:
    """Prints, and remembers the moments for the timeline at the end."""

    def __init__(self) -> None:
        self.console = Console(highlight=False, soft_wrap=True)
        self.moments: list[tuple[float, str]] = []
        self._began = time.monotonic()

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._began

    def heading(self, text: str) -> None:
        """A new act."""
        self.console.print()
        self.console.print(Text(text, style="bold"))

    def say(self, text: str, style: str = "") -> None:
        """A line with its time."""
        self.console.print(Text(f"{self.elapsed:6.1f} s  ", style="dim") + Text(text, style=style))

    def detail(self, text: str) -> None:
        """What belongs to the line before."""
        self.console.print(Text(f"{'':10} {text}"))

    def moment(self, text: str, style: str = "bold") -> None:
        """A line that comes again in the timeline."""
        self.moments.append((self.elapsed, text))
        self.say(text, style)

    def timeline(self) -> None:
        """The moments."""
        for at, text in self.moments:
            self.console.print(Text(f"{at:6.1f} s  ", style="dim") + Text(text))

    def rows(self, headers: Iterable[str], rows: Iterable[Iterable[str | Text]], left: int = 1) -> None:
        """A table whose first `left` columns are text and the others numbers."""
        table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
        for number, header in enumerate(headers):
            table.add_column(header, justify="left" if number < left else "right", no_wrap=True)
        for row in rows:
            table.add_row(*row)
        self.console.print(table)

    def verdicts(self, verdicts: list[dict[str, Any]], kernels: dict[str, str]) -> None:
        """Every cell: what was measured, within which interval, against which limit."""
        self.rows(
            ("clause", "slice", "kernel", "verdict", "estimate", "interval", "limit", "samples"),
            (
                (
                    v["clause"],
                    v["slice"],
                    kernels.get(v["kernel_inference"], v["kernel_inference"] or "-"),
                    Text(v["status"], style=STYLE[v["status"]]),
                    number(v["estimate"]),
                    f"[{number(v['lower'])}, {number(v['upper'])}]",
                    number(v["limit"]),
                    f"{v['samples']:,}",
                )
                for v in verdicts
            ),
            left=4,
        )


def number(value: float | None) -> str:
    """Two significant digits where they matter, and a dash for what is not known."""
    if value is None:
        return "-"
    return f"{value:.0e}" if 0 < abs(value) < 5e-5 else f"{value + 0.0:.2g}"  # + 0.0: no minus before a zero
