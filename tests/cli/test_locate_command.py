"""`kc-otel locate`, and findings on incidents."""

from __future__ import annotations

import json
import os
import threading
import time
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
import typer

from kc_otel.cli.locate_command import follow_incidents, run_within
from kc_otel.contract.load import load_text
from kc_otel.judge.verdict import Cell, Evaluation, Status, Verdict
from kc_otel.serve.core import Core
from kc_otel.serve.store.state_file import open_state
from tests.cli.conftest import PLANTED

pytest.importorskip("torch")

from kc_otel.diagnose import torch_locate
from kc_otel.diagnose.above_noise import boundary_drift
from kc_otel.diagnose.boundaries import Boundary
from tests.diagnose.test_above_noise import located, measured


@pytest.mark.slow
def test_the_culprit_has_a_layer_a_tensor_and_a_share(locate):
    code, out, _ = locate("--slice", "code")
    assert code == 1
    assert "culprit: layer 2, o_proj, module layers.2.o_proj" in out
    assert "tensor layers.2.o_proj.weight differs by" in out
    assert "100 % [100, 100] of tv_token on code comes from o_proj in layer 2" in out
    assert "slice code: 8 sequences" in out


@pytest.mark.slow
def test_evidence_is_json(locate):
    found = json.loads(locate("--json", "--clause", "tail")[1])
    assert found["culprit"]["boundary"] == {"layer": 2, "operator": "o_proj", "part": 0}
    assert found["metric"] == "tokens with |log ratio| above 0.01"
    assert [row["boundary"]["operator"] for row in found["boundaries"] if row["is_above"]] == ["o_proj"]


@pytest.mark.slow
def test_equal_kernels_have_no_culprit(locate):
    code, out, _ = locate(infer="same")
    assert (code, "no culprit: no boundary is above noise" in out) == (0, True)


def test_the_undecided_has_an_exit_code_of_its_own(locate, monkeypatch):
    """3: too few sequences to tell are neither a culprit nor none."""
    family = {Boundary(i, "kv_cache"): measured(np.full(4, 0.0 if i else 13.0)) for i in range(360)}
    monkeypatch.setattr(torch_locate, "locate", lambda *_, **__: located(boundary_drift(family, 0.005)))
    code, out, _ = locate()
    assert (code, "undecided: layer 0, kv_cache differs by" in out) == (3, True)


@pytest.mark.parametrize(("spread", "lag"), [(0.0, {}), (0.2, {}), (0.2, {"lag": 0})], ids=str)
def test_a_drift_of_the_recording_that_the_programs_lack_is_told(locate, tmp_path, monkeypatch, spread, lag):
    """Also where it is unknown of some sequences which weights sampled them."""
    clean = located(boundary_drift({Boundary(0, "o_proj"): measured(np.zeros(12))}, 0.005))
    monkeypatch.setattr(torch_locate, "locate", lambda *_, **__: clean)
    rng, rows = np.random.default_rng(0), []
    for _ in range(300):
        inference = np.log(rng.uniform(0.05, 0.4, 20))
        train = inference + spread * rng.standard_normal(20) - spread**2 / 2
        rows.append({"token_ids": rng.integers(0, 128, 20).tolist(), "task": "code", "train_logprobs": train.tolist(),
                     "inference_logprobs": inference.tolist()} | (lag if len(rows) % 2 else {}))  # fmt: skip
    (tmp_path / "code.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, out, _ = locate("--slice", "code")
    assert code == 0
    said = "note: these two programs show no cause of the recording's drift of 0."
    assert (said in out, "no culprit" in out) == (spread > 0, True)


def test_an_operator_that_no_sequence_reached_is_no_all_clear(locate, monkeypatch):
    clean = located(boundary_drift({Boundary(0, "o_proj"): measured(np.zeros(12))}, 0.005))
    answer = replace(clean, unreached=(Boundary(0, "k_proj"),))
    monkeypatch.setattr(torch_locate, "locate", lambda *_, **__: answer)
    code, out, _ = locate()
    assert (code, "no sequence reached these operators of both kernels: k_proj in layer 0" in out) == (3, True)


@pytest.mark.parametrize(
    ("options", "infer", "said"),
    [
        ((), "other", "have nothing to do with each other"),
        ((), "shallow", "the training kernel has 4 layers and the inference kernel 3"),
        ((), "number", "kernels.py:number: is int, not a torch module"),
        ((), "absent", "kernels.py: has no 'absent'"),
        (("--slice", "tables"), "infer", "'tables' is not a slice of the contract; there are all, code, prose"),
        (("--clause", "x"), "infer", "'x' is not in the contract; there are token-tv, tail"),
        (("--precision", "fp17"), "infer", "'fp17' is no number format of torch"),
    ],
)
def test_what_cannot_be_compared_is_refused_with_the_reason(locate, options, infer, said):
    code, _, err = locate(*options, infer=infer)
    assert (code, said in err) == (2, True)


def test_a_folder_that_is_not_there_is_no_mistyped_program(planted, command):  # noqa: ARG001 - files
    kernels = ("--train", "chekpoint", "--infer", "kernels.py:infer", "--sequences", "code.jsonl")
    code, _, err = command("locate")("locate", "run", "contract.yaml", *kernels)
    said = "chekpoint: is neither a whole capture, nor a checkpoint's folder, nor FILE.py:NAME"
    assert (code, said in err) == (2, True)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"token_ids": [1, -2]}', "code.jsonl:1: token_ids: is no list of whole numbers from 0"),
        ('{"token_ids": [1, 9999]}', "sequence 0: token 9999 is beyond the vocabulary of 128"),
    ],
)
def test_sequences_that_cannot_be_used_are_refused(locate, tmp_path, line, said):
    (tmp_path / "code.jsonl").write_text(f"{line}\n" * 8)
    code, _, err = locate()
    assert (code, said in err) == (2, True)


def verdict(clause, slice, lower, status=Status.FAIL):
    cell = Cell("planted", clause, slice, "aaaaaaaaaaaa", "bbbbbbbbbbbb")
    numbers = (0.0, 0.01, lower * 1.1, lower, lower * 1.2, 4096)
    return Verdict(cell, status, *numbers, "short", "mixture betting", "why", 1, "0" * 64, "population")


@pytest.fixture
def core():
    """An evaluator whose contract is broken, most of all on all traffic, and next on code."""
    with closing(open_state(None)) as connection:
        found = Core([load_text(PLANTED)], connection, external_url="", now=time.time())
        verdicts = (verdict("token-tv", "all", 0.09), verdict("token-tv", "code", 0.08), verdict("tail", "code", 0.05))
        found.evaluator.evaluate = lambda now, *_: {"planted": Evaluation(now, verdicts)}
        found.tick(time.time())
        yield found


@pytest.fixture
def answered(core, evaluator_is):
    evaluator_is(core)


@pytest.mark.slow
@pytest.mark.usefixtures("answered")
def test_one_command_leads_from_an_incident_to_the_culprit_on_its_page(core, locate):
    code, _, err = locate("--incident", "worst", "--by", "ada")
    assert code == 1
    (incident,) = core.incidents()
    assert f"on incident {incident.id}: http://127.0.0.1:4320/#/incident/{incident.id}" in err
    (found,) = incident.diagnoses
    assert (found.kind, found.slice, found.by) == ("locate", "code", "ada")
    assert found.text == (
        "first divergence: layer 2, o_proj, module layers.2.o_proj; "
        "tensor layers.2.o_proj.weight differs by 2.48 %; 100 % [100, 100] of tv_token comes from o_proj in layer 2 "
        "(8 sequences of code, 99 % confidence)"
    )
    evidence = json.loads(core.past.evidence(incident.id, found.evidence))
    assert evidence["culprit"]["tensors"] == ["layers.2.o_proj.weight"]
    assert evidence["asked"]["inference"] == "kernels.py:infer"


@pytest.mark.slow
@pytest.mark.usefixtures("answered")
def test_where_nothing_is_found_the_incident_says_so(core, locate):
    assert locate("--incident", core.incidents()[0].id, infer="same")[0] == 0
    (found,) = core.incidents()[0].diagnoses
    assert found.text == (
        "no operator differs by more than noise on 8 sequences of code, 99 % confidence: these two programs show no "
        "cause of the drift"
    )


@pytest.mark.usefixtures("answered")
def test_an_incident_that_cannot_be_meant_is_refused_before_anything_runs(core, locate, tmp_path):
    assert "no incident 'none'" in locate("--incident", "none")[2]
    other = tmp_path / "contract.yaml"
    other.write_text(PLANTED.replace("name: planted", "name: other"))
    assert "is of contract planted, and this is other" in locate("--incident", core.incidents()[0].id)[2]
    assert "no contract 'other'; there are planted" in locate("--incident", "worst")[2]
    assert core.incidents()[0].diagnoses == ()


@pytest.mark.usefixtures("answered", "planted")
def test_a_remedy_of_rollouts_stands_on_the_incident_too(core, command, tmp_path):
    rng = np.random.default_rng(0)
    inference = rng.normal(-2.0, 0.5, (200, 20))
    train, task = inference + rng.normal(0.0, 0.02, inference.shape), np.array(["code"] * 200)
    np.savez(tmp_path / "rollouts.npz", train_logprobs=train, inference_logprobs=inference, task=task)
    options = ("--contract", "contract.yaml", "--trainer", "trl", "--incident", "worst")
    assert command("remedy")("rollouts.npz", *options)[0] in {0, 1}
    (found,) = core.incidents()[0].diagnoses
    assert (found.kind, found.slice) == ("remedy", "code")
    assert found.text.startswith(
        "Beyond their limits, and no correction changes that: tail on all traffic 0.621, limit 0.05."
    )
    assert " change the kernel. No whole sequence of this recording is in prose: no correction is " in found.text
    assert " trl: No correction is known to keep the contract. The closest is " in found.text


class Stop(threading.Event):
    """Is set after so many waits, of which it keeps how long they were to be."""

    def __init__(self, waits, meanwhile=lambda _: None):
        super().__init__()
        self.waited, self._most, self._meanwhile = [], waits, meanwhile

    def wait(self, timeout=None):
        self.waited.append(timeout)
        self._meanwhile(len(self.waited))
        if len(self.waited) == self._most:
            self.set()
        return self.is_set()


def incident(id, on="fail", until=None, diagnoses=()):
    return {"id": id, "on": on, "until": until, "headline": "tv is above its limit", "diagnoses": list(diagnoses)}


FOUND = [incident("a", diagnoses=[{"kind": "remedy"}]), incident("b", on="no-data"), incident("c")]


def test_each_incident_is_looked_at_once_while_it_is_asked_for():
    """Whatever is over or located already is left alone."""
    asked, looked, failed = {}, [], []
    found = [*FOUND, incident("d", until=5.0), incident("e", diagnoses=[{"kind": "locate"}])]
    stop = Stop(6, lambda waited: asked.update(code="why") if waited == 2 else looked.append(waited))
    follow_incidents(lambda: asked, lambda: found, looked.append, lambda *said: failed.append(said), stop)
    assert looked == [1, "a", 3, "c", 4, 5, 6]
    assert failed == []


def test_why_there_is_no_answer_is_on_the_incident_and_it_goes_on():
    """One attempt an incident: what could not be done once would only be tried for ever."""
    failed = []
    follow_incidents(
        lambda: {"code": "why"}, lambda: FOUND, lambda _: "not located", lambda *said: failed.append(said), Stop(4)
    )
    assert failed == [("a", "not located"), ("c", "not located")]


def test_an_evaluator_that_is_gone_does_not_end_the_follower():
    def gone():
        raise typer.Exit(2)

    stop = Stop(3)
    follow_incidents(lambda: {"code": "why"}, gone, lambda _: None, lambda *_: None, stop)
    assert stop.waited == [15.0, 2.0, 15.0, 2.0]


@pytest.mark.slow
def test_a_run_ends_with_its_budget_and_says_why_it_has_no_answer(tmp_path):
    """The whole process group; the last line of what it said otherwise."""
    (tmp_path / "slow.py").write_text("import time; print('began', flush=True); time.sleep(60)\n")
    contract = tmp_path / "contract.yaml"
    contract.write_text(PLANTED)
    (tmp_path / "rows.jsonl").write_text('{"token_ids": [1, 2, 3], "attributes": {"task": "code"}}\n')
    command = ["locate", "run", str(contract), "--infer", "x.py:y", "--sequences", str(tmp_path / "rows.jsonl")]
    never, began = threading.Event(), time.monotonic()
    said = run_within([*command, f"--train={tmp_path / 'slow.py'}:kernel"], 5.0, never)
    assert said == "not located within its budget of 5s; give --budget more, or --limit less"
    assert time.monotonic() - began < 15
    said = run_within([*command, "--train=nowhere.py:kernel"], 60.0, never)
    assert said == "not located: nowhere.py: is no Python file; write FILE.py:NAME"
    assert os.getpriority(os.PRIO_PROCESS, 0) == 0
