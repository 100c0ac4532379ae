"""What of a sequence is not kept, for who wants neither prompts nor answers on a disk."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["Redacted"]


class Redacted(StrEnum):
    """A part of a sequence."""

    PROMPTS = "prompts"
    COMPLETIONS = "completions"
