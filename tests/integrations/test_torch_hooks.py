from __future__ import annotations

import copy
import pickle
import types

import pytest

torch = pytest.importorskip("torch")

from kc_otel.integrations import torch as watching  # noqa: E402 - it needs torch

VOCABULARY, WIDTH = 37, 16


class Tiny(torch.nn.Module):
    """A causal language model small enough for a test: an embedding, a causal mean, a head."""

    def __init__(self, seed=0, dtype=torch.float32, wrap=False, dropout=0.0):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.embedding = torch.nn.Embedding(VOCABULARY, WIDTH, dtype=dtype)
            self.head = torch.nn.Linear(WIDTH, VOCABULARY, dtype=dtype)
        self.dropout = torch.nn.Dropout(dropout)
        self.wrap = wrap

    def forward(self, input_ids, attention_mask=None, **_):
        hidden = self.embedding(input_ids)
        if attention_mask is not None:
            hidden = hidden * attention_mask[..., None].to(hidden.dtype)
        steps = torch.arange(1, input_ids.shape[1] + 1, dtype=hidden.dtype)
        logits = self.head(torch.tanh(self.dropout(hidden).cumsum(1) / steps[None, :, None]))
        return types.SimpleNamespace(logits=logits) if self.wrap else logits


@pytest.fixture
def ids():
    return torch.randint(0, VOCABULARY, (3, 9), generator=torch.Generator().manual_seed(1))


def reference_logprobs(model, ids, mask=None):
    logits = getattr(model(ids, mask), "logits", None)
    logits = model(ids, mask) if logits is None else logits
    return logits[:, :-1].double().log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1).detach()


@pytest.mark.parametrize("wrap", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_two_observed_kernels_are_compared_on_what_both_saw(recorders, memory, ids, wrap, masked):
    train, inference = Tiny(wrap=wrap), Tiny(wrap=wrap).bfloat16()
    mask = None
    if masked:
        mask = torch.ones_like(ids)
        mask[0, :4] = 0  # padded on the left
        mask[1, 6:] = 0  # padded on the right
    recorder = recorders()

    def first_is_code(args, _):
        return [{"task": "code"}] + [{}] * (len(args[0]) - 1)

    with (
        watching.observe(train, recorder, side="train"),
        watching.observe(inference, recorder, side="inference", attributes=first_is_code),
    ):
        inference(ids, mask)
        train(ids, mask)
    assert recorder.force_flush()
    counted = torch.ones(3, 8, dtype=torch.bool) if mask is None else (mask[:, 1:] * mask[:, :-1]).bool()
    expected = (reference_logprobs(train, ids, mask) - reference_logprobs(inference, ids, mask))[counted]
    (point,) = memory.points("kc.drift.log_ratio", kc_slice="all")
    assert point.count == counted.sum()
    assert point.sum == pytest.approx(expected.sum().item(), abs=1e-4)
    assert memory.count("code") == counted[0].sum()
    assert recorder.stats().unpaired == 0
    assert (recorder.stats().dropped, recorder.stats().invalid) == ({}, {})


def test_labels_say_which_tokens_count(recorders, memory, ids):
    model = Tiny()
    labels = ids.clone()
    labels[:, :5] = -100
    recorder = recorders()
    with watching.observe(model, recorder, side="train"):
        model(ids, labels=labels)
    with watching.observe(model, recorder, side="inference"):
        model(input_ids=ids, labels=labels)
    recorder.force_flush()
    assert memory.count() == 3 * 4


def test_an_observed_kernel_pairs_with_what_an_engine_reported(recorders, memory, ids):
    model = Tiny()
    recorder = recorders()
    scores = reference_logprobs(model, ids)
    for row in range(3):
        recorder.sampled(
            prompt_ids=ids[row, :1].tolist(), token_ids=ids[row, 1:].tolist(), logprobs=(scores[row] - 0.01).tolist()
        )
    with watching.observe(model, recorder, side="train"):
        model(ids)
        model(ids[:, :1])  # generation from a cache, which has nothing to record
    recorder.force_flush()
    assert memory.points("kc.drift.log_ratio")[0].sum == pytest.approx(0.24, abs=1e-4)
    assert (recorder.stats().unpaired, recorder.stats().dropped) == (0, {})


def state(module):
    return {
        name: {key: dict(value) if hasattr(value, "items") else value for key, value in vars(submodule).items()}
        for name, submodule in module.named_modules()
    }


def test_removing_leaves_no_trace(recorders, ids):
    model, reference, recorder = Tiny(), Tiny().eval(), recorders()
    before, expected = state(model), model(ids)
    watches = [
        watching.observe(model, recorder, side="train"),
        watching.shadow(model, reference, recorder, side="inference"),
    ]
    assert state(model) != before
    assert torch.equal(model(ids), expected)
    for watch in (*watches, *watches):
        watch.remove()
    assert state(model) == before
    assert not model._forward_hooks
    assert not model._forward_hooks_with_kwargs


def test_copies_of_a_watched_module_are_not_watched(recorders, ids):
    model, recorder = Tiny(), recorders()
    with watching.observe(model, recorder, side="train"):
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        for duplicate in copies:
            assert torch.equal(duplicate(ids), model(ids).detach())
        recorder.force_flush()
        assert recorder.stats().unpaired_tokens == 2 * ids[:, 1:].numel()


def test_gradients_are_the_same(recorders, ids):
    plain, model, recorder = Tiny(), Tiny(), recorders()
    with (
        watching.observe(model, recorder, side="train"),
        watching.shadow(model, Tiny().eval(), recorder, side="inference"),
    ):
        model(ids).square().mean().backward()
    plain(ids).square().mean().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), model.parameters(), strict=True))


@pytest.mark.parametrize(
    "call",
    [
        lambda module, ids: module(ids[0]),
        lambda module, ids: module(ids.float()),
        lambda module, ids: module(other=ids),
        lambda module, ids: module(ids),
    ],
)
def test_a_forward_that_cannot_be_used_is_counted(recorders, ids, call):
    class Last(torch.nn.Module):
        def forward(self, *_, **__):
            return last

    last = Tiny()(ids)[:, -1:]
    recorder, module = recorders(), Last()
    with watching.observe(module, recorder, side="train"):
        assert call(module, ids) is last
    assert recorder.stats().dropped == {"forward-unusable": 1}


def test_a_shadow_compares_whole_distributions(recorders, memory, ids):
    served, reference, recorder = Tiny().bfloat16(), Tiny().eval(), recorders()
    with watching.shadow(served, reference, recorder, side="inference"):
        served(ids, torch.ones_like(ids))
    recorder.force_flush()
    p, q = reference(ids).softmax(-1), served(ids).float().softmax(-1)
    (point,) = memory.points("kc.drift.tv_exact")
    assert point.count == ids.numel()
    assert point.sum == pytest.approx((p - q).abs().sum(-1).div(2).sum().item(), rel=1e-3)
    (kl,) = memory.points("kc.drift.kl_train_inference")
    assert kl.sum == pytest.approx((p * (p.log() - q.log())).sum().item(), rel=1e-2, abs=1e-6)


def test_a_shadow_runs_on_a_share_of_the_forwards(recorders, ids):
    calls = []
    reference = Tiny().eval()
    reference.register_forward_hook(lambda *_: calls.append(1))
    model = Tiny()
    for options, recorder in (({}, recorders(sampling=0.3)), ({"sampling": 0.3}, recorders(sampling=0.01))):
        calls.clear()
        with watching.shadow(model, reference, recorder, side="inference", **options):
            for _ in range(100):
                model(ids)
        recorder.force_flush()
        assert 10 <= len(calls) <= 55
        assert recorder.stats().batches == len(calls)


def test_a_shadow_leaves_the_programs_random_numbers_alone(recorders, ids):
    model, reference, recorder = Tiny(), Tiny(dropout=0.5), recorders()
    with pytest.raises(ValueError, match=r"reference\.eval"):
        watching.shadow(model, reference, recorder, side="inference")
    with watching.shadow(model, reference.eval(), recorder, side="inference"):
        before = torch.random.get_rng_state()
        model(ids)
        assert torch.equal(torch.random.get_rng_state(), before)
        reference.train()
        model(ids)
    recorder.force_flush()
    assert (recorder.stats().batches, recorder.stats().dropped) == (1, {"forward-unusable": 1})


def test_a_shadow_stays_out_of_a_kv_cache(recorders, ids):
    model, recorder = Tiny(), recorders()
    seen = []
    reference = Tiny().eval()
    reference.register_forward_hook(lambda _m, _a, kwargs, _o: seen.append(set(kwargs)), with_kwargs=True)

    def cache(length):
        return types.SimpleNamespace(get_seq_length=lambda: length)

    with watching.shadow(model, reference, recorder, side="inference"):
        model(ids, past_key_values=cache(9), use_cache=True)
        model(ids[:, :1], past_key_values=cache(10))
        model(ids, past_key_values=((1, 2),))
    recorder.force_flush()
    assert seen == [set()]
    assert (recorder.stats().batches, recorder.stats().dropped) == (1, {"forward-unusable": 2})


def test_a_shadow_runs_outside_of_autocast_and_may_be_of_the_module_itself(recorders, memory, ids):
    """Without autocast the module agrees with itself to the last bit."""
    for autocast in (True, False):
        model, recorder = Tiny().eval(), recorders()
        with (
            watching.shadow(model, model, recorder, side="inference"),
            torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast),
        ):
            model(ids)
        recorder.force_flush()
        largest = memory.points("kc.drift.tv_exact")[0].max
        assert largest > 1e-5 if autocast else largest == 0.0


@pytest.mark.slow
def test_a_compiled_module_is_watched_from_outside(recorders, ids):
    torch._dynamo.reset()
    recorder = recorders()
    compiled = torch.compile(Tiny(), backend="eager", fullgraph=True)
    with watching.observe(compiled, recorder, side="train"):
        compiled(ids)
        compiled(ids)
    recorder.force_flush()
    assert recorder.stats().unpaired == 6
    assert recorder.stats().dropped == {}
    assert not compiled._forward_hooks


@pytest.mark.slow
def test_a_hook_inside_a_compiled_graph_does_nothing(recorders, ids):
    torch._dynamo.reset()
    recorder, model = recorders(), Tiny()
    expected = model(ids).detach()
    with watching.observe(model, recorder, side="train"):
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        assert torch.allclose(compiled(ids), expected)
    recorder.force_flush()
    assert recorder.stats().unpaired == 0


@pytest.mark.parametrize("side", ["training", "", None])
def test_a_side_must_be_a_kernel(recorders, side):
    with pytest.raises(ValueError, match="side"):
        watching.observe(Tiny(), recorders(), side=side)
    with pytest.raises(ValueError, match="side"):
        watching.shadow(Tiny(), Tiny().eval(), recorders(), side=side)
    with pytest.raises(TypeError, match="int is not a torch"):
        watching.observe(3, recorders(), side="train")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_next_token_logprobs_are_those_of_a_log_softmax(dtype):
    logits = torch.randn(3, 11, 29, dtype=dtype) * 3
    ids = torch.randint(0, 29, (3, 11))
    expected = logits.double()[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    found = watching.next_token_logprobs(logits, ids)
    assert found.dtype == torch.promote_types(dtype, torch.float32)
    assert torch.allclose(found.double(), expected, atol=1e-5)
