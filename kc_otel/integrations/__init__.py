"""Engines and trainers, each in a file or folder of its own that imports its library inside.

    trl             instrument(trainer, contract): TRL's GRPO trainer
    transformers    callbacks of Hugging Face's Trainer
    vllm            KernelContractInstrumentor: what a server samples
    torch           observe and shadow: modules of any training loop
    operators       compare_callables: single operators

A new one calls `kc_otel.Recorder` and nothing deeper; it never raises into what it instruments.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def wrap(owner: Any, name: Any, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[[], None]:
    """Put a wrapper in the place of an attribute of an object, or of an item of a list, and return what restores it."""
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
    return restore
