"""Sides that wait for each other."""

from __future__ import annotations

from collections import deque

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kc_otel.record.kernel import Kernel, KernelPair
from kc_otel.record.pairing import PairingBuffer, Side, content_key, sides_of
from kc_otel.record.work import QueuedBatch, laid_out


def side(*tokens, weights=None):
    ids = np.array(tokens, dtype=np.int64)
    return Side({"token_ids": ids, "logprobs": -np.ones(ids.size)}, Kernel("torch"), weights)


def buffer(max_tokens=1000, max_age=60.0):
    return PairingBuffer(max_tokens=max_tokens, max_age=max_age)


def test_content_keys_tell_sequences_apart():
    """A key depends on tokens, prompt and the border between them, and not on the dtype."""
    keys = {content_key([1, 2, 3]), content_key([2, 3], [1]), content_key([3], [1, 2]), content_key([1, 2, 4])}
    assert len(keys) == 4
    assert content_key(np.array([1, 2], dtype=np.int32), np.array([7])) == content_key([1, 2], [7])


@given(st.lists(st.tuples(st.sampled_from(["sampled", "scored"]), st.integers(0, 4), st.integers(1, 3))))
def test_it_does_what_a_list_would_do(arrivals):
    waiting, model = buffer(max_tokens=8), deque()
    for number, (role, key, size) in enumerate(arrivals):
        pair, evicted = waiting.add(role, key, side(*range(size), weights=number), float(number))
        partner = next((m for m in model if m[0] != role and m[1] == key), None)
        if partner is not None:
            model.remove(partner)
            other = pair.scored if role == "sampled" else pair.sampled
            assert other.weights == partner[3]
            continue
        assert pair is None
        model.append((role, key, size, number))
        gone = 0
        while sum(m[2] for m in model) > 8:
            model.popleft()
            gone += 1
        assert evicted == gone
        assert waiting.tokens == sum(m[2] for m in model)
    assert len(waiting) == len(model)


def test_a_side_that_waits_keeps_nothing_of_its_batch():
    """One sequence that waits for hours must not keep the arrays of the thousand that came with it."""
    arrays = {"token_ids": np.arange(12).reshape(3, 4), "logprobs": -np.ones((3, 4)), "advantages": np.ones((3, 4))}
    said = {"role": "sampled", "key": None, "groups": None, "group_size": None, "weights": None, "processing": None}
    given = arrays | {"prompts": np.zeros((3, 1), int)}
    work = QueuedBatch("side", KernelPair(Kernel("torch"), Kernel("vllm")), given, said)
    sides = [side for _, side in sides_of(work, laid_out(arrays, like="logprobs"))]
    assert len(sides) == 3
    for side in sides:
        assert [side.arrays[name].base for name in arrays] == [None] * 3
