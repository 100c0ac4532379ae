"""Compiles the loops that are written in C, when the package is installed or a wheel of it is made.

Hatchling runs this. Nothing of Python or of another library is linked, so that one wheel is for every Python. Without a
C compiler the package is the same, and slower: see `kc_otel.machine_code`. `CC` names another compiler; with
`KC_OTEL_PURE=1` a wheel has no machine code and is for every system.
"""

import hashlib
import os
import shlex
import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parents[1]
FLAGS = ("-std=c11", "-O3", "-fPIC", "-fwrapv", "-fno-math-errno", "-fno-trapping-math")
"""Numbers that senders make up may overflow, and then wrap, as NumPy's do."""
EXACT = ("-ffp-contract=off", "-fno-builtin-pow")
"""Rounds as Python does."""


def digest() -> str:
    """Return the digest of the compiled sources, headers and this file included, which a library carries."""
    sources = (*sorted(PACKAGE.rglob("*.[ch]")), Path(__file__).resolve())
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in sources)).hexdigest()[:16]


def is_of_these_sources(library: Path) -> bool:
    """Return True if a library is there and was made of what is here."""
    return library.exists() and digest().encode() in library.read_bytes()


def compiler() -> list[str] | None:
    """The C compiler, as the environment or Python's own build names it; None where there is none."""
    for command in (os.environ.get("CC"), sysconfig.get_config_var("CC"), "cc", "gcc", "clang"):
        if command and command.strip() and shutil.which(shlex.split(command)[0]):
            return shlex.split(command)
    return None


def build(library: Path, cc: Sequence[str], *more: str) -> None:
    """Make the library; a CalledProcessError if the compiler cannot."""
    new = library.with_suffix(f".{os.getpid()}.so")  # whoever has the old one loaded keeps it
    sources = map(str, sorted(PACKAGE.rglob("*.c")))
    command = [*cc, *FLAGS, *EXACT, *more, f'-DKC_SOURCES="{digest()}"', "-shared", *sources, "-lm", "-o", str(new)]
    subprocess.run(command, check=True, capture_output=True, text=True)  # noqa: S603 - the user's compiler
    new.replace(library)


def update(library: Path, cc: Sequence[str] | None) -> str:
    """Make the library unless it is there and of these sources; returns why there is none, or nothing.

    One of an older version goes.
    """
    try:
        if is_of_these_sources(library):
            return ""
        library.unlink(missing_ok=True)
        if cc is None:
            return "no C compiler"
        build(library, cc)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"{error}\n{getattr(error, 'stderr', '')}"
    return ""


try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ModuleNotFoundError:  # imported by a test
    pass
else:

    class MachineCode(BuildHookInterface):  # type: ignore[misc] # it has no types
        """Adds the library to a wheel, or to the checkout of an editable installation."""

        def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002 - the interface
            """Compile, if there is a compiler, before the files of a wheel are collected."""
            if os.environ.get("KC_OTEL_PURE") == "1":
                return
            if missing := update(Path(self.root, "kc_otel", "machine_code", "loops.so"), compiler()):
                self.app.display_warning(f"kc-otel gets no machine code, and will be slower: {missing}")
                return
            system = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["artifacts"].append("/kc_otel/machine_code/loops.so")
            build_data.update(pure_python=False, tag=f"py3-none-{system}")
