"""Standard output that nobody has to read to its end: `kc-otel gate run ... | head -1` decides as without `head`."""

from __future__ import annotations

import io
import os
import sys
from typing import Any

__all__ = ["outlive_readers"]


class _Unbroken(io.FileIO):
    """A file whose reader may go; what is written then goes nowhere."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return len(data)


def outlive_readers() -> None:
    """From now on a program that stops reading what this one prints changes neither what it does nor its exit code."""
    out = sys.stdout
    if not isinstance(out, io.TextIOWrapper):
        return
    try:
        descriptor = out.fileno()
    except io.UnsupportedOperation:  # it is kept in memory by who called, and nobody reads it meanwhile
        return
    out.flush()
    raw = _Unbroken(descriptor, "w", closefd=False)
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(raw), encoding=out.encoding, errors=out.errors, line_buffering=out.line_buffering
    )
