"""Capturing a live vLLM in this process: outputs of its layers by hooks on the worker's model.

A sequence runs alone: its prompt first, then one step for each token that the engine decodes. Run again with another
sequence in the batch, it shows what the engine differs from itself by. Eager mode: a compiled graph has no modules.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kc_otel.diagnose.boundaries import INPUT_OF, Boundary, boundaries_of
from kc_otel.diagnose.capture_file import CapturedSequence, fused
from kc_otel.diagnose.token_sequences import TokenSequence
from kc_otel.diagnose.torch_capture import captured_from, relative_error

__all__ = ["capture_vllm", "engine_from"]

_EAGER: Final[Mapping[str, Any]] = {"enforce_eager": True, "enable_prefix_caching": False, "max_num_seqs": 4}

Outputs = dict[Boundary, NDArray[np.float32]]


def engine_from(checkpoint: str, options: Mapping[str, Any]) -> Any:
    """A vLLM engine in this process whose layers can be watched.

    Args:
        checkpoint: Folder of a checkpoint.
        options: Further arguments of `vllm.LLM`.

    Raises:
        ModuleNotFoundError: If vLLM is not installed.
    """
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # hooks cannot be sent to another process
    from vllm import LLM  # noqa: PLC0415 - only where vLLM runs

    return LLM(checkpoint, **{**_EAGER, **options})


def capture_vllm(engine: Any, sequences: Sequence[TokenSequence], *, decode: int = 16) -> Iterator[CapturedSequence]:
    """What an engine's operators give on each sequence, and on tokens that it decodes after it.

    The captured sequence is the given one and the decoded tokens: capture the training kernel on the tokens of this
    capture. With `decode` 0 it is the given one alone, and all of it prompt to the engine.

    Args:
        engine: A `vllm.LLM` that runs in this process, eager, without prefix caching.
        sequences: What it is run on.
        decode: Tokens that it decodes, greedily, after the prompt of each sequence.

    Raises:
        ValueError: If the engine's layers cannot be watched.
    """
    for index, sequence in enumerate(sequences):
        given = (
            sequence.token_ids[: sequence.prompt_tokens] if decode and sequence.prompt_tokens else sequence.token_ids
        )
        own, generated = _run(engine, [given], decode + 1)
        tokens = (*given, *generated[:decode])
        whole = TokenSequence(tokens, len(given) if decode else sequence.prompt_tokens, sequence.attributes)
        own = {key: values for key, values in own.items() if len(values) == len(tokens)}
        if not own:
            raise ValueError("no layer of the engine was seen: run it eagerly, in this process, without prefix caching")
        other = sequences[index - 1].token_ids
        beside, _ = _run(engine, [given, other], 1)
        prompt = {key: values[: len(given)] for key, values in own.items()}
        noise = _noise(prompt, beside, len(given))
        yield captured_from(whole, own, noise, {})


def _run(engine: Any, prompts: Sequence[Sequence[int]], tokens: int) -> tuple[Outputs, list[int]]:
    """Rows of every forward one after the other, and the tokens decoded for the first prompt."""
    from vllm import SamplingParams  # noqa: PLC0415 - only where vLLM runs

    seen: dict[Boundary, list[NDArray[np.float32]]] = {}
    handles: list[Any] = []
    engine.apply_model(lambda model: handles.extend(_watch(model, seen)))
    try:
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        given = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        answers = engine.generate(given, params, use_tqdm=False)
    finally:
        for handle in handles:
            handle.remove()
    outputs = {key: np.concatenate(rows) for key, rows in seen.items() if len({row.shape[1] for row in rows}) == 1}
    return fused(outputs), list(answers[0].outputs[0].token_ids)


def _watch(model: Any, seen: dict[Boundary, list[NDArray[np.float32]]]) -> list[Any]:
    names = [
        (name, not any(module.children()) and any(True for _ in module.parameters(recurse=False)))
        for name, module in model.named_modules()
        if name
    ]
    handles = []
    named = boundaries_of(names)
    for name, boundary in named.items():
        module = model.get_submodule(name)
        earlier = INPUT_OF.get(boundary.operator)
        if earlier is not None and Boundary(boundary.layer, earlier) not in named.values():
            before = Boundary(boundary.layer, earlier)

            def taken(_: Any, args: tuple[Any, ...], key: Boundary = before) -> None:
                _take(seen, key, args)

            handles.append(module.register_forward_pre_hook(taken))

        def gave(_: Any, __: Any, output: Any, key: Boundary = boundary) -> None:
            _take(seen, key, output)

        handles.append(module.register_forward_hook(gave))
    return handles


def _take(seen: dict[Boundary, list[NDArray[np.float32]]], key: Boundary, output: Any) -> None:
    """Keep the first tensor; a block hands on its output and the residual apart, whose sum is what it is elsewhere."""
    members = [each for each in (output if isinstance(output, tuple | list) else (output,)) if hasattr(each, "flatten")]
    if not members or not members[0].is_floating_point() or members[0].ndim < 2:
        return
    value = members[0].detach().float()
    if key.operator == "block" and len(members) == 2 and members[1].shape == members[0].shape:
        value = value + members[1].detach().float()
    seen.setdefault(key, []).append(value.flatten(1).cpu().numpy().copy())


def _noise(own: Outputs, beside: Outputs, rows: int) -> dict[Boundary, float]:
    """Difference to the same rows in another batch, if they are the first of it, which the embedding shows."""
    embedding = Boundary(None, "embedding")
    if embedding in own and not np.array_equal(own[embedding], beside.get(embedding, own[embedding][:0])[:rows]):
        return {}
    return {
        key: relative_error(values, beside[key][:rows])
        for key, values in own.items()
        if key in beside and beside[key][:rows].shape == values.shape
    }
