from __future__ import annotations

import logging
from collections import deque

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kc_otel.record.kernel import Kernel, KernelPair
from kc_otel.record.pairing import PairingBuffer, content_key, sides_of
from kc_otel.record.work import QueuedBatch, laid_out
from tests.tools.waiting import eventually


@pytest.fixture
def ids():
    return np.random.default_rng(3).integers(0, 1000, size=(3, 20))


@pytest.mark.parametrize("first", ["sampled", "scored"])
@pytest.mark.parametrize("key", [None, ["a", "b", "c"], "batch"])
def test_sides_are_compared_when_both_are_there(recorders, memory, logprobs, ids, first, key):
    train, inference = logprobs(3, 20)
    mask = np.ones((3, 20), dtype=bool)
    mask[2, 15:] = False
    recorder = recorders()
    sides = {
        "sampled": lambda: recorder.sampled(key, token_ids=ids, logprobs=inference, mask=mask, weights=6,
                                            attributes=[{"task": "code"}, {}, {}]),
        "scored": lambda: recorder.scored(key, token_ids=ids, logprobs=train, mask=mask, weights=6,
                                          attributes={"prompt_tokens": 200}, advantages=np.ones(3)),
    }  # fmt: skip
    sides.pop(first)()
    assert recorder.force_flush()
    assert recorder.stats().unpaired == 3
    assert memory.count() == 0
    next(iter(sides.values()))()
    assert recorder.force_flush()
    assert (memory.count(), memory.count("code"), memory.count("long")) == (55, 20, 55)
    (point,) = memory.points("kc.drift.log_ratio", kc_slice="all")
    assert point.sum == pytest.approx((train - inference)[mask].sum(), abs=1e-5)
    assert memory.points("kc.weights.lag", kc_slice="all")[0].sum == 0.0
    assert sum(p.count for p in memory.points("kc.drift.advantage_drift_positive", kc_slice="all")) == 55
    assert recorder.stats().unpaired == recorder.stats().unpaired_tokens == 0
    assert recorder.stats().dropped == recorder.stats().invalid == {}


def test_sides_may_come_in_other_batches_and_orders(recorders, memory, logprobs, ids):
    train, inference = logprobs(3, 20)
    recorder = recorders()
    for row in range(3):
        recorder.sampled(token_ids=ids[row].tolist(), logprobs=inference[row].tolist(), prompt_ids=[7, row])
    recorder.scored(token_ids=ids[::-1], logprobs=train[::-1], prompt_ids=[[7, 2], [7, 1], [7, 0]])
    assert recorder.force_flush()
    assert memory.count() == 60
    assert memory.points("kc.drift.log_ratio")[0].sum == pytest.approx((train - inference).sum(), abs=1e-5)


def test_the_same_answer_to_another_prompt_is_another_sequence(recorders, memory, logprobs, ids):
    (train,), (inference,) = logprobs(1, 20)
    recorder = recorders()
    recorder.sampled(token_ids=ids[0], logprobs=inference, prompt_ids=[1])
    recorder.scored(token_ids=ids[0], logprobs=train, prompt_ids=[2])
    recorder.force_flush()
    assert memory.count() == 0
    assert recorder.stats().unpaired == 2


def test_declared_processing_is_compared_where_both_sides_say_it(recorders, memory, logprobs, ids):
    """A temperature that only one side applied makes the pair invalid; silence is not held against it."""
    train, inference = logprobs(3, 20)
    recorder = recorders()
    recorder.sampled("a", token_ids=ids, logprobs=inference, processing={"temperature": 0.7})
    recorder.scored("a", token_ids=ids, logprobs=train, processing={"temperature": 1.0})
    recorder.sampled("b", token_ids=ids, logprobs=inference, processing={"temperature": 0.7})
    recorder.scored("b", token_ids=ids, logprobs=train)
    recorder.force_flush()
    assert recorder.stats().invalid == {"processing_mismatch": 3}
    assert memory.count() == 60


def test_a_side_belongs_to_the_kernel_that_was_current_when_it_came(recorders, memory, logprobs, ids):
    old, new = Kernel("vllm", dtype="bf16"), Kernel("vllm", dtype="int8")
    train, inference = logprobs(2, 20)
    recorder = recorders(inference=old)
    recorder.sampled("a", token_ids=ids[0], logprobs=inference[0])
    recorder.rollout(inference=new)
    recorder.force_flush()
    recorder.scored("a", token_ids=ids[0], logprobs=train[0])
    recorder.sampled("b", token_ids=ids[1], logprobs=inference[1])
    recorder.scored("b", token_ids=ids[1], logprobs=train[1])
    recorder.force_flush()
    counts = {p.attributes["kc.kernel.inference"]: p.count for p in memory.points("kc.drift.ratio")}
    assert counts == {old.fingerprint: 20, new.fingerprint: 20}
    recorder.force_flush()
    assert {p.attributes["kc.kernel.inference"] for p in memory.points("kc.drift.ratio")} == {new.fingerprint}


def test_what_waits_is_bounded_and_what_is_let_go_is_counted(recorders, memory, logprobs, ids):
    _, inference = logprobs(3, 20)
    recorder = recorders(pairing_tokens=45)
    recorder.sampled(["a", "b", "c"], token_ids=ids, logprobs=inference)
    recorder.force_flush()
    stats = recorder.stats()
    assert (stats.unpaired, stats.unpaired_tokens) == (2, 40)
    assert stats.dropped == {"pair-evicted": 1}
    assert memory.points("kc.recorder.dropped", kc_reason="pair-evicted")[0].value == 1


@pytest.mark.slow
def test_what_waits_too_long_is_let_go(recorders, logprobs, ids):
    _, inference = logprobs(1, 20)
    recorder = recorders(pairing_seconds=0.01)
    recorder.sampled("a", token_ids=ids[0], logprobs=inference[0])
    eventually(lambda: recorder.stats().dropped == {"pair-expired": 1})
    assert recorder.stats().unpaired == 0


@pytest.mark.parametrize("keys", ["of content", "of a batch", "single"])
def test_both_sides_sample_the_same_sequences(recorders, keys):
    """A single key is looked at before anything is copied."""
    tokens = np.random.default_rng(0).integers(0, 50, size=(300, 4))
    names = [f"request-{i}" for i in range(300)]
    recorder = recorders(sampling=0.3)
    for side, value in ((recorder.sampled, -1.0), (recorder.scored, -1.1)):
        if keys == "single":
            for name, row in zip(names, tokens, strict=True):
                side(name, token_ids=row, logprobs=np.full(4, value))
        else:
            side(names if keys == "of a batch" else None, token_ids=tokens, logprobs=np.full((300, 4), value))
    recorder.force_flush()
    stats = recorder.stats()
    assert stats.unpaired == 0
    assert 50 <= stats.sequences <= 130
    assert stats.unsampled == 2 * (300 - stats.sequences)
    assert keys == "of content" or stats.sequences == sum(map(recorder.takes, names))


@pytest.mark.parametrize(
    ("arguments", "dropped", "invalid"),
    [
        ({"token_ids": np.zeros((2, 3), int), "logprobs": np.zeros((2, 4))}, {}, {"shape_mismatch": 2}),
        ({"token_ids": [[1, 2], [3]], "logprobs": [[-1.0], [-1.0]]}, {}, {"shape_mismatch": 1}),
        ({"key": ["a"], "token_ids": np.zeros((2, 3), int), "logprobs": np.zeros((2, 3))}, {"measure-failed": 1}, {}),
        (
            {"attributes": [{}], "token_ids": np.zeros((2, 3), int), "logprobs": np.zeros((2, 3))},
            {"measure-failed": 1},
            {},
        ),
        ({"token_ids": np.zeros((2, 0), int), "logprobs": np.zeros((2, 0))}, {}, {}),
    ],
)
def test_sides_that_do_not_fit_are_counted(recorders, caplog, arguments, dropped, invalid):
    with caplog.at_level(logging.WARNING, "kc_otel"):
        recorder = recorders()
        recorder.scored(**arguments)
        assert recorder.force_flush()
    assert (recorder.stats().dropped, recorder.stats().invalid) == (dropped, invalid)


PAIR = KernelPair(Kernel("torch"), Kernel("vllm"))


def side(role, tokens, number):
    ids = np.arange(tokens)
    return QueuedBatch("side", PAIR, {"token_ids": ids, "logprobs": -np.ones(tokens)}, {"role": role, "number": number})


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
        pair, evicted = waiting.add(key, side(role, size, number), float(number))
        partner = next((m for m in model if m[0] != role and m[1] == key), None)
        if partner is not None:
            model.remove(partner)
            other = pair.scored if role == "sampled" else pair.sampled
            assert other.settings["number"] == partner[3]
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
    work = QueuedBatch("side", PAIR, given, said)
    sides = [side for _, side in sides_of(work, laid_out(arrays, like="logprobs"))]
    assert len(sides) == 3
    for side in sides:
        assert [side.arrays[name].base for name in arrays] == [None] * 3
