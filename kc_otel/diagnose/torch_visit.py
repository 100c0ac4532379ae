"""Actions at each boundary of a torch model in a forward: outputs are taken, replaced, or changed by an error."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

from kc_otel._extras import extra
from kc_otel.diagnose.boundaries import Boundary

with extra("torch", "locating in a torch module"):
    import torch

Activations = dict[Boundary, list[torch.Tensor]]
"""By boundary, in the order of execution, the output of each sequence, [tokens, features].

Whole numbers are a router's choices: they are handed on with its weights, and are no numbers to compare.
"""
_HEADS_FIRST: Final = frozenset({"rotary", "kv_cache"})
"""Operators whose outputs are [sequences, heads, tokens, ...] even where there are as many heads as tokens."""


class Visit:
    """Actions at each boundary of one forward over the sequences `rows`, padded to `width` tokens.

    Outputs are taken into `found`, and then replaced or added to; a router's choices are always replaced.
    """

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
            members = [self(boundary, member) if isinstance(member, torch.Tensor) else None for member in output]
            if all(member is None for member in members):
                return None
            return type(output)(old if new is None else new for old, new in zip(output, members, strict=True))
        if not isinstance(output, torch.Tensor) or output.dtype == torch.bool:
            return None
        if not output.is_floating_point() and boundary.operator != "router":
            return None
        if output.ndim > 2 and output.shape[:2] == (1, self._width):  # the same for every sequence, as angles are
            output = output.expand(len(self._rows), *output.shape[1:])
        axes = self._axes(output, heads_first=boundary.operator in _HEADS_FIRST)
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
        written = self._replaced is not None or not output.is_floating_point()
        changed = (
            torch.zeros_like(output, memory_format=torch.contiguous_format)
            if self._replaced
            else output.clone(memory_format=torch.contiguous_format)
        )
        view = axes(changed)
        for place, row in enumerate(self._rows):
            target = view[place, : self._lengths[row]]
            value = new[row].to(device=target.device, dtype=torch.float32).reshape(target.shape)
            target.copy_(value if written else target.float() + value)
        return changed

    def _axes(self, tensor: torch.Tensor, *, heads_first: bool) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """Return a function that views a tensor as [sequences, tokens, ...]; None if it does not have these axes."""
        batch, width, shape = len(self._rows), self._width, tensor.shape
        if heads_first and len(shape) == 4 and shape[0] == batch and shape[2] == width:
            return _heads_first
        if len(shape) >= 3 and shape[0] == batch and shape[1] == width:
            return _same
        if len(shape) == 4 and shape[0] == batch and shape[2] == width:
            return _heads_first
        if len(shape) >= 2 and shape[0] == batch * width:
            return lambda flat: flat.view(batch, width, *shape[1:])
        return None


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _heads_first(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(1, 2)
