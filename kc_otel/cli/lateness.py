"""Whether what an evaluator says is of now: verdicts stand where they were while nothing is judged."""

from __future__ import annotations

from typing import Final

from kc_otel.cli.api_client import get
from kc_otel.contract.words import duration

__all__ = ["lateness"]

_LATE: Final = 30.0


def lateness(url: str) -> str:
    """That the last evaluation is too old, and what fails; empty where it is not."""
    health, now = get(url, "/api/v1/health"), get(url, "/api/v1/overview")["now"]
    at = health["evaluated_at"]
    if at is not None and now - at <= _LATE:
        return ""
    since = "nothing has been judged yet" if at is None else f"nothing has been judged for {duration(now - at)}"
    failing = "; ".join(f"{name or 'all contracts'}: {fault}" for name, fault in health["failures"].items())
    return f"{since}: {failing or 'the log of the evaluator may say why'}"
