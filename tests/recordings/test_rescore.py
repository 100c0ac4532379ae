"""Rescoring: what is comparable, in which batches, how fast, and that nothing leaves the spool unexported."""

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.metrics.export import MetricExportResult

from kc_otel.record.kernel import Kernel
from kc_otel.recordings import rescorer as rescorer_module
from kc_otel.recordings.request import KeptTokens, SampledRequest
from kc_otel.recordings.rescorer import RescoreError, Rescorer, batches, length, refusal
from kc_otel.recordings.scoring import UnavailableError, UnscorableError
from kc_otel.recordings.spool import Spool, SpoolReader

BF16 = Kernel("vllm", dtype="bfloat16")
FP8 = Kernel("vllm", dtype="bfloat16", kv_cache_dtype="fp8")


def request(name="r", prompt=4, tokens=6, **fields):
    """A request of some tokens, log Q = -1 throughout."""
    fields.setdefault("kernel", BF16)
    return SampledRequest(name, np.arange(prompt), np.arange(tokens), np.full(tokens, -1.0, np.float32), **fields)


def score(prompt_ids, token_ids, processing=None):
    """A training kernel that gives every token a tenth of a nat less."""
    assert len(prompt_ids) == len(token_ids)
    assert processing is not None
    return [np.full(ids.size, -1.1) for ids in token_ids]


@pytest.fixture
def spool(tmp_path):
    made = Spool(tmp_path / "spool.sqlite")
    yield made
    made.close()


@pytest.fixture
def rescorer(spool, recorders):
    """Rescores the requests given, and closes the spool's reader afterwards."""
    readers = []

    def make(*requests, recorder=None, score=score, **options):
        for entry in requests:
            spool.put(entry)
        assert spool.flush()
        for reader in readers:
            reader.close()
        readers[:] = [SpoolReader(spool.path)]
        options.setdefault("poll", 0.01)
        return Rescorer(readers[0], recorder or recorders(), score, **options)

    yield make
    for reader in readers:
        reader.close()


@pytest.mark.parametrize(
    ("fields", "against", "reason"),
    [
        ({}, {}, None),
        ({"processing": {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0}}, {}, None),
        ({"processing": {"temperature": 0.7}, "logprobs_mode": "processed"}, {}, None),
        ({"processing": {"temperature": 0.7, "top_p": 0.9, "top_k": 40}, "logprobs_mode": "processed"}, {}, None),
        ({"processing": {"temperature": 0.7}}, {}, "raw_logprobs"),
        ({"processing": {"top_p": 0.9}}, {}, "raw_logprobs"),
        ({"processing": {"temperature": 0.0}, "logprobs_mode": "processed"}, {}, "greedy"),
        ({"processing": {"repetition_penalty": 1.1}, "logprobs_mode": "processed"}, {}, "unsupported_processing"),
        ({"processing": {"logit_bias": "17:-5"}, "logprobs_mode": "processed"}, {}, "unsupported_processing"),
        ({"tokens": 0}, {}, "no_tokens"),
        ({"weights": "step-9"}, {"weights": "step-7"}, "wrong_weights"),
        ({"weights": "step-7"}, {"weights": "step-7"}, None),
        # Two optimizer steps are measured as weights_lag; a step against a name is another checkpoint.
        ({"weights": 3}, {"weights": 5}, None),
        ({"weights": 3}, {"weights": "5"}, "wrong_weights"),
        ({"weights": "5"}, {"weights": 5}, None),
        # The base model's log-probabilities of an adapter's tokens are another policy's.
        ({"attributes": {"lora": "sql"}}, {"adapter": "sql"}, None),
        ({"attributes": {"lora": "sql"}}, {"adapter": "python"}, "wrong_weights"),
        ({"attributes": {"lora": "sql"}}, {}, "wrong_weights"),
        ({}, {"adapter": "python"}, "wrong_weights"),
    ],
)
def test_what_cannot_be_compared_is_refused_with_a_reason(fields, against, reason):
    """Both sides' log-probabilities have to be of the distribution that the tokens were drawn from."""
    found = refusal(request(**fields), **against)
    assert (found and found[0]) == reason


@given(
    st.lists(
        st.tuples(st.integers(0, 50), st.integers(1, 50), st.sampled_from([BF16, FP8]), st.sampled_from([0.7, 1.0]))
    ),
    st.integers(1, 300),
)
def test_batches_hold_what_is_alike_and_fits(shapes, most):
    requests = [
        request(prompt=prompt, tokens=tokens, kernel=kernel, processing={"temperature": temperature})
        for prompt, tokens, kernel, temperature in shapes
    ]
    found = list(batches(requests, most))
    assert sorted(index for batch in found for index in batch) == list(range(len(requests)))
    for batch in found:
        members = [requests[index] for index in batch]
        assert len({(member.kernel, member.processing["temperature"]) for member in members}) == 1
        assert length(members[0]) == max(map(length, members))
        assert len(members) == 1 or len(members) * length(members[0]) <= most


def test_drift_of_served_requests_is_recorded_per_kernel_and_slice(rescorer, recorders, memory):
    recorder = recorders()
    made = rescorer(
        request("a", attributes={"task": "code"}),
        request("b", kernel=FP8, tokens=10),
        request("c", tokens=3, attributes={"task": "code"}),
        recorder=recorder,
    )
    totals = made.run(threading.Event())
    assert (totals.requests, totals.tokens, totals.confirmed) == (3, 19, 3)
    for kernel, tokens, drift in ((BF16, 9, -0.9), (FP8, 10, -1.0)):
        # Another kernel's turn ends a stream with the next export, so each pair's points are in some export.
        exports = range(len(memory.exports))
        cell = {"kc_slice": "all", "kc_kernel_inference": kernel.fingerprint}
        (point, *_) = [point for export in exports for point in memory.points("kc.drift.log_ratio", export, **cell)]
        assert (point.count, point.sum) == (tokens, pytest.approx(drift, abs=1e-5))
    assert max(memory.count("code", export) for export in range(len(memory.exports))) == 9
    assert made.run(threading.Event()).requests == 3


def test_rollouts_of_a_prompt_are_taken_together_however_they_are_mixed(
    rescorer, recorders, contract, memory, monkeypatch
):
    """An engine finishes the rollouts of many prompts in any order; a prompt that counts in parts narrows intervals."""
    monkeypatch.setattr(rescorer_module, "_TAKEN_AT_ONCE", 8)
    mixed = [request(f"{rollout}-{prompt}", prompt=3 + prompt, tokens=6 + rollout % 3)
             for rollout in range(6) for prompt in range(4)]  # fmt: skip
    recorder = recorders(contract=contract(statistical=[{"id": "tv", "metric": "tv_token", "limit": 0.1}]))
    totals = rescorer(*mixed, recorder=recorder).run(threading.Event())
    assert (totals.requests, totals.confirmed) == (24, 24)
    (rollouts,) = memory.points("kc.sampling.rollouts", kc_slice="all")
    assert (rollouts.count, rollouts.sum) == (4, 24)


def test_what_truncation_kept_is_compared_over_where_the_engine_says_it(rescorer, memory):
    asked = []

    def score_kept(prompt_ids, token_ids, processing=None, kept=None):
        assert (len(prompt_ids), processing) == (len(token_ids), {"top_k": 3})
        asked.append(kept)
        sides = [np.full(ids.size, -1.0) for ids in token_ids]
        return sides if kept is None else [np.stack((side + np.log(0.8), np.full(6, np.log(0.8)))) for side in sides]

    def flat(prompt_ids, token_ids, processing=None, kept=None):
        assert kept is not None
        return score(prompt_ids, token_ids, processing)

    mask = KeptTokens(np.arange(18), np.full(6, 3))
    served = {"processing": {"top_k": 3}, "logprobs_mode": "processed"}
    requests = [request("a", kept=mask, **served), request("b", **served)]
    assert rescorer(*requests, score=score_kept).run(threading.Event()).requests == 2
    assert sum(kept is None for kept in asked) == 1
    assert [tokens.ids.size for kept in asked if kept is not None for tokens in kept] == [18]
    (outside,) = memory.points("kc.drift.outside_mass", kc_slice="all")
    assert (outside.count, outside.sum) == (6, pytest.approx(1.2))
    (drift,) = memory.points("kc.drift.abs_log_ratio", kc_slice="all")
    assert (drift.count, drift.sum) == (12, pytest.approx(0.0, abs=1e-6))
    assert rescorer(request("c", kept=mask, **served)).run(threading.Event()).requests == 1
    with pytest.raises(RescoreError, match=r"return one log-probability per sampled token, and below these the log of"):
        rescorer(request("d", kept=mask), score=flat).run(threading.Event())


def test_requests_that_an_update_came_under_are_measured_with_the_lag_of_each_token(rescorer, memory):
    straddling = {"weights": ((3, 0), (4, 2))}
    assert rescorer(request("a", **straddling), request("b", weights=4), weights=5).run(threading.Event()).requests == 2
    (lag,) = memory.points("kc.weights.lag", kc_slice="all")
    assert (lag.count, lag.max, lag.sum) == (3, 2.0, 4.0)
    totals = rescorer(request("c", **straddling), weights="step-4").run(threading.Event())
    assert totals.refused == {"wrong_weights": 1}


def test_refused_requests_are_counted_on_their_slices_and_kernel(rescorer, memory):
    """A slice of which many requests are refused is not proven by the others, and no other kernel is blamed."""
    greedy = {"processing": {"temperature": 0.0}, "kernel": FP8}
    bad = UnscorableError("it is too long")

    def score_short(prompt_ids, token_ids, processing=None):
        if any(ids.size > 6 for ids in token_ids):
            raise bad
        return score(prompt_ids, token_ids, processing)

    code = {"attributes": {"task": "code"}}
    requests = [request("a", **greedy, **code), request("b", **greedy), request("c"), request("d", tokens=7, **code)]
    made = rescorer(*requests, score=score_short)
    assert made.run(threading.Event()).refused == {"greedy": 2, "scoring_failed": 1}
    names = ("kc.reason", "kc.slice", "kc.kernel.inference")
    counts = {tuple(p.attributes.get(name) for name in names): p.value for p in memory.points("kc.input.invalid")}
    assert counts == {
        ("greedy", "all", FP8.fingerprint): 2,
        ("greedy", "code", FP8.fingerprint): 1,
        ("scoring_failed", "all", BF16.fingerprint): 1,
        ("scoring_failed", "code", BF16.fingerprint): 1,
    }


def test_requests_stay_in_the_spool_until_their_drift_is_exported(rescorer, memory):
    memory.result = MetricExportResult.FAILURE
    stop = threading.Event()
    made = rescorer(request("a"), request("b"))
    thread = threading.Thread(target=made.run, args=(stop,))
    thread.start()
    while len(memory.exports) < 3:
        stop.wait(0.01)
    assert made.totals.confirmed == 0
    stop.set()
    thread.join(5)
    assert not thread.is_alive()
    memory.result = MetricExportResult.SUCCESS
    assert rescorer().run(threading.Event()).confirmed == 2


def test_requests_stay_in_the_spool_if_an_export_since_they_were_scored_lost_points(rescorer, recorders, memory):
    """A kernel's streams end with an export that is taken in part; a later one does not have them."""
    recorder = recorders()
    answers = ["the endpoint rejected 9 data points", "", ""]
    reject = recorder._measurer.counters.export_rejected
    memory.answering = lambda: answers and (why := answers.pop(0)) and reject(why, 9)

    def score_slowly(prompt_ids, token_ids, processing=None):
        recorder.force_flush()
        return score(prompt_ids, token_ids, processing)

    totals = rescorer(request("a"), request("b"), recorder=recorder, score=score_slowly).run(threading.Event())
    assert (totals.requests, totals.confirmed) == (2, 0)
    assert totals.unexported == "measured, not exported: the endpoint rejected 9 data points"
    assert rescorer(recorder=recorder).run(threading.Event()).confirmed == 2


def test_a_request_that_cannot_be_scored_costs_itself_only(rescorer):
    def picky(prompt_ids, token_ids, processing):
        if any(ids.size == 7 for ids in token_ids):
            raise RuntimeError("index out of range")
        return score(prompt_ids, token_ids, processing)

    totals = rescorer(request("a"), request("odd", tokens=7), request("b"), score=picky).run(threading.Event())
    assert totals.requests == 2
    assert totals.refused == {"scoring_failed": 1}
    assert totals.confirmed == 3


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (lambda _prompts, tokens, _processing: [1 / 0 for _ in tokens], "ZeroDivisionError"),
        (lambda _prompts, tokens, _processing: [np.zeros(3) for _ in tokens], "one log-probability per sampled token"),
        (lambda _prompts, _tokens, _processing: [], "returned 0 arrays"),
    ],
)
def test_a_model_that_fails_on_everything_stops_and_keeps_the_spool(rescorer, bad, said):
    with pytest.raises(RescoreError, match=said):
        rescorer(request("a"), request("b"), score=bad).run(threading.Event())
    assert rescorer().run(threading.Event()).confirmed == 2


@pytest.mark.parametrize("value", [np.nan, 0.5, np.inf])
def test_what_is_no_log_probability_is_not_taken_for_scored(rescorer, value):
    def some(_prompts, token_ids, _processing):
        return [np.full(ids.size, value if ids.size == 6 else -1.1) for ids in token_ids]

    totals = rescorer(request("a"), request("b", tokens=7), score=some).run(threading.Event())
    assert (totals.requests, totals.refused) == (1, {"scoring_failed": 1})
    broken = rescorer(request("c"), request("d"), score=some)
    with pytest.raises(RescoreError, match=f"returned {value:g}, which is no log-probability"):
        broken.run(threading.Event())
    assert broken.totals.confirmed == 0


def test_a_kernel_that_stops_answering_loses_no_request(rescorer):
    answers = [ValueError("a batch of two"), None, UnavailableError("connection refused")]

    def dying(_prompts, token_ids, _processing):
        if (error := answers.pop(0)) is not None:
            raise error
        return [np.full(ids.size, -1.1) for ids in token_ids]

    broken = rescorer(request("a"), request("b"), score=dying)
    with pytest.raises(RescoreError, match="connection refused"):
        broken.run(threading.Event())
    assert (broken.totals.confirmed, broken.totals.refused) == (0, {})


def test_a_request_that_a_kernel_cannot_take_holds_up_no_other(rescorer):
    def short(_prompts, _tokens, _processing):
        raise UnscorableError("it fills the context")

    totals = rescorer(request("a"), score=short).run(threading.Event())
    assert (totals.confirmed, totals.refused) == (1, {"scoring_failed": 1})


def test_following_picks_up_what_comes_later(rescorer, spool):
    stop = threading.Event()
    made = rescorer(follow := request("a"))
    thread = threading.Thread(target=made.run, args=(stop,), kwargs={"follow": True})
    thread.start()
    while made.totals.confirmed < 1:
        stop.wait(0.01)
    spool.put(follow)
    while made.totals.confirmed < 2:
        stop.wait(0.01)
    stop.set()
    thread.join(5)
    assert not thread.is_alive()


def test_the_comparison_is_linked_to_the_requests_spans(rescorer, recorders, tracing):
    provider, spans = tracing
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    served = request("a", traceparent=f"00-{trace_id}-b7ad6b7169203331-01")
    rescorer(served, request("b", traceparent="rubbish"), recorder=recorders(tracer_provider=provider)).run(
        threading.Event()
    )
    (span,) = [candidate for candidate in spans.get_finished_spans() if candidate.name == "kc.compare"]
    assert [f"{link.context.trace_id:032x}" for link in span.links] == [trace_id]


def test_whoever_looks_on_costs_nothing(rescorer, caplog):
    looked = []

    def fails(requests, found):
        looked.append((len(requests), found[0][0]))
        raise OSError("the worst sequences cannot be kept")

    requests = [request(f"r{n}", prompt=4 + 100 * n) for n in range(2)]
    totals = rescorer(*requests, seen=fails, batch_tokens=1).run(threading.Event())
    assert (totals.confirmed, looked) == (2, [(1, pytest.approx(-1.1))])
    assert caplog.text.count("the worst sequences cannot be kept") == 1
