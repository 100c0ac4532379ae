"""Real engines on a tiny model. Collected only where vLLM is installed: `make test-engines` has a place for it."""

from __future__ import annotations

import fcntl
import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.engines._cpu import lacking

ROOT = Path(__file__).resolve().parents[2]
# `examples` is no installed package: the repository's root has to be importable.
sys.path.insert(0, str(ROOT))

if find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]

ENGINE_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
# vLLM reads some of these when it is imported, and so do the processes that it starts.
os.environ.update({name: os.environ.get(name, value) for name, value in ENGINE_ENVIRONMENT.items()})


def pytest_runtest_setup(item):
    for mark in item.iter_markers("engine_has"):
        if why := lacking(*mark.args):
            pytest.skip(f"not run: {why}")


def pytest_collection_modifyitems(items):
    """Warnings are errors for our own code; what the engines and their dependencies warn of is theirs."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore"))
            item.add_marker(pytest.mark.filterwarnings("error:::kc_otel"))


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    """Directory of a Hugging Face checkpoint with its tokenizer, briefly trained on code, prose and tables.

    `examples.tiny_model.prompts(slice, count)` has text to prompt it with. Kept in .cache from one run to the next.
    """
    from examples.tiny_model import tiny_model as made

    cache = ROOT / ".cache"
    cache.mkdir(exist_ok=True)
    with (cache / "tiny.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one of pytest's processes trains it, the others wait
        return made(cache)
