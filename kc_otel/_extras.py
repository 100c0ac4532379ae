"""Optional dependencies: where one is missing, the error says which extra installs it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["MissingExtraError", "extra"]


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
