"""Shapes of requests, answers and errors of the API, and the checks of what people write.

A rejection names the problem and the field, and never quotes the input: an answer that quotes its request can be made
as large and as hostile as its sender likes. Errors are in RFC 9457's words.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from typing import Annotated, Any, Final, Self

from fastapi import HTTPException, Query
from fastapi.responses import JSONResponse
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from kc_otel.contract.plain_text import is_plain
from kc_otel.judge.promotion.stages import OrderError
from kc_otel.serve.core import Core
from kc_otel.serve.people_orders import known

PROBLEM: Final = "application/problem+json"
PUBLIC: Final = frozenset({"/healthz", "/readyz", "/openapi.json"})
"""Paths that need no token where others do."""
_YEAR_10000: Final = 253_402_300_800.0
_MAX_LISTED_PROBLEMS: Final = 5


def _printable(text: str) -> str:
    for number, character in enumerate(text):
        if not is_plain(character):  # lone surrogates pydantic itself takes for no text
            raise ValueError(
                f"character {number + 1} is U+{ord(character):04X}, which is not for text on one line; leave it out"
            )
    return text


SIGNER: Final[ContextVar[str | None]] = ContextVar("SIGNER", default=None)
"""Holder of the current request's token; None if tokens are not required."""
MAY_READ_PROMPTS: Final[ContextVar[bool]] = ContextVar("may_read_prompts", default=True)
"""True if the caller may read prompts: always, where callers are not authenticated."""


def _signed(said: str) -> str:
    """Return an order's signature: the token's owner first, because the stated name is unverified."""
    signer = SIGNER.get()
    return said if signer in {None, said} else f"{signer} (as {said})"


def stated(text: str) -> str:
    """Return a text that says something."""
    if not text.strip():
        raise ValueError("must not be blank")
    return text


Name = Annotated[str, Field(max_length=200), AfterValidator(_printable)]
"""A name, an id, or who somebody is: one line of at most 200 characters."""
Signature = Annotated[Name, AfterValidator(stated), AfterValidator(_signed)]
"""Author of a decision: the name of their token, then the name they state."""
Reason = Annotated[str, Field(max_length=2000), AfterValidator(_printable)]
"""A reason: one line of at most 2,000 characters."""
Until = Annotated[float, Field(gt=0.0, lt=_YEAR_10000, allow_inf_nan=False)]
"""A unix time in seconds that has a date, so before the year 10000."""


class View(BaseModel):
    """An answer."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    @classmethod
    def of(cls, source: object, **derived: Any) -> Self:
        """The view of an object: its attributes by the names of the fields, beside what is derived."""
        return cls(**{name: getattr(source, name) for name in cls.model_fields.keys() - derived.keys()}, **derived)


class Order(View):
    """A request. Unknown fields are rejected: a misspelt `slice` would silence every slice."""

    model_config = ConfigDict(extra="forbid")


class SignedOrder(Order):
    """A decision of a person; both are kept with its event."""

    by: Signature
    """Author of the decision."""
    why: Annotated[Reason, AfterValidator(stated)]
    """Their reason."""


def refusals(errors: Iterable[Mapping[str, Any]]) -> str:
    """Describe the errors of a request in one sentence; only field names are quoted, cut and escaped.

    >>> refusals([{"loc": ("body", "why"), "msg": "Value error, leave it out", "input": "..."}])
    'why: leave it out'
    """
    said = [f"{_place(error['loc'][1:])}: {_said(error['msg'])}" for error in errors]
    more = f"; and {len(said) - _MAX_LISTED_PROBLEMS} more" if len(said) > _MAX_LISTED_PROBLEMS else ""
    return "; ".join(said[:_MAX_LISTED_PROBLEMS]) + more


def _said(message: str) -> str:
    return message.removeprefix("Value error, ").replace("Input should be", "must be")


@contextmanager
def answered() -> Iterator[None]:
    """Errors of orders, as the API says them."""
    try:
        yield
    except LookupError as error:
        raise HTTPException(404, str(error.args[0])) from None
    except ValueError as error:
        raise HTTPException(409 if isinstance(error, OrderError) else 422, str(error)) from None


@asynccontextmanager
async def ordered(core: Core) -> AsyncIterator[None]:
    """Hold a turn for an order, which is on the disk when the context ends; errors are those of the API."""
    with answered():
        async with core.turn():
            yield


def _place(loc: tuple[Any, ...]) -> str:
    return ".".join(ascii(str(part)[:40])[1:-1] for part in loc) or "the request"


ContractName = Annotated[str | None, Query(description="Only this contract.")]


def check_known(core: Core, contract: str | None, clause: str | None = None, slice: str | None = None) -> None:
    """Answer 404 with the known names if one is unknown: an empty answer would look like no trouble."""
    if contract is not None:
        with answered():
            known(core, contract, clause, slice)


class ProblemDetails(View):
    """An error, as RFC 9457 has it."""

    title: str
    detail: str
    status: int


def problem(
    status: int, detail: str, headers: Mapping[str, str] | None = None, *, title: str = "request refused"
) -> JSONResponse:
    """Return an error in RFC 9457's words."""
    body = ProblemDetails(title=title, detail=detail, status=status)
    return JSONResponse(body.model_dump(), status, headers, media_type=PROBLEM)
