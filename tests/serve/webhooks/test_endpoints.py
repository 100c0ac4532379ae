import json
import re

import pytest

from kc_otel.cli.serve_command import serve
from kc_otel.client.webhooks import Secret, new_secret
from kc_otel.handbook import generated_pages
from kc_otel.serve.webhooks import endpoints as module
from kc_otel.serve.webhooks.endpoints import (
    FORMATS,
    EndpointFiles,
    Format,
    WebhookEndpoint,
    WebhookEndpointError,
    endpoints_from_env,
)


def test_endpoints_are_read_from_the_environment(tmp_path):
    first, two = new_secret(), new_secret()
    path = tmp_path / "secret"
    path.write_text(f"{first}\n{two}\n")
    environ = {
        "KC_OTEL_WEBHOOK_PAGER_URL": "https://pager.example/alerts",
        "KC_OTEL_WEBHOOK_PAGER_SECRET": f"{first},{two}",
        "KC_OTEL_WEBHOOK_TEAM_CHAT_URL": "http://127.0.0.1:9/hook",
        "KC_OTEL_WEBHOOK_TEAM_CHAT_SECRET_FILE": str(path),
    }
    endpoints = endpoints_from_env(["team-chat", "pager", "pager"], environ)
    assert sorted(endpoints) == ["pager", "team-chat"]
    assert endpoints["pager"].secrets == endpoints["team-chat"].secrets == (Secret.parse(first), Secret.parse(two))


def test_everything_that_is_missing_is_named_at_once(tmp_path):
    secret = new_secret()
    environ = {
        "KC_OTEL_WEBHOOK_CHAT_URL": "https://chat.example",
        "KC_OTEL_WEBHOOK_FILE_URL": "https://file.example",
        "KC_OTEL_WEBHOOK_FILE_SECRET_FILE": str(tmp_path / "nowhere"),
        "KC_OTEL_WEBHOOK_BOTH_URL": "https://both.example",
        "KC_OTEL_WEBHOOK_BOTH_SECRET": secret,
        "KC_OTEL_WEBHOOK_BOTH_SECRET_FILE": "x",
    }
    with pytest.raises(WebhookEndpointError) as error:
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
    secret = new_secret()
    endpoint = WebhookEndpoint("pager", "https://hooks.example/T0KEN", (Secret.parse(secret),))
    assert repr(endpoint) == "WebhookEndpoint(name='pager', format='kernel-contract', allow_private=False)"
    with pytest.raises(WebhookEndpointError) as error:
        endpoints_from_env(
            ["pager"], {"KC_OTEL_WEBHOOK_PAGER_URL": "https://h", "KC_OTEL_WEBHOOK_PAGER_SECRET": "dG9vLXNob3J0"}
        )
    assert "dG9vLXNob3J0" not in str(error.value)
    assert "KC_OTEL_WEBHOOK_PAGER_SECRET: the secret has 9 bytes" in str(error.value)


@pytest.mark.parametrize("url", ["pager.example", "ftp://pager.example", "https://", "https://a b/", "http://[::1"])
def test_url_that_is_none_is_refused(url):
    with pytest.raises(WebhookEndpointError, match="'pager': the URL is not valid"):
        WebhookEndpoint("pager", url, (Secret.parse(new_secret()),))


def _of(**variables):
    environ = {"KC_OTEL_WEBHOOK_PAGER_URL": "https://pager.example"}
    environ |= {f"KC_OTEL_WEBHOOK_PAGER_{name}": value for name, value in variables.items()}
    return endpoints_from_env(["pager"], environ)["pager"]


def test_each_format_takes_the_credentials_that_it_has():
    assert _of(FORMAT="pagerduty", SECRET="R" * 32).key == "R" * 32
    assert _of(FORMAT="Slack").format == "slack"
    assert _of(FORMAT="slack", ALLOW_PRIVATE="1").allow_private
    assert _of(FORMAT="slack", AUTHORIZATION="Bearer abc").authorization == "Bearer abc"


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"FORMAT": "telex"}, "'telex' is not one of kernel-contract, pagerduty, slack"),
        ({"FORMAT": "pagerduty"}, "set KC_OTEL_WEBHOOK_PAGER_SECRET or KC_OTEL_WEBHOOK_PAGER_SECRET_FILE to its"),
        ({"FORMAT": "slack", "SECRET": "x"}, "slack messages are not signed; leave it out"),
        ({"FORMAT": "slack", "ALLOW_PRIVATE": "maybe"}, "'maybe' says nothing; write 1"),
        ({"FORMAT": "slack", "AUTHORIZATION": "Bearer a\nx-evil: 1"}, "characters that a header cannot contain"),
    ],
)
def test_a_format_without_what_it_needs_is_refused(variables, said):
    with pytest.raises(WebhookEndpointError, match=re.escape(said)):
        _of(**variables)


def test_a_format_is_declared_in_one_line(monkeypatch):
    monkeypatch.setitem(FORMATS, "teams", Format(lambda body, key: {"text": body["status"], "key": key}, "webhook key"))
    with pytest.raises(WebhookEndpointError, match="SECRET_FILE to its webhook key"):
        _of(FORMAT="teams")
    with pytest.raises(WebhookEndpointError, match="not one of kernel-contract, pagerduty, slack, teams"):
        _of(FORMAT="discord")
    _, message = _of(FORMAT="teams", SECRET="k").request(b'{"status": "firing"}', "msg_1", 0.0)
    assert json.loads(message) == {"text": "firing", "key": "k"}


def test_help_and_handbook_list_the_formats():
    *names, last = FORMATS
    page = (generated_pages.FOLDER / "run" / "webhooks.md").read_text()
    assert f"({', '.join(names)} or {last})" in (serve.__doc__ or "")
    listed = f"`{names[0]}` (default), {', '.join(f'`{name}`' for name in names[1:])} or `{last}`"
    assert f"| `KC_OTEL_WEBHOOK_PAGER_FORMAT` | {listed} |" in page
    assert listed.replace("`", "") in (module.__doc__ or "")


def test_a_secret_that_changes_in_its_file_is_read_again(tmp_path, caplog):
    path, first, two = tmp_path / "secret", new_secret(), new_secret()
    path.write_text(first)
    environ = {"KC_OTEL_WEBHOOK_PAGER_URL": "https://p.example", "KC_OTEL_WEBHOOK_PAGER_SECRET_FILE": str(path)}
    files = EndpointFiles(["pager"], environ)
    assert not files.renew()
    for content, renewed, keys in (
        (f"{two} {first}", True, (two, first)),
        ("rubbish", False, (two, first)),
        (None, False, (two, first)),
        (two, True, (two,)),
    ):
        path.unlink() if content is None else path.write_text(content)
        assert files.renew() is renewed
        assert files.endpoints["pager"].secrets == tuple(map(Secret.parse, keys))
        assert not files.renew()
    assert caplog.text.count("what was read before stays in force") == 2
