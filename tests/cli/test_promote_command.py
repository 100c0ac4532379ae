"""`kc-otel promote`: what it prints, its exit codes, and the evidence that it saves."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import httpx
import pytest

from kc_otel.cli import promote_command
from kc_otel.judge.promotion.stages import Stage
from kc_otel.judge.recorders import KernelInfo
from kc_otel.serve.core import Core
from kc_otel.serve.store.state_file import open_state
from tests.tools.contracts import contract_of
from tests.tools.scripted import script

pytestmark = pytest.mark.slow

CONTRACT = contract_of(
    statistical=[{"id": "token-tv", "metric": "tv_token", "unit": "token", "limit": 0.02}],
    promotion={"windows": 1, "steps": ["5%"], "skip": ["offline-ci"]},
)


class Driven:
    """An evaluator in this process whose evaluations say what the test wants, a minute apart."""

    def __init__(self) -> None:
        self.connection = open_state(None)
        self.core = Core([CONTRACT], self.connection, external_url="", now=0.0)
        self.status, self.now, self.fails_after, self.ticks = "PASS", 1e10, None, 0
        script(self.core, lambda: {"v2": {"all": self.status}}, lambda: ["v2"])

    def tick(self, *_: object) -> None:
        if self.fails_after is not None:
            self.fails_after -= 1
            self.status = "FAIL" if self.fails_after < 0 else "PASS"
        self.ticks += 1
        assert self.ticks < 100, "a command waits for what does not come"
        self.now += 61.0
        self.core.tick(self.now)


@pytest.fixture
def driven(monkeypatch, evaluator_is):
    driven = Driven()
    evaluator_is(driven.core)
    monkeypatch.setattr(promote_command, "time", SimpleNamespace(sleep=driven.tick))
    yield driven
    driven.connection.close()


@pytest.fixture
def run(driven, command):  # noqa: ARG001 - it answers what is asked
    return command("promote", "gate")


def test_a_name_that_no_kernel_has_starts_nothing(run, driven):
    driven.core.evaluator.kernels = lambda _: (KernelInfo("inference", "9f1c2ab04d77", {"engine": "vllm"}, 1.0),)
    code, _, err = run("promote", "policy", "9f1c2ab04d78")
    assert code == 2
    assert "did you mean '9f1c2ab04d77'?" in err
    assert run("promote", "policy", "9f1c2ab04d77")[0] == 3
    for order in (["--start"], ["--hold"], ["--force", "full"], ["--rollback"]):
        code, _, err = run("promote", "policy", "9f1c2ab04d78", *order, "--why", "it breaks")
        assert (code, "did you mean '9f1c2ab04d77'?" in err) == (2, True)
    assert list(driven.core.promotions.all()) == []


@pytest.mark.parametrize("order", [("--hold", "--why", "the weekend"), ("--resume",), ("--approve", "full")], ids=str)
def test_an_order_about_a_promotion_starts_none(run, driven, order):
    """The version may serve every request, and a promotion would take it down to none."""
    code, _, err = run("promote", "policy", "v2", *order)
    assert (code, "kernel v2 is not in promotion under policy" in err) == (2, True)
    assert list(driven.core.promotions.all()) == []


def test_offline_ci_waits_for_a_gate_and_for_no_windows():
    found = {"kernel": "v2", "share": 0.0, "status": "running", "windows": 0, "windows_needed": 2, "failed_windows": 0}
    found |= {"missing": ["no evidence of the offline stage"], "elsewhere": "", "hold": None, "reason": "ada starts it"}
    found["missing"].append("0 of 2 consecutive windows have passed, each 1h long")
    passed = "; 0 of 2 windows have passed, each 1h long"
    for position, following, said in (("offline-ci", "shadow", ""), ("shadow", "full", passed)):
        lines = promote_command._lines(found | {"position": position, "next": following, "approved": ["full"]})
        waits = "  waits: no evidence of the offline stage"
        assert lines[1:] == [f"  next: {following}{said}", waits, "  approved by a person: full", "  ada starts it"]


def test_without_an_option_it_changes_nothing_and_says_where_it_is(run, driven):
    code, out, _ = run("promote", "policy", "v2")
    assert (code, out.splitlines()) == (
        3,
        [
            "v2 is not in promotion",
            "  no version is promoted to full, so no promotion limits it",
            "  to record it as the promoted version: kc-otel promote policy v2 --force full --why ...",
            "  --start takes it down to the share of its first stage: 0% of the requests in offline-ci and shadow",
            "  to start it: kc-otel promote policy v2 --start",
        ],
    )
    assert list(driven.core.promotions.all("policy")) == []
    code, out, _ = run("promote", "policy", "v2", "--start")
    assert (code, out.splitlines()[0]) == (0, "v2 is in shadow: it may serve 0% of the requests")
    driven.status = "INCONCLUSIVE"
    driven.tick()
    code, out, _ = run("promote", "policy", "v2")
    assert code == 3
    assert "  next: canary at 5%; 0 of 1 windows have passed" in out
    assert "  waits: token-tv on all: INCONCLUSIVE, between 0.01 and 0.03 against a limit of 0.02" in out
    driven.status = "FAIL"
    driven.tick()
    for _ in range(2):
        code, out, _ = run("promote", "policy", "v2")
        assert (code, out.splitlines()[0]) == (1, "v2 is rolled back and must serve nothing")
    assert "to start once more: kc-otel promote policy v2 --start" in out
    code, out, _ = run("promote", "policy", "v2", "--start")
    assert (code, "starts the promotion of v2 in shadow, attempt 2" in out) == (0, True)


def test_what_another_version_is_tried_on_is_left_out_of_what_a_version_may_serve(run, driven):
    driven.core.promotions.tell("policy", "v2", "force", "ada", "it is tried", 1.0, stage=Stage.CANARY, start=True)
    driven.core.evaluator.kernels = lambda _: (KernelInfo("inference", "v1", {"engine": "vllm"}, 1.0),)
    out = run("promote", "policy", "v1")[1]
    assert "so no promotion limits it, except that v2 may serve 5% of the requests\n" in out


def test_orders_are_taken_with_who_and_why(run, driven):
    """An order exits with 0; one that needs a reason is refused without, before anything is asked."""
    run("promote", "policy", "v2", "--start")
    assert "held by bob: lunch" in run("promote", "policy", "v2", "--hold", "--why", "lunch", "--by", "bob")[1]
    driven.tick()
    code, out, _ = run("promote", "policy", "v2")
    assert (code, "  waits: held: by bob: lunch" in out) == (3, True)
    code, out, _ = run("promote", "policy", "v2", "--resume")
    assert (code, "held" in out) == (0, False)
    for option in (("--hold",), ("--force", "full"), ("--rollback",)):
        code, _, err = run("promote", "policy", "v2", *option)
        assert (code, f"{option[0]}: say why with --why" in err) == (2, True)
    code, out, _ = run("promote", "policy", "v2", "--force", "full", "--why", "an incident", "--by", "bob")
    assert (code, "bob forces v2 on from shadow to full: an incident" in out) == (0, True)
    assert run("promote", "policy", "v2")[0] == 0
    assert run("promote", "policy", "v2", "--rollback", "--why", "it is the wrong one")[0] == 0
    assert run("promote", "policy", "v2")[0] == 1


def test_a_version_that_was_replaced_says_which_order_mends_it_and_gives_way_to_none(run, driven):
    driven.core.promotions.tell("policy", "v2", "force", "ada", "it serves", 1.0, stage=Stage.FULL, start=True)
    v3 = KernelInfo("inference", "v3", {"engine": "vllm", "dtype": "bfloat16"}, 1.0)
    driven.core.evaluator.kernels = lambda _: (v3,)
    code, out, _ = run("promote", "policy", "v3")
    assert (code, out.splitlines()[1:]) == (3, ["  to start it: kc-otel promote policy v3 --start"]), "v2 serves"
    driven.core.promotions.tell("policy", "v3", "force", "ada", "it is better", 2.0, stage=Stage.FULL, start=True)
    code, out, _ = run("promote", "policy", "v2")
    assert code == 1
    again = "kc-otel promote policy v2 --force full --why"
    assert out.splitlines() == [
        "v2 was replaced", "  v2 is replaced by v3", f"  to make it the promoted version again: {again} ...",
    ]  # fmt: skip
    code, out, _ = run(*again.split()[1:], "v3 is slow", "--by", "bob")
    assert (code, "bob forces v2 back to full: v3 is slow" in out) == (0, True)
    assert "v3 is replaced by v2" in run("promote", "policy", "v3")[1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--hold", "--resume"), "--hold and --resume: decide one thing at a time"),
        (("--evidence", "nowhere.json"), "--evidence: nowhere.json: cannot be read"),
        (("--approve", "full"), "the contract requires no approval for full; it requires approval for no stage"),
    ],
)
def test_what_cannot_be_meant_is_refused(run, arguments, said):
    run("promote", "policy", "v2", "--start")
    code, _, err = run("promote", "policy", "v2", *arguments)
    assert (code, said in err) == (2, True), err


def test_json_is_the_api_s_own_answer(run):
    _, out, _ = run("promote", "policy", "v2", "--start", "--json")
    assert json.loads(out)["position"] == "shadow"


def test_evidence_of_each_step_is_saved_and_verifies(run, driven, tmp_path):
    run("promote", "policy", "v2", "--start")
    driven.tick()
    driven.status = "FAIL"
    driven.tick()
    code, out, _ = run("promote", "policy", "v2", "--save", tmp_path / "evidence")
    files = sorted((tmp_path / "evidence").iterdir())
    assert [file.name for file in files] == [
        "0001-advance-from-shadow-to-canary-at-5.json",
        "0002-rollback-from-canary-at-5-to-offline-ci.json",
    ]
    assert (code, all(str(file) in out for file in files)) == (1, True)
    for file in files:
        assert run("gate", "verify", file)[0] == 0
    changed = json.loads(files[1].read_text())
    changed["step"]["by"] = "nobody"
    files[1].write_text(json.dumps(changed))
    assert run("gate", "verify", files[1])[0] == 1


def test_evidence_is_saved_as_it_is(run, driven, tmp_path, monkeypatch):
    run("promote", "policy", "v2", "--start")
    driven.tick()
    kept = driven.core.promotions.evidence
    text = "two\nlines \x1b[31m"
    monkeypatch.setattr(
        driven.core.promotions,
        "evidence",
        lambda *of: [replace(entry, record={**entry.record, "text": text}) for entry in kept(*of)],
    )
    run("promote", "policy", "v2", "--save", tmp_path / "evidence")
    (file,) = (tmp_path / "evidence").iterdir()
    assert json.loads(file.read_text())["text"] == text


def test_watch_prints_every_step(run):
    code, out, _ = run("promote", "policy", "v2", "--start", "--watch")
    assert code == 0, out
    assert "v2 goes on from shadow to canary at 5%: a window has passed" in out
    assert "v2 goes on from canary at 5% to full: a window has passed" in out


@pytest.mark.parametrize("answer", [None, 503])
def test_watch_outlasts_a_restart_and_tells_a_later_rollback(run, driven, monkeypatch, answer):
    asked, driven.fails_after = httpx.request, 1

    def restarting(method, url, **more):
        if driven.ticks in {1, 2} and answer is None:
            raise httpx.ConnectError("refused")
        return httpx.Response(answer, text="starting") if driven.ticks in {1, 2} else asked(method, url, **more)

    monkeypatch.setattr(httpx, "request", restarting)
    code, out, _ = run("promote", "policy", "v2", "--start", "--watch")
    assert (code, out.count("no evaluator answers at")) == (1, 1), out
    assert "v2 is rolled back from canary at 5%: token-tv on all: FAIL" in out
