"""Recordings: what is written is read back, every layout means the same, and what is wrong is told with its place."""

import gzip
import json
import math
import re
import sys
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kc_otel.recordings.recording import Recording, RecordingError
from kc_otel.recordings.recording_files import load_recording, save_recording
from tests.recordings._files import write_columns, write_recording, write_rows

ENDINGS = ("npz", "jsonl", "jsonl.gz", "parquet")
PER_TOKEN = ("train", "inference", "token_ids", "advantages")


def recording(lengths=(3, 1, 2), seed=0, **more):
    rng = np.random.default_rng(seed)
    counts = np.array(lengths, dtype=np.int64)
    inference = -rng.exponential(size=counts.sum()) - 0.01
    return Recording(
        train=np.minimum(inference + 0.01 * rng.standard_normal(inference.size), 0.0),
        inference=inference,
        lengths=counts,
        attributes=tuple({"completion_tokens": n, "task": "code", "n": row} for row, n in enumerate(counts.tolist())),
        **more,
    )


def full(seed=0):
    plain = recording(seed=seed)
    return replace(plain, token_ids=np.arange(6), advantages=np.repeat([1.0, -1.0, 0.5], plain.lengths))


def same(left, right):
    for name in PER_TOKEN:
        a, b = getattr(left, name), getattr(right, name)
        assert (a is None) == (b is None), name
        assert a is None or (a.dtype == b.dtype and np.array_equal(a, b)), name
    assert np.array_equal(left.lengths, right.lengths)
    assert left.lengths.dtype == right.lengths.dtype == np.int64
    assert tuple(map(dict, left.attributes)) == tuple(map(dict, right.attributes))


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("of", [recording, full])
def test_what_is_saved_is_loaded(tmp_path, ending, of):
    path = write_recording(of(), tmp_path / f"log.{ending}")
    loaded = load_recording(path)
    same(of(), loaded)
    assert loaded.source == str(path)
    assert loaded.masked == 0


def test_logits_are_kept_in_npz_alone(tmp_path):
    z = np.random.default_rng(1).standard_normal((2, 6, 9)).astype(np.float32)
    held = replace(full(), train_logits=z[0], inference_logits=z[1])
    save_recording(held, tmp_path / "l.npz")
    again = load_recording(tmp_path / "l.npz")
    same(held, again)
    assert np.array_equal(again.train_logits, z[0])
    with pytest.raises(RecordingError, match=r"l\.parquet: recordings are written as \.npz"):
        save_recording(held, tmp_path / "l.parquet")


def test_padded_arrays_with_a_mask_or_lengths_mean_the_same_as_packed_ones(tmp_path):
    want = recording()
    train, inference = np.full((2, 3, 4), 9.0)
    mask = np.zeros((3, 4), dtype=np.int64)
    for row, (begin, length) in enumerate(zip(want.starts, want.lengths, strict=True)):
        train[row, :length] = want.train[begin : begin + length]
        inference[row, :length] = want.inference[begin : begin + length]
        mask[row, :length] = 1
    inference[1, 2] = np.nan
    extra = {"task": np.array(["code"] * 3), "n": np.arange(3)}
    variants = {
        "mask": {"old_log_probs": train, "rollout_log_probs": inference, "response_mask": mask},
        "lengths": {"trainer_logprobs": train, "inference_logprobs": inference, "lengths": want.lengths},
        "both": {"prev_logprobs": train, "generation_logprobs": inference, "mask": mask, "lengths": [4, 4, 2]},
        "packed": {
            "old_per_token_logps": want.train,
            "sampling_per_token_logps": want.inference,
            "lengths": want.lengths,
        },
    }
    for name, arrays in variants.items():
        np.savez(tmp_path / f"{name}.npz", **arrays, **extra)
        same(want, load_recording(tmp_path / f"{name}.npz"))


def test_ragged_rows_with_masks(tmp_path):
    names = ("train_logprobs", "inference_logprobs", "completion_mask", "task")
    values = (([-1, -2, -3], [-1.1, -2, -3], [1, 0, 1], "a"), ([-1], [-1], [0], "b"), ([-4, -5], [-4, -5], [1, 1], "c"))
    rows = [dict(zip(names, row, strict=True)) for row in values]
    for ending in ("jsonl", "parquet"):
        loaded = load_recording(write_rows(tmp_path / f"a.{ending}", rows))
        assert loaded.train.tolist() == [-1, -3, -4, -5]
        assert loaded.inference.tolist() == [-1.1, -3, -4, -5]
        assert loaded.lengths.tolist() == [2, 2]
        assert [attributes["task"] for attributes in loaded.attributes] == ["a", "c"]
        assert loaded.masked == 1


@pytest.mark.parametrize("ending", ["npz", "jsonl", "parquet"])
def test_advantages_per_sequence_are_repeated_over_its_tokens(tmp_path, ending):
    path, side = tmp_path / f"a.{ending}", [[-1.0] * 2, [-1.0]]
    if ending == "npz":
        np.savez(path, train_logprobs=[-1.0] * 3, inference_logprobs=[-1.0] * 3, lengths=[2, 1], advantages=[0.5, -2.0])
    else:
        write_columns(path, train_logprobs=side, inference_logprobs=side, advantage=[0.5, -2.0])
    assert load_recording(path).advantages.tolist() == [0.5, 0.5, -2.0]


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_mass_that_truncation_kept_renormalises_both_sides(tmp_path, ending):
    log_p, log_q, p_kept, q_kept = np.log([[0.2, 0.3, 0.1], [0.4, 0.25, 0.1], [0.8, 0.75, 0.9], [0.9, 0.8, 0.9]])
    path = tmp_path / "raw.npz"
    np.savez(
        path, train_logprobs=log_p, inference_logprobs=log_q, train_kept_logprobs=p_kept, inference_kept_logprobs=q_kept
    )
    read = load_recording(path)
    assert read.lengths.tolist() == [3], "an .npz without lengths is one sequence"
    assert np.exp(read.train) == pytest.approx([0.25, 0.4, 1 / 9])
    assert np.exp(read.inference) == pytest.approx([4 / 9, 0.3125, 1 / 9])
    assert read.train_kept == pytest.approx(p_kept)
    again = write_recording(read, tmp_path / f"again.{ending}")
    for name in ("train", "inference", "train_kept"):
        assert getattr(load_recording(again), name) == pytest.approx(getattr(read, name))


@pytest.mark.parametrize(
    ("kept", "said"),
    [
        ([0.0, 0.7, 0.0], "train_kept_logprobs: token 1 is 0.7; a log-probability is at most 0"),
        ([0.0, -3.0, 0.0], "token 1 is 2; over the mass in train_kept_logprobs: was the token kept?"),
        ([0.0, np.nan, 0.0], "train_kept_logprobs: token 1 is nan"),
    ],
)
def test_a_mass_that_cannot_be_is_named_with_its_token(tmp_path, kept, said):
    log_p = np.full(3, -1.0)
    np.savez(tmp_path / "a.npz", train_logprobs=log_p, inference_logprobs=log_p, train_kept_logprobs=kept)
    with pytest.raises(RecordingError, match=re.escape(said)):
        load_recording(tmp_path / "a.npz")


def test_any_other_names_are_said_with_columns(tmp_path):
    np.savez(tmp_path / "a.npz", fsdp=[-1.0, -2.0], vllm=[-1.5, -2.0], n=[1, 1], split=["x", "y"])
    loaded = load_recording(tmp_path / "a.npz", columns={"train": "fsdp", "inference": "vllm", "lengths": "n"})
    assert loaded.train.tolist() == [-1, -2]
    assert [dict(attributes) for attributes in loaded.attributes] == [
        {"completion_tokens": 1, "split": "x"}, {"completion_tokens": 1, "split": "y"},
    ]  # fmt: skip


def test_text_under_a_name_of_token_ids_is_an_attribute_or_nothing(tmp_path):
    row = {"train_logprobs": [-1.0], "inference_logprobs": [-1.0], "responses": "some text"}
    for ending in ("jsonl", "parquet"):
        assert load_recording(write_rows(tmp_path / f"a.{ending}", [row])).token_ids is None


@pytest.mark.parametrize("ending", ENDINGS)
def test_log_densities_may_exceed_0_where_every_row_says_so(tmp_path, ending):
    """They are read as they are; one row that does not say so, or an infinite density, is refused."""
    plain, path = recording((8,) * 6), tmp_path / f"a.{ending}"
    rows = tuple({**row, "density": True} for row in plain.attributes)
    dense = replace(plain, train=plain.train + 3.0, inference=plain.inference + 3.0, attributes=rows)
    write_recording(dense, path)
    same(load_recording(path), dense)
    assert load_recording(path).density
    write_recording(replace(dense, attributes=(*rows[1:], {"task": "code"})), path)
    with pytest.raises(RecordingError, match="rows of log-densities say density: true"):
        load_recording(path)
    write_recording(replace(dense, train=np.where(np.arange(48) == 5, np.inf, dense.train)), path)
    with pytest.raises(RecordingError, match="token 5 is inf; a log-density is finite"):
        load_recording(path)


def test_a_name_has_to_say_the_format(tmp_path):
    (tmp_path / "log.dump").touch()
    with pytest.raises(RecordingError, match=r"log\.dump: the name does not end in \.npz, .*\.parquet: rename it"):
        load_recording(tmp_path / "log.dump")


def test_without_pyarrow_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"")
    with pytest.raises(RecordingError, match=r"pip install 'kc-otel\[parquet\]'"):
        load_recording(tmp_path / "a.parquet")


def test_gzip_that_is_cut_off(tmp_path):
    whole = gzip.compress(json.dumps({"train_logprobs": [-1.0] * 999, "inference_logprobs": [-1.0] * 999}).encode())
    (tmp_path / "a.jsonl.gz").write_bytes(whole[:-9])
    with pytest.raises(RecordingError, match="cut off"):
        load_recording(tmp_path / "a.jsonl.gz")


def test_columns_that_are_no_attributes_are_told_of(tmp_path):
    row = {"train_logprobs": [-1.0, -2.0], "inference_logprobs": [-1.1, -2.0], "task": "code", "note": None}
    rows = [row, {**row, "task": ["prose"], "attributes": {"lang": {"a": 1}}}]
    found = load_recording(write_rows(tmp_path / "a.jsonl", rows))
    assert found.unread == {
        "task": 'holds ["prose"] in line 2, not a plain value', "lang": 'holds {"a": 1} in line 2, not a plain value',
    }  # fmt: skip
    assert found.attributes == ({"completion_tokens": 2, "task": "code"}, {"completion_tokens": 2})
    table = {
        "train_logprobs": [row["train_logprobs"]] * 2, "inference_logprobs": [row["inference_logprobs"]] * 2,
        "task": [["code"], ["prose"]], "tag": [b"x", b"y"], "kind": ["a", None], "attributes": ['{"lang": [1]}', "{}"],
    }  # fmt: skip
    pq.write_table(pa.table(table), tmp_path / "a.parquet")
    found = load_recording(tmp_path / "a.parquet")
    assert found.unread.keys() == {"task", "tag", "lang"}
    assert found.unread["lang"] == "holds [1] in row 0, not a plain value"
    assert found.attributes == ({"completion_tokens": 2, "kind": "a"}, {"completion_tokens": 2})


@pytest.mark.parametrize("form", ["npz", "jsonl"])
def test_all_masks_of_a_row_count(tmp_path, form):
    masks = {"completion_mask": [[1, 1, 1, 0], [1, 1, 0, 0]], "tool_mask": [[1, 0, 1, 1], [1, 1, 1, 1]]}
    sides = {"old_per_token_logps": np.full((2, 4), -1.0), "sampling_per_token_logps": np.full((2, 4), -1.1)}
    path = write_columns(tmp_path / f"a.{form}", **sides, **masks)
    assert load_recording(path).lengths.tolist() == [2, 2]
    assert load_recording(path, columns={"mask": "completion_mask"}).lengths.tolist() == [3, 2]


@pytest.mark.parametrize("ending", ENDINGS)
def test_prompt_tokens_name_the_prompt_where_no_column_does(tmp_path, ending):
    """As with the Recorder's `prompt_ids=`; a group that is NaN, as after a join in pandas, is no name."""
    sides = np.log(np.random.default_rng(4).uniform(0.1, 0.9, (4, 3)))
    columns = {"train_logprobs": sides, "inference_logprobs": sides - 0.01, "mask": np.ones((4, 3), dtype=np.int64)}
    prompts = np.array([[5, 17], [5, 17], [3, 8], [5, 17]])

    def of(**more):
        return load_recording(write_columns(tmp_path / f"log.{ending}", **columns, **more)).prompts

    assert of() is None
    assert of(prompt_ids=prompts).tolist() == [0, 0, 1, 0]
    assert of(group=np.full(4, np.nan)) is None
    assert of(group=np.full(4, np.nan), prompt_ids=prompts).tolist() == [0, 0, 1, 0]
    assert of(group=[1, 2, 2, 3], prompt_ids=prompts).tolist() == [0, 1, 1, 2], "a column that names prompts wins"


@pytest.mark.parametrize("of", ["step", "train_weights"])
@pytest.mark.parametrize("named", [{"group": [7, 7, 7, 7, 8]}, {"prompt_ids": [[5, 17]] * 4 + [[3, 8]]}])
def test_a_prompt_of_another_step_is_another_prompt(tmp_path, of, named):
    """As in the Recorder: loops number the prompts of each batch anew, and a second epoch has the same ones."""
    sides = np.log(np.random.default_rng(4).uniform(0.1, 0.9, (5, 3)))
    path = write_columns(tmp_path / "log.jsonl", train_logprobs=sides, inference_logprobs=sides - 0.01,
                         **named, **{of: [1, 1, 2, 2, 2]})  # fmt: skip
    assert load_recording(path).prompts.tolist() == [0, 0, 1, 1, 2]
    assert load_recording(path).with_attributes({of: math.nan}).prompts.tolist() == [0, 0, 0, 0, 1]


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("written", [int, float, str])
def test_steps_and_lags_are_whole_numbers_however_they_are_written(tmp_path, ending, written):
    """Otherwise what older weights sampled is held against the kernels, or counts for them."""
    rows = np.array([[-1.0, -2.0], [-1.5, -2.5]])
    sides = {"train_logprobs": rows, "inference_logprobs": rows}
    steps = {"train_weights": [written(100)] * 2, "inference_weights": [written(100), written(95)]}
    path = write_columns(tmp_path / f"log.{ending}", **sides, **steps)
    found = load_recording(path)
    assert not found.age_unknown.any()
    assert [row["lag"] for row in found.by_age().attributes] == [0, 5]
    if ending == "jsonl":
        (row, _) = load_recording(write_columns(path, **sides, lag=[written(5)] * 2)).attributes
        assert row["lag"] == 5
        assert type(row["lag"]) is int


def test_sequences_whose_weights_are_called_otherwise_are_of_unknown_age(tmp_path):
    """A name tells by how much it is older only if it is the trainer's own."""
    rows = [
        {"train_logprobs": [-1.0], "inference_logprobs": [-1.0], "train_weights": train, "inference_weights": inference}
        for train, inference in (
            (100, None),
            (100, "step_95"),
            ("step_100", "step_95"),
            ("a", "a"),
            (None, None),
            (None, 95),
        )
    ]
    found = load_recording(write_rows(tmp_path / "log.jsonl", rows))
    assert found.age_unknown.tolist() == [True, True, True, False, False, True]
    rows = [{**row, "inference_weights": None, "weight_versions": [95]} for row in rows]
    found = load_recording(write_rows(tmp_path / "log.jsonl", rows))
    assert found.age_unknown.tolist() == [False, False, True, True, True, True]


def test_weights_that_are_newer_than_the_trainers_are_told_of(tmp_path, caplog):
    rows = np.full((2, 3), -1.0)
    path = write_columns(tmp_path / "a.npz", train_logprobs=rows, inference_logprobs=rows, train_weights=[9, 9],
                         inference_weights=[9, 12])  # fmt: skip
    load_recording(path).by_age()
    (record,) = caplog.records
    assert "3 tokens were sampled by newer weights than the trainer's, the first at step 12" in record.getMessage()


@pytest.mark.parametrize(
    ("names", "prompts"),
    [({"group": 0}, 2), ({"prompt_id": 3.0}, 2), ({"group": "p-0"}, 1), ({"uid": 7}, 1), ({"prompt_ids": [1, 2]}, 1)],
)
def test_group_numbers_begin_anew_in_each_file_of_a_folder(tmp_path, names, prompts):
    """Prompts of several files that are taken for one hide what only one of them shows."""
    rng = np.random.default_rng(0)
    for file in ("step-1", "step-2"):
        side = -rng.random((4, 9)) - 0.1
        rows = [{"train_logprobs": row, "inference_logprobs": row, **names} for row in side.tolist()]
        write_rows(tmp_path / f"{file}.jsonl", rows)
    assert np.unique(load_recording(tmp_path).prompts).size == prompts
    assert np.unique(load_recording(tmp_path / "step-1.jsonl").prompts).size == 1
