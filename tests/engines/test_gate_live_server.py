"""`kc-otel gate live` with two real vLLM servers: the same number format passes, a narrower one does not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from examples.tiny_model import prompts
from examples.vllm_server.server import serving
from kc_otel.recordings.recording_files import load_recording
from tests.engines._checkpoints import in_three_bits

pytestmark = pytest.mark.slow

CONTRACT = """\
apiVersion: kernel-contract/v1
kind: KernelContract
metadata: {name: served, version: 1, owner: tests}
kernels: {train: {engine: vllm, dtype: float32}, inference: {engine: vllm}}
slices: {code: {where: {task: code}}, prose: {where: {task: prose}}}
statistical: [{id: token-tv, metric: tv_token, unit: token, limit: 0.004}]
observability: {min_samples: 500}
"""
KEY = "sk-of-the-trainer"
SERVERS = {
    "train": ("--dtype", "float32", "--api-key", KEY),
    "float32": ("--dtype", "float32"),
    "bfloat16": ("--dtype", "bfloat16"),
}
EACH, TOKENS = 60, 32


@pytest.fixture(scope="module")
def gates(tiny_model, tmp_path_factory):
    """Exit code, output and recording of the gate, by the number format of the inference endpoint."""
    folder = tmp_path_factory.mktemp("gate")
    (folder / "contract.yaml").write_text(CONTRACT)
    models = dict.fromkeys(SERVERS, tiny_model) | {"bfloat16": in_three_bits(tiny_model, folder / "three-bits")}
    rows = [{"prompt": text, "task": "code"} for text in prompts("code", EACH, characters=60)]
    talks = [[{"role": "user", "content": text}] for text in prompts("prose", EACH, characters=60)]
    rows += [{"messages": talk, "task": "prose"} for talk in talks]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with ExitStack() as stack, ThreadPoolExecutor(len(SERVERS)) as starting:
        # Starting takes most of the time, so they start together; each is stopped even if another does not start.
        begun = {
            name: starting.submit(
                stack.enter_context, serving(models[name], {}, log=folder / f"{name}.log", options=options)
            )
            for name, options in SERVERS.items()
        }
        address = {name: future.result().address for name, future in begun.items()}
        found = {name: gate(folder, name, address, name, "--all") for name in ("float32", "bfloat16")}
        return {**found, "until decided": gate(folder, "bfloat16", address, "decided")}


def gate(folder, name, address, evidence, *options):
    """The command as a job runs it."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("OTEL_", "KC_OTEL_"))}
    command = [
        *(sys.executable, "-m", "kc_otel", "gate", "live", "contract.yaml", "--evidence", evidence, *options),
        *("--inference-url", address[name], "--train-url", f"{address['train']}/v1"),
        *("--prompts", "prompts.jsonl", "--max-tokens", str(TOKENS), "--kernel", f"inference.dtype={name}"),
    ]
    environment.pop("GITHUB_STEP_SUMMARY", None)
    environment["KC_OTEL_TRAIN_API_KEY"] = KEY
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=1200, check=False
    )
    assert done.returncode in {0, 1}, done.stderr
    assert KEY not in done.stdout + done.stderr
    return done.returncode, done.stdout, load_recording(folder / evidence / "recording.npz")


def test_the_same_format_on_both_endpoints_passes(gates):
    code, out, recording = gates["float32"]
    assert (code, out.startswith("advance: vllm ")) == (0, True), out
    assert abs(recording.train - recording.inference).max() < 1e-3
    assert recording.lengths.size == 2 * EACH


def test_a_narrower_format_is_refused(gates):
    """Weights rounded to three bits, under bfloat16, break the limit, on code and on prose; some of both say so."""
    code, out, recording = gates["bfloat16"]
    assert (code, out.startswith("rollback: vllm ")) == (1, True), out
    assert "FAIL token-tv on slice code" in out
    assert "FAIL token-tv on slice prose" in out
    assert abs(recording.train - recording.inference).mean() > 0.005
    code, out, decided = gates["until decided"]
    assert (code, out.startswith("rollback: vllm ")) == (1, True), out
    assert decided.lengths.size < recording.lengths.size
