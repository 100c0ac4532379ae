"""The kernels of a command line, a Python program's, a Hugging Face checkpoint or an engine, and captures of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kc_otel._extras import extra
from kc_otel.contract.model import KernelSpec, KernelSpecs, cache_may_be_the_checkpoints, declared_otherwise
from kc_otel.diagnose.boundaries import SAMPLER, Boundary
from kc_otel.diagnose.captures import Capture, CapturedSequence, kept_positions, projected, read_capture, relative_error
from kc_otel.diagnose.located import NotComparableError
from kc_otel.diagnose.token_sequences import TokenSequence, chat_encoder
from kc_otel.diagnose.torch_kernel import TorchKernel
from kc_otel.diagnose.torch_measure import OTHER_PADDING, kernel_in, not_run, unreached
from kc_otel.diagnose.visits import Activations
from kc_otel.diagnose.vllm_kernel import VllmKernel, WatchedKernel
from kc_otel.offline.python_names import python_name

with extra("torch", "a kernel of torch"):
    import torch

VLLM: Final = "vllm:"

_SOURCES: Final = "a torch module, a kc_otel.diagnose.torch_kernel.TorchKernel, or a function that returns one"
_KV_FORMATS: Final = {"fp8-e4m3": torch.float8_e4m3fn, "fp8-e5m2": torch.float8_e5m2}


def torch_kernel_from(target: str, spec: KernelSpec) -> TorchKernel:
    """The kernel of `FILE.py:NAME`, or of a folder with a Hugging Face checkpoint; a ValueError if it is none."""
    if target.startswith(VLLM):
        raise ValueError(f"{target}: an engine is no training kernel; give a torch module or a checkpoint's folder")
    folder = Path(target)
    if (folder / "config.json").is_file():
        return checkpoint_kernel(folder, spec)
    if folder.is_dir():
        raise ValueError(f"{target}: has no config.json; give a folder with a Hugging Face checkpoint")
    if ":" not in target or (folder.is_file() and folder.suffix != ".py"):
        raise ValueError(f"{target}: is neither a whole capture, nor a checkpoint's folder, nor FILE.py:NAME")
    found = python_name(target, _SOURCES)
    if not isinstance(found, torch.nn.Module | TorchKernel) and callable(found):
        found = found()
    if isinstance(found, torch.nn.Module):
        found = TorchKernel(found.eval())
    if not isinstance(found, TorchKernel):
        raise ValueError(f"{target}: is {type(found).__name__}, not {_SOURCES}")  # noqa: TRY004 - a wrong argument
    return found


def two_kernels(train: str, infer: str, kernels: KernelSpecs) -> None:
    """Refuse one capture, or one checkpoint in one number format, on both sides, whatever the contract declares."""
    if not Path(infer).exists() or Path(train).resolve() != Path(infer).resolve():
        return
    if Path(infer).is_file():
        raise NotComparableError(f"{infer}: is the training kernel, too; give a capture of the inference kernel")
    sides = (kernels.train, kernels.inference)
    if len({(_loaded(Path(infer), spec), _kv_format(spec.kv_cache_dtype)) for spec in sides}) == 1:
        raise NotComparableError(
            f"{infer}: is the training kernel, too; give the inference kernel, such as vllm:{infer}"
        )


@contextmanager
def kernel_from(target: str, spec: KernelSpec, options: Mapping[str, Any] | None = None) -> Iterator[WatchedKernel]:
    """The kernel that a text names: as for `torch_kernel_from`, or `vllm:FOLDER`, an engine that ends afterwards."""
    if not target.startswith(VLLM):
        yield torch_kernel_from(target, spec)
        return
    kernel = VllmKernel.of(target.removeprefix(VLLM), options or {})
    try:
        # What an option says is asked for; what none says has to be what the contract declares.
        if said := declared_otherwise(spec.model_copy(update=dict.fromkeys(options or {})), kernel.formats):
            raise NotComparableError(f"{target}: {'; '.join(said)}; add --engine NAME=VALUE, or correct the contract")
        yield kernel
    finally:
        kernel.close()


def capture_of(path: Path, spec: KernelSpec) -> Capture:
    """Read a capture; an engine's names the options that the engine was given."""
    found = read_capture(path)
    options = dict(option.split("=", 1) for option in found.kernel.split(", ") if "=" in option)
    asked = options.get("kv_cache_dtype", "auto")
    if not found.kernel.startswith(VLLM) or (asked == "auto" and cache_may_be_the_checkpoints(spec)):
        return found
    if said := declared_otherwise(spec, {"kv_cache_dtype": asked, "dtype": spec.dtype or ""}):
        how = "capture it with --engine kv_cache_dtype=VALUE, or correct the contract"
        raise NotComparableError(f"{path}: {found.kernel}: {'; '.join(said)}; {how}")
    return found


def completed_by(kernel: WatchedKernel, sequences: Sequence[TokenSequence], decode: int) -> list[TokenSequence]:
    """Sequences with a completion: where there is none, an engine decodes one, so that decoding is seen, too."""
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
    """Yield a named kernel's captures of sequences; an engine decodes so many tokens after a bare prompt."""
    dtype = None if precision is None else getattr(torch, precision, None)
    if precision is not None and not isinstance(dtype, torch.dtype):
        raise ValueError(f"{precision!r} is no number format of torch, such as bfloat16")
    with kernel_from(target, spec, options) as kernel:
        yield from capture_kernel(kernel, completed_by(kernel, sequences, decode), precision=dtype)


def checkpoint_kernel(folder: Path, spec: KernelSpec) -> TorchKernel:
    """The kernel that runs a checkpoint with transformers, in the number formats of the contract's declaration."""
    with extra("transformers", "a Hugging Face checkpoint"):
        from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415

    dtype = _asked(spec) or "auto"
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


def _asked(spec: KernelSpec) -> torch.dtype | None:
    plain = getattr(torch, spec.dtype or "", None)
    return plain if isinstance(plain, torch.dtype) and plain.itemsize > 1 else None


def _loaded(folder: Path, spec: KernelSpec) -> str:
    """The number format in which a checkpoint is loaded: the declared one, or its own."""
    asked, config = _asked(spec), folder / "config.json"
    if asked is not None or not config.is_file():
        return str(asked).removeprefix("torch.")
    own = json.loads(config.read_text(encoding="utf-8"))
    return str(own.get("dtype") or own.get("torch_dtype"))


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


def capture_kernel(
    kernel: WatchedKernel, sequences: Sequence[TokenSequence], *, precision: torch.dtype | None = None
) -> Iterator[CapturedSequence]:
    """Yield what a kernel gives on each sequence, its distributions too; products of one input are one operator."""
    rounded = None
    if isinstance(kernel, TorchKernel):
        kernel = replace(kernel, is_fused=True)
        rounded = kernel_in(kernel, precision) if precision else None
    for index, sequence in enumerate(sequences):
        with not_run(kernel) as left:
            taken, logits = kernel.run([sequence], [[0]])
        own = _outputs(taken)
        others = _outputs(kernel.run([sequences[index - 1], sequence], [[0, 1]], padding=OTHER_PADDING)[0], 1)
        rough = _outputs(rounded.run([sequence], [[0]])[0]) if rounded else {}
        encoded = kernel.encode(sequence.messages) if kernel.encode and sequence.messages else None
        sampled = np.zeros((len(sequence.token_ids), logits[0].shape[1]), dtype=np.float32)
        found = kernel.distributions([sequence], logits)[0].exp().cpu().numpy()
        sampled[-1 - len(found) : -1] = found
        outputs, positions = {**own, SAMPLER: sampled}, kept_positions(len(sequence.token_ids))
        yield CapturedSequence(
            token_ids=tuple(sequence.token_ids),
            prompt_tokens=sequence.prompt_tokens,
            positions=positions,
            outputs={key: projected(values[positions]) for key, values in outputs.items()},
            features={key: values.shape[1] for key, values in outputs.items()},
            noise=_errors(own, others),
            precision=_errors(own, rough),
            messages=sequence.messages,
            encoded=None if encoded is None else tuple(encoded),
            unreached=tuple(unreached(kernel, left, own)),
        )


def _errors(
    own: Mapping[Boundary, NDArray[np.float32]], others: Mapping[Boundary, NDArray[np.float32]]
) -> dict[Boundary, float]:
    return {
        key: relative_error(own[key], values)
        for key, values in others.items()
        if key in own and own[key].shape == values.shape
    }


def _outputs(activations: Activations, row: int = 0) -> dict[Boundary, NDArray[np.float32]]:
    taken = {key: tensor[row] for key, tensor in activations.items()}
    numbers = {key: tensor for key, tensor in taken.items() if tensor.ndim == 2 and tensor.is_floating_point()}
    return {key: tensor.float().cpu().numpy() for key, tensor in numbers.items()}
