"""What `check` refuses of a policy: reminders that remind nobody, routes that lead nowhere or in circles."""

from __future__ import annotations

import pytest

from kc_otel.contract.diff import diff
from kc_otel.contract.load import check_all, check_text, load_text

HEAD = """\
apiVersion: kernel-contract/v1
kind: KernelContract
metadata: {{name: {name}, version: 1, owner: o}}
kernels: {{train: {{engine: {train}}}, inference: {{engine: {inference}}}}}
statistical: [{{id: tv, metric: tv_token, unit: token, limit: 0.01}}]
runtime: [{{id: ttft, metric: gen_ai.server.time_to_first_token, limit: 800ms}}]
escalation:
"""


def written(step, name="a", train="torch", inference="vllm"):
    return HEAD.format(name=name, train=train, inference=inference) + f"  - {step}\n"


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


def test_routes_that_go_in_circles_are_refused(tmp_path):
    route = "{on: fail, do: [notify, {route: train-kernel}]}"
    texts = {
        "a.yaml": written(route, "a", "torch", "vllm"),
        "b.yaml": written(route, "b", "sglang", "torch"),
        "c.yaml": written(route, "c", "vllm", "sglang"),
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    first, second, third = check_all([tmp_path])
    assert (first.problems, second.problems, third.contract) == ((), (), None)
    (problem,) = map(str, third.problems)
    assert problem == (
        f"{tmp_path}/c.yaml:8: escalation[0].do[1]: routes from sglang to vllm, and a and b from there back: "
        "requests would loop between the kernels; remove one of the routes"
    )


def test_contracts_that_agree_on_the_healthy_kernel_are_no_circle(tmp_path):
    """Two routes to the same place, and a swapped pair of which only one routes."""
    route, notify = "{on: fail, do: [{route: train-kernel}]}", "{on: fail, do: [notify]}"
    texts = {
        "a.yaml": written(route, "a", "torch", "vllm"),
        "b.yaml": written(route, "b", "torch", "vllm"),
        "c.yaml": written(notify, "c", "vllm", "torch"),
        "d.yaml": written(route, "d", "torch", "sglang"),
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    assert [checked.problems for checked in check_all([tmp_path])] == [()] * 4


@pytest.mark.parametrize(
    ("old", "new", "kind"), [("4h", "1h", "tightens"), ("1h", "4h", "loosens"), ("1h", "0s", "loosens"),
                             ("0s", "1h", "tightens")],
)  # fmt: skip
def test_diff_says_when_reminders_come_less_often(old, new, kind):
    before, other = (load_text(written(f"{{on: fail, repeat: {interval}, do: [notify]}}")) for interval in (old, new))
    found = {change.field: change.kind for change in diff(before, other)}
    assert found == {"metadata.version": "changes", "escalation[0].repeat": kind}
