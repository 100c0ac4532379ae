"""Faults of the pairing, through `Recorder.compare`: counted with a reason, and nothing of them measured."""

import numpy as np
import pytest

from kc_otel.record.telemetry.accumulate import Accumulator
from tests.tools.planted_faults import FAULTS, healthy


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_seen_in_tensors_as_in_arrays(name):
    """What is looked at on the device first lets none of them pass, and says the same of each."""
    torch = pytest.importorskip("torch")
    rows = FAULTS[name][0](healthy(40), np.random.default_rng(1))
    longest = max(train.size for train, _ in rows)
    train, inference = (np.full((len(rows), longest), -1.0) for _ in range(2))
    mask = np.zeros(train.shape, dtype=bool)
    for row, pair in enumerate(rows):
        for side, values in zip((train, inference), pair, strict=True):
            side[row, : values.size] = values
        mask[row, : pair[0].size] = True
    on_host = Accumulator(["all"]).add_sampled(train, inference, mask=mask)
    tensors = [torch.from_numpy(array) for array in (train, inference, mask)]
    on_device = Accumulator(["all"]).add_sampled(*tensors[:2], mask=tensors[2], _tensors=True)
    assert on_device.invalid == on_host.invalid
    assert FAULTS[name][1] in on_host.invalid


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
