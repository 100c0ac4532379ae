"""Imports that can be missing, and imports that wait.

Where an optional dependency is missing, the error says which extra installs it: a folder that an extra is for says so
once, with `require` in its `__init__`; elsewhere an import is in `with extra`. A `lazy` package imports its names when
they are first used.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any


class MissingExtraError(ModuleNotFoundError):
    """A feature's extra is not installed; the message ends in the command that installs it."""


@contextmanager
def extra(name: str, purpose: str) -> Iterator[None]:
    """Imports of what an extra (a name of pyproject.toml) installs; `purpose` is the subject of the error's sentence.

    A missing module of kc-otel itself is a defect, and stays the ModuleNotFoundError that it is.

    >>> with extra("parquet", "reading"):
    ...     import a_missing_library
    Traceback (most recent call last):
    kc_otel._extras.MissingExtraError: reading needs a_missing_library: pip install 'kc-otel[parquet]'
    """
    try:
        yield
    except MissingExtraError:
        raise
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "kc_otel":
            raise
        message = f"{purpose} needs {error.name}: pip install 'kc-otel[{name}]'"
        raise MissingExtraError(message, name=error.name) from error


def require(name: str, purpose: str, *libraries: str) -> None:
    """Check that a folder's optional libraries, by their top-level names, are installed, without importing them."""
    for library in libraries:
        with extra(name, purpose):
            if library not in sys.modules and find_spec(library) is None:
                raise ModuleNotFoundError(f"No module named {library!r}", name=library)


def lazy(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package, from the names that it exports and the modules that define them."""

    def attribute(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(f"{package}.{homes[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    return attribute
