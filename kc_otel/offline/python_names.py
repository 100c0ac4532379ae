"""`FILE.py:NAME`: something that a Python program of the user's has under a name."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any


def python_name(target: str, what: str) -> Any:
    """Return the object `FILE.py:NAME`, for the message described as `what`; the file is run as a module of its own."""
    path, colon, name = target.rpartition(":")
    if not colon or not path or not name:
        raise ValueError(f"{target}: write FILE.py:NAME, such as kernels.py:train")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    if spec is None or spec.loader is None or not Path(path).is_file():
        raise ValueError(f"{path}: is no Python file; write FILE.py:NAME")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look modules up by name
    sys.path.insert(0, str(Path(path).resolve().parent))  # its imports are those of a program beside it
    spec.loader.exec_module(module)
    if not hasattr(module, name):
        raise ValueError(f"{path}: has no {name!r}; write the name of {what}")
    return getattr(module, name)
