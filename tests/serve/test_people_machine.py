"""Any history of verdicts, any clock, a crash anywhere, people in between: what the evaluator promises all the same."""

import json
import math
import shutil
import tempfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kc_otel.client.router import Router
from kc_otel.contract.load import load_text
from kc_otel.judge.escalation.alerts import fingerprint, step_keys
from kc_otel.judge.escalation.escalate import EscalationState
from kc_otel.judge.plain_json import to_json
from kc_otel.judge.verdict import Cell, Evaluation, Status, Verdict
from kc_otel.serve import people_orders as people
from kc_otel.serve.core import Core
from kc_otel.serve.store.state_file import open_state
from tests.serve.conftest import CLAUSES

ESCALATION = """\
escalation:
  - {on: fail, severity: warning, repeat: 90s, do: [{webhook: chat}, sample-more]}
  - {on: fail, for: 20s, clear_for: 40s, severity: critical, do: [{route: train-kernel}, {webhook: pager}, halt]}
  - {on: no-data, for: 10s, do: [{webhook: chat}, hold-promotion]}
"""
WINDOW = 60.0
WAITS = {("fail", "warning"): (0.0, 0.0), ("fail", "critical"): (20.0, 40.0), ("no-data", "warning"): (10.0, 0.0)}
PAIRS = {"new": ("aaaaaaaaaaaa", "bbbbbbbbbbbb"), "swapped": ("bbbbbbbbbbbb", "aaaaaaaaaaaa")}
STATUS = st.sampled_from([Status.PASS, Status.FAIL, Status.FAIL, Status.INCONCLUSIVE, Status.NO_DATA])
PLACES = [(slice, pair) for slice in ("all", "code") for pair in PAIRS]
SLICES = st.sampled_from(["all", "code"])


class Killed(BaseException):
    """The process is gone."""


def as_written(escalation: EscalationState) -> EscalationState:
    """Without the times of numbers that are the same: an incident is written when more of it changes."""
    incidents = {
        name: tuple(replace(known, cells=tuple(replace(cell, at=None) for cell in known.cells)) for known in found)
        for name, found in escalation.incidents.items()
    }
    groups = {name: tuple(map(to_json, found)) for name, found in escalation.groups.items()}  # NaN is not NaN
    return replace(escalation, incidents=incidents, groups=groups)


class Evaluations(RuleBasedStateMachine):
    """An evaluator on a real state file; every restart opens what a killed process would have left."""

    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="kc-otel-"))
        self.contract = load_text(CLAUSES + ESCALATION)
        self.now = 1_000_000.0
        self.counted = 0.0
        self.committed = self.now
        self.starts = 0
        self.seen_event = 0
        self.edges = {}
        self.owed = set()
        self.held_back = set()
        self.heard = {}
        self.tables = {}
        self.routed = {}
        self.pinned = {}
        self.asked = set()
        self.verdicts = []
        self.core = None

    @initialize()
    def begin(self):
        self._open(self.folder / "0" / "state.sqlite")

    def _open(self, path):
        self.path = path
        self.connection = open_state(path)
        self.connection.execute("PRAGMA synchronous=OFF")  # a killed process loses nothing by it, and it is quick
        self.core = Core([self.contract], self.connection, external_url="", now=self.now)
        self.core.evaluator.evaluate = lambda now, *_: {"policy": Evaluation(now, tuple(self.verdicts))}

    def _files(self):
        """A copy of the state file and its log as they are at this instant, in the middle of whatever."""
        self.starts += 1
        copy = self.folder / str(self.starts)
        copy.mkdir()
        for file in self.path.parent.iterdir():
            shutil.copy(file, copy)
        return copy / self.path.name

    def _tick(self):
        self.held_back = self._held_back()
        self.core.tick(self.now)
        self.counted += min(max(0.0, self.now - self.committed), WINDOW)
        self.committed = self.now
        self._directives_last()
        self._read_events()

    def _read_events(self):
        """The log says what fired and resolved; here it becomes what must be true from now on."""
        for event in self.core.events.newest(limit=10_000):
            if event.id <= self.seen_event:
                continue
            self.seen_event = event.id
            if event.kind in {"firing", "resolved"}:
                self._edge(event.kind, event.data)

    def _edge(self, kind, data):
        before, at = self.edges.get(data["fingerprint"], ("resolved", -math.inf))
        wait, clear = WAITS[data["on"], data["severity"]]
        again = "broken again" in data["message"]
        assert kind != before or (kind == "firing" and again), "firings and resolves alternate"
        assert again or self.counted - at >= (clear if kind == "resolved" else wait) - 1e-6, "it flaps"
        self.edges[data["fingerprint"]] = (kind, self.counted)
        targets = [action["webhook"] for action in data["actions"] if "webhook" in action and action != "halt"]
        unsaid = {end for end in self.held_back if end[1] == data["fingerprint"]}  # it fires, as far as they know
        if kind == "firing":
            self.owed -= unsaid
        for target in targets:
            key = (target, data["fingerprint"], data["started_at"])
            if kind == "firing" and "silenced" not in data and target not in {end[0] for end in unsaid}:
                self.owed.add((*key, "firing"))
            if kind == "resolved" and (*key, "firing") in self.owed | self._messages():
                self.owed.add((*key, "resolved"))
        if kind == "firing" and {"route": "train-kernel"} in data["actions"]:
            self._route(data)

    def _route(self, data):
        avoid, train = data["kernel_inference"], data["kernel_train"]
        if avoid not in self.routed.values():
            self.routed.setdefault((data["slice"], avoid), train)

    def _messages(self):
        """(endpoint, fingerprint, started_at, what) of every alert of every message that was ever enqueued."""
        found = set()
        for message in self.core.outbox.messages(limit=100_000):
            cells = json.loads(message.body)["alerts"]
            for alert in cells:
                found.add((message.endpoint, alert["fingerprint"], _unix(alert["startsAt"]), alert["status"]))
        return found

    def _held_back(self):
        """Ends that nobody is told of yet: the incident lasts, or nothing has refuted it. As `_messages` has them."""
        incidents = {incident.id: incident for incident in self.core.incidents("policy")}
        found = set()
        for group in self.core.escalation.groups.get("policy", ()):
            for told in group.alerts:
                if told.known and not told.alert.fires:
                    edge, incident = told.alert, incidents[group.incident]
                    assert incident.broken or incident.unproven(edge.cell.clause, edge.cell.slice)
                    found.add((group.endpoint, edge.fingerprint, edge.started_at, "resolved"))
        return found

    @rule(status=STATUS, seconds=st.sampled_from([5, 10, 20, -40, -10]), times=st.integers(1, 5))
    def everything_is_alike(self, status, seconds, times):
        self.evaluate_all(dict.fromkeys(PLACES, status), set(), seconds, times)

    @rule(seconds=st.sampled_from([5, 10, 20, -40]), times=st.integers(1, 3))
    def everything_fails(self, seconds, times):
        self.evaluate_all(dict.fromkeys(PLACES, Status.FAIL), set(), seconds, times)

    @rule(seconds=st.sampled_from([5, 10, 20, -40]), times=st.integers(1, 4))
    def everything_passes(self, seconds, times):
        self.evaluate_all(dict.fromkeys(PLACES, Status.PASS), set(), seconds, times)

    @rule(
        statuses=st.fixed_dictionaries(dict.fromkeys(PLACES, STATUS)),
        gone=st.sets(st.sampled_from(PLACES)),
        seconds=st.sampled_from([1, 1, 5, 10, 20, 30, 50, 100, -40, -5000, 5000]),
        times=st.integers(1, 6),
    )
    def everything_differs(self, statuses, gone, seconds, times):
        self.evaluate_all(statuses, gone, seconds, times)

    def evaluate_all(self, statuses, gone, seconds, times):
        self.verdicts = [_verdict(place, statuses[place], self.now) for place in PLACES if place not in gone]
        for _ in range(times):
            self.now += seconds
            self._tick()

    @rule(seconds=st.sampled_from([1, 10, 30, -5000]), where=st.sampled_from(["event", "webhook", "evaluator"]))
    def is_killed_in_an_evaluation(self, seconds, where):
        self.now += seconds
        owner, name = {
            "event": (self.core.events, "record"),
            "webhook": (self.core.outbox, "enqueue"),
            "evaluator": (self.core._evaluator_store, "save"),
        }[where]
        real, left = getattr(owner, name), []

        def kill(*arguments, **more):
            if where != "evaluator":
                real(*arguments, **more)
            left.append(self._files())
            raise Killed

        setattr(owner, name, kill)
        standing, self.held_back = self.core.escalation, self._held_back()
        with suppress(Killed):
            self.core.tick(self.now)
            self.counted += min(max(0.0, self.now - self.committed), WINDOW)
            self.committed = self.now
            left.append(self._files())
        self.connection.close()
        before, after = standing, self.core.escalation
        self._open(left[0])
        assert as_written(self.core.escalation) in map(as_written, (before, after)), "a part of an evaluation was kept"
        self._read_events()

    @rule()
    def is_killed_between_evaluations(self):
        copy, standing = self._files(), self.core.escalation
        self.connection.close()
        self._open(copy)
        assert as_written(self.core.escalation) == as_written(standing), "a restart forgets"

    @rule(marked=st.booleans())
    def a_message_is_delivered(self, marked):
        """With `marked` false the process is killed before it can write down that it was."""
        for message in self.core.outbox.due(self.now):
            self.core.outbox.begin(message.id)
            assert self.heard.setdefault(message.id, message.body) == message.body
            if marked:
                self.core.outbox.answered(message.id, 0.0, 204)

    @rule(
        action=st.sampled_from(["pin", "unpin", "silence", "silence", "acknowledge", "resume"]),
        slice=SLICES,
        kernel=st.sampled_from(["train-kernel", "inference-kernel"]),
        seconds=st.sampled_from([10, 100, 400]),
    )
    def a_person_decides(self, action, slice, kernel, seconds):
        with suppress(LookupError):  # there is nothing of the kind to end or to take on
            if action == "pin":
                people.pin(self.core, "policy", slice, kernel, None, "ada", "she knows", self.now)
                self.pinned[slice] = kernel
            elif action == "unpin":
                people.lift(self.core, "pin", "policy", slice, "ada", "done", self.now)
                del self.pinned[slice]
            elif action == "silence":
                people.silence(self.core, "policy", None, None, self.now + seconds, "ada", "planned", self.now)
            elif action == "acknowledge":
                people.acknowledge(self.core, "policy", None, slice, "ada", "looking", self.now)
            else:
                people.lift(self.core, "route", "policy", slice, "ada", "mended", self.now)
                self.routed = {key: train for key, train in self.routed.items() if key[0] != slice}

    @invariant()
    def every_action_is_in_the_outbox_or_the_table(self):
        missing = self.owed - self._messages() - self._held_back()
        assert not missing, f"never to be told: {missing}"
        routes = {(route.slice, route.avoid): route.train for route in self.core.decisions.routes}
        assert routes == self.routed
        self._directives_last()

    def _directives_last(self):
        """As long as their alerts; what keeps training from a breach, while that is unproven, too."""
        asked = {(directive.fingerprint, directive.kind.value) for directive in self.core.decisions.directives}
        bare = {"sample-more", "halt", "hold-promotion"}
        fired = {
            (alert.fingerprint, action.kind)
            for alert in self.core.policies["policy"].firing
            for action in alert.actions
            if action.kind in bare
        }
        incidents = [incident for incident in self.core.incidents("policy") if incident.state != "contained"]
        unproven = {
            (fingerprint(step, Cell("policy", cell.clause, cell.slice, *incident.key[1:])), "halt")
            for incident in incidents
            for cell in incident.cells
            if incident.unproven(cell.clause, cell.slice)
            for step in step_keys(self.contract)
        }
        assert asked == fired | (self.asked & unproven)
        self.asked = asked

    @invariant()
    def the_last_healthy_kernel_is_never_routed_away(self):
        routes = self.core.decisions.routes
        assert not {route.avoid for route in routes} & {route.train for route in routes}

    @invariant()
    def a_pin_always_wins(self):
        router = Router.from_table(self.core.decisions, contracts=[self.contract])
        pins = sorted(self.core.decisions.pins, key=lambda pin: pin.at)
        assert {pin.slice: pin.kernel for pin in pins} == self.pinned, "only a person ends what a person pinned"
        for pin in pins:
            newest = [other for other in pins if other.slice in {"all", pin.slice} and other.at >= pin.at]
            if len({other.kernel for other in newest}) == 1:
                assert router.choose("policy", [pin.slice], "bbbbbbbbbbbb") == pin.kernel
                assert router.choose("policy", [pin.slice], "aaaaaaaaaaaa") == pin.kernel

    @invariant()
    def the_tables_version_never_goes_back(self):
        table = self.core.decisions
        assert table.version >= max(self.tables, default=0)
        assert self.tables.setdefault(table.version, table) == table, "two tables have one version"

    def teardown(self):
        if self.core is None:
            return
        try:
            self._everything_is_told_in_the_end()
        finally:
            self.connection.close()
            shutil.rmtree(self.folder)

    def _everything_is_told_in_the_end(self):
        ends = [silence.until for silence in self.core.people.silences]
        self.now = max([self.now, *ends]) + 1
        self._tick()
        firing = self.core.policies["policy"].firing
        self.every_action_is_in_the_outbox_or_the_table()
        for alert in firing:
            for action in alert.actions:
                if action.kind == "webhook":
                    groups = self.core.escalation.groups["policy"]
                    alerts = [told for group in groups if group.endpoint == action.target for told in group.alerts]
                    known = {told.alert.fingerprint for told in alerts if told.known}
                    told = (action.target, alert.fingerprint, alert.started_at, "firing") in self._messages()
                    assert told or alert.fingerprint in known
        self.now += 1e6
        while due := self.core.outbox.due(self.now):
            for message in due:
                assert self.heard.setdefault(message.id, message.body) == message.body
                self.core.outbox.answered(message.id, 0.0, 204)
        told = [message for message in self.core.outbox.messages(limit=100_000) if message.state != "superseded"]
        assert set(self.heard) == {message.id for message in told}, "an end is heard where its beginning was"


def _verdict(place, status, now):
    slice, pair = place
    empty = status is Status.NO_DATA
    return Verdict(
        cell=Cell("policy", "token-tv", slice, *PAIRS[pair]), status=status, at=now, limit=0.02,
        estimate=0.0 if empty else 0.05, lower=0.0 if empty else 0.04, upper=0.0 if empty else 0.06,
        samples=0 if empty else 4096, window="" if empty else "short", method="", reason=f"{status} for the test",
        contract_version=1, contract_hash="0" * 64, about="population", evidence=0.5,
    )  # fmt: skip


def _unix(text):
    from datetime import datetime

    return datetime.fromisoformat(text).timestamp()


TestEvaluations = pytest.mark.slow(Evaluations.TestCase)
TestEvaluations.settings = settings(
    max_examples=80, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
