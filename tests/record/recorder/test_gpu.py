"""What only a GPU can settle: `make test-gpu`."""

import numpy as np
import pytest
import torch

from kc_otel.record.measure.logits import device_drift, logit_drift

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: make test-gpu where there is one"),
]


def logits(rows, vocab, dtype=torch.bfloat16):
    generator = torch.Generator("cuda").manual_seed(0)
    inference = 3 * torch.randn((rows, vocab), generator=generator, device="cuda")
    train = inference + 0.05 * torch.randn((rows, vocab), generator=generator, device="cuda")
    return train.to(dtype), inference.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_kernel_says_what_float64_says(dtype):
    """Rows of a large vocabulary, one of them NaN and one with -inf on a side, on the device as on the host."""
    train, inference = logits(8, 151_936, dtype)
    train[2, 5], inference[4, 9] = torch.nan, -torch.inf
    targets = torch.arange(8)
    found = logit_drift(train, inference, targets=targets)
    expected = logit_drift(train.double().cpu(), inference.double().cpu(), targets=targets)
    np.testing.assert_allclose(found.values, expected.values, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found.train_logprob[[0, 1, 7]], expected.train_logprob[[0, 1, 7]], rtol=1e-5)


def test_little_memory_is_needed_beside_the_logits():
    train, inference = logits(512, 151_936)
    logit_drift(train, inference)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    logit_drift(train, inference, targets=[0] * 512)
    assert torch.cuda.max_memory_allocated() - before < 0.01 * 2 * train.nbytes


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
def test_comparing_logits_does_not_wait_for_the_device():
    """The profiler sees one launch of the kernel, and between the first call and the last neither waits nor copies."""
    train, inference = logits(64, 32_768)
    at, targets = (torch.arange(64, device="cuda"),), torch.zeros(64, dtype=torch.int64, device="cuda")
    device_drift(train, inference, at, targets)
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        torch.cuda.set_sync_debug_mode("error")
        try:
            with torch.profiler.record_function("ours"):
                device_drift(train, inference, at, targets)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    events = profiler.events()
    (ours,) = (event.time_range for event in events if event.name == "ours" and event.device_type.name == "CPU")
    inside = {event.name for event in events if ours.start <= event.time_range.start <= ours.end}
    assert sum("drift_kernel" in event.name and event.device_type.name == "CUDA" for event in events) == 1
    assert not {name for name in inside if "Synchronize" in name or "emcpy" in name}


def test_a_graph_that_is_captured_meanwhile_stays_valid(recorders):
    """The engine captures a CUDA graph while a recorder measures in its own thread; both are right."""
    recorder = recorders()
    train, inference = logits(2048, 32_768)
    x = torch.ones(1024, device="cuda")
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    recorder.compare_logits(train, inference)
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(200):
            x += 1
    graph.replay()
    assert recorder.force_flush()
    torch.cuda.synchronize()
    assert x[0].item() == 201
    assert recorder.stats().dropped == {}
