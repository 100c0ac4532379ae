"""The token that a client shows: from a file that is read each time, so that it rotates, or from the environment."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

__all__ = ["FILE_VARIABLE", "TOKEN_VARIABLE", "TokenError", "authorization"]

TOKEN_VARIABLE: Final = "KC_OTEL_TOKEN"  # noqa: S105 - a name
FILE_VARIABLE: Final = "KC_OTEL_TOKEN_FILE"
_LONGEST: Final = 512


class TokenError(ValueError):
    """There is no token where one was said to be; the message holds none."""


def authorization(token_file: str | os.PathLike[str] | None = None) -> dict[str, str]:
    """The header that says who asks; none where no token is given.

    Args:
        token_file: File that holds the token; None for what KC_OTEL_TOKEN_FILE names, else KC_OTEL_TOKEN itself.

    Raises:
        TokenError: If the file cannot be read, or what is given is no token.
    """
    path = token_file or os.environ.get(FILE_VARIABLE)
    if path:
        where = f"the token of {os.fspath(path)}"
        try:
            with Path(path).open(encoding="utf-8") as file:
                token = file.read(_LONGEST + 2)
        except (OSError, UnicodeDecodeError) as error:
            raise TokenError(f"{where} cannot be read ({getattr(error, 'strerror', None) or 'not text'})") from None
    else:
        where, token = f"the token of {TOKEN_VARIABLE}", os.environ.get(TOKEN_VARIABLE, "")
        if not token:
            return {}
    token = token.strip()
    if not token or len(token) > _LONGEST or not token.isascii() or not token.isprintable() or " " in token:
        raise TokenError(f"{where} is none: write what `kc-otel token` printed, on one line")
    return {"authorization": f"Bearer {token}"}
