"""Every rule of lint, at its line."""

import pytest

from kc_otel.contract.limits import scale_of
from kc_otel.contract.lint import lint
from kc_otel.contract.model import Assumptions, Contract
from tests.contract.conftest import clause

_ROUTE = "escalation: [{on: fail, do: [{route: train-kernel}]}]"
_LATENCY = "runtime: [{id: ttft, metric: gen_ai.server.time_to_first_token, limit: 800ms}]"


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        # ids
        (["runtime: [{id: token-tv, metric: weights_lag, limit: 1}]"], "5: runtime[0].id: 'token-tv' is already the"),
        (
            ["numerical:", "- {id: a, metric: js, limit: 0.1}", "- {id: a, metric: tv_exact, limit: 0.1}"],
            "7: numerical[1].id: 'a' is already the id of numerical[0]; choose another",
        ),
        # slices
        (["slices: {a: {where: {n: '>= 10, < 5'}}}"], "5: slices.a.where.n: '>= 10, < 5' can never match"),
        (["slices: {a: {where: {prompt_tokens: many}}}"], "5: slices.a.where.prompt_tokens: 'many' can never match,"),
        ([clause(metric="js", slices="{cod: 0.2}")], "5: numerical[0].slices.cod: no slice is named"),
        (
            ["slices: {code: {where: {t: code}}}", clause(metric="js", slices="{cod: 0.2}")],
            "6: numerical[0].slices.cod: no slice is named 'cod'; did you mean 'code'?",
        ),
        (
            ["slices: {code: {where: {t: code}}}", clause(metric="js", slices="{zzz: 0.2}")],
            "6: numerical[0].slices.zzz: no slice is named 'zzz'; declared are code",
        ),
        ([clause(metric="js", slices="{all: 0.2}")], "5: numerical[0].slices.all: 'all' takes the"),
        (
            [
                "slices: {late: {where: {position: '>= 64'}}}",
                "runtime: [{id: lag, metric: weights_lag, limit: 1, slices: {late: 2}}]",
            ],
            "6: runtime[0].slices.late: 'late' selects tokens by their position, but weights_lag is not about tokens",
        ),
        (
            [
                "slices: {older: {where: {lag: '>= 1'}}}",
                "runtime: [{id: lag, metric: weights_lag, limit: 1, slices: {older: 2}}]",
            ],
            "6: runtime[0].slices.older: 'older' selects by lag, which weights_lag limits itself; leave it out",
        ),
        (["slices: {late: {where: {position: far}}}"], "5: slices.late.where.position: 'far' can never match, as"),
        # limits
        ([clause(metric="tv_exact", limit=4)], "5: numerical[0].limit: 4 is more than a total variation can be "),
        (
            [clause(metric="tv_exact", statistic="fraction > 0.5", limit=5)],
            "5: numerical[0].limit: 5 is more than a fraction can be (0..1); did you mean 5%?",
        ),
        ([clause(metric="tv_exact", limit=1)], "5: numerical[0].limit: 1 can never be exceeded: a total variat"),
        ([clause(metric="tv_exact", limit=-0.1)], "5: numerical[0].limit: -0.1 can never be kept: a total var"),
        ([clause(metric="js", limit=0.7)], "5: numerical[0].limit: 0.7 is more than a Jensen-Shannon divergence"),
        ([clause(metric="logit_half_range", statistic="mean", limit=20)], "5: numerical[0].limit: 20 can never"),
        ([clause(metric="logit_half_range", statistic="mean", cap=2, limit=3)], "5: numerical[0].limit: 3 can never"),
        ([clause(metric="top1_disagreement", unit="token", cap=0.1, limit=0.05)], "5: numerical[0].cap: top1_disagre"),
        ([clause(metric="js", statistic="max", cap=2)], "5: numerical[0].cap: only a mean takes a cap"),
        ([clause(metric="entropy_difference", statistic="mean", limit=-9)], "5: numerical[0].limit: -9 can never"),
        ([clause("runtime", metric="gen_ai.x", limit=-1)], "5: runtime[0].limit: -1 can never be kept: gen_ai.x is"),
        ([clause(metric="js", statistic="fraction > 0.1", limit=2)], "5: numerical[0].limit: 2 is more than a f"),
        ([clause(metric="js", statistic="fraction > 0.1", limit=-1)], "5: numerical[0].limit: -1 can never be k"),
        ([clause(metric="js", statistic="fraction > 0.7")], "5: numerical[0].statistic: js is never "),
        ([clause(metric="js", statistic="fraction > -1")], "5: numerical[0].statistic: js is always "),
        (
            ["slices: {a: {where: {t: a}}}", clause(metric="tv_exact", slices="{a: 40}")],
            "6: numerical[0].slices.a: 40 is more than a total variation can be (0..1); did you mean 0.04?",
        ),
        # window and confidence
        (["observability: {window: 2h}"], "5: observability.window: it is longer than long_window; make"),
        (["observability: {heartbeat: 6m}"], "5: observability.heartbeat: it is longer than window (5m), which"),
        (["observability: {window: 0s, long_window: 1h}"], "5: observability.window: 0s holds no data"),
        (["observability: {false_alarms: 1m}"], "5: observability.false_alarms: it is shorter than window (5m)"),
        (["observability: {heartbeat: 0s}"], "5: observability.heartbeat: 0s holds no data"),
        (["observability: {confidence: 0.9999999999}"], "5: observability.confidence: 0.9999999999 is so close to 1"),
        # escalation
        (
            ["escalation: [{on: fail, do: [notify], clauses: [token-vt]}]"],
            "5: escalation[0].clauses[0]: no clause has the id 'token-vt'; did you mean 'token-tv'?",
        ),
        (["escalation: [{on: invalid-input, do: [halt], clauses: [token-tv]}]"], "5: escalation[0].clauses: input"),
        (["escalation: [{on: fail, do: [notify, halt, notify]}]"], "5: escalation[0].do[2]: notify occurs twice in"),
        (["escalation: [{on: no-data, do: [{route: train-kernel}]}]"], "5: escalation[0].do[0]: a route needs a"),
        (["escalation: [{on: fail, do: [{route: inference-kernel}]}]"], "5: escalation[0].do[0].route:"),
    ],
)
def test_each_rule_refuses_at_its_line(written, said, lines, problem):
    problems = said(written(*lines))
    assert len(problems) == 1, problems
    assert problems[0].startswith(f"c.yaml:{problem}")


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ([clause("statistical", metric="reward_drift_bound")], "reward_drift_bound needs assumptions.reward_range; "),
        (
            ["assumptions: {horizon: 9, score_norm_max: 1}", clause("statistical", metric="gradient_bias_bound")],
            "gradient_bias_bound needs assumptions.advantage_max; write `assumptions: {advantage_max: 5}` with",
        ),
        ([clause("statistical", metric="clip_budget_share")], "clip_budget_share needs assumptions.clip; write"),
        (
            ["assumptions: {reward_range: [0, 2]}", clause("statistical", metric="reward_drift_bound", limit=2)],
            "2 can never be exceeded: a reward drift over this reward_range is at most 2",
        ),
        (
            ["assumptions: {reward_range: [0, 2]}", clause("statistical", metric="reward_drift_bound", limit=3)],
            "3 is more than a reward drift over this reward_range can be (0..2); did you mean 0.003?",
        ),
        ([clause("statistical", metric="support_deficit", limit=-0.1)], "-0.1 can never be kept: a probability is"),
        ([clause("statistical", metric="support_deficit", cap=0.5)], "statistical[0].cap: the mean ratio without a"),
        ([clause("statistical", metric="k1", limit=5)], "5 can never be exceeded: the interval is for the mean of"),
        (["statistical: []"], "the contract has no clause; add one under numerical, statistical or runtime"),
    ],
)
def test_rules_about_derived_metrics_and_none(written, said, lines, problem):
    problems = said(written(*lines, clause=False))
    assert len(problems) == 1, problems
    assert problem in problems[0]


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        (
            [
                "numerical:",
                "- {id: ulp, metric: operator_ulp, operator: attention, statistic: mean, limit: 1, cap: 5}",
                "- {id: other, metric: operator_ulp, operator: mlp, statistic: fraction > 5, limit: 1%}",
            ],
            "add `{id: ulp-tail, metric: operator_ulp, operator: attention, statistic: fraction > 5, limit: 1%}` with",
        ),
        ([clause(metric="js", statistic="p99.9")], "a p99.9 cannot PASS at confidence 0.99 with fewer than 5296 "),
        ([clause(metric="logit_half_range")], "numerical[0].metric: a p99.9 cannot PASS"),
        ([clause(metric="js", limit=0)], "0 can never PASS"),
        (
            [_LATENCY, "escalation: [{on: fail, clauses: [ttft], do: [{route: train-kernel}]}]"],
            "escalation[0].do[0]: a route needs the kernel version of a breach",
        ),
        (["observability: {max_series: 1}", "slices: {a: {where: {t: 1}}}"], "for each of 3 slices), more than 1: "),
        (
            ["escalation: [{on: fail, do: [{webhook: chat}]}, {on: fail, for: 5m, do: [halt, {webhook: pager}]}]"],
            "escalation[1].for: a single burst of failures never lasts that long: pager is told of it only",
        ),
    ],
)
def test_what_is_probably_not_meant_is_a_warning(written, said, lines, problem):
    problems = said(written(*lines))
    assert len(problems) == 1, problems
    assert ": warning: " in problems[0]
    assert problem in problems[0]


@pytest.mark.parametrize(
    "lines",
    [
        [_LATENCY, "escalation: [{on: fail, do: [halt]}]"],
        [_LATENCY, "escalation: [{on: fail, repeat: 30m, do: [{webhook: pager}]}]"],
        [_LATENCY, "escalation: [{on: fail, clauses: [token-tv, ttft], do: [{route: train-kernel}]}]"],
        # A limit of 0 on a share holds while none is seen; and who acts on the one that was seen acts on a fact.
        [clause(metric="js", statistic="fraction > 0.1", limit=0), _ROUTE],
        [clause(metric="top1_disagreement", limit=0), _ROUTE],
    ],
)
def test_sound_steps_and_promises_are_accepted(written, said, lines):
    assert said(written(*lines)) == []


@pytest.mark.parametrize(
    "clause",
    [
        "{id: tv, metric: tv_token, limit: 0.004, cap: 0.0123456789}",
        "{id: tv, metric: tv_token, unit: token, limit: 0.004, cap: 0.02}",
        "{id: share, metric: clip_budget_share, limit: 0.1, cap: 0.25}",
        "{id: drift, metric: reward_drift_bound, limit: 0.1, cap: 0.25}",
        "{id: chi2, metric: chi2_token, unit: token, limit: 1, cap: 20}",
    ],
)
def test_the_clause_that_a_cap_is_told_to_have_ends_the_warning(written, said, clause):
    head = "assumptions: {reward_range: [0, 1], clip: 0.2}"
    (problem,) = said(written(head, f"statistical:\n- {clause}", clause=False))
    added = problem[problem.index("`{") + 1 : problem.index("}`") + 1]
    assert said(written(head, f"statistical:\n- {clause}\n- {added}", clause=False)) == []


@pytest.mark.parametrize("first", ["on: fail, for: 4m, do: [{webhook: pager}]", "on: no-data, for: 5m, do: [notify]"])
def test_a_step_may_last_as_long_as_it_likes_if_an_earlier_one_pages_or_it_pages_nobody(written, said, first):
    last = "do: [halt]" if "notify" in first else "do: [halt, {webhook: pager}]"
    assert said(written(f"escalation: [{{{first}}}, {{on: fail, for: 30m, {last}}}]")) == []


def test_a_cap_that_cuts_nothing_or_is_no_cut_needs_no_clause_on_what_is_above(written, said):
    tv = "{id: tv, metric: tv_token, limit: 0.004, cap: 1}"
    deficit = "{id: deficit, metric: support_deficit, limit: 0.01, cap: 20}"
    assert said(written(f"statistical:\n- {tv}\n- {deficit}", clause=False)) == []


def test_a_route_between_kernels_that_are_alike_is_refused(written, said):
    (problem,) = said(written(_ROUTE).replace("{engine: vllm, dtype: fp8}", "{engine: torch, dtype: bfloat16}"))
    assert problem.startswith("c.yaml:5: escalation[0].do[0]: both kernels are declared alike, so a route changes")


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("slices: {a: {where: {lang: en}}}", ""),
        ("slices: {a: {where: {promt_tokens: '>= 8'}}}", "no integration sends 'promt_tokens'; did you mean"),
        ("slices: {a: {where: {prompt_tokens: '8192'}}}", ""),
        ("slices: {a: {where: {task: code, tenant: '7', model_size: 7}}}", ""),
    ],
)
def test_an_attribute_that_is_nearly_one_of_ours(written, said, line, problem):
    """Names of one's own are nobody's business; one letter beside a name that we send is a slip."""
    assert [warning.split(": ", 3)[3][: len(problem)] for warning in said(written(line))] == [problem] * bool(problem)


def test_bounds_have_the_factors_that_the_registry_states():
    assumptions = Assumptions(reward_range=(-1.0, 2.0), horizon=100, advantage_max=5.0, score_norm_max=40.0, clip=0.2)
    assert scale_of("clip_budget_share", assumptions) == pytest.approx(5.484814948)
    assert scale_of("reward_drift_bound", assumptions) == 3.0
    assert scale_of("gradient_bias_bound", assumptions) == 2 * 5 * 100 * 40
    assert scale_of("k1", Assumptions()) == 1.0
    assert scale_of("reward_drift_bound", Assumptions()) is None


def test_lint_is_pure_and_finds_nothing_in_a_sound_contract(contract):
    sound = contract()
    assert lint(sound) == lint(sound) == []


def test_a_limit_that_is_not_finite_is_refused(contract):
    sound = contract().model_dump(by_alias=True)
    sound["numerical"] = [{"id": "x", "metric": "logit_half_range", "statistic": "max", "limit": float("inf")}]
    (found,) = lint(Contract.model_validate(sound))
    assert found.message == "inf is not a limit; write a finite number"
