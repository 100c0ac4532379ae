"""Operators of Hugging Face's models that are no modules: rotary embedding, and writing and reading the KV cache.

Attention's forward calls a function of its file to turn queries and keys, and the cache's `update` to write keys and
values and read them back. While a forward is watched, that function and the cache that a layer is given are stand-ins.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any, Final

from kc_otel._extras import extra
from kc_otel.diagnose.boundaries import Boundary, layer_of

with extra("torch", "locating in a torch module"):
    import torch

_ROTARY: Final = re.compile(r"apply_\w*(?:rotary|rope)\w*")
_CACHES: Final = ("past_key_values", "past_key_value", "layer_past")

Visit = Callable[[Boundary, Any], Any]
"""From a boundary and its output to the output to go on with, or None for the same."""


@contextmanager
def watched_functions(module: torch.nn.Module, named: Mapping[str, Boundary], visit: Visit) -> Iterator[None]:
    """Have the functions within a model's attention visited, in every layer whose modules do not have them apart.

    `visit` is called with every output, tensors [sequences, heads, tokens, features].
    """
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


def _visited(function: Callable[..., Any], within: list[int], visit: Visit) -> Callable[..., Any]:
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
    visit: Visit, layer: int, _: torch.nn.Module, args: tuple[Any, ...], options: dict[str, Any]
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
