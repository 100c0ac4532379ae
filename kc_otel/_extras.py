"""Optional dependencies: where one is missing, the error says which extra installs it.

A folder that an extra is for says so once, with `require` in its `__init__`; elsewhere an import is in `with extra`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

__all__ = ["MissingExtraError", "extra", "require"]


class MissingExtraError(ModuleNotFoundError):
    """Something of an extra is used that is not installed; the message ends in the command that installs it."""


@contextmanager
def extra(name: str, purpose: str) -> Iterator[None]:
    """Imports of what an extra installs.

    >>> with extra("plots", "drawing"):
    ...     import a_plotting_library
    Traceback (most recent call last):
    kc_otel._extras.MissingExtraError: drawing needs a_plotting_library: pip install 'kc-otel[plots]'

    Args:
        name: The extra, as pyproject.toml has it.
        purpose: Who needs it, the subject of the error's sentence, in the singular.

    Raises:
        MissingExtraError: If an import inside finds no such module. A missing module of kc-otel itself is a defect, and
            stays the ModuleNotFoundError that it is.
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
    """What a whole folder needs of an extra: looked for, and not imported.

    Args:
        name: As for `extra`.
        purpose: As for `extra`.
        libraries: Top-level names of what the extra installs.

    Raises:
        MissingExtraError: If one of them is not installed.
    """
    for library in libraries:
        with extra(name, purpose):
            if library not in sys.modules and find_spec(library) is None:
                raise ModuleNotFoundError(f"No module named {library!r}", name=library)
