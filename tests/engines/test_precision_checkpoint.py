"""`kc-otel precision` on a Hugging Face checkpoint: its cache in FP8, and what a tool has quantised."""

from __future__ import annotations

import pytest

from examples.tiny_model import prompts
from kc_otel.contract import load_text
from kc_otel.contract.model import KernelSpec
from kc_otel.diagnose.checkpoint_folder import quantized_matrices
from kc_otel.diagnose.kernel_sources import torch_kernel_from
from kc_otel.diagnose.token_sequences import TokenSequence
from tests.engines._checkpoints import in_int8

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:You passed `quantization_config`"),  # transformers, of a checkpoint that has one
]

CONTRACT = """\
apiVersion: kernel-contract/v1
kind: KernelContract
metadata: {name: tiny, version: 1, owner: tests}
kernels: {train: {engine: torch, dtype: float32}, inference: {engine: vllm, dtype: float32}}
statistical: [{id: drift, metric: abs_log_ratio, unit: token, limit: 0.1}]
"""


def test_a_cache_in_fp8_and_a_tools_checkpoint_drift_and_16_bits_do_not(tiny_model, tmp_path):
    """Each by itself, on the same requests; the cache has its price, and a tool's matrices the tool's format."""
    import torch
    from transformers import AutoTokenizer

    from kc_otel.diagnose.torch_formats import FORMATS, KV_FORMATS
    from kc_otel.diagnose.torch_serving import KV_CACHE, ServedInLess

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    ids = [tokenizer(text)["input_ids"][:16] for text in prompts("code", 8)]
    given = [TokenSequence(tuple(each), len(each) - 2) for each in ids]
    train = torch_kernel_from(str(tiny_model), KernelSpec(engine="torch", dtype="float32"))

    def served(format, **options):
        return ServedInLess(
            load_text(CONTRACT), train, given, format, dtype=torch.float32, tokens=8, by="operator", **options
        )

    in_fp8 = served(FORMATS["int8"], kv=KV_FORMATS["fp8-e5m2"], kv_tokens=1000)
    weights = frozenset(each.name for each in in_fp8.components) - {KV_CACHE}
    config = train.module.config
    cache = next(each for each in in_fp8.components if each.name == KV_CACHE)
    assert cache.bytes == 1000 * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    assert in_fp8(weights, False)[0].estimate > 1e-3
    assert in_fp8(weights | {KV_CACHE}, False)[0].estimate < 1e-5

    format, matrices = quantized_matrices(str(in_int8(tiny_model, tmp_path / "int8")))
    assert (format.bits, format.activations) == (8, True)
    by_tool = served(format, matrices=matrices)
    assert "head" not in {each.name for each in by_tool.components}
    assert by_tool(frozenset(), False)[0].estimate > 1e-3
    assert by_tool(frozenset(each.name for each in by_tool.components), False)[0].estimate < 1e-5
