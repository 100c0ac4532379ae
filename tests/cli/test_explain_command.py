"""`kc-otel explain`."""

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from kc_otel.cli import explain_command as commands
from kc_otel.contract import load
from kc_otel.explain import explain
from kc_otel.explain.explanation_text import lines

pytestmark = pytest.mark.slow

_ROOT = Path(__file__).parents[2]
_CONTRACT = _ROOT / "tests" / "explain" / "golden" / "contract.yaml"


@pytest.fixture
def run():
    """The exit code, standard output and standard error of the command."""
    app = typer.Typer()
    commands.register(app)

    def invoke(*arguments):
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return result.exit_code, result.stdout, result.stderr

    return invoke


def test_it_prints_the_explanation(run):
    """Plain where it is piped."""
    code, out, err = run(_CONTRACT)
    assert (code, err) == (0, "")
    assert out.splitlines() == [line.text for line in lines(explain(load(_CONTRACT)))]


def test_options_reach_the_explanation(run):
    """Slice, horizon and budgets, as JSON."""
    code, out, _ = run(
        _CONTRACT, "--json", "--slice", "code", "--horizon", 64, "--budget", 0.05, "--gradient-budget", 100
    )
    data = json.loads(out)
    assert code == 0
    assert [entry["slice"] for entry in data["forwards"]] == ["code"]
    assert (data["horizon"], data["horizon_source"]) == (64, "the command line")
    assert [(entry["kind"], entry["budget"]) for entry in data["backwards"]] == [("reward", 0.05), ("gradient", 100)]


@pytest.mark.slow
def test_it_draws(run, tmp_path):
    """And says where, beside the text."""
    path = tmp_path / "bounds.svg"
    code, _, err = run(_CONTRACT, "--plot", path)
    assert (code, err) == (0, f"drawn to {path}\n")
    assert path.read_text(encoding="utf-8").startswith("<?xml")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere.yaml"], "no such file"),
        ([_CONTRACT, "--slice", "x"], "slice: 'x'"),
        ([_CONTRACT, "--plot", "a.txt"], "is not a picture"),
        ([_CONTRACT, "--plot", "/nowhere/a.png"], "nowhere"),
    ],
)
def test_what_cannot_be_done_is_said_and_exits_2(run, arguments, said):
    """On standard error, without a traceback."""
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert said in err
