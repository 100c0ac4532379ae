"""Wrapping one attribute of one object, and putting it back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

__all__ = ["wrap"]


def wrap(undo: ExitStack, owner: Any, name: Any, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put a wrapper in the place of an attribute of an object, or of an item of a list, until `undo` is closed."""
    items = isinstance(owner, list)
    original = owner[name] if items else getattr(owner, name)
    wrapper = functools.wraps(original)(around(original))
    inherited = not items and name not in vars(owner)

    def restore() -> None:
        if items:
            if owner[name] is wrapper:
                owner[name] = original
        elif vars(owner).get(name) is wrapper:
            delattr(owner, name) if inherited else setattr(owner, name, original)

    owner.__setitem__(name, wrapper) if items else setattr(owner, name, wrapper)
    undo.callback(restore)
