"""Loops that are too slow in Python, in C: each file beside the module that calls it, all in one library.

`hatch_build.py` compiles them when the package is installed, or its wheel is made. The library knows nothing of Python;
arrays are handed over by their addresses, and it is the caller who sees to their types, sizes and order. Where there
was no compiler, or the environment variable `KC_OTEL_MACHINE_CODE` is 0, `is_available` is false, and callers have
another way, with the same results.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Final

NUMBER: Final = ctypes.c_int64
DOUBLE: Final = ctypes.c_double
ADDRESS: Final = ctypes.c_void_p
"""Of an array's first item; of bytes it is taken from the object itself."""

ABSENT: Final = "kc-otel was installed without a C compiler, or KC_OTEL_MACHINE_CODE is 0: there is no machine code"

_log: Final = logging.getLogger(__name__)
_LIBRARY: Final = Path(__file__).with_name("loops.so")


@cache
def _library() -> ctypes.PyDLL | None:
    """The library, whose calls are too short for other threads of Python to run meanwhile; None where there is none."""
    if os.environ.get("KC_OTEL_MACHINE_CODE") == "0" or not _LIBRARY.exists():
        return None
    try:
        return ctypes.PyDLL(str(_LIBRARY))
    except OSError:  # compiled for another system
        _log.warning("%s cannot be loaded; there is no machine code", _LIBRARY, exc_info=True)
        return None


def is_available() -> bool:
    """Return True if there is machine code."""
    return _library() is not None


def function(name: str, *arguments: Any, result: Any = None) -> Callable[..., Any]:
    """A function of the library by its name in C, with ADDRESS, NUMBER or DOUBLE for arguments and result.

    Where there is no library, calling it raises a RuntimeError.
    """
    library = _library()
    if library is None:

        def absent(*_: Any) -> Any:
            raise RuntimeError(f"{name}: {ABSENT}")

        return absent
    found = library[name]
    found.argtypes, found.restype = arguments, result
    return found
