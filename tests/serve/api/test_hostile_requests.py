"""What anybody may send to the API's POSTs: it is taken or refused in words, and nothing of it stays or comes back."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from kc_otel.serve.core import Core
from tests.serve.conftest import core_of_policy
from tests.tools.api import client_of

pytestmark = pytest.mark.slow

SIGNED = {"by": "ada", "why": "because"}
GOOD = {
    "/api/v1/alerts/acknowledge": {"contract": "policy", "clause": "token-tv", "slice": "code", **SIGNED},
    "/api/v1/silences": {"contract": "policy", "clause": "token-tv", "slice": "code", "until": 9e9, **SIGNED},
    "/api/v1/silences/{silence}/end": SIGNED,
    "/api/v1/decisions/pin": {
        "contract": "policy", "slice": "code", "kernel": "train-kernel", "until": 9e9, **SIGNED,
    },
    "/api/v1/decisions/unpin": {"contract": "policy", "slice": "code", **SIGNED},
    "/api/v1/decisions/resume": {"contract": "policy", "slice": "code", **SIGNED},
    "/api/v1/promotions/{contract}/{kernel}": {"order": "hold", **SIGNED},
    "/api/v1/incidents/{id}/diagnoses": {
        "kind": "locate", "slice": "code", "text": "layer 3", "by": "ada", "evidence": {"found": []},
    },
}  # fmt: skip
"""A body that has every text of each POST; the first six are refused, if at all, for what they ask only."""
FIELDS = [(path, name) for path, body in GOOD.items() for name, value in body.items() if isinstance(value, str)]
TIMES = [(path, "until") for path, body in GOOD.items() if "until" in body]
MARK = "do-not-repeat-this"
HOSTILE = {
    "newline": "a\nb",
    "escape": "a\x1b[2Jb",
    "null": "a\x00b",
    "c1": "a\x9bb",
    "surrogate": "a\ud800b",
    "line separator": "a\u2028b",
    "paragraph separator": "a\u2029b",
    "bidi": "a\u202eb",
    "too long": MARK * 1000,
    "number": 5,
    "object": {MARK: [MARK]},
    "null value": [None],
}


@pytest.fixture(scope="module")
def core() -> Iterator[Core]:
    """One for all tests in which nothing may change: they show that nothing did."""
    made = core_of_policy()
    with closing(made.connection):
        yield made


@pytest.fixture(scope="module")
def client(core: Core) -> Iterator[TestClient]:
    with client_of(core, raise_server_exceptions=False) as opened:  # one loop for all requests, not one for each
        yield opened


@pytest.fixture
def fresh_core(make_core: Callable[..., Core]) -> Core:
    return make_core()


@pytest.fixture
def fresh_client(fresh_core: Core) -> Iterator[TestClient]:
    with client_of(fresh_core, raise_server_exceptions=False) as opened:
        yield opened


def post(client: TestClient, path: str, body: Any) -> Any:
    """As a hostile sender does: JSON with whatever escapes it takes."""
    where = path.format(silence="none", contract="policy", kernel="v2", id="none")
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return client.post(where, content=raw, headers={"content-type": "application/json"})


def refused(answer: Any, *statuses: int) -> bool:
    """Whether it is refused in words, briefly, and without a word of what was sent."""
    problem = answer.json()
    return (
        answer.status_code in statuses
        and answer.headers["content-type"] == "application/problem+json"
        and set(problem) == {"title", "detail", "status"}
        and bool(problem["detail"])
        and len(answer.content) < 2000
        and MARK not in answer.text
    )


def unchanged(client: TestClient, core: Core) -> bool:
    """Whether nothing was written, and everything that reads still answers."""
    views = ("overview", "events", "alerts", "silences", "decisions", "promotions")
    answers = [client.get(f"/api/v1/{view}").status_code for view in views]
    return set(answers) == {200} and not core.events.newest(limit=10) and not core.people.silences


def test_every_post_is_among_those_tried(client: TestClient) -> None:
    paths = client.get("/openapi.json").json()["paths"]
    assert {path for path, methods in paths.items() if "post" in methods} == set(GOOD)
    assert all({"put", "patch", "delete"}.isdisjoint(methods) for methods in paths.values())


@pytest.mark.parametrize("path", GOOD)
def test_a_good_request_is_not_called_malformed(fresh_client: TestClient, path: str) -> None:
    """The bodies that the tests below spoil in one place are well-formed."""
    assert post(fresh_client, path, GOOD[path]).status_code in {200, 404, 409}


@pytest.mark.parametrize(("path", "name"), FIELDS)
def test_texts_that_nothing_can_show_are_refused(client: TestClient, core: Core, path: str, name: str) -> None:
    """Control characters, surrogates, turned text and what is too long or no text, wherever a text is asked for."""
    for kind, value in HOSTILE.items():
        answer = post(client, path, GOOD[path] | {name: value})
        assert refused(answer, 422), (kind, answer.text[:500])
        assert answer.json()["detail"].startswith(f"{name}: "), kind
    assert unchanged(client, core)


@pytest.mark.parametrize(("path", "name"), TIMES)
def test_times_without_a_date_are_refused(client: TestClient, core: Core, path: str, name: str) -> None:
    for value in ("1e300", "NaN", "Infinity", "-1", "0", "1" + "0" * 400, "1" * 5000, '"noon"'):
        raw = json.dumps(GOOD[path] | {name: MARK}).replace(f'"{MARK}"', value)
        assert refused(post(client, path, raw.encode()), 400, 422), value[:20]
    assert unchanged(client, core)


@pytest.mark.parametrize("path", GOOD)
@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"null", b'"x"', b"{", b"\xff\xfe", b'{"a":' * 10_000, f'{{"{MARK}\\ud800": 1}}'.encode()],
    ids=["nothing", "list", "null", "text", "cut", "not utf-8", "deep", "strange key"],
)
def test_bodies_that_are_no_request_are_refused(client: TestClient, core: Core, path: str, body: bytes) -> None:
    """With what is wrong, and with no more of them than the first letters of an unknown key."""
    answer = post(client, path, body)
    assert answer.status_code in {400, 413, 422}
    assert len(answer.content) < 2000
    assert unchanged(client, core)


@pytest.mark.parametrize("path", GOOD)
def test_unknown_keys_are_refused(client: TestClient, core: Core, path: str) -> None:
    """A misspelt `slice` would otherwise be about every slice; the key is named, cut short and escaped."""
    answer = post(client, path, GOOD[path] | {"slize": "code", "\x1b" * 500: MARK})
    assert refused(answer, 422)
    assert "slize: " in answer.json()["detail"]
    assert "\\x1b" in answer.json()["detail"]
    assert unchanged(client, core)


@pytest.mark.parametrize("path", GOOD)
@pytest.mark.parametrize("declared", [True, False])
def test_large_bodies_are_not_read(client: TestClient, path: str, declared: bool) -> None:
    """One that says how large it is, and one that does not; evidence of a gate may be larger than words."""
    limit = (40 << 20) if "promotions" in path else (4 << 20) if "incidents" in path else (64 << 10)
    piece = b" " * (1 << 20)
    count = limit // len(piece) + 1
    where = path.format(silence="none", contract="policy", kernel="v2", id="none")
    content = piece * count if declared else iter([piece] * count)
    assert refused(client.post(where, content=content, headers={"content-type": "application/json"}), 413)


@pytest.mark.parametrize("part", ["contract", "kernel"])
def test_names_in_the_path_are_texts_too(client: TestClient, core: Core, part: str) -> None:
    """A promotion of a kernel with an escape in its name would be shown in terminals."""
    names = {"contract": "policy", "kernel": "v2", part: "a%1B[2Jb"}
    answer = client.post("/api/v1/promotions/{contract}/{kernel}".format(**names), json={"order": "start", "by": "ada"})
    assert refused(answer, 422)
    assert unchanged(client, core)


@pytest.mark.parametrize("evidence", [{"a": "\ud800"}, {"a": [[[]]] * 1000}, {"checksum": MARK}, {}])
def test_evidence_that_is_none_is_refused(fresh_client: TestClient, evidence: Any) -> None:
    path = "/api/v1/promotions/{contract}/{kernel}"
    assert post(fresh_client, path, {"order": "start", "by": "ada"}).status_code == 200
    body = {"order": "evidence", "by": "ada", "evidence": evidence}
    assert refused(post(fresh_client, path, body), 409, 422)


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.text(st.characters(categories=["Cs", "Cc"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(path=st.sampled_from(sorted(GOOD)), data=st.data())
def test_no_request_is_a_fault_of_the_server(fresh_client: TestClient, path: str, data: st.DataObject) -> None:
    """Any values for any of the fields: taken, or refused in words; and what reads goes on answering."""
    keys = st.sampled_from(sorted(GOOD[path]))
    spoilt = data.draw(st.dictionaries(keys, values, min_size=1, max_size=3))
    answer = post(fresh_client, path, GOOD[path] | spoilt)
    assert answer.status_code in {200, 400, 404, 409, 422}, answer.text
    assert fresh_client.get("/api/v1/events?newest=5").status_code == 200
    assert fresh_client.get("/api/v1/overview").status_code == 200


def test_a_text_of_people_is_any_language(fresh_client: TestClient, fresh_core: Core) -> None:
    """What is refused above is no reason to write in ASCII."""
    why = "Ω ist grün, 👩‍🔬 sagt: «上»"
    body = {"contract": "policy", "kernel": "train-kernel", "until": time.time() + 60, "by": "Zoë", "why": why}
    assert post(fresh_client, "/api/v1/decisions/pin", body).status_code == 200
    assert fresh_core.decisions.pins[0].why == why


def test_a_contract_that_is_not_served_is_no_empty_list(client):
    """Who mistypes a name would read that nothing fails: of every path that can be narrowed down to a contract."""
    paths = client.get("/openapi.json").json()["paths"]
    narrowed = [
        path
        for path, methods in paths.items()
        for parameter in methods.get("get", {}).get("parameters", ())
        if (parameter["name"], parameter["in"], parameter["required"]) == ("contract", "query", False)
    ]
    assert {"/api/v1/verdicts", "/api/v1/alerts", "/api/v1/incidents"} < set(narrowed)
    for path in narrowed:
        found = client.get(path, params={"contract": "polcy"})
        assert found.status_code == 404, path
        assert "no contract 'polcy'; there are policy" in found.json()["detail"]
        assert client.get(path, params={"contract": "policy"}).status_code == 200, path
