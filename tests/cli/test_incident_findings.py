"""`kc-otel locate run --incident` and `--follow`, `remedy --incident`: the answer is on the incident."""

from __future__ import annotations

import json
import os
import threading
import time
from contextlib import closing

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from kc_otel.cli import register
from kc_otel.cli.locate_follow import Follower, run_within
from kc_otel.contract.load import load_text
from kc_otel.judge.verdict import Cell, Evaluation, Status, Verdict
from kc_otel.serve.core import Core
from kc_otel.serve.store.state_file import open_state

CONTRACT = """\
apiVersion: kernel-contract/v1
kind: KernelContract
metadata: {name: planted, version: 1, owner: tests}
kernels: {train: {engine: torch}, inference: {engine: torch}}
slices: {code: {where: {task: code}}, prose: {where: {task: prose}}}
statistical:
  - {id: token-tv, metric: tv_token, limit: 0.01}
  - {id: tail, metric: abs_log_ratio, statistic: "fraction > 0.01", limit: 5%}
escalation: [{on: fail, do: [locate]}]
"""
KERNELS = """\
from tests.diagnose.planted_faults import FAULTS, Model, pair

train, infer = pair(FAULTS[2], 2)
same = pair(None, 0)[1]
shallow = Model()
del shallow.layers[3]
"""


def verdict(clause, slice, lower, status=Status.FAIL):
    cell = Cell("planted", clause, slice, "aaaaaaaaaaaa", "bbbbbbbbbbbb")
    numbers = (0.0, 0.01, lower * 1.1, lower, lower * 1.2, 4096)
    return Verdict(cell, status, *numbers, "short", "mixture betting", "why", 1, "0" * 64, "population")


@pytest.fixture
def core():
    """An evaluator whose contract is broken, most of all on all traffic, and next on code."""
    with closing(open_state(None)) as connection:
        found = Core([load_text(CONTRACT)], connection, external_url="", now=time.time())
        verdicts = (verdict("token-tv", "all", 0.09), verdict("token-tv", "code", 0.08), verdict("tail", "code", 0.05))
        found.evaluator.evaluate = lambda now: {"planted": Evaluation(now, verdicts)}
        found.tick(time.time())
        yield found


@pytest.fixture
def kc(core, tmp_path, monkeypatch, evaluator_is):
    """Runs a command beside that evaluator."""
    evaluator_is(core)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "contract.yaml").write_text(CONTRACT)
    app = typer.Typer()
    register(app, "locate", "remedy")
    return lambda *arguments: CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def locate(kc, tmp_path):
    """Runs locate on the planted fault."""
    pytest.importorskip("torch")
    from tests.diagnose.planted_faults import conversations

    (tmp_path / "kernels.py").write_text(KERNELS)
    rows = [
        {
            "prompt_ids": sequence.token_ids[: sequence.prompt_tokens],
            "token_ids": sequence.token_ids[sequence.prompt_tokens :],
            "attributes": {"task": "code" if index < 8 else "prose"},
        }
        for index, sequence in enumerate(conversations())
    ]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))

    def run(*options, infer="infer"):
        kernels = ("--train", "kernels.py:train", "--infer", f"kernels.py:{infer}", "--sequences", "rows.jsonl")
        return kc("locate", "run", "contract.yaml", *kernels, *options)

    return run


@pytest.mark.slow
def test_one_command_leads_from_an_incident_to_the_culprit_on_its_page(core, locate):
    """Slice and clause are those of its worst cell; the sentence names layer, tensor and share, and is evidence."""
    result = locate("--incident", "worst", "--by", "ada")
    assert result.exit_code == 1
    (incident,) = core.incidents()
    assert f"on incident {incident.id}: http://127.0.0.1:4320/#/incident/{incident.id}" in result.stderr
    (found,) = incident.diagnoses
    assert (found.kind, found.slice, found.by) == ("locate", "code", "ada")
    assert found.text == (
        "first divergence: layer 2, o_proj, module layers.2.o_proj; "
        "tensor layers.2.o_proj.weight differs by 2.48 %; 100 % [100, 100] of tv_token comes from o_proj in layer 2 "
        "(8 sequences of code, 99 % confidence)"
    )
    evidence = json.loads(core.evidence(incident.id, found.evidence))
    assert evidence["culprit"]["tensors"] == ["layers.2.o_proj.weight"]
    assert evidence["asked"]["inference"] == "kernels.py:infer"


@pytest.mark.slow
def test_where_nothing_is_found_the_incident_says_so(core, locate):
    """It saves the next person the same look."""
    assert locate("--incident", core.incidents()[0].id, infer="same").exit_code == 0
    (found,) = core.incidents()[0].diagnoses
    assert found.text == "no operator differs by more than noise on 8 sequences of code, 99 % confidence"


def test_an_incident_that_cannot_be_meant_is_refused_before_anything_runs(core, locate, tmp_path):
    """Of another contract, none at all, or nothing broken."""
    assert "no incident 'none'" in locate("--incident", "none").stderr
    other = tmp_path / "contract.yaml"
    other.write_text(CONTRACT.replace("name: planted", "name: other"))
    assert "is of contract planted, and this is other" in locate("--incident", core.incidents()[0].id).stderr
    assert "no contract 'other'; there are planted" in locate("--incident", "worst").stderr
    assert core.incidents()[0].diagnoses == ()


def test_a_remedy_of_rollouts_stands_on_the_incident_too(core, kc, tmp_path):
    """With the line to paste, or that there is none; before it the clause that no correction changes."""
    rng = np.random.default_rng(0)
    inference = rng.normal(-2.0, 0.5, (200, 20))
    np.savez(
        tmp_path / "rollouts.npz",
        train_logprobs=inference + rng.normal(0.0, 0.02, inference.shape),
        inference_logprobs=inference,
        task=np.array(["code"] * 200),
    )
    result = kc("remedy", "rollouts.npz", "--contract", "contract.yaml", "--trainer", "trl", "--incident", "worst")
    assert result.exit_code in {0, 1}, result.output
    (found,) = core.incidents()[0].diagnoses
    assert (found.kind, found.slice) == ("remedy", "code")
    assert found.text.startswith(
        "Beyond their limits, and no correction changes that: tail on all traffic 0.621, limit 0.05."
    )
    assert " change the kernel. trl: No correction keeps the contract. The closest is " in found.text


class Policy:
    """What a follower sees and does, without processes."""

    def __init__(self):
        self.asked, self.looked, self.failed = {}, [], []
        self.why = None
        self.found = [self.incident("a"), self.incident("b", on="no-data"), self.incident("c")]

    @staticmethod
    def incident(id, on="fail", until=None, diagnoses=()):
        return {"id": id, "on": on, "until": until, "headline": "tv is above its limit", "diagnoses": list(diagnoses)}

    def follower(self):
        def look(id):
            self.looked.append(id)
            return self.why

        return Follower(lambda: self.asked, lambda: self.found, look, lambda *said: self.failed.append(said))


def test_each_incident_is_looked_at_once_while_it_is_asked_for():
    """Not before, not what somebody has located, what is over or is silence; the most urgent first."""
    policy = Policy()
    follower = policy.follower()
    assert follower.step() is None
    policy.asked = {"code": "tv is above its limit"}
    policy.found[0]["diagnoses"] = [{"kind": "remedy"}]
    assert [follower.step() for _ in range(4)] == ["a", "c", None, None]
    policy.found = [policy.incident("d", until=5.0), policy.incident("e", diagnoses=[{"kind": "locate"}])]
    assert follower.step() is None
    assert policy.failed == []


def test_why_there_is_no_answer_is_on_the_incident_and_it_goes_on():
    """One attempt an incident: what could not be done once would only be tried for ever."""
    policy = Policy()
    policy.asked, policy.why = {"code": "why"}, "not located: kernels.py: is no Python file"
    follower = policy.follower()
    assert [follower.step() for _ in range(3)] == ["a", "c", None]
    assert policy.failed == [("a", policy.why), ("c", policy.why)]


def test_an_evaluator_that_is_gone_does_not_end_the_follower():
    """The API's client has said so; it is asked again."""
    policy, stop, asked = Policy(), threading.Event(), []

    class Patience(threading.Event):
        def wait(self, timeout=None):
            asked.append(timeout)
            if len(asked) == 3:
                self.set()
            return self.is_set()

    policy.asked, stop = {"code": "why"}, Patience()

    def gone():
        raise typer.Exit(2)

    Follower(lambda: policy.asked, gone, lambda _: None, lambda *_: None).run(stop, every=1.0)
    assert asked == [15.0, 1.0, 15.0, 1.0]


@pytest.mark.slow
def test_a_run_ends_with_its_budget_and_says_why_it_has_no_answer(tmp_path):
    """The whole process group; the last line of what it said otherwise."""
    (tmp_path / "slow.py").write_text("import time; print('began', flush=True); time.sleep(60)\n")
    contract = tmp_path / "contract.yaml"
    contract.write_text(CONTRACT)
    (tmp_path / "rows.jsonl").write_text('{"token_ids": [1, 2, 3], "attributes": {"task": "code"}}\n')
    command = ["locate", "run", str(contract), "--infer", "x.py:y", "--sequences", str(tmp_path / "rows.jsonl")]
    never, began = threading.Event(), time.monotonic()
    said = run_within([*command, f"--train={tmp_path / 'slow.py'}:kernel"], 5.0, never)
    assert said == "not located within its budget of 5s; give --budget more, or --limit less"
    assert time.monotonic() - began < 15
    said = run_within([*command, "--train=nowhere.py:kernel"], 60.0, never)
    assert said == "not located: nowhere.py: is no Python file; write FILE.py:NAME"
    assert os.getpriority(os.PRIO_PROCESS, 0) == 0
