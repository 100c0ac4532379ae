"""`kc-otel token`: a token for the evaluator, and the line that lets it in."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from kc_otel.cli.terminal import refuse

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("token")(token)


def token(
    name: Annotated[str, typer.Argument(help="Whose it is; stands in events as who did something.")],
    tenant: Annotated[str, typer.Option(help="Tenant of the access file.")],
    may: Annotated[list[str], typer.Option(help="send, read, act or prompts; may be given several times.")],
    out: Annotated[
        Path | None, typer.Option(help="New file that takes the token (0600); else it is printed.", metavar="FILE")
    ] = None,
) -> None:
    """Make a token, and the entry for it in the file of `kc-otel serve --access`.

    The entry goes to standard output, the token to --out, or else to standard output below it. It is shown this once:
    the evaluator keeps only its digest.
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
    entry = {"name": name, "tenant": tenant, "may": list(dict.fromkeys(may)), "sha256": digest_of(made)}
    print("- " + yaml.safe_dump(entry, default_flow_style=True, sort_keys=False, width=sys.maxsize).strip())
    if out is None:
        print(made)
