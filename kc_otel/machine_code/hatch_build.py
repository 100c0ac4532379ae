"""Compiles the loops that are written in C, when the package is installed or a wheel of it is made.

Hatchling runs this. Nothing of Python or of another library is linked, so that one wheel is for every Python. Without a
C compiler the package is the same, and slower: see `kc_otel.machine_code`. `CC` names another compiler; with
`KC_OTEL_PURE=1` a wheel has no machine code and is for every system.
"""

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

PACKAGE = Path(__file__).resolve().parents[1]
FLAGS = ("-std=c11", "-O3", "-fPIC", "-fwrapv", "-fno-math-errno", "-fno-trapping-math", "-fopenmp-simd")
"""Numbers that senders make up may overflow, and then wrap, as NumPy's do."""
EXACT = ("-ffp-contract=off", "-fno-builtin-pow")
"""Rounds as Python does."""
OF_FILE = {"logit_rows.c": ("-ffp-contract=fast",)}
"""Instead of that."""
LEVELS = {1: (), 3: ("-march=x86-64-v3",), 4: ("-march=x86-64-v4",)}
"""Of x86-64; of other processors there is the first only."""
WIDTH = {"logit_rows.c": 512}
"""Bits of a vector at level 4; loops of a hundred turns are quicker with 256."""


def sources() -> list[Path]:
    """The files in C, headers included."""
    return sorted(path for kind in ("*.c", "*.h") for path in PACKAGE.rglob(kind))


def digest() -> str:
    """Return the digest of the compiled sources, which a library carries."""
    content = hashlib.sha256(b"\0".join(path.read_bytes() for path in (*sources(), Path(__file__).resolve())))
    return content.hexdigest()[:16]


def made_of(library: Path) -> str:
    """The digest that a library was made with; empty where there is none that can be loaded."""
    try:
        sources = ctypes.CDLL(str(library)).kc_sources
    except (OSError, AttributeError):
        return ""
    sources.restype = ctypes.c_char_p
    return str(sources().decode())


def compiler() -> list[str] | None:
    """The C compiler, as the environment or Python's own build names it; None where there is none."""
    for command in (os.environ.get("CC"), sysconfig.get_config_var("CC"), "cc", "gcc", "clang"):
        if command and command.strip() and shutil.which(shlex.split(command)[0]):
            return shlex.split(command)
    return None


def build(into: Path, cc: Sequence[str], level: int, more: Sequence[str] = ()) -> None:
    """Make levelN.so in a folder; a CalledProcessError if the compiler cannot."""
    files = [path for path in sources() if path.suffix == ".c"]
    with TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as together:

        def run(*arguments: str | Path) -> None:
            subprocess.run([*cc, *arguments], check=True, capture_output=True, text=True)  # noqa: S603 - the user's compiler

        def compile(path: Path) -> Path:
            flags = [*FLAGS, *OF_FILE.get(path.name, EXACT), *LEVELS[level], *more]
            flags += [f"-mprefer-vector-width={WIDTH.get(path.name, 256)}"] * (level == max(LEVELS))
            made = Path(folder, f"{path.stem}.o")
            run(*flags, f'-DKC_SOURCES="{digest()}"', "-c", path, "-o", made)
            return made

        new = into / f".level{level}.{os.getpid()}.so"  # whoever has the old one loaded keeps it
        run("-shared", *more, *together.map(compile, files), "-lm", "-o", new)
        new.replace(into / f"level{level}.so")


def build_all(into: Path, cc: Sequence[str] | None) -> str:
    """Make the libraries of all levels that a processor like this one may have; returns why there is none, or nothing.

    What is there and was made of the same is left, and what is there of an older version goes.
    """
    try:
        if made_of(into / "level1.so") == digest():
            return ""
        if cc is None:
            raise FileNotFoundError("no C compiler")
        made, why = _built(into, cc), ""
    except (OSError, subprocess.CalledProcessError) as error:
        made, why = set(), f"{error}\n{getattr(error, 'stderr', '')}"
    for path in into.glob("level*.so"):
        try:
            if path.name not in made:
                path.unlink(missing_ok=True)
        except OSError as error:
            why += f"\n{error}: an older one stays"
    return why


def _built(into: Path, cc: Sequence[str]) -> set[str]:
    """Names of the libraries that were made: compilers that do not know one of the higher levels do without.

    The first level is made last: where it is there the others were tried.
    """
    made = set()
    for level in sorted(LEVELS, reverse=True) if platform.machine().lower() in {"x86_64", "amd64"} else (1,):
        try:
            build(into, cc, level)
        except subprocess.CalledProcessError:
            if level == 1:
                raise
        else:
            made.add(f"level{level}.so")
    return made


try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ModuleNotFoundError:  # imported by a test
    pass
else:

    class MachineCode(BuildHookInterface):  # type: ignore[misc] # it has no types
        """Adds the libraries to a wheel, or to the checkout of an editable installation."""

        def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002 - the interface
            """Compile, if there is a compiler, before the files of a wheel are collected."""
            if os.environ.get("KC_OTEL_PURE") == "1":
                return
            if missing := build_all(Path(self.root, "kc_otel", "machine_code"), compiler()):
                self.app.display_warning(f"kc-otel gets no machine code, and will be slower: {missing}")
                return
            system = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["artifacts"].append("/kc_otel/machine_code/level*.so")
            build_data.update(pure_python=False, tag=f"py3-none-{system}")
