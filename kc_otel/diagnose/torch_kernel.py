"""A torch model whose operators can be watched, given other inputs, and swapped: one forward with hooks on it.

Three things are done with the hooks, all in one forward over given tokens: outputs are taken (`run`), replaced by other
outputs after they were taken, so that every operator is given another kernel's inputs (`run` with `replaced`), or
changed by an error that was measured before (`run` with `added`). The hooks are gone afterwards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

from kc_otel._extras import extra
from kc_otel.contract.slices import Scalar
from kc_otel.diagnose.boundaries import INPUT_OF, Boundary, boundaries_of

with extra("torch", "locating in a torch module"):
    import torch

__all__ = ["Activations", "TorchKernel"]

Activations = dict[Boundary, list[torch.Tensor]]
"""By boundary, in the order of execution, the output of each sequence, [tokens, features]."""

_PAD: Final = 0


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
    """

    module: torch.nn.Module
    encode: Callable[[Sequence[Mapping[str, str]]], Sequence[int]] | None = None
    sampling: Mapping[str, Scalar] = field(default_factory=dict)
    boundaries: Mapping[str, Boundary] | None = None
    autocast: torch.dtype | None = None

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
        return next((each.dtype for each in self.module.parameters() if each.is_floating_point()), torch.float32)

    @property
    def device(self) -> torch.device:
        """Where the first parameter is."""
        return next((each.device for each in self.module.parameters()), torch.device("cpu"))

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def run(
        self,
        sequences: Sequence[torch.Tensor],
        batches: Sequence[Sequence[int]],
        *,
        replaced: Activations | None = None,
        added: Activations | None = None,
        taken: bool = True,
        padding: int = 0,
    ) -> tuple[Activations, list[torch.Tensor]]:
        """Run the model over sequences, in these batches.

        Args:
            sequences: Token ids, int64 [tokens] each.
            batches: Indices of the sequences of each forward; every sequence in one of them.
            replaced: What an operator's output is replaced by once it was taken.
            added: What is added to an operator's output.
            taken: Whether outputs are taken.
            padding: Tokens of padding behind the longest sequence of a batch.

        Returns:
            Outputs by boundary, and logits [tokens, vocabulary] in float32 of each sequence.

        Raises:
            ValueError: If the model returns no logits for the tokens.
        """
        found: Activations = {}
        logits: list[torch.Tensor] = [torch.empty(0)] * len(sequences)
        for rows in batches:
            width = max(len(sequences[row]) for row in rows) + padding
            ids = torch.full((len(rows), width), _PAD, dtype=torch.int64)
            for place, row in enumerate(rows):
                ids[place, : len(sequences[row])] = sequences[row]
            visit = _Visit(found, rows, [len(each) for each in sequences], width, replaced, added, taken=taken)
            region = torch.autocast(self.device.type, dtype=self.autocast, enabled=self.autocast is not None)
            with self._watched(visit), region:
                output = self.module(ids.to(self.device))
            given = getattr(output, "logits", output)
            if not isinstance(given, torch.Tensor) or given.shape[:2] != ids.shape or given.ndim != 3:
                got = tuple(given.shape) if isinstance(given, torch.Tensor) else type(given).__name__
                raise ValueError(f"the model returned {got}, not logits [sequences, tokens, vocabulary]")
            for place, row in enumerate(rows):
                logits[row] = given[place, : len(sequences[row])].float().cpu()
        return found, logits

    @contextmanager
    def _watched(self, visit: _Visit) -> Iterator[None]:
        handles = []
        named = self.named
        operators = set(named.values())
        try:
            for name, boundary in named.items():
                module = self.module.get_submodule(name)
                earlier = INPUT_OF.get(boundary.operator)
                if earlier is not None and Boundary(boundary.layer, earlier) not in operators:
                    before = replace(boundary, operator=earlier)
                    handles.append(module.register_forward_pre_hook(_before(visit, before)))
                handles.append(module.register_forward_hook(_after(visit, boundary)))
            yield
        finally:
            for handle in handles:
                handle.remove()


class _Visit:
    """What is done at each boundary of one forward."""

    def __init__(
        self,
        found: Activations,
        rows: Sequence[int],
        lengths: Sequence[int],
        width: int,
        replaced: Activations | None,
        added: Activations | None,
        *,
        taken: bool,
    ) -> None:
        self._found, self._rows, self._lengths, self._width = found, rows, lengths, width
        self._replaced, self._added, self._taken = replaced, added, taken
        self._parts: Counter[Boundary] = Counter()

    def __call__(self, boundary: Boundary, output: Any) -> Any:
        """Take a module's output; returns the one to go on with, or None for the same."""
        if isinstance(output, tuple | list):
            members = [self(boundary, each) if isinstance(each, torch.Tensor) else None for each in output]
            if all(each is None for each in members):
                return None
            return type(output)(old if new is None else new for old, new in zip(output, members, strict=True))
        if not isinstance(output, torch.Tensor) or not output.is_floating_point():
            return None
        axes = self._axes(output)
        if axes is None:
            return None
        key = replace(boundary, part=self._parts[boundary])
        self._parts[boundary] += 1
        view = axes(output)
        if self._taken:
            outputs = self._found.setdefault(key, [torch.empty(0)] * len(self._lengths))
            for place, row in enumerate(self._rows):
                outputs[row] = view[place, : self._lengths[row]].flatten(1).detach().clone()
        return self._changed(key, output, axes)

    def _changed(self, key: Boundary, output: torch.Tensor, axes: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        new = (self._replaced or self._added or {}).get(key)
        features = output[0].numel() // self._width if output.shape[0] == len(self._rows) else output[0].numel()
        if new is None or any(new[row].numel() != self._lengths[row] * features for row in self._rows):
            return None
        # Padding gets nothing of a kernel whose numbers may not be finite: masked attention would pass NaN on.
        changed = torch.zeros_like(output) if self._replaced else output.clone(memory_format=torch.contiguous_format)
        view = axes(changed)
        for place, row in enumerate(self._rows):
            target = view[place, : self._lengths[row]]
            value = new[row].to(device=target.device, dtype=torch.float32).reshape(target.shape)
            target.copy_(value if self._replaced else target.float() + value)
        return changed

    def _axes(self, tensor: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """How to see a tensor as [sequences, tokens, ...]; None where it has not these axes."""
        batch, width, shape = len(self._rows), self._width, tensor.shape
        if len(shape) >= 3 and shape[0] == batch and shape[1] == width:
            return _same
        if len(shape) == 4 and shape[0] == batch and shape[2] == width:
            return _heads_first
        if len(shape) >= 2 and shape[0] == batch * width:
            return lambda each: each.view(batch, width, *shape[1:])
        return None


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _heads_first(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(1, 2)


def _after(visit: _Visit, boundary: Boundary) -> Callable[..., Any]:
    def hook(_: torch.nn.Module, __: tuple[Any, ...], output: Any) -> Any:
        return visit(boundary, output)

    return hook


def _before(visit: _Visit, boundary: Boundary) -> Callable[..., Any]:
    def hook(_: torch.nn.Module, args: tuple[Any, ...]) -> Any:
        if not args:
            return None
        changed = visit(boundary, args[0])
        return None if changed is None else (changed, *args[1:])

    return hook
