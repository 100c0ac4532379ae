"""What `check` refuses of a policy: reminders that remind nobody, and routes that lead nowhere."""

from __future__ import annotations

import pytest

from kc_otel.contract.diff import diff
from kc_otel.contract.load import check_text, load_text

HEAD = """\
apiVersion: kernel-contract/v1
kind: KernelContract
metadata: {name: a, version: 1, owner: o}
kernels: {train: {engine: torch}, inference: {engine: vllm}}
statistical: [{id: tv, metric: tv_token, unit: token, limit: 0.01}]
runtime: [{id: ttft, metric: gen_ai.server.time_to_first_token, limit: 800ms}]
escalation:
"""


def written(step):
    return HEAD + f"  - {step}\n"


def said(step):
    return [str(problem) for problem in check_text(written(step), "p.yaml").problems]


def test_a_route_of_latencies_without_kernels_is_a_warning():
    (warning,) = said("{on: fail, clauses: [ttft], do: [{route: train-kernel}]}")
    assert warning.startswith("p.yaml:8: warning: escalation[0].do[0]: a route needs the kernel")


@pytest.mark.parametrize(
    "step",
    [
        "{on: fail, do: [halt]}",
        "{on: fail, repeat: 0s, do: [halt]}",
        "{on: fail, repeat: 30m, do: [{webhook: pager}]}",
        "{on: fail, clauses: [tv, ttft], do: [{route: train-kernel}]}",
    ],
)
def test_a_sound_step_is_accepted(step):
    assert said(step) == []


@pytest.mark.parametrize(
    ("old", "new", "kind"), [("4h", "1h", "tightens"), ("1h", "4h", "loosens"), ("1h", "0s", "loosens"),
                             ("0s", "1h", "tightens")],
)  # fmt: skip
def test_diff_says_when_reminders_come_less_often(old, new, kind):
    before, other = (load_text(written(f"{{on: fail, repeat: {interval}, do: [notify]}}")) for interval in (old, new))
    found = {change.field: change.kind for change in diff(before, other)}
    assert found == {"metadata.version": "changes", "escalation[0].repeat": kind}
