"""The two kernels of a command line: a Python program's, or a Hugging Face checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kc_otel._extras import extra
from kc_otel.contract.model import KernelSpec
from kc_otel.offline.python_names import python_name

if TYPE_CHECKING:
    import torch

    from kc_otel.diagnose.capture_file import CapturedSequence
    from kc_otel.diagnose.token_sequences import TokenSequence
    from kc_otel.diagnose.torch_formats import WeightFormat
    from kc_otel.diagnose.torch_kernel import TorchKernel

__all__ = ["VLLM", "captured_by", "engine_options", "quantized_matrices", "torch_kernel_from"]

VLLM: Final = "vllm:"
"""In front of a checkpoint's folder: run it with vLLM."""

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

    if target.startswith(VLLM):
        raise ValueError(f"{target}: an engine can be captured, and compared with what is captured; it is no module")
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


def captured_by(
    target: str,
    spec: KernelSpec,
    sequences: Sequence[TokenSequence],
    *,
    precision: str | None = None,
    options: Mapping[str, Any] | None = None,
    decode: int = 16,
) -> Iterator[CapturedSequence]:
    """What the kernel that a text names gives on sequences: as for `torch_kernel_from`, or `vllm:FOLDER`.

    Args:
        target: The text.
        spec: What the contract says of it.
        sequences: What it is run on.
        precision: Number format whose rounding is measured in a torch kernel.
        options: Arguments of `vllm.LLM`.
        decode: Tokens that an engine decodes after each prompt.

    Raises:
        ValueError: If the text names nothing, or the number format is unknown.
    """
    if target.startswith(VLLM):
        from kc_otel.diagnose.vllm_capture import capture_vllm, engine_from  # noqa: PLC0415 - vLLM

        with extra("vllm", "an engine"):
            engine = engine_from(target.removeprefix(VLLM), options or {})
        try:
            yield from capture_vllm(engine, sequences, decode=decode)
        finally:
            engine.llm_engine.engine_core.shutdown()
        return
    import torch  # noqa: PLC0415

    from kc_otel.diagnose.torch_capture import capture_torch  # noqa: PLC0415

    dtype = None if precision is None else getattr(torch, precision, None)
    if precision is not None and not isinstance(dtype, torch.dtype):
        raise ValueError(f"{precision!r} is no number format of torch, such as bfloat16")
    yield from capture_torch(torch_kernel_from(target, spec), sequences, precision=dtype)


def engine_options(texts: Mapping[str, str]) -> dict[str, Any]:
    """Arguments of an engine from texts: numbers, true and false as JSON has them, and else the text."""
    found: dict[str, Any] = {}
    for name, text in texts.items():
        try:
            found[name] = json.loads(text)
        except ValueError:
            found[name] = text
    return found


def quantized_matrices(folder: str) -> tuple[WeightFormat, dict[str, torch.Tensor]]:
    """The matrices of a checkpoint that a tool has quantised, in floating point, and the format that its config says.

    Args:
        folder: A checkpoint in compressed-tensors' form is read by that library; GPTQ's and AWQ's own by gptqmodel.

    Raises:
        ValueError: If it is none, or what reads it is not installed.
        MissingExtraError: If transformers is not installed.
    """
    path = Path(folder) / "config.json"
    said = json.loads(path.read_text(encoding="utf-8")).get("quantization_config") if path.is_file() else None
    if not said:
        raise ValueError(f"{folder}: has no config.json with a quantization_config; give what the tool wrote")
    with extra("transformers", "a Hugging Face checkpoint"):
        import transformers  # noqa: PLC0415

    import torch  # noqa: PLC0415

    from kc_otel.diagnose.torch_formats import WeightFormat  # noqa: PLC0415

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
