"""Which file has which command, so that a command imports its own file and no other's."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import typer

from kc_otel.cli import _SUBJECTS

FILES = {file: names for files in _SUBJECTS.values() for file, names in files.items()}


@pytest.mark.parametrize("file", FILES)
def test_a_file_has_the_commands_of_the_table(file):
    """Each file registers what the table says of it, in that order, and nothing else."""
    app = typer.Typer()
    import_module(f"kc_otel.cli.{file}").register(app)
    found = [one.name for one in (*app.registered_commands, *app.registered_groups)]
    assert found == list(FILES[file])


def test_no_command_is_in_two_files():
    """A name decides the file."""
    names = [name for each in FILES.values() for name in each]
    assert len(names) == len(set(names))


@pytest.mark.slow
def test_a_command_imports_no_other_commands_file():
    """Checking a contract loads neither the client of the evaluator's API nor its server."""
    code = "import sys; from kc_otel.cli import _register; _register('check'); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "kc_otel.cli.contract_commands" in loaded
    assert not loaded & {"httpx", "kc_otel.cli.status_command", "kc_otel.cli.serve_command", "kc_otel.offline.replay"}


@pytest.mark.slow
def test_a_word_that_is_no_command_leaves_them_all_to_choose_from():
    """A misspelt command is answered with what was meant, of any file."""
    done = subprocess.run([sys.executable, "-m", "kc_otel", "statsu"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "status" in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted where Linux lists them")
@pytest.mark.parametrize("said", ["", "2"] if (os.cpu_count() or 1) > 1 else [""])
def test_a_command_multiplies_on_its_own_thread(said):
    """NumPy's library begins threads for every core when it is loaded; whoever says how many is heard."""
    code = (
        "import os, sys, kc_otel.cli; assert 'numpy' not in sys.modules\n"
        "try: kc_otel.cli.main()\nexcept SystemExit: pass\n"
        "import numpy; a = numpy.ones((300, 300)); a @ a; print(len(os.listdir('/proc/self/task')))"
    )
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    environment |= {"OPENBLAS_NUM_THREADS": said} if said else {}
    command = [sys.executable, "-c", code, "check", "--help"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == (said or "1")
