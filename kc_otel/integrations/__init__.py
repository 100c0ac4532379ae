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
import inspect
from collections.abc import Callable
from typing import Any

Around = Callable[..., Any]
"""A function in the place of another, which it gets before the arguments of each call."""


def wrap(owner: Any, name: Any, around: Around) -> Callable[[], None]:
    """Put a function around another, an attribute of an object or an item of a list, and return what restores it.

    Where yet another wrapper surrounds ours, ours passes calls through from then on.
    """
    items, active = isinstance(owner, list), True
    original = owner[name] if items else getattr(owner, name)
    inherited = not items and name not in vars(owner)

    def call(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs) if active else original(*args, **kwargs)

    async def awaited(*args: Any, **kwargs: Any) -> Any:
        return await (around(original, *args, **kwargs) if active else original(*args, **kwargs))

    wrapper = functools.wraps(original)(awaited if inspect.iscoroutinefunction(around) else call)

    def restore() -> None:
        nonlocal active
        active = False
        if items:
            if owner[name] is wrapper:
                owner[name] = original
        elif vars(owner).get(name) is wrapper:
            delattr(owner, name) if inherited else setattr(owner, name, original)

    owner.__setitem__(name, wrapper) if items else setattr(owner, name, wrapper)
    return restore


def listen(
    owner: Any,
    name: Any,
    failed: Callable[[Exception], object],
    *,
    before: Callable[..., object] | None = None,
    after: Callable[..., object] | None = None,
) -> Callable[[], None]:
    """Look at each call of a function, and return what restores it.

    `before` gets the arguments, `after` what was returned and the arguments, and `failed` what either of them raises:
    the call goes on as it would without.
    """

    def tell(listener: Callable[..., object] | None, /, *args: Any, **kwargs: Any) -> None:
        try:
            if listener is not None:
                listener(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - a program must not fail because somebody watches
            failed(error)

    def call(original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        tell(before, *args, **kwargs)
        returned = original(*args, **kwargs)
        tell(after, returned, *args, **kwargs)
        return returned

    async def awaited(original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        tell(before, *args, **kwargs)
        returned = await original(*args, **kwargs)
        tell(after, returned, *args, **kwargs)
        return returned

    original = owner[name] if isinstance(owner, list) else getattr(owner, name)
    return wrap(owner, name, awaited if is_async(original) else call)


def is_async(function: Callable[..., Any]) -> bool:
    """Return True for a function, or a callable object, whose calls are awaited."""
    call = getattr(type(function), "__call__", None)  # noqa: B004 - a callable object's method may be the coroutine
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)
