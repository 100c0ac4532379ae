"""Random ordinary stories of a fleet, told to the real parts: no surface says what was not known, or another thing.

The machine knows what is true, because it planted it: which kernel versions drift on which requests, which processes
died, which were drained or shut down, and what each router chose. After each evaluation it compares that with what is
said, and after each step of a story all surfaces with each other.
"""

import io
import json
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import replace
from typing import Any

import pytest
import typer
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kc_otel.cli import people_commands, status_command
from kc_otel.cli.doctor_command import of_evaluator
from kc_otel.client.router import Router
from kc_otel.contract.words import RUN_ENDED
from kc_otel.judge.decisions import kept_since
from kc_otel.judge.escalation.escalate import AT_ONCE, GroupTiming
from kc_otel.judge.incidents.incident import OF_RECORDERS, Incident, IncidentState
from kc_otel.judge.promotion.stages import OrderError, PromotionStatus, Stage
from kc_otel.judge.verdict import Cell, Status, Verdict
from kc_otel.serve import people_orders as people
from kc_otel.serve.self_metrics import read
from kc_otel.serve.webhooks.endpoints import pagerduty_event, slack_message
from tests.tools.town import BAD, HEARTBEAT, LONG_WINDOW, NEW_TRAIN, STEP, TASKS, TRAIN, WINDOW, Gateway, Pod, Town

OLD, NEW, NEWER, TRAINER = "b" * 12, "c" * 12, "d" * 12, "e" * 12
WHO = st.integers(0, 5)
FATES = ["goes on", "is killed", "shuts down", "is restarted", "is replaced", "is cut off", "is mended", "is joined"]
FATE = st.sampled_from([*FATES, "is invalid", "is joined by another training kernel"])
SLICE = st.sampled_from(["all", "code", "prose"])
ORDER = st.sampled_from(["rollback", "rollback", "hold", "resume", "start", "approve", "approve", "force"])
BY, WHY = "ada", "as the story has it"


def mean_of(entries: list[tuple[float, int, int]]) -> float:
    many = sum(tokens for _, tokens, _ in entries)
    return BAD * sum(bad for *_, bad in entries) / many if many else 0.0


def _cell_of(incident: Incident, labels: dict[str, str]) -> Cell:
    return Cell(incident.contract, labels["clause"], labels["slice"], *incident.pair)


class Stories(RuleBasedStateMachine):
    """A fleet, the evaluator that watches it, and the people who look after both."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setenv("COLUMNS", "4000")
        self.town: Town | None = None
        self.refuted: dict[tuple[str, str, str], bool] = {}
        self.ids: dict[str, set[str]] = {"known": set()}
        self.drifted: set[str] = set()
        self.failed: set[str] = set()
        """Versions that ever drifted, or whose input ever failed the checks, as planted."""
        self.to_blame: set[str] = set()
        """Those that drifted against the training kernel that was there first."""
        self.chosen, self.lasting = dict[str, float](), dict[str, float]()
        """When routers chose a version last, and since when an incident lasts."""
        self.approved: set[str] = set()
        self.read_messages, self.read_events, self.tested = 0, 0, False

    @initialize(at_once=st.booleans())
    def a_fleet_of_two_pods_a_trainer_and_a_router_is_healthy(self, at_once: bool) -> None:
        self.town = town = Town(self.patch, AT_ONCE if at_once else GroupTiming(30.0, 120.0))
        town.chosen, town.judge = self.a_router_chose, self.judge
        town.open()
        town.new_pod(OLD)
        town.new_pod(OLD)
        town.new_pod(TRAINER, "loop")
        town.new_pod(TRAINER, "loop")
        town.step()
        town.new_gateway(OLD)
        self.seconds_pass(5)

    # The story

    @rule(steps=st.sampled_from([1, 2, 4, 8, 30]))
    def seconds_pass(self, steps: int) -> None:
        for _ in range(steps):
            self.town.step()
        self.the_surfaces_agree()

    @rule(
        which=st.sampled_from(["stable", "stable", "candidate", "candidate", "trainer"]),
        tasks=st.sampled_from([*zip(TASKS, strict=True), TASKS, TASKS]),
        share=st.sampled_from([1.0, 1.0, 0.06]),
        steps=st.sampled_from([1, 3]),
    )
    def a_kernel_version_drifts(self, which: str, tasks: Any = TASKS, share: float = 1.0, steps: int = 3) -> None:
        if version := TRAINER if which == "trainer" else getattr(self.town, which):
            self.drifted.add(version)
            self.to_blame.add(version)
            self.town.bad |= {(version, task): share for task in tasks}
            self.seconds_pass(steps)

    @rule()
    def all_drift_is_mended_in_place(self) -> None:
        self.town.bad.clear()
        for pod in self.town.pods:
            pod.broken = False
        self.seconds_pass(1)

    def _pod(self, who: int) -> Pod | None:
        alive = self.town.alive()
        return alive[who % len(alive)] if alive else None

    @rule(who=WHO, then=FATE)
    def something_befalls_a_pod(self, who: int, then: str) -> None:
        if pod := self._pod(who):
            self._befalls(pod, then)
            self.seconds_pass(1)

    def _befalls(self, pod: Pod, then: str) -> None:
        match then:
            case "is killed" | "is restarted":
                pod.alive = False
            case "shuts down" | "is replaced":
                self.town.shut_down(pod)
            case "is cut off":
                pod.heard = not pod.heard
            case "is mended":
                pod.broken = False
            case "is invalid":
                self.failed.add(pod.version)
                pod.invalid = not pod.invalid
            case "is joined by another training kernel" if pod.contract == "policy" and len(self.town.pods) < 12:
                self.town.new_pod(pod.version, train=NEW_TRAIN).broken = True
                self.drifted.add(pod.version)
        if then in {"is restarted", "is replaced"} or (then == "is joined" and len(self.town.alive()) < 6):
            self.town.new_pod(pod.version, pod.contract, pod.train)

    @rule(who=WHO, then=FATE, later=st.sampled_from([2, 8, 30]))
    def a_pod_breaks_by_itself(self, who: int, then: str, later: int) -> None:
        if pod := self._pod(who):
            pod.broken = True
            self.drifted.add(pod.version)
            self.to_blame.add(pod.version)
            self.seconds_pass(3)
            self._befalls(pod, then)
            self.seconds_pass(later)

    @rule(trusts=st.booleans())
    def a_router_starts(self, trusts: bool) -> None:
        if len(self.town.gateways) < 3:
            self.town.new_gateway(*[self.town.stable] * trusts)
            self.seconds_pass(1)

    @rule(who=WHO, how=st.sampled_from(["is cut off", "is idle", "closes"]), steps=st.sampled_from([2, 12]))
    def something_befalls_a_router(self, who: int, how: str, steps: int = 2) -> None:
        if self.town.gateways:
            gateway = self.town.gateways[who % len(self.town.gateways)]
            match how:
                case "is cut off":
                    gateway.line.up = not gateway.line.up
                case "is idle":
                    gateway.idle = not gateway.idle
                case "closes":
                    self.town.gateways.remove(gateway)
                    gateway.router.close()
            self.seconds_pass(steps)

    @rule(what=st.sampled_from(["pager", "chat", "around", "collectors"]))
    def something_begins_or_ceases(self, what: str) -> None:
        """An endpoint is down, requests go around the routers, or exports by way of two Collectors by turns."""
        if what in {"pager", "chat"}:
            self.town.down ^= {what}
        else:
            setattr(self.town, what, not getattr(self.town, what))
        self.seconds_pass(2)

    @precondition(lambda self: self.town and not self.town.candidate and self.town.core)
    @rule(drifts=st.booleans())
    def a_roll_out_of_another_version_begins(self, drifts: bool) -> None:
        town = self.town
        town.candidate = NEWER if town.stable == NEW else NEW
        if drifts:
            self.a_kernel_version_drifts("candidate", TASKS[:1], steps=0)
        town.mirrored = True
        town.new_pod(town.candidate)
        self.seconds_pass(1)
        self.an_order_is_given("start", steps=2)

    @precondition(lambda self: self.town and self.town.candidate)
    @rule(order=ORDER, stage=st.sampled_from([Stage.CANARY, Stage.FULL]), steps=st.sampled_from([2, 12]))
    def an_order_is_given(self, order: str, stage: Stage = Stage.FULL, steps: int = 12) -> None:
        if self.town.core is not None and order == "approve" and stage is Stage.FULL:
            self.approved.add(self.town.candidate)
        if self.town.core is not None:
            more = {"stage": stage} if order in {"approve", "force"} else {}
            with suppress(OrderError, LookupError):
                self.town.core.promotions.tell("policy", self.town.candidate, order, BY, WHY, self.town.now, **more)
        self.seconds_pass(steps)

    @precondition(lambda self: self.town and self.town.candidate)
    @rule(how=st.sampled_from(["in order", "killed", "left"]))
    def the_roll_out_is_done_with(self, how: str) -> None:
        """The version takes the place of the one before where it is full; otherwise it is taken away."""
        town = self.town
        full = town.core is not None and town.candidate in {of.version for of in town.core.decisions.promoted}
        gone, town.candidate, town.mirrored = town.stable if full else town.candidate, "", False
        if full:
            town.stable = NEWER if gone == NEW else NEW
        for pod in town.alive(gone, "policy") if how != "left" else []:
            town.shut_down(pod) if how == "in order" else setattr(pod, "alive", False)
        self.seconds_pass(2)

    @precondition(lambda self: self.town and self.town.core)
    @rule(
        what=st.sampled_from(["pin", "unpin", "silence", "acknowledge", "close", "resume", "resume"]),
        slice=SLICE,
        kernel=st.sampled_from(["train-kernel", "inference-kernel"]),
        seconds=st.sampled_from([None, 60.0, 300.0]),
    )
    def a_person_decides(self, what: str, slice: str, kernel: str, seconds: float | None) -> None:
        core, now = self.town.core, self.town.now
        until = None if seconds is None else now + seconds
        with suppress(LookupError):
            match what:
                case "pin":
                    people.pin(core, "policy", slice, kernel, until, BY, WHY, now)
                case "silence":
                    people.silence(core, "policy", None, None if seconds is None else slice, now + 200.0, BY, WHY, now)
                case "acknowledge":
                    people.acknowledge(core, "policy", None, None, BY, WHY, now)
                case "close":
                    people.close(core, "policy", None, None, BY, WHY, now)
                case _:
                    people.lift(core, "pin" if what == "unpin" else "route", "policy", None, BY, WHY, now)
        self.seconds_pass(1)

    @rule(steps=st.sampled_from([0, 1, 3, 10, 30]), many=st.integers(0, 4), then=FATE)
    def the_evaluator_is_killed_and_started_again(self, steps: int, many: int = 0, then: str = "goes on") -> None:
        if self.town.core is not None:
            before = self._fires()
            self.town.kill()
            for pod in self.town.alive()[:many]:
                self._befalls(pod, then)
            self.seconds_pass(steps)
            self._open()
            self.judge()
            assert steps * STEP <= HEARTBEAT or before <= self._fires(), "an outage has ended alerts"
            self.seconds_pass(1)

    def _fires(self) -> set[str]:
        """Fingerprints of alerts that clear only with time."""
        return {of.fingerprint for of in self.town.core.firing("policy") if of.step.startswith("fail/critical")}

    def _open(self) -> None:
        before = dict(self.ids)
        self.town.open()
        self.ids = before

    @rule(change=st.sampled_from(["limit", "limit", "wide", "code"]), pods_too=st.booleans(), routers_too=st.booleans())
    def the_contract_is_changed(self, change: str, pods_too: bool, routers_too: bool) -> None:
        town = self.town
        before = town.terms["policy"]
        after = {
            "limit": replace(before, limit={0.02: 0.7, 0.7: 0.01, 0.01: 0.02}[before.limit]),
            "wide": replace(before, wide=not before.wide),
            "code": replace(before, code="code" if before.code != "code" else "[code, chat]"),
        }[change]
        self.approved.clear()
        town.terms["policy"] = replace(after, version=before.version + 1)
        town.kill()
        self._open()
        for pod in town.alive(contract="policy") if pods_too else []:
            town.shut_down(pod)
            town.new_pod(pod.version)
        for gateway in list(town.gateways) if routers_too else []:
            town.gateways.remove(gateway)
            gateway.router.close()
            town.new_gateway(*gateway.trusted)
        self.seconds_pass(2)

    # What is true, and what is said of it at each evaluation

    def a_router_chose(self, gateway: Gateway | None, version: str | None) -> None:
        """A version serves by a fresh table, or because it is trusted or was promoted; none that was rolled back."""
        if gateway is None or version is None:
            return
        table, town = gateway.router.table, self.town
        fresh = town.now <= gateway.fresh_until
        pinned = any(pin.kernel == "inference-kernel" for pin in table.pins)
        promoted = {of.version for of in table.promoted} | gateway.trusted
        assert fresh or pinned or version in promoted, f"{gateway.name} serves {version} without a fresh table"
        if town.core is not None and gateway.line.asked == town.now:
            known = {of.version: of for of in town.core.promotions.all("policy")}
            of = known.get(version)
            self.chosen |= {version: town.now} if of is not None else {}  # of others nobody has said that they serve
            if of is not None and of.entered >= town.core.seen_at:
                return  # the next evaluation makes the table of it
            assert of is None or of.status is not PromotionStatus.ROLLED_BACK, f"{version} was rolled back"
            assert of is None or of.position.stage is not Stage.SHADOW, f"{version} is in shadow"
            assert version == town.stable or of is not None, f"{version} serves before its promotion"

    def judge(self) -> None:
        town = self.town
        if town.core is None:
            return
        town.core.tick(town.now)
        self.tested = False
        assert not town.core.evaluator.faults.counts, town.core.evaluator.faults.counts
        for verdict, _ in town.core.history.cells():
            self.a_verdict_rests_on_what_was_measured(verdict)
        for incident in town.core.incidents():
            self.an_incident_is_as_it_was(incident)
        self.nothing_is_alarmed_of_what_was_never_in_trouble()
        self.what_was_known_is_kept()
        self.messages_say_what_is_known()
        self.events_say_what_is_known()

    def pods(self, contract: str, version: str, train: str = "") -> list[Pod]:
        mine = [pod for pod in self.town.pods if (pod.contract, pod.version) == (contract, version) and pod.told]
        return [pod for pod in mine if train in {"", pod.train}]

    def arrived(self, contract: str, version: str, slice: str, seconds: float, train: str = "") -> list[Any]:
        since, pods = self.town.now - seconds, self.pods(contract, version, train)
        return [entry for pod in pods for entry in pod.seen.get(slice, ()) if entry[0] > since]

    def a_verdict_rests_on_what_was_measured(self, verdict: Verdict) -> None:
        cell = verdict.cell
        where = cell.contract, cell.kernel_inference, cell.slice
        if verdict.status is Status.PASS:
            width = LONG_WINDOW if verdict.window == "long" else WINDOW
            taken = self.arrived(*where, width + 16, cell.kernel_train)  # of which it has those since the last alarm
            spans = [[entry for entry in taken if entry[0] >= since] for since in {entry[0] for entry in taken}]
            enough = [span for span in spans if sum(tokens for _, tokens, _ in span) >= verdict.samples]
            mine = self.pods(*where[:2], cell.kernel_train)
            lumps = [at for pod in mine for at in pod.lumps if at > self.town.now - 2 * width]
            passes = any(mean_of(span) <= verdict.limit for span in enough)
            assert lumps or passes, f"{cell} passes: {verdict.reason}"
        if verdict.status is Status.NO_DATA:
            assert not self.arrived(*where, STEP, cell.kernel_train), f"{cell} was measured just now: {verdict.reason}"
        if verdict.reason.startswith(RUN_ENDED):
            self.all_shut_down(cell.contract, cell.kernel_inference, cell.kernel_train)

    def all_shut_down(self, contract: str, version: str, train: str) -> None:
        pods = self.pods(contract, version, train)
        end = max((pod.told_end for pod in pods if pod.told_end is not None), default=-math.inf)
        left = [pod.name for pod in pods if pod.told_end is None and pod.last_report > end - LONG_WINDOW]
        assert not left, f"{version} is said to have ended, and {left} did not say so"

    def owing(self, contract: str, version: str, slice: str, limit: float, since: float, train: str) -> list[str]:
        """Pods that were seen bad last, and have not said that they shut down."""
        found = []
        for pod in self.pods(contract, version, train):
            entries = pod.seen.get(slice, [])
            if pod.told_end is None and entries and entries[-1][0] >= since - WINDOW:
                lately = [entry for entry in entries if entry[0] > entries[-1][0] - WINDOW]
                if min(mean_of(entries[-1:]), mean_of(lately)) > limit:
                    found.append(pod.name)
        return found

    def an_incident_is_as_it_was(self, incident: Incident) -> None:
        contract, (train, version) = incident.contract, incident.pair
        if incident.id not in self.ids["known"] and incident.on == "no-data":
            missed = all(of.last_report <= self.town.left - HEARTBEAT for of in self.pods(contract, version, train))
            listens = missed or self.town.now - self.town.opened >= HEARTBEAT
            assert listens, f"in an outage nobody is heard: {incident.headline}"
        since = incident.lasting_since(WINDOW)
        paused = since > self.lasting.get(incident.id, since)
        assert not paused or self.town.now - self.town.opened >= WINDOW, f"an outage is no pause: {incident.headline}"
        self.lasting[incident.id] = since
        for cell in incident.cells:
            key = incident.id, cell.clause, cell.slice
            was, self.refuted[key] = self.refuted.get(key, False), cell.refuted
            if incident.on == "fail" and cell.refuted and not was and cell.loosened_to is None:
                owing = self.owing(contract, version, cell.slice, cell.strictest, cell.since, train)
                assert not owing, f"{cell.clause} on {cell.slice} is called refuted, and {owing} were bad last"
            if incident.on == "invalid-input" and cell.refuted and not was:
                self.valid_again(incident, cell.slice)
        if incident.run_ended:
            self.all_shut_down(contract, version, train)
        elif incident.gone and incident.closed_at == -math.inf:  # it was rolled back
            self.is_kept_away_by_every_known_router(incident, TASKS)
        if incident.state is IncidentState.CONTAINED:
            self.contained(incident)

    def valid_again(self, incident: Incident, slice: str) -> None:
        for pod in self.pods(incident.contract, *incident.pair[::-1]):
            failed, entries = pod.seen_invalid.get(slice), pod.seen.get(slice, [(0.0, 0, 0)])
            if failed is not None and pod.told_end is None and failed >= incident.since:
                assert entries[-1][0] > failed, f"{pod.name} sent nothing valid on {slice} since"

    def contained(self, incident: Incident) -> None:
        town, version = self.town, incident.kernel_inference
        contract = town.core.contracts[incident.contract]
        slices = {cell.slice for cell in incident.cells if not cell.over}
        tasks = [task for task in TASKS if slices & set(contract.slices_of({"task": task})[1:])]
        for slice in slices:
            seen = self.arrived(incident.contract, version, slice, HEARTBEAT)
            shown = [bad for *_, bad in seen if bad or slice != "all"]  # of all traffic a slice may be kept away
            assert not shown, f"{slice} is measured, and contained"
        self.is_kept_away_by_every_known_router(incident, tasks)
        for pod in self.pods(incident.contract, version):
            if pod.told_end is None and pod.last_report >= incident.since:
                silent = town.now - max(pod.last_report, town.opened + STEP)
                assert silent <= 3 * HEARTBEAT, f"{pod.name} is lost, and {version} contained"

    def is_kept_away_by_every_known_router(self, incident: Incident, tasks: Sequence[str]) -> None:
        """Those that define slices otherwise keep away what they are asked for by name; the evaluator knows of both."""
        town, version, contract = self.town, incident.kernel_inference, self.town.core.contracts[incident.contract]
        for gateway in town.gateways:
            seen = Router.from_table(gateway.router.table, contracts=[gateway.contract])
            alike = gateway.contract.slice_ids == contract.slice_ids
            if gateway.line.asked > incident.since - 3600.0 and (alike or gateway.line.asked == town.now):
                chosen = {task: seen.choose("policy", {"task": task}, version) for task in tasks}
                assert {*chosen.values()} <= {"train-kernel"}, f"{gateway.name} sends requests to {version}: {chosen}"

    def nothing_is_alarmed_of_what_was_never_in_trouble(self) -> None:
        core = self.town.core
        for incident in core.incidents():
            assert incident.on != "fail" or incident.kernel_inference in self.drifted, incident.headline
            assert incident.on != "invalid-input" or incident.kernel_inference in self.failed, incident.headline
        assert {route.avoid for route in core.decisions.routes} <= self.drifted
        assert {of.version for of in core.decisions.directives} - {""} <= self.drifted
        for alert in core.firing():
            cell = alert.cell
            mine = self.pods(cell.contract, cell.kernel_inference)
            ends = [math.inf if pod.told_end is None else pod.told_end for pod in mine]
            if alert.on == "no-data" and mine and max(ends) < self.town.now - WINDOW - HEARTBEAT:
                ended = alert.run_ended or alert.verdict.status is not Status.NO_DATA
                ended = ended or "applies version" in alert.verdict.reason  # of a slice that recorders define otherwise
                ended = ended or cell.kernel_inference in {of.version for of in core.decisions.canaries if of.weight}
                assert ended, f"{cell} has ended, and alarms: {alert.verdict.reason}"
            late = alert.on == "fail" and mine and alert.started_at > max(ends)
            assert not late or alert.severity == "critical", f"{cell} has ended, and escalates"

    def what_was_known_is_kept(self) -> None:
        """An incident ends with an event that says how, and never vanishes."""
        core = self.town.core
        lasting = {incident.id for incident in core.incidents()}
        for id in self.ids["known"] - lasting:
            over = core.past.find(id)
            assert over is not None, f"incident {id} has vanished"
            if over.on == "fail" and over.state_text == "Resolved":
                for cell in over.cells:
                    asked = cell.slice, cell.strictest, cell.since, over.kernel_train
                    owing = self.owing(over.contract, over.kernel_inference, *asked)
                    assert not owing, f"{id} is called resolved, and {owing} were bad last on {cell.slice}"
            known = over.refuted or over.run_ended or over.closing or over.on not in OF_RECORDERS
            assert known, f"{id} ended, and nothing shows how: {over.state_text}"
            if over.state_text == "Ended":
                self.all_shut_down(over.contract, over.kernel_inference, over.kernel_train)
        self.ids["known"] = lasting

    def messages_say_what_is_known(self) -> None:
        core = self.town.core
        messages = core.outbox.messages(limit=100_000)
        new, self.read_messages = messages[: len(messages) - self.read_messages], len(messages)
        for body in (json.loads(message.body) for message in new):
            self.formats_agree(body)
            said = body["kernelContract"]["incident"]
            incident = None if said is None else core.incident(said["id"])
            if incident is None:
                continue
            assert said["state_text"] == incident.state_text, "a message says another state"
            served = {of["name"]: of["kernels"] for of in self.town.get("contracts")["contracts"]}
            names = {kernel["version"]: kernel["name"] for kernel in served[incident.contract]}
            assert said["kernels"]["inference"] == names[incident.kernel_inference]
            if body["status"] == "resolved" and body["notification_reason"] == "resolved":
                over = incident.state is IncidentState.RESOLVED or incident.only_route_left
                safe = over or incident.state is IncidentState.CONTAINED
                held = any(alert.incident == incident.key for alert in core.firing(incident.contract))
                assert safe or held, f"a message says resolved: {incident.state_text}"
            acknowledged = {ack.fingerprint for ack in core.people.acknowledgements}
            for alert in body["alerts"]:
                labels, summary = alert["labels"], alert["annotations"]["summary"]
                if alert["status"] == "resolved" and " is resolved" in summary and incident.on == "fail":
                    cell = incident.cell(labels["clause"], labels["slice"])
                    assert cell.refuted, summary
                if alert["status"] == "firing":
                    muting = core.people.silencing(_cell_of(incident, labels), self.town.now)
                    assert not muting, f"it is silenced: {summary}"
                    reminded = body["notification_reason"] == "reminder" and alert["fingerprint"] in acknowledged
                    assert not reminded, f"it is acknowledged: {summary}"
            impact = body["kernelContract"]["impact"]
            if incident.on == "fail" and (found := re.match(r"(?:About|Requests).* on (.*?) (would|are) ", impact)):
                fails = {of.cell for of, _ in core.history.cells() if of.status is Status.FAIL}
                named = {"code", "prose", "all"} & {*re.findall(r"\w+", found[1])}
                assert named <= {cell.slice for cell in fails if cell.pair == incident.pair}, impact
            self.orders_can_be_carried_out(body, incident)

    def orders_can_be_carried_out(self, body: dict[str, Any], incident: Incident) -> None:
        """What a message asks for is possible, and what it says was done is in force."""
        core, text = self.town.core, body["kernelContract"]["next"]
        decided = core.decisions
        if "route resume" in text:
            assert any(route.contract == incident.contract for route in decided.routes), text
        if "route unpin" in text:
            assert any(pin.contract == incident.contract for pin in decided.pins), text
        if "alerts ack" in text and "roll it back" not in text:
            assert any(other.went_away for other in core.incidents(incident.contract)), text
        known = {of.version: of.status for of in core.promotions.all(incident.contract)}
        back = known.get(incident.kernel_inference) is PromotionStatus.ROLLED_BACK
        assert not (back and "roll the kernel version back" in text), text

    def formats_agree(self, body: dict[str, Any]) -> None:
        contract, slack, event = body["kernelContract"], slack_message(body), pagerduty_event(body, "R" * 32)
        over = body["status"] == "resolved"
        assert (event["event_action"] == "resolve") is (over and contract["reason"] != "unfollowed")
        green = slack["attachments"][0]["color"] == "#2ca02c"
        assert over or not green, "green while it fires"
        if contract["incident"] is not None:
            assert contract["incident"]["state_text"].split(";")[0].split(":")[0] in slack["text"].replace("&gt;", ">")
            assert event["dedup_key"].endswith(contract["incident"]["id"])

    def events_say_what_is_known(self) -> None:
        core = self.town.core
        for event in core.events.newest(limit=100):
            if event.id <= self.read_events:
                continue
            if event.kind == "over":
                over = core.incident(event.data["incident"])
                assert over is not None
                assert f": {over.state_text}: " in event.message, event.message
            if event.kind == "promotion":
                self.a_version_moves_for_a_reason(event.data)
        self.read_events = max((event.id for event in core.events.newest(limit=1)), default=self.read_events)

    def a_version_moves_for_a_reason(self, data: dict[str, Any]) -> None:
        version, by_gate = data["kernel_inference"], not data["by"]
        if data["order"] == "advance":
            late = any(at > self.town.now - WINDOW for pod in self.pods("policy", version) for at in pod.lumps)
            for slice in ("all", "code", "prose"):
                seen = self.arrived("policy", version, slice, WINDOW + STEP)
                assert late or sum(tokens for _, tokens, _ in seen) >= 500, (
                    f"{version} goes on, and is not measured on {slice}"
                )
                lately = mean_of(self.arrived("policy", version, slice, WINDOW - 8))
                assert lately <= max(0.02, self.town.terms["policy"].limit), f"{version} goes on at {lately}"
            assert data["to"] != "full" or version in self.approved, f"nobody has let {version} into full"
        if data["order"] == "rollback" and by_gate:
            old = [self.arrived("policy", version, slice, WINDOW, TRAIN) for slice in ("all", "code", "prose")]
            passes = all(sum(tokens for _, tokens, _ in seen) >= 2000 for seen in old)
            assert version in self.to_blame or (version in self.drifted and not passes), data["message"]

    # What surfaces say, compared with each other

    def the_surfaces_agree(self) -> None:
        town = self.town
        if town is None or town.core is None or town.core.evaluated_at is None or self.tested:
            return
        self.tested = True
        overview, verdicts = self.town.get("overview"), self.town.get("verdicts")["verdicts"]
        promotions, alerts = self.town.get("promotions")["promotions"], self.town.get("alerts")["alerts"]
        code, text = self.command(status_command.status, contract=None, every=True, as_json=False)
        rows = overview["incidents"]
        for row in rows[:6]:
            assert f"{row['state_text']}  {row['contract']}: {row['headline']}" in text
        lasts = [row for row in rows if row["state"] == "broken" and not row["only_route_left"]]
        broken = [row for row in lasts if not row["went_away"]]  # or nothing shows it any more
        unproven = [row for row in rows if row["state"] == "unproven" or row["went_away"]]
        stray = [entry for entry in promotions if entry["seen_serving"]]
        fails = [cell for cell in verdicts if cell["status"] == "FAIL"]
        health = self.town.get("health")
        promised = not (rows or stray or overview["missing"] or health["failures"])
        if promised and all(cell["status"] == "PASS" for cell in verdicts):
            assert code == 0, "the page says that every promise holds"
        if code == 0:
            assert [*broken, *unproven, *stray, *fails, *overview["missing"]] == [], text
        if fails or stray or any(row["on"] == "fail" for row in broken):
            assert code == 1, text
        if unproven:
            assert code in {1, 3}, text
        if code != 1:
            self.nothing_that_was_measured_is_above_its_limit()
        self.what_is_missing_is_told(overview, code)
        self.doctor_agrees(verdicts)
        self.alerts_list_agrees(alerts, unproven)
        self.metrics_agree(overview, verdicts)
        self.orders_are_shown(overview)
        self.routers_do_as_is_said()

    def what_is_missing_is_told(self, overview: dict[str, Any], code: int) -> None:
        town = self.town
        for row in overview["missing"]:
            mine = row["contract"], row["kernel_inference"], "all", 2 * WINDOW, row["kernel_train"]
            if row["outcome"] == "invalid" and not any(pod.lumps for pod in self.pods(*mine[:2])):
                assert self.arrived(*mine) or row["text"].startswith("100 %"), f"nothing was valid: {row['text']}"
        for version in [version for version, at in self.chosen.items() if at == town.now]:
            ends = [(math.inf if of.told_end else of.last_report) for of in self.pods("policy", version)] or [math.inf]
            told = code or max(*ends, town.opened) >= town.now - 5 * HEARTBEAT
            assert told, f"routers choose {version}, of which all are dead, and status has nothing to say"

    def nothing_that_was_measured_is_above_its_limit(self) -> None:
        town = self.town
        states = {(of.kernel_inference, of.state) for of in town.core.incidents()}
        contained = {version for version, state in states if state is IncidentState.CONTAINED}
        for name, version in {(pod.contract, pod.version) for pod in town.pods if pod.version not in contained}:
            for slice in ("all", "prose"):
                seen = self.arrived(name, version, slice, 2.5 * STEP)
                last = [entry for entry in seen if entry[0] > town.now - STEP]
                # What fails already is judged by whole rounds of its recorders, a heartbeat at most.
                before = [entry for entry in seen if town.now - 2 * STEP < entry[0] <= town.now - STEP]
                told = [seen, last, before if (version, IncidentState.UNPROVEN) in states else last]
                drifts = min(map(mean_of, told)) > 5 * town.terms[name].limit  # the less, the longer it takes
                drifts = drifts and sum(tokens for _, tokens, _ in seen) >= 3000
                lumps = [at for pod in self.pods(name, version) for at in pod.lumps if at > town.now - 4 * WINDOW]
                assert lumps or not drifts, f"{version} is above its limit on {slice}, and status does not say it"

    def doctor_agrees(self, verdicts: list[dict[str, Any]]) -> None:
        health, served = self.town.get("health"), self.town.get("contracts")["contracts"]
        contracts = list(self.town.core.contracts.values())
        found = list(of_evaluator(health, served, verdicts, self.town.now, contracts))
        said = "; ".join(f"{check.what} {check.remedy}" for check in found)
        for kernel in (kernel for contract in served for kernel in contract["kernels"] if kernel["silent"]):
            assert kernel["silent"] in said, (kernel["silent"], said)

    def command(self, command: Any, **options: Any) -> tuple[int, str]:
        out = io.StringIO()
        with redirect_stdout(out), pytest.raises(typer.Exit) as left:
            command(url="http://127.0.0.1:4320", **options)
        return left.value.exit_code, out.getvalue()

    def alerts_list_agrees(self, alerts: list[dict[str, Any]], unproven: list[dict[str, Any]]) -> None:
        code, text = self.command(people_commands.list_command, contract=None, as_json=False)
        firing = [alert for alert in alerts if alert["phase"] == "firing"]
        assert (code == 1) is bool(firing)
        assert firing or (code == 0) is not bool(unproven), text
        for row in unproven:
            assert f"unproven  {row['contract']}: {row['headline']}; {row['state_text']}" in text
        for silence in self.town.core.people.silences:
            if self.town.now < silence.until:
                assert silence.id in text
        for ack in self.town.core.people.acknowledgements:
            fires = ack.fingerprint in {alert["fingerprint"] for alert in firing}
            assert not fires or f"acknowledged by {ack.by}" in text

    def metrics_agree(self, overview: dict[str, Any], verdicts: list[dict[str, Any]]) -> None:
        metrics = read(self.town.core, Counter(), Counter())
        said = {row[1]: row[-1] for row in metrics["kc.incident"]}
        shown = {row["id"]: row for row in overview["incidents"] if not row["only_route_left"]}
        assert said.keys() == shown.keys()
        for id, row in shown.items():
            assert said[id] == (0.0 if row["went_away"] else {"contained": 1.0}.get(row["state"], 2.0))
        codes = {tuple(row[:5]): row[-1] for row in metrics["kc.verdict"]}
        order = ["PASS", "INCONCLUSIVE", "NO_DATA", "FAIL", "INVALID_INPUT"]
        key = ("contract", "clause", "slice", "kernel_train", "kernel_inference")
        judged = [cell for cell in verdicts if not cell["gone"]]
        assert codes == {tuple(cell[name] for name in key): order.index(cell["status"]) for cell in judged}
        for name, counts in overview["counts"].items():
            mine = Counter(cell["status"] for cell in judged if cell["contract"] == name)
            assert mine == Counter({status: many for status, many in counts.items() if many})

    def orders_are_shown(self, overview: dict[str, Any]) -> None:
        decided, shown = self.town.core.decisions, overview["in_force"]
        assert sum(entry["kind"] == "pin" for entry in shown) == len(decided.pins)
        assert sum(entry["kind"] == "silence" for entry in shown) == len(self.town.core.people.silences)
        asked = {of.version for of in decided.directives if of.kind == "hold-promotion"}
        events = self.town.core.events.newest(limit=1000, verdicts=False)
        unpinned = {event.at for event in events if event.kind == "unpinned"}  # routes act again since then
        since = {(route.slice, route.avoid): route.since for route in decided.routes}
        ordered: dict[tuple[str, str], float] = {}  # of incidents beside each other, such as of two training kernels
        for incident in self.town.core.incidents():
            for action in incident.actions if incident.contract == "policy" else ():
                for place in [(name, incident.kernel_inference) for name in action.slices if action.kind == "route"]:
                    ordered[place] = max(ordered.get(place, 0.0), action.at)
        for place, at in ordered.items():
            assert since.get(place, at) in {at, *unpinned}, f"{place}: routed at {since[place]}, and it is said at {at}"
        for row in overview["incidents"]:
            texts = "; ".join(action["text"] for action in row["actions"] if action["in_force"])
            going = {canary.version for canary in decided.canaries if canary.weight}
            assert "promotions held" not in texts or going <= asked, texts
            routes = [action for action in row["actions"] if action["kind"] == "route" and action["in_force"]]
            avoided = [route for route in decided.routes if route.avoid == row["kernel_inference"]]
            assert not routes or avoided, row["actions"]

    def routers_do_as_is_said(self) -> None:
        """A router that has the newest table sends requests of a slice where the metric says that they go."""
        core = self.town.core
        kept = kept_since(core.decisions, "policy")
        for gateway in self.town.gateways:
            if (
                gateway.router.table != core.decisions
                or gateway.contract.slice_ids != core.contracts["policy"].slice_ids
            ):
                continue
            seen = Router.from_table(gateway.router.table, contracts=[gateway.contract])
            limited = {canary.version for canary in core.decisions.canaries if 0.0 < canary.weight < 1.0}
            for version in {OLD, NEW, NEWER} - limited:
                for task in ("code", "prose"):
                    if not core.decisions.pins:
                        away = any(kept(slice, version) is not None for slice in ("all", task))
                        chosen = seen.choose("policy", {"task": task}, version)
                        assert (chosen == "train-kernel") is away, (task, version, chosen)

    def teardown(self) -> None:
        try:
            if self.town is not None and sys.exc_info()[0] is None:
                self.everything_is_told_in_the_end()
        finally:
            if self.town is not None:
                self.town.close()
            self.patch.undo()

    def everything_is_told_in_the_end(self) -> None:
        """Once endpoints are up and no silence is left, what PagerDuty shows as open is open, and the reverse."""
        town = self.town
        if town.core is None:
            return
        town.down.clear()
        self.seconds_pass(34)
        open_there: set[tuple[str, str]] = set()
        for endpoint, stored in town.delivered:
            event = pagerduty_event(json.loads(stored), "")
            open_there.discard((endpoint, event["dedup_key"]))
            if event["event_action"] == "trigger":
                open_there.add((endpoint, event["dedup_key"]))
        lasting = {incident.id: incident for incident in town.core.incidents()}
        for _, key in open_there:
            over = town.core.past.find(key.rpartition("/")[2])
            assert over is None or over.id in lasting or over.ended_unrefuted, f"{key} is over: {over.state_text}"
        for alert in town.core.firing("policy"):
            found = next((one for one in lasting.values() if one.key == alert.incident), None)
            targets = {action.target for action in alert.actions if action.kind == "webhook"}
            if found is not None and found.state is IncidentState.BROKEN:
                untold = {(target, f"kc-otel/policy/{found.id}") for target in targets} - open_there
                assert not untold, f"{untold} were not told: {found.state_text}"


TOLD: dict[str, Callable[[Stories], list[object]]] = {
    "a breach whose recorder died": lambda story: [story.a_pod_breaks_by_itself(who=2, then="is killed", later=30)],
    "a breach that all recorders left without a word": lambda story: [
        story.a_kernel_version_drifts("stable"),
        *(story.something_befalls_a_pod(0, "is killed") for _ in range(2)),
        story.seconds_pass(30),
    ],
    "a run that ends in order, of which a recorder had died": lambda story: [
        story.something_befalls_a_pod(0, "is killed"),
        story.a_kernel_version_drifts("stable"),
        story.something_befalls_a_pod(0, "shuts down"),
        story.seconds_pass(8),
    ],
    "pods that are redeployed while their kernel is routed away": lambda story: [
        story.a_kernel_version_drifts("stable"),
        story.seconds_pass(8),
        *(story.something_befalls_a_pod(0, "is replaced") for _ in range(4)),
        story.seconds_pass(8),
    ],
    "a weak drift, mended": lambda story: [
        story.a_kernel_version_drifts("stable", share=0.06),
        story.seconds_pass(8),
        story.all_drift_is_mended_in_place(),
        story.a_person_decides("resume", "all", "train-kernel", None),
        story.seconds_pass(8),
    ],
    "a router without requests is cut off before a breach": lambda story: [
        story.a_router_starts(trusts=True),
        story.something_befalls_a_router(0, "is idle"),
        story.something_befalls_a_router(0, "is cut off"),
        story.a_kernel_version_drifts("stable"),
        story.seconds_pass(30),
    ],
    "a router that trusts no version, in an outage": lambda story: [
        story.a_router_starts(trusts=False),
        story.the_evaluator_is_killed_and_started_again(steps=30),
    ],
    "a roll-out of a version that drifts": lambda story: [
        story.a_roll_out_of_another_version_begins(drifts=True),
        story.an_order_is_given("approve"),
        story.an_order_is_given("approve"),
    ],
    "the version at full dies while the replaced one still reports": lambda story: [
        story.a_roll_out_of_another_version_begins(drifts=False),
        *(story.an_order_is_given("approve") for _ in range(3)),
        story.something_begins_or_ceases("around"),
        story.something_befalls_a_pod(4, "is killed"),
        story.seconds_pass(30),
    ],
    "outages while a breach lasts, and while it clears, in which a pod changes": lambda story: [
        story.a_kernel_version_drifts("stable"),
        story.a_person_decides("resume", "all", "train-kernel", None),
        story.seconds_pass(4),
        story.the_evaluator_is_killed_and_started_again(30, 1, "is replaced"),
        story.all_drift_is_mended_in_place(),
        story.seconds_pass(4),
        story.the_evaluator_is_killed_and_started_again(3),
    ],
    "outages while a slice is kept away, in which a pod dies": lambda story: [
        story.a_kernel_version_drifts("stable", TASKS[:1], share=0.1),
        story.seconds_pass(12),
        *(story.the_evaluator_is_killed_and_started_again(steps, steps // 30, "is killed") for steps in (10, 30)),
        story.seconds_pass(8),
    ],
    "one version is held, and another goes on, until a new training kernel drifts beside the old one": lambda story: [
        story.a_roll_out_of_another_version_begins(drifts=False),
        story.a_kernel_version_drifts("stable"),
        *(story.an_order_is_given("approve") for _ in range(3)),
        story.something_befalls_a_pod(4, "is joined by another training kernel"),
        story.seconds_pass(30),
    ],
    "a slice recovers, and another breaks, whose route is ordered later, and overridden": lambda story: [
        story.a_kernel_version_drifts("stable", TASKS[:1]),
        story.a_person_decides("resume", "all", "train-kernel", None),
        story.all_drift_is_mended_in_place(),
        story.a_kernel_version_drifts("stable", TASKS[1:2]),
        story.seconds_pass(30),
        story.a_person_decides("pin", "prose", "inference-kernel", None),
        story.seconds_pass(8),
    ],
    "a run ends in order before its second step": lambda story: [
        story.a_kernel_version_drifts("stable", steps=2),
        *(story.something_befalls_a_pod(0, "shuts down") for _ in range(2)),
        story.seconds_pass(8),
    ],
    "by way of two Collectors, nothing is valid any more": lambda story: [
        story.something_begins_or_ceases("collectors"),
        story.seconds_pass(8),
        *(story.something_befalls_a_pod(who, "is invalid") for who in range(2)),
        story.seconds_pass(8),
    ],
    "a roll-back that a router has not heard of": lambda story: [
        story.a_roll_out_of_another_version_begins(drifts=False),
        story.an_order_is_given("approve"),
        story.a_router_starts(trusts=True),
        story.something_befalls_a_router(1, "is idle"),
        story.something_befalls_a_router(1, "is cut off"),
        story.a_kernel_version_drifts("candidate"),
        story.an_order_is_given("rollback"),
        story.the_roll_out_is_done_with(how="killed"),
        story.seconds_pass(30),
    ],
}
"""Stories in which a fault of the evaluator, of a kind that was planted, shows; random ones rarely come to them."""


@pytest.mark.slow
@pytest.mark.parametrize("story", TOLD)
def test_a_story_is_told_as_it_happened(story):
    told = Stories()
    try:
        told.a_fleet_of_two_pods_a_trainer_and_a_router_is_healthy(at_once=True)
        TOLD[story](told)
        told.everything_is_told_in_the_end()
    finally:
        told.town.close()
        told.patch.undo()


LONG = bool(os.environ.get("LONG"))
TestStories = pytest.mark.slow(Stories.TestCase)
TestStories.settings = settings(
    max_examples=settings().max_examples // 2 if LONG else 3,
    stateful_step_count=40 if LONG else 14,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
