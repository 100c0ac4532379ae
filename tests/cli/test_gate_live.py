"""`kc-otel gate live`: two live endpoints: a verdict whose truth is known, and every way in which there is none."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import pytest

from kc_otel.recordings.recording_files import load_recording
from tests.tools.completions import completions, table
from tests.tools.contracts import contract_text

COMMANDS = ("gate",)

pytestmark = pytest.mark.slow

CONTRACT = contract_text(
    slices={task: {"where": {"task": task}} for task in ("code", "prose")},
    statistical=[{"id": "token-tv", "metric": "tv_token", "unit": "token", "limit": 0.02}],
    runtime=[{"id": "lag", "metric": "weights_lag", "limit": 1}],
    observability={"min_samples": 500},
)
PROMPTS, TOKENS = 60, 80


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for side in ("INFERENCE", "TRAIN"):
        monkeypatch.delenv(f"KC_OTEL_{side}_API_KEY", raising=False)
    (tmp_path / "policy.yaml").write_text(CONTRACT)
    tasks = ("code", "prose")
    rows = [{"prompt": f"prompt {i}", "task": tasks[i % 2]} for i in range(PROMPTS)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


@pytest.fixture
def endpoints():
    """Starts two servers: `endpoints(drift=..., inference={...}, train={...})`."""
    with ExitStack() as stack:

        def start(*, drift=0.0, inference=None, train=None):
            sampler = stack.enter_context(completions(table(), **(inference or {})))
            return sampler, stack.enter_context(completions(table(drift=drift), **(train or {})))

        yield start


def asked(inference, train, *more):
    urls = (getattr(side, "address", side) for side in (inference, train))
    where = [part for pair in zip(("--inference-url", "--train-url"), urls, strict=True) for part in pair]
    options = ("--prompts", "prompts.jsonl", "--max-tokens", TOKENS, "--require", "token-tv")
    return ("gate", "live", "policy.yaml", *where, *options, *more)


def test_the_same_model_on_both_sides_advances(run, endpoints, folder):
    code, out, err = run(*asked(*endpoints(), "--evidence", "gate", "--all"))
    assert code == 0, err
    assert out.startswith("advance: vllm ")
    assert "both sides have the same number at every token" in out
    assert f"recording: gate/recording.npz ({PROMPTS} completions, {PROMPTS * TOKENS:,} tokens)" in err
    assert run("gate", "verify", "gate", "--recordings", "gate")[0] == 0
    recording = load_recording(folder / "gate" / "recording.npz")
    assert [attributes["task"] for attributes in recording.attributes[:2]] == ["code", "prose"]


def test_another_model_rolls_back_and_the_recording_can_be_judged_again(run, endpoints):
    code, out, err = run(*asked(*endpoints(drift=0.5), "--record", "made/log.npz"))
    assert code == 1, err
    assert "FAIL token-tv on all traffic: lower bound" in out
    again = run("gate", "run", "policy.yaml", "made/log.npz", "--require", "token-tv", "--sequential")
    assert again[:2] == (code, out)


@pytest.mark.parametrize(("drift", "outcome"), [(0.0, 0), (0.5, 1)])
def test_no_more_is_asked_than_it_takes_to_decide(run, endpoints, folder, drift, outcome):
    rows = [{"prompt": f"prompt {i}", "task": ("code", "prose")[i % 2]} for i in range(10 * PROMPTS)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sampler, scorer = endpoints(drift=drift)
    code, out, err = run(*asked(sampler, scorer, "--evidence", "gate"))
    assert code == outcome, err
    kept = load_recording(folder / "gate" / "recording.npz").lengths.size
    assert kept in (20, 25, 32, 40, 50, 63)
    assert f"decided after {kept} of {10 * PROMPTS} completions" in err
    assert sum(path.endswith("completions") for path, *_ in sampler.requests) == kept
    assert "bounds hold at every number of sequences at once" in out
    assert run("gate", "verify", "gate", "--recordings", "gate")[0] == 0
    whole = run(*asked(*endpoints(drift=drift), "--record", "whole.npz", "--all"))
    assert whole[0] == outcome
    assert "decided after" not in whole[2]


def test_without_a_place_the_recording_is_kept_and_named(run, endpoints, folder, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    code, _, err = run(*asked(*endpoints()))
    assert code == 0
    path = Path(err.partition("recording: ")[2].partition(" (")[0])
    assert (path.parent.parent, path.exists()) == (folder, True)


def test_progress_is_shown_beside_the_result(run, endpoints, monkeypatch):
    monkeypatch.setattr("kc_otel.recordings.endpoints.endpoint_recording._PROGRESS_SECONDS", 0.0)
    code, out, err = run(*asked(*endpoints(), "--all"))
    assert code == 0
    assert err.startswith("sampling from tiny at the inference endpoint http://127.0.0.1:")
    assert f"  {PROMPTS} of {PROMPTS} completions, " in err
    assert "completions" not in out


def test_several_samples_and_evidence_in_one_file(run, endpoints):
    code, _, err = run(*asked(*endpoints(), "--samples", 2, "--evidence", "gate/e.json", "--all"))
    assert code == 0
    assert f"recording: gate/e.npz ({2 * PROMPTS} completions" in err


def test_prompts_that_were_not_answered_leave_no_verdict(run, endpoints):
    """The rest would have passed; it is kept, and can be judged by whoever knows why those are missing."""

    def too_long(_path, body, right):
        if body.get("prompt") in {"prompt 7", "prompt 8"}:
            return {"error": {"message": "maximum context length is 6"}}, 400, {}
        return right, 200, {}

    code, out, err = run(*asked(*endpoints(inference={"fault": too_long}), "--record", "log.npz", "--evidence", "gate"))
    assert (code, out) == (2, "")
    assert f"2 of {PROMPTS} completions are missing, 2 of them failed:" in err
    assert "prompts.jsonl: line 8, 9: inference endpoint http" in err
    assert "400: maximum context length is 6 (2 times)" in err
    assert "no verdict: prompts that fail are not a random sample" in err
    assert not Path("gate/evidence.json").exists()
    command = err.partition("kc-otel ")[2].split()
    assert run(*command, "--require", "token-tv")[0] == 0


def test_keys_go_to_their_own_endpoint_and_are_never_printed(run, endpoints, monkeypatch):
    monkeypatch.setenv("KC_OTEL_INFERENCE_API_KEY", "sk-sample")
    monkeypatch.setenv("KC_OTEL_TRAIN_API_KEY", "sk-score\n")
    inference, train = endpoints()
    code, out, err = run(*asked(inference, train, "--evidence", "gate"))
    assert code == 0
    for server, key in ((inference, "sk-sample"), (train, "sk-score")):
        assert {headers["authorization"] for headers in server.headers} == {f"Bearer {key}"}
    shown = out + err + Path("gate/evidence.json").read_text()
    train.fault = lambda *_: ({"error": {"message": "no such key: sk-score"}}, 400, {})
    shown += "".join(run(*asked(inference, train, "--train-model", "tiny", "--record", "log.npz"))[1:])
    assert "no such key: ***" in shown
    assert "sk-s" not in shown


def test_a_dead_endpoint_is_named(run, endpoints):
    inference, _ = endpoints()
    code, out, err = run(*asked(inference, "http://127.0.0.1:9"))
    assert (code, out) == (2, "")
    assert err.startswith("train endpoint http://127.0.0.1:9: does not answer (ConnectError: ")
    assert [path for path, _ in inference.requests] == ["/v1/models"]


def test_models_of_other_names_are_told(run, endpoints):
    inference, _ = endpoints(inference={"models": ("bf16", "fp8")})
    code, _, err = run(*asked(inference, inference, "--inference-model", "fp9", "--train-model", "bf16"))
    assert (code, "--inference-model: serves no 'fp9'; it serves bf16, fp8" in err) == (2, True)
    assert run(*asked(inference, inference, "--inference-model", "fp8", "--train-model", "bf16"))[0] == 0
    models = ("--inference-model", "fp8", "--train-model", "fp8", "--record", "floor.npz")
    code, out, err = run(*asked(inference, inference, *models))
    assert (code, out, "its decoding with its prefill" in err) == (2, "", True)
    assert "no decision: fp8 both sampled and scored" in err
    elsewhere = inference.address.replace("127.0.0.1", "localhost")
    assert run(*asked(inference, f"{elsewhere}/v1", *models))[0] == 2, "this machine has several names"
    code, out, err = run("gate", "run", "policy.yaml", "floor.npz", "--require", "token-tv")
    assert (code, out, "no decision: fp8 both sampled and scored" in err) == (2, "", True), "nor later"


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_an_answer_that_the_engine_cut_off_is_missing(run, endpoints, reason):
    """What an engine aborts is no random sample of the prompts, and what it has written is no completion."""

    def cut_off(_path, body, right):
        if str(body.get("prompt", "")).endswith("7"):
            right["choices"][0]["finish_reason"] = reason
        return right, 200, {}

    code, out, err = run(*asked(*endpoints(inference={"fault": cut_off}), "--all"))
    assert (code, out, f"answers with finish_reason '{reason}' (6 times)" in err) == (2, "", True)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--record", "log.txt"), "log.txt: recordings are written as .npz"),
        (("--record", "policy.yaml/log.npz"), "policy.yaml/log.npz: cannot be written"),
        (("--prompts", "none.jsonl"), "none.jsonl: cannot be read"),
        (("--train-url", "localhost:80"), "--train-url: 'localhost:80' is not a URL"),
    ],
)
def test_what_cannot_be_used_is_refused_before_anything_is_asked(run, endpoints, more, said):
    inference, train = endpoints()
    code, out, err = run(*asked(inference, train, *more))
    assert (code, out) == (2, "")
    assert said in err
    assert not inference.requests


def test_another_version_than_the_one_that_is_judged_is_refused(run, endpoints):
    sampler, scorer = endpoints(inference={"version": "0.31.0"})
    code, _, said = run(*asked(sampler, scorer, "--kernel", "inference.version=0.32.0"))
    assert (code, "version 0.31.0 answers, and --kernel inference.version says 0.32.0" in said) == (2, True)
    assert not any("prompt" in request for request in sampler.requests)
    assert "--kernel inference.version=0.31.0 makes it part of the fingerprint" in run(*asked(sampler, scorer))[2]


@pytest.mark.parametrize("sglang", [False, True])
def test_another_number_format_than_the_contract_declares_is_refused(run, endpoints, folder, sglang):
    """A flag that was forgotten at the engine's start would pass as the kernel that has it."""
    fp8 = json.loads(CONTRACT)
    fp8["kernels"]["inference"] |= {"dtype": "bfloat16", "kv_cache_dtype": "fp8"}
    (folder / "policy.yaml").write_text(json.dumps(fp8))
    sampler, scorer = endpoints(inference={"cache": "auto", "sglang": sglang}, train={"sglang": sglang})
    code, out, said = run(*asked(sampler, scorer))
    assert (code, out) == (2, "")
    assert "kv_cache_dtype fp8 is declared, and auto reported; start the engine as the contract declares it" in said
    assert not any("prompt" in body or "text" in body for _, body in sampler.requests)
    sampler.cache = "fp8_e4m3"
    code, _, said = run(*asked(sampler, scorer))
    assert (code, "not checked, because the endpoints do not say it: inference dtype\n" in said) == (0, True)
    fp8["kernels"]["inference"]["quantization"] = "compressed-tensors"  # such a checkpoint may say what `auto` is
    (folder / "policy.yaml").write_text(json.dumps(fp8))
    sampler.cache = "auto"
    assert run(*asked(sampler, scorer))[0] == 0
    del fp8["kernels"]["inference"]["quantization"]
    (folder / "policy.yaml").write_text(json.dumps(fp8))
    sampler.cache = ""
    assert "do not say it: inference dtype and inference kv_cache_dtype\n" in run(*asked(sampler, scorer))[2]
