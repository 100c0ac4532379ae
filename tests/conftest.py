"""What every test has in common."""

import fcntl
import importlib
import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes says more about the machine's other tenants than about the code.
settings.register_profile("kc-otel", deadline=None, suppress_health_check=[HealthCheck.too_slow])
# Fewer examples for everyday work, where a test does not ask for a number of its own.
settings.register_profile("fast", settings.get_profile("kc-otel"), max_examples=25)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "kc-otel"))


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
def alertmanager_command(program) -> list[str]:
    """How to start Alertmanager: Debian's build reads its default template from a fixed path of the system.

    The package's own files are put there in a mount namespace of the process; skips where that is not permitted.
    """
    binary = Path(program("alertmanager"))
    share = binary.parents[1] / "share"
    command = ["unshare", "--map-root-user", "--mount", "sh", "-c", 'mount --bind "$0" /usr/share && exec "$@"']
    tried = subprocess.run([*command, str(share), "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"not run: Alertmanager's template cannot be put in place: {tried.stderr.strip()}")
    return [*command, str(share), str(binary)]


@pytest.fixture(scope="session")
def demo_weights(tmp_path_factory, worker_id) -> Path:
    """The demo's model after its quick training, in a file that all of pytest's processes share."""
    from examples.demo.__main__ import QUICK_STEPS, trained
    from examples.demo.terminal import Terminal

    here = tmp_path_factory.getbasetemp()
    folder = here if worker_id == "master" else here.parent
    with (folder / "demo-weights.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        trained(Terminal(), QUICK_STEPS, folder / "demo-weights.pt")
    return folder / "demo-weights.pt"
