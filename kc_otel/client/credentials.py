"""Credentials of a client: a token, and a certificate where mutual TLS requires one.

Files are read each time, so their content can be replaced. Certificates of authorities unknown to the system are read
from the file that SSL_CERT_FILE names, as in every program that uses OpenSSL.
"""

from __future__ import annotations

import os
import ssl
from pathlib import Path
from typing import Final
from urllib.parse import SplitResult, urlsplit

_TOKEN: Final = "KC_OTEL_TOKEN"  # noqa: S105 - a name
_TOKEN_FILE: Final = "KC_OTEL_TOKEN_FILE"  # noqa: S105 - a name
_CERTIFICATE: Final = "KC_OTEL_CLIENT_CERTIFICATE"
_KEY: Final = "KC_OTEL_CLIENT_KEY"
_MAX_TOKEN_CHARACTERS: Final = 512


class TokenError(ValueError):
    """A configured token is missing or unreadable; the message contains no secret."""


def authorization(token_file: str | os.PathLike[str] | None = None) -> dict[str, str]:
    """Return the header that authenticates the caller; none without a token.

    Without a file it is the one that KC_OTEL_TOKEN_FILE names, else KC_OTEL_TOKEN itself. Raises TokenError.
    """
    path = token_file or os.environ.get(_TOKEN_FILE)
    if path:
        where = f"the token of {os.fspath(path)}"
        try:
            with Path(path).open(encoding="utf-8") as file:
                token = file.read(_MAX_TOKEN_CHARACTERS + 2)
        except (OSError, UnicodeDecodeError) as error:
            raise TokenError(f"{where} cannot be read ({getattr(error, 'strerror', None) or 'not text'})") from None
    else:
        where, token = f"the token of {_TOKEN}", os.environ.get(_TOKEN, "")
        if not token:
            return {}
    token = token.strip()
    if (
        not token
        or len(token) > _MAX_TOKEN_CHARACTERS
        or not token.isascii()
        or not token.isprintable()
        or " " in token
    ):
        raise TokenError(f"{where} is none: write what `kc-otel token` printed, on one line")
    return {"authorization": f"Bearer {token}"}


def client_context() -> ssl.SSLContext:
    """Return a TLS context that presents the client certificate of KC_OTEL_CLIENT_CERTIFICATE, if set.

    Its key is in the same file, or in the one that KC_OTEL_CLIENT_KEY names. Raises TokenError.
    """
    context = ssl.create_default_context()
    if certificate := os.environ.get(_CERTIFICATE):
        try:
            context.load_cert_chain(certificate, os.environ.get(_KEY) or None)
        except (OSError, ssl.SSLError) as error:
            raise TokenError(f"{_CERTIFICATE}, {_KEY}: no certificate and its key ({error.strerror})") from None
    return context


def parts_of(url: str, of: str = "an evaluator", example: str = "http://127.0.0.1:4320") -> SplitResult:
    """Return the parts of a URL of HTTP; a ValueError with an example for anything else."""
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ValueError(f"{url!r} is not the URL of {of}; write one such as {example}")
    return parts
