"""Bearer tokens, from a file that is read again when it changes.

    tokens:
      - {name: trainer, may: [send], sha256: 9f86d081...}

The file holds digests, so that a backup of it is no use to anybody. A token is 256 random bits (`kc-otel token`), for
which plain SHA-256 is enough. Two entries of one name rotate a token.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import secrets
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kc_otel.contract.yaml_document import parse
from kc_otel.judge.otlp.requests import ForbiddenError, UnauthenticatedError
from kc_otel.serve.api.shapes import Name, refusals
from kc_otel.serve.watched_files import UnusableFileError, WatchedFiles

_TOKEN_PREFIX: Final = "kc_"  # noqa: S105 - public
"""Lets scanners of repositories and logs find a token that has got lost."""
_LARGEST_FILE: Final = 1 << 20
_BEARER: Final = re.compile(r"[Bb][Ee][Aa][Rr][Ee][Rr] +(\S+) *")


class Role(StrEnum):
    """Permission of a token."""

    SEND = "send"
    """OTLP."""
    READ = "read"
    """API, page, `/metrics`, the decision table."""
    ACT = "act"
    """Pins, silences, acknowledgements, resumptions, promotions."""
    DIAGNOSE = "diagnose"
    """Permission only to attach findings of locate and remedy to incidents: for the machine that runs them."""
    PROMPTS = "prompts"
    """Permission, together with `read`, to see prompts and answers where `serve --worst` shows them."""


class Caller(BaseModel):
    """The holder of a token; `name` stands in events as who did it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Name
    may: Annotated[frozenset[Role], Field(min_length=1)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class _Document(BaseModel):
    model_config = ConfigDict(extra="forbid")

    tokens: list[Caller]


class AccessFile(WatchedFiles):
    """The tokens of a file."""

    def __init__(self, path: Path) -> None:
        self._callers: list[Caller] = []
        super().__init__([path])

    def bearer(self, authorization: str) -> Caller | None:
        """Return the holder of an `Authorization` header's token; None for an unknown token."""
        found = _BEARER.fullmatch(authorization)
        return self._holder(found[1]) if found else None

    def password(self, authorization: str) -> Caller | None:
        """Return the holder of the token that is the password of a header of `Basic`, whatever the user's name."""
        scheme, _, encoded = authorization.partition(" ")
        try:
            said = base64.b64decode(encoded.strip(), validate=True).decode() if scheme.lower() == "basic" else ""
        except ValueError:
            return None
        return self._holder(said.partition(":")[2])

    def _holder(self, token: str) -> Caller | None:
        """Return the holder of a token, or None; compares all, in constant time."""
        given, match = digest_of(token).encode(), None
        for caller in self._callers:
            if hmac.compare_digest(caller.sha256.encode(), given):
                match = caller
        return match

    def _read(self) -> None:
        (path,) = self._paths
        try:
            with path.open("rb") as file:
                text = file.read(_LARGEST_FILE + 1)
        except OSError as error:
            raise UnusableFileError(f"{path}: cannot be read ({error.strerror})") from None
        if len(text) > _LARGEST_FILE:
            raise UnusableFileError(f"{path}: is larger than {_LARGEST_FILE:,} bytes")
        found, problems = parse(text.decode(errors="replace"), str(path))
        if found is None:
            raise UnusableFileError(
                f"{path}:{problems[0].line}: must be a mapping in YAML: the line `tokens:`, and the entries "
                "below it, without anchors and with each key once"
            )
        try:
            callers = _Document.model_validate(found.data).tokens
        except ValidationError as error:
            said = refusals([{**problem, "loc": ("file", *problem["loc"])} for problem in error.errors()])
            raise UnusableFileError(f"{path}: {said}") from None
        owner: dict[str, str] = {}
        for number, caller in enumerate(callers):
            if caller.sha256 in owner:
                said = f"is also that of {owner[caller.sha256]!r}; give each its own token"
                raise UnusableFileError(f"{path}: tokens[{number}].sha256: {said}")
            owner[caller.sha256] = caller.name
        self._callers = callers


def new_token() -> str:
    """A fresh token of 256 random bits."""
    return _TOKEN_PREFIX + secrets.token_urlsafe(32)


def digest_of(token: str) -> str:
    """SHA-256 of a token, hexadecimal."""
    return hashlib.sha256(token.encode(errors="surrogatepass")).hexdigest()


def check_sender(access: AccessFile | None, authorization: str) -> None:
    """Refuse a request whose `Authorization` header or metadata does not let it in; without a file, none is refused."""
    if access is None:
        return
    caller = access.bearer(authorization)
    if caller is None:
        raise UnauthenticatedError(
            "authentication required: send authorization: Bearer and a token, by OTEL_EXPORTER_OTLP_HEADERS"
        )
    if Role.SEND not in caller.may:
        raise ForbiddenError(f"the token of {caller.name} lacks the role send; its entry needs may: [send]")
