"""A torch model whose operators can be watched, given other inputs, and swapped: one forward with hooks on it.

Three things are done with the hooks, all in one forward over given tokens: outputs are taken (`run`), replaced by other
outputs after they were taken, so that every operator is given another kernel's inputs (`run` with `replaced`), or
changed by an error that was measured before (`run` with `added`). The hooks are gone afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, ClassVar, Final

import numpy as np

from kc_otel._extras import extra
from kc_otel.contract.slices import Scalar
from kc_otel.diagnose.boundaries import INPUT_OF, Boundary, boundaries_of, fused, fused_parts
from kc_otel.diagnose.token_sequences import TokenSequence
from kc_otel.diagnose.torch_functions import watched_functions
from kc_otel.diagnose.torch_visit import Activations, Visit
from kc_otel.recordings.scoring import processed

with extra("torch", "locating in a torch module"):
    import torch

_PAD_TOKEN_ID: Final = 0


@dataclass(frozen=True, eq=False)
class TorchKernel:
    """One kernel: a causal language model and what stands before and after it.

    Attributes:
        module: Called as `module(input_ids)`, [sequences, tokens], padded on the right; returns logits [sequences,
            tokens, vocabulary] or an object with `.logits`. In `eval` mode.
        encode: Token ids of a conversation, a list of {role, content}: the tokenizer with its chat template; None
            where sequences are given as tokens.
        sampling: Temperature, top_p, top_k and min_p by name, as the kernel samples.
        boundaries: Module name to boundary; None to find them by their names.
        autocast: Number format of the autocast region that it runs in; None for none.
        cache: Makes the KV cache that a forward is given as `past_key_values`; None for the module's own.
        vocabulary: Token to id, as the kernel's tokenizer has them; None where it is not known.
        is_fused: Whether products of one input count as one operator, as engines compute them.
    """

    module: torch.nn.Module
    encode: Callable[[Sequence[Mapping[str, str]]], Sequence[int]] | None = None
    sampling: Mapping[str, Scalar] = field(default_factory=dict)
    boundaries: Mapping[str, Boundary] | None = None
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
        if self.boundaries is not None:
            return dict(self.boundaries)
        leaves = (
            (name, not any(module.children()) and any(True for _ in module.parameters(recurse=False)))
            for name, module in self.module.named_modules()
            if name
        )
        return boundaries_of(leaves)

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
        """As of a `WatchedKernel`; `added` are values to add to an operator's output, padding is behind the longest."""
        ids_of = [torch.as_tensor(np.asarray(sequence.token_ids, dtype=np.int64)) for sequence in sequences]
        replaced, added = self._apart(replaced), self._apart(added)
        found: Activations = {}
        logits: list[torch.Tensor] = [torch.empty(0)] * len(sequences)
        for rows in batches:
            width = max(len(ids_of[row]) for row in rows) + padding
            ids = torch.full((len(rows), width), _PAD_TOKEN_ID, dtype=torch.int64)
            for place, row in enumerate(rows):
                ids[place, : len(ids_of[row])] = ids_of[row]
            visit = Visit(found, rows, [len(token_ids) for token_ids in ids_of], width, replaced, added, taken=taken)
            region = torch.autocast(self.device.type, dtype=self.autocast, enabled=self.autocast is not None)
            with self._watched(visit), region:
                options = {} if self.cache is None else {"past_key_values": self.cache()}
                output = self.module(ids.to(self.device), **options)
            given = getattr(output, "logits", output)
            if not isinstance(given, torch.Tensor) or given.shape[:2] != ids.shape or given.ndim != 3:
                got = tuple(given.shape) if isinstance(given, torch.Tensor) else type(given).__name__
                raise ValueError(f"the model returned {got}, not logits [sequences, tokens, vocabulary]")
            for place, row in enumerate(rows):
                logits[row] = given[place, : len(ids_of[row])].float().cpu()
        return fused(found, _side_by_side) if self.is_fused else found, logits

    def distributions(self, sequences: Sequence[TokenSequence], logits: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """As of a `WatchedKernel`; a sequence whose prompt is not known is all completion, but for its first token."""
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

    @contextmanager
    def _watched(self, visit: Visit) -> Iterator[None]:
        handles = []
        named = self.named
        operators = set(named.values())
        try:
            for name, boundary in named.items():
                module = self.module.get_submodule(name)
                earlier = INPUT_OF.get(boundary.operator)
                if earlier is not None and Boundary(boundary.layer, earlier) not in operators:
                    before = replace(boundary, operator=earlier)
                    handles.append(module.register_forward_pre_hook(partial(_before, visit, before)))
                handles.append(module.register_forward_hook(partial(_after, visit, boundary)))
            with watched_functions(self.module, named, visit):
                yield
        finally:
            for handle in handles:
                handle.remove()


def _side_by_side(outputs: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    return [torch.cat(parts, 1) for parts in zip(*outputs, strict=True)]


def _after(visit: Visit, boundary: Boundary, _: torch.nn.Module, __: tuple[Any, ...], output: Any) -> Any:
    return visit(boundary, output)


def _before(visit: Visit, boundary: Boundary, _: torch.nn.Module, args: tuple[Any, ...]) -> Any:
    changed = visit(boundary, args[0]) if args else None
    return None if changed is None else (changed, *args[1:])
