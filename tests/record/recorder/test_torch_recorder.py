from __future__ import annotations

import gc
import re
import weakref

import numpy as np
import pytest

torch = pytest.importorskip("torch")


class Negative(torch.autograd.Function):
    """-x, whose backward node holds an object that shows whether the graph is alive."""

    @staticmethod
    def forward(ctx, x, held):
        ctx.held = held
        return -x

    @staticmethod
    def backward(_, grad):
        return -grad, None


@pytest.mark.slow
def test_no_graph_is_kept_and_gradients_still_flow(recorders, memory, held):
    class Part:
        pass

    part = Part()
    alive = weakref.ref(part)
    weight = torch.rand(8, requires_grad=True)
    train = Negative.apply(weight, part)[None]
    recorder = recorders()
    recorder.compare(train, train.detach() * 1.01)
    train.sum().backward()
    assert torch.allclose(weight.grad, torch.full((8,), -1.0))
    del train, part
    gc.collect()
    assert alive() is None
    held.set()
    assert recorder.force_flush()
    assert memory.count() == 8


def test_tensors_made_under_inference_mode_are_fine(recorders, memory, logprobs):
    train, inference = logprobs(2, 10)
    recorder = recorders()
    with torch.inference_mode():
        recorder.compare(torch.tensor(train) * 1.0, torch.tensor(inference) * 1.0)
    assert recorder.force_flush()
    assert memory.count() == 20


def test_the_two_sides_may_come_from_different_libraries(recorders, memory, logprobs):
    train, inference = logprobs(2, 10)
    recorder = recorders()
    recorder.compare(torch.tensor(train).bfloat16(), inference)
    recorder.compare(torch.tensor(train), inference.tolist(), mask=torch.ones(2, 10).long())
    recorder.compare([torch.tensor(train[0]), torch.tensor(train[1][:5])], [inference[0].tolist(), inference[1][:5]])
    recorder.sampled("a", token_ids=list(range(10)), logprobs=inference[0].tolist())
    recorder.scored("a", token_ids=torch.arange(10), logprobs=torch.tensor(train[0]).bfloat16())
    assert recorder.force_flush()
    assert (recorder.stats().dropped, recorder.stats().invalid) == ({}, {})
    assert memory.count() == 20 + 20 + 15 + 10


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_comparing_on_a_gpu_does_not_wait_for_it(recorders, memory, logprobs):
    train, inference = (torch.tensor(side, dtype=torch.float32, device="cuda") for side in logprobs(16, 256))
    mask = torch.ones(16, 256, dtype=torch.bool, device="cuda")
    expected = (train - inference).double().sum().item()
    recorder = recorders()
    torch.cuda.set_sync_debug_mode("error")
    try:
        recorder.compare(train, inference, mask=mask)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    train.zero_()
    assert recorder.force_flush()
    assert recorder.stats().dropped == {}
    assert memory.points("kc.drift.log_ratio")[0].sum == pytest.approx(expected, abs=1e-2)


def test_a_tensor_on_a_device_that_cannot_be_read_is_counted(recorders, memory, logprobs):
    recorder = recorders()
    recorder.compare(torch.empty(2, 3, device="meta"), torch.empty(2, 3, device="meta"))
    recorder.compare(*logprobs(1, 5))
    assert recorder.force_flush()
    assert sum(recorder.stats().dropped.values()) == 1
    assert memory.count() == 5
    assert np.isfinite(memory.points("kc.drift.log_ratio")[0].sum)


@pytest.mark.parametrize("make", [lambda z: z.to(torch.float8_e4m3fn), torch.Tensor.to_sparse], ids=["fp8", "sparse"])
def test_logits_that_a_cpu_does_not_read_are_refused_in_words(recorders, memory, caplog, make):
    """The log says of which kind they are and what to pass; the batch is counted, and the next one measured."""
    logits, recorder = torch.randn(4, 30), recorders()
    recorder.compare_logits(make(logits), make(logits))
    recorder.compare_logits(logits, logits)
    assert recorder.force_flush()
    assert recorder.stats().dropped == {"measure-failed": 1}
    assert memory.points("kc.drift.tv_exact")[0].count == 4
    (said,) = (record.getMessage() for record in caplog.records if "dropped" in record.getMessage())
    assert re.search(r"torch\.(float8_e4m3fn|sparse_coo) is not read on a CPU; pass a dense tensor of half", said)
