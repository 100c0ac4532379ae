"""A torch model whose operators can be watched, given other inputs, and swapped: one forward with hooks on it.

Outputs are taken (`run`), replaced by other outputs after they were taken, so that every operator is given another
kernel's inputs (`replaced`), or changed by an error that was measured before (`added`). Operators of Hugging Face's
models that are no modules are watched, too: the function that turns queries and keys and the cache that a layer is
given are stand-ins meanwhile.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial, wraps
from typing import Any, ClassVar, Final

import numpy as np

from kc_otel._extras import extra
from kc_otel.contract.slices import Scalar
from kc_otel.diagnose.boundaries import OUTPUT, Boundary, boundaries_of, fused, fused_parts, layer_of
from kc_otel.diagnose.token_sequences import TokenSequence
from kc_otel.diagnose.visits import Activations, TorchVisit
from kc_otel.recordings.scoring import processed

with extra("torch", "locating in a torch module"):
    import torch

_PAD_TOKEN_ID: Final = 0
_ROTARY: Final = re.compile(r"apply_\w*(?:rotary|rope)\w*")
_CACHES: Final = ("past_key_values", "past_key_value", "layer_past")
_OnOutput = Callable[[Boundary, Any], Any]
"""From a boundary and its output to the output to go on with, or None for the same."""


@dataclass(frozen=True, eq=False)
class TorchKernel:
    """One kernel: a causal language model and what stands before and after it.

    `module` is in `eval` mode and called as `module(input_ids)`, [sequences, tokens], padded on the right; it returns
    logits or an object with `.logits`. `encode` is the tokenizer with its chat template, `sampling` how the kernel
    samples, `autocast` its region's number format. `cache` makes the KV cache that a forward is given as
    `past_key_values`. `vocabulary` is token to id. Where it `is_fused`, products of one input count as one operator.
    """

    module: torch.nn.Module
    encode: Callable[[Sequence[Mapping[str, str]]], Sequence[int]] | None = None
    sampling: Mapping[str, Scalar] = field(default_factory=dict)
    autocast: torch.dtype | None = None
    cache: Callable[[], Any] | None = None
    vocabulary: Mapping[str, int] | None = None
    is_fused: bool = False
    only_seen: ClassVar[frozenset[str]] = frozenset()
    has_sampler: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not isinstance(self.module, torch.nn.Module):
            raise TypeError(f"module: {type(self.module).__name__} is not a torch.nn.Module")
        if self.module.training:
            raise ValueError("module: it is in training mode, where dropout draws numbers; call module.eval()")

    @property
    def named(self) -> dict[str, Boundary]:
        """The boundary of each watched module, by the module's name."""
        return boundaries_in(self.module.named_modules())

    @property
    def dtype(self) -> torch.dtype:
        """Number format of the parameters; float32 without any."""
        return next(
            (parameter.dtype for parameter in self.module.parameters() if parameter.is_floating_point()), torch.float32
        )

    @property
    def device(self) -> torch.device:
        """Device of the first parameter."""
        return next((parameter.device for parameter in self.module.parameters()), torch.device("cpu"))

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def run(
        self,
        sequences: Sequence[TokenSequence],
        batches: Sequence[Sequence[int]],
        *,
        replaced: Activations | None = None,
        added: Activations | None = None,
        taken: bool = True,
        padding: int = 0,
    ) -> tuple[Activations, list[torch.Tensor]]:
        """Outputs by boundary, [tokens, features] of each sequence, and logits [tokens, vocabulary] in float32.

        Every sequence is in one of the batches. `replaced` replaces an operator's output after it was taken, `added` is
        added to it; `padding` are tokens of something else, behind the longest.
        """
        ids_of = [torch.as_tensor(np.asarray(sequence.token_ids, dtype=np.int64)) for sequence in sequences]
        visit = TorchVisit(sequences, self._apart(replaced), self._apart(added), taken=taken)
        logits: list[torch.Tensor] = [torch.empty(0)] * len(sequences)
        region = torch.autocast(self.device.type, dtype=self.autocast, enabled=self.autocast is not None)
        with visit.of_modules(self.module, self.named), watched_functions(self.module, self.named, visit), region:
            for rows in batches:
                width = max(len(ids_of[row]) for row in rows) + padding
                ids = torch.full((len(rows), width), _PAD_TOKEN_ID, dtype=torch.int64)
                for place, row in enumerate(rows):
                    ids[place, : len(ids_of[row])] = ids_of[row]
                visit.begin(rows, width)
                options = {} if self.cache is None else {"past_key_values": self.cache()}
                output = self.module(ids.to(self.device), **options)
                given = getattr(output, "logits", output)
                if not isinstance(given, torch.Tensor) or given.shape[:2] != ids.shape or given.ndim != 3:
                    got = tuple(given.shape) if isinstance(given, torch.Tensor) else type(given).__name__
                    raise ValueError(f"the model returned {got}, not logits [sequences, tokens, vocabulary]")
                for place, row in enumerate(rows):
                    logits[row] = given[place, : len(ids_of[row])].float().cpu()
        found = visit.found
        if self.is_fused:
            found = fused(found, lambda parts: [torch.cat(columns, 1) for columns in zip(*parts, strict=True)])
        if added and OUTPUT in added:
            logits = [own + error for own, error in zip(logits, added[OUTPUT], strict=True)]
        return {**found, OUTPUT: logits} if taken else found, logits

    def distributions(self, sequences: Sequence[TokenSequence], logits: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Log-probabilities [completion, vocabulary] as sampled from logits; of all but one token without a prompt."""
        return [
            processed(scores[max(sequence.prompt_tokens - 1, 0) : -1], self.sampling).log_softmax(-1)
            for sequence, scores in zip(sequences, logits, strict=True)
        ]

    @cached_property
    def _parts(self) -> dict[Boundary, list[tuple[Boundary, int]]]:
        modules = {boundary: self.module.get_submodule(name) for name, boundary in self.named.items()}
        return {
            whole: [(key, int(modules[key].weight.shape[0])) for key in parts]
            for whole, parts in fused_parts(modules).items()
        }

    def _apart(self, outputs: Activations | None) -> Activations | None:
        """Outputs of fused operators as those of their parts."""
        if outputs is None or not self.is_fused:
            return outputs
        found = {key: values for key, values in outputs.items() if key not in self._parts}
        for whole, parts in self._parts.items():
            first = 0
            for key, features in parts if whole in outputs else ():
                found[key] = [output[:, first : first + features] for output in outputs[whole]]
                first += features
        return found


def boundaries_in(modules: Iterable[tuple[str, torch.nn.Module]]) -> dict[str, Boundary]:
    """`boundaries_of` some named modules."""
    return boundaries_of(
        (name, not any(module.children()) and any(True for _ in module.parameters(recurse=False)))
        for name, module in modules
        if name
    )


@contextmanager
def watched_functions(module: torch.nn.Module, named: Mapping[str, Boundary], visit: _OnOutput) -> Iterator[None]:
    """Have the functions within attention visited, [sequences, heads, tokens, features], where no module is."""
    apart = set(named.values())
    within: list[int] = []
    homes: set[str] = set()
    with ExitStack() as stack:
        for name, submodule in module.named_modules():
            layer = layer_of(name)
            if layer is None or not hasattr(submodule, "layer_idx") or not any(True for _ in submodule.children()):
                continue
            if Boundary(layer, "rotary") not in apart:
                homes.add(type(submodule).__module__)
                entered = submodule.register_forward_pre_hook(partial(_enter, within, layer))
                left = submodule.register_forward_hook(partial(_leave, within), always_call=True)
                stack.callback(entered.remove)
                stack.callback(left.remove)
            if Boundary(layer, "kv_cache") not in apart:
                written = submodule.register_forward_pre_hook(partial(_with_cache, visit, layer), with_kwargs=True)
                stack.callback(written.remove)
        for home in homes:
            for name, function in list(vars(sys.modules[home]).items()):
                if _ROTARY.fullmatch(name) and callable(function):
                    setattr(sys.modules[home], name, _visited(function, within, visit))
                    stack.callback(setattr, sys.modules[home], name, function)
        yield


def _enter(within: list[int], layer: int, *_: Any) -> None:
    within.append(layer)


def _leave(within: list[int], *_: Any) -> None:
    within.pop()


def _visited(function: Callable[..., Any], within: list[int], visit: _OnOutput) -> Callable[..., Any]:
    """The same function, whose outputs are visited where attention calls it; not where it is called by another."""

    @wraps(function)
    def visited(*args: Any, **options: Any) -> Any:
        if not within:
            return function(*args, **options)
        layer = within[-1]
        within.clear()
        try:
            output = function(*args, **options)
        finally:
            within.append(layer)
        changed = visit(Boundary(layer, "rotary"), output)
        return output if changed is None else changed

    return visited


def _with_cache(
    visit: _OnOutput, layer: int, _: torch.nn.Module, args: tuple[Any, ...], options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    name = next((cache for cache in _CACHES if hasattr(options.get(cache), "update")), None)
    if name is None:
        return None
    return args, {**options, name: _SeenCache(options[name], partial(visit, Boundary(layer, "kv_cache")))}


class _SeenCache:
    """A cache of Transformers, of which one layer's keys and values are visited as they are read back."""

    def __init__(self, cache: Any, visit: Callable[[Any], Any]) -> None:
        self._cache, self._visit = cache, visit

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def update(self, *args: Any, **options: Any) -> Any:
        """Write, and read what is there."""
        output = self._cache.update(*args, **options)
        changed = self._visit(output)
        return output if changed is None else changed
