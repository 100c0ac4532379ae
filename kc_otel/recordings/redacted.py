"""Redaction of sequences, for users who want neither prompts nor answers on a disk."""

from __future__ import annotations

from enum import StrEnum


class Redacted(StrEnum):
    """A part of a sequence."""

    PROMPTS = "prompts"
    COMPLETIONS = "completions"
