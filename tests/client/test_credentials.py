"""The token that clients show: from a file that rotates, or the environment; never in what is said."""

import pytest

from kc_otel.client.credentials import TokenError, authorization

TOKEN = "kc_" + "r4nd0m" * 7


@pytest.fixture(autouse=True)
def nothing_given(monkeypatch):
    for name in ("KC_OTEL_TOKEN", "KC_OTEL_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)


def test_the_argument_wins_over_the_file_of_the_environment_and_that_over_the_token(tmp_path, monkeypatch):
    (tmp_path / "a").write_text("first\n")
    (tmp_path / "b").write_text("second\n")
    assert authorization() == {}
    monkeypatch.setenv("KC_OTEL_TOKEN", "third")
    assert authorization() == {"authorization": "Bearer third"}
    monkeypatch.setenv("KC_OTEL_TOKEN_FILE", str(tmp_path / "b"))
    assert authorization() == {"authorization": "Bearer second"}
    assert authorization(tmp_path / "a") == {"authorization": "Bearer first"}


def test_a_file_is_read_each_time(tmp_path):
    for token in ("first", "second"):
        (tmp_path / "token").write_text(token)
        assert authorization(tmp_path / "token") == {"authorization": f"Bearer {token}"}


@pytest.mark.parametrize("written", [b"", b"\n", b"two words", b"a\nb", b"\xff", "\u00e9".encode(), b"x" * 5000, None])
def test_what_is_no_token_is_refused_without_being_repeated(tmp_path, written):
    if written is not None:
        (tmp_path / "token").write_bytes(written)
    with pytest.raises(TokenError) as raised:
        authorization(tmp_path / "token")
    assert str(tmp_path / "token") in str(raised.value)
    assert "two words" not in str(raised.value)
