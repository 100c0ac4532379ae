"""Faults planted in recordings of a real model, none of which hides a kernel that fails; honest cuts, and remarks."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from kc_otel.offline.gate.recorded_gate import read_input
from kc_otel.record.measure.blocks import Block
from kc_otel.record.measure.checks import check_block, more_than_all, remarks
from kc_otel.record.telemetry.accumulate import Accumulator, Rollouts
from kc_otel.recordings.recording import RecordingError
from kc_otel.recordings.recording_files import load_recording
from kc_otel.stats.surplus import surely_surplus, sureness
from tests.handbook.snippets import ROOT
from tests.tools.planted_faults import HONEST, honest, sampled, texts

RECORDINGS = ROOT / "examples" / "real_model" / "recordings"
VOCABULARY = 49_152
SIDES = ("train", "inference")


def read(name):
    with np.load(RECORDINGS / f"{name}.npz") as arrays:
        return dict(arrays)


def by_row(change):
    """A fault of each row: from log P, log Q, a generator and the row's number to both."""

    def planted(arrays, rng):
        ends = np.cumsum(arrays["lengths"])[:-1]
        sides = [np.split(arrays[key].astype(float), ends) for key in ("train_logprobs", "inference_logprobs")]
        rows = [change(p, q, rng, row) for row, (p, q) in enumerate(zip(*sides, strict=True))]
        return [np.concatenate(side) for side in zip(*rows, strict=True)]

    return planted


def both(change):
    return by_row(lambda p, q, _rng, _row: (change(p), change(q)))


def again(values):
    return np.exp(values) - np.log(VOCABULARY + 0.7)


def running(values):
    return np.cumsum(values) / np.arange(1, values.size + 1)


def moving(values):
    sums = np.concatenate([np.zeros(4), np.cumsum(values)])
    return (sums[4:] - sums[:-4]) / np.minimum(np.arange(1, values.size + 1), 4)


def chunks(values):
    parts = [np.append(values[at : at + 64], values[at : at + 64][-1]) for at in range(0, values.size, 64)]
    return np.concatenate(parts)[: values.size]


def broadcast(arrays, _rng):
    """The first row of each eight, in the place of all."""
    rows = np.split(np.arange(arrays["lengths"].sum()), np.cumsum(arrays["lengths"])[:-1])
    at = np.concatenate([np.resize(rows[n - n % 8], row.size) for n, row in enumerate(rows)])
    return [arrays[f"{side}_logprobs"][at] for side in ("train", "inference")]


def penalty(arrays, rng):
    rows = np.repeat(np.arange(arrays["lengths"].size), arrays["lengths"])
    _, first = np.unique(rows * VOCABULARY + arrays["token_ids"], return_index=True)
    before = np.ones(rows.size)
    before[first] = 0.0
    kept = -np.log1p(np.expm1(-1.0) * rng.beta(1, 2, rows.size))
    return arrays["train_logprobs"], np.minimum(arrays["inference_logprobs"] + kept - before, 0.0)


def nucleus(mass):
    """Top-p on the inference side: one token is left where it has more than that."""

    def cut(p, q, rng, _row):
        kept = np.clip(mass + (1 - mass) * rng.random(q.size), np.exp(q), 1.0)
        return p, np.where(q > np.log(mass), 0.0, np.minimum(q - np.log(kept), 0.0))

    return by_row(cut)


def one_in(share, change):
    return by_row(lambda p, q, _rng, row: (change(p, q) if row % share == 0 else p, q))


def training(change):
    """A fault of the training side that may know the other."""
    return one_in(1, change)


def elsewhere(p, q, rng, _row):
    """The training side after another prompt, which matters the less the longer the answer gets."""
    return np.minimum(p + rng.normal(0.0, 1.5, p.size) * np.exp(-np.arange(p.size) / 12), -1e-4), q


def last(p, q, rng, _row):
    """The next sequence's first token, in the place of the last one, where rows were packed."""
    return np.append(p[:-1], -rng.uniform(6, 20)), q


def attempts(p, q, _rng, row):
    """What an aborted request had, before all of the next one, in every third row."""
    return p, np.append(q[: q.size // 3], q)[: q.size] if row % 3 == 0 else q


def streamed(p, q, _rng, _row):
    """Answers of a stream, each with all tokens so far, one after the other."""
    return p, np.concatenate([q[:size] for size in range(16, q.size + 16, 16)])[: q.size]


def left_out(p, q, _rng, _row):
    """Tokens whose log ratio is large are left out; others of the row come in their place."""
    kept = np.abs(p - q) < 0.6
    return tuple(np.resize(side[kept], p.size) for side in (p, q)) if kept.any() else (q, q)


def padded(p, q, rng, row):
    """Padding after the last token of every fourth row, which both sides score."""
    if row % 4 or q.size < 32:
        return p, q
    padding = -rng.uniform(9, 18, 16)
    return np.append(p[:-16], padding + rng.normal(0.0, 0.3, 16)), np.append(q[:-16], padding)


def before(p, q, _rng, _row):
    """The first token of each chunk has the number of the one before it."""
    q = q.copy()
    q[32::32] = q[31:-1:32]
    return p, q


def drafts(p, q, rng, _row):
    """Accepted tokens have the draft model's log-probability."""
    accepted = (q > -1.2) & (rng.random(q.size) < 0.8)
    of_draft = np.minimum(q + np.minimum(1.0, 0.2 - q) * rng.normal(-0.3, 0.8, q.size), -1e-5)
    return p, np.where(accepted, of_draft, q)


def some_last(p, q, rng, _row):
    """Another token at the end of every tenth row, as where one side has a stop string's."""
    return (np.append(p[:-1], -rng.uniform(6, 20)) if rng.random() < 0.1 else p), q


def shifted_before_padding(p, q, _rng, _row):
    """One side is ahead by one, and padding of both counts."""
    kept = p.size - min(8, p.size // 2)
    return np.append(p[:kept], np.zeros(p.size - kept)), np.append(q[1:kept], np.zeros(q.size - kept + 1))


def stale_prefix(arrays, _rng):
    """The numbers of another request for the first 32 tokens of every other row."""
    q, starts = arrays["inference_logprobs"].copy(), np.cumsum(arrays["lengths"]) - arrays["lengths"]
    for row in range(0, starts.size, 2):
        size, other = min(32, arrays["lengths"][row]), starts[(row + 9) % starts.size]
        q[starts[row] : starts[row] + size] = arrays["inference_logprobs"][other : other + size]
    return arrays["train_logprobs"], q


def rare_cap(arrays, _rng):
    """The ten largest log ratios are cut to one, as by a truncation of importance weights that hardly ever acts."""
    log_w = arrays["train_logprobs"].astype(float) - arrays["inference_logprobs"]
    return arrays["inference_logprobs"] + np.minimum(log_w, np.sort(log_w)[-11:-9].mean()), arrays["inference_logprobs"]


def filled(p, q, _rng, row):
    """Padding in the place of all of a row, in most rows."""
    return (np.full(p.size, -11.3) if row % 8 else p), q


def chunked(p, q, rng, _row):
    """The last token of each chunk of 24 is scored as another one."""
    return np.where(np.arange(p.size) % 24 == 23, -rng.exponential(4.0, p.size), p), q


FAULTS = {
    "another token at the end of each chunk": (by_row(chunked), "not_same_tokens: .*only the tokens at 23, 47, 71, 95"),
    "the number of the token before": (by_row(before), "placeholder: .*number of the token before them"),
    "numbers of the draft model": (by_row(drafts), "^[^;]*INVALID INPUT, not_sampled"),
    "one ratio for each sequence": (
        training(lambda p, q: q + (p - q).mean()),
        "^[^,]*INVALID INPUT, not_logprobs: .*one number at all tokens of a sequence",
    ),
    "another token at the end of some rows": (by_row(some_last), "not_same_tokens: .*the last token of 2[0-9] of"),
    "a cap that hardly ever acts": (rare_cap, "not_logprobs: .*none by more: cut there"),
    "half precision of the other side in some rows": (
        by_row(lambda p, q, _rng, row: (np.float16(q), q) if row % 5 == 0 else (p, q)),
        "placeholder: .* 5[0-9] of 256 sequences: the training side is the other one rounded to float16",
    ),
    "three decimals of the other side in some rows": (
        by_row(lambda p, q, _rng, row: (p, np.round(p, 3)) if row % 5 == 0 else (p, q)),
        "placeholder: .* of 256 sequences: the inference side is the other one rounded to 3 decimals",
    ),
    "the columns exchanged": (
        by_row(lambda p, q, _rng, _row: (q, p)),
        "not_sampled: .*tokens is 1.1[01][0-9]*, significantly above 1, .*the columns look swapped",
    ),
    "ahead by one, and padding": (by_row(shifted_before_padding), r"^[^,]*INVALID INPUT, not_same_tokens: .*lag 1\)"),
    "another request's prefix": (stale_prefix, "not_same_tokens: .*up to about token 3[0-9]"),
    "padding for whole rows": (by_row(filled), "one value at each token of .*padding or a filler"),
    "divided by the length": (both(lambda x: x / x.size), "not_sampled"),
    "base 10 on both sides": (both(lambda x: x / np.log(10)), "not_sampled"),
    "softmax twice on both sides": (both(again), "not_logprobs"),
    "softmax twice on one side": (training(lambda p, _: again(p)), "not_logprobs"),
    "sums on one side": (training(lambda p, _: np.cumsum(p)), "not_logprobs"),
    "sums on both sides": (both(np.cumsum), "not_logprobs"),
    "a floor on both sides": (both(lambda x: np.maximum(x, -5.0)), "placeholder"),
    "a high floor on one side": (by_row(lambda p, q, _rng, _row: (p, np.maximum(q, -2.0))), "placeholder"),
    "log ratios that were cut": (training(lambda p, q: q + np.clip(p - q, -0.5, 0.5)), "not_logprobs"),
    "a small cut": (training(lambda p, q: q + np.clip(p - q, -0.02, 0.02)), "not_logprobs"),
    "a cap on one side": (
        training(lambda p, q: q + np.minimum(p - q, 0.05)),
        "not_logprobs: .*none by more: cut there",
    ),
    "large log ratios masked": (training(lambda p, q: np.where(np.abs(p - q) > 0.2, q, p)), "placeholder"),
    "nearly all masked": (training(lambda p, q: np.where(np.abs(p - q) > 0.05, q, p)), "placeholder"),
    "a copy in a third of the rows": (one_in(3, lambda _, q: q), "placeholder"),
    "the last token 0 on both sides": (both(lambda x: np.append(x[:-1], 0.0)), "placeholder"),
    "top-p 0.99 on one side": (nucleus(0.99), "truncated_sampling"),
    "a presence penalty": (penalty, "penalised_sampling"),
    "likely tokens cleared on both sides": (
        by_row(lambda p, q, _rng, _row: tuple(np.where(q > -0.7, 0.0, side) for side in (p, q))),
        "placeholder",
    ),
    "bits on one side": (training(lambda p, _: p / np.log(2)), "temperature_mismatch"),
    "probabilities in some rows": (one_in(5, lambda p, _: np.exp(p)), "is it a logit or a probability"),
    "one row for its group": (broadcast, "not_sampled: .* different first tokens"),
    "means of four tokens": (training(lambda p, _: moving(p)), "not_same_tokens"),
    "normalised over a shard": (
        by_row(lambda p, q, rng, _row: (p - np.log(np.exp(p) - np.expm1(p) * rng.beta(2, 2, p.size)), q)),
        "not_sampled",
    ),
    "stripes of context parallelism": (training(lambda p, _: np.append(p[::2], p[1::2])), "not_same_tokens"),
    "a token twice at each chunk": (training(lambda p, _: chunks(p)), "not_same_tokens"),
    "means of all tokens so far": (both(running), "not_logprobs"),
    "improbable tokens averaged away": (
        by_row(lambda p, q, _rng, _row: tuple(np.where(q < -3.0, side.mean(), side) for side in (p, q))),
        "placeholder",
    ),
    "after another prompt": (by_row(elsewhere), "prompt_mismatch"),
    "the next sequence's token at the end": (by_row(last), "not_same_tokens: .*only the last token"),
    "an aborted attempt before the next": (by_row(attempts), "not_same_tokens"),
    "all so far in each chunk of a stream": (by_row(streamed), "not_same_tokens"),
    "large log ratios left out": (by_row(left_out), "not_logprobs: .*none by more"),
    "padding on both sides": (by_row(padded), "not_sampled: .*mask padding"),
    "log 2 less": (training(lambda p, _: p - np.log(2)), "not_logprobs: .*add up to 0.5"),
    "a loss with smoothed labels": (
        by_row(lambda p, q, rng, _row: (0.9 * p + 0.1 * rng.normal(-29.0, 3.0, p.size), q)),
        "not_logprobs: .*labels smoothed",
    ),
    "label smoothing": (training(lambda p, _: np.log(0.9 * np.exp(p) + 0.1 / VOCABULARY)), "not_logprobs: .*0.9"),
}
"""Name -> how to plant it, and what names it."""


def likeliest(values, rng):
    """The likeliest token's, where the sampled one has less than half of the mass; some have too much, by drift."""
    share = np.where(rng.random(values.size) < 0.05, 1.07, rng.beta(1.3, 3.5, values.size))
    rest = np.maximum(share * -np.expm1(values), rng.uniform(0.03, 0.08, values.size))
    return np.where(values > -np.log(2), values, np.clip(np.log(rest), values, -0.01))


def neighbours(values):
    return np.append(values[:1], (values[1:] + values[:-1]) / 2)


def inference(change, share=1):
    """A fault of the inference side in every so many rows."""
    return by_row(lambda p, q, rng, row: (p, change(q, rng)) if row % share == 0 else (p, q))


def top_p(values, rng):
    """Renormalised over a nucleus of 0.95."""
    kept = np.clip(0.95 + 0.05 * rng.random(values.size), np.exp(values), 1.0)
    return np.where(values > np.log(0.95), 0.0, np.minimum(values - np.log(kept), 0.0))


def others(values, rng):
    """Numbers of other tokens at one place in a hundred."""
    return np.where(rng.random(values.size) < 0.01, np.roll(values, 5), values)


OF_EVERY_KERNEL = {
    "a floor in a quarter of the rows": (
        inference(lambda q, _: np.maximum(q, -10.0), 4),
        "placeholder: .* are -10 on the inference side, where the other lies between -1[123].* a floor or a filler",
    ),
    "a number for all improbable tokens": (
        inference(lambda q, _: np.where(q < -6.0, -1.0, q)),
        "placeholder: .* tokens are -1 on the inference side, where the other",
    ),
    "a floor with noise": (
        inference(lambda q, rng: np.maximum(q, -8.0) + 1e-3 * rng.standard_normal(q.size) * (q < -8.0)),
        "placeholder: .*less than -9.00. are -8.00. or little more on the inference side: a floor, noise on one",
    ),
    "the logarithm of q + epsilon": (
        inference(lambda q, _: np.minimum(np.log(np.exp(q) + 1e-5), 0.0)),
        "placeholder: .*less than -12.5. are -11.5. or little more on the inference side",
    ),
    "the logarithm of p + epsilon": (
        training(lambda p, _: np.minimum(np.log(np.exp(p) + 1e-3), 0.0)),
        "placeholder: .*less than -7.9.. are -6.9.. or little more on the training side",
    ),
    "the likeliest tokens' numbers": (
        inference(likeliest),
        "not_sampled: .* of 256 sequences: the inference side gives the likeliest token's",
    ),
    "the likeliest tokens' in a quarter of the rows": (
        inference(likeliest, 4),
        r"not_sampled: .* [456]\d of 256 sequences: the inference side gives the likeliest token's",
    ),
    "top-p in a quarter of the rows": (inference(top_p, 4), "truncated_sampling: .* [56]. of 256 sequences"),
    "other tokens' numbers at single places": (inference(others), "^[^;]*INVALID INPUT, not_sampled: .*mean of P/Q"),
    "probabilities with a minus sign": (
        inference(lambda q, _: -np.exp(q), 5),
        "not_logprobs: .*of [45]. sequences lie between -1 and 0, .* next to -1: they are probabilities",
    ),
    "probabilities less 1 on both sides": (both(np.expm1), "not_logprobs: .*they are probabilities"),
    "means with the token before": (both(neighbours), "not_logprobs: .*they are means over two tokens"),
    "divided by the length in a quarter of the rows": (inference(lambda q, _: q / q.size, 4), "temperature_mismatch"),
    "the last token twice": (
        both(lambda x: np.append(x[:-1], x[-2:-1]) if x.size > 1 else x),
        "placeholder: .*the last token of 2.. sequences has the number of the one before it, on both sides",
    ),
}
"""The same, of faults that are named under each kernel."""
UNNAMED = {"bits on both sides": both(lambda x: x / np.log(2)), "one decimal": both(lambda x: np.round(x, 1))}
"""Faults that nothing in the numbers contradicts, or that are measured as the drift that they are."""


def planted(arrays, plant):
    """The recording with a fault, as float32."""
    train, inference = plant(arrays, np.random.default_rng(0))
    return arrays | {"train_logprobs": np.float32(train), "inference_logprobs": np.float32(inference)}


def tv(arrays):
    return np.maximum(-np.expm1(arrays["train_logprobs"].astype(float) - arrays["inference_logprobs"]), 0.0).mean()


def kernels(quick, *others):
    """The first among the quick tests, the others among the slow ones."""
    return [quick, *(pytest.param(name, marks=pytest.mark.slow) for name in others)]


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_a_real_recording_is_named(name, tmp_path: Path):
    """The kernel is int8, and fails at TV 0.05; most of the faults would let it pass."""
    plant, reason = FAULTS[name]
    np.savez(tmp_path / "a.npz", **planted(read("vllm-w8a8"), plant))
    with pytest.raises(RecordingError, match=reason):
        load_recording(tmp_path / "a.npz")


@pytest.mark.parametrize("kernel", kernels("vllm-w8a8", "vllm-fp8-kv", "llama-q4_1"))
@pytest.mark.parametrize("name", OF_EVERY_KERNEL)
def test_a_fault_is_named_under_each_kernel(name, kernel, tmp_path: Path):
    """From log-probabilities alone: without groups and token ids."""
    plant, reason = OF_EVERY_KERNEL[name]
    arrays = planted(read(kernel), plant)
    np.savez(tmp_path / "a.npz", **{key: arrays[key] for key in ("train_logprobs", "inference_logprobs", "lengths")})
    with pytest.raises(RecordingError, match=reason):
        load_recording(tmp_path / "a.npz")


@pytest.mark.parametrize("kernel", kernels("vllm-w8a8", "hf-bf16", "llama-q4_1"))
@pytest.mark.parametrize(
    ("copied", "said"),
    [
        (np.float16, "the inference side is the other one rounded to float16, up to 0: unless the kernels agree"),
        (lambda p: np.round(p, 3), "the inference side is the other one rounded to 3 decimals, up to 2e-07"),
        (
            lambda p: np.float16(p) + 1e-5 * np.random.default_rng(0).standard_normal(p.size).clip(max=0),
            "the inference side is the other one rounded to float16, up to [12]e-05",
        ),
        (
            lambda p: np.minimum(p + 1e-4 * np.random.default_rng(0).standard_normal(p.size), 0.0),
            r"the sides differ by \S+ where they are sure of a token and by 7e-05 where they are not",
        ),
    ],
)
def test_a_column_that_may_be_a_copy_is_remarked(kernel, copied, said, tmp_path: Path):
    """Kernels that agree as closely exist, so that it is judged; no logits differ by as much where they are sure."""
    arrays = read(kernel)
    assert read_input(RECORDINGS / f"{kernel}.npz").unchecked == ""
    np.savez(tmp_path / "a.npz", **arrays | {"inference_logprobs": np.float32(copied(arrays["train_logprobs"]))})
    assert re.match(said, read_input(tmp_path / "a.npz").unchecked)


@pytest.mark.parametrize("name", UNNAMED)
def test_a_fault_that_is_not_named_hides_no_drift(name):
    """The kernel looks as bad as it is, or worse."""
    arrays = read("vllm-w8a8")
    assert tv(planted(arrays, UNNAMED[name])) > 0.99 * tv(arrays)


def test_tokens_of_the_prompt_are_told_from_rollouts():
    """All rollouts of a prompt begin with them, as improbable as they are."""
    arrays = read("vllm-bf16")
    first = np.cumsum(arrays["lengths"]) - arrays["lengths"]
    logprobs, groups = arrays["inference_logprobs"][first], arrays["group"].tolist()
    ids = arrays["token_ids"][first].astype(int)
    assert not more_than_all(logprobs, ids, groups)
    assert "the same token" in more_than_all(np.full(logprobs.size, -4.0), 7 + 0 * ids, groups)


def test_columns_that_look_swapped_are_remarked(tmp_path: Path):
    """A kernel that is off by less than the rounding of numbers is judged."""
    arrays = read("vllm-bf16")
    swapped = arrays | {f"{side}_logprobs": arrays[f"{other}_logprobs"] for side, other in (SIDES, SIDES[::-1])}
    for changed, said in (
        (arrays, "^$"),
        (
            swapped,
            "^the mean of P/Q over [0-9,]* tokens is 1.002., significantly above 1, and that of Q/P 1.000.: the col",
        ),
    ):
        np.savez(tmp_path / "a.npz", **changed)
        assert re.search(said, "".join(read_input(tmp_path / "a.npz").notes))


@pytest.mark.parametrize("turns", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_turns_of_a_conversation_are_not_rollouts_of_one_prompt(turns: int, tmp_path: Path):
    arrays = read("vllm-w8a8")
    lengths = np.concatenate([np.diff(np.linspace(0, row, turns + 1).astype(int)) for row in arrays["lengths"]])
    kept = {name: arrays[name] for name in ("train_logprobs", "inference_logprobs", "token_ids")}
    groups = np.repeat(arrays["group"], turns)
    np.savez(tmp_path / "a.npz", **kept, lengths=lengths[lengths > 0], group=groups[lengths > 0])
    load_recording(tmp_path / "a.npz")


def test_rows_from_a_better_kernel_are_no_rounded_copies(tmp_path: Path):
    """A fifth of the rows drift by less than bfloat16's rounding, and one column is kept in bfloat16."""
    near = by_row(lambda p, q, rng, row: (q + 1e-6 * rng.standard_normal(q.size), q) if row % 5 == 0 else (p, q))
    arrays = planted(read("vllm-w8a8"), near)
    bits = np.minimum(arrays["train_logprobs"], 0.0).view(np.uint32)
    arrays["train_logprobs"] = (bits & np.uint32(0xFFFF0000)).view(np.float32)
    np.savez(tmp_path / "a.npz", **arrays)
    load_recording(tmp_path / "a.npz")


def test_an_exact_cause_comes_before_the_mean_ratio(tmp_path: Path):
    """One row for its group, with the columns exchanged: the first tokens say what it is."""
    np.savez(tmp_path / "a.npz", **planted(read("vllm-w8a8"), lambda *given: broadcast(*given)[::-1]))
    with pytest.raises(RecordingError, match=r"^[^,]*INVALID INPUT, not_sampled: .* different first tokens"):
        load_recording(tmp_path / "a.npz")


def test_rows_that_were_rounded_are_no_fillers(tmp_path: Path):
    """One decimal in a third of the rows is coarse storage: their zeros are those of sure tokens."""
    coarse = by_row(lambda p, q, _rng, row: (np.round(p, 1), np.round(q, 1)) if row % 3 == 0 else (p, q))
    arrays = planted(read("vllm-w8a8"), coarse)
    np.savez(tmp_path / "a.npz", **arrays)
    assert load_recording(tmp_path / "a.npz").lengths.size == arrays["lengths"].size


@pytest.mark.parametrize("name", ["divided by the length", "base 10 on both sides", "large log ratios masked"])
def test_the_recorder_holds_the_batch(name):
    arrays = planted(read("vllm-w8a8"), FAULTS[name][0])
    mask = np.arange(arrays["lengths"].max()) < arrays["lengths"][:, None]
    sides = [np.zeros(mask.shape, arrays[key].dtype) for key in ("train_logprobs", "inference_logprobs", "token_ids")]
    for side, key in zip(sides, ("train_logprobs", "inference_logprobs", "token_ids"), strict=True):
        side[mask] = arrays[key]
    train, inference, ids = (side.astype(side.dtype.kind + "4") for side in sides)
    rollouts = Rollouts(arrays["group"].tolist())
    batch = Accumulator(["all"]).add_sampled(train, inference, mask=mask, token_ids=ids, rollouts=rollouts)
    assert batch.invalid == {FAULTS[name][1]: arrays["lengths"].size}, batch


@pytest.mark.slow
def test_no_cut_of_a_real_recording_is_accused():
    """All pairs of kernels: few rows and many, beginnings of rows, single tasks; as float32, float16 or rounded."""
    for path in sorted(RECORDINGS.glob("*.npz")):
        arrays = read(path.stem)
        train, inference, lengths = (arrays[key] for key in ("train_logprobs", "inference_logprobs", "lengths"))
        starts, count = np.cumsum(lengths) - lengths, lengths.size
        cuts = [
            (np.arange(at, min(at + rows, count)), 10**6) for rows in (1, 8, 24, count) for at in range(0, count, 24)
        ]
        cuts += [(np.arange(count), tokens) for tokens in (2, 5, 16, 64)]
        cuts += [(np.flatnonzero(arrays["task"] == task), 10**6) for task in np.unique(arrays["task"])]
        for rows, tokens in cuts:
            n = np.minimum(lengths[rows], tokens).astype(np.intp)
            at = np.concatenate([np.arange(start, start + size) for start, size in zip(starts[rows], n, strict=True)])
            for kept in (np.asarray, np.float16, lambda side: np.round(side, 1), lambda side: np.round(side, 3)):
                sides = [np.float32(kept(side[at])) for side in (train, inference)]
                block = Block(np.arange(n.size), np.cumsum(n) - n, n, *sides)
                assert not check_block(block).codes.any(), (path, rows, tokens)
                assert not surely_surplus(sureness(sides[1]))
                first = (sides[1][block.starts], arrays["token_ids"][at][block.starts])
                assert not more_than_all(*first, arrays["group"][rows].tolist())


@pytest.mark.slow
def test_probabilities_of_sampled_tokens_are_not_called_too_sure_by_chance():
    """Of any distributions, one for each token, sure and open; of greedy tokens and of a cold sampler's they are."""
    rng = np.random.default_rng(1)
    for _ in range(300):
        size, hot = int(rng.choice([200, 2000, 20_000])), rng.choice([0.5, 3.0, 10.0], 3)
        logits = rng.standard_normal((size, 20)) * rng.choice(hot, (size, 1))
        logits -= np.log(np.exp(logits).sum(1, keepdims=True))
        token = np.argmax(logits + rng.gumbel(size=logits.shape), 1)
        assert not surely_surplus(sureness(logits[np.arange(size), token]))
        if size > 200 and hot.min() == 10.0:
            assert surely_surplus(sureness(logits.max(1)))


TEMPERATURE = "compare the two sides' temperatures and weights"


def said(train, inference):
    """Remarks on log P and log Q, [rows, tokens]."""
    rows, tokens = train.shape
    lengths = np.full(rows, tokens)
    return remarks(Block(np.arange(rows), np.arange(rows) * tokens, lengths, train.ravel(), inference.ravel()))


@pytest.mark.parametrize(("temperature", "side"), [(0.7, "inference"), (0.8, "inference"), (1.25, "training")])
@pytest.mark.parametrize("noise", [0.1, 0.25])
def test_drift_that_looks_like_a_temperature_is_remarked(temperature, side, noise):
    """Under kernels that differ as in fp8, where no line fits it."""
    for seed in range(5):
        rng = np.random.default_rng(seed)
        logits = texts(rng, (100, 128), 0.5)
        other = (logits + noise * rng.standard_normal(logits.shape)) / temperature
        found = said(*sampled(rng, logits, other))
        assert TEMPERATURE in found, seed
        assert f"the {side} side is surer of" in found, seed


def test_a_slice_that_drifts_beside_one_that_does_not_is_no_copy_with_noise():
    for seed in range(5):
        rng = np.random.default_rng(seed)
        logits = texts(rng, (100, 128), 0.8) / 4.0
        noise = np.where(np.arange(100) % 2, 1.5, 0.03)[:, None, None] * rng.standard_normal(logits.shape)
        assert "may be a copy" not in said(*sampled(rng, logits, logits + noise)), seed


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*HONEST, "garbage"])
def test_drift_of_kernels_does_not_look_like_a_temperature(kind):
    """Nor does a kernel that computes something else at some positions, or at all."""
    for seed in range(10):
        for share in (0.15, 0.5, 1.0) if kind == "garbage" else (0.0,):
            assert TEMPERATURE not in said(*honest(kind, np.random.default_rng(seed), (100, 128), 0.5, share)), seed


@pytest.mark.parametrize("path", sorted(RECORDINGS.glob("*.npz")), ids=lambda path: path.stem)
def test_real_kernels_do_not_look_like_a_temperature(path):
    recording = load_recording(path)
    assert TEMPERATURE not in said(recording.train.reshape(1, -1), recording.inference.reshape(1, -1))
