"""Weight versions per token, of sequences that an update of the weights came under."""

from __future__ import annotations

import numpy as np
import pytest

from kc_otel.record.weight_versions import batch_versions


def test_each_version_has_its_lag_in_the_slices_that_hold_its_tokens(recorders, memory, tracing, logprobs):
    """Padding has none; the span names the versions and counts the sequences that straddle."""
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
    (drift,) = memory.points("kc.drift.tv_seq", kc_slice="all")
    assert drift.count == 3
    (span,) = (each for each in spans.get_finished_spans() if each.name == "kc.compare")
    assert span.attributes["kc.weights.inference"] == "1,3,4"
    assert span.attributes["kc.compare.straddling"] == 1


@pytest.mark.parametrize("ragged", [False, True])
def test_sides_that_come_apart_keep_the_versions_of_their_tokens(recorders, memory, logprobs, ragged):
    """In a batch of their own: sequences of one version do not wait for those of several."""
    train, inference = logprobs(2, 6)
    ids, versions = np.arange(12).reshape(2, 6), np.array([[7] * 6, [7, 7, 8, 8, 9, 9]])
    given = [ids, inference, versions, train]
    ids, inference, versions, train = ([each[0], each[1][:5]] for each in given) if ragged else given
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
    [np.zeros((2, 3), int), np.zeros((2, 6)), np.full((2, 6), "a"), np.zeros((3, 6), int), object(), [[1], [2]]],
)
def test_versions_that_do_not_fit_are_counted_and_never_raised(recorders, logprobs, wrong):
    """Of another shape, no integers, or no array at all: nothing of the batch is measured."""
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
    """A million tokens of a thousand versions take no loop over them."""
    versions = np.arange(1_000_000).reshape(1000, 1000) % 1000
    found = batch_versions(None, versions, None, versions.shape, np.ones((1000, 2), dtype=bool))
    assert found is not None
    assert (found.steps.size, found.straddling) == (1000, 1000)
    assert str(found) == "1000 versions, the last 992,993,994,995,996,997,998,999"
