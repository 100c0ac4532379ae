"""File systems of a test's own: one that is small, and one that nobody may write. Needs the right to mount."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

__all__ = ["fill", "read_only", "small_disk"]


@contextmanager
def small_disk(folder: Path, size: str = "2m") -> Iterator[Path]:
    """A file system of so many bytes at a new folder; skips the test, with the reason, where none may be mounted."""
    folder.mkdir()
    _mount("-t", "tmpfs", "-o", f"size={size}", "none", str(folder))
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def read_only(folder: Path) -> None:
    """From now on nobody writes there, whoever they are."""
    _mount("-o", "remount,ro", str(folder))


def fill(folder: Path) -> Path:
    """Leave no byte of the file system free; returns the file that takes them."""
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file:
        for piece in (65536, 4096, 1):
            try:
                while file.write(b"x" * piece):
                    pass
            except OSError:
                continue
    return ballast


def _mount(*arguments: str) -> None:
    try:
        subprocess.run(["mount", *arguments], check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"not run: no file system can be mounted ({getattr(error, 'stderr', None) or error})")
