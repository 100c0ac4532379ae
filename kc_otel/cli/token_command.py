"""`kc-otel token`: a token for the evaluator, and the line that lets it in."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from kc_otel.cli.terminal import refuse


def token(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of its holder, which events show.")],
    may: Annotated[list[str], typer.Option(help="send, read, act, prompts or diagnose; repeatable.")],
    out: Annotated[
        Path | None,
        typer.Option(help="New file for the token (mode 0600); without it, the token is printed.", metavar="FILE"),
    ] = None,
) -> None:
    """Create a token, and print its entry for the file of `kc-otel serve --access`.

    The entry goes to standard output. The token goes to --out, or to standard output below the entry. It is shown only
    once, because the evaluator keeps only its digest.

    Examples:
      kc-otel token rollouts --may send --out rollouts.token
      kc-otel token ada --may read --may act
    """
    import yaml  # noqa: PLC0415 - a quick --help

    from kc_otel.serve.access.access_file import Role, digest_of, new_token  # noqa: PLC0415

    if unknown := sorted(set(may) - {*Role}):
        refuse(f"--may {unknown[0]}: write {', '.join(Role)}")
    made = new_token()
    if out is not None:
        try:
            with os.fdopen(os.open(out, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
                file.write(made + "\n")
        except OSError as error:
            refuse(f"{out}: {error.strerror}; a token never takes the place of another file")
    entry = {"name": name, "may": list(dict.fromkeys(may)), "sha256": digest_of(made)}
    print("- " + yaml.safe_dump(entry, default_flow_style=True, sort_keys=False, width=sys.maxsize).strip())
    if out is None:
        print(made)
