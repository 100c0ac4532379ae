"""Updates that an engine cannot represent: optimizer steps smaller than half the distance of two of its numbers.

bf16 has eight bits for a number's digits: a weight of 1 moves by 1/256 or by nothing. A trainer that keeps its weights
in float32 adds up what is smaller, and the engine goes on with the old policy until enough has come together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from kc_otel._extras import extra

with extra("torch", "looking at updates of weights"):
    import torch


_MAX_LISTED_TENSORS: Final = 10


@dataclass(frozen=True, slots=True)
class RoundedUpdates:
    """Fate of the updates between two looks."""

    changed: Mapping[str, int]  # elements that were looked at and had changed, by tensor
    lost: Mapping[str, int]  # of these, those that are the same number as before in the engine's format

    @property
    def share(self) -> float:
        """Lost of changed, over all tensors: `updates_rounded_away` of a contract; nan where nothing changed."""
        changed = sum(self.changed.values())
        return sum(self.lost.values()) / changed if changed else math.nan

    def __str__(self) -> str:
        worst = sorted((name for name in self.lost if self.changed[name]), key=lambda name: -self._of(name))
        lines = [f"{self.share:.1%} of the changed weights are the same number as before in the engine's format"]
        lines += [f"  {name}: {self.lost[name]} of {self.changed[name]}" for name in worst[:_MAX_LISTED_TENSORS]]
        return "\n".join(lines)

    def _of(self, name: str) -> float:
        return self.lost[name] / self.changed[name]


class UpdateWatch:
    """Looks at the same elements of each tensor before and after an update; at most `elements` of each, evenly over it.

    >>> weights = torch.tensor([1.0, 1.0, 100.0, 1.0])
    >>> watch = UpdateWatch()
    >>> watch.look({"layer": weights}.items())
    >>> found = watch.look({"layer": weights + torch.tensor([0.01, 0.001, 0.01, 0.0])}.items())
    >>> found.lost, found.changed, f"{found.share:.2f}"
    ({'layer': 2}, {'layer': 3}, '0.67')
    """

    def __init__(self, dtype: torch.dtype = torch.bfloat16, elements: int = 4096) -> None:
        if elements < 1 or not dtype.is_floating_point:
            raise ValueError(f"elements: {elements}, dtype: {dtype}; give a number above 0 and a floating format")
        self._dtype = dtype
        self._elements = elements
        self._known: dict[str, torch.Tensor] = {}

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def look(self, trainer: Iterable[tuple[str, torch.Tensor]]) -> RoundedUpdates | None:
        """Return the fate of the updates since the last look; None on the first look.

        Tensors come in the format that the optimizer updates: float32 master weights where there are such. Of split
        tensors, the own part.
        """
        changed: dict[str, int] = {}
        lost: dict[str, int] = {}
        now: dict[str, torch.Tensor] = {}
        for name, tensor in trainer:
            flat = getattr(tensor, "_local_tensor", tensor).detach().reshape(-1)
            step = -(-flat.numel() // self._elements) or 1
            now[name] = flat[::step].clone()
            before = self._known.get(name)
            if before is not None and before.shape == now[name].shape:
                moved = before != now[name]
                same = before.to(self._dtype) == now[name].to(self._dtype)
                changed[name], lost[name] = (int(count) for count in torch.stack([moved.sum(), (moved & same).sum()]))
        first, self._known = not self._known, now
        return None if first else RoundedUpdates(changed, lost)
