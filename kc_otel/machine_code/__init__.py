"""Loops that are too slow in Python, in C: each file beside the module that calls it, all in one library.

`hatch_build.py` compiles them when the package is installed, or its wheel is made: once for any processor, and on
x86-64 once more for those with AVX2 and for those with AVX-512. The library knows nothing of Python; arrays are handed
over by their addresses, and it is the caller who sees to their types, sizes and order. Where there was no compiler,
`is_available` is false, and callers have another way, with the same results.

The environment variable `KC_OTEL_MACHINE_CODE` says which library is taken at most: 0 none, 1 the one for any
processor, 3 and 4 those for the levels of x86-64 that are called so.
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
_FOLDER: Final = Path(__file__).parent
_LEVELS: Final = ("0", "1", "3", "4")


@cache
def _library() -> Path | None:
    """The best library that this processor can use; None where there is none."""
    first, said = _FOLDER / "level1.so", os.environ.get("KC_OTEL_MACHINE_CODE", "4")
    if said not in _LEVELS:
        _log.warning("KC_OTEL_MACHINE_CODE: %r is none of %s; there is no machine code now", said, ", ".join(_LEVELS))
    if not first.exists() or said not in _LEVELS[1:]:
        return None
    try:
        level = min(ctypes.CDLL(str(first)).kc_level(), int(said))
    except OSError:  # compiled for another system
        _log.warning("%s cannot be loaded; there is no machine code", first, exc_info=True)
        return None
    return next(path for n in range(level, 0, -1) if (path := _FOLDER / f"level{n}.so").exists())


def is_available() -> bool:
    """Return True if there is machine code for this processor."""
    return _library() is not None


def function(name: str, *arguments: Any, result: Any = None, long: bool = False) -> Callable[..., Any]:
    """A function of the library by its name in C, with ADDRESS, NUMBER or DOUBLE for arguments and result.

    Other threads of Python run meanwhile if it is `long`; a call of some microseconds is better off without. Where
    there is no library, calling it raises a RuntimeError.
    """
    library = _library()
    if library is None:

        def absent(*_: Any) -> Any:
            raise RuntimeError(f"{name}: {ABSENT}")

        return absent
    found = (ctypes.CDLL if long else ctypes.PyDLL)(str(library))[name]
    found.argtypes, found.restype = arguments, result
    return found
