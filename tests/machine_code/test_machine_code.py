"""The loops in C: compiled from what is in this checkout, with the same results as Python has without them."""

from pathlib import Path

import numpy as np
import pytest

from kc_otel import machine_code
from kc_otel.judge.columns import series_slots
from kc_otel.judge.columns.series_slots import LIMITS, SLOT
from kc_otel.judge.columns.stream_rows import ROW, SIDE
from kc_otel.judge.otlp.wire_columns import METRIC, POINT
from kc_otel.machine_code import ADDRESS, function, hatch_build

COMPILER = hatch_build.compiler()


@pytest.fixture
def library(tmp_path: Path, monkeypatch):
    """Where this process looks for a library; it has looked nowhere yet."""
    monkeypatch.delenv("KC_OTEL_MACHINE_CODE", raising=False)
    monkeypatch.setattr(machine_code, "_LIBRARY", tmp_path / "loops.so")
    machine_code._library.cache_clear()
    yield machine_code._LIBRARY
    machine_code._library.cache_clear()


@pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")
def test_the_library_is_of_these_sources() -> None:
    """Where there is a compiler there is machine code, of these very files: `make test` installs the package anew."""
    assert hatch_build.is_of_these_sources(machine_code._LIBRARY), "run `make test`"


def test_records_are_as_large_in_c() -> None:
    """Fields are all of eight bytes: one that is missing on either side is noticed by its size; limits are alike."""
    if not machine_code.is_available():
        pytest.skip("needs a C compiler")
    wire = [POINT.itemsize, METRIC.itemsize]
    folded = [ROW.itemsize, SLOT.itemsize, LIMITS.itemsize, SIDE, series_slots.SPAN]
    folded += [series_slots._LEAST_SCALE, series_slots._MOST_SCALE]
    for name, expected in (("kc_sizes_of_wire", wire), ("kc_sizes_of_fold", folded)):
        sizes = np.zeros(len(expected), np.int64)
        function(name, ADDRESS)(sizes.ctypes.data)
        assert sizes.tolist() == expected


def test_without_a_library_there_is_no_machine_code(library: Path) -> None:
    """As where one of an earlier version has another name: its functions are absent, and say so when called."""
    library.with_name("level1.so").write_bytes(b"of before")
    assert not machine_code.is_available()
    with pytest.raises(RuntimeError, match="kc_scan: kc-otel was installed without a C compiler"):
        function("kc_scan")()


@pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")
def test_the_library_is_made_where_it_is_not_of_these_sources(library: Path, monkeypatch) -> None:
    """One of earlier sources is made anew, one of these is left as it is; KC_OTEL_MACHINE_CODE=0 leaves it unused."""
    library.write_bytes(b"of before")
    assert hatch_build.update(library, COMPILER) == ""
    made = library.stat()
    assert hatch_build.update(library, None) == ""
    assert library.stat().st_ino == made.st_ino
    assert list(library.parent.iterdir()) == [library]
    for said, there in (("0", False), ("1", True)):
        monkeypatch.setenv("KC_OTEL_MACHINE_CODE", said)
        machine_code._library.cache_clear()
        assert machine_code.is_available() == there


@pytest.mark.parametrize(("cc", "why"), [(None, "no C compiler"), (["false"], "returned non-zero exit status 1")])
def test_without_a_compiler_that_works_there_is_none(cc: list[str] | None, why: str, library: Path) -> None:
    """It is said why, and nothing of an earlier version stays."""
    library.write_bytes(b"of before")
    assert why in hatch_build.update(library, cc)
    assert not list(library.parent.iterdir())


def test_what_cannot_be_written_is_said(library: Path, monkeypatch) -> None:
    """An installation goes on where the folder is read-only, with an older library in it."""
    library.write_bytes(b"of before")

    def refuse(path: Path, **_: bool) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "unlink", refuse)
    assert "Permission denied" in hatch_build.update(library, None)


@pytest.mark.parametrize("said", [" ", "no-such-compiler", "true -x"])
def test_the_environment_names_the_compiler(said: str, monkeypatch) -> None:
    """With its options; what is none is passed over for the usual ones."""
    monkeypatch.setenv("CC", said)
    assert hatch_build.compiler() == (["true", "-x"] if said == "true -x" else COMPILER)


def test_a_library_of_another_system_is_no_library(library: Path, caplog) -> None:
    """What cannot be loaded is said once, and everything is done in Python."""
    library.write_bytes(b"\x7fELF of somebody")
    assert not machine_code.is_available()
    assert not machine_code.is_available()
    assert len(caplog.records) == 1
