"""`kc-otel check` refuses a contract whose promotion gate can never open."""

from __future__ import annotations

import pytest

from kc_otel.contract.load import load_text
from kc_otel.offline.gate.gate_lint import shut_gates

TEXT = """apiVersion: kernel-contract/v1
kind: KernelContract
metadata: {name: a, version: 1, owner: o}
kernels: {train: {engine: torch}, inference: {engine: vllm}}
slices: {code: {where: {task: code}}}
statistical:
  - {id: tv, metric: tv_token, unit: token, limit: 0.01}
  - {id: ratio, metric: ratio, statistic: p99, limit: 1.2, slices: {code: 1.2}}
escalation: [{on: fail, do: [notify]}]
"""
GATED = TEXT.replace("do: [notify]", "do: [notify, hold-promotion]")


@pytest.fixture
def check(tmp_path, command):
    """Exit code and lines of a check of some text, without the file's name."""
    checked = command("check", "diff", "reference")

    def run(text):
        path = tmp_path / "a.yaml"
        path.write_text(text)
        code, out, _ = checked("check", path)
        return code, out.replace(str(path), "a.yaml").splitlines()

    return run


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("limit: 0.01", "limit: 0", "a.yaml:7: statistical[0].limit: 0 keeps every promotion gate shut"),
        ("limit: 1.2,", "limit: 0.9,", "a.yaml:8: statistical[1].limit: 0.9 keeps every promotion gate shut"),
        ("code: 1.2", "code: 0.5", "a.yaml:8: statistical[1].slices.code: 0.5 keeps every promotion gate shut"),
    ],
)
def test_a_gate_that_can_never_open_is_refused_at_its_line(check, old, new, line):
    assert check(GATED)[0] == 0
    code, lines = check(GATED.replace(old, new))
    assert code == 2
    assert [text for text in lines if text.startswith(line)]
    promoted = TEXT.replace(old, new) + "promotion: {windows: 2}\n"
    assert check(promoted)[0] == 2


def test_a_clause_that_only_alarms_may_be_out_of_reach(check):
    assert list(shut_gates(load_text(TEXT.replace("limit: 1.2,", "limit: 0.9,")))) == []
    assert check(TEXT.replace("limit: 1.2,", "limit: 0.9,"))[0] == 0
