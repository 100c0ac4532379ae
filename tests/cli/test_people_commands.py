"""`kc-otel alerts list`, `ack`, `silence`, `pin` and their ends, against the evaluator's real API."""

from __future__ import annotations

import time
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import UTC, datetime

import httpx
import pytest
import typer

from kc_otel.cli import api_client
from kc_otel.cli.terminal import local_time
from kc_otel.contract.load import load_text
from kc_otel.judge.escalation.webhook_body import encode
from kc_otel.judge.recorders import KernelInfo
from kc_otel.judge.verdict import Cell, Evaluation, Status, Verdict
from kc_otel.serve.core import Core
from kc_otel.serve.store.state_file import open_state
from tests.tools.api import client_of
from tests.tools.fleet import Fleet, closed_by_a_person

CONTRACT = """\
apiVersion: kernel-contract/v1
kind: KernelContract
metadata: {name: policy, version: 1, owner: tests}
kernels: {train: {engine: torch}, inference: {engine: vllm}}
slices: {code: {where: {task: code}}}
statistical: [{id: token-tv, metric: tv_token, unit: token, limit: 0.02}]
escalation: [{on: fail, severity: critical, do: [{route: train-kernel}, {webhook: pager}]}]
"""
VERDICT = Verdict(
    Cell("policy", "token-tv", "code", "aaaaaaaaaaaa", "bbbbbbbbbbbb"), Status.FAIL, 0.0, 0.02, 0.05, 0.04, 0.06, 4096,
    "short", "mixture betting", "lower bound 0.04 > limit 0.02", 1, "0" * 64, "population",
)  # fmt: skip


@pytest.fixture
def running(command, evaluator_is):
    """A core of contracts with one cell each, and what runs a command against it: its exit code and output."""

    @contextmanager
    def run_against(**verdicts):
        texts = (CONTRACT.replace("name: policy", f"name: {name}") for name in verdicts)
        with closing(open_state(None)) as connection:
            core = Core([load_text(text) for text in texts], connection, external_url="", now=time.time())
            core.evaluator.evaluate = lambda now, *_: {
                name: Evaluation(now, (found,)) for name, found in verdicts.items()
            }
            core.tick(time.time())
            evaluator_is(core)
            kc_otel = command("events", "alerts", "route", "status")

            def run(*arguments):
                code, out, err = kc_otel(*arguments, width=300)
                return code, out + err

            run.core = core
            yield run

    return run_against


@pytest.fixture
def kc(running):
    """Runs a command against a core whose one slice is broken; returns its exit code and output."""
    with running(policy=VERDICT) as run:
        yield run


@pytest.mark.slow
def test_the_status_of_one_contract_is_that_ones_only(running):
    healthy = replace(VERDICT, cell=VERDICT.cell._replace(contract="other"), status=Status.PASS, lower=0.0, upper=0.01)
    with running(policy=VERDICT, other=healthy) as kc:
        assert kc("alerts", "silence", "policy", "--for", "1h", "--why", "looking")[0] == 0
        code, shown = kc("status")
        assert code == 1
        for said in ("policy   inference kernel", "other   inference kernel", "route  policy: code", "silence  policy"):
            assert said in shown
        code, shown = kc("status", "--contract", "other")
        assert code == 0
        assert "policy" not in shown
        assert "other   inference kernel" in shown
        assert kc("status", "--contract", "policy")[0] == 1


@pytest.mark.slow
def test_a_list_of_alerts_counts_no_message_that_waits_as_delivered(kc):
    (incident,), (first,) = kc.core.escalation.incidents["policy"], kc.core.outbox.due(time.time())
    kc.core.outbox.answered(first.id, 0.0, 204)
    for _ in range(9):
        kc.core.outbox.enqueue("pager", "policy", encode({"incident": {"id": incident.id}}), time.time())
    shown = kc("alerts", "list")[1]
    assert "9 messages to pager wait" in shown
    assert "notified" not in shown


@pytest.mark.slow
def test_an_alert_is_listed_and_acknowledged(kc):
    code, shown = kc("alerts", "list")
    assert code == 1
    assert "firing   critical policy: token-tv on code (fail)" in shown
    assert kc("alerts", "ack", "policy", "--slice", "code", "--why", "looking")[1].startswith("1 alert acknowledged: ")
    assert "acknowledged by ada: looking" in kc("alerts", "list")[1]
    assert "ada is at work on token-tv on code (looking)" in kc("status")[1]
    assert "acknowledged  policy: ada acknowledged token-tv on code: looking" in kc("events")[1]
    assert "; due: " in (shown := kc("events")[1])
    assert "route:train-kernel" in shown
    assert kc("alerts", "ack", "policy", "--slice", "code", "--why", "my shift", "--by", "bob")[0] == 0
    assert "bob acknowledged token-tv on code, and took over from ada: my shift" in kc("events")[1]
    assert "acknowledged by bob: my shift" in (listed := kc("alerts", "list")[1])
    assert "by ada" not in listed
    code, shown = kc("alerts", "ack", "policy", "--slice", "code", "--why", "again", "--by", "bob")
    assert code != 0
    assert "acknowledged already, by bob" in shown


@pytest.mark.slow
def test_a_silence_is_made_and_ended(kc):
    code, shown = kc("alerts", "silence", "policy", "--slice", "code", "--for", "2h", "--why", "planned")
    assert code == 0
    (silence,) = kc.core.people.silences
    assert shown.startswith(f"silence {silence.id} until ")
    assert 7190 < silence.until - time.time() <= 7200
    assert f"silenced ({silence.id})" in kc("alerts", "list")[1]
    until = datetime.fromtimestamp(silence.until, tz=UTC).astimezone()
    said = f"silence {silence.id}  every clause of policy on slice code until {until:%Y-%m-%d %H:%M:%S %Z}, ada: "
    assert said in kc("alerts", "list")[1]
    said = f"every clause on slice code is silenced by ada (planned), until {until:%Y-%m-%d %H:%M %Z}"
    assert said in " ".join(kc("status")[1].split())
    assert kc("alerts", "unsilence", silence.id, "--why", "done", "--by", "bob")[0] == 0
    assert kc.core.people.silences == ()
    assert "bob ended the silence of every clause on slice code by ada: done" in kc("events")[1]


@pytest.mark.parametrize("lasting", ["2", "-1h", "0s", "soon"])
def test_a_silence_that_lasts_no_time_is_refused(kc, lasting):
    code, shown = kc("alerts", "silence", "policy", "--for", lasting, "--why", "planned")
    assert code == 2
    assert "2h" in shown or "30s" in shown
    assert kc.core.people.silences == ()


@pytest.mark.slow
def test_a_slice_is_pinned_and_unpinned(kc):
    assert (
        "all is pinned to train-kernel until it is unpinned"
        in kc("route", "pin", "policy", "train-kernel", "--why", "x")[1]
    )
    code, shown = kc("route", "pin", "policy", "inference-kernel", "--slice", "code", "--for", "1h", "--why", "a test")
    assert code == 0
    assert "code is pinned to inference-kernel until 2" in shown
    assert {pin.slice for pin in kc.core.decisions.pins} == {"all", "code"}
    assert "code is pinned to the inference kernel by ada (a test)" in kc("status")[1]
    assert kc("route", "unpin", "policy", "--slice", "code", "--why", "done")[1].startswith("pins ended: 1;")
    assert kc("route", "pin", "policy", "fp8", "--why", "x")[0] == 2
    assert "ada ended the pin of slice code: done" in kc("events", "--newest", "1")[1]


@pytest.mark.slow
def test_a_route_is_lifted_with_a_reason_once(kc):
    """The alert fires on, and orders no route before it fires anew."""
    lifted = ("route", "resume", "policy", "--slice", "code", "--why", "patched")
    metrics = client_of(kc.core)

    def ordered() -> list[bool]:
        return ["route:train-kernel" in text for text in (kc("alerts", "list")[1], metrics.get("/metrics").text)]

    assert ordered() == [True, True]
    code, shown = kc(*lifted)
    assert (code, shown.startswith("routes lifted: 1;")) == (0, True)
    assert kc.core.decisions.routes == ()
    assert ordered() == [False, False]
    assert "ada resumed" in kc("events")[1]
    code, shown = kc(*lifted)
    assert code != 0
    assert "no route is in force" in shown


def test_without_an_evaluator_the_remedy_is_named(command):
    code, _, err = command("alerts", "status")("status", "--url", "http://127.0.0.1:9", width=300)
    assert code == 2
    assert "start one with `kc-otel serve CONTRACT...`" in err


def test_a_contract_that_is_not_served_is_an_error_of_every_list(kc):
    """A misspelt name is not a contract without trouble."""
    for words in (["status"], ["alerts", "list"], ["events"]):
        code, said = kc(*words, "--contract", "polcy")
        assert (code, "404: no contract 'polcy'; there are policy" in said) == (2, True), words


def test_an_end_that_is_the_same_for_each_step_of_the_ladder_is_one_line(command, monkeypatch):
    ends = [
        {"at": 1.0, "kind": "resolved", "contract": "policy", "message": f"policy: token-tv on {slice} is closed"}
        for slice in ("code", "code", "prose")
    ]
    monkeypatch.setattr("kc_otel.cli.people_commands.get", lambda *_, **__: {"events": ends})
    shown = command("events", "route")("events")[1]
    assert [line.rpartition(" on ")[2] for line in shown.splitlines()] == ["code is closed", "prose is closed"]


@pytest.mark.slow
def test_what_nobody_judges_any_more_is_no_all_clear(running):
    """Verdicts that stand where they stood are told as such, with what fails, and are not exit code 0."""
    passing = replace(VERDICT, status=Status.PASS)
    with running(policy=passing) as run:
        core = run.core
        assert [run(*words)[0] for words in (["status"], ["alerts", "list"])] == [0, 0]
        core.evaluated_at = time.time() - 3 * 3600
        core.evaluator.faults.report("", "evaluation", {"all contracts": ValueError("x")})
        for words in (["status"], ["alerts", "list"]):
            code, said = run(*words)
            fault = "evaluation fails for all contracts: ValueError: x"
            assert (code, said.splitlines()[0]) == (
                3, f"nothing has been judged for 3 h: all contracts: {fault}",
            )  # fmt: skip
        core.evaluated_at = None
        assert run("status")[1].startswith("nothing has been judged yet")


def test_an_evaluator_that_fails_and_an_endpoint_that_is_sent_nothing_are_no_all_clear(running):
    with running(policy=replace(VERDICT, status=Status.PASS)) as run:
        core = run.core
        message = core.outbox.enqueue("pager", "policy", b"{}", 0.0)
        core.outbox.answered(message, 0.0, 410, "HTTP 410")
        for words in (["status"], ["alerts", "list"]):
            code, said = run(*words)
            assert code == 3
            assert said.splitlines()[0] == (
                f"webhooks to pager are disabled since {local_time(0.0)} (HTTP 410), and 1 wait; once it accepts them, "
                "change its credential file or restart the evaluator"
            )
        core.outbox.enable("pager")
        assert run("status")[0] == 0
        core.evaluator.faults.report("", "writing the state", {"all contracts": OSError("no space")})
        code, said = run("status")
        assert (code, said.splitlines()[0]) == (
            3, "all contracts: writing the state fails for all contracts: OSError: no space",
        )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("do", ["do: [{webhook: pager}]", "do: [{route: train-kernel}, {webhook: pager}]"])
def test_a_breach_that_went_away_without_proof_is_listed_and_closed(command, evaluator_is, tmp_path, do):
    """Also while the route of it remains, which no router has applied."""
    fleet = Fleet(tmp_path / "state.sqlite", do)
    fleet.breach()
    fleet.run(200, healthy=0.001)
    evaluator_is(fleet.core)
    run = command("alerts", "status")
    code, out, _ = run("alerts", "list", width=300)
    assert code == 3
    assert "unproven  policy: token-tv " in out
    assert "close the incident with kc-otel alerts ack policy --close --why ..." in run("status", width=300)[1]
    code, out, _ = run("alerts", "ack", "policy", "--close", "--why", "it was killed")
    assert (code, out.split(":")[0]) == (0, "1 incident closed without proof of recovery")
    closed_by_a_person(fleet)  # by the fleet's clock
    fleet.run(10, healthy=0.001)
    remains = "it was closed without proof of recovery, and the route ordered at " in run("status", width=300)[1]
    assert remains is ("route" in do)
    assert [incident.went_away for incident in fleet.core.incidents()] == [False] * remains


def test_a_kernel_that_is_not_what_was_declared_is_in_the_status(kc):
    reported = {"engine": "sglang", "dtype": "bfloat16"}
    kc.core.evaluator.kernels = lambda _: (KernelInfo("inference", "bb", reported, time.time()),)
    said = "engine vllm is declared, and sglang reported"
    assert f"policy, sglang bfloat16 (bb): {said}" in kc("status")[1]
    (contract,) = api_client.get("http://evaluator", "/api/v1/contracts")["contracts"]
    assert [kernel["otherwise"] for kernel in contract["kernels"]] == [[said]]


def test_a_reason_in_another_encoding_is_refused_with_the_remedy(capsys):
    """Bytes that are no UTF-8 reach Python as lone surrogates, which no JSON has."""
    with pytest.raises(typer.Exit) as ended:
        api_client.post("http://127.0.0.1:9", "/api/v1/pins", {"why": b"gepr\xfcft".decode(errors="surrogateescape")})
    assert ended.value.exit_code == 2
    assert "LANG=C.UTF-8" in capsys.readouterr().err


def test_an_answer_that_is_no_evaluators_is_refused(capsys, monkeypatch):
    """A page of a proxy that asks for a login, or nothing at all, with status 200: no exit code that is a verdict."""
    for answer in (b"<html>log in</html>", b""):
        response = httpx.Response(200, content=answer)
        monkeypatch.setattr(api_client.httpx, "request", lambda *_, response=response, **__: response)
        with pytest.raises(typer.Exit) as ended:
            api_client.get("http://evaluator", "/api/v1/overview")
        assert ended.value.exit_code == 2
        assert "the answer is not an evaluator's" in capsys.readouterr().err
