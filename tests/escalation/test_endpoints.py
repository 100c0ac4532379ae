from __future__ import annotations

import pytest

from kc_otel.escalation.endpoints import Endpoint, EndpointError, endpoints_from_env
from kc_otel.escalation.signing import Secret, new_secret


def test_endpoints_are_read_from_the_environment(tmp_path):
    """URL and secrets come from variables or a file; several secrets are for rotation."""
    one, two = new_secret(), new_secret()
    path = tmp_path / "secret"
    path.write_text(f"{one}\n{two}\n")
    environ = {
        "KC_OTEL_WEBHOOK_PAGER_URL": "https://pager.example/alerts",
        "KC_OTEL_WEBHOOK_PAGER_SECRET": f"{one},{two}",
        "KC_OTEL_WEBHOOK_TEAM_CHAT_URL": "http://127.0.0.1:9/hook",
        "KC_OTEL_WEBHOOK_TEAM_CHAT_SECRET_FILE": str(path),
    }
    endpoints = endpoints_from_env(["team-chat", "pager", "pager"], environ)
    assert sorted(endpoints) == ["pager", "team-chat"]
    assert endpoints["pager"].secrets == endpoints["team-chat"].secrets == (Secret.parse(one), Secret.parse(two))


def test_everything_that_is_missing_is_named_at_once(tmp_path):
    """One error names every variable to set."""
    secret = new_secret()
    environ = {
        "KC_OTEL_WEBHOOK_CHAT_URL": "https://chat.example",
        "KC_OTEL_WEBHOOK_FILE_URL": "https://file.example",
        "KC_OTEL_WEBHOOK_FILE_SECRET_FILE": str(tmp_path / "nowhere"),
        "KC_OTEL_WEBHOOK_BOTH_URL": "https://both.example",
        "KC_OTEL_WEBHOOK_BOTH_SECRET": secret,
        "KC_OTEL_WEBHOOK_BOTH_SECRET_FILE": "x",
    }
    with pytest.raises(EndpointError) as error:
        endpoints_from_env(["pager", "chat", "file", "both", "a-b", "a.b"], environ)
    text = str(error.value)
    for wanted in (
        "set KC_OTEL_WEBHOOK_PAGER_URL and KC_OTEL_WEBHOOK_PAGER_SECRET or KC_OTEL_WEBHOOK_PAGER_SECRET_FILE",
        "set KC_OTEL_WEBHOOK_CHAT_SECRET or KC_OTEL_WEBHOOK_CHAT_SECRET_FILE",
        "nowhere",
        "only one of KC_OTEL_WEBHOOK_BOTH_SECRET",
        "'a.b' and 'a-b' read the same",
    ):
        assert wanted in text
    assert secret not in text


def test_secrets_and_urls_are_never_shown():
    """Neither a repr nor an error shows a secret or a URL that may carry a token."""
    secret = new_secret()
    endpoint = Endpoint("pager", "https://hooks.example/T0KEN", (Secret.parse(secret),))
    assert repr(endpoint) == "Endpoint(name='pager')"
    with pytest.raises(EndpointError) as error:
        endpoints_from_env(
            ["pager"], {"KC_OTEL_WEBHOOK_PAGER_URL": "https://h", "KC_OTEL_WEBHOOK_PAGER_SECRET": "dG9vLXNob3J0"}
        )
    assert "dG9vLXNob3J0" not in str(error.value)
    assert "KC_OTEL_WEBHOOK_PAGER_SECRET: the secret has 9 bytes" in str(error.value)


@pytest.mark.parametrize("url", ["pager.example", "ftp://pager.example", "https://", "https://a b/", "http://[::1"])
def test_url_that_is_none_is_refused(url):
    """A wrong URL is found at the start, not at the first alert."""
    with pytest.raises(EndpointError, match="'pager': the URL is not one"):
        Endpoint("pager", url, (Secret.parse(new_secret()),))


def test_endpoint_without_a_secret_is_refused():
    """Nothing is sent unsigned."""
    with pytest.raises(EndpointError, match="no secret"):
        Endpoint("pager", "https://pager.example", ())
