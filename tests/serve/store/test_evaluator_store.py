"""The store: a restart at any point is no restart, and what cannot be read says what to do."""

import sqlite3
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kc_otel import machine_code
from kc_otel.judge.evaluator import Evaluator
from kc_otel.judge.plain_json import read_json, to_json
from kc_otel.judge.point_streams import LatestValue, PointStream
from kc_otel.judge.recorders import LastReport
from kc_otel.judge.series import SeriesKey
from kc_otel.serve.store.codecs import decode_histogram, decode_rows, encode_histograms
from kc_otel.serve.store.evaluator_store import SCHEMA_VERSION, EvaluatorStore
from kc_otel.serve.store.state_file import DamagedStateError, StateError, UnitOfWork, reading_state, unit_of_work
from kc_otel.stats import Buckets, Histogram
from kc_otel.stats.histogram_columns import HistogramColumns
from tests.judge.conftest import evaluator_of, take
from tests.tools.verdicts import streams_of, verdicts_of, windows_of

RNG = np.random.default_rng(5)


@pytest.fixture
def connection() -> Iterator[sqlite3.Connection]:
    database = sqlite3.connect(":memory:", isolation_level=None)
    yield database
    database.close()


def script(sender: Any, merged: Any, now: float) -> list[tuple[float, Any]]:
    """Requests of some processes with a restart, a duplicate and a late one."""
    rng = np.random.default_rng(1)
    first, second = sender(scale=3), sender(instance="1", slice="code", scale=3)
    delta = sender(instance="2", cumulative=False)
    others = [sender(instance=str(number), slice="code", scale=3) for number in range(3, 6)]
    requests = []
    for step in range(1, 30):
        time = now + 20.0 * step
        if step == 12:
            second.restart(time - 5)
        request = merged(
            *[s.request(time, rng.beta(1, 150 if step > 20 else 800, 300)) for s in (first, second, delta, *others)]
        )
        requests.append((time, request))
        if step % 7 == 0:
            requests.append((time + 1, requests[-3][1]))
    return requests


def written(store: EvaluatorStore, evaluator: Evaluator, connection: sqlite3.Connection) -> None:
    with unit_of_work(connection) as unit:
        store.save(evaluator, unit)


def restored(connection: sqlite3.Connection, contract: Any) -> Evaluator:
    evaluator = Evaluator([contract])
    EvaluatorStore(connection).restore(evaluator)
    return evaluator


def same(a: Any, b: Any) -> bool:
    """Whether verdicts are equal; sums may have been added up in another order."""
    numbers = ("limit", "estimate", "lower", "upper", "samples", "evidence")
    pairs = list(zip(a, b, strict=True))
    return all(
        (x.cell, x.status, x.reason, x.window) == (y.cell, y.status, y.reason, y.window) for x, y in pairs
    ) and all(
        np.isclose(getattr(x, name), getattr(y, name), rtol=1e-9, atol=0, equal_nan=True)
        for x, y in pairs
        for name in numbers
    )


def values(connection: sqlite3.Connection, kind: str) -> dict[Any, Any]:
    return dict(connection.execute("SELECT key, data FROM state_values WHERE kind = ?", (kind,)))


needs_machine_code = pytest.mark.skipif(not machine_code.is_available(), reason="needs a C compiler")


@pytest.mark.slow
@pytest.mark.parametrize("columns", [False, pytest.param(True, marks=needs_machine_code)])
@pytest.mark.parametrize("every", [1, 3, 8])
def test_restart_at_any_point_equals_no_restart(contract, sender, merged, now, connection, every, columns):
    made = contract()
    steady, restarted = (evaluator_of(made, columns=columns) for _ in range(2))
    store = EvaluatorStore(connection)
    taken = 0
    for step, (time, request) in enumerate(script(sender, merged, now)):
        for evaluator in (steady, restarted):
            take(evaluator, time, request)
        assert same(verdicts_of(restarted, time), verdicts_of(steady, time))
        written(store, restarted, connection)
        if step % every == 0:
            taken += restarted.taken_as_columns
            restarted, store = evaluator_of(made, columns=columns), EvaluatorStore(connection)
            store.restore(restarted)
            assert same(verdicts_of(restarted, time), verdicts_of(steady, time))
    assert restarted.states["policy"].series.keys() == steady.states["policy"].series.keys()
    assert (taken > 0) == (columns and every > 1)


def in_rows(contract: Any, sender: Any, now: float, count: int = 40) -> tuple[Evaluator, list[Any]]:
    """An evaluator with a stream of each of so many processes in a row, and the processes."""
    evaluator, senders = Evaluator([contract]), [sender(instance=str(number), slice="code") for number in range(count)]
    for step in range(2):
        for source in senders:
            take(evaluator, now + step, source.request(now + step, [0.5] * 3))
    assert not evaluator.states["policy"].streams.alone
    return evaluator, senders


@needs_machine_code
def test_rows_of_streams_are_saved_in_blocks_that_changed(contract, sender, now, connection):
    evaluator, senders = in_rows(contract(), sender, now)
    store = EvaluatorStore(connection)
    written(store, evaluator, connection)
    blocks = values(connection, "rows")
    assert [*blocks] == [0, 1]
    assert len(values(connection, "streams")) == 0
    take(evaluator, now + 2, senders[39].request(now + 2, [0.5]))
    written(store, evaluator, connection)
    after = values(connection, "rows")
    assert [after[block] == blocks[block] for block in (0, 1)] == [True, False]
    evaluator.evaluate(now + 10**5)
    assert evaluator.stream_count == 0
    written(store, evaluator, connection)
    assert len(values(connection, "rows")) == 0


@needs_machine_code
def test_a_stream_that_leaves_its_row_is_saved_once(contract, sender, now, connection):
    """While it takes points by itself it is not in the block; with an earlier writer it is in both, and is one."""
    evaluator, senders = in_rows(contract(), sender, now, 2)
    store = EvaluatorStore(connection)
    written(store, evaluator, connection)
    evaluator.ingest_metrics(senders[0].request(now + 2, [0.5]), now + 2)  # not as columns
    assert len(evaluator.states["policy"].streams.alone) == 1
    senders[1].restart(now + 2)
    for step in (2, 3):
        take(evaluator, now + step, senders[1].request(now + step, [0.5]))
    written(store, evaluator, connection)
    assert len(values(connection, "streams")) == 2
    again = restored(connection, contract())
    assert again.stream_count == 2
    found, expected = (
        {key: to_json(stream) for key, stream in streams_of(either).items()} for either in (again, evaluator)
    )
    assert found == expected
    assert sorted(len(of.writers) for of in streams_of(again).values()) == [1, 2]


@needs_machine_code
def test_a_row_without_a_series_is_a_stream_that_takes_points_by_itself(contract, sender, now, connection):
    """A slice that was redefined has no series any more: its senders' next points count from where they were."""
    evaluator, senders = in_rows(contract(), sender, now)
    written(EvaluatorStore(connection), evaluator, connection)
    changed = contract(slices={"code": {"where": {"task": "another"}}})
    again, store = Evaluator([changed]), EvaluatorStore(connection)
    store.restore(again)
    assert len(again.states["policy"].streams.alone) == again.stream_count == 40
    written(store, again, connection)
    assert len(values(connection, "rows")) == 0
    for source in senders:
        again.ingest_metrics(source.request(now + 2, [0.5]), now + 2)
    assert [window.total for window in windows_of(again, now + 2).values()] == [40]


@needs_machine_code
def test_a_series_that_is_new_is_not_taken_for_one_that_is_gone(contract, sender, now, connection):
    evaluator, _ = in_rows(contract(), sender, now)
    store = EvaluatorStore(connection)
    written(store, evaluator, connection)
    (key,) = evaluator.states["policy"].series
    evaluator.states["policy"]._forget([key])
    written(store, evaluator, connection)
    evaluator.ingest_metrics(sender(slice="all", instance="new").request(now + 2, [0.5]), now + 2)
    written(store, evaluator, connection)
    again = restored(connection, contract())
    assert again.stream_count == 41
    assert not again.states["policy"].streams.row_of


@pytest.mark.slow
@needs_machine_code
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_blocks_of_rows_are_refused_or_rows(contract, sender, now, data):
    evaluator, _ = in_rows(contract(), sender, now, 3)
    database = sqlite3.connect(":memory:", isolation_level=None)
    written(EvaluatorStore(database), evaluator, database)
    (content,) = values(database, "rows").values()
    database.close()
    at = data.draw(st.integers(0, len(content)))
    damaged = content[:at] + data.draw(st.binary(max_size=8)) + content[at + data.draw(st.integers(0, 8)) :]
    with suppress(ValueError):
        for _, stream in decode_rows(damaged).streams():
            read_json(PointStream, to_json(stream))


def test_who_was_silent_before_a_restart_still_is(contract, sender, now, connection):
    """The hours in which nobody listened do not count as silence; those before do, so that NO_DATA never becomes PASS.

    Who was heard until the end has all its patience again.
    """
    made = contract()
    heartbeat = made.observability.heartbeat
    first, store = Evaluator([made]), EvaluatorStore(connection)
    source = sender()
    for step in range(5):
        first.ingest_metrics(source.request(now + step, np.full(2000, 1e-4)), now + step)
    for later, status in ((5.0, "PASS"), (5.0 + 3 * heartbeat, "NO_DATA")):
        before = {verdict.status for verdict in verdicts_of(first, now + later) if verdict.cell.slice == "all"}
        assert before == {status}
        written(store, first, connection)
        down = now + later + 120.0
        again = restored(connection, made)
        again.listening(down)
        after = [verdict for verdict in verdicts_of(again, down + 1.0) if verdict.cell.slice == "all"]
        assert {verdict.status for verdict in after} == {status}
        if status == "NO_DATA":
            assert "no report for" in after[0].reason
        again.ingest_metrics(source.request(down + 2.0, np.full(2000, 1e-4)), down + 2.0)
        assert {verdict.status for verdict in verdicts_of(again, down + 2.0) if verdict.cell.slice == "all"} == {"PASS"}


def test_that_a_run_ended_and_what_is_refused_survive_a_restart(contract, sender, now, connection):
    first, store, source = Evaluator([contract(slices={})]), EvaluatorStore(connection), sender()
    first.ingest_metrics(source.request(now, np.full(2000, 1e-4)), now)
    first.states["policy"].recorders.owed = {SeriesKey("kc.drift.tv_token", "code", "a" * 12, "b" * 12): {"gpu-8": 0.0}}
    gone = {"b" * 12: {"0": LastReport(now)}, "c" * 12: {"gpu-8": LastReport(now, 2, ("code",), moved=now)}}
    first.states["policy"].recorders.gone = gone
    first.ingest_metrics(sender(instance="gpu-7").request(now + 3600, [0.1]), now)
    written(store, first, connection)
    again = restored(connection, contract(slices={}))
    assert again.missing("policy", now + 1.0) == first.missing("policy", now + 1.0) != []
    assert again.states["policy"].recorders.gone == gone
    assert again.states["policy"].recorders.owed == first.states["policy"].recorders.owed != {}
    again.listening(now + 1.0)
    (verdict,) = verdicts_of(again, now + 500.0)
    assert verdict.reason.startswith("the run ended"), verdict.reason


def test_only_what_changed_is_written(contract: Any, sender: Any, now: float, connection: sqlite3.Connection) -> None:
    evaluator, store = Evaluator([contract()]), EvaluatorStore(connection)
    senders = [sender(instance=str(i)) for i in range(50)]
    for source in senders:
        evaluator.ingest_metrics(source.request(now, [0.5]), now)
    written(store, evaluator, connection)
    before = connection.total_changes
    written(store, evaluator, connection)
    assert connection.total_changes == before
    evaluator.ingest_metrics(senders[0].request(now + 1, [0.5]), now + 1)
    written(store, evaluator, connection)
    assert connection.total_changes - before <= 5


def test_what_was_counted_for_a_slice_that_is_redefined_is_gone(contract, sender, now, connection):
    """Windows and evidence of the former slice are no verdict on the new one; other slices go on."""
    evaluator, store = Evaluator([contract()]), EvaluatorStore(connection)
    for source in (sender(), sender(slice="code", instance="1")):
        evaluator.ingest_metrics(source.request(now, np.full(2000, 1e-4)), now)
    verdicts_of(evaluator, now)
    written(store, evaluator, connection)
    for task, status in (("code", "PASS"), ("other", "NO_DATA")):
        again = restored(connection, contract(slices={"code": {"where": {"task": task}}}))
        found = {verdict.cell.slice: verdict.status.value for verdict in verdicts_of(again, now + 1)}
        assert found == {"all": "PASS", "code": status}
    assert {cell.slice for cell in again.states["policy"].evidence.cells} == {"all"}


def test_evidence_against_a_clause_that_measures_something_else_now_is_gone(contract, sender, now, connection):
    clause = {"id": "tv", "metric": "tv_token", "unit": "token", "limit": 0.004}
    evaluator, store = Evaluator([contract(slices={}, statistical=[clause])]), EvaluatorStore(connection)
    evaluator.ingest_metrics(sender().request(now, np.full(2000, 0.5)), now)
    assert [verdict.status.value for verdict in verdicts_of(evaluator, now)] == ["FAIL"]
    written(store, evaluator, connection)
    for change, failing in (({"description": "why"}, True), ({"metric": "tv_token", "unit": "sequence"}, False)):
        again = restored(connection, contract(slices={}, statistical=[{**clause, **change}]))
        assert bool(again.states["policy"].evidence.alarmed) == failing


@pytest.mark.slow
def test_the_file_does_not_grow_with_time(contract, sender, now, connection):
    evaluator, store = Evaluator([contract()]), EvaluatorStore(connection)
    for step in range(200):
        time = now + 60.0 * step
        evaluator.ingest_metrics(sender(inference=f"{step // 20:012d}", start=time - 1).request(time, [0.5]), time)
        evaluator.evaluate(time)
        written(store, evaluator, connection)
    panes, series = (
        connection.execute(f"SELECT count(*) FROM evaluator_{name}").fetchone()[0] for name in ("panes", "series")
    )
    assert panes <= 40
    assert series == evaluator.series_count <= 6
    assert len(values(connection, "streams")) == evaluator.stream_count <= 6


def test_contracts_and_slices_that_are_gone_are_left_out(contract, sender, now, connection):
    evaluator, store = Evaluator([contract()]), EvaluatorStore(connection)
    for slice in ("all", "code"):
        evaluator.ingest_metrics(sender(slice=slice).request(now, [0.5]), now)
    store.save(evaluator, UnitOfWork())
    smaller = restored(connection, contract(slices={}))
    assert [key.slice for key in smaller.states["policy"].series] == ["all"]
    stranger = restored(connection, contract(metadata={"name": "stranger", "version": 1, "owner": "x"}))
    assert not stranger.series_count


def test_windows_of_another_length_keep_their_content(contract, sender, now, connection):
    evaluator, store, source = Evaluator([contract()]), EvaluatorStore(connection), sender()
    for step in range(10):
        evaluator.ingest_metrics(source.request(now + 30 * step, [0.5, 0.25]), now + 30 * step)
    store.save(evaluator, UnitOfWork())
    changed = Evaluator([contract(observability={"window": "10m", "long_window": "2h"})])
    again = EvaluatorStore(connection)
    again.restore(changed)
    assert [window.total for window in windows_of(changed, now + 280, 600).values()] == [20]
    again.save(changed, UnitOfWork())
    third = restored(connection, changed.states["policy"].contract)
    assert [window.total for window in windows_of(third, now + 280, 600).values()] == [20]


@pytest.mark.parametrize("version", [16, 99])
def test_another_schema_version_is_refused(connection: sqlite3.Connection, version: int) -> None:
    EvaluatorStore(connection)
    if version > SCHEMA_VERSION:
        connection.execute("UPDATE state_values SET data = ? WHERE kind = 'schema version'", (str(version),))
    else:
        connection.execute("DELETE FROM state_values")
        connection.execute("CREATE TABLE evaluator_meta (key TEXT PRIMARY KEY, value TEXT NOT NULL)")
    with pytest.raises(
        StateError, match=f"version {version}, this program reads {SCHEMA_VERSION}; use the program that wrote it"
    ):
        EvaluatorStore(connection)


@pytest.mark.parametrize(
    "table", ["streams", "panes", "facts", "evidence", pytest.param("rows", marks=needs_machine_code)]
)
def test_damaged_rows_are_refused(contract, sender, now, connection, table):
    evaluator, store = evaluator_of(contract(), columns=table == "rows"), EvaluatorStore(connection)
    take(evaluator, now, sender().request(now, [0.5]))
    evaluator.evaluate(now)
    store.save(evaluator, UnitOfWork())
    damage = b"\x00\x01"
    if table == "panes":
        connection.execute("UPDATE evaluator_panes SET data = ?", (damage,))
    else:
        connection.execute("UPDATE state_values SET data = ? WHERE kind = ?", (damage, table))
    with pytest.raises(DamagedStateError, match="damaged"), reading_state(connection):
        restored(connection, contract())


widths = st.sampled_from([2**8, 2**16, 2**32]).flatmap(lambda most: st.integers(most - 1, most))
counts = st.lists(widths | st.integers(0, 2**53), max_size=5).map(lambda values: np.array(values, dtype=np.int64))
finite = st.floats(allow_nan=False, allow_infinity=False)


buckets = st.builds(Buckets, st.integers(-500, 500), counts)
histograms = st.builds(
    Histogram, st.integers(0, 20), st.integers(0, 2**53), finite, st.integers(0, 2**53), buckets, buckets,
    finite, finite, finite, st.booleans(),
)  # fmt: skip
explicit = st.builds(Histogram.explicit, st.just((1.0, 2.0)), st.just(np.array([1, 2, 3])), finite, finite, finite)


def said(histogram: Histogram | None) -> object:
    if histogram is None:
        return None
    sides = [
        (side.offset * (side.counts.size > 0), side.counts.tolist())
        for side in (histogram.positive, histogram.negative)
    ]
    return repr(replace(histogram, positive=sides[0], negative=sides[1]))


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.lists(histograms | explicit, min_size=1, max_size=5))
def test_histograms_and_streams_survive_encoding(values: list[Histogram]) -> None:
    back = map(decode_histogram, encode_histograms(HistogramColumns.of(values)))
    assert [*map(said, back)] == [*map(said, values)]
    for value in values:
        stream = PointStream(12.5, [LatestValue(3, 4, value), LatestValue(5, 6, value, values[0])], [7, 8], 9)
        again = read_json(PointStream, to_json(stream))
        assert (again.heard, again.times, again.forgotten) == (12.5, [7, 8], 9)
        found, expected = (
            [(last.start, last.time, said(last.histogram), said(last.doubted)) for last in of.writers]
            for of in (again, stream)
        )
        assert found == expected


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_are_no_state(data: bytes) -> None:
    for decode in (decode_histogram, decode_rows, partial(read_json, PointStream)):
        with suppress(ValueError):
            decode(data)


def test_evidence_survives_a_restart_where_the_limit_is_the_same(contract, sender, now, connection):
    made, source = contract(), sender()
    evaluator, store = Evaluator([made]), EvaluatorStore(connection)
    for step, mean in enumerate((0.02, 0.001)):
        evaluator.ingest_metrics(source.request(now + step, RNG.beta(1, 1 / mean, 4000)), now + step)
        evaluator.evaluate(now + step)
        written(store, evaluator, connection)
    before = evaluator.states[made.name].evidence
    after = restored(connection, made)
    found = after.states[made.name].evidence
    assert (found.most, found.cells.keys()) == (before.most, before.cells.keys())
    ((cell, kept),) = found.cells.items()
    held = before.cells[cell]
    assert kept.log_sums.tolist() == held.log_sums.tolist()
    assert (kept.failing, kept.peak, kept.pane, kept.test) == (held.failing, now, held.pane, held.test)
    assert kept.after is not None
    assert kept.after.count == 4000
    other = restored(
        connection, contract(statistical=[{"id": "token-tv", "metric": "tv_token", "unit": "token", "limit": 0.005}])
    )
    assert other.states[made.name].evidence.cells == {}
    assert len(values(connection, "evidence")) == 0


def test_a_clock_that_went_back_while_nobody_ran_is_noticed(contract, sender, now, connection):
    """What was saved under a clock that was ahead counts once after the restart, as of then, also in the next one."""
    source, evaluator, store = sender(), Evaluator([contract()]), EvaluatorStore(connection)
    evaluator.ingest_metrics(source.request(now + 3000, [0.2] * 200), now + 3000)
    written(store, evaluator, connection)
    for step in (1, 2):
        evaluator, store = Evaluator([contract()]), EvaluatorStore(connection)
        store.restore(evaluator)
        at = now + 10.0 * step
        assert not evaluator.ingest_metrics(source.request(at, [0.2] * 50), at).rejected
        assert evaluator.events["clock_went_back"] == (step == 1)
        (verdict, *_) = verdicts_of(evaluator, at)
        assert verdict.samples == 200 + 50 * step
        written(store, evaluator, connection)
    panes = connection.execute("SELECT max(pane * width) FROM evaluator_panes").fetchone()[0]
    assert panes <= at


def test_buckets_that_others_replaced_are_saved_when_the_clock_goes_back(contract, sender, now, connection):
    """A pane that was emptied for a series of other buckets, of which nothing moves with the clock."""
    evaluator, store = Evaluator([contract()]), EvaluatorStore(connection)
    source, other = sender(), sender(instance="1", cumulative=False, edges=(0.01, 0.1))
    evaluator.ingest_metrics(source.request(now, [0.2] * 20), now)
    written(store, evaluator, connection)
    for at, count in ((now + 400.0, 30), (now - 100.0, 31)):
        evaluator.ingest_metrics(other.request(at, [0.2] * count), at)
        verdicts = verdicts_of(evaluator, at)
        written(store, evaluator, connection)
    again = restored(connection, contract())
    assert same(verdicts_of(again, now - 100.0), verdicts)
    assert verdicts[0].samples == 61


@pytest.mark.parametrize(("scale", "offset"), [(3, 2**40), (3, -(2**40)), (20, 2**40), (40, 0), (-40, 0)])
def test_a_bucket_that_nobody_can_have_observed_is_damage(scale: int, offset: int) -> None:
    """Added up with others it would be an array of every bucket between, which ends whoever tries."""
    side = Buckets(offset, np.array([3]))
    value = Histogram(scale, 3, 0.3, 0, side, Buckets.empty(), 0.1, 0.1, 0.0)
    stream = PointStream(1.0, [LatestValue(3, 4, Histogram.empty(20), value)], [], 0)
    with pytest.raises(ValueError, match="not a histogram: bucket"):
        read_json(PointStream, to_json(stream))
    with pytest.raises(ValueError, match="not a histogram: bucket"):
        decode_histogram(*encode_histograms(HistogramColumns.of([value])))
