"""Formats as an inference kernel keeps weights, and the layers that have to stay in 16 bits, found by the gate."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("torch")

import torch
from typer.testing import CliRunner

from kc_otel import cli
from kc_otel.contract import load_text
from kc_otel.diagnose.token_sequences import TokenSequence
from kc_otel.diagnose.torch_formats import FORMATS, rounded_activations, rounded_to_fp8, rounded_weight
from kc_otel.diagnose.torch_kernel import TorchKernel
from kc_otel.diagnose.torch_serving import KV_CACHE, ServedInLess
from kc_otel.offline.remedy.precision import cheapest

CONTRACT = """\
apiVersion: kernel-contract/v1
kind: KernelContract
metadata: {name: served, version: 1, owner: tests}
kernels: {train: {engine: torch}, inference: {engine: vllm, dtype: float32}}
slices: {code: {where: {task: code}}}
statistical: [{id: tail, metric: abs_log_ratio, statistic: "fraction > 0.1", unit: token, limit: 10%}]
observability: {min_samples: 100}
"""
PROGRAM = """\
from kc_otel.offline.remedy.precision import Component
from tests.diagnose.test_torch_serving import Tiny
train = Tiny
def own():
    return [Component("layer 1", 10)], lambda kept, new: []
def wrong():
    return 3
"""


class Tiny(torch.nn.Module):
    """Four layers, of which the second has an input so loud that int8 with one scale a channel loses all others."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed_tokens = torch.nn.Embedding(32, 64)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(4))
        self.lm_head = torch.nn.Linear(64, 32, bias=False)
        self.lm_head.weight.data *= 3.0
        self.layers[1].weight.data[:, 5] = 300.0
        self.embed_tokens.weight.data[:, 5] = self.layers[0].weight.data[5] = 0.0
        self.layers[0].bias.data[5] = 0.0
        self.eval()

    def forward(self, ids):
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.lm_head(x)


def prompts(count=32):
    generator = torch.Generator().manual_seed(1)
    return [
        TokenSequence(
            tuple(torch.randint(32, (6 + row % 2,), generator=generator).tolist()), 4 + row % 2, {"task": "code"}
        )
        for row in range(count)
    ]


def served(format, **options):
    return ServedInLess(
        load_text(CONTRACT), TorchKernel(Tiny()), prompts(), format, dtype=torch.float32, tokens=16, **options
    )


@pytest.mark.parametrize(
    ("name", "worst"),
    [("int8", 2e-2), ("int8-g128", 2e-2), ("int4", 0.3), ("int4-g32", 0.3), ("fp8-e4m3", 0.07), ("fp8-e5m2", 0.15)],
)
def test_a_format_rounds_as_finely_as_it_has_bits(name, worst):
    """Relative to what it rounds, neither more nor less; padding of groups is no weight."""
    weight = torch.randn(7, 200, generator=torch.Generator().manual_seed(0))
    rounded = rounded_weight(weight, FORMATS[name])
    error = (rounded - weight).norm() / weight.norm()
    assert rounded.shape == weight.shape
    assert worst / 10 < error < worst
    assert torch.equal(rounded_weight(rounded, FORMATS[name]), rounded) or name.startswith("fp8")


def test_scales_are_of_channels_groups_tokens_and_tensors():
    """A loud channel costs no other; a loud group costs its group; a cache without a scale saturates."""
    weight = torch.full((2, 256), 0.01)
    weight[0, 0] = 100.0
    assert rounded_weight(weight, FORMATS["int8"])[:, -1].tolist() == pytest.approx([0.0, 0.01])
    assert rounded_weight(weight, FORMATS["int8-g128"])[0, [1, 255]].tolist() == pytest.approx([0.0, 0.01])
    assert rounded_activations(8)(weight)[:, -1].tolist() == pytest.approx([0.0, 0.01])
    assert rounded_to_fp8(torch.tensor([1e4, 1.06]), torch.float8_e4m3fn).tolist() == [448.0, 1.0]
    assert FORMATS["int4-g128"].bytes(torch.empty(10, 256)) == 10 * 128 + 10 * 2 * 2


@pytest.mark.slow
def test_the_layer_that_int8_breaks_is_the_one_to_keep():
    """It alone gives back what fails, and passes on prompts that the search has not seen; at its price."""
    kernel = served(FORMATS["int8"])
    found = cheapest(kernel.components, kernel)
    assert not found.plain.passes
    assert found.found.kept == {"layer 1"}
    assert found.verified.passes
    assert found.proven
    assert found.found.bytes == 64 * 64 - 64 * 2
    assert [each.name for each in kernel.components] == [*(f"layer {index}" for index in range(4)), "lm_head"]


@pytest.mark.slow
def test_the_same_requests_give_the_same_numbers_and_new_ones_others():
    """Sets are compared by what differs between them; nothing of a run is left in the next."""
    kernel = served(FORMATS["w8a8"], by="operator")
    first, again, new = (kernel(frozenset(), each)[0].estimate for each in (False, False, True))
    kernel(frozenset({"block", "lm_head"}), False)
    assert first == again == kernel(frozenset(), False)[0].estimate != new
    assert not any(each._forward_pre_hooks for each in kernel._module.modules())


@pytest.mark.slow
def test_what_a_tool_has_made_is_judged_as_it_is():
    """Its matrices in place of the model's, those it left alone untouched; other shapes are refused."""
    zeros = {"layers.1": torch.zeros(64, 64)}
    kernel = served(FORMATS["int8"], matrices=zeros)
    assert [each.name for each in kernel.components] == ["layer 1"]
    assert kernel(frozenset(), False)[0].status == "FAIL"
    assert kernel(frozenset({"layer 1"}), False)[0].status == "PASS"
    with pytest.raises(ValueError, match=r"layers\.1: the tool's matrix is not the model's"):
        served(FORMATS["int8"], matrices={"layers.1": torch.zeros(3, 3)})


def test_what_cannot_be_made_is_said():
    """No cache to round, nothing to continue."""
    with pytest.raises(ValueError, match="this module has no cache"):
        served(FORMATS["int8"], kv=torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="each with prompt_ids"):
        ServedInLess(load_text(CONTRACT), TorchKernel(Tiny()), [TokenSequence((1, 2))] * 4, FORMATS["int8"])
    assert KV_CACHE == "kv_cache"


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "contract.yaml").write_text(CONTRACT)
    (tmp_path / "program.py").write_text(PROGRAM)
    rows = (
        {"prompt_ids": each.token_ids[:4], "token_ids": each.token_ids[4:], "attributes": {"task": "code"}}
        for each in prompts()
    )
    (tmp_path / "prompts.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    cli._register("precision")
    return lambda *options: CliRunner().invoke(cli.app, ["precision", "contract.yaml", *options])


@pytest.mark.slow
def test_the_command_says_what_to_keep_of_each_format_and_which_takes_least(run):
    """What each layer gives back at what cost; JSON has every run."""
    options = (
        "program.py:train",
        "--sequences",
        "prompts.jsonl",
        "--tokens",
        "16",
        "--format",
        "int8",
        "--format",
        "int8-g128",
    )
    result = run(*options)
    assert result.exit_code == 0, result.output
    assert "int8: keep layer 1 in 16 bits (+3.97 kB), gate passes on new requests: tail on " in result.output
    evidence = json.loads(run(*options, "--json").stdout)
    assert evidence["chosen"] == "int8"
    assert [trial["kept"] for trial in evidence["candidates"]["int8"]["alone"]][1] == ["layer 1"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("program.py:train",), "--sequences: give prompts"),
        (("program.py:train", "--sequences", "prompts.jsonl", "--format", "gptq"), "give what they wrote with --quant"),
        (("program.py:train", "--sequences", "prompts.jsonl", "--kv", "int2"), "--kv: 'int2' is none of fp8-e4m3"),
        (("program.py:train", "--sequences", "prompts.jsonl", "--by", "head"), "--by: 'head' is none of layer"),
        (("program.py:train", "--sequences", "prompts.jsonl", "--limit", "4"), "with everything in 16 bits tail on "),
        (("program.py:train", "--sequences", "prompts.jsonl", "--quantized", "."), "no config.json with"),
        (("program.py:wrong", "--own"), "is not a function that returns (components, run)"),
        (("program.py:none", "--own"), "has no 'none'"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_with_what_to_write(run, options, said):
    """Exit code 2, and the reason."""
    result = run(*options)
    assert result.exit_code == 2, result.output
    assert said in result.output
