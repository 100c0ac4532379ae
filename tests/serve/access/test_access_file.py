"""The file of tokens: what it lets in, how it changes, and what is wrong with it."""

from pathlib import Path

import pytest
import yaml

from kc_otel.serve.access.access_file import AccessFile, Role, digest_of, new_token
from kc_otel.serve.watched_files import UnusableFileError

TOKEN = "kc_" + "r4nd0m" * 7
ENTRY = {"name": "ada", "may": ["read", "act"], "sha256": digest_of(TOKEN)}


def written(path: Path, *tokens: dict) -> Path:
    path.write_text(yaml.safe_dump({"tokens": list(tokens)}))
    return path


def test_a_token_is_known_by_its_digest(tmp_path):
    """The file has nothing that lets anybody in."""
    path = written(tmp_path / "access.yaml", ENTRY)
    for scheme in ("Bearer", "bearer"):  # RFC 9110, 11.1
        found = AccessFile(path).bearer(f"{scheme} {TOKEN}")
        assert (found.name, found.may) == ("ada", {Role.READ, Role.ACT})
    assert TOKEN not in path.read_text()


@pytest.mark.parametrize(
    "header",
    ["", "Bearer", "Bearer ", f"Basic {TOKEN}", TOKEN, f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}",
     f"Bearer {TOKEN} {TOKEN}", f"Bearer {digest_of(TOKEN)}", "Bearer " + "x" * 100_000, "Bearer \ud800"],
)  # fmt: skip
def test_anything_else_is_nobody(tmp_path, header):
    assert AccessFile(written(tmp_path / "access.yaml", ENTRY)).bearer(header) is None


def test_a_file_that_changes_is_read_again(tmp_path):
    """A new token works and an old one ends, also when a link is turned to another file, as Kubernetes does."""
    other = new_token()
    access = AccessFile(written(tmp_path / "access.yaml", ENTRY))
    written(tmp_path / "new.yaml", ENTRY | {"sha256": digest_of(other)})
    (tmp_path / "link").symlink_to(tmp_path / "new.yaml")
    (tmp_path / "link").replace(tmp_path / "access.yaml")
    access.renew()
    assert access.bearer(f"Bearer {TOKEN}") is None
    assert access.bearer(f"Bearer {other}").name == "ada"


def test_a_file_that_could_not_be_read_is_read_once_it_can(tmp_path, monkeypatch):
    """Its owner or its mode is mended, and neither its content nor its time is another."""
    path = written(tmp_path / "access.yaml", ENTRY)
    access, other = AccessFile(path), new_token()

    def refused(*_, **__):
        raise PermissionError(13, "Permission denied")

    written(path, ENTRY | {"sha256": digest_of(other)})
    with monkeypatch.context() as unreadable:
        unreadable.setattr(Path, "open", refused)
        access.renew()
    assert access.bearer(f"Bearer {TOKEN}").name == "ada"
    path.chmod(0o640)
    access.renew()
    assert access.bearer(f"Bearer {TOKEN}") is None


@pytest.mark.parametrize("broken", [b"tokens: [", b"", b"\xff", b"x" * (2 << 20), None])
def test_a_file_that_breaks_changes_nothing_and_is_said(tmp_path, broken, caplog):
    """Whoever was let in still is: half a file must lock nobody out, and let nobody in."""
    path = written(tmp_path / "access.yaml", ENTRY)
    access = AccessFile(path)
    path.unlink() if broken is None else path.write_bytes(broken)
    access.renew()
    access.renew()
    assert access.bearer(f"Bearer {TOKEN}").name == "ada"
    assert len(caplog.records) == 1
    assert "what was read before stays in force" in caplog.text


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"may": ["send", "fly"]}, "tokens.0.may"),
        ({"may": []}, "tokens.0.may"),
        ({"sha256": TOKEN}, "tokens.0.sha256"),
        ({"name": "a\nb"}, "tokens.0.name"),
        ({"password": "x"}, "tokens.0.password"),
    ],
)
def test_what_is_wrong_is_said_without_what_was_written(tmp_path, changes, said):
    """A token that was pasted in place of its digest is not repeated into a log."""
    with pytest.raises(UnusableFileError) as raised:
        AccessFile(written(tmp_path / "access.yaml", ENTRY | changes))
    assert said in str(raised.value)
    assert TOKEN not in str(raised.value)


def test_a_file_without_its_first_line_is_told_which_line_it_lacks(tmp_path):
    """As `kc-otel token ... >> access.yaml` leaves a file that nobody began."""
    (tmp_path / "access.yaml").write_text(f"- {{name: ada, may: [read], sha256: {ENTRY['sha256']}}}\n")
    with pytest.raises(UnusableFileError, match=r"access.yaml:1: must be a mapping in YAML: the line `tokens:`"):
        AccessFile(tmp_path / "access.yaml")


@pytest.mark.parametrize(
    "twice", ["tokens: [{name: ada, may: [read], may: [act]}]", "tokens: []\n\ntokens: [{name: ada}]"]
)
def test_a_key_that_is_written_twice_is_refused(tmp_path, twice):
    """YAML's own reader would take the last one, and give somebody more, or nobody anything."""
    (tmp_path / "access.yaml").write_text(twice)
    with pytest.raises(UnusableFileError, match=r"access.yaml:[13]: must be .* each key once"):
        AccessFile(tmp_path / "access.yaml")


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(UnusableFileError, match="Is a directory"):
        AccessFile(tmp_path)


def test_a_token_is_ones_own(tmp_path):
    """Two entries with one token would not say who acted."""
    with pytest.raises(UnusableFileError, match="is also that of 'ada'"):
        AccessFile(written(tmp_path / "access.yaml", ENTRY, ENTRY | {"name": "bob", "may": ["send"]}))


def test_tokens_are_long_and_random():
    """256 bits, and a prefix by which scanners know them."""
    made = {new_token() for _ in range(100)}
    assert len(made) == 100
    assert all(token.startswith("kc_") and len(token) >= 43 for token in made)
