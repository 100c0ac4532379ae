"""What every test has in common."""

import fcntl
import hashlib
import importlib
import os
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Triton reads this when it is imported: kernels run on the host, in `make test-gpu` on the device.
os.environ.setdefault("TRITON_INTERPRET", "1")

# How long an example takes says more about the machine's other tenants than about the code.
settings.register_profile("kc-otel", deadline=None, suppress_health_check=[HealthCheck.too_slow])
# Fewer examples for everyday work, where a test does not ask for a number of its own.
settings.register_profile("fast", settings.get_profile("kc-otel"), max_examples=25)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "kc-otel"))

FIRST = (
    *("generate/test_compose_running.py", "examples/test_demo_parts.py", "integration/test_life_of_a_version.py"),
    *("integration/test_page_browser.py", "generate/test_evaluator_down.py", "generate/test_promtool.py"),
    *("integration/test_fleet_incident.py", "examples/test_demo_precision.py", "integration/test_ray_shards.py"),
    *("generate/test_breach_server.py", "integration/test_spine.py", "generate/test_agreement.py"),
    *("client/test_evaluator_gone.py", "integration/test_terminal.py", "integration/test_tenants_apart.py"),
    *("cli/test_gate_example.py", "integration/test_tls.py", "integration/test_two_evaluators.py"),
    *("integration/test_replay_recorded.py", "integration/test_acknowledged.py", "generate/test_victoria.py"),
    *("handbook/test_paths.py", "generate/test_panel_values.py", "report/test_pytest_plugin.py"),
    *("serve/shards/test_sharded_sink.py", "generate/test_rule_values.py", "integration/test_locate_follow.py"),
    *("engines/test_matrix.py", "engines/test_verl.py", "engines/test_packed_in_vllm.py", "engines/test_paths.py"),
    *("engines/test_vllm_server.py", "engines/test_vllm_plugin.py", "engines/test_gate_live_server.py"),
    *("engines/test_routing_proxy.py", "engines/test_rescore_server.py"),
)
"""Files that take longest, longest first, those that wait between those that compute: begun last, they idle cores.

The second of the engines' needs no model that the first one trains."""


def pytest_collection_modifyitems(items):
    """The longest files come first; workers take files in this order (`--no-loadscope-reorder`)."""
    folder = Path(__file__).parent
    places = {folder / name: place for place, name in enumerate(FIRST)}
    if missing := [str(path) for path in places if not path.exists()]:
        raise pytest.UsageError(f"{__file__}: FIRST names {', '.join(missing)}, which is not there")
    items.sort(key=lambda item: places.get(item.path, len(places)))


@pytest.fixture(scope="session")
def debian():
    """The module that fetches programs from Debian's archive."""
    return importlib.import_module("tests.tools.debian")


@pytest.fixture(scope="session")
def program(debian):
    """A function from a program's name to its path; skips the test where the program cannot be had."""

    def find(name: str) -> str:
        try:
            return str(debian.find(name, say=print))
        except debian.UnavailableError as error:
            pytest.skip(f"not run: {error}")

    return find


@pytest.fixture(scope="session")
def alertmanager_command(debian) -> list[str]:
    """How to start Alertmanager; skips where it cannot be had, or not be started."""
    try:
        return debian.alertmanager(say=print)
    except debian.UnavailableError as error:
        pytest.skip(f"not run: {error}")


@pytest.fixture(scope="session")
def demo_weights() -> Path:
    """The demo's model after its quick training, which takes a minute: kept in .cache until something of it changes."""
    import torch

    from examples.demo import __main__ as demo
    from examples.demo.terminal import Terminal

    cache = Path(__file__).parents[1] / ".cache"
    cache.mkdir(exist_ok=True)
    folder = Path(demo.__file__).parent
    made_by = [(folder / f"{name}.py").read_bytes() for name in ("corpus", "model", "train")]
    made_by.append(f"{demo.QUICK_STEPS} {torch.__version__} {sys.version}".encode())  # its text is Python's library
    weights = cache / f"demo-{hashlib.sha256(b''.join(made_by)).hexdigest()[:12]}.pt"
    with (cache / "demo.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one of pytest's processes trains, the others wait
        if not weights.exists():
            unfinished = weights.with_suffix(".unfinished")
            unfinished.unlink(missing_ok=True)
            demo.trained(Terminal(), demo.QUICK_STEPS, unfinished)
            unfinished.replace(weights)
    return weights
