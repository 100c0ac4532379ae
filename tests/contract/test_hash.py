"""The content hash: what it does not notice, and what it must."""

import pytest

from kc_otel.contract.load import load_text

_TEXT = """
apiVersion: kernel-contract/v1
kind: KernelContract
metadata: {name: a, version: 1, owner: o}
kernels: {train: {engine: torch}, inference: {engine: vllm}}
assumptions: {reward_range: [0, 1], clip: 0.2}
slices: {long: {where: {n: ">= 8192", task: code}}}
numerical: [{id: half-range, metric: logit_half_range, statistic: p99, limit: 0.15}]
statistical: [{id: tv, metric: tv_token, limit: 0.007, slices: {long: 0.035}}]
runtime: [{id: ttft, metric: gen_ai.server.time_to_first_token, limit: 800ms}]
observability: {window: 5m, sampling: 0.5}
escalation: [{on: fail, for: 90s, do: [notify, {route: train-kernel}]}]
"""


@pytest.mark.parametrize(
    ("old", "new", "changed"),
    [
        ("limit: 0.007, slices: {long: 0.035}", "limit: 0.5, description: why, slices: {long: 0.1}", set()),
        ("metric: tv_token,", "metric: tv_token, statistic: mean, unit: prompt,", set()),
        ("metric: tv_token,", "metric: k3,", {("tv", "all"), ("tv", "long")}),
        ("metric: tv_token,", "metric: tv_token, unit: sequence,", {("tv", "all"), ("tv", "long")}),
        ("metric: tv_token,", "metric: tv_token, cap: 0.5,", {("tv", "all"), ("tv", "long")}),
        ("statistic: p99,", "statistic: p99.9,", {("half-range", "all"), ("half-range", "long")}),
        ('n: ">= 8192"', 'n: ">= 4096"', {("half-range", "long"), ("tv", "long"), ("ttft", "long"), ("drift", "long")}),
        ("reward_range: [0, 1]", "reward_range: [0, 2]", {("drift", "all"), ("drift", "long")}),
        ("id: tv,", "id: tv2,", {("tv", "all"), ("tv", "long")}),
    ],
)
def test_a_clause_measures_the_same_until_something_that_defines_it_changes(old, new, changed):
    """Its limits do not; its metric, statistic, unit, cap, slice and the assumptions that it is made of do."""
    text = _TEXT.replace("limit: 0.007, slices: {long: 0.035}}", "limit: 0.007, slices: {long: 0.035}}, {id: drift, "
                         "metric: reward_drift_bound, limit: 0.05}")  # fmt: skip
    before = load_text(text, "a.yaml").quantity_digests
    after = load_text(text.replace(old, new), "a.yaml").quantity_digests
    assert {where for where, digest in before.items() if after.get(where) != digest} == changed
    assert load_text(text, "a.yaml").recorded_digests.keys() == {id for id, _ in before} - {"ttft"}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("window: 5m", "window: 300s"),
        ("for: 90s", "for: 1m30s"),
        ("limit: 800ms", "limit: 0.8"),
        ("limit: 0.007", "limit: 0.7%"),
        ("limit: 0.007", "limit: '7e-3'"),
        ("observability:", "# a comment\nobservability:"),
        ("metric: tv_token,", "metric: tv_token, statistic: mean, unit: prompt,"),
        ("statistic: p99,", "statistic: p99.0,"),
        ("{name: a, version: 1, owner: o}", "{owner: o, name: a, version: 1}"),
        ('{n: ">= 8192", task: code}', '{task: [code], n: ">=8192"}'),
        ("sampling: 0.5", "sampling: 0.5, confidence: 0.99, heartbeat: 60s"),
        ("kind: KernelContract\n", "kind: 'KernelContract'\n"),
        ("{engine: torch}", "{engine: torch, dtype: null}"),
        ("kind:", "promotion: {windows: 3, steps: [1%, 5%, 25%], failure_limit: 1, approve: [], skip: []}\nkind:"),
    ],
)
def test_spelling_order_and_comments_do_not_count(old, new):
    assert old in _TEXT
    assert load_text(_TEXT.replace(old, new)).hash == load_text(_TEXT).hash
