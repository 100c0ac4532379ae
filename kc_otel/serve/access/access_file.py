"""Bearer tokens by tenant, from a file that is read again when it changes.

    tenants:
      team-a: [policy-7b]              # names of contracts
      operations: all
    tokens:
      - {name: trainer, tenant: team-a, may: [send], sha256: 9f86d081...}
      - {name: ada, tenant: team-a, may: [read, act], sha256: 60303ae2...}
      - {name: prometheus, tenant: operations, may: [read], sha256: fd61a03a...}

The file holds digests, so that who reads it or a backup of it cannot use it. A token is 256 random bits
(`kc-otel token`), which no dictionary has: plain SHA-256 is enough for it, as it would not be for a password. To rotate
a token, add a second entry with the same name, hand the new one out, and take the old entry away.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kc_otel.serve.api.people_input import Name, refusals

__all__ = ["AccessError", "AccessFile", "Caller", "Role", "digest_of", "new_token"]

_log: Final = logging.getLogger(__name__)
_PREFIX: Final = "kc_"
"""Lets scanners of repositories and logs find a token that has got lost."""
_LARGEST_FILE: Final = 1 << 20
_BEARER: Final = re.compile(r"[Bb][Ee][Aa][Rr][Ee][Rr] +(\S+) *")


class AccessError(Exception):
    """The file of tokens cannot be used; the message says where and why, and holds no token."""


class Role(StrEnum):
    """What a token is good for."""

    SEND = "send"
    """OTLP."""
    READ = "read"
    """API, page, `/metrics`, the decision table."""
    ACT = "act"
    """Pins, silences, acknowledgements, resumptions, promotions."""
    DIAGNOSE = "diagnose"
    """What locate and remedy found, attached to incidents, and nothing else: for the machine that runs them."""
    PROMPTS = "prompts"
    """Together with `read`: what people asked and were answered, where `serve --worst` shows it."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Whose token it is.

    Attributes:
        name: Stands in events as who did it.
        tenant: Name of the tenant.
        roles: What it is good for.
        contracts: Names of the contracts that it is good for; None for all.
        digest: SHA-256 of the token, hexadecimal.
    """

    name: str
    tenant: str
    roles: frozenset[Role]
    contracts: frozenset[str] | None
    digest: str


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: Name
    tenant: str
    may: Annotated[list[Role], Field(min_length=1)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class _Document(BaseModel):
    model_config = ConfigDict(extra="forbid")

    tenants: dict[Name, list[str] | Literal["all"]]
    tokens: list[_Entry]


class _TwiceError(yaml.MarkedYAMLError):
    """Of a key that is written twice YAML's own reader takes the last, without a word: a tenant would be another."""


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise _TwiceError(problem_mark=key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


class AccessFile:
    """The tokens of a file.

    Args:
        path: The file.
        contracts: Names of the contracts that are served.

    Raises:
        AccessError: If it cannot be used.
    """

    def __init__(self, path: Path, contracts: Collection[str]) -> None:
        self._path = path
        self._contracts = frozenset(contracts)
        self._seen = _stamp(path)
        self._callers = self._read()

    def renew(self) -> None:
        """Read the file again if it has changed; one that cannot be used leaves what was in force, and is logged."""
        stamp = _stamp(self._path)
        if stamp == self._seen:
            return
        self._seen = stamp
        try:
            self._callers = self._read()
        except AccessError as error:
            _log.error("%s; the tokens that were in force still are", error)
        else:
            _log.info("%s: %d tokens are in force", self._path, len(self._callers))

    def bearer(self, authorization: str) -> Caller | None:
        """Whose token an `Authorization` header holds; None for nobody's."""
        found = _BEARER.fullmatch(authorization)
        return self.caller(digest_of(found[1])) if found else None

    def caller(self, digest: str) -> Caller | None:
        """Whose token has a digest; None for nobody's. Every one is compared, whichever it is."""
        given, match = digest.encode(), None
        for caller in self._callers:
            if hmac.compare_digest(caller.digest.encode(), given):
                match = caller
        return match

    def _read(self) -> tuple[Caller, ...]:
        try:
            with self._path.open("rb") as file:
                text = file.read(_LARGEST_FILE + 1)
        except OSError as error:
            raise AccessError(f"{self._path}: cannot be read ({error.strerror})") from None
        if len(text) > _LARGEST_FILE:
            raise AccessError(f"{self._path}: is larger than {_LARGEST_FILE:,} bytes")
        try:
            document = _Document.model_validate(_Loader(text).get_single_data())
        except ValidationError as error:
            said = refusals([{**one, "loc": ("file", *one["loc"])} for one in error.errors()])
            raise AccessError(f"{self._path}: {said}") from None
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            line = getattr(getattr(error, "problem_mark", None), "line", None)
            where = "" if line is None else f":{line + 1}"
            said = "a key is written twice" if isinstance(error, _TwiceError) else "is not YAML"
            raise AccessError(f"{self._path}{where}: {said}") from None
        return self._callers_of(document)

    def _callers_of(self, document: _Document) -> tuple[Caller, ...]:
        tenants: dict[str, frozenset[str] | None] = {}
        for name, contracts in document.tenants.items():
            tenants[name] = None if contracts == "all" else frozenset(contracts)
            if unknown := (tenants[name] or frozenset()) - self._contracts:
                raise AccessError(
                    f"{self._path}: tenants.{name}: no contract {min(unknown)!r} is served; there are "
                    f"{', '.join(sorted(self._contracts))}"
                )
        callers: dict[str, Caller] = {}
        for number, entry in enumerate(document.tokens):
            where = f"{self._path}: tokens[{number}]"
            if entry.tenant not in tenants:
                raise AccessError(f"{where}.tenant: no tenant {entry.tenant!r}; there are {', '.join(tenants)}")
            if entry.sha256 in callers:
                raise AccessError(
                    f"{where}.sha256: is also that of {callers[entry.sha256].name!r}; a token is one's own"
                )
            callers[entry.sha256] = Caller(
                entry.name, entry.tenant, frozenset(entry.may), tenants[entry.tenant], entry.sha256
            )
        return tuple(callers.values())


def new_token() -> str:
    """A fresh token of 256 random bits."""
    return _PREFIX + secrets.token_urlsafe(32)


def digest_of(token: str) -> str:
    """SHA-256 of a token, hexadecimal."""
    return hashlib.sha256(token.encode(errors="surrogatepass")).hexdigest()


def _stamp(path: Path) -> Mapping[str, int] | None:
    """What changes when the file does, also when a link to another one takes its place."""
    try:
        found = path.stat()
    except OSError:
        return None
    return {"inode": found.st_ino, "size": found.st_size, "modified": found.st_mtime_ns}
