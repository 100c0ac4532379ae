from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import kc_otel

WEB = {"torch", "vllm", "grpc", "starlette", "fastapi", "uvicorn", "httpx", "scipy"}


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def loaded(code):
    """Each module that a program has in the end, with its file."""
    lines = run(f"{code}\nimport sys\nfor name, of in [*sys.modules.items()]: print(name, getattr(of, '__file__', ''))")
    return dict(line.split(" ", 1) for line in lines.splitlines())


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import kc_otel", {*WEB, "opentelemetry", "pydantic"}),
        pytest.param("import kc_otel; kc_otel.Recorder", {*WEB, "requests"}, marks=pytest.mark.slow),
    ],
)
def test_nothing_heavy_is_loaded_unasked(code, absent):
    """The package is imported by everybody, and a recorder needs neither torch nor a web framework."""
    assert not {name.partition(".")[0] for name in loaded(code)} & absent


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
import kc_otel
from kc_otel.judge.decisions import DecisionTable
kc_otel.{name}
plain = {{"version": 1, "at": 2.0, "routes": [], "directives": [], "resumptions": []}}
table = DecisionTable.from_plain(plain)
if "{name}" == "Router":
    kc_otel.Router.from_table(table).choose("policy", "code")
"""
    found = {module.partition(".")[0] for module in loaded(code)}
    assert "kc_otel" in found
    assert not found & {"pydantic", "pydantic_core", "yaml", "numpy", "opentelemetry", "starlette", "httpx"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "needed", "unneeded"),
    [
        ("from kc_otel.integrations.vllm.plugin import load; load()", "integrations.vllm.plugin", ()),
        (
            "from kc_otel.integrations.vllm import instrumentor, plugin", "recordings.spool",
            ("record.recorder", "record.measurer", "recordings.recording_files", "contract.lint"),
        ),
    ],
)  # fmt: skip
def test_an_engine_imports_little_of_ours(code, needed, unneeded):
    """Less than 5,000 lines for a process that nobody asked to instrument, and for one that fills a spool."""
    ours = {name: file for name, file in loaded(code).items() if name.partition(".")[0] == "kc_otel"}
    assert f"kc_otel.{needed}" in ours
    assert not ours.keys() & {f"kc_otel.{name}" for name in unneeded}
    assert sum(len(Path(file).read_text().splitlines()) for file in ours.values()) < 5000


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match=r"kc_otel.*Recoder"):
        _ = kc_otel.Recoder
