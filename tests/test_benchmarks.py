"""Benchmarks are run by people, now and then: what they import and patch is still there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROGRAM = """
import runpy, sys
from pathlib import Path
sys.path.insert(0, "tests/benchmarks")
files = sorted(Path("tests/benchmarks").glob("bench_*.py"))
for path in files:
    runpy.run_path(str(path), run_name=path.stem)
print(len(files))
"""


@pytest.mark.slow
def test_benchmarks_find_what_they_are_about() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) > 8
