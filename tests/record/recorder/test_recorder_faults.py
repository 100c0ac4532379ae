"""Faults of the pairing, through `Recorder.compare`: counted with a reason, and nothing of them measured."""

import numpy as np
import pytest


@pytest.mark.slow
def test_evidence_of_tokens_sampled_elsewhere_adds_up_over_batches(recorders):
    """No small batch shows by itself that the mean of P/Q is above 1; many do, and the first honest one is measured."""
    rng = np.random.default_rng(0)
    recorder = recorders()
    for _ in range(200):
        inference = np.log(rng.uniform(0.3, 0.9, (2, 40)))
        recorder.compare(inference + rng.normal(0.1, 0.3, inference.shape).clip(max=-inference), inference)
    recorder.force_flush()
    assert 0 < recorder.stats().invalid["not_sampled"] < 400
    before = recorder.stats().sequences
    for _ in range(10):
        inference = np.log(rng.uniform(0.3, 0.9, (2, 40)))
        recorder.compare(inference - 0.01, inference)
    recorder.force_flush()
    assert recorder.stats().sequences > before + 10


@pytest.mark.parametrize("empty", [np.zeros((8, 0)), [[]] * 8, [np.zeros(0)] * 8, [], np.zeros(0)])
def test_a_batch_without_a_token_is_no_dropped_batch(recorders, empty):
    """A step with nothing to train on: the same as a mask that leaves nothing."""
    recorder = recorders()
    recorder.compare(empty, empty, groups="prompt", group_size=np.int64(8))
    recorder.force_flush()
    assert recorder.stats().dropped == {}
    assert set(recorder.stats().invalid) == {"no_tokens"}
