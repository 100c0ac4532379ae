"""`kc-otel precision` on a checkpoint of Hugging Face, by the command line alone."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kc_otel import cli
from kc_otel.diagnose.checkpoint_folder import quantized_matrices
from tests.engines._checkpoints import packed_in_four_bits
from tests.engines._random_checkpoints import VOCABULARY, changed, checkpoint

pytestmark = pytest.mark.slow

CONTRACT = """\
apiVersion: kernel-contract/v1
kind: KernelContract
metadata: {name: served, version: 1, owner: tests}
kernels: {train: {engine: torch, dtype: float32}, inference: {engine: vllm, dtype: float32}}
slices: {code: {where: {task: code}}}
statistical: [{id: tail, metric: abs_log_ratio, statistic: "fraction > 0.1", unit: token, limit: 12%}]
observability: {min_samples: 100}
"""


def _loud(held):
    """An input of one product so loud that int8 with one scale a channel loses the others; groups do not."""
    held["model.layers.1.mlp.down_proj.weight"][:, 5] = 300.0
    held["model.layers.1.mlp.up_proj.weight"][5] = 0.0


@pytest.fixture
def precision(tmp_path, monkeypatch):
    import torch

    monkeypatch.chdir(tmp_path)
    (tmp_path / "contract.yaml").write_text(CONTRACT)
    changed(checkpoint("plain", gain=0.6, intermediate_size=384), "checkpoint", _loud)
    generator = torch.Generator().manual_seed(0)
    rows = (
        {"prompt_ids": torch.randint(VOCABULARY, (8,), generator=generator).tolist(), "token_ids": [1]}
        | {"attributes": {"task": "code"}}
        for _ in range(48)
    )
    (tmp_path / "prompts.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    cli._register("precision")

    def run(*options, code=0):
        given = ["contract.yaml", "checkpoint", "--sequences", "prompts.jsonl", "--tokens", "12"]
        result = CliRunner().invoke(cli.app, ["precision", *given, *options])
        assert result.exit_code == code, result.output
        return result.stdout

    return run


def test_each_candidate_says_what_a_layer_gives_back_and_the_cheapest_set_passes(precision):
    """int8 has to keep the loud layer, int4 in groups more, FP8 nothing; the gate judged each on new requests."""
    formats = [word for name in ("int8", "int4-g32", "fp8-e4m3") for word in ("--format", name)]
    said = precision(*formats, "--kv", "fp8-e4m3", "--kv-tokens", "1000", "--by", "layer", "--runs", "16")
    assert "int8, KV cache fp8-e4m3: tail on " in said
    assert re.search(r"layer 1 +gives back \+0\.\d+ for 84 kB", said)
    assert re.search(r"kv_cache +gives back [+-]0\.0\d+ for 192 kB", said)
    kept = [line.strip() for line in said.splitlines() if "gate passes on new requests" in line and "keep" in line]
    assert kept[0].startswith("keep layer 1 in 16 bits (+84 kB), gate passes on new requests: tail on ")
    assert re.match(r"keep .*layer 1.* in 16 bits \(\+\d+ kB\), gate passes", kept[1])
    assert kept[2].startswith("keep nothing, gate passes on new requests: tail on ")
    assert kept[3].startswith("least memory: fp8-e4m3, KV cache fp8-e4m3: keep nothing, gate passes")


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_what_gptq_and_awq_have_packed_is_read(tmp_path, method):
    """Without their tools: the same matrices that rounding makes, in the format that config.json says."""
    import torch
    from safetensors.torch import load_file

    from kc_otel.diagnose.torch_formats import FORMATS, rounded_weight

    model = checkpoint(str(tmp_path / "plain"))
    format, found = quantized_matrices(str(packed_in_four_bits(model, tmp_path / method, method)))
    assert (format.bits, format.group, len(found)) == (4, 32, 3 * 7)
    held = load_file(Path(model) / "model.safetensors")
    for name, each in found.items():
        torch.testing.assert_close(each, rounded_weight(held[f"{name}.weight"], FORMATS["int4-g32"]))


def test_a_checkpoint_of_gptq_is_a_candidate(precision, tmp_path):
    """Its own matrices are judged, and what to keep of them costs four bits less their scales."""
    packed_in_four_bits(tmp_path / "checkpoint", tmp_path / "gptq", "gptq")
    said = precision("--quantized", "gptq", "--runs", "12")
    assert said.startswith("gptq: tail on ")
    assert re.search(r"keep .*layer 1.* in 16 bits \(\+\d+ kB\), gate passes on new requests", said)
