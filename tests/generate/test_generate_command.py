"""The command `kc-otel generate`."""

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from kc_otel.cli import register

pytestmark = pytest.mark.slow

BOARDS = ("overview", "slice", "rl", "promotion", "health")


@pytest.fixture
def run():
    """A function that runs the command line with arguments."""
    app = typer.Typer()
    register(app, "generate")

    @app.command()
    def other() -> None:
        """Typer drops the name of a lone command."""

    return lambda *arguments: CliRunner().invoke(app, ["generate", *map(str, arguments)])


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        (
            "grafana",
            {
                *(f"grafana/dashboards/{name}.json" for name in BOARDS),
                "grafana/alerting/_evaluator.yaml",
                "grafana/alerting/policy-7b.yaml",
                "grafana/notifications/kernel-contracts.yaml",
            },
        ),
        (
            "prometheus",
            {
                "prometheus/rules/_evaluator.yaml",
                "prometheus/rules/policy-7b.yaml",
                "prometheus/standalone/rules/policy-7b.yaml",
                "prometheus/alertmanager/alertmanager.yaml",
            },
        ),
    ],
)
def test_it_writes_and_prints_what_it_wrote(run, what: str, expected: set, policy_path: Path, tmp_path: Path) -> None:
    """A second run finds everything as it should be."""
    first = run(what, policy_path, "--out", tmp_path)
    assert first.exit_code == 0
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*")} == expected
    assert first.output.count("written") == len(expected)
    assert run(what, policy_path, "--out", tmp_path).output.count("unchanged") == len(expected)


def test_check_writes_nothing_and_fails_when_a_file_is_stale(run, policy_path: Path, tmp_path: Path) -> None:
    """Exit code 1 names what is stale; 0 when all is well."""
    command = ("prometheus", policy_path, "--out", tmp_path)
    missing = run(*command, "--check")
    assert missing.exit_code == 1
    assert missing.output.count("stale ") == 4
    assert list(tmp_path.iterdir()) == []
    run(*command)
    assert run(*command, "--check").exit_code == 0
    (tmp_path / "prometheus" / "rules" / "policy-7b.yaml").write_text("edited")
    assert run(*command, "--check").exit_code == 1


def test_what_cannot_be_done_is_said_in_one_line(run, policy_path: Path, tmp_path: Path) -> None:
    """A broken contract, two of one name, an output that is a file: exit code 2 and no traceback."""
    broken = tmp_path / "broken.yaml"
    broken.write_text("kind: Nothing\n")
    assert run("grafana", broken, "--out", tmp_path).exit_code == 2
    copy = tmp_path / "copy.yaml"
    copy.write_text(policy_path.read_text())
    twice = run("grafana", policy_path, copy, "--out", tmp_path)
    assert twice.exit_code == 2
    assert "policy-7b" in twice.output
    assert "Traceback" not in twice.output
    assert run("prometheus", policy_path, "--out", broken).exit_code == 2
    path = run("prometheus", policy_path, "--out", tmp_path, "--grafana-url", "/grafana")
    assert path.exit_code == 2
    assert "--grafana-url: '/grafana' is not a URL" in path.output


def test_a_missing_sdk_is_named(run, policy_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dashboards need an extra; the message says how to get it, and rules work without."""
    import sys

    for name in list(sys.modules):
        if name.startswith(("grafana_foundation_sdk", "kc_otel.generate.grafana.")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "grafana_foundation_sdk", None)
    found = run("grafana", policy_path, "--out", tmp_path)
    assert found.exit_code == 2
    assert "pip install 'kc-otel[grafana]'" in found.output
    assert not list(tmp_path.iterdir())
    assert run("prometheus", policy_path, "--out", tmp_path).exit_code == 0
