"""Weights that did not arrive: an engine's module with fused, padded and split tensors against a trainer's."""

from __future__ import annotations

import json
import math

import pytest
import torch

from kc_otel.integrations.vllm.weights import EngineWeights, compare_weights
from kc_otel.record.measure.weight_tensors import TensorDigest, UpdateWatch, digest_of, module_digests, tail_of

NAMES = {
    "model.embed_tokens.weight": (10, 8),
    "model.layers.0.self_attn.q_proj.weight": (8, 8),
    "model.layers.0.self_attn.k_proj.weight": (4, 8),
    "model.layers.0.self_attn.v_proj.weight": (4, 8),
    "model.layers.0.mlp.experts.0.gate_proj.weight": (6, 8),
    "model.layers.0.mlp.experts.0.up_proj.weight": (6, 8),
    "model.layers.0.mlp.experts.0.down_proj.weight": (8, 6),
    "model.layers.0.mlp.experts.1.gate_proj.weight": (6, 8),
    "model.layers.0.mlp.experts.1.up_proj.weight": (6, 8),
    "model.layers.0.mlp.experts.1.down_proj.weight": (8, 6),
    "model.norm.weight": (8,),
}
QUERY = "model.layers.0.self_attn.q_proj.weight"
EXPERT = "model.layers.0.mlp.experts.1.up_proj.weight"


@pytest.fixture
def trainer():
    numbers = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=numbers) for name, shape in NAMES.items()}


def engine_of(tensors, dtype=torch.bfloat16):
    root = torch.nn.Module()

    def put(path, tensor):
        *way, last = path.split(".")
        module = root
        for word in way:
            if word not in module._modules:
                module.add_module(word, torch.nn.Module())
            module = module._modules[word]
        module.register_parameter(last, torch.nn.Parameter(tensor.to(dtype).clone(), requires_grad=False))

    layer, tail = "model.layers.0", ".weight"
    put("language_model.embed_tokens.weight", torch.cat([tensors["model.embed_tokens.weight"], torch.ones(6, 8)]))
    qkv = [tensors[f"{layer}.self_attn.{part}_proj{tail}"] for part in "qkv"]
    put(f"language_{layer}.self_attn.qkv_proj.weight", torch.cat(qkv))
    halves = [
        torch.cat([tensors[f"{layer}.mlp.experts.{n}.{part}_proj{tail}"] for part in ("gate", "up")]) for n in (0, 1)
    ]
    put(f"language_{layer}.mlp.experts.routed_experts.w13_weight", torch.stack(halves))
    down = [tensors[f"{layer}.mlp.experts.{n}.down_proj{tail}"] for n in (0, 1)]
    put(f"language_{layer}.mlp.experts.routed_experts.w2_weight", torch.stack(down))
    put("language_model.norm.weight", tensors["model.norm.weight"])
    return root


def asked(*engines):
    shapes = {name: list(shape) for name, shape in NAMES.items()}
    return EngineWeights.of([json.loads(json.dumps(module_digests(engine, shapes))) for engine in engines])


def test_everything_arrived_in_an_engine_that_fuses_and_pads(trainer):
    """Queries, keys and values in one matrix, experts in one tensor, rows of padding, another prefix: no difference."""
    report = compare_weights(trainer.items(), asked(engine_of(trainer)))
    assert (report.unequal, report.compared, report.mismatch) == ((), len(NAMES), 0.0)
    assert str(report).startswith("the engine has the trainer's weights: 11 tensors")


@pytest.mark.parametrize("name", NAMES)
def test_each_tensor_that_is_late_is_the_one_that_is_named(trainer, name):
    engine = engine_of(trainer)
    sent = {**trainer, name: trainer[name].clone()}
    sent[name].view(-1)[3] += 0.5
    report = compare_weights(sent.items(), asked(engine))
    assert [tensor.name for tensor in report.unequal] == [name]
    assert report.mismatch == math.prod(NAMES[name]) / sum(map(math.prod, NAMES.values()))
    assert name in str(report)


def test_how_far_a_tensor_is_apart_is_estimated():
    """From 61 sums, within their error; the trainer's rounding is not counted as a difference."""
    large = {"model.norm.weight": torch.randn(200_000, generator=torch.Generator().manual_seed(1))}
    other = large["model.norm.weight"] * 1.01
    (late,) = compare_weights(large.items(), EngineWeights(({"model.norm.weight": digest_of(other)},), {})).unequal
    assert late.apart == pytest.approx(0.01, rel=0.4)
    assert "relative difference 0.0" in str(late)


def test_what_the_engine_still_has_from_before_is_said_to_be_so(trainer):
    """The report of the sync before tells a tensor that was left out from one that was damaged."""
    before = compare_weights(trainer.items(), asked(engine_of(trainer)))
    stale = engine_of({**trainer, "model.norm.weight": trainer["model.norm.weight"] + 1})
    sent = {**trainer, QUERY: trainer[QUERY] * 2}
    found = {tensor.name: tensor.stale for tensor in compare_weights(sent.items(), asked(stale), before=before).unequal}
    assert found == {QUERY: True, "model.norm.weight": False}


def test_rows_in_another_order_are_told_from_other_numbers(trainer):
    """A matrix laid out otherwise is not the trainer's; an expert's is, for engines lay these out for their kernels."""
    for name, unequal in ((QUERY, [True]), (EXPERT, [])):
        engine = engine_of({**trainer, name: trainer[name].flip(0)})
        report = compare_weights(trainer.items(), asked(engine))
        assert [tensor.reordered for tensor in report.unequal] == unequal


def test_workers_that_split_a_tensor_have_it_together(trainer):
    """Under tensor parallelism digests of the parts add up; what all have, all must have."""
    half = engine_of(trainer)
    workers = []
    for rank in (0, 1):
        cut = {**trainer}
        for name in NAMES:
            if "self_attn" in name:
                cut[name] = trainer[name].chunk(2)[rank]
        workers.append(engine_of(cut))
    attention = {name: tensor for name, tensor in trainer.items() if "self_attn" in name}
    assert compare_weights(attention.items(), asked(*workers)).unequal == ()
    moved = {**attention, QUERY: attention[QUERY] + 0.1}
    (late,) = compare_weights(moved.items(), asked(*workers)).unequal
    assert (late.name, math.isnan(late.apart)) == (QUERY, True)
    half.get_parameter("language_model.norm.weight").data += 1
    report = compare_weights(trainer.items(), asked(engine_of(trainer), half))
    assert [tensor.name for tensor in report.unequal] == ["model.norm.weight"]


def test_what_cannot_be_compared_is_named_and_is_no_mismatch(trainer):
    engine = engine_of(trainer)
    engine.language_model.norm.weight.data = engine.language_model.norm.weight.data.to(torch.float8_e4m3fn)
    report = compare_weights([*trainer.items(), ("model.lm_head.weight", torch.ones(2))], asked(engine))
    assert report.not_compared == {
        "model.norm.weight": "the engine has it in float8_e4m3fn, with scales",
        "model.lm_head.weight": "the engine was not asked for it",
    }
    assert report.mismatch == 0.0
    assert "the engine has the trainer's weights" not in str(report)
    nothing = compare_weights({}.items(), EngineWeights((), {}))
    assert math.isnan(nothing.mismatch)
    assert str(nothing) == "no compared tensor differs from the trainer's: 0 tensors, 0 elements"


def test_an_answer_that_holds_no_digests_is_refused():
    for wrong in ({}, {"tensors": {"a": {"shape": [1]}}, "absent": {}}, {"tensors": [], "absent": {}}):
        with pytest.raises(ValueError, match="no digests of weights"):
            EngineWeights.of([wrong])
    theirs = {"a": digest_of(torch.ones(2))}
    with pytest.raises(ValueError, match="a: the tensor is on the meta device"):
        compare_weights([("a", torch.ones(2, device="meta"))], EngineWeights((theirs,), {}))


def test_digests_of_many_blocks_are_those_of_one(monkeypatch):
    """Whatever the block, the same digest, which passes through JSON; -0.0 is not 0.0."""
    tensor = torch.randn(1000, generator=torch.Generator().manual_seed(2))
    whole = digest_of(tensor)
    monkeypatch.setattr("kc_otel.record.measure.weight_tensors._BLOCK", 61)
    cut = digest_of(tensor)
    assert (cut.places, cut.values) == (whole.places, whole.values)
    assert cut.sketch == pytest.approx(whole.sketch)
    assert TensorDigest.from_plain(json.loads(json.dumps(whole.to_plain()))) == whole
    assert digest_of(torch.zeros(3)).places != digest_of(-torch.zeros(3)).places


def test_updates_smaller_than_a_step_of_the_engines_format_are_counted():
    """Of weights near 1, an update of 1e-4 is nothing in bf16 and something in float32."""
    watch, fine = UpdateWatch(elements=100), UpdateWatch(torch.float32)
    start = {"a": torch.full((1000,), 1.0), "b": torch.full((50,), 1.0)}
    assert (watch.look(start.items()), fine.look(start.items())) == (None, None)
    start["a"] = start["a"] + 1e-4
    start["b"] = start["b"] + 0.1
    found = watch.look(start.items())
    assert (found.changed, found.lost) == ({"a": 100, "b": 50}, {"a": 100, "b": 0})
    assert str(found).splitlines() == [
        "66.7% of the changed weights are the same number as before in the engine's format",
        "  a: 100 of 100",
        "  b: 0 of 50",
    ]
    assert fine.look(start.items()).share == 0.0
    assert math.isnan(watch.look(start.items()).share)


def test_names_have_an_end_in_common():
    assert tail_of("_orig_mod.model.layers.10.mlp.up_proj.weight") == "layers.10.mlp.up_proj.weight"
    assert tail_of("transformer.h.0.ln_1.bias") == "h.0.ln_1.bias"
    assert tail_of("lm_head.weight") == "lm_head.weight"
