"""The importer: chunks, weight versions, and a file that is done only when its drift was exported."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from opentelemetry.sdk.metrics.export import MetricExportResult

from kc_otel.recordings.importers import importer as importer_module
from kc_otel.recordings.importers.importer import Importer, Ledger
from tests.recordings._files import write_columns, write_rows

SIDES = ("train_logprobs", "inference_logprobs")


def sequence(tokens=20, seed=0, **columns):
    """A generic line of two kernels that differ by rounding."""
    rng = np.random.default_rng(seed)
    inference = np.log(rng.uniform(0.05, 1, tokens))
    train = np.minimum(inference + 0.01 * rng.standard_normal(tokens), 0)
    return {"train_logprobs": train.tolist(), "inference_logprobs": inference.tolist(), **columns}


@pytest.fixture
def write(tmp_path):
    return lambda name, lines: write_rows(tmp_path / name, lines)


def test_a_file_becomes_the_stream_that_live_instrumentation_makes(recorders, memory, write):
    importer = Importer(recorders(sampling=0.001), attributes={"run": "r1"})
    lines = [sequence(seed=n, task="code" if n % 2 else "prose") for n in range(6)]
    assert importer.file(write("log.jsonl", lines))
    assert (importer.totals.files, importer.totals.sequences, importer.totals.tokens) == (1, 6, 120)
    assert memory.count("all") == 120
    assert memory.count("code") == 60


def test_weight_versions_are_kept_apart_and_their_lag_is_measured(recorders, memory, write):
    lines = [sequence(seed=n, train_weights=9, inference_weights=9 - n % 3) for n in range(6)]
    made = recorders()
    assert Importer(made).file(write("log.jsonl", lines))
    assert made.stats().batches == 3
    (lag,) = memory.points("kc.weights.lag", kc_slice="all")
    assert (lag.count, lag.max, lag.sum) == (3, 2.0, 3.0)


@pytest.mark.parametrize("steps", [{}, {"train_weights": 7}, {"train_weights": 7, "inference_weights": 6}])
def test_a_lag_that_a_file_says_is_measured(recorders, memory, write, steps):
    """Once, whatever else the file says of the weights; on all traffic, too."""
    importer = Importer(recorders())
    assert importer.file(write("log.jsonl", [sequence(lag=1, **steps), sequence(seed=1, lag=0, **steps)]))
    (point,) = memory.points("kc.weights.lag", kc_slice="all")
    assert (point.count, point.min, point.max) == ((1, 1, 1) if len(steps) == 2 else (2, 0, 1))


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


def test_advantages_and_log_densities_are_measured_as_such(recorders, memory, write):
    lines = [sequence(seed=n, advantages=1.0 if n else -1.0, density=True) for n in range(2)]
    for line in lines:
        line |= {side: [value + 2.0 for value in line[side]] for side in SIDES}
    made = recorders()
    assert Importer(made).file(write("log.jsonl", lines))
    assert (made.stats().invalid, memory.count("all")) == ({}, 40)
    for side in ("positive", "negative"):
        (point,) = memory.points(f"kc.drift.advantage_drift_{side}", kc_slice="all")
        assert point.count == 20


@pytest.mark.slow
def test_a_file_is_not_done_while_nobody_takes_the_export(recorders, memory, write):
    memory.result = MetricExportResult.FAILURE
    importer = Importer(recorders(), patience=0.5)
    path = write("log.jsonl", [sequence()])
    assert not importer.file(path)
    assert "measured, not exported: no endpoint took the export" in importer.totals.failed[path]
    memory.result = MetricExportResult.SUCCESS
    other = write("other.jsonl", [sequence(seed=1)])
    assert importer.file(other)
    # Streams are cumulative: the export that was taken has both files.
    assert (importer.totals.files, importer.totals.failed, memory.count("all")) == (2, {}, 40)


def test_an_export_that_is_not_allowed_is_not_tried_again_and_the_answer_is_told(recorders, memory, write, monkeypatch):
    """While somebody waits for the end of the command; with `follow` a token may be given meanwhile."""
    memory.result = MetricExportResult.FAILURE
    answer = "error code: StatusCode.UNAUTHENTICATED, error details: send a token"
    monkeypatch.setattr(importer_module, "try_export", lambda: answer)
    importer, path = Importer(recorders(export_interval=math.inf)), write("log.jsonl", [sequence()])
    exports = []
    memory.answering = lambda: exports.append(1)
    assert not importer.file(path)
    assert importer.totals.failed == {path: f"{path}: measured, not exported: no endpoint took the export: {answer}"}
    assert (len(exports), importer.unexported) == (1, True)


def test_a_file_of_which_points_are_rejected_is_done_with_an_export_that_has_them(recorders, memory, write, tmp_path):
    recorder = recorders()
    ledger = Ledger(tmp_path / "done.txt")
    importer = Importer(recorder, ledger=ledger)
    memory.answering = lambda: recorder._measurer.counters.export_rejected("the endpoint rejected 9 data points", 9)
    path = write("log.jsonl", [sequence()])
    assert not importer.file(path)
    why = "measured, not exported: the endpoint rejected 9 data points; a part of it counts already: only --again"
    assert importer.totals.failed[path].startswith(f"{path}: {why}")
    assert (importer.totals.files, path in ledger) == (0, False)
    memory.answering = lambda: None
    importer.finish()
    assert (importer.totals.files, importer.totals.failed, path in ledger) == (1, {}, True)


@pytest.mark.parametrize("dropped", [False, True])
def test_a_file_that_the_last_export_takes_is_done(recorders, memory, write, tmp_path, dropped):
    """An endpoint that began to answer while the import gave up has counted it, but for what the end leaves out."""
    recorder, path = recorders(), write("log.jsonl", [sequence()])
    importer = Importer(recorder, ledger=Ledger(tmp_path / "done.txt"), patience=0.1)
    memory.result = MetricExportResult.FAILURE
    assert not importer.file(path)
    memory.result = MetricExportResult.SUCCESS
    if dropped:
        end = recorder.shutdown
        recorder.shutdown = lambda *given: recorder.drop("shutdown", "too slow") or end(*given)
    importer.finish()
    exports = len(memory.exports)
    recorder.shutdown()
    assert (len(memory.exports), path in Ledger(tmp_path / "done.txt")) == (exports, not dropped)
    assert (path in importer.totals.failed) is dropped


@pytest.mark.parametrize(("points", "imports"), [(1, False), (20, True)])
def test_a_file_that_an_endpoint_took_in_part_is_not_measured_again_by_itself(
    recorders, memory, write, tmp_path, points, imports
):
    """One of which an endpoint rejected every point is."""
    path, done = write("log.jsonl", [sequence()]), tmp_path / "done.txt"
    for first in (True, False):
        recorder = recorders()
        importer = Importer(recorder, ledger=Ledger(done))
        memory.answering = lambda recorder=recorder: recorder._measurer.counters.export_rejected("rejected", points)
        assert not importer.file(path)
        importer.finish()
        assert ("a part of it counts already" in importer.totals.failed[path]) is not imports
        assert importer.totals.sequences == int(imports or first)
    memory.answering = lambda: None
    assert Importer(recorders(), ledger=Ledger(done)).file(path) is imports
    assert Importer(recorders(), ledger=Ledger(done, again=True)).file(path)
    assert path in Ledger(done)


@pytest.mark.parametrize(("name", "seed"), [("copy.jsonl", 0), ("log.jsonl", 7)])
def test_a_copy_of_what_counts_in_part_is_refused_and_what_is_written_anew_is_measured(
    recorders, memory, write, tmp_path, name, seed
):
    recorder = recorders()
    importer = Importer(recorder, ledger=Ledger(tmp_path / "done.txt"))
    memory.answering = lambda: recorder._measurer.counters.export_rejected("rejected", 1)
    assert not importer.file(write("log.jsonl", [sequence()]))
    importer.finish()
    memory.answering = lambda: None
    importer = Importer(recorders(), ledger=Ledger(tmp_path / "done.txt"))
    assert importer.file(write(name, [sequence(seed=seed)])) is (seed > 0)
    assert (importer.totals.sequences, importer.totals.copies) == (int(seed > 0), {})


def test_a_file_whose_every_point_was_taken_at_last_counts_in_part_no_more(recorders, memory, write, tmp_path):
    """Lines that are appended to it later, and that no endpoint takes, are measured by the next import."""
    rows, recorder, ledger = [sequence(seed=seed) for seed in range(2)], recorders(), Ledger(tmp_path / "done.txt")
    importer = Importer(recorder, ledger=ledger, patience=0.1)
    memory.answering = lambda: recorder._measurer.counters.export_rejected("rejected", 1)
    assert not importer.file(write("log.jsonl", rows[:1]))
    memory.answering = lambda: None
    assert importer.file(write("other.jsonl", [sequence(seed=5)]))
    memory.result = MetricExportResult.FAILURE
    assert not importer.file(write("log.jsonl", rows))
    importer.finish()
    memory.result = MetricExportResult.SUCCESS
    importer = Importer(recorders(), ledger=Ledger(tmp_path / "done.txt"))
    assert importer.file(tmp_path / "log.jsonl")
    assert importer.totals.sequences == 1


def test_a_file_that_a_later_export_holds_counts_in_part_with_it(recorders, memory, write, tmp_path):
    """Streams are cumulative."""
    recorder, first = recorders(), write("log.jsonl", [sequence()])
    importer = Importer(recorder, ledger=Ledger(tmp_path / "done.txt"), patience=0.1)
    memory.result = MetricExportResult.FAILURE
    assert not importer.file(first)
    memory.result = MetricExportResult.SUCCESS
    memory.answering = lambda: recorder._measurer.counters.export_rejected("rejected", 1)
    assert not importer.file(write("other.jsonl", [sequence(seed=1)]))
    memory.result = MetricExportResult.FAILURE
    importer.finish()
    memory.result = MetricExportResult.SUCCESS
    again = Importer(recorders(), ledger=Ledger(tmp_path / "done.txt"))
    assert not again.file(first)
    assert ("a part of it counts already" in again.totals.failed[first], again.totals.sequences) == (True, 0)


@pytest.mark.parametrize("name", ["log.jsonl", "token_exports/step_3/rank_0.jsonl"])
def test_lines_that_are_appended_are_measured_and_no_others_again(recorders, memory, tmp_path, name, monkeypatch):
    """A line that is torn at the first look is measured at the second; meanwhile it is no failure."""
    monkeypatch.setattr(importer_module, "_CHUNK_TOKENS", 20)
    columns = SIDES if name == "log.jsonl" else ("trainer_logprobs", "inference_logprobs")
    rows = [dict(zip(columns, sequence(seed=n).values(), strict=True)) | {"loss_mask": [1] * 20} for n in range(5)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path, done = tmp_path / name, tmp_path / "done.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    importer = Importer(recorders(), ledger=Ledger(done), follow=True)
    ends = [place + 1 for place, character in enumerate(text) if character == "\n"]
    for size, measured in ((9, 0), (ends[0] + 9, 1), (ends[3] + 9, 4), (ends[3] + 19, 4), (ends[4] - 1, 5)):
        path.write_text(text[:size])
        assert importer.file(path)
        assert (importer.totals.sequences, importer.totals.refused) == (measured, 0)
    assert (memory.count("all"), importer.totals.files, memory.points("kc.input.invalid")) == (100, 1, [])
    again = Importer(recorders(), ledger=Ledger(done))
    path.write_text(text + "\n")
    assert again.file(path)
    path.write_text(text[: ends[0]] + text)
    assert not again.file(path)
    assert "begins with the same sequence as before" in again.totals.failed[path]
    assert (again.totals.sequences, again.totals.refused) == (0, 6)


@pytest.mark.parametrize("whole", [0, 2])
def test_the_last_line_of_a_trainer_that_was_killed_is_missing_and_the_others_are_measured(
    recorders, memory, tmp_path, whole
):
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps(sequence(seed=n)) + "\n" for n in range(whole)) + json.dumps(sequence())[:-9])
    importer = Importer(recorders())
    assert importer.file(path) is (whole > 0)
    assert (memory.count("all"), importer.totals.refused) == (20 * whole, 1)
    assert importer.totals.refusals.first["unreadable"] == f"{path}:{whole + 1}: the last line is cut off"
    (missing,) = memory.points("kc.input.invalid")
    assert (missing.attributes["kc.reason"], missing.value) == ("unreadable", 1)


def test_rows_of_a_file_that_fails_again_are_counted_once(recorders, memory, write):
    importer = Importer(recorders(), follow=True)
    good, bad = ([sequence(seed=n, **more) for n in range(4)] for more in ({}, {"mask": ["x"] * 20}))
    for rows, counted in ((bad[:3], 3), (bad[:3], 3), (bad, 4), (good[:2], 4), (good[:2] + bad[2:3], 5)):
        importer.file(write("log.jsonl", rows))
        assert importer.totals.refused == counted
    (missing,) = memory.points("kc.input.invalid")
    assert (missing.attributes["kc.reason"], missing.value) == ("unreadable", 5)


@pytest.mark.parametrize("ending", ["jsonl", "npz"])
def test_a_file_that_is_written_anew_is_measured_as_what_it_is_now(recorders, memory, tmp_path, ending):
    """A run that resumes from a checkpoint writes other rollouts; the same content counts once, also after a while."""
    path, done = tmp_path / f"step-100.{ending}", tmp_path / "done.txt"
    recorder = recorders()
    for seed, total in ((0, 40), (7, 80), (0, 80)):
        rows = [sequence(seed=seed + row, group=row) for row in range(2)]
        write_columns(path, **{name: np.array([row[name] for row in rows]) for name in rows[0]})
        assert Importer(recorder, ledger=Ledger(done)).file(path)
        assert memory.count("all") == total


def test_a_file_that_cannot_be_continued_is_refused_when_it_has_changed(recorders, memory, tmp_path):
    """Its sequences are missing: nobody knows which of them have counted."""
    path, done = tmp_path / "log.npz", tmp_path / "done.txt"
    side = np.array(sequence()["inference_logprobs"])
    for sequences, whole in ((2, True), (2, True), (3, False)):
        np.savez(
            path, train_logprobs=np.stack([side + 1e-3] * sequences), inference_logprobs=np.stack([side] * sequences)
        )
        importer = Importer(recorders(), ledger=Ledger(done))
        assert importer.file(path) is whole
    assert "log.npz: INVALID INPUT, rewritten_file: A file has changed" in importer.totals.failed[path]
    assert importer.totals.sequences == 0
    (missing,) = memory.points("kc.input.invalid")
    assert (missing.attributes["kc.reason"], missing.value) == ("rewritten_file", 3)


@pytest.mark.parametrize("restarted", [False, True])
def test_rollouts_of_a_prompt_that_has_counted_are_refused_and_missing(
    recorders, contract, memory, write, tmp_path, restarted
):
    """Of lines that are appended; the prompt of another step and rows without a prompt count."""
    made = recorders(contract=contract(statistical=[{"id": "tv", "metric": "tv_token", "limit": 0.1}]))
    importer = Importer(made, ledger=Ledger(tmp_path / "done.txt"))
    lines = [sequence(seed=n, uid=f"prompt-{n % 3}", step=1) for n in range(6)]
    later = [sequence(seed=9, uid="prompt-1", step=1), sequence(seed=10, uid="prompt-1", step=2)]
    later += [sequence(seed=11, uid="prompt-7", step=1), sequence(seed=12, step=1), sequence(seed=13, step=1)]
    assert importer.file(write("log.jsonl", lines))
    if restarted:
        importer = Importer(made, ledger=Ledger(tmp_path / "done.txt"))
    assert importer.file(write("log.jsonl", [*lines, *later]))
    assert importer.totals.refusals.counts == {"split_prompt": 1}
    assert "log.jsonl: prompt prompt-1: Rollouts" in importer.totals.refusals.first["split_prompt"]
    assert importer.file(write("log.jsonl", [*lines, *later, lines[0] | {"reward": 1.0}]))
    (missing,) = memory.points("kc.input.invalid")
    assert (missing.attributes["kc.reason"], missing.value) == ("split_prompt", 2)
    (rollouts,) = memory.points("kc.sampling.rollouts", kc_slice="all")
    assert (rollouts.count, rollouts.sum) == (7, 10)


@pytest.mark.parametrize("ending", ["jsonl", "npz"])
def test_a_copy_of_a_file_counts_once(recorders, memory, tmp_path, ending):
    """In one import and in a later one; lines that are appended to a copy count."""
    first, copy, later = (tmp_path / f"{name}.{ending}" for name in ("log", "log-copy", "renamed"))
    lines = [json.dumps(sequence(seed=n)) + "\n" for n in range(3)]
    if ending == "npz":
        np.savez(first, **{name: np.array(values)[None] for name, values in sequence().items()})
    else:
        first.write_text("".join(lines[:2]))
    copy.write_bytes(first.read_bytes())
    importer = Importer(recorders(), ledger=Ledger(tmp_path / "done.txt"))
    count = importer.file(first) and importer.totals.sequences
    assert importer.file(copy)
    assert (importer.totals.sequences, importer.totals.files) == (count, 1)
    assert importer.totals.copies == {copy: str(first)}
    assert memory.count("all") == 20 * count
    again = Importer(recorders(), ledger=Ledger(tmp_path / "done.txt"))
    assert copy in Ledger(tmp_path / "done.txt")
    later.write_bytes(first.read_bytes())
    assert again.file(later)
    assert (again.totals.sequences, list(again.totals.copies)) == (0, [later])
    if ending == "jsonl":
        copy.write_text("".join(lines))
        assert again.file(copy)
        assert again.totals.sequences == 1


def test_what_the_queue_cannot_hold_is_not_called_done_and_its_copy_is_measured(recorders, write):
    importer = Importer(recorders(queue_bytes=1), patience=5)
    path = write("log.jsonl", [sequence()])
    assert not importer.file(path)
    assert "1 batches were dropped" in importer.totals.failed[path]
    assert not importer.file(write("copy.jsonl", [sequence()]))
    assert importer.totals.copies == {}


@pytest.mark.parametrize("taken", [True, False])
def test_a_file_of_which_some_batches_were_dropped_is_not_measured_again_by_itself(
    recorders, memory, write, tmp_path, taken
):
    """Those of other weights have counted, unless no endpoint took them."""
    recorder, path = recorders(), write("log.jsonl", [sequence(seed=step, train_weights=step) for step in range(2)])
    compare = recorder.compare

    def first_only(*sides, **more):
        recorder.compare = lambda *_, **__: recorder.drop("queue-full", "too slow")
        compare(*sides, **more)

    recorder.compare = first_only
    memory.result = MetricExportResult.SUCCESS if taken else MetricExportResult.FAILURE
    importer = Importer(recorder, ledger=Ledger(tmp_path / "done.txt"), patience=0.1)
    assert not importer.file(path)
    assert ("a part of it counts already" in importer.totals.failed[path]) is taken
    importer.finish()
    memory.result = MetricExportResult.SUCCESS
    again = Importer(recorders(), ledger=Ledger(tmp_path / "done.txt"))
    assert again.file(path) is not taken
    assert ("a part of it counts already" in again.totals.failed.get(path, "")) is taken
    assert again.totals.sequences == (0 if taken else 2)


def test_an_export_without_drift_is_no_part_of_a_file(recorders, memory, write):
    """The export loop's own, while a large file is read; then the endpoint goes away."""
    recorder, path = recorders(), write("log.jsonl", [sequence()])
    importer, compare = Importer(recorder, patience=0.1), recorder.compare

    def read_at_last(*sides, **more):
        assert recorder.force_flush()
        memory.result = MetricExportResult.FAILURE
        compare(*sides, **more)

    recorder.compare = read_at_last
    assert not importer.file(path)
    assert len(memory.exports) > 1
    assert "a part of it counts already" not in importer.totals.failed[path]


def test_a_record_that_was_cut_off_costs_its_own_file_only(recorders, write, tmp_path, caplog):
    """A process that was killed while it wrote the list leaves no list that is refused."""
    done = tmp_path / "done.txt"
    first, second = write("first.jsonl", [sequence()]), write("second.jsonl", [sequence(seed=1)])
    assert Importer(recorders(), ledger=Ledger(done)).file(first)
    whole = done.read_bytes()
    done.write_bytes(whole + whole[:20])
    assert Importer(recorders(), ledger=Ledger(done)).file(second)
    again = Ledger(done)
    assert [path in again for path in (first, second)] == [True, True]
    assert "a record was cut off" in caplog.text


@pytest.mark.parametrize("before", [0, 2])
def test_lines_that_were_lost_are_measured_again_and_those_before_them_are_not(recorders, write, tmp_path, before):
    """Also where the file has grown since."""
    rows, ledger = [sequence(seed=seed) for seed in range(4)], Ledger(tmp_path / "done.txt")
    path = tmp_path / "log.jsonl"
    if before:
        assert Importer(recorders(), ledger=ledger).file(write("log.jsonl", rows[:before]))
    write("log.jsonl", rows[: before + 1])
    assert not Importer(recorders(queue_bytes=1), patience=5, ledger=ledger).file(path)
    write("log.jsonl", rows)
    importer = Importer(recorders(), ledger=ledger)
    assert importer.file(path)
    assert importer.totals.sequences == 4 - before


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


def test_what_is_said_of_every_file_tells_the_age_of_its_weights(recorders, write):
    """Without `lag=0` nobody knows which weights sampled what the trainer scored."""
    path = write("log.jsonl", [sequence(seed=n, train_weights=9) for n in range(3)])
    for attributes, unknown in (({}, 3), ({"lag": 0}, 0)):
        importer = Importer(recorders(), attributes=attributes)
        assert importer.file(path)
        assert importer.totals.age_unknown == unknown


@pytest.mark.parametrize("column", ["train_logprobs", "tool_mask"])
def test_what_a_file_holds_and_is_not_measured_is_told_to_the_evaluator(recorders, memory, write, column):
    """A file that is refused as a whole, and lines that are one by one, would otherwise be missing from a PASS."""
    made, good = recorders(), [sequence(seed=n) for n in range(4)]
    bad = [*good[:2], *({**line, column: [0.0] * 20} for line in good[2:])]
    importer = Importer(made)
    assert importer.file(write("good.jsonl", [sequence(seed=n) for n in range(9)]))
    assert not importer.file(write("bad.jsonl", bad))
    keys = {"trainer_logprobs": [-1.0, -2.0], "token_ids": [1, 2]}
    lines = [
        {**keys, "inference_logprobs": [-1.0], "loss_mask": [True, True]},
        {**keys, "inference_logprobs": [-1.0, -2.0], "loss_mask": [False, False]},
    ]
    assert not importer.file(write("rank.jsonl", lines)), "there is nothing in it that can be compared"
    assert importer.totals.refused == 5
    counts = {point.attributes["kc.reason"]: point.value for point in memory.points("kc.input.invalid")}
    reason = "placeholder" if column == "train_logprobs" else "unreadable"
    assert counts == {reason: 4, "shape_mismatch": 1}
    assert not any("kc.slice" in point.attributes for point in memory.points("kc.input.invalid"))


@pytest.mark.parametrize("unnamed", [0, 3])
def test_rollouts_of_a_prompt_count_once_wherever_in_the_file_they_are(
    recorders, contract, memory, write, monkeypatch, unnamed
):
    """Prompts that count in parts are too many, and the interval too narrow; a row without a prompt is one alone."""
    monkeypatch.setattr(importer_module, "_CHUNK_TOKENS", 60)
    lines = [sequence(seed=n, train_weights=9, inference_weights=9 - n % 2, group=n % 5) for n in range(30)]
    for line in lines[:unnamed]:
        del line["group"]
    made = recorders(contract=contract(statistical=[{"id": "tv", "metric": "tv_token", "limit": 0.1}]))
    assert Importer(made).file(write("log.jsonl", lines))
    assert made.stats().batches == 10
    (rollouts,) = memory.points("kc.sampling.rollouts", kc_slice="all")
    assert (rollouts.count, rollouts.sum) == (5 + unnamed, 30)


def test_a_prompt_of_another_step_of_a_file_counts_by_itself(recorders, contract, memory, write):
    """Without weights, too: the recorder knows no step then."""
    lines = [sequence(seed=n, step=n // 8, group=n % 4) for n in range(24)]
    made = recorders(contract=contract(statistical=[{"id": "tv", "metric": "tv_token", "limit": 0.1}]))
    assert Importer(made).file(write("log.jsonl", lines))
    (rollouts,) = memory.points("kc.sampling.rollouts", kc_slice="all")
    assert (rollouts.count, rollouts.sum) == (12, 24)
