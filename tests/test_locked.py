"""What the image and CI install: every version by its hash, and none that pyproject.toml does not allow."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parent.parent
FILES = {"serve": [], "build": ["build", "docs"], "tests": ["build", "docs", "dev"]}
LINE = re.compile(r"([a-z0-9-]+)(?:\[[a-z,-]+\])?==(\S+)( ; .+?)?((?: --hash=sha256:[0-9a-f]{64})+)")


def locked(name: str) -> dict[str, set[Version]]:
    """The versions of each package; different platforms may have different ones."""
    found: dict[str, set[Version]] = {}
    text = (ROOT / ".ci" / "locked" / f"{name}.txt").read_text().replace(" \\\n    ", " ")
    for line in text.splitlines():
        parts = LINE.fullmatch(line)
        assert parts is not None, line
        found.setdefault(parts[1], set()).add(Version(parts[2]))
    return found


@pytest.mark.parametrize("name", FILES)
def test_every_dependency_is_locked_to_a_version_that_is_allowed(name):
    versions = locked(name)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    wanted = [*project["project"]["dependencies"], *extras["serve"], *extras["cli"], *extras["stats"]]
    wanted += [dependency for group in FILES[name] for dependency in project["dependency-groups"][group]]
    for text in wanted:
        requirement = Requirement(text)
        if requirement.name == "kc-otel":
            continue
        found = versions.get(canonicalize_name(requirement.name))
        assert found, f"{requirement} is not in .ci/locked/{name}.txt: make lock"
        assert all(requirement.specifier.contains(version, prereleases=True) for version in found), requirement


def test_the_image_installs_nothing_that_is_not_locked():
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    for command in re.findall(r"pip (?:install|wheel) ([^&\n]*)", text):
        assert "--require-hashes" in command or "--no-deps" in command, command
        assert "--require-hashes" in command or "--no-index" in command or "--no-build-isolation" in command, command
