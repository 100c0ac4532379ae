"""What people may write into a request: texts and times that can be stored, logged and shown anywhere.

What is refused is answered with what and where, and never with what was sent: an answer that quotes its request can be
made as large, and as hostile, as one likes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Annotated, Any, Final

from fastapi import HTTPException
from pydantic import AfterValidator, Field

from kc_otel.contract.plain_text import is_plain

__all__ = ["SIGNER", "Name", "Reason", "Signature", "Until", "answered", "refusals"]

_YEAR_10000: Final = 253_402_300_800.0
_SHOWN: Final = 5


def _printable(text: str) -> str:
    for number, character in enumerate(text):
        if not is_plain(character):  # lone surrogates pydantic itself takes for no text
            raise ValueError(
                f"character {number + 1} is U+{ord(character):04X}, which is not for text on one line; leave it out"
            )
    return text


SIGNER: Final[ContextVar[str | None]] = ContextVar("SIGNER", default=None)
"""Whose token the request at hand came with; None where nothing asks for tokens."""


def _signed(said: str) -> str:
    """Whose token it was stands first: who somebody says to be is only that."""
    signer = SIGNER.get()
    return said if signer in {None, said} else f"{signer} (as {said})"


Name = Annotated[str, Field(max_length=200), AfterValidator(_printable)]
"""A name, an id, or who somebody is: one line of at most 200 characters."""
Signature = Annotated[Name, AfterValidator(_signed)]
"""Who decides something: the name of their token, and then who they say to be."""
Reason = Annotated[str, Field(max_length=2000), AfterValidator(_printable)]
"""A reason: one line of at most 2,000 characters."""
Until = Annotated[float, Field(gt=0.0, lt=_YEAR_10000, allow_inf_nan=False)]
"""A unix time in seconds that has a date, so before the year 10000."""


def refusals(errors: Iterable[Mapping[str, Any]]) -> str:
    """What is wrong with a request, in one sentence; of its content only names of fields, cut and escaped.

    Args:
        errors: As pydantic lists them.

    >>> refusals([{"loc": ("body", "why"), "msg": "Value error, leave it out", "input": "..."}])
    'why: leave it out'
    """
    said = [f"{_place(error['loc'][1:])}: {error['msg'].removeprefix('Value error, ')}" for error in errors]
    more = f"; and {len(said) - _SHOWN} more" if len(said) > _SHOWN else ""
    return "; ".join(said[:_SHOWN]) + more


@contextmanager
def answered() -> Iterator[None]:
    """Errors as the API says them."""
    try:
        yield
    except LookupError as error:
        raise HTTPException(404, str(error.args[0])) from None
    except ValueError as error:
        raise HTTPException(422, str(error)) from None


def _place(loc: tuple[Any, ...]) -> str:
    return ".".join(ascii(str(part)[:40])[1:-1] for part in loc) or "the request"
