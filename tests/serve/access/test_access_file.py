"""The file of tenants and tokens: what it lets in, how it changes, and what is wrong with it."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from kc_otel.serve.access.access_file import AccessError, AccessFile, Role, digest_of, new_token

CONTRACTS = ["alpha", "beta"]
TOKEN = "kc_" + "r4nd0m" * 7
ENTRY = {"name": "ada", "tenant": "team-a", "may": ["read", "act"], "sha256": digest_of(TOKEN)}


def written(path: Path, *tokens: dict, **tenants: object) -> Path:
    """A file with these entries."""
    path.write_text(yaml.safe_dump({"tenants": tenants or {"team-a": ["alpha"]}, "tokens": list(tokens)}))
    return path


def test_a_token_is_known_by_its_digest(tmp_path):
    """The file has nothing that lets anybody in."""
    path = written(tmp_path / "access.yaml", ENTRY)
    found = AccessFile(path, CONTRACTS).bearer(f"Bearer {TOKEN}")
    assert (found.name, found.tenant, found.roles, found.contracts) == (
        "ada",
        "team-a",
        {Role.READ, Role.ACT},
        {"alpha"},
    )
    assert TOKEN not in path.read_text()


@pytest.mark.parametrize(
    "header",
    ["", "Bearer", "Bearer ", f"Basic {TOKEN}", TOKEN, f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}",
     f"Bearer {TOKEN} {TOKEN}", f"Bearer {digest_of(TOKEN)}", "Bearer " + "x" * 100_000, "Bearer \ud800"],
)  # fmt: skip
def test_anything_else_is_nobody(tmp_path, header):
    """Nothing, half a token, more than a token, the digest itself."""
    assert AccessFile(written(tmp_path / "access.yaml", ENTRY), CONTRACTS).bearer(header) is None


def test_the_scheme_is_not_case_sensitive(tmp_path):
    """RFC 9110, 11.1."""
    assert AccessFile(written(tmp_path / "access.yaml", ENTRY), CONTRACTS).bearer(f"bearer {TOKEN}") is not None


def test_a_file_that_changes_is_read_again(tmp_path):
    """A new token works and an old one ends, also when a link is turned to another file, as Kubernetes does."""
    other = new_token()
    access = AccessFile(written(tmp_path / "access.yaml", ENTRY), CONTRACTS)
    written(tmp_path / "new.yaml", ENTRY | {"sha256": digest_of(other)})
    (tmp_path / "link").symlink_to(tmp_path / "new.yaml")
    (tmp_path / "link").replace(tmp_path / "access.yaml")
    access.renew()
    assert access.bearer(f"Bearer {TOKEN}") is None
    assert access.bearer(f"Bearer {other}").name == "ada"


@pytest.mark.parametrize("broken", [b"tenants: [", b"", b"\xff", b"x" * (2 << 20), None])
def test_a_file_that_breaks_changes_nothing_and_is_said(tmp_path, broken, caplog):
    """Whoever was let in still is: half a file must lock nobody out, and let nobody in."""
    path = written(tmp_path / "access.yaml", ENTRY)
    access = AccessFile(path, CONTRACTS)
    path.unlink() if broken is None else path.write_bytes(broken)
    access.renew()
    access.renew()
    assert access.bearer(f"Bearer {TOKEN}").name == "ada"
    assert len(caplog.records) == 1
    assert "still are" in caplog.text


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tenant": "team-b"}, "no tenant 'team-b'; there are team-a"),
        ({"may": ["send", "fly"]}, "tokens.0.may"),
        ({"may": []}, "tokens.0.may"),
        ({"sha256": TOKEN}, "tokens.0.sha256"),
        ({"name": "a\nb"}, "tokens.0.name"),
        ({"password": "x"}, "tokens.0.password"),
    ],
)
def test_what_is_wrong_is_said_without_what_was_written(tmp_path, changes, said):
    """A token that was pasted in place of its digest is not repeated into a log."""
    with pytest.raises(AccessError) as raised:
        AccessFile(written(tmp_path / "access.yaml", ENTRY | changes), CONTRACTS)
    assert said in str(raised.value)
    assert TOKEN not in str(raised.value)


@pytest.mark.parametrize(
    "twice", ["tenants: {team-a: [alpha], team-a: all}\ntokens: []", "tenants: {}\ntokens: []\ntenants: {t: all}"]
)
def test_a_key_that_is_written_twice_is_refused(tmp_path, twice):
    """YAML's own reader would take the last one, and give somebody more, or nobody anything."""
    (tmp_path / "access.yaml").write_text(twice)
    with pytest.raises(AccessError, match=r"access.yaml:[13]: a key is written twice"):
        AccessFile(tmp_path / "access.yaml", CONTRACTS)


def test_a_folder_is_no_file(tmp_path):
    """It says so, and does not raise what nobody expects."""
    with pytest.raises(AccessError, match="Is a directory"):
        AccessFile(tmp_path, CONTRACTS)


def test_a_tenant_has_contracts_that_are_served(tmp_path):
    """A name that is misspelt would lock a team out without a word."""
    with pytest.raises(AccessError, match="no contract 'alhpa' is served; there are alpha, beta"):
        AccessFile(written(tmp_path / "access.yaml", ENTRY, **{"team-a": ["alhpa"]}), CONTRACTS)


def test_a_token_is_ones_own(tmp_path):
    """Two entries with one token would not say who acted."""
    with pytest.raises(AccessError, match="is also that of 'ada'"):
        AccessFile(written(tmp_path / "access.yaml", ENTRY, ENTRY | {"name": "bob"}), CONTRACTS)


def test_tokens_are_long_and_random():
    """256 bits, and a prefix by which scanners know them."""
    made = {new_token() for _ in range(100)}
    assert len(made) == 100
    assert all(token.startswith("kc_") and len(token) >= 43 for token in made)
