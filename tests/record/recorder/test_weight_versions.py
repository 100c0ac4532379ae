"""Weight versions per token, of sequences that an update of the weights came under."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kc_otel.record.weight_versions import as_version, batch_versions

BOTH_AGES = np.array([[4] * 6 + [5] * 4, [5] * 10, [3] * 10])
"""The first sequence straddles an update; the trainer is at step 5."""
BY_AGE = {"older": {"where": {"lag": ">= 2"}}, "code": {"where": {"task": "code"}}}


def test_each_version_has_its_lag_in_the_slices_that_hold_its_tokens(recorders, memory, tracing, logprobs):
    """Padding has none; the span names the versions."""
    provider, spans = tracing
    versions = np.array([[3] * 5 + [4] * 5, [4] * 10, [1] * 10])
    mask = np.ones((3, 10), dtype=bool)
    versions[1, 8:], mask[1, 8:] = 0, False
    recorder = recorders(tracer_provider=provider)
    recorder.compare(
        *logprobs(3, 10), mask=mask, weights=(5, versions), attributes=[{"task": "code"}, {"task": "code"}, {}]
    )
    assert recorder.force_flush()
    lags = {point.attributes["kc.slice"]: point for point in memory.points("kc.weights.lag")}
    assert (lags["all"].count, lags["all"].max, lags["all"].sum) == (3, 4.0, 7.0)
    assert (lags["code"].count, lags["code"].max, lags["code"].sum) == (2, 2.0, 3.0)
    assert not memory.points("kc.drift.tv_seq", kc_slice="all")
    (drift,) = memory.points("kc.drift.tv_seq", kc_slice="stale")
    assert drift.count == 3
    (span,) = (candidate for candidate in spans.get_finished_spans() if candidate.name == "kc.compare")
    assert span.attributes["kc.weights.inference"] == "1,3,4"


def test_a_sequence_of_both_ages_is_measured_in_two_parts(recorders, memory, contract, logprobs):
    """Each token is where its own weights put it, with its advantage; the prompt counts once on each side."""
    train, inference = logprobs(3, 10)
    mask = np.ones((3, 10), dtype=bool)
    mask[0, 0] = mask[0, 9] = False
    recorder = recorders(contract=contract(slices=BY_AGE))
    recorder.compare(
        train, inference, mask=mask, weights=(5, BOTH_AGES), advantages=np.ones(3), groups=["a", "a", "b"],
        attributes={"task": "code"}, group_size=[2, 2, 1], token_ids=np.arange(30).reshape(3, 10),
    )  # fmt: skip
    assert recorder.force_flush()
    counts = {point.attributes["kc.slice"]: point for point in memory.points("kc.drift.log_ratio")}
    ratio = train - inference
    assert {name: point.count for name, point in counts.items()} == {
        "all": 13, "code": 13, "stale": 15, "stale-1": 5, "stale-2": 10, "older": 10
    }  # fmt: skip
    assert counts["all"].sum == pytest.approx(ratio[0, 6:9].sum() + ratio[1].sum(), abs=1e-5)
    assert counts["stale"].sum == pytest.approx(ratio[0, 1:6].sum() + ratio[2].sum(), abs=1e-5)
    lags = {point.attributes["kc.slice"]: point.sum for point in memory.points("kc.weights.lag")}
    assert lags == {"all": 3.0, "code": 3.0}
    assert recorder.stats().dropped == {}


def test_a_sequence_of_both_ages_is_one_observation_among_those_of_older_weights(recorders, memory, contract, logprobs):
    """Means over sequences and what is about whole ones take all of its tokens; the trainer's version keeps none."""
    train, inference = logprobs(3, 10)
    clauses = [{"id": metric, "metric": metric, "unit": "sequence", "limit": 0.1}
               for metric in ("tv_token", "tv_seq", "advantage_drift_positive")]  # fmt: skip
    recorder = recorders(contract=contract(slices=BY_AGE, statistical=clauses, assumptions={"reward_range": [0, 1]}))
    recorder.compare(
        torch.as_tensor(train), inference, weights=(5, BOTH_AGES), advantages=np.ones(3), rewards=np.ones(3),
        attributes={"task": "code"},
    )  # fmt: skip
    assert recorder.force_flush()
    found = {
        metric: {point.attributes["kc.slice"]: point for point in memory.points(f"kc.drift.{metric}")}
        for metric in ("tv_token_by_sequence", "advantage_drift_positive_by_sequence", "tv_seq")
    }
    for metric, points in found.items():
        assert {name: point.count for name, point in points.items()} == {
            "all": 1, "code": 1, "stale": 2, "stale-1": 1, "stale-2": 1, "older": 1
        }, metric  # fmt: skip
    means = np.maximum(-np.expm1(train - inference), 0).mean(1)
    assert found["tv_token_by_sequence"]["all"].sum == pytest.approx(means[1], abs=1e-6)
    assert found["tv_token_by_sequence"]["stale-1"].sum == pytest.approx(means[0], abs=1e-6)
    whole = max(-np.expm1((train - inference)[0].sum()), 0)
    assert found["tv_seq"]["stale-1"].sum == pytest.approx(whole, abs=1e-6)


def test_a_sequence_of_which_a_part_is_invalid_is_no_whole_one(recorders, memory, logprobs):
    train, inference = logprobs(2, 10)
    train[0, 2] = np.nan
    recorder = recorders()
    recorder.compare(train, inference, weights=(5, np.tile([4] * 6 + [5] * 4, (2, 1))))
    assert recorder.force_flush()
    assert (memory.count(), memory.count("stale")) == (8, 6)
    whole = {point.attributes["kc.slice"]: point.count for point in memory.points("kc.drift.tv_seq")}
    assert whole == {"stale": 1, "stale-1": 1}


def test_kernels_that_agree_bit_by_bit_drift_on_older_weights_alone(recorders, logprobs):
    """Rows at lag 0 are no copies for being equal where those of older weights are not; among their own they are."""
    train, inference = logprobs(60, 40, drift=0.09)
    train[:20] = inference[:20]
    recorder = recorders()
    recorder.compare(train, inference, weights=(5, np.repeat([5, 3], [20, 40])[:, None] * np.ones((1, 40), dtype=int)))
    assert recorder.force_flush()
    assert recorder.stats().invalid == {}
    recorder.compare(train, inference, weights=(5, 5))
    assert recorder.force_flush()
    assert set(recorder.stats().invalid) == {"placeholder"}


@pytest.mark.parametrize("ragged", [False, True])
def test_sides_that_come_apart_keep_the_versions_of_their_tokens(recorders, memory, logprobs, ragged):
    """In a batch of their own: sequences of one version do not wait for those of several."""
    train, inference = logprobs(2, 6)
    ids, versions = np.arange(12).reshape(2, 6), np.array([[7] * 6, [7, 7, 8, 8, 9, 9]])
    given = [ids, inference, versions, train]
    ids, inference, versions, train = ([column[0], column[1][:5]] for column in given) if ragged else given
    recorder = recorders()
    recorder.sampled(["a", "b"], token_ids=ids, logprobs=inference, weights=versions)
    recorder.sampled("c", token_ids=ids[0], logprobs=inference[0], weights=9)
    recorder.scored(["a", "b"], token_ids=ids, logprobs=train, weights=9)
    recorder.scored("c", token_ids=ids[0], logprobs=train[0], weights=9)
    assert recorder.force_flush()
    assert recorder.stats().batches == 2
    (lag,) = memory.points("kc.weights.lag", kc_slice="all")
    assert (lag.count, lag.max, lag.sum) == (4, 2.0, 3.0)


@pytest.mark.parametrize(
    "wrong",
    [np.zeros((2, 3), int), np.zeros((2, 6)), np.full((2, 6), "a"), np.zeros((3, 6), int), object(), [[1, 2], [2, 1]]],
)
def test_versions_that_do_not_fit_are_counted_and_never_raised(recorders, logprobs, wrong):
    recorder = recorders()
    recorder.compare(*logprobs(2, 6), weights=(5, wrong))
    recorder.compare(*logprobs(2, 6), weights=3)
    assert recorder.force_flush()
    stats = recorder.stats()
    assert stats.batches == 0
    assert sum(stats.dropped.values()) + stats.invalid.get("shape_mismatch", 0) // 2 == 2
    assert stats.dropped["weights-argument"] == 1


@pytest.mark.slow
def test_many_versions_are_counted_and_not_spelled_out():
    versions = np.arange(1_000_000).reshape(1000, 1000) % 1000
    found = batch_versions(None, versions, versions >= 0, np.ones((1000, 2), dtype=bool))
    assert found is not None
    assert found.steps.size == 1000
    assert str(found) == "1000 versions, the last 992,993,994,995,996,997,998,999"


def test_a_step_that_an_engine_reports_as_text_is_a_step():
    """Names and digests are not, though they may be made of digits."""
    assert [as_version(given) for given in ("3", "step-3", "20260601123", "")] == [3, "step-3", "20260601123", ""]


@pytest.mark.parametrize("form", ["arrays", "tensors", "lists", "ragged"])
def test_a_step_of_each_sequence_is_that_of_its_tokens(recorders, memory, logprobs, form):
    train, inference = logprobs(3, 10)
    steps = [5, 3, 4]
    if form == "tensors":
        train, inference, steps = torch.tensor(train), torch.tensor(inference), torch.tensor(steps)
    elif form == "arrays":
        steps = np.array(steps)
    elif form == "ragged":
        train, inference = ([side[row, : 4 + row] for row in range(3)] for side in (train, inference))
    recorder = recorders()
    recorder.compare(train, inference, weights=(5, steps))
    assert recorder.force_flush()
    assert recorder.stats().dropped == {}
    (lag,) = memory.points("kc.weights.lag", kc_slice="all")
    assert (lag.count, lag.max, lag.sum) == (3, 2.0, 3.0)
