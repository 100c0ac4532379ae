"""Modules of two models watched through hooks: alone, in their place, and gone without a trace."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from kc_otel.integrations.operators import watch_modules


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.ReLU(inplace=True), nn.Linear(32, 16))

    def forward(self, x):
        return x + self.mlp(self.norm(x)), "something else"


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x, _ = layer(x)
        return x


@pytest.fixture
def models():
    """A model, and one whose second block's first matrix is coarsely quantised."""
    torch.manual_seed(0)
    train = Model().eval()
    inference = copy.deepcopy(train)
    with torch.no_grad():
        weight = inference.layers[1].mlp[0].weight
        weight.copy_((weight / 0.05).round() * 0.05)
    return train, inference


@pytest.fixture
def drift(memory):
    def of(metric="relative", **attributes):
        points = memory.points(f"kc.drift.operator_{metric}", kc_slice="all", **attributes)
        return {point.attributes["kc.operator"]: point for point in points}

    return of


def batch(seed=0):
    return torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(seed))


def test_isolated_finds_the_one_operator_that_differs(models, recorders, drift):
    """Each module gets the training model's input, so that drift before it does not count."""
    train, inference = models
    recorder = recorders()
    with watch_modules(train, inference, ["layers.*.mlp", "layers.*.norm"], recorder) as watch:
        train(batch())
    assert recorder.force_flush()
    found = drift()
    assert set(found) == set(watch.operators) == {f"layers.{i}.{name}" for i in range(3) for name in ("mlp", "norm")}
    assert {name for name, point in found.items() if point.max > 0} == {"layers.1.mlp"}
    assert {point.count for point in found.values()} == {10}


def test_in_situ_shows_how_drift_goes_on(models, recorders, drift):
    """Each model's own activations: nothing before the operator that differs, something in all after it."""
    train, inference = models
    recorder = recorders()
    with watch_modules(train, inference, [f"layers.{i}" for i in range(3)], recorder, mode="in-situ"):
        for seed in range(4):
            train(batch(seed))
            inference(batch(seed))
    assert recorder.force_flush()
    found = drift()
    assert {name: point.count for name, point in found.items()} == dict.fromkeys(found, 40)
    assert [found[f"layers.{i}"].max > 0 for i in range(3)] == [False, True, True]
    assert recorder.stats().dropped == {}


def test_which_model_runs_first_does_not_matter_in_situ(models, recorders, drift):
    """The training model's output is the reference either way."""
    train, inference = models
    with torch.no_grad():
        inference.layers[2].mlp[2].weight.mul_(3)
    largest = []
    for order in ((train, inference), (inference, train)):
        recorder = recorders()
        with watch_modules(train, inference, ["layers.2"], recorder, mode="in-situ"):
            for model in order:
                model(batch())
        assert recorder.force_flush()
        largest.append(drift()["layers.2"].max)
    assert largest[0] == largest[1] > 0


def test_a_model_that_runs_alone_is_counted_and_does_not_shift_what_follows(models, recorders, drift):
    """The older output gives way; the next call of the other model is compared with the newest."""
    train, inference = models
    recorder = recorders()
    with watch_modules(train, inference, ["layers.0"], recorder, mode="in-situ"):
        train(batch(1))
        train(batch(2))
        inference(batch(2))
    assert recorder.force_flush()
    assert recorder.stats().dropped == {"operator-unpaired": 1}
    assert drift()["layers.0"].max == 0.0


def test_modules_can_be_recorded_together_and_have_other_names(models, recorders, drift):
    """A mapping names the operator; `rename` finds modules in an engine that calls them otherwise."""
    train, inference = models

    class Engine(nn.Module):
        def __init__(self, inside):
            super().__init__()
            self.model = inside

    recorder = recorders()
    engine = Engine(inference).eval()
    with watch_modules(train, engine, {"mlp": "layers.*.mlp"}, recorder, rename=lambda name: f"model.{name}") as watch:
        train(batch())
    assert watch.operators == {"mlp": ("layers.0.mlp", "layers.1.mlp", "layers.2.mlp")}
    assert recorder.force_flush()
    assert {name: point.count for name, point in drift().items()} == {"mlp": 30}


def test_inputs_are_cast_to_the_other_kernels_dtype(models, recorders, drift):
    """A bfloat16 model watched beside a float32 one: the drift is that of bfloat16."""
    train, inference = models
    recorder = recorders()
    with watch_modules(train, inference.bfloat16(), ["layers.0.mlp"], recorder):
        train(batch())
    assert recorder.force_flush()
    assert 1e-4 < drift()["layers.0.mlp"].max < 0.05


def test_modules_that_work_in_place_are_given_what_they_were_given(models, recorders, drift):
    """The input is copied before the forward; the model's own result is what it is without hooks."""
    train, inference = models
    recorder = recorders()
    expected = train(batch())
    with watch_modules(train, inference, ["layers.0.mlp.1"], recorder):
        assert torch.equal(train(batch()), expected)
    assert recorder.force_flush()
    assert drift()["layers.0.mlp.1"].max == 0.0


def test_outputs_that_are_changed_later_are_compared_as_they_were(models, recorders, drift):
    """In situ the first output waits, and its model may go on to add to it in place."""
    train, inference = models
    recorder = recorders()
    with watch_modules(train, inference, ["layers.0.mlp"], recorder, mode="in-situ"), torch.no_grad():
        train.layers[0].mlp(batch()).add_(5.0)
        inference.layers[0].mlp(batch())
    assert recorder.force_flush()
    assert drift()["layers.0.mlp"].max == 0.0


def test_the_other_module_runs_without_autograd(models, recorders):
    """A graph would keep its activations alive through the training step."""
    train, inference = models
    seen = []
    inference.layers[0].mlp.register_forward_hook(lambda *_: seen.append(torch.is_grad_enabled()))
    with watch_modules(train, inference, ["layers.0.mlp"], recorders()):
        train(batch())
    assert seen == [False]


def test_slices_and_masks_apply(models, recorders, memory):
    """Asked for at each comparison: attributes of the sequences, and which tokens count."""
    train, inference = models
    recorder = recorders()
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])
    with watch_modules(
        train,
        inference,
        ["layers.1.mlp"],
        recorder,
        attributes=lambda: [{"task": "code"}, {}],
        mask=lambda: mask,
    ):
        train(batch())
    assert recorder.force_flush()
    counts = {p.attributes["kc.slice"]: p.count for p in memory.points("kc.drift.operator_ulp")}
    assert counts == {"all": 7, "code": 5}


@pytest.mark.slow
def test_only_the_sample_is_run_twice(models, recorders):
    """Calls that are not sampled cost no second forward, in either mode."""
    train, inference = models
    calls = []
    inference.layers[0].mlp.register_forward_hook(lambda *_: calls.append(1))
    recorder = recorders(sampling=0.3)
    with watch_modules(train, inference, ["layers.0.mlp"], recorder):
        for seed in range(200):
            train(batch(seed))
    assert 30 < len(calls) < 90
    with watch_modules(train, inference, ["layers.0.mlp"], recorder, mode="in-situ"):
        for seed in range(100):
            train(batch(seed))
            inference(batch(seed))
    assert recorder.force_flush()
    measured = recorder.stats().batches - len(calls[:-100])
    assert 12 < measured < 50


def test_training_goes_on_as_without_hooks(models, recorders):
    """Gradients are the same to the bit, and random numbers are not drawn."""
    train, inference = models
    gradients = []
    for watched in (False, True):
        train.zero_grad()
        torch.manual_seed(1)
        if watched:
            with watch_modules(train, inference, ["layers.*.mlp"], recorders()):
                train(batch()).sum().backward()
        else:
            train(batch()).sum().backward()
        gradients.append([parameter.grad.clone() for parameter in train.parameters()] + [torch.rand(1)])
    assert all(torch.equal(watched, other) for watched, other in zip(*gradients, strict=True))
    assert all(parameter.grad is None for parameter in inference.parameters())


@pytest.mark.parametrize("mode", ["isolated", "in-situ"])
def test_removing_leaves_no_trace(models, recorders, mode):
    """No hook is left on either model; a copy or pickle of a watched model is not watched."""
    train, inference = models
    recorder = recorders()
    watch = watch_modules(train, inference, ["layers.*"], recorder, mode=mode)
    for twin in (copy.deepcopy(train), pickle.loads(pickle.dumps(train))):
        twin(batch())
    assert recorder.force_flush()
    assert recorder.stats().batches == 0
    watch.remove()
    watch.remove()
    for module in (*train.modules(), *inference.modules()):
        for kind in (
            "_forward_hooks",
            "_forward_pre_hooks",
            "_forward_hooks_with_kwargs",
            "_forward_pre_hooks_with_kwargs",
        ):
            assert not getattr(module, kind)
    train(batch())
    inference(batch())
    assert recorder.force_flush()
    assert recorder.stats().batches == 0


def test_nothing_is_raised_into_a_forward(models, recorders):
    """A module of the inference model that fails, a cache, an output that is no tensor: counted."""
    train, inference = models
    inference.layers[0].mlp[0] = nn.Linear(7, 7)
    recorder = recorders()
    with watch_modules(train, inference, ["layers.0.mlp"], recorder):
        train(batch())
    assert recorder.stats().dropped == {"operator-unusable": 1}

    class Cached(nn.Module):
        def forward(self, x, past_key_values=None):
            return "no tensor" if past_key_values is None else x

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = Cached()

    first, other = Outer().eval(), Outer().eval()
    recorder = recorders()
    with watch_modules(first, other, ["attention"], recorder):
        assert first.attention(batch()) == "no tensor"
        first.attention(batch(), past_key_values=[1])
    assert recorder.stats().dropped == {"operator-unusable": 2}


@pytest.mark.parametrize(
    ("operators", "options", "said"),
    [
        (["layer.0"], {}, "no module fits 'layer.0'; there are layers, layers.0"),
        ([], {}, "names none"),
        ("layers.0", {}, "'layers.0' names none"),
        (["layers.0"], {"rename": lambda name: f"x.{name}"}, "it has no module 'x.layers.0'"),
        (["layers.0"], {"mode": "alone"}, "mode: 'alone' is not one"),
        ({"a b": "layers.0"}, {}, "'a b' cannot name an operator"),
    ],
)
def test_what_cannot_be_watched_is_refused(models, recorders, operators, options, said):
    """At the start, with what to write, and no hook is left."""
    train, inference = models
    with pytest.raises(ValueError, match=said):
        watch_modules(train, inference, operators, recorders(), **options)
    assert not any(module._forward_hooks for module in (*train.modules(), *inference.modules()))


def test_an_inference_model_in_training_mode_is_refused(models, recorders):
    """Its dropout would be drift, and draw from the program's random numbers."""
    train, inference = models
    with pytest.raises(ValueError, match=r"call inference_model\.eval\(\)"):
        watch_modules(train, inference.train(), ["layers.0"], recorders())
