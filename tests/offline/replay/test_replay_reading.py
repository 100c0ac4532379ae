"""Recordings in every format that they come in, whole and damaged."""

from __future__ import annotations

import gzip
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kc_otel.contract.model import Contract
from kc_otel.judge.escalation.message_groups import GroupTiming
from kc_otel.judge.evaluator import Evaluator
from kc_otel.offline.replay.replay_run import replay
from kc_otel.offline.replay.traffic_entries import EVALUATED, entry_of, ours, sealed_frame
from kc_otel.offline.replay.traffic_reading import TrafficFileError, evaluations_recorded, read_recordings
from tests.tools.verdicts import verdicts_of

START = 1_800_000_000.0


def times(path: Path, damage: list[str] | None = None) -> list[float]:
    return [entry.at for entry in read_recordings([path], [] if damage is None else damage)]


def framed(*messages: bytes) -> bytes:
    return b"".join(struct.pack(">I", len(one)) + one for one in messages)


def zstd(content: bytes) -> bytes:
    pa = pytest.importorskip("pyarrow")
    return pa.Codec("zstd").compress(content).to_pybytes()


def written(form: str, requests: list[Any], lines: Callable) -> bytes:
    """The requests as one of the Collector's formats has them."""
    text = lines(requests).encode()
    match form:
        case "json":
            return text
        case "proto":
            return framed(*(one.SerializeToString() for one in requests))
        case "json, gzip":
            return gzip.compress(text)
        case "json, zstd, whole":
            return zstd(text)
        case "json, zstd, one by one":
            return framed(*(zstd(line) for line in text.splitlines()))
        case "proto, zstd, one by one":
            return framed(*(zstd(one.SerializeToString()) for one in requests))
    raise AssertionError(form)


@pytest.mark.parametrize(
    "form",
    ["json", "proto", "json, gzip", "json, zstd, whole", "json, zstd, one by one", "proto, zstd, one by one"],
)
def test_every_format_of_the_collector_is_read(form: str, traffic: Callable, lines: Callable, tmp_path: Path) -> None:
    """The same requests come out of each; a request without an arrival is as old as its newest point."""
    sent = list(traffic(minutes=1))
    path = tmp_path / "metrics"
    path.write_bytes(written(form, [request for _, request in sent], lines))
    damage: list[str] = []
    found = list(read_recordings([path], damage))
    assert [entry.at for entry in found] == [at for at, _ in sent]
    assert [entry.request for entry in found] == [request for _, request in sent]
    assert damage == []


def test_arrivals_and_evaluations_are_read_as_they_were_written(traffic: Callable, tmp_path: Path) -> None:
    """To the last bit: a replay sees the clock that the evaluator saw."""
    moments = [START + 0.1234567, START + 10 + 1 / 3, START + 20 + 2**-22]
    frames = [sealed_frame(b"", START, EVALUATED)]
    frames += [
        sealed_frame(request.SerializeToString(), at)
        for (_, request), at in zip(traffic(minutes=1), moments, strict=False)
    ]
    path = tmp_path / "recording"
    path.write_bytes(b"".join(frames))
    assert times(path) == [START, *moments]
    assert [entry.is_evaluation for entry in read_recordings([path], [])] == [True, False, False, False]
    assert evaluations_recorded([path])


def test_what_says_the_arrival_changes_nothing_that_is_judged(
    traffic: Callable, make_contract: Callable[..., Contract], tmp_path: Path
) -> None:
    """An evaluator takes the recorded request as it took the first one."""
    path, plain, replayed = tmp_path / "recording", Evaluator([make_contract()]), Evaluator([make_contract()])
    with path.open("wb") as file:
        for at, request in traffic(minutes=2):
            plain.ingest_metrics(request, at)
            file.write(sealed_frame(request.SerializeToString(), at))
    for entry in read_recordings([path], []):
        replayed.ingest_metrics(entry.read(), entry.at)
    assert replayed.counters == plain.counters
    assert verdicts_of(replayed, START + 120) == verdicts_of(plain, START + 120)


def test_metrics_of_others_are_not_recorded(traffic: Callable) -> None:
    """A Collector may send all that it has; a request of nothing but that leaves no trace."""
    _, request = next(iter(traffic(minutes=1)))
    own = request.SerializeToString()
    scope = request.resource_metrics[0].scope_metrics[0]
    scope.metrics.add(name="system.cpu.time").gauge.data_points.add(time_unix_nano=1)
    other = request.resource_metrics.add()
    other.scope_metrics.add().metrics.add(name="http.server.duration")
    kept = entry_of(type(request).FromString(sealed_frame(ours(request).SerializeToString(), START)[4:]))
    assert kept is not None
    del kept.request.resource_metrics[-1]
    assert kept.request.SerializeToString() == own
    del request.resource_metrics[0]
    assert ours(request).SerializeToString() == b""


def test_a_sealed_message_that_is_no_request_is_named(
    traffic: Callable, make_contract: Callable, tmp_path: Path
) -> None:
    """Whoever wrote it knew how to seal: it is read when it is judged, and named as any other."""
    (at, request), *_ = traffic(minutes=1)
    path = tmp_path / "recording"
    path.write_bytes(sealed_frame(request.SerializeToString(), at) + sealed_frame(b"\xff no request", at + 1.0))
    damage: list[str] = []
    timeline = replay(make_contract(), read_recordings([path], damage), 10.0, GroupTiming())
    assert timeline.points["accepted"] > 0
    assert [sentence.split(": ")[1] for sentence in damage] == ["message 2"]


def test_a_line_that_is_no_request_is_named_and_the_rest_is_used(collector_file: Path) -> None:
    """File and line, and what is wrong with it; a line cut short at the end of the file is one of them."""
    content = collector_file.read_text().splitlines(keepends=True)
    content[2] = content[2][:40] + "\n"
    content[5] = '{"resourceMetrics": "many"}\n'
    content[-1] = content[-1][:-30]
    collector_file.write_text("".join(content))
    damage: list[str] = []
    assert len(times(collector_file, damage)) == len(content) - 3
    assert [sentence.split(": ")[0] for sentence in damage] == [
        f"{collector_file}:{number}" for number in (3, 6, len(content))
    ]
    assert "is not JSON" in damage[0]


def test_a_message_cut_short_at_the_end_is_named(traffic: Callable, tmp_path: Path) -> None:
    """As a process that is killed while it writes leaves it."""
    path = tmp_path / "recording"
    whole = [sealed_frame(request.SerializeToString(), at) for at, request in traffic(minutes=1)]
    for cut in (1, 30, len(whole[-1]) - 2):
        path.write_bytes(b"".join(whole)[:-cut])
        damage: list[str] = []
        assert len(times(path, damage)) == len(whole) - 1
        assert damage == [f"{path}: message {len(whole)}: the file ends in the middle of it"]


def test_a_message_that_is_none_is_named_and_a_length_that_is_none_ends_the_file(
    traffic: Callable, tmp_path: Path
) -> None:
    """The lengths of the others still say where they begin; after a wrong length nothing does."""
    path = tmp_path / "recording"
    whole = [sealed_frame(request.SerializeToString(), at) for at, request in traffic(minutes=1)]
    path.write_bytes(b"".join([whole[0], framed(b"\xff" * 9), *whole[2:4], b"\xff\xff\xff\xff", *whole[4:]]))
    damage: list[str] = []
    assert len(times(path, damage)) == 3
    assert len(damage) == 2
    assert damage[0].startswith(f"{path}: message 2: ")
    assert damage[1] == f"{path}: message 5: a length of 4,294,967,295 bytes is none; what follows is lost"


def test_a_compressed_file_cut_short_gives_what_it_has(collector_file: Path, tmp_path: Path) -> None:
    """And says where it breaks."""
    path = tmp_path / "metrics.json.gz"
    path.write_bytes(gzip.compress(collector_file.read_bytes())[:-600])
    damage: list[str] = []
    assert 10 < len(times(path, damage)) < 120
    assert "what follows is lost" in damage[-1]


def test_lines_of_other_signals_are_passed_over(collector_file: Path) -> None:
    """The Collector writes traces, logs and metrics into one file when it is told so."""
    content = collector_file.read_text()
    spans = '{"resourceSpans":[{"scopeSpans":[{"spans":[{"traceId":"00112233445566778899aabbccddeeff"}]}]}]}\n'
    collector_file.write_text(spans + content + '\n{"resourceLogs":[]}\n')
    damage: list[str] = []
    assert len(times(collector_file, damage)) == 120
    assert damage == []


def test_several_files_are_one_recording(traffic: Callable, tmp_path: Path) -> None:
    """In the order of time, whatever the order in which they are given."""
    sent = list(traffic(minutes=3))
    for name, part in (("a", sent[9:]), ("b", sent[:9])):
        (tmp_path / name).write_bytes(b"".join(sealed_frame(request.SerializeToString(), at) for at, request in part))
    found = [entry.at for entry in read_recordings([tmp_path / "a", tmp_path / "b"], [])]
    assert found == [at for at, _ in sent]
    assert not evaluations_recorded([tmp_path / "a"])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"apiVersion: kernel-contract/v1\nkind: KernelContract\n", "is no recording; give what"),
        (b"\x89PNG\r\n\x1a\n" + b"\0" * 100, "is no recording; give what"),
        (b"\x1f\x8bnot gzip at all", "cannot be read"),
    ],
)
def test_another_file_is_refused(content: bytes, said: str, tmp_path: Path) -> None:
    """With what to give instead."""
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(TrafficFileError, match=said):
        times(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    """With the system's reason."""
    with pytest.raises(TrafficFileError, match=r"nowhere: cannot be read \(No such file"):
        times(tmp_path / "nowhere")


@given(content=st.binary(max_size=400), head=st.sampled_from([b"", b"{", b"\0\0\0", b"\x1f\x8b", b"\x28\xb5\x2f\xfd"]))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_content_is_more_than_damage(content: bytes, head: bytes, tmp_path: Path) -> None:
    """Whatever a file holds, it is read, named as damaged, or refused."""
    path = tmp_path / "file"
    path.write_bytes(head + content)
    damage: list[str] = []
    with suppress(TrafficFileError):
        list(read_recordings([path], damage))
    assert all(sentence.startswith(str(path)) for sentence in damage)
