"""`kc-otel locate run` on two checkpoints of Hugging Face: what was changed in one is named, or the reason why not."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from kc_otel import cli
from tests.engines._checkpoints import VOCABULARY, changed, checkpoint

pytestmark = pytest.mark.slow

CONTRACT = """\
apiVersion: kernel-contract/v1
kind: KernelContract
metadata: {{name: pair, version: 1, owner: tests}}
kernels: {{train: {{engine: torch, dtype: float32}}, inference: {{engine: transformers, {inference}}}}}
slices: {{tables: {{where: {{task: tables}}}}}}
statistical: [{{id: token-tv, metric: tv_token, limit: 0.01}}]
"""
PROGRAM = """\
import copy
import torch
from transformers import AutoModelForCausalLM


def planted(fault):
    model = AutoModelForCausalLM.from_pretrained("checkpoint", dtype="float32").eval()
    fault(model, model.model.layers[1].self_attn)
    return model


def rotary_base(model, attention):
    config = copy.deepcopy(model.config)
    config.rope_parameters["rope_theta"] = 9000.0
    other = type(model.model.rotary_emb)(config)

    def turned(_, args, options):
        positions = torch.arange(options["hidden_states"].shape[1])[None]
        return args, {**options, "position_embeddings": other(options["hidden_states"], positions)}

    attention.register_forward_pre_hook(turned, with_kwargs=True)


def softmax_scale(_, attention):
    attention.scaling *= 1.05


class PageLost:
    def __init__(self, cache):
        self.cache = cache

    def __getattr__(self, name):
        return getattr(self.cache, name)

    def update(self, *args, **options):
        keys, values = self.cache.update(*args, **options)
        keys[:, :, 8:16] = 0.0
        return keys, values


def page(_, attention):
    attention.register_forward_pre_hook(
        lambda _, args, options: (args, {**options, "past_key_values": PageLost(options["past_key_values"])}),
        with_kwargs=True,
    )


rotary = lambda: planted(rotary_base)
scale = lambda: planted(softmax_scale)
lost = lambda: planted(page)
"""


def sequences(count=12, vocabulary=VOCABULARY):
    """Random tokens: a prompt, and what came after it."""
    import torch

    generator = torch.Generator().manual_seed(0)
    for index in range(count):
        ids = torch.randint(vocabulary, (24 + index,), generator=generator).tolist()
        yield {"prompt_ids": ids[:10], "token_ids": ids[10:], "attributes": {"task": "tables"}}


@pytest.fixture
def locate(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "tables.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in sequences()))
    cli._register("locate")

    def run(infer, *options, inference="dtype: float32", code=1):
        (tmp_path / "contract.yaml").write_text(CONTRACT.format(inference=inference))
        given = ["--train", "checkpoint", "--infer", infer, "--sequences", "tables.jsonl", "--slice", "tables"]
        result = CliRunner().invoke(cli.app, ["locate", "run", "contract.yaml", *given, *options])
        assert result.exit_code == code, result.output
        if code == 2:
            return " ".join(result.output.split())
        return json.loads(result.stdout) if "--json" in options else result.stdout

    return run


def named(found):
    culprit = found["culprit"]
    return culprit and (culprit["boundary"]["layer"], culprit["boundary"]["operator"], culprit["tensors"])


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Qwen3Moe"])
@pytest.mark.parametrize(("fault", "operator"), [("rotary", "rotary"), ("scale", "attention"), ("lost", "kv_cache")])
def test_functions_within_attention_are_told_apart(locate, kind, fault, operator):
    """Rotary embedding, cache and softmax of one layer, none of which is a module: only the planted one is named."""
    checkpoint("checkpoint", kind)
    found = locate(f"program.py:{fault}", "--json", "--no-shares")
    assert named(found) == (1, operator, [])
    assert {(finding["boundary"]["layer"], finding["boundary"]["operator"]) for finding in found["findings"]} == {
        (1, operator)
    }


@pytest.mark.parametrize(
    ("kind", "tensor", "operator"),
    [
        ("Llama", "model.layers.2.self_attn.v_proj.weight", "v_proj"),
        ("Qwen2", "model.layers.0.self_attn.k_proj.bias", "k_proj"),
        ("Qwen3Moe", "model.layers.1.mlp.gate.weight", "router"),
        ("Qwen3Moe", "model.layers.1.mlp.experts.2.down_proj.weight", "experts"),
    ],
)
def test_an_unsynced_tensor_is_named(locate, kind, tensor, operator):
    """Of two folders, with its layer and its name in the model; a mixture's choices do not make experts look wrong."""
    import torch

    def stale(tensors):
        tensors[tensor] += 0.03 * torch.randn(tensors[tensor].shape) * (tensors[tensor].std() + 0.1)

    changed(checkpoint("checkpoint", kind), "stale", stale)
    found = locate("stale", "--json", "--no-shares")
    layer = int(tensor.split(".")[2])
    assert named(found)[:2] == (layer, operator)
    # Transformers keeps the experts of a layer in one tensor.
    assert named(found)[2] == [tensor.replace("experts.2.down_proj.weight", "experts.down_proj")]
    assert {(finding["boundary"]["layer"], finding["boundary"]["operator"]) for finding in found["findings"]} == {
        (layer, operator)
    }


def test_another_rope_base_is_rotary_and_not_attention(locate):
    made = checkpoint("checkpoint")
    given = json.loads((made / "config.json").read_text())["rope_parameters"]
    changed(made, "base", config={"rope_parameters": {**given, "rope_theta": 9000.0}})
    found = locate("base", "--json")
    assert named(found) == (None, "rotary", [])
    assert any(
        "rope_parameters.rope_theta is 10000.0 in training and 9000.0 in inf" in text for text in found["settings"]
    )
    assert found["shares"]["components"][0]["name"] == "rotary"


def test_another_number_format_is_no_fault(locate):
    """A bf16 copy differs from fp32 by what rounding does, which the contract says is to be."""
    changed(checkpoint("checkpoint"), "bf16", lambda held: held.update({k: v.bfloat16() for k, v in held.items()}))
    assert named(locate("bf16", "--json", inference="dtype: bfloat16", code=0)) is None


def test_shares_are_of_operators_in_layers_and_of_the_cache(locate):
    def rounded(held):
        for layer in (1, 2):
            name = f"model.layers.{layer}.mlp.down_proj.weight"
            scale = held[name].abs().amax(1, keepdim=True) / 7.0  # the largest of four bits
            held[name] = (held[name] / scale).round() * scale

    changed(checkpoint("checkpoint"), "int4", rounded)
    inference = "dtype: float32, kv_cache_dtype: fp8_e4m3"
    found = locate("int4", "--json", inference=inference)
    parts = {component["name"]: component["share"] for component in found["shares"]["components"]}
    assert list(parts) == ["kv_cache in layers 0-2", "down_proj in layers 1-2"]
    assert sum(share["estimate"] for share in parts.values()) == pytest.approx(1.0)
    assert all(0.0 < share["lower"] < share["estimate"] < share["upper"] < 1.0 for share in parts.values())
    said = locate("int4", inference=inference)
    assert "of tv_token on tables comes from kv_cache in layers 0-2" in said
    assert "note: the errors above noise, swapped in, make " in said


def without_a_layer(held):
    for name in [name for name in held if ".layers.2." in name]:
        del held[name]


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"kind": "Qwen2"}, "the training kernel is a llama model and the inference kernel a qwen2 model"),
        ({"num_hidden_layers": 2}, "num_hidden_layers is 3 in training and 2 in inference"),
        ({"hidden_size": 32}, "hidden_size is 64 in training and 32 in inference"),
        ({"num_key_value_heads": 4}, "num_key_value_heads is 2 in training and 4 in inference"),
        ({"seed": 1}, "have nothing to do with each other (cosine below 0.5)"),
    ],
)
def test_another_model_is_refused_with_the_reason(locate, other, said):
    checkpoint("checkpoint")
    checkpoint("other", **other)
    assert said in locate("other", code=2)


def test_missing_layers_are_refused_where_transformers_would_make_them_up(locate):
    changed(checkpoint("checkpoint"), "short", without_a_layer)
    assert "short: has no model.layers.2.input_layernorm.weight and 8 more" in locate("short", code=2)


def test_one_kernel_on_both_sides_is_no_all_clear(locate):
    """Nothing was seen of the engine that the contract declares; in another number format it is another kernel."""
    checkpoint("checkpoint")
    for declared in ("dtype: float32", "dtype: fp8"):  # a checkpoint is loaded in its own format then
        said = locate("checkpoint", inference=declared, code=2)
        assert "checkpoint: is the training kernel, too; give the inference kernel" in said
    locate("checkpoint", "--no-shares", inference="dtype: bfloat16, kv_cache_dtype: fp8")


def test_a_cache_that_cannot_be_made_is_refused(locate):
    """No other format stands in for it."""
    checkpoint("checkpoint")
    said = locate("checkpoint", inference="dtype: float32, kv_cache_dtype: nvfp4", code=2)
    assert "a checkpoint's cache cannot be kept in 'nvfp4' here, but in fp8-e4m3, fp8-e5m2; capture the engine" in said


def test_another_tokenizer_is_refused_and_another_template_is_the_culprit(locate, tmp_path):
    """The same ids would be other texts; a template makes other tokens of the same words."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = [f"w{index}" for index in range(VOCABULARY)]
    made = checkpoint("checkpoint")
    for name, order, template in (
        ("checkpoint", words, "w1{% for message in messages %} {{ message['content'] }}{% endfor %}"),
        ("template", words, "w2{% for message in messages %} {{ message['content'] }}{% endfor %}"),
        ("other", words[::-1], ""),
    ):
        if name != "checkpoint":
            changed(made, name)
        split = Tokenizer(models.WordLevel({word: at for at, word in enumerate(order)}, unk_token="w0"))
        split.pre_tokenizer = __import__("tokenizers").pre_tokenizers.Whitespace()
        PreTrainedTokenizerFast(tokenizer_object=split, chat_template=template or None).save_pretrained(name)
    rows = [{**row, "messages": [{"role": "user", "content": "w7 w8"}]} for row in sequences()]
    (tmp_path / "tables.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert "the two tokenizers give 128 tokens other ids, such as 'w0': 0 and 127" in locate("other", code=2)
    found = locate("template", "--json", "--no-shares")
    assert found["culprit"]["kind"] == "tokens"
    assert "the first from token 0 on, [1, 7, 8] in training and [2, 7, 8] in inference" in found["culprit"]["sentence"]


def test_two_machines_that_each_have_one_kernel_find_it_too(locate):
    checkpoint("checkpoint")
    cli._register("locate")
    for kernel, tokens, out in (
        ("program.py:rotary", "tables.jsonl", "infer.capture"),
        ("checkpoint", "infer.capture", "train.capture"),
    ):
        result = CliRunner().invoke(cli.app, ["locate", "capture", kernel, "--sequences", tokens, "--out", out])
        assert result.exit_code == 0, result.output
    given = ["--train", "train.capture", "--infer", "infer.capture", "--sequences", "infer.capture", "--json"]
    locate("checkpoint", code=2)  # writes the contract
    result = CliRunner().invoke(cli.app, ["locate", "run", "contract.yaml", *given])
    assert named(json.loads(result.stdout)) == (1, "rotary", [])
