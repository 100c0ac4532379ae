"""Where webhooks go: endpoints with their secrets, from the environment.

`webhook: pager` in a contract reads `KC_OTEL_WEBHOOK_PAGER_URL`, and `KC_OTEL_WEBHOOK_PAGER_SECRET` or
`KC_OTEL_WEBHOOK_PAGER_SECRET_FILE`. Several secrets, separated by spaces, commas or lines, sign side by side while one
is rotated. URLs often carry tokens, so neither they nor the secrets show in a repr.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from kc_otel.escalation.signing import Secret, SecretError

__all__ = ["Endpoint", "EndpointError", "endpoints_from_env"]


class EndpointError(ValueError):
    """Endpoints are not configured; the message names every variable that is missing or wrong."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A receiver of webhooks.

    Attributes:
        name: Name in the contract's `webhook:`.
        url: Where to POST, http or https.
        secrets: Each one signs.

    Raises:
        EndpointError: If the URL is not one, or there is no secret.
    """

    name: str
    url: str = field(repr=False)
    secrets: tuple[Secret, ...] = field(repr=False)

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            valid = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
        except ValueError:
            valid = False
        if not valid or any(character.isspace() for character in self.url):
            raise EndpointError(f"endpoint {self.name!r}: the URL is not one; write https://host/path")
        if not self.secrets:
            raise EndpointError(f"endpoint {self.name!r}: there is no secret to sign with")


def endpoints_from_env(names: Iterable[str], environ: Mapping[str, str]) -> dict[str, Endpoint]:
    """The named endpoints, as the environment describes them.

    Args:
        names: Names in contracts' `webhook:` actions.
        environ: Usually `os.environ`.

    Returns:
        Endpoints by name.

    Raises:
        EndpointError: If anything is missing or wrong, everything that is, in one message.
    """
    endpoints: dict[str, Endpoint] = {}
    taken: dict[str, str] = {}
    problems: list[str] = []
    for name in sorted(set(names)):
        prefix = f"KC_OTEL_WEBHOOK_{re.sub(r'[^A-Z0-9]', '_', name.upper())}"
        if taken.setdefault(prefix, name) != name:
            problems.append(f"{name!r} and {taken[prefix]!r} read the same {prefix}_URL; rename one of them")
            continue
        try:
            endpoints[name] = Endpoint(name, _url(prefix, environ), _secrets(prefix, environ))
        except (ValueError, OSError) as error:
            problems.append(f"{name!r}: {error}")
    if problems:
        raise EndpointError("webhook endpoints are not configured: " + "; ".join(problems))
    return endpoints


def _url(prefix: str, environ: Mapping[str, str]) -> str:
    url = environ.get(f"{prefix}_URL", "").strip()
    if not url:
        wanted = f"set {prefix}_URL"
        if not (environ.get(f"{prefix}_SECRET") or environ.get(f"{prefix}_SECRET_FILE")):
            wanted += f" and {prefix}_SECRET or {prefix}_SECRET_FILE"
        raise EndpointError(wanted)
    return url


def _secrets(prefix: str, environ: Mapping[str, str]) -> tuple[Secret, ...]:
    text, path = environ.get(f"{prefix}_SECRET", ""), environ.get(f"{prefix}_SECRET_FILE", "")
    if bool(text) == bool(path):
        which = "only one of " if text else ""
        raise EndpointError(f"set {which}{prefix}_SECRET or {prefix}_SECRET_FILE")
    found = re.split(r"[\s,]+", (Path(path).read_text(encoding="utf-8") if path else text).strip())
    try:
        return tuple(Secret.parse(one) for one in found if one)
    except SecretError as error:
        raise EndpointError(f"{prefix}_SECRET{'_FILE' if path else ''}: {error}") from None
