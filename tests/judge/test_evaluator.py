"""The evaluator from OTLP to verdicts: what its windows hold, which cells it has, what it counts and what it bounds."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from kc_otel.judge.contract_state import STREAMS_PER_SERIES
from kc_otel.judge.evaluator import Evaluator
from kc_otel.judge.series import LONG, Heard
from kc_otel.judge.verdict import Cell, Status
from tests.judge.conftest import NOW, counted, evaluator_of, info_request, merge, take
from tests.tools.verdicts import verdicts_of, window_of

TRAIN, INFERENCE, NEWER = "aaaaaaaaaaaa", "bbbbbbbbbbbb", "cccccccccccc"
RNG = np.random.default_rng(3)


def small(size: int) -> Any:
    """Total variations well below the limit of 0.004."""
    return RNG.beta(1, 2000, size)


def large(size: int) -> Any:
    """Total variations well above it."""
    return RNG.beta(1, 50, size)


def cell(slice: str = "all", inference: str = INFERENCE) -> Cell:
    return Cell("policy", "token-tv", slice, TRAIN, inference)


def statuses(evaluator: Evaluator, now: float) -> dict[Cell, Status]:
    return {verdict.cell: verdict.status for verdict in verdicts_of(evaluator, now)}


def exact(binned: Any, values: Any) -> bool:
    """Whether bins hold exactly these values, as far as bins can tell."""
    ordered = np.sort(np.asarray(values, dtype=float))
    repeated = [np.repeat(edge, binned.count) for edge in (binned.lower, binned.upper)]
    fits = (repeated[0] <= ordered * (1 + 1e-12)).all() and (ordered <= repeated[1] * (1 + 1e-12)).all()
    return bool(binned.total == len(ordered) and fits and np.isclose(binned.sum, ordered.sum()))


def gauge_of(step: float, now: float, contract: str = "policy") -> Any:
    message = ExportMetricsServiceRequest()
    metric = message.resource_metrics.add().scope_metrics.add().metrics.add(name="kc.train.step")
    point = metric.gauge.data_points.add(time_unix_nano=int(now * 1e9), as_double=step)
    for name, value in (("contract", contract), ("kernel.train", TRAIN), ("kernel.inference", INFERENCE)):
        point.attributes.add(key=f"kc.{name}").value.string_value = value
    return message


@pytest.mark.parametrize("columns", [False, True])
def test_batches_that_a_recorder_drops_are_missing_while_it_drops_more(contract, sender, now, columns):
    """Of the kernels that it reports, though another recorder of them passes; not rollouts that training left out."""
    evaluator, right = evaluator_of(contract(slices={}), columns=columns), sender()
    for step in range(1, 13):
        at = now + 10.0 * step
        take(evaluator, at, right.request(at, small(5000)))
        for instance, reason, count in (("gpu-7", "measure-failed", min(step, 6)), ("gpu-8", "pair-expired", step)):
            dropped = counted(reason, count, NOW, at, metric="kc.recorder.dropped", instance=instance)
            take(evaluator, at, info_request(at, 1, instance), dropped)
    assert statuses(evaluator, at) == {cell(): Status.PASS}
    assert evaluator.counters["dropped"] == 6
    (row,) = evaluator.missing("policy", at)
    assert (row.outcome, (row.kernel_train, row.kernel_inference), row.senders, row.since) == (
        "dropped",
        ("", INFERENCE),
        1,
        now + 10.0,
    )
    assert row.text == "its recorder dropped batches (measure-failed); the recorder's log says why; from gpu-7"
    window = evaluator.states["policy"].contract.observability.window
    assert evaluator.missing("policy", now + 60.0 + window) == [row]
    assert evaluator.missing("policy", now + 61.0 + window) == []


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize(
    ("metric", "name", "usual"),
    [("weights_lag", "kc.weights.lag", 0), ("weights_lag", "kc.weights.lag", 3),
     ("weights_mismatch", "kc.weights.mismatch", 0)],
)  # fmt: skip
def test_a_maximum_that_is_within_its_limit_again_passes(contract, sender, now, columns, metric, name, usual):
    """A recorder tells its largest value of all time; a window's is known, too, if its sum is 0 or it is whole."""
    made = contract(runtime=[{"id": "most", "metric": metric, "statistic": "max", "limit": usual}], slices={})
    evaluator, source = evaluator_of(made, columns=columns), sender(name, zero=0.5 if "lag" in name else 2.0**-30)
    found = []
    for step, value in enumerate((usual, usual + 1, usual, usual)):
        at = now + 400.0 * step
        for seconds in (1.0, 2.0):
            take(evaluator, at + seconds, source.request(at + seconds, [value, usual]))
        found += [v.status for v in verdicts_of(evaluator, at + 3.0) if v.cell.clause == "most"]
    assert found == [Status.PASS, Status.FAIL, Status.PASS, Status.PASS]


def test_an_evaluation_has_the_trainers_step(contract: Any, now: float) -> None:
    """The one that was told last, of its pair of kernels; what is no step is refused."""
    evaluator = Evaluator([contract()])
    for step in (7, 9, 8):  # a run that went back to its checkpoint
        evaluator.ingest_metrics(gauge_of(step, now), now)
    for step in (-1.0, math.nan, 1e300):
        assert evaluator.ingest_metrics(gauge_of(step, now), now).rejected == 1
    assert evaluator.ingest_metrics(gauge_of(1, now, "other"), now).rejected == 1
    (found,) = evaluator.evaluate(now).values()
    assert found.step_of(cell()) == 8
    assert found.step_of(cell(inference=NEWER)) is None
    assert evaluator.counters == {"accepted": 3, "malformed": 3, "unknown_contract": 1}


@pytest.mark.parametrize("cumulative", [True, False])
def test_window_content_equals_the_samples_in_it(contract: Any, sender: Any, now: float, cumulative: bool) -> None:
    evaluator, source = Evaluator([contract()]), sender(cumulative=cumulative)
    sent = [(now + 20.0 * step, RNG.lognormal(-7, 2, 40).clip(0, 1)) for step in range(1, 40)]
    for time, values in sent:
        evaluator.ingest_metrics(source.request(time, values), time)
        for window, width in ((300.0, 30.0), (3600.0, 300.0)):
            panes = window / width
            inside = [values for at, values in sent if at <= time and at // width > time // width - panes]
            assert exact(window_of(evaluator, cell(), time, window), np.concatenate(inside))
    assert evaluator.counters == {"accepted": 39}


def test_processes_of_one_pair_merge(contract: Any, sender: Any, now: float) -> None:
    evaluator = Evaluator([contract()])
    senders = [sender(instance=str(i)) for i in range(3)]
    values = [small(100) for _ in range(6)]
    evaluator.ingest_metrics(merge(*[s.request(now + 5, v) for s, v in zip(senders, values, strict=False)]), now + 5)
    senders[1].restart(now + 6)
    again = [s.request(now + 10, v) for s, v in zip(senders, values[3:], strict=True)]
    evaluator.ingest_metrics(merge(*again), now + 10)
    assert exact(window_of(evaluator, cell(), now + 10), np.concatenate(values))
    assert evaluator.stream_count == 3
    assert evaluator.series_count == 1
    assert evaluator.events["reset"] == 1


@pytest.mark.parametrize("columns", [False, True])
def test_a_recorder_behind_two_collectors_counts_once(contract: Any, sender: Any, now: float, columns: bool) -> None:
    """Each Collector adds its host's name to what it forwards; the recorder has made up its instance id."""
    evaluator = evaluator_of(contract(), columns=columns)
    source = sender(instance="1b671a64-40d5-491e-99b0-da01ff1f3341")
    for turn in range(4):
        request = source.request(now + 10 * turn, small(50))
        host = request.resource_metrics[0].resource.attributes.add(key="host.name")
        host.value.string_value = f"gateway-{turn % 2}"
        evaluator.ingest_metrics(request, now + 10 * turn)
    assert window_of(evaluator, cell(), now + 30).total == 4 * 50
    assert evaluator.stream_count == 1
    other = source.request(now + 30, small(50))
    other.resource_metrics[0].resource.attributes.add(key="service.namespace").value.string_value = "other"
    evaluator.ingest_metrics(other, now + 30)
    assert evaluator.stream_count == 2, "containers of a pod may share its id"


@pytest.mark.parametrize("columns", [False, True])
def test_two_senders_under_one_identity_are_told(contract: Any, sender: Any, now: float, columns: bool) -> None:
    """Without start times their counts go back and forth: none counts twice, and both are told what to change."""
    evaluator = evaluator_of(contract(), columns=columns)
    senders = [sender(start=0.0) for _ in range(2)]
    for turn in range(8):
        for source, size in zip(senders, (30, 10), strict=True):
            time = now + 10.0 * turn + size / 10.0
            said = take(evaluator, time, source.request(time, small(size)))
    assert said.rejected == 0
    assert "give each its own service.instance.id" in said.message
    assert evaluator.counters["two_writers"] >= 7
    assert window_of(evaluator, cell(), time).total <= 8 * 40


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize(
    ("ahead", "said", "why"),
    [
        (-3600.0, "older than the short window when they arrive; check the sender's clock", "points are 1h old when"),
        (-600.0, "older than the short window when they arrive; check the sender's clock", ""),
        (-7200.0, "older than the long window; check the sender's clock", "points are 2h old when they arrive"),
        (3600.0, "from the future; check the sender's clock", "points are 1h ahead of this clock"),
        (-30.0, "", ""),
        (29.0, "", ""),
        (31.0, "from the future; check the sender's clock", "points are 31s ahead of this clock"),
    ],
)
def test_a_sender_whose_clock_is_wrong_is_told(contract, sender, now, ahead, said, why, columns):
    """In the answer, in the counters, and in the verdict where it leaves nothing to judge."""
    evaluator, source = evaluator_of(contract(slices={}), columns=columns), sender(start=now + ahead)
    for step in range(9):
        at = now + 10 * step
        answer = take(evaluator, at, source.request(at + ahead, small(400).clip(1e-5)))
        assert said in answer.message if said else not answer.message
    (verdict,) = verdicts_of(evaluator, now + 80)
    assert (verdict.status is Status.NO_DATA) == bool(why)
    assert why in verdict.reason
    assert sum(evaluator.counters[outcome] for outcome in ("behind", "late", "future")) == (9 if said else 0)
    assert evaluator.taken_as_columns == (8 if columns and ahead in {-600.0, -30.0, 29.0} else 0)


def test_a_replaced_version_that_is_still_exported_disappears(contract: Any, sender: Any, now: float) -> None:
    """A cumulative sender repeats a retired pair's last value for ever; without new observations it is not current."""
    evaluator, old, new = Evaluator([contract(slices={})]), sender(), sender(inference=NEWER)
    evaluator.ingest_metrics(old.request(now, large(500)), now)
    for step in range(1, 40):
        time = now + 10.0 * step
        evaluator.ingest_metrics(old.request(time), time)
        evaluator.ingest_metrics(new.request(time, small(500)), time)
    assert statuses(evaluator, time) == {cell(inference=NEWER): Status.PASS}


def test_silence_is_no_data_after_the_heartbeat(contract: Any, sender: Any, now: float) -> None:
    evaluator, source = Evaluator([contract(slices={})]), sender()
    for step in range(6):
        evaluator.ingest_metrics(source.request(now + 30 * step, small(5000)), now + 30 * step)
    last = now + 150
    assert statuses(evaluator, last + 89) == {cell(): Status.PASS}
    (verdict,) = verdicts_of(evaluator, last + 91)
    assert (verdict.cell, verdict.status) == (cell(), Status.NO_DATA)
    assert "no report for 1m31s (heartbeat 1m)" in verdict.reason
    assert statuses(evaluator, last + 90_000) == {cell(): Status.NO_DATA}


@pytest.mark.slow
@pytest.mark.parametrize("broken", [True, False])
@pytest.mark.parametrize("beside", [True, False])
def test_a_broken_pair_that_falls_silent_beside_another_is_no_data(contract, sender, now, broken, beside):
    """Nobody has seen it mended: its alert must not end. Where the other one took its place, it is gone at once."""
    evaluator, old, new = Evaluator([contract(slices={})]), sender(), sender(inference=NEWER)
    window = evaluator.states["policy"].contract.observability.window
    for step in range(12):
        time = now + 10.0 * step
        evaluator.ingest_metrics(old.request(time, large(500) if broken else small(5000)), time)
        if beside:
            evaluator.ingest_metrics(new.request(time, small(5000)), time)
        found = statuses(evaluator, time)
    assert found[cell()] is (Status.FAIL if broken else Status.PASS)
    for step in range(12, 26):
        time = now + 10.0 * step
        evaluator.ingest_metrics(new.request(time, small(5000)), time)
        found = statuses(evaluator, time)
    held = {cell(): Status.NO_DATA} if broken and beside else {}
    assert found == {cell(inference=NEWER): Status.PASS, **held}
    if held:
        (verdict,) = (candidate for candidate in verdicts_of(evaluator, time) if candidate.cell == cell())
        assert "; others report, and it was in breach" in verdict.reason
    evaluator.ingest_metrics(new.request(time + window, small(5000)), time + window)
    assert statuses(evaluator, time + window) == {cell(inference=NEWER): Status.PASS}


def test_a_pair_whose_breach_was_refuted_is_not_missed_beside_another(contract: Any, sender: Any, now: float) -> None:
    evaluator, old, new = Evaluator([contract(slices={})]), sender(), sender(inference=NEWER)
    statuses_of_old = []
    for step in range(70):
        time = now + 10.0 * step
        if step < 50:
            evaluator.ingest_metrics(old.request(time, large(500) if step < 12 else small(5000)), time)
        evaluator.ingest_metrics(new.request(time, small(5000)), time)
        statuses_of_old.append(statuses(evaluator, time).get(cell()))
    assert (statuses_of_old[11], statuses_of_old[49]) == (Status.FAIL, Status.PASS)
    assert Status.NO_DATA not in statuses_of_old


@pytest.mark.slow
def test_a_slow_exporter_is_not_silent_between_two_reports(contract: Any, sender: Any, now: float) -> None:
    """Reports that come as rarely as the heartbeat do not flap between PASS and NO_DATA."""
    evaluator, source = Evaluator([contract(slices={})]), sender()
    seen = set()
    for second in range(0, 1200, 5):
        time = now + second
        if second % 60 == 0:
            evaluator.ingest_metrics(source.request(time + 0.3, small(4000)), time + 0.3)
        seen.add(statuses(evaluator, time + 0.9)[cell()])
    assert Status.NO_DATA not in seen
    assert Status.PASS in seen


def test_patience_follows_the_reports_that_are_due() -> None:
    """Requests that come in bursts and one long outage do not change when the next report is due."""
    heard = Heard(0.0)
    assert heard.patience(10) == 20
    time = 0.0
    for gap in (30, 0.1, 0.1, 30, 0.1, 0.1, 900, 0.1, 0.1, 30, 0.1):
        time += gap
        heard.hear(time, 10)
    assert heard.patience(10) == pytest.approx(40)
    assert len(heard.gaps) <= 8


def test_what_nobody_asked_for_is_counted_and_told(contract: Any, sender: Any, now: float) -> None:
    """Unknown contracts and slices are refused with a reason for the sender; foreign metrics are passed over."""
    evaluator = Evaluator([contract()])
    outcome = evaluator.ingest_metrics(
        merge(
            sender(contract="other").request(now, [0.1]),
            sender(slice="poetry").request(now, [0.1]),
            sender("http.duration").request(now, [0.1]),
            sender(attributes={"kc.slice": "all"}).request(now, [0.1]),
            sender().request(now, [0.1]),
        ),
        now,
    )
    assert evaluator.counters == {
        "unknown_contract": 1, "unknown_slice": 1, "ignored": 1, "malformed": 1, "accepted": 1,
    }  # fmt: skip
    assert outcome.rejected == 3
    assert "contract 'other' is not loaded here; loaded: policy" in outcome.message
    assert "contract policy has no slice 'poetry'" in outcome.message


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize(("ahead", "outcome"), [(2460.0, "future"), (-600.0, "behind")])
def test_points_that_no_verdict_has_are_said_while_they_come(contract, sender, now, columns, ahead, outcome):
    """Of whom, of which kernels, since when and why, though others of the same kernels pass; until a window is over."""
    evaluator = evaluator_of(contract(slices={}), columns=columns)
    right, wrong = sender(), sender(instance="gpu-7", start=now - 900)
    for step in range(12):
        at = now + 10.0 * step
        take(evaluator, at, right.request(at, small(5000)), wrong.request(at + ahead, large(500)))
    assert statuses(evaluator, at) == {cell(): Status.PASS}
    (row,) = evaluator.missing("policy", at)
    assert (row.outcome, (row.kernel_train, row.kernel_inference), row.senders, row.since) == (
        outcome,
        cell()[-2:],
        1,
        now,
    )
    assert row.text.endswith(f"({'41m ahead' if ahead > 0 else '10m old'}); from gpu-7")
    assert "check the sender's clock" in row.text
    window = evaluator.states["policy"].contract.observability.window
    assert evaluator.missing("policy", at + window) == [row]
    assert evaluator.missing("policy", at + window + 1.0) == []


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize(("window", "age", "late"), [(30, 45, True), (30, 28, True), (30, 20, False), (300, 285, True)])
def test_points_are_judged_on_the_short_window_or_said_to_be_too_old_for_it(
    contract, sender, now, columns, window, age, late
):
    """Also where the window is shorter than a minute, and at its end, from which an evaluation would miss some."""
    seen = {"window": f"{window}s", "long_window": "1h", "min_samples": 100, "heartbeat": "10s"}
    evaluator = evaluator_of(contract(slices={}, observability=seen), columns=columns)
    source = sender(start=now - 900)
    for step in range(12):
        at = now + 10.0 * step + 7.0
        answer = take(evaluator, at, source.request(at - age, small(500).clip(1e-5)))
        assert ("make observability.window longer" in answer.message) == late
        assert late or window_of(evaluator, cell(), at + 1.0, window).total >= 500
    assert evaluator.taken_as_columns == 11 * columns
    assert evaluator.counters["behind"] == 12 * late
    assert [row.outcome for row in evaluator.missing("policy", at + 60.0)] == ["behind"] * late


def test_points_that_are_refused_have_their_own_reason_and_many_senders_one_row(contract, sender, now):
    """A slice that is not there is named; of senders without end only the first have names."""
    evaluator = Evaluator([contract()])
    evaluator.ingest_metrics(sender(slice="poetry").request(now, [0.1]), now)
    for instance in range(200):
        evaluator.ingest_metrics(sender(instance=f"i{instance}").request(now + 100, [0.1]), now + 1)
    strange, future, others = evaluator.missing("policy", now + 2)
    assert strange.text == "contract policy has no slice 'poetry'; from 0"
    assert ((future.kernel_train, future.kernel_inference), future.senders) == (cell()[-2:], 63)
    assert future.text.endswith("(1m39s ahead); from i0; i1; i2; 60 more")
    assert ((others.kernel_train, others.kernel_inference), others.senders, others.outcome) == (("", ""), 1, "future")


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("start_time_unix_nano", 2**62, "its time is missing or before its start time"),
        ("sum", 1e9, "its sum 1e+09 does not fit its buckets"),
        ("scale", 30, "scale 30 is outside -2..20"),
    ],
)
def test_points_that_are_impossible_are_missing_of_their_kernels(contract, sender, now, columns, field, value, said):
    """They may be what a broken recorder measured; so are those of a temporality that nobody knows."""
    evaluator = evaluator_of(contract(name="policy"), contract(name="reward"), columns=columns)
    request, unsaid = sender(instance="gpu-7").request(now, [0.1]), sender(inference=NEWER).request(now, [0.1])
    setattr(request.resource_metrics[0].scope_metrics[0].metrics[0].exponential_histogram.data_points[0], field, value)
    unsaid.resource_metrics[0].scope_metrics[0].metrics[0].exponential_histogram.aggregation_temporality = 0
    take(evaluator, now, request, unsaid)
    found, other = evaluator.missing("policy", now + 1)
    assert (found.outcome, (found.kernel_train, found.kernel_inference), found.senders, found.since) == (
        "malformed",
        cell()[-2:],
        1,
        now,
    )
    assert found.text == f"a point of kc.drift.tv_token is impossible: {said}; from gpu-7"
    assert (other.outcome, (other.kernel_train, other.kernel_inference)) == ("malformed", (TRAIN, NEWER))
    assert evaluator.missing("reward", now + 1) == []


@pytest.mark.parametrize("columns", [False, True])
def test_points_of_no_contract_that_is_loaded_are_missing_of_each(contract, sender, now, columns):
    """A recorder that misspells its contract, or does not name it, may measure what each of them is about."""
    evaluator = evaluator_of(contract(name="policy"), contract(name="reward"), columns=columns)
    unnamed = sender(attributes={"kc.slice": "all"}).request(now, [0.1])
    take(evaluator, now, sender(contract="polcy").request(now, [0.1]), gauge_of(1, now, "polcy"), unnamed)
    for name in ("policy", "reward"):
        strange, nameless = evaluator.missing(name, now + 1)
        assert (strange.outcome, (strange.kernel_train, strange.kernel_inference)) == ("unknown_contract", cell()[-2:])
        assert strange.text == "contract 'polcy' is not loaded here; loaded: policy, reward; from 0"
        assert (nameless.outcome, (nameless.kernel_train, nameless.kernel_inference)) == ("malformed", ("", ""))
        assert nameless.text.startswith("a point of kc.drift.tv_token has no attribute kc.contract")


def test_a_kernel_that_finds_no_room_is_told_and_has_a_verdict(contract: Any, sender: Any, now: float) -> None:
    """Real drift of a version over the cap is no silence: its sender is told, and its cells are NO_DATA and say why."""
    evaluator = Evaluator([contract(observability={"max_series": 1, "min_samples": 100})])
    old, new = sender(), [sender(inference=NEWER), sender(inference=NEWER, slice="code")]
    assert evaluator.ingest_metrics(old.request(now, small(500)), now).message == ""
    for source in new:
        result = evaluator.ingest_metrics(source.request(now + 1, large(500)), now + 1)
        assert result.rejected == 0
        assert "max_series" in result.message
    assert evaluator.counters == {"accepted": 1, "unjudged": 2}
    verdicts = {verdict.cell: verdict for verdict in verdicts_of(evaluator, now + 2)}
    assert verdicts[cell()].samples == 500
    for slice in ("all", "code"):
        verdict = verdicts[cell(slice, NEWER)]
        assert verdict.status is Status.NO_DATA
        assert "max_series" in verdict.reason
    # Nothing judges these operators or quantities, so nothing is missed.
    assert evaluator.ingest_metrics(sender("kc.drift.k3").request(now + 2, [0.1]), now + 2).message == ""
    # Its version goes once it was silent for a window, and is judged once there is room.
    later = now + 3600 + 900
    evaluator.evaluate(later)
    assert not evaluator.states["policy"].unjudged
    evaluator.ingest_metrics(new[0].request(later + 1, large(500)), later + 1)
    evaluator.ingest_metrics(new[0].request(later + 2, large(500)), later + 2)
    assert statuses(evaluator, later + 3)[cell(inference=NEWER)] is Status.FAIL


@pytest.mark.slow
def test_who_invents_kernels_displaces_none_that_was_there(contract: Any, sender: Any, now: float) -> None:
    """A kernel that reports now and then keeps its verdict beside hundreds of new ones, which are bounded and told."""
    evaluator = Evaluator([contract(observability={"min_samples": 100})])
    honest, names = sender(), (f"{number:012d}" for number in range(10**6))
    for tick in range(12):
        at = now + 5 * tick
        if tick % 3 == 0:
            evaluator.ingest_metrics(honest.request(at, large(500)), at)
        told = [evaluator.ingest_metrics(sender(inference=next(names)).request(at, [0.5]), at) for _ in range(30)]
        assert statuses(evaluator, at)[cell()] is Status.FAIL
    assert "64 kernel pairs" in told[-1].message
    assert evaluator.counters["unjudged"] == 12 * 30 - 63
    found = verdicts_of(evaluator, at)
    assert Counter(verdict.cell.slice for verdict in found) == {"all": 64 + 64, "code": 8}, (
        "what has a series, what has no room"
    )
    assert sum("64 kernel pairs" in verdict.reason for verdict in found) == 64
    assert cell("code") in {verdict.cell for verdict in found}, "where none has anything, those that came first"


@pytest.mark.slow
def test_invented_kernels_keep_no_real_one_from_being_judged(contract: Any, sender: Any, now: float) -> None:
    """Of 64 pairs the one with the fewest observations gives way to one with twice as many, which is then judged."""
    evaluator = Evaluator([contract(observability={"min_samples": 100})])
    old, new, names = sender(), sender(inference=NEWER), (f"{number:012d}" for number in range(10**6))
    flood = [sender(inference=next(names)) for _ in range(63)]
    for step in range(8):
        at = now + 10 * step
        for source in (old, *flood, *(sender(inference=next(names)) for _ in range(80))):
            evaluator.ingest_metrics(source.request(at, large(500) if source is old else [0.5]), at)
        assert statuses(evaluator, at)[cell()] is Status.FAIL
        if step >= 4:
            evaluator.ingest_metrics(new.request(at, large(500)), at)
            assert statuses(evaluator, at)[cell(inference=NEWER)] is Status.FAIL
    gone = [verdict for verdict in verdicts_of(evaluator, at) if verdict.cell.kernel_inference == f"{0:012d}"]
    assert all("64 kernel pairs" in verdict.reason for verdict in gone)
    assert len(evaluator.states["policy"].newest["kc.drift.tv_token"]) == 64


@pytest.mark.parametrize("columns", [False, True])
def test_a_kernel_gives_no_room_to_one_with_fewer_observations(contract, sender, now, columns):
    """Also where what it observed last waits to be put into panes."""
    evaluator = evaluator_of(contract(slices={}, observability={"min_samples": 100, "max_series": 1}), columns=columns)
    old, new = sender(), sender(inference=NEWER)
    for step, (source, size) in enumerate([(old, 10), (old, 50), (new, 30)]):
        take(evaluator, now + step, source.request(now + step, np.full(size, 0.02)))
    assert statuses(evaluator, now + 3.0) == {cell(): Status.FAIL, cell(inference=NEWER): Status.NO_DATA}


def test_a_kernel_finds_room_once_others_are_silent(contract: Any, sender: Any, now: float) -> None:
    """Not one that was silent for a window gives way before: so a new version is judged when an old one has gone."""
    evaluator = Evaluator([contract(observability={"min_samples": 100})])
    senders = [sender(inference=f"{number:012d}") for number in range(64)]
    for number, source in enumerate(senders):
        evaluator.ingest_metrics(source.request(now + number, large(500)), now + number)
    new = sender(inference=NEWER)
    assert evaluator.ingest_metrics(new.request(now + 299, large(500)), now + 299).message
    assert statuses(evaluator, now + 299)[cell(inference=NEWER)] is Status.NO_DATA
    assert not evaluator.ingest_metrics(new.request(now + 300.5, large(500)), now + 300.5).message
    assert statuses(evaluator, now + 300.5)[cell(inference=NEWER)] is Status.FAIL
    # One that comes back finds no room either, until another is silent.
    assert evaluator.ingest_metrics(senders[0].request(now + 300.6, [0.5]), now + 300.6).message
    # What is dated back has none either, though it is older than the newest that are judged.
    back = [sender(inference=f"back-{number}") for number in range(3)]
    assert all(evaluator.ingest_metrics(source.request(now + 250, [0.5]), now + 300.7).message for source in back)
    # They are forgotten with their series, but for a few.
    evaluator.evaluate(now + 7200)
    assert (evaluator.series_count, len(evaluator.states["policy"].newest["kc.drift.tv_token"])) == (0, 8)


def test_streams_over_their_cap_are_refused(contract: Any, sender: Any, now: float) -> None:
    evaluator = Evaluator([contract(observability={"max_series": 1})])
    outcomes = [
        evaluator.ingest_metrics(sender(instance=str(i)).request(now, [0.5]), now)
        for i in range(STREAMS_PER_SERIES + 3)
    ]
    assert [outcome.rejected for outcome in outcomes] == [0] * STREAMS_PER_SERIES + [1] * 3
    assert "max_series" in outcomes[-1].message
    assert evaluator.stream_count == STREAMS_PER_SERIES


def test_gen_ai_histograms_are_judged_where_a_clause_names_them(contract: Any, sender: Any, now: float) -> None:
    made = contract(
        slices={"big": {"where": {"gen_ai.request.model": "big"}}, "tiny": {"where": {"gen_ai.request.model": "tiny"}}},
        statistical=[],
        runtime=[{"id": "ttft", "metric": "gen_ai.server.time_to_first_token", "statistic": "p90", "limit": "800ms"}],
        observability={"min_samples": 10},
    )
    evaluator = Evaluator([made])
    edges = (0.1, 0.2, 0.4, 0.8, 1.2, 1.6)
    source = sender(
        "gen_ai.server.time_to_first_token", edges=edges, attributes={"gen_ai.request.model": "big"}, start=now - 10
    )
    evaluator.ingest_metrics(source.request(now, [0.15] * 950 + [0.5] * 50), now)
    verdicts = verdicts_of(evaluator, now)
    assert [(v.cell.slice, v.status) for v in verdicts] == [
        ("all", Status.PASS), ("big", Status.PASS), ("tiny", Status.NO_DATA),
    ]  # fmt: skip
    assert verdicts[0].upper == pytest.approx(0.2)
    evaluator.ingest_metrics(source.request(now + 1, [1.5] * 9000), now + 1)
    assert [v.status for v in verdicts_of(evaluator, now + 1)][:2] == [Status.FAIL, Status.FAIL]


def test_other_buckets_are_refused_while_those_of_a_series_are_in_use(contract: Any, sender: Any, now: float) -> None:
    """One sender with bounds of its own is told so, and takes nothing of the window of the others."""
    evaluator = Evaluator([contract()])
    usual, other = sender(edges=(0.1, 0.5)), sender(edges=(0.2,), instance="1")
    evaluator.ingest_metrics(usual.request(now, [0.2] * 500), now)
    before = verdicts_of(evaluator, now + 1)
    for refused in (other, sender(instance="2")):
        result = evaluator.ingest_metrics(refused.request(now + 1, [0.3]), now + 1)
        assert result.rejected == 1
        assert "other bucket bounds" in result.message
    after = verdicts_of(evaluator, now + 1)
    assert [(v.status, v.samples) for v in after] == [(v.status, v.samples) for v in before]
    assert before[0].status is Status.FAIL
    assert evaluator.events["layout_changed"] == 0
    # A roll-out that changes them: they count once nobody has used the old ones for a short window.
    assert evaluator.ingest_metrics(other.request(now + 299, [0.3]), now + 299).rejected == 1
    assert evaluator.ingest_metrics(other.request(now + 301, [0.3]), now + 301).rejected == 0
    assert window_of(evaluator, cell(), now + 301).total == 3
    assert evaluator.events["layout_changed"] == 1


def test_a_clock_that_goes_forward_and_back_blinds_nothing(contract: Any, sender: Any, now: float) -> None:
    """After every clock was a day ahead and is right again, points count, windows age, and silence is noticed."""
    evaluator, day = Evaluator([contract()]), 86_400.0
    streams = [sender(start=now - 60), sender(instance="1", cumulative=False, start=now - 60)]
    for at in (now, now + day, now + day + 10):
        for source in streams:
            assert not evaluator.ingest_metrics(source.request(at, [0.2] * 200), at).rejected
        evaluator.evaluate(at)
    evaluator.ingest_metrics(sender(slice="unknown").request(at, [0.2]), at)
    back = now + 60
    for source in streams:
        assert not evaluator.ingest_metrics(source.request(back, [0.2] * 50), back).rejected
    assert evaluator.events["clock_went_back"] == 1
    (verdict, *_) = verdicts_of(evaluator, back)
    assert (verdict.status, verdict.samples) == (Status.FAIL, 700)
    assert window_of(evaluator, cell(), back + 310).total == 0
    assert "no report" in verdicts_of(evaluator, back + 310)[0].reason
    assert [missing.since for missing in evaluator.missing("policy", back)] == [back]
    assert evaluator.missing("policy", back + 310) == []
    assert not any(time > back for series in evaluator.states["policy"].series.values() for time in (series.newest,))


def test_invalid_input_is_counted_by_kernel_pair_and_reason_within_the_window(contract: Any, now: float) -> None:
    """They leave the window as time goes on, and are traffic of their kernel, of which no slice is known.

    A sender may name no pair.
    """
    evaluator = Evaluator([contract()])
    for reason, count, at, pair in (
        ("nan", 4, now, None), ("shift", 1, now, None), ("nan", 10, now + 60, None), ("nan", 3, now + 60, ("aa", "bb")),
    ):  # fmt: skip
        evaluator.ingest_metrics(counted(reason, count, now - 5, at, pair), at)
    assert evaluator.newest("policy")["all", "bb"] == (pytest.approx(now + 60), now + 60)
    named = {("aa", "bb"): {"nan": 3}}
    assert evaluator.invalid_input("policy", now + 61) == {("", ""): {"nan": 10, "shift": 1}, **named}
    assert evaluator.invalid_input("policy", now + 320) == {("", ""): {"nan": 6}, **named}
    assert evaluator.states["policy"].failed("all", now + 320, LONG) == {("", ""): {"nan": 10, "shift": 1}, **named}
    assert evaluator.invalid_input("policy", now + 400) == {}


def test_where_nothing_arrives_the_reason_names_what_does(contract: Any, sender: Any, now: float) -> None:
    """Input that fails its checks, other metrics, other kernels: not an endpoint, and not a process that has died."""
    evaluator = Evaluator([contract(slices={})])

    def reason(time: float, status: Status = Status.NO_DATA) -> str:
        (verdict,) = verdicts_of(evaluator, time)
        assert verdict.status is status
        return str(verdict.reason)

    assert reason(now).endswith(
        "nothing received for kc.drift.tv_token yet; does the recorder's OTLP endpoint point here?"
    )
    evaluator.ingest_metrics(sender("kc.drift.abs_log_ratio", inference=NEWER).request(now, [0.1] * 10), now)
    assert "; 1 other metric arrives; `kc-otel doctor --path` says" in reason(now)
    evaluator.ingest_metrics(counted("nan", 1000, now - 5, now), now)
    evaluator.ingest_metrics(counted("shift", 20, now - 5, now), now)
    said = reason(now, Status.INVALID_INPUT)
    assert said.startswith("INVALID INPUT, nan: 1,000 sequences were not measured and 20 for other reasons. ")
    assert (
        "; 1,000 sequences were not measured (nan) and 20 for other reasons; `kc-otel reference invalid-input`"
        in reason(now + 400)
    )

    source, other = sender(), sender("kc.drift.abs_log_ratio", inference=NEWER, instance="1")
    evaluator.ingest_metrics(source.request(now, small(5000)), now)
    assert reason(now + 200).endswith("(heartbeat 1m): its run ended, its recorder died, or its exports do not arrive")
    evaluator.ingest_metrics(other.request(now + 199, [0.1] * 10), now + 199)
    assert reason(now + 200).endswith("; 1 other pair of kernel versions reports: were these replaced?")


def test_sequences_that_fail_are_no_reason_why_a_metric_never_came_where_others_are_measured(contract, sender, now):
    """No recorder sends a latency or full logits; a rejected sequence among thousands does not explain that."""
    logits = {"id": "kl", "metric": "kl_train_inference", "unit": "token", "limit": 0.01}
    evaluator = Evaluator([contract(slices={}, statistical=[logits])])
    evaluator.ingest_metrics(sender().request(now, small(5000)), now)
    evaluator.ingest_metrics(counted("nan", 1, now - 5, now), now)
    (verdict,) = verdicts_of(evaluator, now)
    assert verdict.reason.startswith("nothing received for kc.drift.kl_train_inference yet; 1 other metric arrives;")


def test_a_run_that_ended_in_order_is_told_from_one_that_fell_silent(contract: Any, sender: Any, now: float) -> None:
    """The last export says so; a recorder of the same version that reports after it is what counts."""
    for later, said in (
        (0, "the run ended: its last recorder shut down 3m20s ago"),
        (1, "its run ended, its recorder died, or"),
    ):
        evaluator = Evaluator([contract(slices={})])
        last = info_request(now, 0)
        last.resource_metrics.extend(sender().request(now, small(5000)).resource_metrics)
        evaluator.ingest_metrics(last, now)
        if later:
            evaluator.ingest_metrics(sender(instance="1").request(now + later, small(5000)), now + later)
        (verdict,) = verdicts_of(evaluator, now + later + 200)
        assert (verdict.status, said in verdict.reason) == (Status.NO_DATA, True), verdict.reason


def test_a_run_that_ended_in_order_is_told_so_beside_a_version_that_died_shortly_before(contract, sender, now) -> None:
    """A run is killed and started again as another version, and that one shuts down: each has its own reason."""
    evaluator = Evaluator([contract(slices={})])
    evaluator.ingest_metrics(sender().request(now, small(5000)), now)
    last = info_request(now + 100, 0, "1", NEWER)
    newer = sender(inference=NEWER, instance="1").request(now + 100, small(5000))
    last.resource_metrics.extend(newer.resource_metrics)
    evaluator.ingest_metrics(last, now + 100)
    reasons = {verdict.cell.kernel_inference: verdict.reason for verdict in verdicts_of(evaluator, now + 300)}
    assert reasons == {
        INFERENCE: "no report for 5m (heartbeat 1m): its run ended, its recorder died, or its exports do not arrive",
        NEWER: "the run ended: its last recorder shut down 3m20s ago",
    }


def test_a_run_has_not_ended_while_a_recorder_of_it_fell_silent_without_a_word(contract, sender, now) -> None:
    """Whoever shuts down last: the other may have died beside a kernel that serves. A rollout is a word, too."""
    evaluator = Evaluator([contract(slices={})])
    for instance, value in (("0", 1), ("1", 1), ("1", 0)):
        request = info_request(now, value, instance=instance)
        request.resource_metrics.extend(sender(instance=instance).request(now, small(5000)).resource_metrics)
        evaluator.ingest_metrics(request, now)
    (verdict,) = verdicts_of(evaluator, now + 200)
    assert "its run ended, its recorder died, or its exports do not arrive" in verdict.reason
    evaluator.ingest_metrics(info_request(now + 201, 0), now + 201)
    (verdict,) = verdicts_of(evaluator, now + 500)
    assert "the run ended" in verdict.reason


def test_kernels_are_known_by_their_fingerprints(contract: Any, now: float) -> None:
    evaluator = Evaluator([contract()])
    request = info_request(now, 1)
    assert evaluator.ingest_metrics(request, now).rejected == 0
    (info,) = evaluator.kernels("policy")
    assert (info.role, info.version, info.last_seen) == ("inference", INFERENCE, now)
    assert info.fields == {"engine": "vllm", "dtype": "fp8"}


def test_contracts_that_cannot_be_judged_are_refused(contract: Any) -> None:
    """Names that clash and assumptions that are missing are errors at the start, not at the first tick."""
    with pytest.raises(ValueError, match="two contracts are called 'policy'"):
        Evaluator([contract(), contract()])
    with pytest.raises(ValueError, match=r"assumptions\.reward_range"):
        Evaluator([contract(statistical=[{"id": "r", "metric": "reward_drift_bound", "limit": 0.1}])])
