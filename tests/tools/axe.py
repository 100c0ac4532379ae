"""axe-core, which finds what keeps people with disabilities from reading a page: fetched by npm, run in a browser.

It is pinned by version and hash, and kept beside the programs that Debian gives. The product never loads it.
"""

import base64
import hashlib
import shutil
import subprocess
import tarfile
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest

from tests.tools.chromium import Chromium

VERSION: Final = "4.14.1"
SHA512: Final = "FHfa+lmNjQZfJz1q8wKqIDwC6DExcHt/pkjNQb09a3NPjCKg2rhu5qb2S4r76ASyFNNtuFooJpZe37OgudVGtQ=="
_KEPT: Final = Path(__file__).resolve().parents[2] / ".cache" / "npm" / f"axe-core-{VERSION}.tgz"
_RUN: Final = """axe.run(document, {resultTypes: ["violations"]}).then((found) => found.violations.map((one) => ({
  rule: one.id, impact: one.impact, help: one.help,
  nodes: one.nodes.map((node) => `${node.html} ${node.failureSummary}`),
})))"""


def violations(browser: Chromium) -> list[dict[str, Any]]:
    """What axe-core finds wrong with the page that a browser shows: rule, impact, what it is about, and where.

    The test is skipped where axe-core cannot be had.
    """
    if not browser.evaluate("typeof axe === 'object'"):
        browser.evaluate(_script())
    found: list[dict[str, Any]] = browser.evaluate(_RUN)
    return found


@cache
def _script() -> str:
    if not _KEPT.exists():
        _fetch()
    if base64.b64encode(hashlib.sha512(_KEPT.read_bytes()).digest()).decode() != SHA512:
        pytest.skip(f"not run: {_KEPT} is not axe-core {VERSION}; remove it")
    with tarfile.open(_KEPT) as archive:
        file = archive.extractfile("package/axe.min.js")
        assert file is not None
        return file.read().decode() + "; true"


def _fetch() -> None:
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("not run: there is no npm, which fetches axe-core")
    _KEPT.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=_KEPT.parent) as folder:
        command = [npm, "pack", f"axe-core@{VERSION}", "--pack-destination", folder]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        if done.returncode:
            pytest.skip(f"not run: npm pack axe-core@{VERSION}: {done.stderr[-500:]}")
        next(Path(folder).iterdir()).replace(_KEPT)
