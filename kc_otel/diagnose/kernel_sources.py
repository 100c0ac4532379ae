"""The two kernels of a command line: a Python program's, a Hugging Face checkpoint, or an engine."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kc_otel._extras import extra
from kc_otel.contract.model import KernelSpec
from kc_otel.offline.python_names import python_name

if TYPE_CHECKING:
    from kc_otel.diagnose.capture_file import CapturedSequence
    from kc_otel.diagnose.token_sequences import TokenSequence
    from kc_otel.diagnose.torch_kernel import TorchKernel
    from kc_otel.diagnose.watched_kernel import WatchedKernel

VLLM: Final = "vllm:"
"""In front of a checkpoint's folder: run it with vLLM."""

_SOURCES: Final = "a torch module, a kc_otel.diagnose.torch_kernel.TorchKernel, or a function that returns one"


def torch_kernel_from(target: str, spec: KernelSpec) -> TorchKernel:
    """The kernel that a text names: `FILE.py:NAME`, or a folder with a Hugging Face checkpoint; a ValueError if none.

    A checkpoint is loaded in the number format that the contract says, or in its own, without anything from a network;
    where the contract says an fp8 KV cache, keys and values are rounded as they are written.
    """
    from kc_otel.diagnose.torch_kernel import TorchKernel  # noqa: PLC0415 - torch

    if target.startswith(VLLM):
        raise ValueError(f"{target}: an engine is no training kernel; give a torch module or a checkpoint's folder")
    folder = Path(target)
    if (folder / "config.json").is_file():
        from kc_otel.diagnose.checkpoint_folder import checkpoint_kernel  # noqa: PLC0415 - transformers

        return checkpoint_kernel(folder, spec)
    if folder.is_dir():
        raise ValueError(f"{target}: has no config.json; give a folder with a Hugging Face checkpoint")
    found = python_name(target, _SOURCES)
    import torch  # noqa: PLC0415

    if not isinstance(found, torch.nn.Module | TorchKernel) and callable(found):
        found = found()
    if isinstance(found, torch.nn.Module):
        found = TorchKernel(found.eval())
    if not isinstance(found, TorchKernel):
        raise ValueError(f"{target}: is {type(found).__name__}, not {_SOURCES}")  # noqa: TRY004 - a wrong argument
    return found


@contextmanager
def kernel_from(target: str, spec: KernelSpec, options: Mapping[str, Any] | None = None) -> Iterator[WatchedKernel]:
    """The kernel that a text names: as for `torch_kernel_from`, or `vllm:FOLDER`, an engine that ends afterwards."""
    if not target.startswith(VLLM):
        yield torch_kernel_from(target, spec)
        return
    from kc_otel.diagnose.vllm_kernel import VllmKernel  # noqa: PLC0415 - vLLM

    kernel = VllmKernel.of(target.removeprefix(VLLM), options or {})
    try:
        yield kernel
    finally:
        kernel.close()


def completed_by(kernel: WatchedKernel, sequences: Sequence[TokenSequence], decode: int) -> list[TokenSequence]:
    """Sequences with a completion: where there is none, an engine decodes one, so that decoding is seen, too."""
    from kc_otel.diagnose.vllm_kernel import VllmKernel  # noqa: PLC0415 - torch

    return kernel.continued(sequences, decode) if isinstance(kernel, VllmKernel) else list(sequences)


def captured_by(
    target: str,
    spec: KernelSpec,
    sequences: Sequence[TokenSequence],
    *,
    precision: str | None = None,
    options: Mapping[str, Any] | None = None,
    decode: int = 16,
) -> Iterator[CapturedSequence]:
    """Yield a named kernel's captures of sequences; names are those of `kernel_from`.

    `precision` is the number format whose rounding is measured in a torch kernel, `options` are arguments of
    `vllm.LLM`, and `decode` tokens are decoded by an engine after each prompt that has no completion.
    """
    with extra("torch", "a kernel of torch"):
        import torch  # noqa: PLC0415

    from kc_otel.diagnose.kernel_capture import capture_kernel  # noqa: PLC0415

    dtype = None if precision is None else getattr(torch, precision, None)
    if precision is not None and not isinstance(dtype, torch.dtype):
        raise ValueError(f"{precision!r} is no number format of torch, such as bfloat16")
    with kernel_from(target, spec, options) as kernel:
        yield from capture_kernel(kernel, completed_by(kernel, sequences, decode), precision=dtype)


def engine_options(texts: Mapping[str, str]) -> dict[str, Any]:
    """Arguments of an engine from texts: numbers, true and false as JSON has them, and else the text."""
    found: dict[str, Any] = {}
    for name, text in texts.items():
        try:
            found[name] = json.loads(text)
        except ValueError:
            found[name] = text
    return found
