"""Random ordinary stories of a fleet, told to the real parts: no surface says what was not known, or another thing.

The machine knows what is true, because it planted it: which kernel versions drift on which requests, which processes
died, which were drained or shut down, and what each router chose. After each evaluation it compares that with what is
said, and after each step of a story all surfaces with each other.
"""

import io
import json
import math
import os
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
from tests.tools.town import BAD, HEARTBEAT, LONG_WINDOW, STEP, TASKS, WINDOW, Gateway, Pod, Town

OLD, NEW, NEWER, TRAINER = "b" * 12, "c" * 12, "d" * 12, "e" * 12
WHO = st.integers(0, 5)
SLICE = st.sampled_from(["all", "code", "prose"])
TASK = st.sampled_from(TASKS)
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
        self._pass(5)

    # The story

    @rule(steps=st.sampled_from([1, 2, 4, 8]))
    def seconds_pass(self, steps: int) -> None:
        self._pass(steps)

    def _pass(self, steps: int) -> None:
        for _ in range(steps):
            self.town.step()
        self.the_surfaces_agree()

    @rule()
    def a_long_time_passes(self) -> None:
        self._pass(30)

    @rule(
        task=TASK,
        which=st.sampled_from(["stable", "candidate"]),
        share=st.sampled_from([1.0, 0.06]),
        steps=st.sampled_from([1, 3]),
    )
    def a_kernel_version_drifts_on_some_requests(self, task: str, which: str, share: float, steps: int) -> None:
        if version := getattr(self.town, which):
            self._drift(version, task, share=share)
            self._pass(steps)

    @rule(which=st.sampled_from(["stable", "candidate"]))
    def a_kernel_version_drifts_on_all_requests(self, which: str) -> None:
        if version := getattr(self.town, which):
            self._drift(version, *TASKS)
            self._pass(3)

    @rule()
    def the_trainers_kernel_drifts(self) -> None:
        self._drift(TRAINER, "code")
        self._pass(2)

    def _drift(self, version: str, *tasks: str, share: float = 1.0) -> None:
        self.drifted.add(version)
        self.town.bad |= {(version, task): share for task in tasks}

    @rule()
    def all_drift_is_mended_in_place(self) -> None:
        self.town.bad.clear()
        for pod in self.town.pods:
            pod.broken = False
        self._pass(1)

    def _pod(self, who: int) -> Pod | None:
        alive = self.town.alive()
        return alive[who % len(alive)] if alive else None

    @rule(who=WHO)
    def a_pod_shuts_down_in_order(self, who: int) -> None:
        if pod := self._pod(who):
            self.town.shut_down(pod)
            self._pass(1)

    @rule(who=WHO)
    def a_pod_is_killed(self, who: int) -> None:
        if pod := self._pod(who):
            pod.alive = False
            self._pass(1)

    @rule(who=WHO, in_order=st.booleans())
    def a_pod_is_restarted_as_another_process(self, who: int, in_order: bool) -> None:
        if pod := self._pod(who):
            if in_order:
                self.town.shut_down(pod)
            pod.alive = False
            self.town.new_pod(pod.version, pod.contract)
            self._pass(1)

    @rule(who=WHO)
    def the_exports_of_a_pod_get_lost_or_arrive_again(self, who: int) -> None:
        if pod := self._pod(who):
            pod.heard = not pod.heard
            self._pass(2)

    @rule(
        who=WHO,
        then=st.sampled_from(["goes on", "is killed", "shuts down", "is restarted", "is cut off", "is mended"]),
        later=st.sampled_from([2, 8, 30]),
    )
    def a_pod_breaks_by_itself(self, who: int, then: str, later: int) -> None:
        if pod := self._pod(who):
            pod.broken = True
            self.drifted.add(pod.version)
            self._pass(3)
            match then:
                case "is killed":
                    pod.alive = False
                case "shuts down":
                    self.town.shut_down(pod)
                case "is restarted":
                    pod.alive = False
                    self.town.new_pod(pod.version, pod.contract)
                case "is cut off":
                    pod.heard = False
                case "is mended":
                    pod.broken = False
            self._pass(later)

    @rule(more=st.integers(1, 2))
    def pods_are_added(self, more: int) -> None:
        if len(self.town.alive()) < 6:
            for _ in range(more):
                self.town.new_pod(self.town.stable)
            self._pass(1)

    @rule(who=WHO)
    def a_pod_hands_over_input_that_fails_the_checks_or_is_valid_again(self, who: int) -> None:
        if pod := self._pod(who):
            self.failed.add(pod.version)
            pod.invalid = not pod.invalid
            self._pass(3)

    @rule(trusts=st.booleans())
    def a_router_starts(self, trusts: bool) -> None:
        if len(self.town.gateways) < 3:
            self.town.new_gateway(*[self.town.stable] * trusts)
            self._pass(1)

    @rule(who=WHO, steps=st.sampled_from([2, 12]))
    def a_router_is_cut_off_or_returns(self, who: int, steps: int) -> None:
        if self.town.gateways:
            line = self.town.gateways[who % len(self.town.gateways)].line
            line.up = not line.up
            self._pass(steps)

    @rule(who=WHO)
    def a_router_gets_no_requests_or_some_again(self, who: int) -> None:
        if self.town.gateways:
            gateway = self.town.gateways[who % len(self.town.gateways)]
            gateway.idle = not gateway.idle
            self._pass(1)

    @rule(who=WHO)
    def a_router_closes(self, who: int) -> None:
        if self.town.gateways:
            self.town.gateways.pop(who % len(self.town.gateways)).router.close()
            self._pass(1)

    @rule()
    def some_requests_begin_or_cease_to_go_around_the_routers(self) -> None:
        self.town.around = not self.town.around
        self._pass(2)

    @precondition(lambda self: self.town and not self.town.candidate and self.town.core)
    @rule(drifts=st.booleans())
    def a_roll_out_of_another_version_begins(self, drifts: bool) -> None:
        town = self.town
        town.candidate = NEWER if town.stable == NEW else NEW
        if drifts:
            self._drift(town.candidate, "code")
        town.mirrored = True
        town.new_pod(town.candidate)
        self._pass(1)
        self._order("start")
        self._pass(2)

    def _order(self, order: str, **more: Any) -> None:
        town = self.town
        if town.core is not None and town.candidate:
            with suppress(OrderError, LookupError):
                town.core.promotions.tell("policy", town.candidate, order, BY, WHY, town.now, **more)

    @precondition(lambda self: self.town and self.town.candidate)
    @rule()
    def the_version_is_approved(self) -> None:
        if self.town.core is not None:
            self.approved.add(self.town.candidate)
        self._order("approve", stage=Stage.FULL)
        self._pass(12)

    @precondition(lambda self: self.town and self.town.candidate)
    @rule(order=st.sampled_from(["rollback", "rollback", "hold", "resume", "start"]))
    def an_order_is_given_about_the_version(self, order: str) -> None:
        self._order(order)
        self._pass(2)

    @precondition(lambda self: self.town and self.town.candidate)
    @rule(stage=st.sampled_from([Stage.CANARY, Stage.FULL]))
    def the_version_is_forced_on(self, stage: Stage) -> None:
        self._order("force", stage=stage)
        self._pass(2)

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
        self._pass(2)

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
        self._pass(1)

    @rule(endpoint=st.sampled_from(["pager", "chat"]))
    def an_endpoint_is_down_or_up_again(self, endpoint: str) -> None:
        self.town.down ^= {endpoint}

    @rule(steps=st.sampled_from([0, 1, 3, 10, 30]))
    def the_evaluator_is_killed_and_started_again(self, steps: int) -> None:
        if self.town.core is not None:
            self.town.kill()
            self._pass(steps)
            self._open()
            self._pass(1)

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
        self._pass(2)

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

    def pods(self, contract: str, version: str) -> list[Pod]:
        return [pod for pod in self.town.pods if (pod.contract, pod.version) == (contract, version) and pod.told]

    def arrived(self, contract: str, version: str, slice: str, seconds: float) -> list[tuple[float, int, int]]:
        since = self.town.now - seconds
        return [entry for pod in self.pods(contract, version) for entry in pod.seen.get(slice, ()) if entry[0] > since]

    def a_verdict_rests_on_what_was_measured(self, verdict: Verdict) -> None:
        cell = verdict.cell
        where = cell.contract, cell.kernel_inference, cell.slice
        if verdict.status is Status.PASS:
            width = LONG_WINDOW if verdict.window == "long" else WINDOW
            taken = self.arrived(*where, width + 16)  # of which it has those since the last alarm
            spans = [[entry for entry in taken if entry[0] >= since] for since in {entry[0] for entry in taken}]
            enough = [span for span in spans if sum(tokens for _, tokens, _ in span) >= verdict.samples]
            lumps = [at for pod in self.pods(*where[:2]) for at in pod.lumps if at > self.town.now - 2 * width]
            passes = any(mean_of(span) <= verdict.limit for span in enough)
            assert lumps or passes, f"{cell} passes: {verdict.reason}"
        if verdict.status is Status.NO_DATA:
            assert not self.arrived(*where, STEP), f"{cell} was measured just now: {verdict.reason}"
        if verdict.reason.startswith(RUN_ENDED):
            self.all_shut_down(cell.contract, cell.kernel_inference)

    def all_shut_down(self, contract: str, version: str) -> None:
        pods = self.pods(contract, version)
        end = max((pod.told_end for pod in pods if pod.told_end is not None), default=-math.inf)
        left = [pod.name for pod in pods if pod.told_end is None and pod.last_report > end - LONG_WINDOW]
        assert not left, f"{version} is said to have ended, and {left} did not say so"

    def owing(self, contract: str, version: str, slice: str, limit: float, since: float) -> list[str]:
        """Pods that were seen bad last, and have not said that they shut down."""
        found = []
        for pod in self.pods(contract, version):
            entries = pod.seen.get(slice, [])
            if pod.told_end is None and entries and entries[-1][0] >= since - WINDOW:
                lately = [entry for entry in entries if entry[0] > entries[-1][0] - WINDOW]
                if min(mean_of(entries[-1:]), mean_of(lately)) > limit:
                    found.append(pod.name)
        return found

    def an_incident_is_as_it_was(self, incident: Incident) -> None:
        version, contract = incident.kernel_inference, incident.contract
        for cell in incident.cells:
            key = incident.id, cell.clause, cell.slice
            was, self.refuted[key] = self.refuted.get(key, False), cell.refuted
            if incident.on == "fail" and cell.refuted and not was and cell.loosened_to is None:
                owing = self.owing(contract, version, cell.slice, cell.strictest, cell.since)
                assert not owing, f"{cell.clause} on {cell.slice} is called refuted, and {owing} were bad last"
            if incident.on == "invalid-input" and cell.refuted and not was:
                self.valid_again(incident, cell.slice)
        if incident.run_ended:
            self.all_shut_down(contract, version)
        elif incident.gone and incident.closed_at == -math.inf:  # it was rolled back
            self.is_kept_away_by_every_known_router(incident, TASKS)
        if incident.state is IncidentState.CONTAINED:
            self.contained(incident)

    def valid_again(self, incident: Incident, slice: str) -> None:
        for pod in self.pods(incident.contract, incident.kernel_inference):
            failed, entries = pod.seen_invalid.get(slice), pod.seen.get(slice, [(0.0, 0, 0)])
            if failed is not None and pod.told_end is None and failed >= incident.since:
                assert entries[-1][0] > failed, f"{pod.name} sent nothing valid on {slice} since"

    def contained(self, incident: Incident) -> None:
        town, version = self.town, incident.kernel_inference
        contract = town.core.contracts[incident.contract]
        slices = {cell.slice for cell in incident.cells if not cell.over}
        tasks = [task for task in TASKS if slices & set(contract.slices_of({"task": task})[1:])]
        for slice in slices:
            assert not self.arrived(incident.contract, version, slice, HEARTBEAT), f"{slice} is measured, and contained"
        self.is_kept_away_by_every_known_router(incident, tasks)
        for pod in self.pods(incident.contract, version):
            if pod.told_end is None and pod.last_report >= incident.since:
                assert town.now - pod.last_report <= 3 * HEARTBEAT, f"{pod.name} is lost, and {version} contained"

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
                assert ended, f"{cell} has ended, and alarms: {alert.verdict.reason}"

    def what_was_known_is_kept(self) -> None:
        """An incident ends with an event that says how, and never vanishes."""
        core = self.town.core
        lasting = {incident.id for incident in core.incidents()}
        for id in self.ids["known"] - lasting:
            over = core.past.find(id)
            assert over is not None, f"incident {id} has vanished"
            if over.on == "fail" and over.state_text == "Resolved":
                for cell in over.cells:
                    owing = self.owing(over.contract, over.kernel_inference, cell.slice, cell.strictest, cell.since)
                    assert not owing, f"{id} is called resolved, and {owing} were bad last on {cell.slice}"
            known = over.refuted or over.run_ended or over.closing or over.on not in OF_RECORDERS
            assert known, f"{id} ended, and nothing shows how: {over.state_text}"
            if over.state_text == "Ended":
                self.all_shut_down(over.contract, over.kernel_inference)
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
            served = {of["name"]: of["kernels"] for of in self.view("contracts")["contracts"]}
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
            self.orders_can_be_carried_out(body, incident)

    def view(self, path: str) -> Any:
        return self.town.get(path)

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
            for slice in ("all", "code", "prose"):
                seen = self.arrived("policy", version, slice, WINDOW + STEP)
                assert sum(tokens for _, tokens, _ in seen) >= 500, f"{version} goes on, and is not measured on {slice}"
                lately = mean_of(self.arrived("policy", version, slice, WINDOW - 8))
                assert lately <= max(0.02, self.town.terms["policy"].limit), f"{version} goes on at {lately}"
            assert data["to"] != "full" or version in self.approved, f"nobody has let {version} into full"
        if data["order"] == "rollback" and by_gate:
            assert version in self.drifted, data["message"]

    # What surfaces say, compared with each other

    def the_surfaces_agree(self) -> None:
        town = self.town
        if town is None or town.core is None or town.core.evaluated_at is None or self.tested:
            return
        self.tested = True
        overview, verdicts = self.view("overview"), self.view("verdicts")["verdicts"]
        promotions, alerts = self.view("promotions")["promotions"], self.view("alerts")["alerts"]
        code, text = self.command(status_command.status, contract=None, every=True, as_json=False)
        rows = overview["incidents"]
        for row in rows[:6]:
            assert f"{row['state_text']}  {row['contract']}: {row['headline']}" in text
        lasts = [row for row in rows if row["state"] == "broken" and not row["only_route_left"]]
        broken = [row for row in lasts if not row["went_away"]]  # or nothing shows it any more
        unproven = [row for row in rows if row["state"] == "unproven" or row["went_away"]]
        stray = [entry for entry in promotions if entry["seen_serving"]]
        fails = [cell for cell in verdicts if cell["status"] == "FAIL"]
        health = self.view("health")
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
        self.doctor_agrees(verdicts)
        self.alerts_list_agrees(alerts, unproven)
        self.metrics_agree(overview, verdicts)
        self.orders_are_shown(overview)
        self.routers_do_as_is_said()

    def nothing_that_was_measured_is_above_its_limit(self) -> None:
        town = self.town
        contained = {of.kernel_inference for of in town.core.incidents() if of.state is IncidentState.CONTAINED}
        for name, version in {(pod.contract, pod.version) for pod in town.pods if pod.version not in contained}:
            for slice in ("all", "prose"):
                seen = self.arrived(name, version, slice, 2.5 * STEP)
                last = [entry for entry in seen if entry[0] > town.now - STEP]
                drifts = min(mean_of(seen), mean_of(last)) > 5 * town.terms[name].limit  # the less, the longer it takes
                drifts = drifts and sum(tokens for _, tokens, _ in seen) >= 3000
                lumps = [at for pod in self.pods(name, version) for at in pod.lumps if at > town.now - 4 * WINDOW]
                assert lumps or not drifts, f"{version} is above its limit on {slice}, and status does not say it"

    def doctor_agrees(self, verdicts: list[dict[str, Any]]) -> None:
        health, served = self.view("health"), self.view("contracts")["contracts"]
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
        for row in overview["incidents"]:
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
        self._pass(34)
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
        story.a_kernel_version_drifts_on_all_requests(which="stable"),
        *(story.a_pod_is_killed(who=0) for _ in range(2)),
        story.a_long_time_passes(),
    ],
    "a run that ends in order, of which a recorder had died": lambda story: [
        story.a_pod_is_killed(who=0),
        story.a_kernel_version_drifts_on_all_requests(which="stable"),
        story.a_pod_shuts_down_in_order(who=0),
        story.seconds_pass(8),
    ],
    "pods that are redeployed while their kernel is routed away": lambda story: [
        story.a_kernel_version_drifts_on_all_requests(which="stable"),
        story.seconds_pass(8),
        *(story.a_pod_is_restarted_as_another_process(who=0, in_order=True) for _ in range(4)),
        story.seconds_pass(8),
    ],
    "a weak drift, mended": lambda story: [
        *(story.a_kernel_version_drifts_on_some_requests(task, "stable", 0.06, 1) for task in TASKS),
        story.seconds_pass(8),
        story.all_drift_is_mended_in_place(),
        story.a_person_decides("resume", "all", "train-kernel", None),
        story.seconds_pass(8),
    ],
    "a router without requests is cut off before a breach": lambda story: [
        story.a_router_starts(trusts=True),
        story.a_router_gets_no_requests_or_some_again(who=0),
        story.a_router_is_cut_off_or_returns(who=0, steps=2),
        story.a_kernel_version_drifts_on_all_requests(which="stable"),
        story.a_long_time_passes(),
    ],
    "a router that trusts no version, in an outage": lambda story: [
        story.a_router_starts(trusts=False),
        story.the_evaluator_is_killed_and_started_again(steps=30),
    ],
    "a roll-out of a version that drifts": lambda story: [
        story.a_roll_out_of_another_version_begins(drifts=True),
        story.the_version_is_approved(),
        story.the_version_is_approved(),
    ],
    "a roll-back that a router has not heard of": lambda story: [
        story.a_roll_out_of_another_version_begins(drifts=False),
        story.the_version_is_approved(),
        story.a_router_starts(trusts=True),
        story.a_router_gets_no_requests_or_some_again(who=1),
        story.a_router_is_cut_off_or_returns(who=1, steps=2),
        story.a_kernel_version_drifts_on_all_requests(which="candidate"),
        story.an_order_is_given_about_the_version(order="rollback"),
        story.the_roll_out_is_done_with(how="killed"),
        story.a_long_time_passes(),
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
