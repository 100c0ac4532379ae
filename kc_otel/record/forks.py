"""Objects that begin anew in a forked child, where the parent's threads are gone and may have held locks."""

from __future__ import annotations

import os
from typing import Any, Final
from weakref import WeakSet

__all__ = ["PerProcess"]

_alive: Final[WeakSet[PerProcess]] = WeakSet()
_inherited: Final[list[dict[str, Any]]] = []


class PerProcess:
    """Base of what has a state of its own in every process: `_begin` makes it, here and in each forked child.

    What the parent had is kept in a child and left alone: a tensor on a device, an open database or a gRPC channel must
    not be let go of by a process that did not make it.
    """

    def __init__(self) -> None:
        self._begin()
        _alive.add(self)

    def _begin(self) -> None:
        """Make the state of this process; runs again in a child before anything else does."""
        raise NotImplementedError


def _in_child() -> None:
    for each in list(_alive):
        _inherited.append(dict(vars(each)))
        each._begin()  # noqa: SLF001 - an object of this module


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
