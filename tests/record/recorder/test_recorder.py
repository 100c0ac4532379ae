from __future__ import annotations

import logging
import threading
import time

import numpy as np
import pytest
import torch
from opentelemetry.sdk.metrics.export import MetricExportResult

from kc_otel.contract.registry.clause_metrics import OPERATORS, QUANTITIES
from kc_otel.record.kernel import Kernel
from tests.tools.waiting import NOT_HUNG, eventually


def test_what_is_exported_is_what_was_compared(recorders, memory, logprobs):
    """Counts, sums and extremes of every slice are those of a float64 computation over its sequences."""
    recorder = recorders(train=Kernel("torch", dtype="bfloat16"), inference=Kernel("vllm", dtype="fp8"))
    train, inference = logprobs(4, 50)
    mask = np.ones((4, 50), dtype=bool)
    mask[1, 20:] = False
    attributes = [{"task": "code"}, {"task": "code", "prompt_tokens": 200}, {"task": "prose"}, {}]
    recorder.compare(train, inference, mask=mask, attributes=attributes)
    assert recorder.force_flush()
    log_ratio = (train - inference).astype(np.float32).astype(np.float64)
    for name, rows in (("all", [0, 1, 2, 3]), ("code", [0, 1]), ("long", [1])):
        values = np.concatenate([log_ratio[row][mask[row]] for row in rows])
        (point,) = memory.points("kc.drift.log_ratio", kc_slice=name)
        assert point.count == values.size
        assert point.sum == pytest.approx(values.sum(), abs=1e-5)
        assert (point.min, point.max) == pytest.approx((values.min(), values.max()))
        (tv,) = memory.points("kc.drift.tv_token", kc_slice=name)
        assert tv.sum == pytest.approx(np.maximum(-np.expm1(values), 0).sum(), rel=1e-4)
        assert set(point.attributes) == {"kc.contract", "kc.slice", "kc.kernel.train", "kc.kernel.inference"}
        assert point.attributes["kc.kernel.inference"] == Kernel("vllm", dtype="fp8").fingerprint
    (tokens,) = memory.points("kc.recorder.tokens")
    assert tokens.value == 170


def test_the_sequences_that_were_measured_are_counted_on_all_traffic(recorders, memory, logprobs):
    """Also where no clause needs them: those that fail the checks are held against their number."""
    recorder = recorders()
    train, inference = logprobs(4, 50)
    inference[1] = np.nan
    recorder.compare(train, inference, attributes=[{"task": "code"}] * 4)
    assert recorder.force_flush()
    (point,) = memory.points("kc.sampling.tokens")
    assert (point.attributes["kc.slice"], point.count) == ("all", 3)


@pytest.mark.parametrize("serves", [True, False])
def test_kernel_info_spells_out_the_fingerprints(recorders, memory, serves):
    """A program that measures what another one serves does not say that the kernels end."""
    recorder = recorders(inference=Kernel("vllm", dtype="fp8", version="0.32"), serves=serves)
    assert recorder.force_flush()
    (point,) = memory.points("kc.kernel.info", kc_kernel_role="inference")
    assert point.value == 1
    assert point.attributes["kc.kernel.dtype"] == "fp8"
    assert point.attributes["kc.kernel.engine.version"] == "0.32"
    (declared,) = memory.points("kc.kernel.info", kc_kernel_role="train")
    assert declared.attributes["kc.kernel.version"] == Kernel("torch").fingerprint
    assert recorder.shutdown()
    assert {point.value for point in memory.points("kc.kernel.info")} == {0 if serves else 1}


def test_the_trainers_step_is_that_of_the_newest_weights(recorders, memory, logprobs):
    """A gauge of the pair, as new as the last batch whose training weights are counted; names of weights are none."""
    recorder = recorders()
    recorder.compare(*logprobs(1, 5))
    assert recorder.force_flush()
    assert memory.points("kc.train.step") == []
    for weights in ((41, None), (42, 40), ("checkpoint", 40)):
        recorder.compare(*logprobs(1, 5), weights=weights)
    assert recorder.force_flush()
    (point,) = memory.points("kc.train.step")
    assert point.value == 42
    assert set(point.attributes) == {"kc.contract", "kc.kernel.train", "kc.kernel.inference"}


@pytest.mark.parametrize("form", ["one", "batch", "ragged", "lists"])
def test_sequences_come_alone_in_batches_and_in_lists(recorders, memory, logprobs, form):
    train, inference = logprobs(3, 20)
    recorder = recorders()
    if form == "one":
        recorder.compare(train[0], inference[0], token_ids=np.arange(20), advantages=np.ones(20))
        expected = 20
    elif form == "batch":
        recorder.compare(train, inference, advantages=np.ones(3))
        expected = 60
    elif form == "ragged":
        lengths = (20, 5, 11)
        pair = [[side[i, :n] for i, n in enumerate(lengths)] for side in (train, inference)]
        recorder.compare(*pair, advantages=np.ones(3), token_ids=[np.arange(n) for n in lengths])
        expected = 36
    else:
        recorder.compare(train.tolist(), inference.tolist(), mask=[[1] * 20, [0] * 20, [1] * 20])
        expected = 40
    assert recorder.force_flush()
    assert recorder.stats().dropped == {}
    assert memory.count() == expected
    assert bool(memory.points("kc.drift.advantage_drift_positive")) == (form != "lists")


def test_what_was_handed_over_is_in_the_log(recorders, caplog):
    """Shapes that do not fit are printed, of arrays and of lists: a transposed side is seen at a glance."""
    recorder = recorders()
    recorder.compare(np.zeros((2, 3)), np.zeros((3, 2)), mask=np.ones((2, 3)))
    recorder.force_flush()
    assert "train (2, 3), inference (3, 2), mask (2, 3). The two sides, the mask or the token ids have different" in (
        caplog.text
    )
    assert "Pass one log-probability per sampled token on both sides" in caplog.text
    recorder = recorders()
    recorder.compare([np.zeros(4), np.zeros(3)], [np.zeros(4), np.zeros(5)])
    recorder.force_flush()
    assert "sequence 1 has train 3, inference 5 tokens" in caplog.text


def test_rows_of_different_lengths_are_invalid_and_the_others_count(recorders, memory, logprobs):
    train, inference = logprobs(3, 20)
    recorder = recorders()
    recorder.compare(
        [train[0], train[1][:7], train[2]], list(inference), attributes=[{}, {"task": "code"}, {"prompt_tokens": 500}]
    )
    recorder.force_flush()
    assert recorder.stats().invalid == {"shape_mismatch": 1}
    assert (memory.count(), memory.count("long"), memory.count("code")) == (40, 20, 0)


def test_invalid_input_is_counted_on_its_slices_and_kernels(recorders, memory, logprobs):
    """On `all` and on each slice of the sequence, where the caller says of which it is; after a roll-out apart."""
    train, inference = logprobs(3, 10)
    train[0, 3] = np.nan
    recorder = recorders()
    recorder.compare(train, inference, attributes=[{"task": "code"}, {}, {"task": "code"}])
    attributes = [{"task": "code"}, {}]
    recorder.compare([train[0], train[1][:7]], [inference[0][:7], inference[1][:7]], attributes=attributes)
    recorder.sampled("a", token_ids=[1, 2], logprobs=[-1.0, -1.0], attributes={"task": "code"})
    recorder.scored("a", token_ids=[1, 3], logprobs=[-1.0, -1.0])
    recorder.refuse("greedy", "sampled without a temperature", 3)
    before = recorder._pair.inference.fingerprint
    recorder.rollout(inference=Kernel("vllm", version="99"))
    recorder.refuse("greedy", "sampled without a temperature", 4)
    recorder.force_flush()
    points = memory.points("kc.input.invalid")
    after = [point for point in points if point.attributes["kc.kernel.inference"] != before]
    assert [(point.attributes["kc.reason"], point.value) for point in after] == [("greedy", 4)]
    points = [point for point in points if point not in after]
    assert {(p.attributes["kc.reason"], p.attributes.get("kc.slice")): p.value for p in points} == {
        ("nan_logprob", "all"): 1,
        ("nan_logprob", "code"): 1,
        ("shape_mismatch", "all"): 1,
        ("shape_mismatch", "code"): 1,
        ("token_mismatch", "all"): 1,
        ("token_mismatch", "code"): 1,
        ("greedy", None): 3,
    }


def test_a_stream_that_appears_later_begins_at_the_export_before(recorders, memory, logprobs):
    """A start that is as old as the recorder would say that the first value may hold what nobody was told."""
    train, inference = logprobs(2, 10)
    recorder = recorders()
    for task in ("prose", "code", "code"):
        recorder.compare(train, inference, attributes={"task": task})
        recorder.force_flush()
        train[0, 3] = np.nan
    began, code, failed = (
        [{point.start_time_unix_nano for point in memory.points(name, export, kc_slice=slice)} for export in range(3)]
        for name, slice in (("kc.drift.ratio", "all"), ("kc.drift.ratio", "code"), ("kc.input.invalid", "code"))
    )
    (first,) = memory.points("kc.drift.ratio", 0, kc_slice="all")
    assert began == [{first.start_time_unix_nano}] * 3
    assert code == failed == [set(), {first.time_unix_nano}, {first.time_unix_nano}]


def test_a_kernel_that_is_not_what_the_contract_declares_is_said_once(recorders, contract, caplog):
    """At the start, and where a roll-out brings another: what is measured is judged all the same."""
    inference = {"engine": "vllm", "kv_cache_dtype": "fp8"}
    declared = contract(kernels={"train": {"engine": "torch"}, "inference": inference})
    recorder = recorders(contract=declared)
    assert caplog.records == []
    for cache in ("auto", "fp8", "auto"):
        recorder.rollout(inference=Kernel("vllm", kv_cache_dtype=cache))
    (said,) = (record.getMessage() for record in caplog.records)
    assert f"is not what contract {declared.name} declares: kv_cache_dtype fp8 is declared, and auto reported" in said


@pytest.mark.parametrize("make", [np.asarray, torch.as_tensor])
def test_the_caller_may_change_its_arrays_at_once(recorders, memory, held, logprobs, make):
    train, inference = map(make, logprobs(2, 10))
    expected = float((train - inference).sum())
    recorder = recorders()
    recorder.compare(train, inference)
    train[:] = -7.0
    held.set()
    recorder.force_flush()
    assert memory.points("kc.drift.log_ratio")[0].sum == pytest.approx(expected, abs=1e-5)


def test_a_full_queue_drops_and_counts(recorders, memory, held, caplog, logprobs):
    train, inference = logprobs(1, 1000)
    recorder = recorders(queue_bytes=40_000)
    with caplog.at_level(logging.WARNING, "kc_otel"):
        began = time.monotonic()
        for _ in range(10):
            recorder.compare(train, inference)
        assert time.monotonic() - began < NOT_HUNG
        stats = recorder.stats()
        assert stats.dropped == {"queue-full": 8}
        assert stats.queued_batches == 2
        assert 32_000 <= stats.queued_bytes <= 40_000
        assert len(caplog.records) == 1
    held.set()
    assert recorder.force_flush()
    assert memory.points("kc.recorder.dropped", kc_reason="queue-full")[0].value == 8
    assert memory.count() == 2000
    assert recorder.stats().queued_bytes == 0
    recorder.compare(*logprobs(4, 1000))
    assert recorder.stats().dropped["too-large"] == 1
    assert "raise queue_bytes" in caplog.text


class Unreadable:
    def __array__(self, *_, **__):
        raise RuntimeError("the device is lost")


def test_prompts_whose_rollouts_come_in_several_batches_are_sampled_whole(recorders, contract, memory):
    """A trainer shuffles a step's rollouts over micro-batches: a share of batches would hold hardly a whole prompt."""
    clause = {"id": "tv", "metric": "tv_token", "unit": "prompt", "limit": 0.05}
    by_prompt = contract(statistical=[clause], observability={"sampling": 0.25})
    recorder, rng = recorders(contract=by_prompt), np.random.default_rng(0)
    for step in range(20):
        rollouts = rng.permutation(np.repeat(np.arange(16), 8))
        for part in np.split(rollouts, 8):
            train, inference = np.full((2, 16, 4), -1.0)
            recorder.compare(train, inference, groups=part, group_size=8, weights=(step, step))
    recorder.force_flush()
    counted = {point.attributes["kc.outcome"]: point.value for point in memory.points("kc.recorder.prompts")}
    assert counted.keys() == {"whole"}
    assert counted["whole"] / (20 * 16) == pytest.approx(0.25, abs=0.08)
    assert recorder.stats().sequences == 8 * counted["whole"]


def test_prompts_that_tensors_of_one_number_name_are_told_apart_by_the_number(recorders, contract, memory):
    train, inference = np.full((2, 6, 4), -1.0)
    recorder = recorders(contract=contract(statistical=[{"id": "tv", "metric": "tv_token", "limit": 0.05}]))
    recorder.compare(train, inference, groups=[torch.tensor(row // 3) for row in range(6)])
    recorder.force_flush()
    assert [point.value for point in memory.points("kc.recorder.prompts")] == [2]


def test_a_share_is_measured_and_the_rest_is_counted(recorders, contract, memory, logprobs):
    recorder = recorders(sampling=0.25)
    pair = logprobs(1, 2)
    for i in range(400):
        recorder.compare(*pair, key=f"batch-{i}")
    recorder.force_flush()
    stats = recorder.stats()
    assert stats.batches + stats.unsampled == 400
    assert 60 <= stats.batches <= 140
    assert memory.points("kc.recorder.sampling")[0].value == 0.25
    declared = recorders(contract=contract(observability={"sampling": 0.5}))
    assert sum(declared.takes(str(i)) for i in range(1000)) == pytest.approx(500, abs=80)


def test_the_share_may_follow_a_function(recorders, memory, logprobs):
    share = 0.0

    def sampling():
        if share is None:
            raise RuntimeError("planted")
        return share

    recorder = recorders(sampling=sampling)
    recorder.compare(*logprobs(1, 5))
    share = 1.0
    recorder.compare(*logprobs(1, 5))
    assert recorder.force_flush()
    assert memory.count() == 5
    share = None
    recorder.compare(*logprobs(1, 5))
    assert not recorder.takes("key")
    assert recorder.force_flush()
    assert recorder.stats().dropped["sampling-failed"] >= 2
    assert not memory.points("kc.recorder.sampling")


def test_weights_lag_is_measured_on_the_slices_that_the_batch_touched(recorders, memory, logprobs, caplog):
    """Two step numbers give a lag, however they are kept; names give none, and neither do steps the wrong way round."""
    recorder = recorders()
    recorder.compare(*logprobs(2, 5), weights=(7, 5), attributes=[{"task": "code"}, {}])
    recorder.compare(*logprobs(2, 5), weights=(7, 9))
    recorder.compare(*logprobs(2, 5), weights=(torch.tensor(7), 7.0))
    recorder.compare(*logprobs(2, 5), weights=("a", "b"))
    recorder.force_flush()
    (everything,) = memory.points("kc.weights.lag", kc_slice="all")
    assert (everything.count, everything.sum, everything.max) == (2, 2.0, 2.0)
    (code,) = memory.points("kc.weights.lag", kc_slice="code")
    assert code.count == 1
    (said,) = [message for message in caplog.messages if "(weights)" in message]
    assert "tokens of step 9 beside a training kernel of an earlier one, which it cannot be; weights= takes" in said


def test_a_rollout_ends_the_old_pair_and_starts_the_new(recorders, memory, logprobs):
    old, new = Kernel("vllm", dtype="bf16"), Kernel("vllm", dtype="int8")
    recorder = recorders(train=Kernel("torch"), inference=old)
    recorder.compare(*logprobs(1, 5))
    recorder.rollout(inference=new)
    recorder.compare(*logprobs(1, 7))
    eventually(lambda: recorder.stats().exports >= 1)
    recorder.force_flush()
    recorder.force_flush()
    counts = [
        {p.attributes["kc.kernel.inference"]: p.count for p in memory.points("kc.drift.ratio", i)}
        for i in range(len(memory.exports))
    ]
    assert counts[0][old.fingerprint] == 5
    assert sum(old.fingerprint in by_kernel for by_kernel in counts) == 1
    assert counts[-1] == {new.fingerprint: 7}
    last = {p.attributes["kc.kernel.version"]: p.value for p in memory.points("kc.kernel.info", 0)}
    assert last == {Kernel("torch").fingerprint: 1, old.fingerprint: 0, new.fingerprint: 1}, "this one is done with it"
    assert {p.attributes["kc.kernel.version"] for p in memory.points("kc.kernel.info")} == {
        Kernel("torch").fingerprint,
        new.fingerprint,
    }


def test_a_kernel_that_was_never_measured_is_said_to_be_left(recorders, memory):
    """Once; a recorder that shuts down before its first batch ends cleanly, too."""
    old, new = Kernel("vllm", dtype="bf16"), Kernel("vllm", dtype="int8")
    recorder = recorders(train=Kernel("torch"), inference=old)
    assert recorder.force_flush()
    recorder.rollout(inference=new)
    for _ in range(2):
        assert recorder.force_flush()
    exports = [memory.points("kc.kernel.info", i, kc_kernel_role="inference") for i in range(len(memory.exports))]
    said = [{point.attributes["kc.kernel.version"]: point.value for point in points} for points in exports]
    assert said[0] == {old.fingerprint: 1}
    assert said.count({old.fingerprint: 0, new.fingerprint: 1}) == 1
    assert said[-1] == {new.fingerprint: 1}


@pytest.mark.slow
def test_a_dead_endpoint_and_many_rollouts_keep_memory_bounded(recorders, memory, logprobs):
    """Pairs that could not be exported are kept for a while, then counted as lost; the current one is never lost."""
    memory.result = MetricExportResult.FAILURE
    recorder = recorders()
    for number in range(20):
        recorder.rollout(inference=Kernel("vllm", version=str(number)))
        recorder.compare(*logprobs(1, 5))
        recorder.compare(*logprobs(1, 5))
    recorder.force_flush()
    lost = recorder.stats().dropped["never-exported"]
    assert lost >= 2 * 10
    memory.result = MetricExportResult.SUCCESS
    assert recorder.force_flush()
    counts = {p.attributes["kc.kernel.inference"]: p.count for p in memory.points("kc.drift.ratio")}
    assert counts[Kernel("vllm", version="19").fingerprint] == 10
    assert sum(counts.values()) == 5 * (40 - lost)


def test_slices_over_the_cap_are_shown_as_other(recorders, contract, memory, logprobs):
    capped = contract(observability={"max_series": 2 * (len(QUANTITIES) - len(OPERATORS))})
    recorder = recorders(contract=capped)
    recorder.compare(*logprobs(2, 5), attributes=[{"task": "code"}, {}])
    recorder.force_flush()
    assert recorder.stats().slices_as_other == ("code", "long")
    assert (memory.count(), memory.count("other"), memory.count("code")) == (10, 5, 0)


def test_logits_are_compared_whole(recorders, memory):
    rng = np.random.default_rng(0)
    train = rng.normal(size=(2, 6, 32)).astype(np.float32)
    inference = train + 0.05 * rng.normal(size=train.shape).astype(np.float32)
    recorder = recorders()
    recorder.compare_logits(train, inference, mask=np.array([[1] * 6, [1] * 3 + [0] * 3]))
    recorder.compare_logits(train[0], inference[0], token_ids=np.arange(6))
    assert recorder.force_flush()
    assert recorder.stats().dropped == {}
    assert memory.points("kc.drift.tv_exact")[0].count == 9 + 6
    assert memory.points("kc.drift.tv_token")[0].count == 6


def test_shutdown_measures_what_is_queued_and_is_final(recorders, memory, logprobs):
    recorder = recorders()
    for _ in range(20):
        recorder.compare(*logprobs(2, 50))
    assert recorder.shutdown()
    assert memory.count() == 2000
    exports = len(memory.exports)
    assert recorder.shutdown()
    assert len(memory.exports) == exports
    recorder.compare(*logprobs(1, 5))
    recorder.rollout(inference=Kernel("vllm", dtype="int8"))
    assert recorder.stats().dropped == {"shutdown": 1}


def test_shutdown_keeps_its_deadline(recorders, held, logprobs):
    recorder = recorders()
    recorder.compare(*logprobs(1, 5))
    recorder.compare(*logprobs(1, 5))
    began = time.monotonic()
    assert not recorder.shutdown(0.1)
    assert time.monotonic() - began < NOT_HUNG
    assert recorder.stats().dropped == {"shutdown": 2}
    held.set()


def test_two_recorders_of_one_contract_are_two_writers(recorders, memory, logprobs):
    first, second = recorders(), recorders()
    instances = []
    for recorder in (first, second):
        recorder.compare(*logprobs(1, 5))
        recorder.force_flush()
        instances.append(memory.exports[-1].resource_metrics[0].resource.attributes["service.instance.id"])
    assert len(set(instances)) == 2


def test_it_can_be_switched_off(recorders, monkeypatch, memory, logprobs):
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    threads = threading.active_count()
    recorder = recorders()
    recorder.compare(*logprobs(1, 5))
    recorder.rollout(inference=Kernel("vllm", dtype="int8"))
    assert threading.active_count() == threads
    assert recorder.force_flush()
    assert recorder.shutdown()
    assert recorder.stats().batches == 0
    assert memory.exports == []


def test_without_an_exporter_it_measures_for_its_stats(recorders, monkeypatch, logprobs):
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")
    recorder = recorders(metric_exporter=None)
    recorder.compare(*logprobs(1, 5))
    assert recorder.force_flush()
    assert recorder.stats().tokens == 5
    assert recorder.stats().exports == 0


@pytest.mark.parametrize(
    "options", [{"queue_bytes": 0}, {"pairing_tokens": 0}, {"sampling": 2.0}, {"export_interval": 0.0}]
)
def test_wrong_settings_are_refused(recorders, options):
    with pytest.raises(ValueError, match=next(iter(options))):
        recorders(**options)


@pytest.mark.slow
def test_the_interval_keeps_up_with_the_heartbeat(recorders, contract, monkeypatch, caplog):
    """The default interval is a third of the contract's heartbeat; a slower one in the environment is warned about."""
    recorder = recorders(contract=contract(observability={"heartbeat": "150ms"}), export_interval=None)
    eventually(lambda: recorder.stats().exports >= 3)
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "60000")
    with caplog.at_level(logging.WARNING, "kc_otel"):
        recorders(contract=contract(observability={"heartbeat": "1s"}), export_interval=None)
    assert "heartbeat" in caplog.text


def test_a_side_in_half_precision_is_said_once_and_measured(recorders, caplog):
    """It is a hint: with the side, the grid and the remedy, once; a kernel pair whose sides are alike hears nothing."""
    rng = np.random.default_rng(5)
    full = -rng.exponential(1.0, (8, 200)).astype(np.float32) - 0.1
    mask = np.ones((8, 200), dtype=bool)
    mask[0], mask[1:, :3] = False, False
    recorder = recorders()
    for train in (full * np.float32(1.002), full * np.float32(1.001)):
        recorder.compare(train, full, mask=mask)
    assert recorder.force_flush()
    assert not [message for message in caplog.messages if "input doubtful" in message]
    for _ in range(3):
        recorder.compare(full, full.astype(np.float16), mask=mask)
    assert recorder.force_flush()
    (said,) = [message for message in caplog.messages if "input doubtful" in message]
    assert "the inference side" in said
    assert "float16's grid" in said
    assert recorder.stats().batches == 5
    assert recorder.stats().invalid == {"no_tokens": 5}


@pytest.mark.parametrize(
    ("weights", "said"),
    [(("step-9", "step-8"), 1), (("step-9", 8), 1), (("a", "a"), 0), ((9, 8), 0), ((9, None), 0), (("9", "8"), 0)],
)
def test_weights_of_different_names_are_said_to_be_of_unknown_age(recorders, logprobs, caplog, weights, said):
    """Their drift holds what the age of the weights adds; steps are numbers, also as text."""
    recorder = recorders()
    for _ in range(2):
        recorder.compare(*logprobs(2, 40), weights=weights)
    assert recorder.force_flush()
    assert len([message for message in caplog.messages if "are names: the lag is unknown" in message]) == said
    assert recorder.stats().sequences == 4


def test_sides_with_the_same_numbers_are_said_once_and_measured(recorders, caplog):
    """A trainer that hands the sampler's numbers over as its own passes every limit; a few equal numbers are chance."""
    full = -np.random.default_rng(5).exponential(1.0, (8, 200)) - 0.1
    recorder = recorders()
    recorder.compare(full[:1, :8], full[:1, :8])
    assert recorder.force_flush()
    assert "copy of the other" not in caplog.text
    for _ in range(3):
        recorder.compare(full, full)
    assert recorder.force_flush()
    (said,) = [message for message in caplog.messages if "copy of the other" in message]
    assert said.startswith("contract policy: input doubtful (equal): both sides have the same number at every token")
    assert recorder.stats().sequences == 25


@pytest.mark.parametrize("declared", ["contract", "recorder"])
def test_sides_with_the_same_numbers_are_no_two_number_formats(recorders, contract, caplog, declared):
    """Few equal numbers are no evidence; nor is a batch of which some tokens differ."""
    full = -np.random.default_rng(5).exponential(1.0, (8, 200)) - 0.1
    kernels = {side: {"engine": "vllm", "dtype": dtype} for side, dtype in (("train", "bf16"), ("inference", "fp8"))}
    own = {side: Kernel(**fields) for side, fields in kernels.items()}
    recorder = recorders(contract=contract(kernels=kernels)) if declared == "contract" else recorders(**own)
    recorder.compare(full, full)
    recorder.compare(full[:, :4], full[:, :4])
    recorder.compare(full, full + 1e-3 * (np.arange(200) == 7))
    assert recorder.force_flush()
    assert recorder.stats().invalid == {"placeholder": 8}
    assert recorder.stats().sequences == 16
    assert "but two number formats are declared: an engine lacks an option" in caplog.text


def test_the_mass_that_truncation_kept_is_compared_over(recorders, memory, logprobs):
    """Of whole batches and of sequences of different lengths; what is no pair of masses is dropped."""
    train, _ = logprobs(2, 40)
    mass = np.full((2, 40), np.log(0.9))
    recorder = recorders()
    recorder.compare(train, train - np.log(0.9), kept=(mass, None))
    ragged = [train[0], train[1][:7]]
    recorder.compare(ragged, [row - np.log(0.9) for row in ragged], kept=[[mass[0], mass[1][:7]], None])
    for wrong in (mass, (mass, None, None), 0.9):
        recorder.compare(train, train, kept=wrong)
    recorder.compare(train, train, kept=(mass[:, :5], None))
    recorder.compare(train, train, kept=("abc", None))
    assert recorder.force_flush()
    (outside,) = memory.points("kc.drift.outside_mass", kc_slice="all")
    (drift,) = memory.points("kc.drift.abs_log_ratio", kc_slice="all")
    assert outside.count == drift.count == 127
    assert outside.sum == pytest.approx(12.7)
    assert drift.sum == pytest.approx(0.0, abs=1e-4)
    assert recorder.stats().dropped == {"kept-argument": 3}
    assert recorder.stats().invalid == {"shape_mismatch": 4}


def test_columns_of_attributes_are_those_of_each_sequence(recorders, memory, logprobs):
    """As a mapping for each would say it; what is one value is everybody's."""
    recorder = recorders()
    recorder.compare(*logprobs(3, 5), attributes={"task": ["code", "prose", "code"], "lang": "en"})
    recorder.compare(*logprobs(2, 5), attributes={"task": np.array(["prose", "code"])})
    assert recorder.force_flush()
    (code,) = memory.points("kc.drift.k3", kc_slice="code")
    (everything,) = memory.points("kc.drift.k3", kc_slice="all")
    assert (code.count, everything.count) == (15, 25)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"train_logprobs": np.full((2, 8), "a")}, "dtype: <U1 does not hold real numbers"),
        ({"train_logprobs": np.full((2, 8), None)}, "dtype: object does not hold real numbers"),
        ({"train_logprobs": np.ones((2, 8), bool)}, "dtype: bool does not hold real numbers"),
        ({"train_logprobs": np.zeros((2, 8, 4)), "inference_logprobs": np.zeros((2, 8, 4))}, "train: shape (2, 8, 4)"),
        ({"train_logprobs": [np.zeros(3)], "inference_logprobs": [np.zeros(3)] * 2}, "inference: 2 sequences"),
        ({"train_logprobs": Unreadable()}, "(capture-failed): RuntimeError: the device is lost"),
        ({"mask": np.full((2, 8), "x")}, "mask: is of dtype <U1; pass truth values, or 0 and 1"),
        ({"mask": np.full((2, 8), np.nan)}, "mask: holds nan; pass truth values, or 1 where a token counts"),
        ({"mask": np.full((2, 8), -100)}, "mask: holds -100; pass truth values, or 1 where a token counts"),
        ({"mask": torch.full((2, 8), -torch.inf)}, "mask: holds -inf; pass truth values"),
        ({"mask": [np.ones(8), np.full(8, -1e9)]}, "mask: holds -1e+09; pass truth values"),
        ({"train_logprobs": None}, "train or inference: is None; give what both kernels say of the tokens"),
        ({"train_logprobs": -1.0}, "train: is one number; give those of a sequence, [tokens]"),
        ({"weights": (5.5, 4)}, "weights: float is no weight version; give an optimizer step, an int"),
        ({"attributes": {"task": ["a", "b"], "lang": ["c"]}}, "attributes: task has 2, lang has 1 values"),
        ({"attributes": 3}, "(capture-failed)"),
        ({"advantages": np.full((2, 8), "a")}, "dtype: <U1 does not hold real numbers"),
        ({"advantages": np.zeros(7)}, "advantages: shape (7,)"),
        ({"attributes": "code"}, "attributes: str is no mapping, nor a list with one for each sequence"),
        ({"attributes": [{"task": "code"}]}, "attributes: 1 for 2 sequences"),
        ({"groups": ["a"]}, "groups: 1 for 2 sequences; name the prompt of each"),
        ({"processing": {"temperature": 1.0}}, "processing: dict is not a pair (training, inference)"),
    ],
)
def test_what_no_argument_can_be_is_said_once_and_never_raised(recorders, memory, logprobs, caplog, changes, said):
    train, inference = logprobs(2, 8)
    recorder = recorders()
    recorder.compare(**{"train_logprobs": train, "inference_logprobs": inference, **changes})
    recorder.compare(train, inference)
    assert recorder.force_flush()
    assert sum(recorder.stats().dropped.values()) == 1
    assert recorder.stats().queued_bytes == 0
    assert memory.count() == 16
    assert said in caplog.text
