"""Which file has which command, so that a command imports its own file and no other's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from kc_otel import __main__, cli
from kc_otel.cli import _SUBJECTS

NAMES = [name for commands in _SUBJECTS.values() for name in commands]
ROOT = Path(__file__).resolve().parents[2]


def test_every_command_of_the_table_is_there():
    cli._register()
    registered = {command.name for command in (*cli.app.registered_commands, *cli.app.registered_groups)}
    assert registered == set(NAMES)
    files = {home.partition(":")[0] for commands in _SUBJECTS.values() for home in commands.values()}
    assert files == {path.stem for path in Path(cli.__file__).parent.glob("*_command*.py")}


@pytest.mark.slow
def test_a_command_imports_no_other_commands_file():
    code = "import sys; from kc_otel.cli import _register; _register('check'); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "kc_otel.cli.contract_commands" in loaded
    assert not loaded & {"httpx", "kc_otel.cli.status_command", "kc_otel.cli.serve_command", "kc_otel.offline.replay"}


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


def test_help_says_what_stands_in_square_brackets():
    """It is text, never markup; options stand in their sections, examples at the end."""
    cli._register("gate")
    said = CliRunner().invoke(cli.app, ["gate", "run", "--help"]).output
    assert "--kernel SIDE[.FIELD]=VALUE" in said
    cli._register("promote")
    said = CliRunner().invoke(cli.app, ["promote", "--help"]).output
    headings = [line for line in said.splitlines() if line.endswith(":") and line[0] != " "]
    assert headings == ["Arguments:", "Decide (one at a time):", "Options:", "Examples:"]


def test_a_group_shows_an_example_of_each_of_its_commands():
    cli._register("route")
    said = CliRunner().invoke(cli.app, ["route", "--help"]).output.partition("Examples:\n")[2]
    assert [line.split()[:3] for line in said.splitlines()] == [
        ["kc-otel", "route", word] for word in ("pin", "unpin", "resume")
    ]


def test_the_first_sentence_of_a_help_is_an_order():
    cli._register()

    def walk(command):
        first = " ".join(command.help.partition("\n\n")[0].split())
        assert first.split()[0] not in {"A", "An", "The", "What", "Whether", "Which", "How", "Say"}, first
        assert len(first) <= 130, first
        for subcommand in getattr(command, "commands", {}).values():
            walk(subcommand)

    walk(typer.main.get_command(cli.app))


def test_an_error_that_nobody_foresaw_has_an_exit_code_of_its_own(monkeypatch, capsys):
    """1 is an answer of many commands."""
    monkeypatch.setattr(cli, "app", lambda **_: 1 / 0)
    monkeypatch.setattr(cli, "_register", lambda _: None)
    with pytest.raises(SystemExit) as ended:
        __main__.main()
    assert ended.value.code == 70
    assert "ZeroDivisionError" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["check", "--json", "contracts"], ["token", "ada", "--may", "read"]])
def test_an_output_that_cannot_be_written_ends_with_the_same_code(arguments):
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "kc_otel", *arguments], cwd=ROOT, stdout=full, stderr=-1, check=False
        )
    assert (done.returncode, b"No space left on device" in done.stderr) == (70, True)
