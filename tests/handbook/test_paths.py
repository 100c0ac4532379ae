"""From install to a correct verdict with a page alone, by copy and paste, in under ten minutes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.handbook.newcomer import newcomer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_own_loop(tmp_path: Path) -> None:
    with newcomer(tmp_path) as reader:
        said = reader.follows("measure/own-loop.md", "test_own_loop")
    assert said.count("FAIL") >= 2  # prose, and all traffic with it


def test_compare(tmp_path: Path) -> None:
    with newcomer(tmp_path) as reader:
        reader.follows("reference/recorder.md", "test_compare")
