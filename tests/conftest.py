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
# Fewer examples, where a test names no number, and the same ones in each run: the long form looks for new ones.
settings.register_profile("fast", settings.get_profile("kc-otel"), max_examples=25, derandomize=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "kc-otel"))

FIRST = (
    *("generate/test_compose_running.py", "examples/test_demo_parts.py", "integration/test_life_of_a_version.py"),
    *("integration/test_page_browser.py", "generate/test_promtool.py"),
    *("integration/test_fleet_incident.py", "integration/test_ray_shards.py"),
    *("integration/test_spine.py", "generate/test_agreement.py"),
    "integration/test_tokens.py",
    *("cli/test_gate_example.py", "integration/test_tls.py", "integration/test_two_evaluators.py"),
    *("integration/test_acknowledged.py", "handbook/test_paths.py"),
    *("serve/shards/test_sharded_sink.py", "integration/test_locate_follow.py"),
)
"""Files that take longest, longest first, those that wait between those that compute: begun last, they idle cores."""


LONG = {
    "engines/test_cpu_engines.py": ("test_llama_cpp_goes_on_in_eight_bits_and_is_refused_in_four",),
    "engines/test_matrix.py": (),
    "engines/test_routing_proxy.py": (),
    "generate/test_agreement.py": (),
    "generate/test_compose_running.py": (),
    "integration/test_fleet_incident.py": (),
    "integration/test_life_of_a_version.py": ("test_a_crash_in_the_canary_loses_nothing",),
    "integration/test_page_browser.py": (
        "test_a_breach_is_told_in_words_to_eyes_ears_and_keyboards",
        *("test_an_incident_has_an_address_that_a_message_can_link_to", "test_with_no_data_it_says_what_to_do_next"),
        "test_axe_finds_nothing_wrong_while_it_is_broken_or_nobody_answers",
    ),
}
"""Files whose tests only `make test-all` runs, but for those that are named: the short form, in `make test`.

What they show of whole systems, `integration/test_spine.py`, `generate/test_promtool.py` and
`generate/test_panels.py` show in `make test` with one evaluator and one store; what they show of engines, the other
files and cases in `engines` show with one format at a time.
"""


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at marks
def pytest_collection_modifyitems(items):
    """The longest files come first; workers take files in this order (`--no-loadscope-reorder`)."""
    folder = Path(__file__).parent
    places = {folder / name: place for place, name in enumerate(FIRST)}
    short = {folder / name: tests for name, tests in LONG.items()}
    if missing := [str(path) for path in (*places, *short) if not path.exists()]:
        raise pytest.UsageError(f"{__file__}: FIRST or LONG names {', '.join(missing)}, which is not there")
    items.sort(key=lambda item: places.get(item.path, len(places)))
    for item in items:
        if item.path in short and getattr(item, "originalname", None) not in short[item.path]:
            item.add_marker(pytest.mark.long)


@pytest.fixture(scope="session", autouse=True)
def own_state(tmp_path_factory):
    """What programs keep for the next start is a folder's of this run, not the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="session")
def debian():
    """The module that fetches programs from Debian's archive."""
    return importlib.import_module("tests.tools.debian")


@pytest.fixture(scope="session")
def program(debian):
    """A function from a program's name to its path; skips the test where the program cannot be had."""

    def find(name: str) -> str:
        try:
            return str(debian.find(name))
        except debian.UnavailableError as error:
            pytest.skip(f"not run: {error}")

    return find


@pytest.fixture(scope="session")
def alertmanager_command(debian) -> list[str]:
    """How to start Alertmanager; skips where it cannot be had, or not be started."""
    try:
        return debian.alertmanager()
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
