"""The loops in C: compiled from what is in this checkout, for each level of processors, with the same results."""

import ctypes
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kc_otel import machine_code
from kc_otel.judge.columns import series_slots
from kc_otel.judge.columns.series_slots import LIMITS, SLOT
from kc_otel.judge.columns.stream_rows import ROW, SIDE
from kc_otel.judge.otlp.wire_columns import METRIC, POINT
from kc_otel.machine_code import ADDRESS, function, hatch_build

FOLDER = Path(hatch_build.__file__).parent
COMPILER = hatch_build.compiler()
NEEDS_COMPILER = pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")
RESULTS = """
import json, numpy as np
from kc_otel import machine_code
from kc_otel.judge.evaluator import Evaluator
from kc_otel.record.measure.logits import logit_drift
from tests.judge.conftest import NOW, Sender, make_contract, merge
from tests.judge.test_stream_columns import remembered

evaluator, senders = Evaluator([make_contract()]), [Sender(slice=slice) for slice in ("all", "code")]
rng = np.random.default_rng(3)
for step in range(6):
    values = rng.lognormal(-2.0, 1.0, 300) * rng.choice([1.0, -1.0, 0.0], 300)
    body = merge(*[sender.request(NOW + 10.0 * step, values) for sender in senders]).SerializeToString()
    columns = evaluator.columns_of(body, 1000)
    assert (columns is not None) == machine_code.is_available()
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest as Request
    evaluator.ingest_metrics(Request.FromString(body) if columns is None else columns, NOW + 10.0 * step)
evaluator.settle()
taken = evaluator.taken_as_columns
train = rng.normal(0.0, 3.0, (8, 5000)).astype(np.float32)
train[0, 7] = -np.inf
drift = logit_drift(train, train + rng.normal(0.0, 0.05, train.shape).astype(np.float32), targets=[1] * 8)
print(json.dumps([taken, repr(remembered(evaluator)), drift.values.tolist()]))
"""


def levels() -> list[int]:
    """Levels whose library is there and can be used here."""
    if not machine_code.is_available():
        return []
    best = ctypes.CDLL(str(FOLDER / "level1.so")).kc_level()
    return [level for level in hatch_build.LEVELS if level <= best and (FOLDER / f"level{level}.so").exists()]


def results(level: int) -> tuple[int, str, Any]:
    """Points taken as columns, what an evaluator remembers of some messages, and the drift of some logits."""
    said = {**os.environ, "KC_OTEL_MACHINE_CODE": str(level)}
    return tuple(json.loads(subprocess.run([sys.executable, "-c", RESULTS], check=True, capture_output=True, text=True,
                                           env=said, cwd=FOLDER.parents[1]).stdout))  # fmt: skip


@NEEDS_COMPILER
def test_the_libraries_are_made_of_what_is_here() -> None:
    """Where there is a compiler there is machine code, of these very files: `make test` installs the package anew."""
    assert (FOLDER / "level1.so").exists()
    for level in hatch_build.LEVELS:
        library = FOLDER / f"level{level}.so"
        assert not library.exists() or hatch_build.made_of(library) == hatch_build.digest(), (
            f"{library}: run `make test`"
        )


@NEEDS_COMPILER
@pytest.mark.slow
@pytest.mark.parametrize("level", hatch_build.LEVELS)
def test_each_level_says_what_python_says(level: int) -> None:
    """Streams are remembered to the last bit as point by point, and logits compared alike, on every processor."""
    if level not in levels():
        pytest.skip(f"this processor or compiler has no level {level}")
    taken, remembered, drift = results(level)
    none, expected, plain = results(0)
    assert (none, taken > 0) == (0, True)
    assert remembered == expected
    np.testing.assert_allclose(drift, plain, rtol=2e-4, atol=3e-6)


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


@pytest.mark.parametrize(("said", "there"), [("0", False), ("off", False), ("1", True)])
def test_the_environment_may_ask_for_less(said: str, there: bool, monkeypatch, caplog) -> None:
    """None at all, or that for any processor; what is no level is said, and none is used."""
    monkeypatch.setenv("KC_OTEL_MACHINE_CODE", said)
    machine_code._library.cache_clear()
    try:
        assert machine_code.is_available() == (there and (FOLDER / "level1.so").exists())
        if not there:
            with pytest.raises(RuntimeError, match="kc_scan: kc-otel was installed without a C compiler"):
                function("kc_scan")()
    finally:
        monkeypatch.undo()
        machine_code._library.cache_clear()
    assert [record.message for record in caplog.records] == [
        "KC_OTEL_MACHINE_CODE: 'off' is none of 0, 1, 3, 4; there is no machine code now"
    ] * (said == "off")


@pytest.mark.parametrize(("cc", "why"), [(None, "no C compiler"), (["false"], "returned non-zero exit status 1")])
def test_without_a_compiler_that_works_there_is_none(cc: list[str] | None, why: str, tmp_path: Path) -> None:
    """It is said why, and nothing of an earlier version stays."""
    (tmp_path / "level1.so").write_bytes(b"of before")
    assert why in hatch_build.build_all(tmp_path, cc)
    assert not list(tmp_path.iterdir())


@NEEDS_COMPILER
@pytest.mark.slow
def test_a_compiler_that_knows_no_higher_level_does_without(tmp_path: Path) -> None:
    """The library for any processor is enough; an older one that is in its place is made anew."""
    old = tmp_path / "cc"
    old.write_text(f'#!/bin/sh\ncase "$*" in *-march=*) exit 1;; esac\nexec {shutil.which(COMPILER[0])} "$@"\n')
    old.chmod(0o755)
    shutil.copy(FOLDER / "levels.c", tmp_path / "level1.so")
    assert hatch_build.build_all(tmp_path, [str(old)]) == ""
    assert [path.name for path in tmp_path.glob("*.so")] == ["level1.so"]
    before = (tmp_path / "level1.so").stat().st_mtime_ns
    assert hatch_build.build_all(tmp_path, None) == ""  # it is of the same
    assert (tmp_path / "level1.so").stat().st_mtime_ns == before


def test_what_cannot_be_written_is_said(tmp_path: Path, monkeypatch) -> None:
    """An installation goes on where the folder is read-only, with an older library in it."""
    (tmp_path / "level1.so").write_bytes(b"of before")

    def refuse(path: Path, **_: Any) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "unlink", refuse)
    assert "level1.so': an older one stays" in hatch_build.build_all(tmp_path, None)


@pytest.mark.parametrize("said", [" ", "no-such-compiler", "true -x"])
def test_the_environment_names_the_compiler(said: str, monkeypatch) -> None:
    """With its options; what is none is passed over for the usual ones."""
    monkeypatch.setenv("CC", said)
    assert hatch_build.compiler() == (["true", "-x"] if said == "true -x" else COMPILER)


def test_a_library_of_another_system_is_no_library(tmp_path: Path, monkeypatch, caplog) -> None:
    """What cannot be loaded is said once, and everything is done in Python."""
    (tmp_path / "level1.so").write_bytes(b"\x7fELF of somebody")
    monkeypatch.delenv("KC_OTEL_MACHINE_CODE", raising=False)
    monkeypatch.setattr(machine_code, "_FOLDER", tmp_path)
    machine_code._library.cache_clear()
    try:
        assert not machine_code.is_available()
        assert not machine_code.is_available()
    finally:
        machine_code._library.cache_clear()
    assert len(caplog.records) == 1
