"""vLLM's layers held against Hugging Face's on the tokens that it decoded: quantisation is named, bf16 is not."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from examples.quantised import in_int8
from examples.tiny_model import prompts
from kc_otel import cli
from tests.engines._checkpoints import other_embeddings, without
from tests.engines._cpu import AVX512_SUMS, avx512_arithmetic, lacking, needs_fp8_cache, reads_back
from tests.engines.planted_in_vllm import scales_turned
from tests.tools.contracts import contract_text

pytestmark = pytest.mark.slow

CONTRACT = contract_text(
    kernels={"train": {"engine": "torch", "dtype": "float32"}, "inference": {"engine": "vllm", "dtype": "bfloat16"}},
    statistical=[{"id": "token-tv", "metric": "tv_token", "limit": 0.01}],
)
ENGINE = ["dtype=bfloat16", "max_model_len=256", f"kv_cache_memory_bytes={64 << 20}"]


@pytest.fixture(autouse=True)
def own_tiles(monkeypatch):
    """The processor's own kernels: with AMX a cache has a layout that cannot be read back."""
    import torch

    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: not reads_back())
    torch.cpu._init_amx()  # asks Linux for them, if there are any


@pytest.fixture
def runs(tiny_model, tmp_path, monkeypatch):
    from transformers import AutoTokenizer

    monkeypatch.chdir(tmp_path)
    (tmp_path / "contract.yaml").write_text(CONTRACT)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    rows = [
        {"prompt_ids": ids[:40], "token_ids": ids[40:48]}
        for text in [*prompts("code", 4), *prompts("prose", 4)]
        if len(ids := tokenizer(text)["input_ids"]) >= 42
    ]
    (tmp_path / "prompts.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    cli._register("locate")

    def run(checkpoint, *engine, code=(0, 1)):
        settings = {setting.partition("=")[0]: setting for setting in (*ENGINE, *engine)}  # the later of two replaces
        options = [word for setting in settings.values() for word in ("--engine", setting)]
        words = ["--train", str(tiny_model), "--infer", f"vllm:{checkpoint}", "--sequences", "prompts.jsonl", "--json"]
        result = CliRunner().invoke(cli.app, ["locate", "run", "contract.yaml", *words, *options])
        assert result.exit_code in code, result.output
        return result

    return run


@pytest.fixture
def locate(runs):
    def located(checkpoint, *engine):
        return json.loads(runs(checkpoint, *engine).stdout)

    return located


@pytest.fixture
def refused(runs):
    return lambda checkpoint, *engine: " ".join(runs(checkpoint, *engine, code=(2,)).output.split())


def test_bf16_has_no_culprit(locate, tiny_model):
    found = locate(tiny_model)
    assert found["culprit"] is None
    rows = {row["boundary"]["operator"]: row for row in found["boundaries"]}
    assert {"embedding", "qkv_proj", "rotary", "attention", "head", "sampler"} <= rows.keys()
    assert ("kv_cache" in rows) is reads_back()
    if lacking(AVX512_SUMS) is None:  # sums in AVX2's order are apart by more, and nobody's fault either
        assert all(row["local"]["estimate"] < 1.2 * row["floor"] for row in found["boundaries"])


@needs_fp8_cache
def test_an_fp8_kv_cache_is_named(locate, tiny_model):
    found = locate(tiny_model, "kv_cache_dtype=fp8")
    cache = "kv_cache" if reads_back() else "attention"
    assert found["culprit"]["boundary"]["operator"] == cache
    assert {finding["boundary"]["operator"] for finding in found["findings"]} == {cache}
    (largest,) = found["shares"]["components"]
    assert largest["name"] == f"{cache} in layers 0-3"
    assert found["shares"]["whole"] == pytest.approx(found["observed"], rel=0.25)


@avx512_arithmetic
def test_int8_weights_and_activations_are_named(locate, tiny_model, tmp_path):
    """The product whose inputs are the hardest to keep in int8 has the largest share; nothing but products is named."""
    found = locate(in_int8(tiny_model, tmp_path / "int8"))
    products = {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}
    assert {finding["boundary"]["operator"] for finding in found["findings"]} <= products
    assert found["culprit"]["boundary"]["operator"] == "down_proj"
    largest = found["shares"]["components"][0]
    assert largest["name"] == "down_proj in layers 0-3"
    assert 0.4 < largest["share"]["lower"] < largest["share"]["upper"] < 0.95


def test_scales_in_the_wrong_order_are_named(locate, tiny_model, tmp_path):
    folder = in_int8(tiny_model, tmp_path / "int8")
    scales_turned(folder, 2)
    boundary = locate(folder)["culprit"]["boundary"]
    assert (boundary["layer"], boundary["operator"]) == (2, "o_proj")


@pytest.mark.parametrize(
    ("checkpoint", "engine", "said"),
    [
        ("model", "enforce_eager=false", "the engine compiles its layers, which cannot be watched then"),
        ("model", "enable_prefix_caching=true", "the engine skips what it has seen before"),
        ("model", "max_model_len=32", "a sequence has 48 tokens and the engine takes 31 at most"),
        ("nowhere", "seed=0", "nowhere: vLLM does not load it"),
        ("other", "seed=0", "the checkpoints are others"),
        ("lacks", "seed=0", "layers.2.self_attn.o_proj.weight, which all of its other layers have"),
    ],
)
def test_what_cannot_be_watched_or_compared_is_refused(refused, tiny_model, tmp_path, checkpoint, engine, said):
    if checkpoint == "other":
        other_embeddings(tiny_model, tmp_path / "other")
    if checkpoint == "lacks":  # vLLM would load it in silence
        without(tiny_model, tmp_path / "lacks", "layers.2.self_attn.o_proj.weight")
    folder = str(tiny_model) if checkpoint == "model" else checkpoint
    assert said in refused(folder, engine)
