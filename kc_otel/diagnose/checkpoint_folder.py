"""A folder with a Hugging Face checkpoint as a kernel: its model, tokenizer, sampling parameters and KV cache."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

from kc_otel._extras import extra
from kc_otel.contract.model import KernelSpec
from kc_otel.diagnose.located import NotComparableError
from kc_otel.diagnose.packed_weights import PACKED, packed_matrices
from kc_otel.diagnose.torch_formats import KV_FORMATS, WeightFormat, rounding_cache
from kc_otel.diagnose.torch_kernel import TorchKernel

with extra("torch", "a Hugging Face checkpoint"):
    import torch

__all__ = ["checkpoint_kernel", "quantized_matrices"]


def checkpoint_kernel(folder: Path, spec: KernelSpec) -> TorchKernel:
    """The kernel that runs a checkpoint with transformers.

    Args:
        folder: The checkpoint's.
        spec: What the contract says of it: its number format, and that of its KV cache.

    Raises:
        ValueError: If transformers cannot load it, or its cache is to be in a format that cannot be made here.
        NotComparableError: If tensors of it are missing, which transformers would make up.
        MissingExtraError: If transformers is not installed.
    """
    with extra("transformers", "a Hugging Face checkpoint"):
        from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415

    plain = getattr(torch, spec.dtype or "", None)
    dtype = plain if isinstance(plain, torch.dtype) and plain.itemsize > 1 else "auto"
    kv = _kv_format(spec.kv_cache_dtype)
    try:
        module, loading = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, local_files_only=True, output_loading_info=True
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ValueError(f"{folder}: is no checkpoint that transformers can load: {error}") from error
    if missing := sorted(loading["missing_keys"]):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise NotComparableError(f"{folder}: has no {missing[0]}{more}, which its config.json says it has")
    encode, vocabulary = None, None
    if (folder / "tokenizer_config.json").is_file():
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        vocabulary = tokenizer.get_vocab()
        if tokenizer.chat_template:

            def encode(messages: Any) -> list[int]:
                made = tokenizer.apply_chat_template(
                    list(messages), tokenize=True, add_generation_prompt=True, return_dict=False
                )
                return [int(each) for each in made]

    return TorchKernel(
        module.eval(),
        encode=encode,
        sampling=_sampling(folder),
        cache=None if kv is None else partial(rounding_cache, kv),
        vocabulary=vocabulary,
    )


def _kv_format(name: str | None) -> torch.dtype | None:
    """The 8-bit format of a KV cache by vLLM's names or ours; None where it is kept as the model computes."""
    said = (name or "auto").replace("_", "-")
    if said == "auto" or isinstance(getattr(torch, said, None), torch.dtype):
        return None
    found = KV_FORMATS.get("fp8-e4m3" if said == "fp8" else said)
    if found is None:
        raise ValueError(
            f"kv_cache_dtype: a checkpoint's cache cannot be kept in {name!r} here, but in {', '.join(KV_FORMATS)}; "
            "capture the engine that does: vllm:FOLDER"
        )
    return found


def quantized_matrices(folder: str) -> tuple[WeightFormat, dict[str, torch.Tensor]]:
    """The matrices of a checkpoint that a tool has quantised, in floating point, and the format that its config says.

    Args:
        folder: A checkpoint in GPTQ's or AWQ's own form is read here, one in compressed-tensors' by that library.

    Raises:
        ValueError: If it is none, or what reads it is not installed.
        MissingExtraError: If transformers is not installed.
    """
    path = Path(folder) / "config.json"
    said = json.loads(path.read_text(encoding="utf-8")).get("quantization_config") if path.is_file() else None
    if not said:
        raise ValueError(f"{folder}: has no config.json with a quantization_config; give what the tool wrote")
    if said.get("quant_method") in PACKED:
        return packed_matrices(path.parent, said)
    with extra("transformers", "a Hugging Face checkpoint"):
        import transformers  # noqa: PLC0415

    group: dict[str, Any] = next(iter(said.get("config_groups", {}).values()), {})
    weights, inputs = group.get("weights", {}), group.get("input_activations")
    bits = int(said.get("bits") or weights.get("num_bits") or 8)
    size = int(said.get("group_size") or weights.get("group_size") or 0)
    dense = said.get("quant_method") == "compressed-tensors"
    more = {"quantization_config": transformers.CompressedTensorsConfig(run_compressed=False)} if dense else {}
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, **more)
    except (ImportError, OSError, ValueError, KeyError, RuntimeError) as error:
        raise ValueError(f"{folder}: transformers cannot dequantise it: {error}") from error
    found = {
        name: each.weight.data
        for name, each in model.named_modules()
        if isinstance(each, torch.nn.Linear) and hasattr(each, "quantization_scheme" if dense else "weight")
    }
    if not found:
        raise ValueError(
            f"{folder}: no matrix of it is in floating point once it is loaded; let the tool dequantise it"
        )
    return WeightFormat(bits, max(size, 0), activations=bool(inputs)), found


def _sampling(folder: Path) -> dict[str, Any]:
    """Sampling parameters that a checkpoint asks for; engines take them from there."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return {}
    given = json.loads(path.read_text(encoding="utf-8"))
    if not given.get("do_sample"):
        return {}
    return {name: given[name] for name in ("temperature", "top_k", "top_p", "min_p") if given.get(name) is not None}
