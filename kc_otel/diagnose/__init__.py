"""After a FAIL: which operator it is, and what part of the drift is its.

`boundaries`, `above_noise`, `shares` and `located` are pure; what runs a model is in the files whose names begin with
`torch_`, what runs an engine in those with `vllm_`, and what reads files in those that say so.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from kc_otel.diagnose.located import Divergence, Located, NotComparableError
    from kc_otel.diagnose.token_sequences import TokenSequence, read_sequences
    from kc_otel.diagnose.torch_kernel import TorchKernel
    from kc_otel.diagnose.torch_locate import locate
    from kc_otel.diagnose.vllm_kernel import VllmKernel

__all__ = [
    "Divergence",
    "Located",
    "NotComparableError",
    "TokenSequence",
    "TorchKernel",
    "VllmKernel",
    "locate",
    "read_sequences",
]

_HOMES: Final = {
    "located": ("Divergence", "Located", "NotComparableError"),
    "token_sequences": ("TokenSequence", "read_sequences"),
    "torch_kernel": ("TorchKernel",),
    "torch_locate": ("locate",),
    "vllm_kernel": ("VllmKernel",),
}
_HOME_OF: Final = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Names are imported when they are first used: what reads files needs no torch."""
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    return value
