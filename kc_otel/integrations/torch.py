"""Watching causal language models in torch: forward hooks that leave nothing behind when they are removed.

A hook never raises into the forward it watches; its recorder counts inputs that it cannot use. It runs without
autograd, so no graph is kept alive. Copies of a watched module (by deepcopy, pickle, torch.save) are not watched.

Under `torch.compile`, attach to what it returns: that hook runs outside of the compiled graph. A module that is
compiled with the hook already inside, or by `module.compile()`, runs as if nothing was attached, without a break.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

from kc_otel._extras import extra
from kc_otel.record.recorder import Recorder
from kc_otel.record.sampling import Sampler
from kc_otel.record.slice_table import Attributes
from kc_otel.recordings.scoring import sampled_logprobs

with extra("torch", "watching a module"):
    import torch
    from torch.utils.hooks import RemovableHandle

__all__ = ["next_token_logprobs", "observe", "shadow"]

_IGNORED_LABEL: Final = -100

AttributesOf = Attributes | Callable[[tuple[Any, ...], Mapping[str, Any]], Attributes]
"""Attributes of the sequences, or what makes them from a forward's arguments."""


def observe(
    module: torch.nn.Module, recorder: Recorder, *, side: Literal["train", "inference"], attributes: AttributesOf = None
) -> RemovableHandle:
    """Record the log-probabilities that a causal language model gives its own input, teacher-forced.

    The other kernel records the same sequences, here or through `Recorder.sampled` and `Recorder.scored` with
    `prompt_ids` the first token and `token_ids` the rest; they are paired by their tokens. Forwards of a single token,
    as in generation from a cache, have nothing to record. `remove` the handle, or use it as a context manager: the
    module is then as it was before.

    Args:
        module: Called as `module(input_ids[, attention_mask], ...)`, [sequences, tokens]; returns logits
            [sequences, tokens, vocabulary] or an object with `.logits`. Where `labels` are passed, tokens with label
            -100 do not count, as in training; only tokens that the inference kernel sampled should.
        recorder: Recorder to use.
        side: Side of the module's kernel.
        attributes: Attributes that decide the slices, or a function of the forward's (args, kwargs) that returns them.
    """
    if side not in ("train", "inference"):
        raise ValueError(f"side: {side!r} is not a kernel; write train or inference")
    add_side = recorder.scored if side == "train" else recorder.sampled

    def record(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        ids, mask = _inputs(args, kwargs)
        if ids.shape[-1] < 2:
            return
        logits = _logits_of(output, ids)
        counted = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
        first = ids.gather(1, counted.int().argmax(dim=1, keepdim=True))
        tokens = counted[:, 1:] & counted[:, :-1]
        if isinstance(labels := kwargs.get("labels"), torch.Tensor):
            tokens = tokens & (labels[:, 1:] != _IGNORED_LABEL)
        add_side(
            token_ids=ids[:, 1:],
            logprobs=next_token_logprobs(logits, ids),
            mask=tokens,
            prompt_ids=first,
            attributes=attributes(args, kwargs) if callable(attributes) else attributes,
        )

    return _attached(module, recorder, record)


def shadow(
    module: torch.nn.Module,
    reference: torch.nn.Module,
    recorder: Recorder,
    *,
    side: Literal["train", "inference"],
    sampling: float | Callable[[], float] | None = None,
    attributes: AttributesOf = None,
) -> RemovableHandle:
    """Run a reference kernel on what a model is called with, and compare whole next-token distributions.

    The reference runs inside the model's call, without autograd and outside of autocast, so that call takes longer; at
    a small share it costs little. It must be in `eval` mode: dropout would draw from the program's random numbers.

    Args:
        module: The kernel that does the work; arguments and result as in `observe`.
        reference: The other kernel, on the same device.
        recorder: Recorder to use.
        side: Which kernel the module is; the reference is the other one.
        sampling: Share of forwards that are shadowed, or a function that returns it; None for the recorder's.
        attributes: As in `observe`.
    """
    if side not in ("train", "inference"):
        raise ValueError(f"side: {side!r} is not a kernel; write train or inference")
    if reference.training:
        raise ValueError("reference: it is in training mode; call reference.eval()")
    sampler = None if sampling is None else Sampler(sampling)

    def record(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if not (recorder.takes(os.urandom(8)) if sampler is None else sampler.takes()):
            return
        ids, mask = _inputs(args, kwargs)
        own = _logits_of(output, ids)
        if reference.training:
            raise ValueError("the reference went into training mode; call reference.eval()")
        with torch.autocast(ids.device.type, enabled=False):
            other = _logits_of(reference(*args, **_without_cache(kwargs, ids)), ids)
        recorder.compare_logits(
            own if side == "train" else other,
            other if side == "train" else own,
            mask=mask,
            attributes=attributes(args, kwargs) if callable(attributes) else attributes,
            presampled=True,
        )

    return _attached(module, recorder, record)


@torch.no_grad()  # type: ignore[untyped-decorator]
def next_token_logprobs(logits: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of each next token given those before it, nats, [sequences, tokens - 1].

    In float32 at least, in blocks, so that no second copy of the logits is needed.

    Args:
        logits: [sequences, tokens, vocabulary].
        input_ids: [sequences, tokens].
    """
    rows = zip(logits, input_ids, strict=True)
    return torch.stack([sampled_logprobs(sequence[:-1], ids[1:]) for sequence, ids in rows])


class _ForwardHook:
    """Runs `record` without autograd, and counts an exception instead of raising it.

    Nothing is run while a graph is being compiled, or inside of itself. A copied or pickled module does not take it
    along: a recorder has threads and cannot go with it.
    """

    def __init__(self, recorder: Recorder, record: Callable[[tuple[Any, ...], dict[str, Any], Any], None]) -> None:
        self._recorder = recorder
        self._record = record
        self._inside = threading.local()

    def __call__(self, _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if torch.compiler.is_compiling() or getattr(self._inside, "active", False):
            return
        self._inside.active = True
        try:
            with torch.no_grad():
                self._record(args, kwargs, output)
        except Exception as error:  # noqa: BLE001 - the module's caller must not fail because somebody watches
            self._recorder.drop("forward-unusable", error)
        finally:
            self._inside.active = False

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return functools.partial, (_nothing,)


def _attached(
    module: torch.nn.Module, recorder: Recorder, record: Callable[[tuple[Any, ...], dict[str, Any], Any], None]
) -> RemovableHandle:
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"module: {type(module).__name__} is not a torch.nn.Module")
    return module.register_forward_hook(_ForwardHook(recorder, record), with_kwargs=True)


def _nothing(*_: object) -> None:
    return None


def _inputs(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor | None]:
    ids = kwargs.get("input_ids", args[0] if args else None)
    if not isinstance(ids, torch.Tensor) or ids.ndim != 2 or ids.is_floating_point():
        raise ValueError("the module was not called with input_ids [sequences, tokens]")
    mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
    return ids, mask if isinstance(mask, torch.Tensor) and mask.shape == ids.shape else None


def _logits_of(output: Any, ids: torch.Tensor) -> torch.Tensor:
    logits = getattr(output, "logits", output)
    if not isinstance(logits, torch.Tensor) or logits.ndim != 3 or logits.shape[:2] != ids.shape:
        got = tuple(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__
        raise ValueError(
            f"the module returned {got}, not logits [sequences, tokens, vocabulary] for {tuple(ids.shape)}"
        )
    return logits


def _without_cache(kwargs: Mapping[str, Any], ids: torch.Tensor) -> dict[str, Any]:
    """Arguments for the reference, which must neither read nor extend the module's KV cache."""
    cache = kwargs.get("past_key_values")
    if cache is not None and not (hasattr(cache, "get_seq_length") and cache.get_seq_length() == ids.shape[1]):
        raise ValueError("the module continued from a KV cache, which the reference has not; shadow whole sequences")
    return {name: value for name, value in kwargs.items() if name not in ("past_key_values", "labels", "use_cache")}
