"""Whatever a path of the API answers, `/openapi.json` has it: the status, the media type and the shape of the body."""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from starlette.testclient import TestClient

from kc_otel.serve import people_orders
from kc_otel.serve.access.site_guard import GuardedSite, HostNames, OwnSite
from kc_otel.serve.api.shapes import PUBLIC
from kc_otel.serve.core import Core
from kc_otel.serve.store.state_file import StateError
from tests.serve.api.test_hostile_requests import GOOD
from tests.serve.conftest import core_of_policy
from tests.tools.access import access_of, bearer
from tests.tools.api import api_of

METHODS = ("get", "post", "put", "patch", "delete", "options")
KNOWN = {
    "contract": "policy", "clause": "token-tv", "slice": "code", "kernel": "v2", "stage": "canary", "id": "none",
    "silence": "none", "number": "1", "share": "code=0.5", "evidence": "none", "incident": "none",
}  # fmt: skip
"""Of parameters that have no default."""
HOSTILE = ("", "nan", "inf", "-inf", "-1", "1e400", "9" * 40, "\x00", "a\u202eb", "%ff", "x" * 5000, "[]", "ß")


def operations() -> list[tuple[str, str]]:
    core = core_of_policy()
    with closing(core.connection):
        document = api_of(core).openapi()
    return [(path, method) for path, found in document["paths"].items() for method in found]


OPERATIONS = operations()


class Documented:
    """A client that holds every answer against the document."""

    def __init__(self, core: Core, folder: Path) -> None:
        self.core = core
        guarded = GuardedSite(access_of(folder, acts="read act", reads="read"), api_of(core), Counter())
        self._client = TestClient(OwnSite(guarded, HostNames(["testserver"])), raise_server_exceptions=False)
        self.document = self._client.get("/openapi.json").json()

    def ask(self, path: str, method: str, who: str | None = "acts", **options: Any) -> Any:
        """The answer; fails where the document has none such."""
        headers = bearer(who) if who else {}
        where, query = self.address(path, method, options.pop("values", {}))
        if method == "post" and not {"content", "json"} & options.keys():
            options["json"] = GOOD.get(path)
        answer = self._client.request(
            method, where, params=query, headers=headers | options.pop("headers", {}), **options
        )
        operation = self.document["paths"][path].get(method)
        if operation is not None:
            self.check(operation["responses"], answer)
        return answer

    def address(self, path: str, method: str, values: dict[str, str]) -> tuple[str, dict[str, str]]:
        """Path and query with these values, and known ones where something has to be said."""
        query = {}
        for parameter in self.document["paths"][path].get(method, {}).get("parameters", []):
            value = values.get(parameter["name"], KNOWN.get(parameter["name"]) if parameter["required"] else None)
            if parameter["in"] == "path":
                path = path.replace("{" + parameter["name"] + "}", str(value).replace("%", "%25").replace("\0", "%00"))
            elif value is not None:
                query[parameter["name"]] = value
        return path.format_map(KNOWN), query

    def check(self, responses: dict[str, Any], answer: Any) -> None:
        """Status, media type and body of an answer are among those."""
        said = responses.get(str(answer.status_code), responses["default"])
        media = answer.headers.get("content-type", "").partition(";")[0]
        content = said.get("content", {})
        assert (media in content) if content else (not answer.content), (answer.status_code, media, list(content))
        if media.endswith("json"):
            schema = {**content[media]["schema"], "components": self.document["components"]}
            jsonschema.Draft202012Validator(schema).validate(json.loads(answer.text, parse_constant=pytest.fail))


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Documented]:
    """A site with one contract and no traffic: what is asked here changes nothing."""
    core = core_of_policy()
    with closing(core.connection):
        core.tick(time.time())
        yield Documented(core, tmp_path_factory.mktemp("site"))


@pytest.fixture
def busy(drift: Callable[[float], object], tmp_path: Path) -> Iterator[Documented]:
    """One that has a failing kernel, with all that comes of it."""
    core = core_of_policy()
    with closing(core.connection):
        core.metrics(drift(0.3))
        core.tick(time.time())
        yield Documented(core, tmp_path)


@pytest.mark.slow
def test_what_there_is_has_the_shape_that_is_documented(busy: Documented) -> None:
    """Every path, of an evaluator that has verdicts, alerts, an incident, routes and a promotion."""
    answers = {operation: busy.ask(*operation).status_code for operation in OPERATIONS}
    assert answers["/api/v1/decisions/pin", "post"] == 200
    promotion = "/api/v1/promotions/{contract}/{kernel}"
    kernels = {kernel.role: kernel.version for kernel in busy.core.evaluator.kernels("policy")}
    version = {"kernel": kernels["inference"]}
    start = {"order": "start", "by": "ada"}
    assert busy.ask(promotion, "post", json=start).status_code == 404, "no kernel has reported by that name"
    assert busy.ask(promotion, "post", json=start, values=version).status_code == 200
    assert busy.ask(promotion, "get", values=version).status_code == 200
    assert busy.ask(promotion, "post", json=start, values=version).status_code == 409
    (incident,) = busy.ask("/api/v1/incidents", "get").json()["incidents"]
    named = {"id": incident["id"]}
    assert busy.ask("/api/v1/incidents/{id}/diagnoses", "post", values=named).status_code == 200
    (found,) = busy.ask("/api/v1/incidents/{id}", "get", values=named).json()["diagnoses"]
    path = "/api/v1/incidents/{id}/diagnoses/{evidence}"
    assert busy.ask(path, "get", values={**named, "evidence": found["evidence"]}).json() == {"found": []}
    # Who asks has no token that may read prompts.
    assert [path for (path, _), status in answers.items() if status == 403] == ["/api/v1/worst"]
    assert {status for (_, method), status in answers.items() if method == "get"} == {200, 403, 404}


@pytest.mark.slow
@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_who_may_not_ask_hears_so(asked: Documented, path: str, method: str) -> None:
    """401 without a token, 403 with one that is not for it or from another site's page, 421 for another host."""
    public = path in PUBLIC
    assert (asked.ask(path, method, None).status_code == 401) is not public
    if method == "post":
        assert asked.ask(path, method, "reads").status_code == 403
        assert asked.ask(path, method, headers={"origin": "http://elsewhere.example"}).status_code == 403
    assert asked.ask(path, method, headers={"host": "elsewhere.example"}).status_code == 421


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted({path for path, _ in OPERATIONS}))
def test_other_methods_are_refused_with_those_that_there_are(asked: Documented, path: str) -> None:
    """405 with Allow, RFC 9110, 15.5.6."""
    there_are = set(asked.document["paths"][path])
    for method in set(METHODS) - there_are:
        answer = asked.ask(path, method)
        assert answer.status_code == 405
        allowed = {name.strip().lower() for name in answer.headers["allow"].split(",")}
        assert allowed & there_are
        assert method not in allowed
        asked.check(asked.document["paths"][path][next(iter(there_are))]["responses"], answer)


@pytest.mark.slow
@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_no_parameter_leads_to_what_is_not_documented(asked: Documented, path: str, method: str) -> None:
    """Every parameter with values that are none, one after the other."""
    for parameter in asked.document["paths"][path][method].get("parameters", []):
        for value in HOSTILE:
            if parameter["in"] == "path" and value in {"", "%ff"}:
                continue
            answer = asked.ask(path, method, values={parameter["name"]: value})
            assert answer.status_code < 500, (parameter["name"], value, answer.text)


def test_orders_that_cannot_be_written_are_refused_as_documented(asked, monkeypatch):
    """503, and the sender may try again; a fault of ours is 500 in the same words, and says no secret."""
    for error, status in ((StateError("the disk is full"), 503), (RuntimeError("the secret"), 500)):

        def raising(*_args: object, error: Exception = error, **_options: object) -> None:
            raise error

        monkeypatch.setattr(asked.core.promotions, "tell", raising)
        for name in ("acknowledge", "diagnose", "silence", "unsilence", "pin", "lift"):
            monkeypatch.setattr(people_orders, name, raising)
        for path in GOOD:
            answer = asked.ask(path, "post")
            assert answer.status_code == status, answer.text
            assert "secret" not in answer.text


def test_a_late_evaluation_is_not_ready(asked: Documented, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asked.core, "evaluated_at", time.time())
    assert asked.ask("/readyz", "get").status_code == 200
    monkeypatch.setattr(asked.core, "evaluated_at", time.time() - 3 * 3600)
    answer = asked.ask("/readyz", "get")
    assert (answer.status_code, answer.text) == (503, "no evaluation for 3 h\n")
    monkeypatch.setattr(asked.core, "evaluated_at", None)
    answer = asked.ask("/readyz", "get")
    assert (answer.status_code, answer.text) == (503, "no evaluation yet\n")
