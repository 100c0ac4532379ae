"""Configuration of the instrumentation: arguments of `instrument`, or variables for programs that nobody edits.

- `KC_OTEL_CONTRACT`, argument `contract`: path of the contract. Without it nothing is instrumented.
- `KC_OTEL_SPOOL`, argument `spool`: file that keeps recorded requests for `kc-otel rescore`. Without it, the file that
  `default_spool` names.
- `KC_OTEL_SPOOL_MAX_AGE`: how long the file keeps a request that nobody scores, such as `1d`; a week by default.
- `KC_OTEL_SPOOL_MAX_SIZE`: its largest size, such as `512MiB`; 1 GiB by default.
- `KC_OTEL_SAMPLING`, argument `sampling`: share of requests, 0 to 1. Without it, the contract's
  `observability.sampling`.
- `KC_OTEL_ATTRIBUTES`, argument `attributes`: where attributes come from, such as
  `task, tenant=header:x-tenant, lang=baggage:lang, id=xarg:id`. Without it, what the contract's slices ask for is
  looked for in `vllm_xargs` and then in baggage, as is an attribute without a place.
- `OTEL_SDK_DISABLED`: `true` turns everything off.

vLLM's own `VLLM_PLUGINS`, where it is set, has to name `kc_otel` beside the others.

vLLM's server hands only `traceparent` and `tracestate` on to its engine; a middleware leaves the other headers where
code of the same request finds them. `--middleware kc_otel.integrations.vllm.settings.RequestHeaders` adds it by hand.
"""

from __future__ import annotations

import os
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kc_otel.contract.load import read_contract
from kc_otel.contract.model import Contract
from kc_otel.contract.slices import Scalar
from kc_otel.contract.units import parse_duration
from kc_otel.integrations.vllm.delivery import AttributeFunction, Completion, RequestSink
from kc_otel.integrations.vllm.plugin import is_disabled
from kc_otel.record.sampling import Sampler
from kc_otel.record.slice_table import asked_for
from kc_otel.recordings.spool import MIN_BYTES, Spool

HEADERS: Final[ContextVar[Iterable[tuple[bytes, bytes]]]] = ContextVar("kc_otel_vllm_headers", default=())
"""Names (lower case) and values, as ASGI has them."""
_Scope = MutableMapping[str, Any]
_PLACES: Final = ("xarg", "baggage", "header")
_MAX_VALUE_CHARACTERS: Final = 256
"""Characters kept of a value: slices are made of short words, and a client must not fill the spool."""
_UNIT_SHIFTS: Final = {"KiB": 10, "MiB": 20, "GiB": 30}


@dataclass(frozen=True, slots=True, eq=False)
class Settings:
    """Data to record, and its destination; `close` closes a sink that was made here and is not used elsewhere."""

    contract: Contract
    sink: RequestSink
    sampler: Sampler
    attributes: AttributeFunction
    close: Callable[[], object] | None = None


def default_spool(contract: Contract, environment: Mapping[str, str]) -> Path:
    """`kc-otel/NAME.sqlite` in XDG_STATE_HOME, or in ~/.local/state, where NAME is the contract's."""
    state = environment.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "kc-otel" / f"{contract.name}.sqlite"


def settings_of(
    environment: Mapping[str, str],
    *,
    contract: Contract | str | os.PathLike[str] | None = None,
    spool: str | os.PathLike[str] | None = None,
    sink: RequestSink | None = None,
    attributes: AttributeFunction | Mapping[str, Scalar] | None = None,
    sampling: float | Callable[[], float] | None = None,
) -> Settings | None:
    """Settings from arguments and, where one is None, from variables; None when there is no contract or it is off.

    Requests go to `sink` in place of a spool. `attributes` are a function of a `Completion`, or those that every
    request has beside the configured ones; `sampling` is a share of requests, or what returns it.

    Raises:
        ValueError: If a value is not valid, or both a spool and a sink are given.
        OSError: If the contract cannot be read.
    """
    if spool is not None and sink is not None:
        raise ValueError("spool and sink are given, but requests go to one place; choose one")
    path = environment.get("KC_OTEL_CONTRACT") if contract is None else contract
    if not path or is_disabled(environment):
        return None
    loaded = path if isinstance(path, Contract) else read_contract(path)
    sampler = Sampler(_sampling(loaded, sampling, environment))
    where = sink or _spool(loaded, spool, environment)
    close = where.close if isinstance(where, Spool) and sink is None else None
    return Settings(loaded, where, sampler, _attributes(loaded, attributes, environment), close)


def _spool(contract: Contract, spool: str | os.PathLike[str] | None, environment: Mapping[str, str]) -> Spool:
    file = Path(spool or environment.get("KC_OTEL_SPOOL") or default_spool(contract, environment))
    file.parent.mkdir(parents=True, exist_ok=True)
    return Spool(file, **_retention(environment))


def _retention(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the spool's limits on size and age, where they are set."""
    found: dict[str, Any] = {}
    if text := environment.get("KC_OTEL_SPOOL_MAX_AGE", "").strip():
        try:
            found["max_age"] = parse_duration(text)
        except ValueError as error:
            raise ValueError(f"KC_OTEL_SPOOL_MAX_AGE: {error}") from None
    if text := environment.get("KC_OTEL_SPOOL_MAX_SIZE", "").strip():
        size = re.fullmatch(r"(\d+) ?(KiB|MiB|GiB)", text)
        if size is None or int(size[1]) << _UNIT_SHIFTS[size[2]] < MIN_BYTES:
            raise ValueError(f"KC_OTEL_SPOOL_MAX_SIZE: {text!r} is no size of 1 MiB or more; write 512MiB or 2GiB")
        found["max_bytes"] = int(size[1]) << _UNIT_SHIFTS[size[2]]
    return found


def _sampling(
    contract: Contract, sampling: float | Callable[[], float] | None, environment: Mapping[str, str]
) -> float | Callable[[], float]:
    if sampling is not None:
        return sampling
    if text := environment.get("KC_OTEL_SAMPLING"):
        try:
            return float(text)
        except ValueError:
            raise ValueError(f"KC_OTEL_SAMPLING: {text!r} is not a share; write a number from 0 to 1") from None
    return contract.observability.sampling


def _attributes(
    contract: Contract, given: AttributeFunction | Mapping[str, Scalar] | None, environment: Mapping[str, str]
) -> AttributeFunction:
    if callable(given):
        return given
    text = environment.get("KC_OTEL_ATTRIBUTES", ",".join(sorted(asked_for(contract))))
    try:
        read = attributes_from(text)
    except ValueError as error:
        raise ValueError(f"KC_OTEL_ATTRIBUTES: {error}") from None
    fixed = dict(given or {})
    return lambda completion: {**fixed, **read(completion)}


def attributes_from(text: str) -> AttributeFunction:
    """Return the function that reads the attributes of a text: `task, tenant=header:x-tenant, lang=baggage:lang`.

    An attribute without a place is looked for in `vllm_xargs`, then in baggage.
    """
    sources = {}
    for part in filter(None, (entry.strip() for entry in text.split(","))):
        attribute, given, where = (piece.strip() for piece in part.partition("="))
        place, _, name = (piece.strip() for piece in where.partition(":"))
        if given and not (attribute and name and place in _PLACES):
            raise ValueError(f"{part!r} is no source; write NAME, or NAME=PLACE:NAME with {', '.join(_PLACES)}")
        sources[attribute] = (place, name) if given else ("any", attribute)

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
