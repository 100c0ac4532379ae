"""Someone with one tenant's token neither reads of another tenant's contracts, nor learns their names, nor acts."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from contextlib import closing, contextmanager

import numpy as np
import pytest
import yaml
from starlette.testclient import TestClient

from kc_otel.contract import load_text
from kc_otel.judge.otlp.sink import RequestCounts
from kc_otel.record.kernel import Kernel
from kc_otel.recordings.request import SampledRequest
from kc_otel.recordings.worst_sequences import WorstSequences
from kc_otel.serve import people_orders
from kc_otel.serve.access.access_file import AccessFile, digest_of
from kc_otel.serve.access.guarded_site import GuardedSite
from kc_otel.serve.access.tenant_view import TenantView
from kc_otel.serve.api.app import make_api
from kc_otel.serve.api.changes import Changes
from kc_otel.serve.core import Core
from kc_otel.serve.self_metrics import read
from kc_otel.serve.store.state_file import open_state
from tests.serve.conftest import POLICY

FOREIGN = re.compile("secret", re.IGNORECASE)
"""Every name and text of the other tenant has it."""
MINE = POLICY.replace("{name: policy", "{name: mine")
SECRET = (
    POLICY.replace("{name: policy", "{name: secret-policy")
    .replace("owner: tests", "owner: secret-owner")
    .replace("code:", "secret-slice:")
    .replace("token-tv", "secret-clause")
    .replace("share of mass", "secret share of mass")
    .replace("{webhook: pager}", "{webhook: secret-pager}")
)
TOKENS = {
    name: f"kc_{name}_" + "r4nd0m" * 7 for name in ("ada", "reader", "sender", "operations", "mallory", "reviewer")
}
ACCESS = {
    "tenants": {"mine": ["mine"], "theirs": ["secret-policy"], "operations": "all"},
    "tokens": [
        {"name": name, "tenant": tenant, "may": may, "sha256": digest_of(TOKENS[name])}
        for name, tenant, may in (
            ("ada", "mine", ["read", "act"]),
            ("reader", "mine", ["read"]),
            ("reviewer", "mine", ["read", "prompts"]),
            ("sender", "mine", ["send"]),
            ("mallory", "theirs", ["read", "act"]),
            ("operations", "operations", ["read", "act"]),
        )
    ],
}
SIGNED = {"by": "someone", "why": "because"}


@pytest.fixture
def core(drift):
    """Two contracts, of which both break; each has an event, a route, a silence, a pin, a promotion and a webhook."""
    with _two_tenants(drift) as made:
        yield made


@contextmanager
def _two_tenants(drift):
    with closing(open_state(None)) as connection:
        contracts = [load_text(MINE, "mine.yaml"), load_text(SECRET, "secret.yaml")]
        made = Core(contracts, connection, external_url="http://evaluator", now=0.0)
        now = time.time()
        for name, slice in (("mine", "code"), ("secret-policy", "secret-slice")):
            request = _about(drift(0.4), name, slice, now)
            made.evaluator.ingest_metrics(request, now)
        made.tick(now)
        made.tick(now + 1)
        for name in ("mine", "secret-policy"):
            who = "secret-person" if name != "mine" else "somebody"
            people_orders.silence(made, name, None, None, now + 9e8, who, f"{who} says so", now + 2)
            people_orders.pin(made, name, "all", "train-kernel", None, who, f"{who} says so", now + 2)
            made.promotions.start(name, "secretkernel" if name != "mine" else "ourkernel", who, now + 2)
        yield made


def _about(request, contract, slice, now):
    """The request, about another contract and slice, now."""
    kernels = (
        {"kc.kernel.train": "secret-train", "kc.kernel.inference": "secret-inference"} if contract != "mine" else {}
    )
    for resource in request.resource_metrics:
        for scope in resource.scope_metrics:
            for metric in scope.metrics:
                data = getattr(metric, metric.WhichOneof("data"))
                for point in data.data_points:
                    point.start_time_unix_nano, point.time_unix_nano = int((now - 5) * 1e9), int(now * 1e9)
                    for pair in point.attributes:
                        if pair.key == "kc.contract":
                            pair.value.string_value = contract
                        elif pair.key == "kc.slice" and pair.value.string_value != "all":
                            pair.value.string_value = slice
                        elif pair.key in kernels:
                            pair.value.string_value = kernels[pair.key]
    return request


@pytest.fixture
def counts():
    return RequestCounts()


@pytest.fixture
def site(core, tmp_path, counts):
    """What is served at the API's port."""
    return _site_of(core, tmp_path, counts)


def _site_of(core, folder, counts):
    path = folder / "access.yaml"
    path.write_text(yaml.safe_dump(ACCESS))

    def make(contracts):
        view = core if contracts is None else TenantView(core, contracts)
        return make_api(view, lambda: read(view, RequestCounts(), Counter()), Changes(), "0")

    return GuardedSite(AccessFile(path, core.contracts), make, counts, secure=False)


@pytest.fixture
def ask(site):
    """Asks as somebody."""
    return _asking(site)


def _asking(site):
    client = TestClient(site, follow_redirects=False)

    def asked(who, method, path, **options):
        headers = {"authorization": f"Bearer {TOKENS.get(who, who)}"} if who else {}
        return client.request(method, path, headers=headers | options.pop("headers", {}), **options)

    return asked


@pytest.fixture(scope="module")
def look(drift, tmp_path_factory):
    """Asks as somebody, for what changes nothing: of one site for all tests."""
    with _two_tenants(drift) as core:
        yield _asking(_site_of(core, tmp_path_factory.mktemp("look"), RequestCounts()))


def _reads(core):
    """Every path that can be read, with the names of either tenant in it."""
    schema = make_api(core, lambda: read(core, RequestCounts(), Counter()), Changes(), "0").openapi()
    for path, methods in schema["paths"].items():
        if "get" in methods:
            yield path, {one["name"]: one for one in methods["get"].get("parameters", ()) if one["in"] == "query"}


_VALUES = {
    "mine": {"contract": "mine", "clause": "token-tv", "slice": "code", "kernel": "ourkernel", "stage": "canary"},
    "theirs": {
        "contract": "secret-policy", "clause": "secret-clause", "slice": "secret-slice", "kernel": "secretkernel",
        "stage": "canary",
    },
}  # fmt: skip
_ECHOED = re.compile(r"'?secret-(policy|slice|clause)'?|secretkernel")


@pytest.mark.slow
def test_nothing_that_is_read_tells_of_another_tenant(core, ask):
    """Every path of the API, asked without names, with one's own and with the other's; all of it works."""
    told = set()
    for path, parameters in _reads(core):
        for whose, values in _VALUES.items():
            filled = path.replace("{number}", "1")
            for name, value in values.items():
                filled = filled.replace("{" + name + "}", value)
            for query in ({}, {name: value for name, value in values.items() if name in parameters}):
                answer = ask("ada", "GET", filled, params=query)
                assert answer.status_code < 500, (filled, query, answer.text)
                text = answer.text if whose == "mine" else _ECHOED.sub("", answer.text)  # what was asked, in a refusal
                if answer.status_code < 400:
                    text = answer.text
                assert not FOREIGN.search(text), (filled, query, answer.text)
                if FOREIGN.search(ask("operations", "GET", filled, params=query).text):
                    told.add(path)
    assert {
        "/api/v1/contracts", "/api/v1/verdicts", "/api/v1/cells", "/api/v1/events", "/api/v1/overview", "/metrics",
        "/api/v1/alerts", "/api/v1/silences", "/api/v1/decisions", "/api/v1/health", "/api/v1/promotions",
        "/api/v1/incidents",
    } <= told  # fmt: skip


@pytest.mark.slow
def test_prompts_are_for_those_who_may_read_them(core, ask, tmp_path, caplog):
    """Of one's own contracts alone, with a role of its own, in no cache, and the log says who."""
    caplog.set_level("INFO")
    logprobs = np.full(3, -3.0, dtype=np.float32)
    for name in core.contracts:
        asked = SampledRequest(f"{name}-request", np.arange(2), np.arange(3), logprobs, Kernel("vllm"))
        kept = WorstSequences(
            tmp_path / f"{name}.sqlite", core.contracts[name], text=lambda _, name=name: f"{name}-prompt"
        )
        kept.add([asked], [logprobs - 1], time.time())
        kept.close()
    mine = {"contract": "mine", "clause": "token-tv"}
    core.worst = tuple(tmp_path / f"{name}.sqlite" for name in core.contracts)
    answer = ask("reviewer", "GET", "/api/v1/worst", params=mine)
    assert [one["request_id"] for one in answer.json()["sequences"]] == ["mine-request"]
    assert answer.headers["cache-control"] == "no-store"
    assert "reviewer reads the worst sequences of token-tv on all of mine" in caplog.text
    for who in ("ada", "reader"):
        refused = ask(who, "GET", "/api/v1/worst", params=mine)
        assert (refused.status_code, "mine-prompt" in refused.text) == (403, False)
        assert "may: [read, prompts]" in refused.json()["detail"]
    assert ask("operations", "GET", "/api/v1/worst", params=mine).status_code == 403
    theirs = {"contract": "secret-policy", "clause": "secret-clause"}
    assert ask("reviewer", "GET", "/api/v1/worst", params=theirs).status_code == 404
    assert ask(None, "GET", "/api/v1/worst", params=mine).status_code == 401


def test_nobody_finds_another_tenants_incident(core, ask):
    """Not even who guesses its id; one's own is there."""
    for one in core.incidents():
        status = ask("ada", "GET", f"/api/v1/incidents/{one.id}").status_code
        assert status == (200 if one.contract == "mine" else 404)
    assert {one.contract for one in core.incidents()} == {"mine", "secret-policy"}


def test_one_reads_ones_own(look):
    """The tenant's own contract is all there."""
    assert [one["name"] for one in look("reader", "GET", "/api/v1/contracts").json()["contracts"]] == ["mine"]
    assert {one["contract"] for one in look("reader", "GET", "/api/v1/events").json()["events"]} == {"mine"}
    table = look("reader", "GET", "/api/v1/decisions").json()
    assert {one["contract"] for one in table["routes"] + table["pins"]} == {"mine"}
    assert 'kc_contract="mine"' in look("reader", "GET", "/metrics").text


_ORDERS = [
    ("/api/v1/alerts/acknowledge", {"contract": "secret-policy"}),
    ("/api/v1/silences", {"contract": "secret-policy", "until": 9e9}),
    ("/api/v1/decisions/pin", {"contract": "secret-policy", "kernel": "inference-kernel"}),
    ("/api/v1/decisions/unpin", {"contract": "secret-policy"}),
    ("/api/v1/decisions/resume", {"contract": "secret-policy"}),
    ("/api/v1/webhooks/enable", {"contract": "secret-policy", "endpoint": "pager"}),
    ("/api/v1/promotions/secret-policy/secretkernel", {"order": "rollback"}),
    ("/api/v1/promotions/secret-policy/other", {"order": "start"}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("path", "body"), _ORDERS)
def test_nobody_acts_on_another_tenants_contract(core, ask, path, body):
    """Every order is answered as if the contract did not exist, and changes nothing; its own tenant may."""
    before = (core.escalation, core.promotions.all("secret-policy"), len(core.events.events(limit=1000)))
    answer = ask("ada", "POST", path, json=body | SIGNED)
    assert answer.status_code == 404
    assert not FOREIGN.search(answer.text.replace("'secret-policy'", ""))
    assert (core.escalation, core.promotions.all("secret-policy"), len(core.events.events(limit=1000))) == before
    assert ask("mallory", "POST", path, json=body | SIGNED).status_code in {200, 404, 409}


@pytest.mark.slow
def test_nobody_ends_another_tenants_silence(core, ask):
    """Not even who guesses its id; and is not told the ids that there are."""
    (id,) = [one.id for one in core.people.silences if one.contract == "secret-policy"]
    answer = ask("ada", "POST", f"/api/v1/silences/{id}/end", json=SIGNED)
    assert answer.status_code == 404
    assert len(core.people.silences) == 2
    assert ask("mallory", "POST", f"/api/v1/silences/{id}/end", json=SIGNED).status_code == 200


def test_what_one_tenant_decides_leaves_the_others_alone(core, ask):
    """A pin, a silence and an acknowledgement of one are put beside those of the others, not in their place."""
    assert ask("ada", "POST", "/api/v1/decisions/pin", json={
        "contract": "mine", "slice": "code", "kernel": "inference-kernel", **SIGNED}).status_code == 200  # fmt: skip
    assert ask("ada", "POST", "/api/v1/silences", json={"contract": "mine", "until": 9e9, **SIGNED}).status_code == 200
    assert Counter(one.contract for one in core.decisions.pins) == {"mine": 2, "secret-policy": 1}
    assert Counter(one.contract for one in core.people.silences) == {"mine": 2, "secret-policy": 1}


def test_what_others_decide_does_not_move_ones_table(core, ask):
    """Neither its version, nor its time, nor its tag say that something happened elsewhere."""
    before = ask("ada", "GET", "/api/v1/decisions")
    people_orders.unpin(core, "secret-policy", None, "secret-person", "over", time.time())
    after = ask("ada", "GET", "/api/v1/decisions")
    assert (after.content, after.headers["etag"]) == (before.content, before.headers["etag"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("who", "method", "path", "status"),
    [
        (None, "GET", "/api/v1/verdicts", 401),
        (None, "GET", "/metrics", 401),
        (None, "POST", "/api/v1/decisions/pin", 401),
        (None, "GET", "/no-such-path", 401),
        ("kc_guess", "GET", "/api/v1/verdicts", 401),
        ("sender", "GET", "/api/v1/verdicts", 403),
        ("sender", "POST", "/api/v1/decisions/pin", 403),
        ("reader", "POST", "/api/v1/decisions/pin", 403),
        ("reader", "DELETE", "/api/v1/decisions", 403),
        (None, "GET", "/", 303),
        (None, "GET", "/healthz", 200),
        (None, "GET", "/page/main.js", 200),
        (None, "GET", "/handbook/", 200),
        (None, "GET", "/openapi.json", 200),
        (None, "GET", "/handbook/../metrics", 401),
        (None, "GET", "/page/..%2f..%2fmetrics", 404),
    ],
)
def test_each_role_has_what_is_its_own(look, who, method, path, status):
    """Without a token there are health, handbook and the page's files; reading does not act, sending does neither."""
    answer = look(who, method, path, json={} if method == "POST" else None)
    assert answer.status_code == status
    assert not FOREIGN.search(answer.text)
    if status == 401:
        assert answer.headers["www-authenticate"] == "Bearer"


def test_whoever_asks_is_told_whether_it_is_ready(ask):
    """Without a token, as health checks have none."""
    assert ask(None, "GET", "/readyz").status_code == 200


def test_refusals_are_counted(ask, counts):
    """By what was wrong; who is known is in the log."""
    ask(None, "GET", "/metrics")
    ask("reader", "POST", "/api/v1/decisions/pin", json={})
    assert counts.snapshot() == {("api", "unauthenticated"): 1, ("api", "forbidden"): 1}


def test_events_say_whose_token_it_was(core, ask):
    """Who somebody says to be stands behind the name of their token, and alone only where it is the same."""
    for by in ("ada", "mallory"):
        body = {"contract": "mine", "slice": "code", "kernel": "inference-kernel", "by": by, "why": "because"}
        assert ask("ada", "POST", "/api/v1/decisions/pin", json=body).status_code == 200
    pinned = [event for event in core.events.newest("mine", 10) if event.kind == "pinned"][-2:]
    assert [event.data["by"] for event in pinned] == ["ada", "ada (as mallory)"]
    assert pinned[1].message.startswith("ada (as mallory) pinned")


@pytest.mark.slow
def test_a_browser_logs_in_and_out(site):
    """The cookie is out of reach of scripts and of other sites; it ends with the session."""
    client = TestClient(site, follow_redirects=False)
    assert client.get("/").headers["location"] == "/login"
    page = client.get("/login")
    assert page.status_code == 200
    assert "form-action 'self'" in page.headers["content-security-policy"]
    for path in ("/login", "/handbook/"):  # neither may be laid over by a page of others
        assert "frame-ancestors 'none'" in client.get(path).headers["content-security-policy"], path
    answer = client.post("/login", data={"token": TOKENS["ada"]})
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert TOKENS["ada"] not in cookie
    assert client.get("/").status_code == 200
    assert [one["name"] for one in client.get("/api/v1/contracts").json()["contracts"]] == ["mine"]
    assert "You are ada of mine" in client.get("/login").text
    stolen = dict(client.cookies)
    assert client.post("/logout").headers["location"] == "/login"
    assert TestClient(site, cookies=stolen).get("/api/v1/contracts").status_code == 401


@pytest.mark.slow
@pytest.mark.parametrize("token", ["", "kc_guess", TOKENS["sender"], "x" * 100_000, "\u00e9", "<script>"])
def test_a_login_without_a_token_that_reads_is_refused(site, counts, token):
    """Also with one that is for sending only; what was given is not repeated."""
    answer = TestClient(site, follow_redirects=False).post("/login", data={"token": token})
    assert answer.status_code == 401
    assert "set-cookie" not in answer.headers
    assert len(token) < 3 or token not in answer.text
    assert counts.snapshot() == {("api", "unauthenticated"): 1}


def test_a_session_ends_after_twelve_hours_and_with_its_token(core, tmp_path):
    """Whoever leaves the file is out at once, also in a browser that is open."""
    path, now = tmp_path / "access.yaml", [0.0]
    path.write_text(yaml.safe_dump(ACCESS))
    access = AccessFile(path, core.contracts)

    def make(contracts):
        return make_api(TenantView(core, contracts), dict, Changes(), "0")

    client = TestClient(
        GuardedSite(access, make, RequestCounts(), secure=True, clock=lambda: now[0]), base_url="https://kc"
    )
    answer = client.post("/login", data={"token": TOKENS["ada"]}, follow_redirects=False)
    assert "Secure" in answer.headers["set-cookie"]
    assert client.get("/api/v1/contracts").status_code == 200
    path.write_text(yaml.safe_dump(ACCESS | {"tokens": ACCESS["tokens"][1:]}))
    access.renew()
    assert client.get("/api/v1/contracts").status_code == 401
    path.write_text(yaml.safe_dump(ACCESS))
    access.renew()
    assert client.get("/api/v1/contracts").status_code == 200
    now[0] = 12 * 3600.0 + 1
    assert client.get("/api/v1/contracts").status_code == 401


def _logged_in(site, **options):
    """A cookie as a browser sends it."""
    answer = TestClient(site, follow_redirects=False, **options).post("/login", data={"token": TOKENS["ada"]})
    return answer.headers["set-cookie"].partition(";")[0]


def _reads_with(site, cookie):
    client = TestClient(site, follow_redirects=False)
    return client.get("/api/v1/verdicts", headers={"cookie": cookie}).status_code


def test_a_cookie_is_one_of_this_host_by_tls(core, tmp_path):
    """Where there is TLS, its prefix keeps other hosts of the domain, and those in between, from setting it."""
    path = tmp_path / "access.yaml"
    path.write_text(yaml.safe_dump(ACCESS))
    make = lambda _: make_api(core, lambda: read(core, RequestCounts(), Counter()), Changes(), "0")  # noqa: E731
    site = GuardedSite(AccessFile(path, core.contracts), make, RequestCounts(), secure=True)
    cookie = _logged_in(site)
    assert cookie.startswith("__Host-kc-otel-session=")
    assert _reads_with(site, cookie) == 200
    assert _reads_with(site, cookie.removeprefix("__Host-")) == 401


def test_of_two_cookies_neither_is_taken(site):
    """A page on another port of this host can set a second one, and would have one act in its session."""
    mine, theirs = _logged_in(site), _logged_in(site)
    assert _reads_with(site, f"a=b; {mine};c") == 200
    assert _reads_with(site, f"{mine}; {theirs}") == 401


def test_a_header_of_cookies_takes_no_time(site):
    """Python's own parser takes a minute for this one, in which nobody else is served."""
    began = time.monotonic()
    assert _reads_with(site, 'a="' + '\\"' * 50_000 + '"') == 401
    assert time.monotonic() - began < 5


@pytest.mark.slow
def test_one_token_ends_no_sessions_of_others(site):
    """However often it logs in; of its own the oldest end."""
    others = TestClient(site, follow_redirects=False).post("/login", data={"token": TOKENS["reader"]})
    first, second, *_, last = [_logged_in(site) for _ in range(101)]
    assert _reads_with(site, others.headers["set-cookie"].partition(";")[0]) == 200
    assert [_reads_with(site, one) for one in (first, second, last)] == [401, 200, 200]


def test_a_view_puts_nothing_in_force(core):
    """What it does not show would be lost."""
    with pytest.raises(TypeError, match="whole"):
        TenantView(core, ["mine"]).amend("mine", "pinned", {}, 0.0)
    with pytest.raises(AttributeError):
        TenantView(core, ["mine"]).tick(0.0)


def test_json_of_the_state_of_another_tenant_is_nowhere(core):
    """The view's own values hold no text of the other's."""
    view = TenantView(core, ["mine"])
    assert not FOREIGN.search(json.dumps(view.escalation, default=str))
    assert not FOREIGN.search(str([view.contracts, view.dry_run, view.outbox.status(), view.firing(), view.acting()]))
