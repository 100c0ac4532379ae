"""Attributes for a request's slices, and the places where its sender puts them.

Clients of the OpenAI-compatible server have three places: `vllm_xargs` in the body (`extra_body` in OpenAI's client),
W3C baggage, and headers. By default what the contract's slices ask for is looked for in the first two, by its name.

vLLM's server hands only `traceparent` and `tracestate` on to its engine; a middleware leaves the other headers where
code of the same request finds them. `--middleware kc_otel.integrations.vllm.request_attributes.RequestHeaders` adds it
by hand.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from contextvars import ContextVar
from typing import Any, Final

from kc_otel.contract.slices import Scalar
from kc_otel.integrations.vllm.delivery import AttributeFunction, Completion

HEADERS: Final[ContextVar[Iterable[tuple[bytes, bytes]]]] = ContextVar("kc_otel_vllm_headers", default=())
"""Names (lower case) and values, as ASGI has them."""
_Scope = MutableMapping[str, Any]
_PLACES: Final = ("xarg", "baggage", "header")
_MAX_VALUE_CHARACTERS: Final = 256
"""Characters kept of a value: slices are made of short words, and a client must not fill the spool."""


def sources_of(text: str) -> dict[str, tuple[str, str]]:
    """Sources from what an environment variable says: `task, tenant=header:x-tenant, lang=baggage:lang`.

    By attribute they are `xarg`, `baggage` or `header`, or `any` for the first two in this order; and its name there.
    """
    found = {}
    for part in filter(None, (entry.strip() for entry in text.split(","))):
        attribute, given, where = (piece.strip() for piece in part.partition("="))
        place, _, name = (piece.strip() for piece in where.partition(":"))
        if given and not (attribute and name and place in _PLACES):
            raise ValueError(f"{part!r} is no source; write NAME, or NAME=PLACE:NAME with {', '.join(_PLACES)}")
        found[attribute] = (place, name) if given else ("any", attribute)
    return found


def attributes_of(sources: Mapping[str, tuple[str, str]]) -> AttributeFunction:
    """A function that reads the sources, as `sources_of` gives them."""

    def read(completion: Completion) -> dict[str, Scalar]:
        found = ((attribute, _value(completion, *source)) for attribute, source in sources.items())
        return {attribute: value for attribute, value in found if value is not None}

    return read


def _value(completion: Completion, place: str, name: str) -> Scalar | None:
    """The value that the sender gave, None for none."""
    if place == "header":
        return _number_or_text(completion.headers.get(name.lower()))
    if place != "baggage":
        found = completion.extra.get(name)
        if isinstance(found, bool | int | float):
            return found
        if isinstance(found, str):
            return found[:_MAX_VALUE_CHARACTERS]
    return _number_or_text(completion.baggage.get(name)) if place != "xarg" else None


def _number_or_text(value: Any) -> Scalar | None:
    """Convert text to a number where it is one: a slice such as `priority: ">= 3"` needs it."""
    if value is None:
        return None
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return str(value)[:_MAX_VALUE_CHARACTERS]


class RequestHeaders:
    """ASGI middleware that keeps a reference to the headers; it looks at nothing and changes nothing."""

    def __init__(self, app: Callable[[_Scope, Any, Any], Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: _Scope, receive: Any, send: Any) -> None:
        """Handle one connection."""
        if scope["type"] == "http":
            HEADERS.set(scope["headers"])
        await self._app(scope, receive, send)
