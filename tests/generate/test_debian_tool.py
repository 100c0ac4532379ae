"""The helper that fetches servers for tests from Debian's archive."""

from pathlib import Path

import pytest


def test_the_archive_is_the_machines_own(debian, tmp_path: Path) -> None:
    """The first archive that is enabled, has component main and is not for security updates; its key goes along."""
    folder = tmp_path / "sources.list.d"
    folder.mkdir()
    (folder / "debian.sources").write_text(
        "Types: deb\nURIs: http://mirror.example/security\nSuites: stable-security\nComponents: main\n\n"
        "Enabled: no\nTypes: deb\nURIs: http://off.example\nSuites: stable\nComponents: main\n\n"
        "# A comment.\nTypes: deb\nURIs: http://mirror.example/debian\nSuites: stable stable-updates\n"
        "Components: main contrib\nSigned-By: /keys/archive.gpg\n"
    )
    source = debian.machine_source(tmp_path)
    assert source == debian.Source("http://mirror.example/debian", "stable", "/keys/archive.gpg")
    assert "Suites: sid\n" in source.stanza("sid")
    assert "Suites: stable\n" in source.stanza("")


def test_the_older_form_of_sources_is_read_too(debian, tmp_path: Path) -> None:
    """One line per source, with and without options."""
    (tmp_path / "sources.list").write_text(
        "# deb http://off.example stable main\n"
        "deb http://mirror.example/security stable-security main\n"
        "deb [arch=amd64 signed-by=/keys/a.gpg] http://mirror.example/debian stable main contrib\n"
    )
    assert debian.machine_source(tmp_path) == debian.Source("http://mirror.example/debian", "stable", "/keys/a.gpg")


def test_what_cannot_be_had_is_said(debian, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without apt, or without a source, the reason is in the message that a skipped test shows."""
    with pytest.raises(debian.UnavailableError, match="no archive with component main"):
        debian.machine_source(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(debian.UnavailableError, match="promtool cannot be had: sid: apt-get and dpkg are needed"):
        debian.find("promtool", cache=tmp_path)
