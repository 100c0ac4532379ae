from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import kc_otel

HEAVY = ("torch", "vllm", "grpc", "starlette", "fastapi", "uvicorn", "httpx", "opentelemetry", "pydantic", "scipy")


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_importing_the_package_loads_nothing_heavy():
    loaded = set(run("import kc_otel, sys; print('\\n'.join(m.partition('.')[0] for m in sys.modules))").split())
    assert not loaded & set(HEAVY)


@pytest.mark.slow
def test_recording_loads_no_torch_and_no_web_framework():
    code = "import kc_otel, sys; kc_otel.Recorder; print('\\n'.join(m.partition('.')[0] for m in sys.modules))"
    frameworks = {"torch", "vllm", "grpc", "starlette", "fastapi", "uvicorn", "httpx", "requests", "scipy"}
    assert not set(run(code).split()) & frameworks


@pytest.mark.slow
def test_importing_is_quick():
    """`import kc_otel` takes less than 100 ms of CPU time more than `import numpy`, in the best of a few tries."""
    code = "import time; t = time.process_time(); import {}; print(time.process_time() - t)"
    best = {name: min(float(run(code.format(name))) for _ in range(3)) for name in ("numpy", "kc_otel, numpy")}
    assert best["kc_otel, numpy"] < best["numpy"] + 0.100


@pytest.mark.parametrize("name", kc_otel.__all__)
def test_every_public_name_is_there(name):
    assert callable(getattr(kc_otel, name))
    assert name in dir(kc_otel)


def test_the_public_surface_is_small():
    assert kc_otel.__all__ == [
        "Contract", "ContractError", "Kernel", "Recorder", "Router", "TrainingLog", "VerificationError", "compare",
        "load_contract", "verify_webhook",
    ]  # fmt: skip
    assert kc_otel.__version__


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Router", "verify_webhook", "VerificationError"])
def test_a_service_that_routes_imports_neither_pydantic_nor_yaml(name):
    code = f"""
import sys, kc_otel
from kc_otel.judge.decisions import DecisionTable
kc_otel.{name}
plain = {{"version": 1, "at": 2.0, "routes": [], "directives": [], "resumptions": []}}
table = DecisionTable.from_plain(plain)
if "{name}" == "Router":
    kc_otel.Router.from_table(table).choose("policy", "code")
print("\\n".join(sys.modules))
"""
    loaded = {module.partition(".")[0] for module in run(code).split()}
    assert "kc_otel" in loaded
    assert not loaded & {"pydantic", "pydantic_core", "yaml", "numpy", "opentelemetry", "starlette", "httpx"}


@pytest.mark.slow
def test_a_worker_of_vllm_imports_little():
    """A process of an engine that nobody asked to instrument gets two methods from less than 5,000 lines of ours."""
    code = """
import sys
from kc_otel.integrations.vllm.plugin import load
load()
for name, module in [*sys.modules.items()]:
    if name.partition(".")[0] == "kc_otel":
        print(module.__file__)
"""
    files = run(code).split()
    assert any(file.endswith("vllm/plugin.py") for file in files)
    assert sum(len(Path(file).read_text().splitlines()) for file in files) < 5000


@pytest.mark.slow
def test_an_engine_that_fills_a_spool_loads_no_recorder_and_no_reader_of_recordings():
    """What it samples is written down, by less than 5,000 lines of ours; drift and lint are other programs'."""
    code = """
import sys
from kc_otel.integrations.vllm import instrumentor, plugin
for name, module in [*sys.modules.items()]:
    if name.partition(".")[0] == "kc_otel":
        print(name, module.__file__)
"""
    loaded = dict(line.split(" ", 1) for line in run(code).splitlines())
    assert "kc_otel.recordings.spool" in loaded
    unneeded = {"record.recorder", "record.measurer", "recordings.recording_files", "contract.lint"}
    assert not loaded.keys() & {f"kc_otel.{name}" for name in unneeded}
    assert sum(len(Path(file).read_text().splitlines()) for file in loaded.values()) < 5000


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match=r"kc_otel.*Recoder"):
        _ = kc_otel.Recoder
