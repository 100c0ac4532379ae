"""Every rule of lint, at its line."""

import pytest

from kc_otel.contract.limits import scale_of
from kc_otel.contract.lint import lint
from kc_otel.contract.model import Assumptions, Contract


def _clause(section: str, **fields: object) -> str:
    written = ", ".join(f"{name}: {value}" for name, value in {"id": "x", **fields}.items())
    return f"{section}: [{{{written}}}]"


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        # ids
        (
            ["runtime: [{id: token-tv, metric: weights_lag, limit: 1}]"],
            "5: runtime[0].id: 'token-tv' is already the id of s",
        ),
        (
            ["numerical:", "- {id: a, metric: js, limit: 0.1}", "- {id: a, metric: tv_exact, limit: 0.1}"],
            "7: numerical[1].id: 'a' is already the id of numerical[0]; choose another",
        ),
        # slices
        (["slices: {a: {where: {n: '>= 10, < 5'}}}"], "5: slices.a.where.n: '>= 10, < 5' can never match"),
        (
            ["slices: {a: {where: {prompt_tokens: many}}}"],
            "5: slices.a.where.prompt_tokens: 'many' can never match, as prom",
        ),
        (["slices: {a: {where: {n: '> 5, < 5'}}}"], "5: slices.a.where.n: '> 5, < 5' can never match"),
        (["slices: {a: {where: {n: '>= 5, <= 5, != 5'}}}"], "5: slices.a.where.n: '>= 5, <= 5, != 5' can never match"),
        (["slices: {a: {where: {n: '== 3, > 3'}}}"], "5: slices.a.where.n: '== 3, > 3' can never match"),
        (
            ["slices:", "  a: {where: {n: '>= 8, < 9', t: x}}", "  b: {where: {t: [x], n: '<9, >=8'}}"],
            "7: slices.b: has the same conditions as slice 'a'; remove one of the two",
        ),
        (
            [_clause("numerical", metric="js", limit=0.1, slices="{cod: 0.2}")],
            "5: numerical[0].slices.cod: no slice is named",
        ),
        (
            ["slices: {code: {where: {t: code}}}", _clause("numerical", metric="js", limit=0.1, slices="{cod: 0.2}")],
            "6: numerical[0].slices.cod: no slice is named 'cod'; did you mean 'code'?",
        ),
        (
            ["slices: {code: {where: {t: code}}}", _clause("numerical", metric="js", limit=0.1, slices="{zzz: 0.2}")],
            "6: numerical[0].slices.zzz: no slice is named 'zzz'; declared are code",
        ),
        (
            [_clause("numerical", metric="js", limit=0.1, slices="{all: 0.2}")],
            "5: numerical[0].slices.all: 'all' takes the",
        ),
        (
            [
                "slices: {late: {where: {position: '>= 64'}}}",
                "runtime: [{id: lag, metric: weights_lag, limit: 1, slices: {late: 2}}]",
            ],
            "6: runtime[0].slices.late: 'late' selects tokens by their position, but weights_lag is not about tokens",
        ),
        (
            ["slices: {late: {where: {position: far}}}"],
            "5: slices.late.where.position: 'far' can never match, as position is a number",
        ),
        # sections
        (
            [_clause("numerical", metric="k3", limit=0.1)],
            "5: numerical[0].metric: k3 is measured from logprobs; move the ",
        ),
        (
            [_clause("numerical", metric="k1", limit=0.1)],
            "5: numerical[0].metric: k1 is a bound; move the clause to statistic",
        ),
        (
            [_clause("runtime", metric="js", limit=0.1)],
            "5: runtime[0].metric: js is measured from logits; move the clause to n",
        ),
        (
            [_clause("numerical", metric="gen_ai.x", limit=1)],
            "5: numerical[0].metric: gen_ai.x is a runtime metric; move ",
        ),
        (
            [_clause("numerical", metric="weights_lag", limit=1)],
            "5: numerical[0].metric: weights_lag is measured from runtime",
        ),
        # limits
        (
            [_clause("numerical", metric="tv_exact", limit=4)],
            "5: numerical[0].limit: 4 is more than a total variation can be ",
        ),
        (
            [_clause("numerical", metric="tv_exact", statistic="fraction > 0.5", limit=5)],
            "5: numerical[0].limit: 5 is more than a fraction can be (0..1); did you mean 5%?",
        ),
        (
            [_clause("numerical", metric="tv_exact", limit=1)],
            "5: numerical[0].limit: 1 can never be exceeded: a total variat",
        ),
        (
            [_clause("numerical", metric="tv_exact", limit=-0.1)],
            "5: numerical[0].limit: -0.1 can never be kept: a total var",
        ),
        (
            [_clause("numerical", metric="js", limit=0.7)],
            "5: numerical[0].limit: 0.7 is more than a Jensen-Shannon divergence",
        ),
        (
            [_clause("numerical", metric="logit_half_range", statistic="mean", limit=20)],
            "5: numerical[0].limit: 20 can never",
        ),
        (
            [_clause("numerical", metric="logit_half_range", statistic="mean", cap=2, limit=3)],
            "5: numerical[0].limit: 3 can never be exceeded: the interval is for the mean of min(value, 2), at most 2",
        ),
        (
            [_clause("numerical", metric="top1_disagreement", unit="token", cap=0.1, limit=0.05)],
            "5: numerical[0].cap: top1_disagreement takes only two values, so its mean needs no cap",
        ),
        (
            [_clause("numerical", metric="js", statistic="max", cap=2, limit=0.1)],
            "5: numerical[0].cap: only a mean takes a cap",
        ),
        (
            [_clause("numerical", metric="entropy_difference", statistic="mean", limit=-9)],
            "5: numerical[0].limit: -9 can never",
        ),
        (
            [_clause("runtime", metric="gen_ai.x", limit=-1)],
            "5: runtime[0].limit: -1 can never be kept: gen_ai.x is at least 0",
        ),
        (
            [_clause("numerical", metric="js", statistic="fraction > 0.1", limit=2)],
            "5: numerical[0].limit: 2 is more than a f",
        ),
        (
            [_clause("numerical", metric="js", statistic="fraction > 0.1", limit=-1)],
            "5: numerical[0].limit: -1 can never be k",
        ),
        (
            [_clause("numerical", metric="js", statistic="fraction > 0.7", limit=0.5)],
            "5: numerical[0].statistic: js is never ",
        ),
        (
            [_clause("numerical", metric="js", statistic="fraction > -1", limit=0.5)],
            "5: numerical[0].statistic: js is always ",
        ),
        (
            [
                "slices: {a: {where: {t: a}}}",
                "numerical:",
                "- id: x",
                "  metric: tv_exact",
                "  limit: 0.1",
                "  slices:",
                "    a: 40",
            ],
            "11: numerical[0].slices.a: 40 is more than a total variation can be (0..1); did you mean 0.04?",
        ),
        # window and confidence
        (
            ["observability: {window: 2h}"],
            "5: observability.window: 2h is longer than long_window (1h); make long_window",
        ),
        (["observability: {heartbeat: 6m}"], "5: observability.heartbeat: 6m is longer than window (5m)"),
        (["observability: {window: 0s, long_window: 1h}"], "5: observability.window: 0s holds no data"),
        (["observability: {false_alarms: 1m}"], "5: observability.false_alarms: 1m is shorter than window (5m)"),
        (["observability: {heartbeat: 0s}"], "5: observability.heartbeat: 0s holds no data"),
        (
            ["observability: {confidence: 0.9999999999}"],
            "5: observability.confidence: 0.9999999999 is so close to 1",
        ),
        # escalation
        (
            ["escalation:", "- on: fail", "  do: [notify]", "  clauses:", "  - token-vt"],
            "9: escalation[0].clauses[0]: no clause has the id 'token-vt'; did you mean 'token-tv'?",
        ),
        (
            ["escalation: [{on: invalid-input, do: [halt], clauses: [token-tv]}]"],
            "5: escalation[0].clauses: input checks apply to batches",
        ),
        (
            ["escalation: [{on: fail, do: [notify, halt, notify]}]"],
            "5: escalation[0].do[2]: notify occurs twice in this step",
        ),
        (
            ["escalation: [{on: no-data, do: [{route: train-kernel}]}]"],
            "5: escalation[0].do[0]: a route needs a failing kernel version, and no-data has none; write on: fail",
        ),
        (
            ["escalation: [{on: fail, do: [{route: inference-kernel}]}]"],
            "5: escalation[0].do[0].route: 'inference-kernel' is not a kernel that a slice can be routed to; write",
        ),
        (
            ["escalation:", "- {on: fail, do: [notify, halt]}", "- {on: fail, for: 5m, do: [notify]}"],
            "7: escalation[1]: repeats escalation[0] and adds nothing; remove it",
        ),
    ],
)
def test_each_rule_refuses_at_its_line(written, said, lines, problem):
    """One error, at the line, and nothing else."""
    problems = said(written(*lines))
    assert len(problems) == 1, problems
    assert problems[0].startswith(f"c.yaml:{problem}")


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        (
            [_clause("statistical", metric="reward_drift_bound", limit=0.1)],
            "reward_drift_bound needs assumptions.reward_range; ",
        ),
        (
            [
                "assumptions: {horizon: 9, score_norm_max: 1}",
                _clause("statistical", metric="gradient_bias_bound", limit=0.1),
            ],
            "gradient_bias_bound needs assumptions.advantage_max; write `assumptions: {advantage_max: 5}` with",
        ),
        (
            [_clause("statistical", metric="clip_budget_share", limit=0.1)],
            "clip_budget_share needs assumptions.clip; write",
        ),
        (
            ["assumptions: {reward_range: [0, 2]}", _clause("statistical", metric="reward_drift_bound", limit=2)],
            "2 can never be exceeded: a reward drift over this reward_range is at most 2",
        ),
        (
            ["assumptions: {reward_range: [0, 2]}", _clause("statistical", metric="reward_drift_bound", limit=3)],
            "3 is more than a reward drift over this reward_range can be (0..2); did you mean 0.003?",
        ),
        (
            [_clause("statistical", metric="support_deficit", limit=-0.1)],
            "-0.1 can never be kept: a probability is at least 0",
        ),
        (
            [_clause("statistical", metric="support_deficit", cap=0.5, limit=0.1)],
            "statistical[0].cap: the mean ratio without a deficit is 1",
        ),
        (
            [_clause("statistical", metric="k1", limit=5)],
            "5 can never be exceeded: the interval is for the mean of min(value, ",
        ),
        (["statistical: []"], "the contract has no clause; add one under numerical, statistical or runtime"),
    ],
)
def test_rules_about_derived_metrics_and_none(written, said, lines, problem):
    """Bounds need their assumptions, and have a largest value because of them."""
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
        (
            [_clause("numerical", metric="js", statistic="p99.9", limit=0.1)],
            "a p99.9 cannot PASS at confidence 0.99 with fewer than 5296 ",
        ),
        ([_clause("numerical", metric="logit_half_range", limit=0.1)], "numerical[0].metric: a p99.9 cannot PASS"),
        ([_clause("numerical", metric="js", limit=0)], "0 can never PASS"),
        (
            ["numerical: [{id: a, metric: js, limit: 0.1}, {id: b, metric: js, limit: 0.1}]"],
            "sets the same limit as clause 'a'",
        ),
        (
            ["observability: {max_series: 1}", "slices: {a: {where: {t: 1}}}"],
            "one kernel pair needs 2 streams (1 quantities on 2 slices)",
        ),
        (["escalation: [{on: fail, for: 2d, do: [notify]}]"], "escalation[0].for: 2d is more than a day"),
        (
            ["escalation: [{on: fail, clear_for: 25h, do: [notify]}]"],
            "escalation[0].clear_for: 1d1h is more than a day",
        ),
        (["escalation: [{on: fail, do: [sample-more]}]"], "every batch is measured already"),
        (
            ["escalation: [{on: fail, for: 5m, do: [notify]}, {on: fail, severity: critical, do: [halt]}]"],
            "critical comes before warning (escalation[0], for: 5m); write a longer time",
        ),
    ],
)
def test_what_is_probably_not_meant_is_a_warning(written, said, lines, problem):
    """It is said, but the contract can be used."""
    problems = said(written(*lines))
    assert len(problems) == 1, problems
    assert ": warning: " in problems[0]
    assert problem in problems[0]


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
    """With its limit as it is written, whatever the cap's digits, the metric's base and its unit."""
    head = "assumptions: {reward_range: [0, 1], clip: 0.2}"
    (problem,) = said(written(head, f"statistical:\n- {clause}", clause=False))
    added = problem[problem.index("`{") + 1 : problem.index("}`") + 1]
    assert said(written(head, f"statistical:\n- {clause}\n- {added}", clause=False)) == []


def test_a_cap_that_cuts_nothing_or_is_no_cut_needs_no_clause_on_what_is_above(written, said):
    """One at the largest possible value, and the ratio that support_deficit takes none to exceed."""
    tv = "{id: tv, metric: tv_token, limit: 0.004, cap: 1}"
    deficit = "{id: deficit, metric: support_deficit, limit: 0.01, cap: 20}"
    assert said(written(f"statistical:\n- {tv}\n- {deficit}", clause=False)) == []


def test_a_route_between_kernels_that_are_alike_is_refused(written, said):
    """Routing would change nothing."""
    text = written("escalation: [{on: fail, do: [{route: train-kernel}]}]").replace(
        "{engine: vllm, dtype: fp8}", "{engine: torch, dtype: bfloat16}"
    )
    (problem,) = said(text)
    assert problem.startswith(
        "c.yaml:5: escalation[0].do[0]: both kernels are declared alike, so a route changes nothing"
    )


def test_the_ladder_of_the_design_is_sound(contract):
    """Steps on different verdicts or clauses, and steps that climb, are not blamed."""
    contract(
        "observability: {sampling: 0.05}",
        "escalation:",
        "- {on: fail, severity: warning, do: [notify, sample-more]}",
        "- {on: fail, for: 2m, clear_for: 10m, severity: critical, do: [{route: train-kernel}, {webhook: pager}]}",
        "- {on: fail, for: 30m, clear_for: 10m, severity: critical, do: [{webhook: pager}], clauses: [token-tv]}",
        "- {on: no-data, for: 3m, do: [notify, hold-promotion]}",
    )


def test_a_step_that_acts_sooner_or_holds_longer_is_not_a_repetition(contract):
    """Nor is one of another severity, or one with an action of its own."""
    contract(
        "escalation:",
        "- {on: fail, for: 5m, do: [notify]}",
        "- {on: fail, for: 1m, do: [notify]}",
        "- {on: fail, for: 5m, clear_for: 1h, do: [notify]}",
        "- {on: fail, for: 5m, severity: critical, do: [notify]}",
        "- {on: fail, for: 5m, do: [notify, halt]}",
    )


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (
            "slices: {a: {where: {promt_tokens: '>= 8'}}}",
            "no integration sends 'promt_tokens'; did you mean",
        ),
        ("slices: {a: {where: {prompt_tokens: '8192'}}}", ""),
        ("slices: {a: {where: {task: code, tenant: '7', model_size: 7}}}", ""),
    ],
)
def test_an_attribute_that_is_nearly_one_of_ours(written, said, line, problem):
    """Names of one's own are nobody's business; one letter beside a name that we send is a slip."""
    assert [warning.split(": ", 3)[3][: len(problem)] for warning in said(written(line))] == [problem] * bool(problem)


@pytest.mark.parametrize("dtype", ["bfloat16", "torch.float16", "FP8_E4M3", "float8_e4m3fn", "int4", "w8a8", "auto"])
def test_number_formats_have_many_names(contract, dtype):
    """Those of torch, vLLM and checkpoints are known."""
    sound = contract().model_dump(by_alias=True)
    sound["kernels"]["inference"] |= {"dtype": dtype, "kv_cache_dtype": dtype}
    assert lint(Contract.model_validate(sound)) == []


@pytest.mark.parametrize(("dtype", "meant"), [("bloat16", "bfloat16"), ("fp9", "fp8"), ("int44", "int4")])
def test_a_number_format_that_is_misspelt_is_a_warning(contract, dtype, meant):
    """It would be another kernel's name."""
    mistaken = contract().model_dump(by_alias=True)
    mistaken["kernels"]["inference"]["dtype"] = dtype
    (found,) = lint(Contract.model_validate(mistaken))
    assert (found.level, found.loc) == ("warning", ("kernels", "inference", "dtype"))
    assert found.message.endswith(f"did you mean {meant!r}?")


def test_bounds_have_the_factors_that_the_registry_states():
    """E|l| / log(1+clip), (r_max - r_min) TV_seq and 2 A_max horizon G TV_seq, each checked against its formula."""
    assumptions = Assumptions(reward_range=(-1.0, 2.0), horizon=100, advantage_max=5.0, score_norm_max=40.0, clip=0.2)
    assert scale_of("clip_budget_share", assumptions) == pytest.approx(5.484814948)
    assert scale_of("reward_drift_bound", assumptions) == 3.0
    assert scale_of("gradient_bias_bound", assumptions) == 2 * 5 * 100 * 40
    assert scale_of("k1", Assumptions()) == 1.0
    assert scale_of("reward_drift_bound", Assumptions()) is None


def test_lint_is_pure_and_finds_nothing_in_a_sound_contract(contract):
    """The same contract gives the same findings, here none."""
    sound = contract()
    assert lint(sound) == lint(sound) == []


@pytest.mark.parametrize("share", [{"metric": "js", "statistic": "fraction > 0.1"}, {"metric": "top1_disagreement"}])
def test_a_share_of_none_is_a_promise_that_can_be_kept(written, said, share):
    """A limit of 0 on it holds while none is seen; and who acts on the one that was seen acts on a fact."""
    route = "escalation: [{on: fail, do: [{route: train-kernel}]}]"
    assert said(written(_clause("numerical", **share, limit=0), route)) == []


def test_a_limit_that_is_not_finite_is_refused(contract):
    """Contracts that were not read from a file are judged too."""
    sound = contract().model_dump(by_alias=True)
    sound["numerical"] = [{"id": "x", "metric": "logit_half_range", "statistic": "max", "limit": float("inf")}]
    assert [found.message for found in lint(Contract.model_validate(sound))] == [
        "inf is not a limit; write a finite number"
    ]


def test_a_cap_is_another_promise(written, said):
    """What lies above the cap counts in one of the two clauses only: neither may be deleted for the other."""
    plain, capped = "{id: token-tv, metric: js, limit: 0.04}", "{id: b, metric: js, limit: 0.04, cap: 0.05}"
    assert not any("sets the same limit" in warning for warning in said(written(f"numerical: [{plain}, {capped}]")))
