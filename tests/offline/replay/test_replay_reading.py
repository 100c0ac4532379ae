"""Recordings of an evaluator and of the Collector, whole and damaged."""

from __future__ import annotations

import gzip
import struct

import pytest

from kc_otel.judge.otlp.traffic_entries import EVALUATED, RECEIVED, judged_metrics, marked_frame
from kc_otel.offline.replay import TrafficFileError, evaluations_recorded, read_recordings, replay

START = 1_800_000_000.0


def times(path, damage=None):
    return [entry.at for entry in read_recordings([path], [] if damage is None else damage)]


def framed(*messages):
    return b"".join(struct.pack(">I", len(message)) + message for message in messages)


@pytest.mark.slow
def test_what_the_collector_wrote_is_read(traffic, collector_file):
    damage: list[str] = []
    found = list(read_recordings([collector_file], damage))
    assert [(entry.at, entry.read()) for entry in found] == list(traffic())
    assert damage == []


def test_any_reader_of_otlp_reads_what_an_evaluator_recorded(traffic):
    (at, request), *_ = traffic(minutes=1)
    content = marked_frame(request.SerializeToString(), at)
    (length,) = struct.unpack(">I", content[:4])
    assert length == len(content) - 4
    read = type(request).FromString(content[4:])
    mark = read.resource_metrics.pop()
    assert read == request
    assert not mark.scope_metrics
    assert [(attribute.key, attribute.value.double_value) for attribute in mark.resource.attributes] == [(RECEIVED, at)]


def test_arrivals_and_evaluations_are_read_as_they_were_written(traffic, tmp_path):
    moments = [START + 0.1234567, START + 10 + 1 / 3, START + 20 + 2**-22]
    frames = [marked_frame(b"", START, EVALUATED)]
    frames += [
        marked_frame(request.SerializeToString(), at)
        for (_, request), at in zip(traffic(minutes=1), moments, strict=False)
    ]
    path = tmp_path / "recording"
    path.write_bytes(b"".join(frames))
    assert times(path) == [START, *moments]
    assert [entry.is_evaluation for entry in read_recordings([path], [])] == [True, False, False, False]
    assert evaluations_recorded([path])


def test_metrics_of_others_are_not_recorded(traffic):
    _, request = next(iter(traffic(minutes=1)))
    own = request.SerializeToString()
    scope = request.resource_metrics[0].scope_metrics[0]
    scope.metrics.add(name="system.cpu.time").gauge.data_points.add(time_unix_nano=1)
    other = request.resource_metrics.add()
    other.scope_metrics.add().metrics.add(name="http.server.duration")
    assert judged_metrics(request).SerializeToString() == own
    del request.resource_metrics[:2]
    assert judged_metrics(request).SerializeToString() == b""


def test_a_marked_message_that_is_no_request_is_named(traffic, make_contract, tmp_path):
    (at, request), *_ = traffic(minutes=1)
    path = tmp_path / "recording"
    path.write_bytes(marked_frame(request.SerializeToString(), at) + marked_frame(b"\xff no request", at + 1.0))
    damage: list[str] = []
    timeline = replay(make_contract(), read_recordings([path], damage), 10.0)
    assert timeline.points["accepted"] > 0
    assert [sentence.split(": ")[1] for sentence in damage] == ["message 2"]


def test_a_message_cut_short_at_the_end_is_named(traffic, tmp_path):
    path = tmp_path / "recording"
    whole = [marked_frame(request.SerializeToString(), at) for at, request in traffic(minutes=1)]
    for cut in (1, 30, len(whole[-1]) - 2):
        path.write_bytes(b"".join(whole)[:-cut])
        damage: list[str] = []
        assert len(times(path, damage)) == len(whole) - 1
        assert damage == [f"{path}: message {len(whole)}: the file ends in the middle of it"]


def test_a_message_that_is_none_is_named_and_a_length_that_is_none_ends_the_file(traffic, tmp_path):
    path = tmp_path / "recording"
    whole = [marked_frame(request.SerializeToString(), at) for at, request in traffic(minutes=1)]
    path.write_bytes(b"".join([whole[0], framed(b"\xff" * 9), *whole[2:4], b"\xff\xff\xff\xff", *whole[4:]]))
    damage: list[str] = []
    assert len(times(path, damage)) == 3
    assert len(damage) == 2
    assert damage[0].startswith(f"{path}: message 2: ")
    assert damage[1] == f"{path}: message 5: a length of 4,294,967,295 bytes is none; what follows is lost"


def test_several_files_are_one_recording(traffic, tmp_path):
    sent = list(traffic(minutes=3))
    for name, part in (("a", sent[9:]), ("b", sent[:9])):
        (tmp_path / name).write_bytes(b"".join(marked_frame(request.SerializeToString(), at) for at, request in part))
    found = [entry.at for entry in read_recordings([tmp_path / "a", tmp_path / "b"], [])]
    assert found == [at for at, _ in sent]
    assert not evaluations_recorded([tmp_path / "a"])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"apiVersion: kernel-contract/v1\nkind: KernelContract\n", "is no recording; give what"),
        (b"\x89PNG\r\n\x1a\n" + b"\0" * 100, "is no recording; give what"),
        (b'{"resourceMetrics":[]}\n', "with `format: proto` and no compression"),
        (gzip.compress(b"any", mtime=0), "is no recording; give what"),
    ],
)
def test_another_file_is_refused(content, said, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(TrafficFileError, match=said):
        times(path)
