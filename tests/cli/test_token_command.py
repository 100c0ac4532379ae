"""`kc-otel token`: an entry that lets in, and a token that is shown once."""

from __future__ import annotations

import stat

import yaml

from kc_otel.serve.access.access_file import AccessFile

COMMANDS = ("token",)


def test_the_entry_lets_the_token_in(run, tmp_path):
    entry, token = run("ada", "--may", "read", "--may", "act")[1].splitlines()
    (tmp_path / "access.yaml").write_text(f"tokens:\n{entry}\n")
    caller = AccessFile(tmp_path / "access.yaml").bearer(f"Bearer {token}")
    assert (caller.name, sorted(caller.may)) == ("ada", ["act", "read"])


def test_a_file_takes_the_token_instead(run, tmp_path):
    _, out, err = run("ada", "--may", "send", "--out", tmp_path / "token")
    token = (tmp_path / "token").read_text().strip()
    assert stat.S_IMODE((tmp_path / "token").stat().st_mode) == 0o600
    assert token not in out + err
    assert yaml.safe_load(out)[0]["name"] == "ada"


def test_no_file_is_overwritten_and_no_role_is_made_up(run, tmp_path):
    (tmp_path / "token").write_text("precious")
    for words, said in (
        (("--may", "send", "--out", str(tmp_path / "token")), "never takes the place"),
        (("--may", "fly"), "--may fly: write send, read, act"),
    ):
        code, _, err = run("ada", *words)
        assert (code, said in err) == (2, True)
    assert (tmp_path / "token").read_text() == "precious"
