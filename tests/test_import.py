from __future__ import annotations

import subprocess
import sys

import pytest

import kc_otel

HEAVY = ("torch", "vllm", "grpc", "starlette", "fastapi", "uvicorn", "httpx", "opentelemetry", "pydantic", "scipy")


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_importing_the_package_loads_nothing_heavy():
    """`import kc_otel` loads no torch, engine, gRPC or web framework, nor anything else of weight."""
    loaded = set(run("import kc_otel, sys; print('\\n'.join(m.partition('.')[0] for m in sys.modules))").split())
    assert not loaded & set(HEAVY)


@pytest.mark.slow
def test_recording_loads_no_torch_and_no_web_framework():
    """A recorder that exports into memory needs neither torch, gRPC nor a web framework."""
    code = "import kc_otel, sys; kc_otel.Recorder; print('\\n'.join(m.partition('.')[0] for m in sys.modules))"
    assert not set(run(code).split()) & {
        "torch",
        "vllm",
        "grpc",
        "starlette",
        "fastapi",
        "uvicorn",
        "httpx",
        "requests",
    }


@pytest.mark.slow
def test_importing_is_quick():
    """`import kc_otel` takes less than 100 ms of CPU time more than `import numpy`, in the best of a few tries."""
    code = "import time; t = time.process_time(); import {}; print(time.process_time() - t)"
    best = {name: min(float(run(code.format(name))) for _ in range(3)) for name in ("numpy", "kc_otel, numpy")}
    assert best["kc_otel, numpy"] < best["numpy"] + 0.100


@pytest.mark.parametrize("name", kc_otel.__all__)
def test_every_public_name_is_there(name):
    """Each name of the public surface can be used and is listed."""
    assert getattr(kc_otel, name).__name__ == name
    assert name in dir(kc_otel)


def test_the_public_surface_is_small():
    """What the package promises is these names and its version."""
    assert kc_otel.__all__ == ["Contract", "ContractError", "Kernel", "Recorder", "TrainingLog", "compare", "load"]
    assert kc_otel.__version__


def test_unknown_names_are_attribute_errors():
    """A misspelt name is an AttributeError that says whose."""
    with pytest.raises(AttributeError, match=r"kc_otel.*Recoder"):
        _ = kc_otel.Recoder
