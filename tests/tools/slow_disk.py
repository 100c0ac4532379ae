"""A disk that takes its time, and what it would have after a loss of power: `slow_disk.c` put before libc."""

import subprocess
from pathlib import Path

import pytest

from kc_otel.machine_code.hatch_build import compiler

__all__ = ["slow_disk"]


def slow_disk(folder: Path, **environ: str) -> dict[str, str]:
    """The environment of a process on such a disk, which `slow_disk.c` explains; it is compiled into the folder."""
    cc = compiler()
    if cc is None:
        pytest.skip("needs a C compiler")
    made = folder / "slow_disk.so"
    source = Path(__file__).with_suffix(".c")
    subprocess.run([*cc, "-shared", "-fPIC", "-O1", str(source), "-o", str(made), "-ldl", "-lpthread"], check=True)
    return {"LD_PRELOAD": str(made), **environ}
