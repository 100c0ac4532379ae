"""Endpoints of webhooks with their formats and credentials, from the environment.

`webhook: pager` in a contract reads these variables, each with the prefix `KC_OTEL_WEBHOOK_PAGER_`:

| variable                            | meaning                                                              |
| ----------------------------------- | -------------------------------------------------------------------- |
| `URL`                               | where to POST                                                        |
| `FORMAT`                            | kernel-contract (default), pagerduty or slack                        |
| `SECRET`, or `SECRET_FILE`          | kernel-contract: `whsec_...`, several while one is rotated;          |
|                                     | pagerduty: the routing key                                           |
| `AUTHORIZATION`, or `..._FILE`      | value of the `Authorization` header, where the receiver wants one    |
| `ALLOW_PRIVATE`                     | `1` when the address may be loopback or of a private network         |

`Rotation` reads files again when they change, so that a secret is rotated without a restart. URLs often carry tokens,
so neither they nor the secrets show in a repr.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from kc_otel.client.webhooks import Secret, SecretError
from kc_otel.serve.watched_files import WatchedFiles
from kc_otel.serve.webhooks.formats import Format

_log: Final = logging.getLogger(__name__)
_TRUE_WORDS = frozenset({"1", "true", "yes", "on"})
_FALSE_WORDS = frozenset({"", "0", "false", "no", "off"})


class WebhookEndpointError(ValueError):
    """Endpoints are not configured; the message names every variable that is missing or wrong."""


@dataclass(frozen=True, slots=True)
class WebhookEndpoint:
    """A receiver of webhooks.

    Each of `secrets` signs, for the format kernel-contract only; `key` is the routing key of pagerduty.
    """

    name: str
    url: str = field(repr=False)
    secrets: tuple[Secret, ...] = field(default=(), repr=False)
    format: Format = Format.KERNEL_CONTRACT
    key: str = field(default="", repr=False)
    authorization: str = field(default="", repr=False)
    allow_private: bool = False

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            valid = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
        except ValueError:
            valid = False
        if not valid or any(character.isspace() for character in self.url):
            raise WebhookEndpointError(f"endpoint {self.name!r}: the URL is not valid; write https://host/path")
        if not (self.authorization.isascii() and self.authorization.isprintable()):
            raise WebhookEndpointError(
                f"endpoint {self.name!r}: the Authorization header has characters that a header cannot contain"
            )


def endpoints_from_env(names: Iterable[str], environ: Mapping[str, str]) -> dict[str, WebhookEndpoint]:
    """The named endpoints, as the environment describes them; one error says everything that is missing or wrong."""
    endpoints: dict[str, WebhookEndpoint] = {}
    taken: dict[str, str] = {}
    problems: list[str] = []
    for name in sorted(set(names)):
        prefix = _prefix(name)
        if taken.setdefault(prefix, name) != name:
            problems.append(f"{name!r} and {taken[prefix]!r} read the same {prefix}_URL; rename one of them")
            continue
        try:
            endpoints[name] = _endpoint(name, prefix, environ)
        except (ValueError, OSError) as error:
            problems.append(f"{name!r}: {error}")
    if problems:
        raise WebhookEndpointError("webhook endpoints are not configured: " + "; ".join(problems))
    return endpoints


def _prefix(name: str) -> str:
    return f"KC_OTEL_WEBHOOK_{re.sub(r'[^A-Z0-9]', '_', name.upper())}"


def _endpoint(name: str, prefix: str, environ: Mapping[str, str]) -> WebhookEndpoint:
    text = environ.get(f"{prefix}_FORMAT", "").strip().lower() or Format.KERNEL_CONTRACT
    try:
        format = Format(text)
    except ValueError:
        raise WebhookEndpointError(f"{prefix}_FORMAT: {text!r} is not one of {', '.join(Format)}") from None
    signs = format is Format.KERNEL_CONTRACT
    url, secret = environ.get(f"{prefix}_URL", "").strip(), _credential(f"{prefix}_SECRET", environ)
    wanted = [f"{prefix}_URL"] * (not url)
    if not secret and format is not Format.SLACK:
        wanted.append(f"{prefix}_SECRET or {prefix}_SECRET_FILE{' to its routing key' * (not signs)}")
    if wanted:
        raise WebhookEndpointError(f"set {' and '.join(wanted)}")
    if secret and format is Format.SLACK:
        raise WebhookEndpointError(
            f"{prefix}_SECRET: {format} messages are not signed; leave it out, or use {prefix}_AUTHORIZATION"
        )
    try:
        secrets = tuple(Secret.parse(part) for part in re.split(r"[\s,]+", secret) if part) if signs else ()
    except SecretError as error:
        suffix = "_FILE" if environ.get(f"{prefix}_SECRET_FILE") else ""
        raise WebhookEndpointError(f"{prefix}_SECRET{suffix}: {error}") from None
    private = environ.get(f"{prefix}_ALLOW_PRIVATE", "").strip().lower()
    if private not in _TRUE_WORDS | _FALSE_WORDS:
        raise WebhookEndpointError(
            f"{prefix}_ALLOW_PRIVATE: {private!r} is neither yes nor no; write 1, or leave it out"
        )
    return WebhookEndpoint(
        name,
        url,
        secrets,
        format=format,
        key="" if signs else secret,
        authorization=_credential(f"{prefix}_AUTHORIZATION", environ),
        allow_private=private in _TRUE_WORDS,
    )


def _credential(variable: str, environ: Mapping[str, str]) -> str:
    text, path = environ.get(variable, ""), environ.get(f"{variable}_FILE", "")
    if text and path:
        raise WebhookEndpointError(f"set only one of {variable} or {variable}_FILE")
    return (Path(path).read_text(encoding="utf-8") if path else text).strip()


class Rotation:
    """Looks at the endpoints' credential files."""

    def __init__(self, names: Iterable[str], environ: Mapping[str, str]) -> None:
        self._names = sorted(set(names))
        self._environ = environ
        variables = (f"{_prefix(name)}_{what}_FILE" for name in self._names for what in ("SECRET", "AUTHORIZATION"))
        self._files = WatchedFiles(Path(path) for variable in variables if (path := environ.get(variable)))

    def renewed(self) -> dict[str, WebhookEndpoint] | None:
        """The endpoints as they are configured now, where a file has changed since the last look; None otherwise.

        While the new content is wrong, what was there before stays in force.
        """
        if not self._files.changed():
            return None
        try:
            endpoints = endpoints_from_env(self._names, self._environ)
        except WebhookEndpointError as error:
            _log.warning("the old webhook credentials stay in force: %s", error)
            return None
        _log.info("webhook credentials were read again")
        return endpoints
