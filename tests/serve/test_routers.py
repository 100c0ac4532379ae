"""Real routers against the evaluator: what one of them has not taken is neither contained nor called routed."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest

from kc_otel.cli.status_command import _routes
from kc_otel.client.router import Router
from kc_otel.contract.load import load_text
from kc_otel.judge.incidents.incident import Incident, IncidentState
from kc_otel.serve import core as core_module
from kc_otel.serve import people_orders
from kc_otel.serve.api import routes_decisions
from kc_otel.serve.people_orders import lift, pin
from tests.tools.api import client_of
from tests.tools.fleet import SLICED, STEP, Fleet
from tests.tools.servers import Answer, answering
from tests.tools.waiting import eventually

pytestmark = pytest.mark.slow

TEXT = SLICED.replace("DO", "do: [{route: train-kernel}, {webhook: pager}]")
VERSION = "b" * 12
CODE = {"task": "code"}


class Service:
    """A serving process: a router, with a link to the evaluator that can be cut."""

    def __init__(self, evaluator: Evaluator, text: str = TEXT) -> None:
        self.joined = threading.Event()
        self.joined.set()
        self.answered = 0
        self._evaluator = evaluator
        self._link = ExitStack()
        url = self._link.enter_context(answering(self._ask))
        self.router = Router(url, contracts=[load_text(text)], refresh=0.01, keep=False)
        assert self.router.wait_for_table(60.0)

    def _ask(self, path: str, _headers: Mapping[str, str], _body: bytes) -> Answer:
        """What the evaluator answers; while the link is cut, nothing."""
        if not self.joined.is_set():
            self.joined.wait()
            raise ConnectionError
        asked = [pair for pair in parse_qsl(urlsplit(path).query) if pair[0] != "wait"]
        with self._evaluator.turn:
            answer = self._evaluator.client.get("/api/v1/decisions", params=asked)
        self.answered += "closing=true" not in path
        return answer.status_code, {name: answer.headers.get(name, "") for name in ("etag", "age")}, answer.content

    def serve(self) -> str:
        return self.router.choose("policy", CODE, VERSION)

    def polls(self) -> None:
        """Wait until the router has told what it does now."""
        if self.joined.is_set():
            goal = self.answered + 3
            eventually(lambda: self.answered >= goal, 60.0, 0.002)

    def end(self) -> None:
        self.joined.set()
        self.router.close()
        self._link.close()


class Evaluator(Fleet):
    """An evaluator, a recorder of slice code that reports to it, and the services that ask it."""

    def __init__(self, path: Path) -> None:
        self.turn, self.services = threading.Lock(), list[Service]()
        super().__init__(path, text=TEXT)

    def begin(self) -> None:
        """Start it; its state file has what the one before knew."""
        super().begin()
        self.client = client_of(self.core).__enter__()

    def close(self) -> None:
        self.client.__exit__(None, None, None)
        super().close()

    def restart(self, text: str = TEXT) -> None:
        with self.turn:
            self.contract = load_text(text, "policy.yaml")
            super().restart()

    def service(self, text: str = TEXT) -> Service:
        """A process that serves the kernel from now on."""
        made = Service(self, text)
        self.services.append(made)
        assert made.serve() == "inference-kernel"
        made.polls()
        return made

    def measure(self, seconds: float, drift: float | None) -> None:
        """The recorder reports observations of about this drift, or for None that it has observed nothing."""
        for _ in range(round(seconds / STEP)):
            with self.turn:
                self.run(STEP, broken={"code": drift})
            for service in self.services:
                service.polls()
                service.serve()
                service.polls()

    @property
    def incident(self) -> Incident:
        (found,) = (incident for incident in self.core.incidents() if incident.on == "fail")
        return found


@pytest.fixture
def evaluator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Evaluator]:
    made = Evaluator(tmp_path / "state.sqlite")
    clock = SimpleNamespace(time=lambda: made.now, perf_counter=time.perf_counter)
    monkeypatch.setattr(routes_decisions, "time", clock)
    monkeypatch.setattr(core_module, "time", clock)
    made.measure(60, 0.001)
    yield made
    for service in made.services:
        service.end()
    made.close()


def test_a_router_that_is_cut_off_is_named_and_nothing_is_contained_until_it_returns(evaluator):
    """It serves on by its old table, whatever another router takes, also after a restart of the evaluator."""
    taking, cut_off = evaluator.service(), evaluator.service()
    evaluator.measure(10, 0.001)
    cut_off.joined.clear()
    evaluator.measure(30, 0.4)
    evaluator.measure(200, None)
    assert (taking.serve(), cut_off.serve()) == ("train-kernel", "inference-kernel")
    name = cut_off.router._instance
    said = f"but 1 of 2 routers has not polled: {name} since 2027-01-15 08:01 UTC; it may still serve this kernel"
    assert (evaluator.incident.state, evaluator.incident.state_text.endswith(said)) == (IncidentState.BROKEN, True)
    assert {verdict.cell.slice for verdict, _ in evaluator.core.history.cells()} >= {"code"}
    evaluator.restart()
    evaluator.measure(200, None)
    assert evaluator.incident.state is IncidentState.BROKEN
    assert evaluator.incident.state_text.endswith(said)
    cut_off.joined.set()
    evaluator.measure(60, None)
    assert cut_off.serve() == "train-kernel"
    assert evaluator.incident.state_text == "Contained"
    cut_off.joined.clear()
    evaluator.measure(300, None)
    assert evaluator.incident.state_text == "Contained", "it keeps the table that it has"


def test_a_router_that_was_closed_holds_nothing_up(evaluator):
    evaluator.service()
    closed = evaluator.services.pop(evaluator.services.index(evaluator.service()))
    assert len(evaluator.core.listeners.routers["policy"]) == 2
    closed.end()
    assert len(evaluator.core.listeners.routers["policy"]) == 1
    evaluator.measure(30, 0.4)
    evaluator.measure(100, None)
    assert evaluator.incident.state_text == "Contained"
    evaluator.measure(300, None)
    metrics = evaluator.client.get("/metrics").text.splitlines()
    (silent,) = [line for line in metrics if line.startswith("kc_verdict_no_traffic{")]
    assert ('kc_slice="code"' in silent, silent.endswith(" 1.0")) == (True, True), "no rule takes it for missing data"


def test_a_roll_back_that_a_router_has_not_taken_closes_nothing(evaluator):
    """What went away without proof is closed once nobody serves the version."""
    evaluator.service()
    cut_off = evaluator.service()
    evaluator.measure(30, 0.4)
    cut_off.joined.clear()
    with evaluator.turn:
        evaluator.core.promotions.tell("policy", VERSION, "rollback", "ada", "broken", evaluator.now, start=True)
        people_orders.lift(evaluator.core, "route", "policy", None, "ada", "rolled back", evaluator.now)
    evaluator.measure(600, None)
    assert not evaluator.incident.gone
    cut_off.joined.set()
    evaluator.measure(30, None)
    assert [incident for incident in evaluator.core.incidents() if not incident.gone and incident.on == "fail"] == []


@pytest.mark.parametrize(
    ("slice", "said"),
    [
        ("prose: {where: {task: prose}}", ""),
        (
            "code: {where: {task: code}}",
            "but 1 of 1 router defines the slice otherwise than this contract, or not at all",
        ),
    ],
)
def test_a_router_applies_a_route_by_the_contracts_definition_of_its_slice(evaluator, slice, said):
    """Other requests may be in one that it defines otherwise; its other slices may differ."""
    evaluator.service(TEXT.replace(slice, slice.replace("task: ", "task: [sql, ").replace("}}", "]}}")))
    evaluator.measure(30, 0.4)
    evaluator.measure(100, None)
    (name,) = evaluator.core.listeners.routers["policy"]
    assert evaluator.incident.state_text.endswith(f"{said}: {name}" if said else "Contained")


GONE = "it has no effect: the contract no longer has this slice"
REDEFINED = "the slice was redefined since: what broke may be outside of it now"


@pytest.mark.parametrize(
    ("now", "why"), [("coding: {where: {task: code}}", GONE), ("code: {where: {task: sql}}", REDEFINED)]
)
def test_a_route_of_a_slice_that_the_contract_has_changed_is_said_to_hold_no_more(evaluator, now, why):
    """In the incident, in the list of what is in force, by the decision table and by status, until it is as it was."""
    service = evaluator.service()
    evaluator.measure(30, 0.4)
    evaluator.measure(100, None)
    assert evaluator.incident.state_text == "Contained"
    changed = TEXT.replace("code: {where: {task: code}}", now)
    evaluator.restart(changed)
    evaluator.measure(20, None)
    assert service.serve() == "train-kernel", "only a person lifts a route"
    evaluator.services.pop().end()
    assert evaluator.service(changed).serve() == "inference-kernel"
    evaluator.measure(100, None)
    assert evaluator.incident.state is IncidentState.BROKEN
    assert evaluator.incident.state_text.endswith(f"but {why}")
    client = evaluator.client
    overview = client.get("/api/v1/overview").json()
    (route,) = (action for action in overview["incidents"][0]["actions"] if action["kind"] == "route")
    assert (route["text"].endswith(f"but {why}"), route["in_force"]) == (True, False)
    told: list[dict[str, Any]] = [entry for entry in overview["in_force"] if entry["kind"] == "route"]
    assert all(entry["text"].endswith(f"but {why}") for entry in told)
    routes = client.get("/api/v1/decisions").json()["routes"]
    assert [route["outdated"] for route in routes] == [why]
    assert f"but of code: {why}; end it with kc-otel route resume policy --slice code" in _routes(routes)[0].plain
    evaluator.restart()
    evaluator.measure(20, None)
    assert [route.outdated for route in evaluator.core.decisions.routes] == [""]


LONG = TEXT.replace("prose: {where: {task: prose}}", "long: {where: {size: long}}")


@pytest.mark.parametrize(
    ("text", "slice", "shared"), [(LONG, "long", {"task": "code", "size": "long"}), (TEXT, "prose", None)]
)
def test_a_pin_of_a_slice_that_shares_requests_keeps_a_breach_from_being_contained(evaluator, text, slice, shared):
    """The router serves what is in both by the newest pin, whether or not any of that is measured."""
    evaluator.restart(text)
    service = evaluator.service(text)
    evaluator.measure(30, 0.4)
    with evaluator.turn:
        pin(evaluator.core, "policy", slice, "inference-kernel", None, "ada", "it is fine", evaluator.now)
    evaluator.measure(100, None)
    assert service.serve() == "train-kernel"
    if shared is None:
        assert evaluator.incident.state_text == "Contained"
        return
    assert service.router.choose("policy", shared, VERSION) == "inference-kernel"
    said = f"but the pin of {slice} to the inference kernel by ada overrides it in part"
    assert (evaluator.incident.state, evaluator.incident.state_text.endswith(said)) == (IncidentState.BROKEN, True)
    with evaluator.turn:
        lift(evaluator.core, "pin", "policy", slice, "ada", "it is not", evaluator.now)
    evaluator.measure(100, None)
    assert evaluator.incident.state_text == "Contained"


def test_a_pin_of_a_slice_that_was_redefined_contains_nothing(evaluator):
    """As a route: in the incident, in the list of what is in force, and in the decision table."""
    unrouted = TEXT.replace("{route: train-kernel}, ", "")
    evaluator.restart(unrouted)
    evaluator.service(unrouted)
    evaluator.measure(30, 0.4)
    with evaluator.turn:
        pin(evaluator.core, "policy", "code", "train-kernel", None, "ada", "it is broken", evaluator.now)
    evaluator.measure(100, None)
    assert evaluator.incident.state_text == "Contained"
    narrower = unrouted.replace("{task: code}", "{task: code, lang: py}")
    evaluator.restart(narrower)
    evaluator.services.pop().end()
    evaluator.service(narrower)
    evaluator.measure(100, None)
    assert evaluator.incident.state_text.endswith(f"but {REDEFINED}")
    overview = evaluator.client.get("/api/v1/overview").json()
    assert [entry["text"].endswith(f"; but {REDEFINED}") for entry in overview["in_force"]] == [True]
    decisions = evaluator.client.get("/api/v1/decisions").json()
    assert [pin["outdated"] for pin in decisions["pins"]] == [REDEFINED]
