"""What loosens, what tightens, and what is only different."""

import pytest

from kc_otel.contract.diff import diff
from kc_otel.contract.load import load_text

_TEXT = """
apiVersion: kernel-contract/v1
kind: KernelContract
metadata: {name: a, version: 1, owner: o}
kernels: {train: {engine: torch}, inference: {engine: vllm}}
assumptions: {reward_range: [0, 1], clip: 0.2, horizon: 4096}
slices:
  long: {where: {n: ">= 8192"}}
  code: {where: {task: code}}
numerical:
  - {id: half-range, metric: logit_half_range, statistic: p99, limit: 0.15}
  - {id: half-range-mean, metric: logit_half_range, statistic: mean, limit: 0.1, cap: 2}
statistical:
  - {id: tv, metric: tv_token, limit: 0.01, slices: {long: 0.02}}
  - {id: extreme, metric: ratio, statistic: fraction > 2, limit: 1%}
  - {id: reward, metric: reward_drift_bound, limit: 0.5}
  - {id: share, metric: clip_budget_share, limit: 0.5}
runtime:
  - {id: lag, metric: weights_lag, limit: 1}
observability: {window: 5m, long_window: 1h, confidence: 0.99, min_samples: 5000, sampling: 0.1, heartbeat: 60s}
escalation:
  - {on: fail, severity: warning, do: [notify]}
  - {on: fail, for: 2m, clear_for: 10m, severity: critical, do: [{route: train-kernel}, {webhook: pager}]}
  - {on: no-data, for: 3m, do: [notify, hold-promotion]}
promotion: {windows: 2, steps: [1%, 0.1], failure_limit: 2, approve: [full], skip: [shadow]}
"""
_OLD = load_text(_TEXT)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("limit: 0.15", "limit: 0.2", ["loosens numerical[half-range].limit"]),
        ("limit: 0.01,", "limit: 0.015,", ["loosens statistical[tv].limit"]),
        ("long: 0.02", "long: 0.03", ["loosens statistical[tv].slices.long"]),
        ("{long: 0.02}", "{}", ["tightens statistical[tv].slices.long"]),
        ("{long: 0.02}", "{long: 0.02, code: 0.02}", ["loosens statistical[tv].slices.code"]),
        ("{long: 0.02}", "{long: 0.02, code: 0.005}", ["tightens statistical[tv].slices.code"]),
        ("limit: 0.01, slices: {long: 0.02}", "limit: 0.02", ["loosens statistical[tv].limit"]),
        ("  - {id: share, metric: clip_budget_share, limit: 0.5}\n", "", ["drops statistical[share]"]),
        ("limit: 1}\n", "limit: 1}\n  - {id: more, metric: gen_ai.x, limit: 1}\n", ["adds runtime[more]"]),
        ("metric: tv_token", "metric: k3", ["drops statistical[tv]", "adds statistical[tv]"]),
        ("statistic: p99,", "statistic: p99.9,", ["tightens numerical[half-range].statistic"]),
        ("statistic: p99,", "statistic: max,", ["tightens numerical[half-range].statistic"]),
        ("statistic: p99,", "statistic: p95,", ["loosens numerical[half-range].statistic"]),
        ("statistic: p99,", "statistic: mean,", ["drops numerical[half-range]", "adds numerical[half-range]"]),
        ("fraction > 2", "fraction > 3", ["loosens statistical[extreme].statistic"]),
        ("fraction > 2", "fraction > 1.5", ["tightens statistical[extreme].statistic"]),
        ("cap: 2", "cap: 1", ["loosens numerical[half-range-mean].statistic"]),
        (", cap: 2", "", ["tightens numerical[half-range-mean].statistic"]),
        (
            "p99, limit: 0.15",
            "p95, limit: 0.1",
            ["loosens numerical[half-range].statistic", "tightens numerical[half-range].limit"],
        ),
        (
            "limit: 0.5}\n  - {id: share",
            "limit: 0.5, description: why}\n  - {id: share",
            ["changes statistical[reward].description"],
        ),
        # observability
        ("confidence: 0.99", "confidence: 0.95", ["loosens observability.confidence"]),
        ("min_samples: 5000", "min_samples: 4000", ["loosens observability.min_samples"]),
        ("sampling: 0.1", "sampling: 0.1, min_sequences: 50", ["loosens observability.min_sequences"]),
        ("sampling: 0.1", "sampling: 0.1, min_sequences: 500", ["tightens observability.min_sequences"]),
        (
            "metric: clip_budget_share",
            "metric: clip_budget_share, unit: token",
            ["drops statistical[share]", "adds statistical[share]"],
        ),
        ("sampling: 0.1", "sampling: 0.05", ["loosens observability.sampling"]),
        ("heartbeat: 60s", "heartbeat: 2m", ["loosens observability.heartbeat"]),
        ("heartbeat: 60s", "heartbeat: 60s, false_alarms: 60d", ["loosens observability.false_alarms"]),
        ("heartbeat: 60s", "heartbeat: 60s, false_alarms: 7d", ["tightens observability.false_alarms"]),
        ("window: 5m", "window: 10m", ["changes observability.window"]),
        ("heartbeat: 60s", "max_series: 100", ["loosens observability.max_series"]),
        # assumptions: factors of a bound
        ("[0, 1]", "[0, 0.9]", ["loosens assumptions.reward_range"]),
        ("[0, 1]", "[-1, 1]", ["tightens assumptions.reward_range"]),
        ("[0, 1]", "[1, 2]", ["changes assumptions.reward_range"]),
        ("clip: 0.2", "clip: 0.3", ["loosens assumptions.clip"]),
        ("clip: 0.2", "clip: 0.1", ["tightens assumptions.clip"]),
        ("horizon: 4096", "horizon: 100", ["changes assumptions.horizon"]),
        ("clip: 0.2", "clip: 0.2, density: true", ["loosens assumptions.density"]),
        # slices
        ("  code: {where: {task: code}}\n", "", ["drops slices.code"]),
        ("code: {where: {task: code}}", "code: {where: {task: code}}\n  new: {where: {x: 1}}", ["adds slices.new"]),
        ('">= 8192"', '">= 16384"', ["loosens slices.long.where"]),
        ('">= 8192"', '">= 1024"', ["loosens slices.long.where"]),
        ("{task: code}", "{task: [code, math]}", ["loosens slices.code.where"]),
        ("{task: code}", "{task: math}", ["loosens slices.code.where"]),
        ("{task: code}", "{task: code, lang: c}", ["loosens slices.code.where"]),
        ("{task: code}", "{task: [code]}", []),
        # escalation
        ("for: 2m", "for: 5m", ["loosens escalation[1].for"]),
        ("for: 2m", "for: 1m", ["tightens escalation[1].for"]),
        ("clear_for: 10m", "clear_for: 1m", ["loosens escalation[1].clear_for"]),
        ("clear_for: 10m", "clear_for: 20m", ["tightens escalation[1].clear_for"]),
        ("severity: critical", "severity: info", ["loosens escalation[1].severity"]),
        ("severity: warning", "severity: warning, repeat: 1h", ["tightens escalation[0].repeat"]),
        ("severity: warning", "severity: warning, repeat: 0s", ["loosens escalation[0].repeat"]),
        ("[notify, hold-promotion]", "[notify]", ["drops escalation[2].do"]),
        ("[notify, hold-promotion]", "[notify, halt]", ["drops escalation[2].do", "adds escalation[2].do"]),
        ("  - {on: no-data, for: 3m, do: [notify, hold-promotion]}\n", "", ["drops escalation[2]"]),
        ("do: [notify]}", "do: [notify], clauses: [tv]}", ["loosens escalation[0].clauses"]),
        ("escalation:\n", "escalation:\n  - {on: inconclusive, for: 1h, do: [notify]}\n", ["adds escalation[0]"]),
        # promotion
        ("windows: 2", "windows: 1", ["loosens promotion.windows"]),
        ("windows: 2", "windows: 3", ["tightens promotion.windows"]),
        ("failure_limit: 2", "failure_limit: 3", ["loosens promotion.failure_limit"]),
        ("failure_limit: 2", "failure_limit: 1", ["tightens promotion.failure_limit"]),
        ("[1%, 0.1]", "[0.1]", ["loosens promotion.steps"]),
        ("[1%, 0.1]", "[1%]", ["loosens promotion.steps"]),
        ("[1%, 0.1]", "[1%, 0.1, 0.5]", ["tightens promotion.steps"]),
        ("[1%, 0.1]", "[2%, 0.1]", ["loosens promotion.steps"]),
        ("approve: [full]", "approve: []", ["loosens promotion.approve"]),
        ("approve: [full]", "approve: [canary, full]", ["tightens promotion.approve"]),
        ("skip: [shadow]", "skip: [shadow, offline-ci]", ["loosens promotion.skip"]),
        ("skip: [shadow]", "skip: []", ["tightens promotion.skip"]),
        ("[1%, 0.1]", "[0.01, 10 %]", []),
        # what is only said
        ("owner: o", "owner: p", ["changes metadata.owner"]),
        ("engine: vllm", "engine: sglang", ["changes kernels.inference.engine"]),
        ("engine: vllm", "engine: vllm, dtype: fp8", ["tightens kernels.inference.dtype"]),
    ],
)
def test_each_change_is_named_and_judged(old, new, expected):
    """Going back is judged the other way round, where not both loosen: another slice, other steps of a canary."""
    assert old in _TEXT
    after = load_text(_TEXT.replace(old, new))
    assert _named(_OLD, after) == expected
    assert (after.hash == _OLD.hash) == (not expected)
    back = [f"{_OPPOSITE[kind]} {field}" for kind, field in map(str.split, expected)]
    assert sorted(_named(after, _OLD)) == sorted(back) or expected[0].endswith((".where", ".steps"))
    assert diff(after, after) == []


_OPPOSITE = {"loosens": "tightens", "tightens": "loosens", "adds": "drops", "drops": "adds", "changes": "changes"}


def _named(before, after):
    """Kinds and fields of all changes but that of the version."""
    changes = diff(before, after)
    assert all(change.sentence for change in changes)
    return [f"{change.kind} {change.field}" for change in changes if change.field != "metadata.version"]


def test_more_traffic_in_a_slice_tightens_maxima_alone():
    """Of a mean, a share or a quantile, sound traffic dilutes the fault; a maximum only grows."""
    head, _, foot = _TEXT.partition("numerical:")
    rest = "observability:" + foot.partition("observability:")[2]
    maxima = f"{head}statistical: [{{id: m, metric: abs_log_ratio, statistic: max, limit: 2}}]\n{rest}"
    for text, kind in ((maxima, "tightens"), (_TEXT, "loosens")):
        changes = diff(load_text(text), load_text(text.replace("{task: code}", "{task: [code, prose]}")))
        assert [(change.kind, change.field) for change in changes if "slices" in change.field] == [
            (kind, "slices.code.where")
        ]
    dense = load_text(_TEXT.replace("clip: 0.2", "clip: 0.2, density: true"))
    assert [change.kind for change in diff(dense, _OLD) if "density" in change.field] == ["tightens"]


def test_a_new_version_number_is_a_change_and_no_complaint():
    after = load_text(_TEXT.replace("version: 1", "version: 2").replace("limit: 0.15", "limit: 0.2"))
    assert diff(_OLD, after)[0].sentence == "1 becomes 2"
    stale = load_text(_TEXT.replace("limit: 0.15", "limit: 0.2"))
    assert diff(_OLD, stale)[0].sentence == "the content differs, but version is still 1"


def test_a_field_that_is_no_longer_declared_is_a_loosening():
    declared = load_text(_TEXT.replace("engine: vllm", "engine: vllm, dtype: fp8"))
    (change,) = [change for change in diff(declared, _OLD) if change.loosening]
    assert (change.field, change.sentence) == ("kernels.inference.dtype", "a kernel is no longer held to 'fp8'")


def test_reordered_steps_are_the_same_ladder():
    """Steps are paired by what they wait for, not by their place."""
    lines = _TEXT.splitlines()
    lines[-4:-1] = lines[-4:-1][::-1]
    assert [change.field for change in diff(_OLD, load_text("\n".join(lines)))] == ["metadata.version"]


def test_a_limit_of_a_slice_that_one_version_lacks_is_no_change_of_a_limit():
    more = _TEXT.replace("{task: code}}", "{task: code}}\n  new: {where: {x: 1}}")
    after = load_text(more.replace("{long: 0.02}", "{long: 0.02, new: 0.05}"))
    assert (_named(_OLD, after), _named(after, _OLD)) == (["adds slices.new"], ["drops slices.new"])
