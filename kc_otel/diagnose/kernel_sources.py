"""The two kernels of a command line: a Python program's, or a Hugging Face checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kc_otel._extras import extra
from kc_otel.contract.model import KernelSpec
from kc_otel.offline.python_names import python_name

if TYPE_CHECKING:
    from kc_otel.diagnose.torch_kernel import TorchKernel

__all__ = ["torch_kernel_from"]

_WHAT: Final = "a torch module, a kc_otel.diagnose.TorchKernel, or a function that returns one"


def torch_kernel_from(target: str, spec: KernelSpec) -> TorchKernel:
    """The kernel that a text names: `FILE.py:NAME`, or a folder with a Hugging Face checkpoint.

    A checkpoint is loaded in the number format that the contract says, or in its own, without anything from a network.

    Args:
        target: The text.
        spec: What the contract says of it.

    Raises:
        ValueError: If the text names nothing, or something else.
        MissingExtraError: If torch, or transformers for a checkpoint, is not installed.
    """
    from kc_otel.diagnose.torch_kernel import TorchKernel  # noqa: PLC0415 - torch

    folder = Path(target)
    if (folder / "config.json").is_file():
        return _checkpoint(folder, spec)
    if folder.is_dir():
        raise ValueError(f"{target}: has no config.json; give a folder with a Hugging Face checkpoint")
    found = python_name(target, _WHAT)
    import torch  # noqa: PLC0415

    if not isinstance(found, torch.nn.Module | TorchKernel) and callable(found):
        found = found()
    if isinstance(found, torch.nn.Module):
        found = TorchKernel(found.eval())
    if not isinstance(found, TorchKernel):
        raise ValueError(f"{target}: is {type(found).__name__}, not {_WHAT}")  # noqa: TRY004 - a wrong argument
    return found


def _checkpoint(folder: Path, spec: KernelSpec) -> TorchKernel:
    with extra("transformers", "a Hugging Face checkpoint"):
        from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415

    import torch  # noqa: PLC0415

    from kc_otel.diagnose.torch_kernel import TorchKernel  # noqa: PLC0415

    plain = getattr(torch, spec.dtype or "", None)
    dtype = plain if isinstance(plain, torch.dtype) and plain.itemsize > 1 else "auto"
    try:
        module = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True).eval()
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ValueError(f"{folder}: is no checkpoint that transformers can load: {error}") from error
    encode = None
    if (folder / "tokenizer_config.json").is_file():
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        if tokenizer.chat_template:

            def encode(messages: Any) -> list[int]:
                made = tokenizer.apply_chat_template(
                    list(messages), tokenize=True, add_generation_prompt=True, return_dict=False
                )
                return [int(each) for each in made]

    return TorchKernel(module, encode=encode, sampling=_sampling(folder))


def _sampling(folder: Path) -> dict[str, Any]:
    """Sampling parameters that a checkpoint asks for; engines take them from there."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return {}
    given = json.loads(path.read_text(encoding="utf-8"))
    if not given.get("do_sample"):
        return {}
    return {name: given[name] for name in ("temperature", "top_k", "top_p", "min_p") if given.get(name) is not None}
