"""The command `kc-otel generate`."""

from pathlib import Path

import pytest

from tests.generate.test_dashboards import NAMES
from tests.tools.commands import commands

pytestmark = pytest.mark.slow


def run(*words: object) -> tuple[int, str]:
    code, out, err = commands("generate")("generate", *words)
    return code, out + err


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        (
            "grafana",
            {
                *(f"grafana/dashboards/{name}.json" for name in NAMES),
                "grafana/alerting/_evaluator.yaml",
                "grafana/alerting/policy-7b.yaml",
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
def test_it_writes_and_prints_what_it_wrote(what, expected, policy_path, tmp_path):
    code, said = run(what, policy_path, "--out", tmp_path)
    assert code == 0
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*")} == expected
    assert said.count("written") == len(expected)
    assert run(what, policy_path, "--out", tmp_path)[1].count("unchanged") == len(expected)


def test_check_writes_nothing_and_fails_when_a_file_is_stale(policy_path, tmp_path):
    command = ("prometheus", policy_path, "--out", tmp_path)
    code, said = run(*command, "--check")
    assert (code, said.count("stale ")) == (1, 4)
    assert list(tmp_path.iterdir()) == []
    run(*command)
    assert run(*command, "--check")[0] == 0
    (tmp_path / "prometheus" / "rules" / "policy-7b.yaml").write_text("edited")
    assert run(*command, "--check")[0] == 1


@pytest.mark.parametrize("what", ["prometheus", "grafana"])
def test_files_of_a_contract_that_is_gone_are_listed(what, policy_path, tmp_path):
    """Their rules would alert on its silence for good; what `generate` has not written is nobody's left-over."""
    gone, out = tmp_path / "gone.yaml", tmp_path / "out"
    gone.write_text(policy_path.read_text().replace("policy-7b", "policy-8b"))
    run(what, policy_path, gone, "--out", out)
    theirs = sorted(str(path) for path in out.rglob("*8b*.yaml"))
    next(out.rglob("policy-8b.yaml")).with_name("own.yaml").write_text("groups: []\n")
    command = (what, policy_path, "--out", out)
    code, _ = run(*command)
    assert code == 0
    code, said = run(*command, "--check")
    assert code == 1
    assert [line.removeprefix("left over ") for line in said.splitlines() if line.startswith("left over")] == theirs
    assert "delete what is left over: its contract is not among those given" in said
    for path in theirs:
        Path(path).unlink()
    assert run(*command, "--check")[0] == 0


def test_what_cannot_be_done_is_said_in_one_line(policy_path, tmp_path):
    broken = tmp_path / "broken.yaml"
    broken.write_text("kind: Nothing\n")
    assert run("grafana", broken, "--out", tmp_path)[0] == 2
    copy = tmp_path / "copy.yaml"
    copy.write_text(policy_path.read_text())
    code, said = run("grafana", policy_path, copy, "--out", tmp_path)
    assert (code, "policy-7b" in said, "Traceback" in said) == (2, True, False)
    assert run("prometheus", policy_path, "--out", broken)[0] == 2
    code, said = run("prometheus", policy_path, "--out", tmp_path, "--grafana-url", "/grafana")
    assert (code, "--grafana-url: '/grafana' is not a URL" in said) == (2, True)
