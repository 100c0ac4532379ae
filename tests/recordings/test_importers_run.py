"""The importer: chunks, weight versions, and a file that is done only when its drift was exported."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from opentelemetry.sdk.metrics.export import MetricExportResult

from kc_otel.recordings.importers import importer
from kc_otel.recordings.importers.importer import Importer

SIDES = ("train_logprobs", "inference_logprobs")


def sequence(tokens=20, seed=0, **columns):
    """A generic line of two kernels that differ by rounding."""
    rng = np.random.default_rng(seed)
    inference = np.log(rng.uniform(0.05, 1, tokens))
    train = np.minimum(inference + 0.01 * rng.standard_normal(tokens), 0)
    return {"train_logprobs": train.tolist(), "inference_logprobs": inference.tolist(), **columns}


@pytest.fixture
def write(tmp_path):
    def make(name, lines):
        path = tmp_path / name
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return path

    return make


def test_a_file_becomes_the_stream_that_live_instrumentation_makes(recorders, memory, write):
    importer = Importer(recorders(sampling=0.001), attributes={"run": "r1"})
    lines = [sequence(seed=n, task="code" if n % 2 else "prose") for n in range(6)]
    assert importer.file(write("log.jsonl", lines))
    assert (importer.totals.files, importer.totals.sequences, importer.totals.tokens) == (1, 6, 120)
    assert memory.count("all") == 120
    assert memory.count("code") == 60


def test_chunks_are_bounded_and_change_nothing(recorders, memory, write, monkeypatch):
    monkeypatch.setattr(importer, "_CHUNK_TOKENS", 45)
    path = write("log.jsonl", [sequence(seed=n) for n in range(7)])
    made = recorders()
    assert Importer(made).file(path)
    assert made.stats().batches == 3
    assert memory.count("all") == 140


def test_weight_versions_are_kept_apart_and_their_lag_is_measured(recorders, memory, write):
    lines = [sequence(seed=n, train_weights=9, inference_weights=9 - n % 3) for n in range(6)]
    made = recorders()
    assert Importer(made).file(write("log.jsonl", lines))
    assert made.stats().batches == 3
    (lag,) = memory.points("kc.weights.lag", kc_slice="all")
    assert (lag.count, lag.max, lag.sum) == (3, 2.0, 3.0)


def test_versions_of_tokens_are_read_where_an_update_came_under_way(recorders, memory, write):
    line = sequence(train_weights=9, weight_versions=[7] * 5 + [8] * 15)
    made = recorders()
    assert Importer(made).file(write("log.jsonl", [line]))
    (lag,) = memory.points("kc.weights.lag", kc_slice="all")
    assert (lag.count, lag.max, lag.sum) == (2, 2.0, 3.0)
    bad = write("bad.jsonl", [line | {"weight_versions": [7.5] * 20}])
    importer = Importer(made)
    assert not importer.file(bad)
    assert "weight_versions: token 0 is 7.5; the weights' version of a token is a step" in importer.totals.failed[bad]


def test_the_mass_that_truncation_kept_is_measured_with_the_drift(recorders, memory, write):
    line = sequence(seed=0)
    line["train_kept_logprobs"] = line["inference_kept_logprobs"] = [math.log(0.97)] * 20
    line |= {side: (np.array(line[side]) + math.log(0.97)).tolist() for side in SIDES}
    made = recorders()
    importer = Importer(made)
    assert importer.file(write("log.jsonl", [line]))
    assert importer.file(write("plain.jsonl", [sequence(seed=0)]))
    (outside,) = memory.points("kc.drift.outside_mass", kc_slice="all")
    assert (outside.count, outside.sum) == (20, pytest.approx(0.6))
    (drift,) = memory.points("kc.drift.abs_log_ratio", kc_slice="all")
    assert drift.count == 40
    assert drift.sum == pytest.approx(2 * np.abs(np.subtract(*(sequence()[side] for side in SIDES))).sum(), rel=1e-3)


def test_advantages_are_measured_with_the_drift(recorders, memory, write):
    lines = [sequence(seed=n, advantages=1.0 if n else -1.0) for n in range(2)]
    assert Importer(recorders()).file(write("log.jsonl", lines))
    for side in ("positive", "negative"):
        (point,) = memory.points(f"kc.drift.advantage_drift_{side}", kc_slice="all")
        assert point.count == 20


@pytest.mark.slow
def test_log_densities_are_measured_as_such(recorders, memory, write):
    lines = [sequence(seed=n, density=True) for n in range(3)]
    for line in lines:
        line |= {side: [value + 2.0 for value in line[side]] for side in SIDES}
    made = recorders()
    assert Importer(made).file(write("log.jsonl", lines))
    assert (made.stats().invalid, memory.count("all")) == ({}, 60)


@pytest.mark.slow
def test_a_file_is_not_done_while_nobody_takes_the_export(recorders, memory, write):
    memory.result = MetricExportResult.FAILURE
    importer = Importer(recorders(), patience=0.5)
    path = write("log.jsonl", [sequence()])
    assert not importer.file(path)
    assert "no endpoint took the export" in importer.totals.failed[path]
    memory.result = MetricExportResult.SUCCESS
    other = write("other.jsonl", [sequence()])
    assert importer.file(other)
    assert importer.totals.files == 1


def test_what_the_queue_cannot_hold_is_not_called_done(recorders, write):
    importer = Importer(recorders(queue_bytes=1), patience=5)
    path = write("log.jsonl", [sequence()])
    assert not importer.file(path)
    assert "1 batches were dropped" in importer.totals.failed[path]


def test_a_bad_file_does_not_stop_the_next(recorders, memory, write, tmp_path):
    importer = Importer(recorders())
    assert not importer.file(write("bad.jsonl", [{"a": 1}]))
    assert not importer.file(tmp_path / "nowhere.jsonl")
    assert importer.file(write("good.jsonl", [sequence()]))
    assert len(importer.totals.failed) == 2
    assert memory.count("all") == 20


def test_a_side_that_is_a_copy_of_the_other_is_told_of(recorders, write):
    line = sequence()
    line["train_logprobs"] = line["inference_logprobs"]
    importer = Importer(recorders())
    assert importer.file(write("log.jsonl", [line, sequence(seed=1)]))
    assert importer.totals.identical == 1
