"""A loop that follows the evaluator's directives, and sequences that break the contract by themselves."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kc_otel.client.router import Router
from kc_otel.judge.decisions import DecisionTable, Directive, DirectiveKind
from kc_otel.record.guided_loop import quarantine
from kc_otel.record.kernel import Kernel
from tests.tools.contracts import contract_of

CLAUSES = [
    {"id": "tv", "metric": "tv_token", "unit": "token", "statistic": "mean", "limit": 0.05},
    {"id": "most", "metric": "abs_log_ratio", "statistic": "p90", "limit": 0.3},
    {"id": "worst", "metric": "ratio", "statistic": "max", "limit": 2.0},
    {"id": "often", "metric": "abs_log_ratio", "statistic": "fraction > 0.25", "limit": 0.2},
    {"id": "whole", "metric": "tv_seq", "statistic": "mean", "limit": 0.4},
    {"id": "by-sequence", "metric": "k3", "statistic": "mean", "unit": "sequence", "limit": 0.05},
    {"id": "reward", "metric": "reward_drift_bound", "limit": 0.5},
]


def contract(*clauses, **changes):
    parts = {
        "assumptions": {"reward_range": [0, 1], "horizon": 100},
        "slices": {"code": {"where": {"task": "code"}}, "long": {"where": {"prompt_tokens": ">= 100"}}},
        "statistical": list(clauses) or CLAUSES[:1],
    }
    return contract_of(**parts | changes)


def batch(rng, sequences=12, tokens=9):
    inference = np.log(rng.uniform(0.1, 0.8, (sequences, tokens)))
    drift = rng.normal(0.0, rng.uniform(0.0, 0.6, (sequences, 1)), (sequences, tokens))
    mask = np.arange(tokens) < rng.integers(1, tokens + 1, (sequences, 1))
    return np.minimum(inference + drift, -0.01), inference, mask


def own_values(clause, log_w):
    tokens = [x for row in log_w for x in row]
    match clause["id"]:
        case "tv":
            return sum(max(0.0, 1 - math.exp(x)) for x in tokens) / len(tokens)
        case "most":
            return sorted(abs(x) for x in tokens)[math.ceil(0.9 * len(tokens)) - 1]
        case "worst":
            return max(math.exp(x) for x in tokens)
        case "often":
            return sum(abs(x) > 0.25 for x in tokens) / len(tokens)
        case "whole":
            return sum(max(0.0, 1 - math.exp(sum(row))) for row in log_w) / len(log_w)
        case "by-sequence":
            return sum(sum(math.exp(x) - 1 - x for x in row) / len(row) for row in log_w) / len(log_w)


@given(st.integers(0, 2**32 - 1), st.sampled_from(CLAUSES[:6]), st.booleans())
def test_what_breaks_a_clause_by_itself_is_kept_out(seed, clause, tensors):
    """Each clause against its definition in plain Python, for NumPy and torch, and before and after are over tokens."""
    train, inference, mask = batch(np.random.default_rng(seed))
    log_w = [
        [float(np.float32(p - q)) for p, q, m in zip(*rows, strict=True) if m]
        for rows in zip(train.tolist(), inference.tolist(), mask.tolist(), strict=True)
    ]
    expected = [own_values(clause, [row]) <= clause["limit"] for row in log_w]
    given = (torch.tensor(train), torch.tensor(inference), torch.tensor(mask)) if tensors else (train, inference, mask)
    found = quarantine(*given[:2], contract(clause), mask=given[2])

    assert isinstance(found.keep, torch.Tensor) is isinstance(found.mask, torch.Tensor) is tensors
    assert found.keep.tolist() == expected
    assert [not reason for reason in found.reasons] == expected
    assert set(found.reasons) <= {"", clause["id"]}
    assert np.array_equal(np.asarray(found.mask), mask & np.array(expected)[:, None])
    kept = [row for row, stays in zip(log_w, expected, strict=True) if stays]
    assert (found.before.sequences, found.before.tokens) == (len(log_w), int(mask.sum()))
    assert (found.after.sequences, found.after.tokens) == (len(kept), sum(map(len, kept)))
    assert found.after.tv_sum == pytest.approx(sum(max(0.0, 1 - math.exp(x)) for row in kept for x in row), abs=1e-12)


def drifting(*amounts, tokens=4):
    inference = np.full((len(amounts), tokens), -2.0)
    return inference + np.array(amounts)[:, None], inference


def test_only_slices_in_quarantine_are_judged():
    train, inference = drifting(-1.0, -1.0, 0.0)
    rows = [{"task": "code"}, {"task": "prose"}, {"task": "code"}]
    wanted = {"attributes": rows, "slices": {"code": "token-tv is 0.3 where 0.05 is allowed"}}
    assert quarantine(train, inference, contract(), **wanted).reasons == ("tv", "", "")
    assert quarantine(train, inference, contract(), attributes=rows).reasons == ("tv", "tv", "")
    assert quarantine(train, inference, contract(), slices=["all"]).reasons == ("tv", "tv", "")
    assert quarantine(train, inference, contract(), slices=[]).reasons == ("", "", "")
    assert quarantine(train[:0], inference[:0], contract()).reasons == ()


def test_a_slices_own_limit_counts():
    """The smallest of its slices' own limits; the clause's where none has one."""
    clause = {**CLAUSES[0], "slices": {"long": 0.2}}
    train, inference = drifting(-0.1, -0.1, -0.3)
    rows = [{"prompt_tokens": 10}, {"prompt_tokens": 200}, {"prompt_tokens": 200}]
    assert quarantine(train, inference, contract(clause), attributes=rows).reasons == ("tv", "", "tv")


def test_the_clause_that_is_broken_by_most_is_the_reason():
    """In multiples of its limit; a limit of zero is broken by most."""
    train, inference = drifting(-1.0, 0.0)
    assert quarantine(train, inference, contract(*CLAUSES)).reasons == ("tv", "")
    never = {"id": "never", "metric": "abs_log_ratio", "statistic": "max", "limit": 0.0}
    assert quarantine(train, inference, contract(*CLAUSES, never)).reasons == ("never", "")
    assert quarantine(train, inference, contract(*CLAUSES), clauses=["often"]).reasons == ("often", "")


@pytest.mark.parametrize("make", [np.asarray, torch.as_tensor])
def test_sequences_that_cannot_be_compared_are_kept_out_by_name(make):
    train, inference = drifting(0.0, 0.0, 0.0, 0.0)
    train[0, 1], inference[1, 2], train[2, 3] = np.nan, -np.inf, np.nan
    mask = np.ones(train.shape, dtype=np.int64)
    mask[2, 3] = 0
    mask[3] = 0
    found = quarantine(make(train), make(inference), contract(), mask=make(mask))
    assert found.reasons == ("nan_logprob", "impossible_token", "", "")
    assert (found.before.sequences, found.before.tokens, found.after.tokens) == (3, 11, 3)


def test_densities_are_no_reason_where_the_contract_has_them():
    inference = np.linspace(-3.0, 3.0, 40).reshape(4, 10)
    for density, reason in ((True, ""), (False, "positive_logprob")):
        found = quarantine(inference + 0.001, inference, contract(assumptions={"density": density}))
        assert found.reasons[-1] == reason


def test_half_precision_with_gradients_is_judged():
    train, inference = drifting(-1.0, 0.0)
    held = torch.tensor(train, dtype=torch.bfloat16, requires_grad=True)
    found = quarantine(held, torch.tensor(inference, dtype=torch.bfloat16), contract())
    assert found.reasons == ("tv", "")
    assert not found.keep.requires_grad


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"clauses": ["tvv"]}, "has no clause 'tvv'; it has tv, reward"),
        ({"clauses": ["reward"]}, "only by a clause on one of log_ratio"),
        ({"clauses": ["tv", "reward"]}, "only by a clause on one of"),
        ({"attributes": [{}]}, "attributes: 1 for 2 sequences"),
        ({"mask": np.ones((2, 3))}, r"shapes \(2, 4\), \(2, 4\) and \(2, 3\)"),
    ],
)
def test_wrong_arguments_are_refused(changes, said):
    train, inference = drifting(0.0, 0.0)
    with pytest.raises(ValueError, match=said):
        quarantine(train, inference, contract(CLAUSES[0], CLAUSES[-1]), **changes)


LOOSE = [{"id": "tv", "metric": "tv_token", "unit": "token", "statistic": "mean", "limit": 0.1}]


@pytest.fixture
def recorder(recorders, contract):
    named = {name: {"where": {"task": name}} for name in ("code", "prose")}
    return recorders(contract=contract(slices=named, statistical=LOOSE), sampling=0.0)


@pytest.fixture
def asked(recorder):
    """A router whose evaluator asks for these kinds, of slice code."""
    router = Router.from_table(DecisionTable())

    def ask(*kinds, version=recorder.inference_version):
        name = recorder.contract.name
        found = tuple(Directive(name, kind, "code", f"{kind} because", 0.0, "f", version) for kind in sorted(kinds))
        router._take(DecisionTable(version=1, directives=found))
        return router

    return ask


def test_everything_is_measured_while_more_is_asked_for(recorder, asked, logprobs):
    """The contract's share before and after, all of it in between; spans and exports say the share of the moment."""
    loop = recorder.follow(asked())
    loop.compare(*logprobs(2, 10))
    asked(DirectiveKind.SAMPLING)
    loop.compare(*logprobs(3, 10))
    asked()
    loop.compare(*logprobs(4, 10))
    recorder.force_flush()
    assert recorder.stats().sequences == 3


def test_a_mask_leaves_out_what_is_in_quarantine(recorder, asked, logprobs):
    """Only sequences of the failing slice that break the contract by themselves, and only while it is asked for."""
    train, inference = logprobs(4, 20)
    train = train.copy()
    train[:2] -= 0.5
    tasks = [{"task": task} for task in ("code", "prose", "code", "prose")]
    mask = np.ones((4, 20), dtype=bool)
    mask[:, 15:] = False
    loop = recorder.follow(asked())
    assert loop.compare(train, inference, mask=mask, attributes=tasks) is mask
    asked(DirectiveKind.QUARANTINE_ROLLOUTS)
    kept = loop.compare(train, inference, mask=mask, attributes=tasks)
    assert kept.any(1).tolist() == [False, True, True, True]
    assert np.array_equal(kept[1:], mask[1:])
    recorder.force_flush()
    assert recorder.stats().quarantined == 1


@pytest.mark.parametrize("dtype", [np.bool_, np.int64, np.float32])
@pytest.mark.parametrize("form", ["array", "rows", "torch", "rows of torch"])
def test_the_mask_in_quarantine_is_the_callers_kind_of_array(recorder, asked, logprobs, form, dtype):
    """A loss takes `1 - mask`, or weighs by it, with and without a quarantine; sequences may differ in length."""
    train, inference = logprobs(3, 20)
    train = train - np.array([[0.5], [0.0], [0.5]])
    weight, sampled = dtype(0.5) if dtype is np.float32 else dtype(1), np.array([5, 5, 4])
    given = [train, inference, np.full((3, 20), weight), np.repeat(sampled[:, None], 20, 1)]
    if "rows" in form:
        given = [[row[:length] for row, length in zip(side, (20, 15, 10), strict=True)] for side in given]
    if "torch" in form:
        given = [torch.tensor(side) if form == "torch" else list(map(torch.tensor, side)) for side in given]
    loop = recorder.follow(asked(DirectiveKind.QUARANTINE_ROLLOUTS))
    kept = loop.compare(*given[:2], mask=given[2], weights=(5, given[3]), attributes={"task": "code"})
    assert [type(row) for row in kept] == [type(row) for row in given[2]]
    assert [row.dtype for row in kept] == [row.dtype for row in given[2]]
    assert [row.max().item() for row in kept] == [0, weight, weight]
    recorder.force_flush()
    assert recorder.stats().dropped == {}


def test_what_truncation_kept_is_taken_into_account(recorder, asked):
    """The trainer's log-probabilities are from before top-p: sound sequences stay, one that drifts does not."""
    loop = recorder.follow(asked(DirectiveKind.QUARANTINE_ROLLOUTS))
    rng = np.random.default_rng(4)
    inference = np.log(rng.uniform(0.2, 0.9, (4, 60)))
    mass = np.full((4, 60), np.log(0.8))
    train = inference + mass
    train[1] += rng.uniform(-0.8, 0.2, 60)
    mask = loop.compare(train, inference, attributes={"task": "code"}, kept=(mass, None))
    assert mask.all(axis=1).tolist() == [True, False, True, True]


def test_tokens_that_older_weights_sampled_break_nothing_by_themselves():
    """Their drift is the policy's change, too; the input checks are asked all the same."""
    train, inference = drifting(-1.0, -1.0, -1.0, 0.0)
    inference[2, 1] = np.nan
    of_tokens = [[4] * 4, [5] * 4, [4] * 4, [5] * 4], [[4] * 4, [4, 4, 4, 5], [4] * 4, [4] * 4]
    for versions in (*of_tokens, [4, 5, 4, 5]):  # and of sequences
        found = quarantine(train, inference, contract(), weights=(5, np.array(versions)))
        assert found.reasons == ("", "tv", "nan_logprob", "")
    assert quarantine(train, inference, contract(), weights=(5, "4")).reasons == ("", "", "nan_logprob", "")
    assert quarantine(train, inference, contract(), weights=(5, None)).reasons[:2] == ("tv", "tv")


def test_sequences_of_different_lengths_are_looked_at_too(recorder, asked, logprobs):
    """The mask has a row of its own for each."""
    train, inference = logprobs(3, 20)
    train[1] -= 0.5
    rows = [[list(row[:length]) for row, length in zip(side, (20, 8, 5), strict=True)] for side in (train, inference)]
    loop = recorder.follow(asked(DirectiveKind.QUARANTINE_ROLLOUTS))
    kept = loop.compare(*rows, attributes={"task": "code"})
    assert [row.tolist() for row in kept] == [[True] * 20, [False] * 8, [True] * 5]
    recorder.force_flush()
    assert (recorder.stats().quarantined, recorder.stats().dropped) == (1, {})


def test_what_cannot_be_looked_at_is_kept_and_counted(recorder, asked):
    loop = recorder.follow(asked(DirectiveKind.QUARANTINE_ROLLOUTS))
    assert loop.compare(np.zeros((2, 3)), np.zeros((3, 2)), mask=None) is None
    assert recorder.stats().dropped == {"quarantine-failed": 1}


def test_weights_are_sent_when_asked_and_not_at_every_step(recorder, asked):
    """At once, then after a pause while the reason lasts, and at once when it comes anew; a failure ends nothing."""
    calls = []

    def send():
        calls.append(step)
        if len(calls) == 1:
            raise OSError("the engine is busy")

    loop = recorder.follow(asked(), send_weights=send, pause=3)
    for step in range(12):
        if step in {1, 9}:
            asked(DirectiveKind.RESYNC_WEIGHTS)
        if step == 8:
            asked()
        assert loop.go_on()
    assert calls == [1, 4, 7, 9]
    assert loop.sent == ["resync-weights because"] * 3


def test_a_loop_that_cannot_send_weights_does_not_ask_whether_to(recorder, asked):
    """The evaluator's page can then say that nobody listens."""
    router = asked(DirectiveKind.RESYNC_WEIGHTS)
    assert recorder.follow(router).go_on()
    obeyed = [said for name, said in router._report() if name == "obeys"]
    assert obeyed == [f"{recorder.contract.name}/halt"]


def test_ranks_act_together_on_what_the_first_is_asked(recorder, asked):
    """Sending weights may be collective: a rank that is not asked sends them all the same, and ends with the others."""
    sent, said = [], iter([("stale", None), (None, "broken")])
    loop = recorder.follow(asked(), send_weights=lambda: sent.append(1))
    assert loop.go_on(agree=lambda own: next(said) if own == (None, None) else own)
    assert not loop.go_on(agree=lambda _: next(said))
    assert (sent, loop.reason) == ([1], "broken")


def test_directives_that_raise_cost_a_line(recorder, logprobs, caplog):
    loop = recorder.follow(SimpleNamespace(sampling=lambda *_: 1.0), send_weights=print)
    assert loop.go_on()
    assert loop.go_on()
    assert caplog.text.count("cannot be told; training goes on") == 1
    mask = np.ones((2, 8))
    assert loop.compare(*logprobs(2, 8), mask=mask) is mask
    recorder.force_flush()
    assert recorder.stats().dropped == {"quarantine-failed": 1}


def test_a_halt_ends_the_loop_for_good(recorder, asked):
    loop = recorder.follow(asked())
    assert loop.go_on()
    asked(DirectiveKind.HALT)
    assert not loop.go_on()
    asked()
    assert not loop.go_on()
    assert loop.reason.startswith(f"halt because, of {recorder.inference_version} since 1970-01-01 00:00:00 UTC; once")


def test_what_is_asked_because_of_another_version_is_ignored(recorder, asked, logprobs):
    """The run that broke was halted; the one with its fix goes on, until the kernel is that version again."""
    sent = []
    other, fixed = recorder.inference_version, Kernel("vllm", dtype="bfloat16", kv_cache_dtype="auto")
    loop = recorder.follow(asked(*DirectiveKind, version=other), send_weights=lambda: sent.append(1))
    recorder.rollout(inference=fixed)
    train, inference = logprobs(2, 10)
    mask = np.ones((2, 10), dtype=bool)
    assert loop.go_on()
    assert loop.compare(train - 0.5, inference, mask=mask, attributes={"task": "code"}) is mask
    recorder.force_flush()
    assert (recorder.stats().sequences, sent) == (0, [])
    recorder.rollout(inference=Kernel.declared(recorder.contract.kernels.inference))
    assert not loop.go_on()
    assert sent == [1]


def test_a_pause_is_a_number_of_steps(recorder, asked):
    with pytest.raises(ValueError, match="pause: 0 is not 1 or more"):
        recorder.follow(asked(), pause=0)
