from __future__ import annotations

import numpy as np

from kc_otel.record.kernel import Kernel, KernelPair
from kc_otel.record.pairing import sides_of
from kc_otel.record.work import BatchOrigin, KernelSide, laid_out


def test_a_side_that_waits_keeps_nothing_of_its_batch():
    """One sequence that waits for hours must not keep the arrays of the thousand that came with it."""
    arrays = {"token_ids": np.arange(12).reshape(3, 4), "logprobs": -np.ones((3, 4)), "advantages": np.ones((3, 4))}
    origin = BatchOrigin(KernelPair(Kernel("torch"), Kernel("vllm")))
    work = KernelSide(origin=origin, role="sampled", prompts=np.zeros((3, 1), int), **arrays)
    sides = [side for _, side in sides_of(work, laid_out(arrays, like="logprobs"))]
    assert len(sides) == 3
    for side in sides:
        assert [side.arrays[name].base for name in arrays] == [None] * 3
