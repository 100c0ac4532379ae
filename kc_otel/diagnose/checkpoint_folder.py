"""A folder with a Hugging Face checkpoint as a kernel: its model, tokenizer, sampling parameters and KV cache."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any, Final

from kc_otel._extras import extra
from kc_otel.contract.model import KernelSpec
from kc_otel.diagnose.located import NotComparableError
from kc_otel.diagnose.token_sequences import chat_encoder
from kc_otel.diagnose.torch_kernel import TorchKernel

with extra("torch", "a Hugging Face checkpoint"):
    import torch

_KV_FORMATS: Final = {"fp8-e4m3": torch.float8_e4m3fn, "fp8-e5m2": torch.float8_e5m2}
"""Number formats of a KV cache by the names of the command line."""


def checkpoint_kernel(folder: Path, spec: KernelSpec) -> TorchKernel:
    """The kernel that runs a checkpoint with transformers, in the number formats that the contract's declaration says.

    Raises:
        ValueError: If transformers cannot load it, or its cache is to be in a format that cannot be made here.
        NotComparableError: If tensors of it are missing, which transformers would make up.
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
    tokenizer = None
    if (folder / "tokenizer_config.json").is_file():
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return TorchKernel(
        module.eval(),
        encode=chat_encoder(tokenizer),
        sampling=_sampling(folder),
        cache=None if kv is None else partial(_rounding_cache, kv),
        vocabulary=None if tokenizer is None else tokenizer.get_vocab(),
    )


def _kv_format(name: str | None) -> torch.dtype | None:
    """The 8-bit format of a KV cache by vLLM's names or ours; None where it is kept as the model computes."""
    said = (name or "auto").replace("_", "-")
    if said == "auto" or isinstance(getattr(torch, said, None), torch.dtype):
        return None
    found = _KV_FORMATS.get("fp8-e4m3" if said == "fp8" else said)
    if found is None:
        raise ValueError(
            f"kv_cache_dtype: a checkpoint's cache cannot be kept in {name!r} here, but in {', '.join(_KV_FORMATS)}; "
            "capture the engine that does: vllm:FOLDER"
        )
    return found


def _rounding_cache(kv: torch.dtype) -> Any:
    """A cache of Transformers that rounds what is written into it, with a scale of one, as vLLM's does by default."""
    with extra("transformers", "a checkpoint's cache"):
        from transformers import DynamicCache  # noqa: PLC0415

    class Rounded(DynamicCache):  # type: ignore[misc]
        def update(self, key_states: Any, value_states: Any, *args: Any, **options: Any) -> Any:
            most = torch.finfo(kv).max
            written = (
                state.float().clamp(-most, most).to(kv).float().to(state.dtype) for state in (key_states, value_states)
            )
            return super().update(*written, *args, **options)

    return Rounded()


def _sampling(folder: Path) -> dict[str, Any]:
    path = folder / "generation_config.json"
    if not path.is_file():
        return {}
    given = json.loads(path.read_text(encoding="utf-8"))
    if not given.get("do_sample"):
        return {}
    return {name: given[name] for name in ("temperature", "top_k", "top_p", "min_p") if given.get(name) is not None}
