"""Files of tokens for tests."""

from pathlib import Path

import yaml

from kc_otel.serve.access.access_file import AccessFile, digest_of


def token_of(name: str) -> str:
    return f"kc_{name}_" + "r4nd0m" * 7


def bearer(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token_of(name)}"}


def access_of(folder: Path, **may: str) -> AccessFile:
    """A file in which each has a token, and the roles in a text."""
    entries = [{"name": name, "may": roles.split(), "sha256": digest_of(token_of(name))} for name, roles in may.items()]
    (folder / "access.yaml").write_text(yaml.safe_dump({"tokens": entries}))
    return AccessFile(folder / "access.yaml")
