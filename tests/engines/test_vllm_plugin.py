"""vLLM's own plugin entry: it is found, does nothing unasked, is idempotent, and never stops an engine."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from kc_otel.integrations.vllm import KernelContractInstrumentor, plugin

ROOT = Path(__file__).resolve().parents[2]
CONTRACT = ROOT / "examples" / "vllm_server" / "contract.yaml"

PROGRAM = """
import sys
sys.path.insert(0, {root!r})
from vllm import LLM, SamplingParams
llm = LLM({model!r}, dtype="bfloat16", max_model_len=256, kv_cache_memory_bytes=64 << 20, enforce_eager=True)
outputs = llm.generate(["def f", "import"], SamplingParams(max_tokens=3), use_tqdm=False)
print("answered", len(outputs))
"""


@pytest.fixture
def clean(monkeypatch):
    for name in [name for name in os.environ if name.startswith("KC_OTEL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("KC_OTEL_VLLM_ERROR_LOGGED", "")
    instrumentor = KernelContractInstrumentor()
    yield instrumentor
    if instrumentor.is_instrumented_by_opentelemetry:
        instrumentor.uninstrument()


def run(model, tmp_path, **environment):
    environment = {name: str(value) for name, value in environment.items()}
    return subprocess.run(
        [sys.executable, "-c", PROGRAM.format(root=str(ROOT), model=str(model))],
        env={**os.environ, "XDG_STATE_HOME": str(tmp_path), **environment},
        capture_output=True, text=True, check=False, timeout=1200,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("group", "name"), [("vllm.general_plugins", "kc_otel"), ("opentelemetry_instrumentor", "kernel_contract")]
)
def test_the_entry_points_are_there(group, name):
    (entry,) = entry_points(group=group, name=name)
    assert entry.load() in {plugin.load, KernelContractInstrumentor}


def test_nothing_happens_unasked(clean):
    from vllm.v1.engine.output_processor import OutputProcessor

    before = dict(vars(OutputProcessor))
    plugin.load()
    assert dict(vars(OutputProcessor)) == before
    assert not clean.is_instrumented_by_opentelemetry


def test_loading_twice_wraps_once(clean, monkeypatch, tmp_path):
    from vllm.v1.engine.output_processor import OutputProcessor

    before = dict(vars(OutputProcessor))
    monkeypatch.setenv("KC_OTEL_CONTRACT", str(CONTRACT))
    monkeypatch.setenv("KC_OTEL_SPOOL", str(tmp_path / "spool.sqlite"))
    plugin.load()
    once = dict(vars(OutputProcessor))
    assert once != before
    plugin.load()
    assert dict(vars(OutputProcessor)) == once
    clean.uninstrument()
    assert dict(vars(OutputProcessor)) == before


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("KC_OTEL_CONTRACT", "/nowhere/contract.yaml", "/nowhere/contract.yaml"),
        ("KC_OTEL_SAMPLING", "most", "KC_OTEL_SAMPLING: 'most' is not a share"),
        ("KC_OTEL_ATTRIBUTES", "task=cookie:x", "KC_OTEL_ATTRIBUTES: 'task=cookie:x' is no source"),
    ],
)
def test_what_is_wrong_is_logged_once(clean, monkeypatch, caplog, tmp_path, name, value, said):
    monkeypatch.setenv("KC_OTEL_CONTRACT", str(CONTRACT))
    monkeypatch.setenv("KC_OTEL_SPOOL", str(tmp_path / "spool.sqlite"))
    monkeypatch.setenv(name, value)
    with caplog.at_level(logging.ERROR):
        plugin.load()
        plugin.load()
    (record,) = caplog.records
    assert said in record.getMessage()
    assert not clean.is_instrumented_by_opentelemetry


@pytest.mark.slow
def test_a_program_that_nobody_changed_is_recorded(tiny_model, tmp_path):
    """With one variable, an offline program whose worker is another process fills the default spool at its exit."""
    from kc_otel.recordings.spool import SpoolReader

    done = run(tiny_model, tmp_path, KC_OTEL_CONTRACT=CONTRACT, KC_OTEL_SAMPLING=1, VLLM_ENABLE_V1_MULTIPROCESSING=1)
    assert "answered 2" in done.stdout, done.stderr
    with SpoolReader(tmp_path / "kc-otel" / "tiny-server.sqlite") as reader:
        requests = [request for _, request in reader.take(10)]
    assert [request.token_ids.size for request in requests] == [3, 3]
    assert {request.kernel.attention for request in requests} == {"CPU_ATTN"}


@pytest.mark.slow
def test_a_broken_contract_does_not_stop_an_engine(tiny_model, tmp_path):
    broken = tmp_path / "broken.yaml"
    broken.write_text("apiVersion: kernel-contract/v9\n")
    done = run(tiny_model, tmp_path, KC_OTEL_CONTRACT=broken, VLLM_ENABLE_V1_MULTIPROCESSING=1)
    assert "answered 2" in done.stdout, done.stderr
    assert (done.stdout + done.stderr).count("kc-otel: vLLM is not instrumented") == 1
    assert "broken.yaml:1" in done.stdout + done.stderr
