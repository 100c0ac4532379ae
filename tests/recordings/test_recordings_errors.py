"""What is wrong with a recording is said with file, row, field and remedy, all of it at once."""

import json
import re

import numpy as np
import pytest

from kc_otel.recordings.recording import RecordingError
from kc_otel.recordings.recording_files import load_recording
from tests.recordings._files import write_columns, write_rows

GOOD = {"train_logprobs": [-1.0, -2.0], "inference_logprobs": [-1.0, -2.5]}


@pytest.fixture
def problems(tmp_path):
    """Sentences about a .jsonl file with these rows, without the file's name."""

    def of(*rows, **options):
        path = tmp_path / "log.jsonl"
        path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
        with pytest.raises(RecordingError) as caught:
            load_recording(path, **options)
        assert all(sentence.startswith(f"{path}: ") for sentence in caught.value.problems)
        assert str(caught.value) == "\n".join(caught.value.problems)
        return [sentence.removeprefix(f"{path}: ") for sentence in caught.value.problems]

    return of


NAN, ROWS = float("nan"), np.full((2, 3), -1.0)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({**GOOD, "train_logprobs": [-1.0, NAN]}, "line 2: train_logprobs: token 1 is nan; mask the token"),
        ({**GOOD, "train_logprobs": [None, -1.0]}, "line 2: train_logprobs: token 0 is nan"),
        ({**GOOD, "inference_logprobs": [0.7, -1.0]}, "line 2: inference_logprobs: token 0 is 0.7; a log-probability"),
        ({**GOOD, "train_logprobs": [-1.0]}, "line 2: inference_logprobs: has 2 numbers where train_logprobs has 1"),
        ({"train_logprobs": [], "inference_logprobs": []}, "line 2: train_logprobs: is empty; leave the row out"),
        ({"train_logprobs": [-1.0, -2.0]}, "line 2: inference_logprobs: is missing, not a list of numbers"),
        ({**GOOD, "train_logprobs": "text"}, 'line 2: train_logprobs: holds "text", not a list of numbers'),
        ({**GOOD, "train_logprobs": [[-1.0], [-2.0]]}, "line 2: train_logprobs: holds [[-1.0], [-2.0]], not a list"),
        ({**GOOD, "train_logprobs": [0.0, 0.0]}, "every token is exactly 0 on the training side"),
        ({**GOOD, "inference_logprobs": [-np.inf, -1.0]}, "The inference kernel gives probability 0 to a token"),
        ({name: [-1.0, -np.inf, -np.inf] for name in GOOD}, "The inference kernel gives probability 0 to a token"),
        ("{not json", "line 2: is not JSON"),
        ("[1, 2]", "line 2: is not a JSON object but list"),
    ],
)
def test_a_bad_row_is_named(problems, row, message):
    found = problems(GOOD, row)
    assert len(found) == 1
    assert message in found[0]


def test_ids_that_are_no_whole_numbers_are_named(problems):
    (found,) = problems({**GOOD, "token_ids": [1, None]})
    assert found.startswith("line 1: token_ids: holds [1, null], not a list of numbers")


def test_a_shift_by_one_token_is_named(problems):
    rng = np.random.default_rng(0)
    values = (-3 * rng.random(40)).tolist()
    found = problems({"train_logprobs": values[1:], "inference_logprobs": values[:-1]})
    assert len(found) == 1
    assert found[0].startswith("INVALID INPUT, not_same_tokens: line 1: train_logprobs and inference_logprobs: ")
    assert "from the first token on the sides do not score the same tokens (lag -1)" in found[0]
    assert "align both sides to the token that they score" in found[0]


def test_a_fault_of_all_rows_is_one_sentence(problems):
    """A base, a temperature or a mask is wrong for a whole file: its first row stands for the others."""
    rng = np.random.default_rng(0)
    rows = [(-3 * rng.random(80)).tolist() for _ in range(30)]
    (found,) = problems(
        *[{"train_logprobs": [logprob / np.log(2) for logprob in row], "inference_logprobs": row} for row in rows]
    )
    assert found.startswith("INVALID INPUT, temperature_mismatch: line 1: train_logprobs and inference_logprobs: ")
    assert "nats" in found
    assert found.endswith(" (29 more like this)")


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (
            0.06,
            "token 1 is 0.06; above 0 by the rounding of a log-sum-exp in half precision; compute the log-softmax in",
        ),
        (0.8, "token 1 is 0.8; a log-probability is at most 0: is it a logit or a probability?"),
        (
            1.0,
            "INVALID INPUT, placeholder: line 1: .* 2 tokens on the training side, .* token 1 of sequence 0, which is",
        ),
    ],
)
def test_a_number_above_0_is_told_by_what_it_is(problems, value, said):
    """Rounding of half precision, a probability, or what a trainer puts where it has none."""
    (found,) = problems(*[{**GOOD, "train_logprobs": [-1.0, value]}] * 2)
    assert re.search(said.replace("?", r"\?"), found), found


def test_one_fault_in_a_thousand_rows_is_one_line_with_a_count(problems):
    found = problems(*[{**GOOD, "train_logprobs": [-1.0, 5.0 + place]} for place in range(1000)])
    assert len(found) == 1
    assert found[0].startswith("line 1: train_logprobs: token 1 is 5;")
    assert found[0].endswith("(999 more like this)")
    found = problems(*["{broken"] * 900, *[{**GOOD, "train_logprobs": [-1.0]}] * 100)
    assert len(found) == 1
    assert "line 1: is not JSON" in found[0]
    assert found[0].endswith("(899 more like this)")


def test_problems_of_different_kinds_come_together(problems):
    found = problems({**GOOD, "train_logprobs": [NAN, -1.0]}, GOOD, {**GOOD, "inference_logprobs": [-1.0, 3.0]})
    assert [sentence.partition(":")[0] for sentence in found] == ["line 1", "line 3"]


def test_rows_that_are_masked_out_do_not_shift_the_places_of_others(problems):
    gone = {**GOOD, "mask": [0, 0]}
    found = problems(gone, gone, {**GOOD, "train_logprobs": [-1.0, NAN], "mask": [1, 1]})
    assert found[0].startswith("line 3: train_logprobs: token 1 is nan")
    found = problems(gone, {**GOOD, "train_logprobs": [0.0, 0.0], "mask": [1, 1]})
    assert found[0].startswith("INVALID INPUT, placeholder: line 2: train_logprobs and inference_logprobs: ")


def test_columns_that_are_missing_or_ambiguous(problems):
    assert problems({"a": [-1.0], "inference_logprobs": [-1.0]}) == [
        (
            "no column has the train kernel's log-probabilities; there are a and inference_logprobs. "
            "Name it train_logprobs, or say which it is with columns, such as train=NAME"
        )
    ]
    both = {"old_log_probs": [-1.0], "prev_logprobs": [-1.0], "inference_logprobs": [-1.0]}
    assert problems(both) == [
        (
            "old_log_probs and prev_logprobs could both be the train kernel's log-probabilities; "
            "say which with columns, such as train=old_log_probs"
        )
    ]
    assert problems(GOOD, columns={"train": "x"})[0].startswith("columns: there is no column 'x' for train; there are")
    assert "'left' is not a role; roles are train, inference" in problems(GOOD, columns={"left": "x"})[0]


def test_the_canonical_name_comes_first(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({**GOOD, "old_log_probs": [-7.0, -7.0]}))
    assert load_recording(tmp_path / "a.jsonl").train.tolist() == GOOD["train_logprobs"]


def test_a_file_with_nothing_in_it(problems, tmp_path):
    assert problems("") == ["has no sequence; write one object or row for each"]
    assert problems({**GOOD, "mask": [0, 0]}) == ["mask leaves no token of any row; 1 means that a token counts"]
    np.savez(tmp_path / "a.npz", train_logprobs=np.zeros((0, 4)), inference_logprobs=np.zeros((0, 4)))
    with pytest.raises(RecordingError, match="has no sequence"):
        load_recording(tmp_path / "a.npz")


@pytest.mark.parametrize("name", ["a.npz", "a.jsonl", "a.jsonl.gz", "a.parquet"])
def test_a_file_that_is_missing_or_something_else(tmp_path, name):
    with pytest.raises(RecordingError, match=name):
        load_recording(tmp_path / name)
    (tmp_path / name).write_bytes(b"\x93 neither of these \x00\xff")
    with pytest.raises(RecordingError, match=name):
        load_recording(tmp_path / name)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"lengths": [1]}, r"lengths: int64 \[1\] of shape \(1,\) do not add up to the 2 numbers of train_logprobs"),
        ({"lengths": [1.0, 1.0]}, "lengths: float64"),
        ({"inference_logprobs": [-1.0]}, r"inference_logprobs: holds float64 of shape \(1,\), not a number for"),
        ({"train_logprobs": np.zeros((1, 1, 2))}, r"train_logprobs: shape \(1, 1, 2\) is neither padded"),
        ({"train_logprobs": np.array(["a", "b"])}, "train_logprobs: holds text of shape"),
        ({"train_logprobs": np.array([[1], [2, 3]], dtype=object)}, "save rows of different lengths packed"),
        ({"lengths": [1, 1], "attributes": np.array(["{}", "{"])}, 'row 1: attributes: "{" is not a JSON object'),
        ({"lengths": [1, 1], "attributes": np.array([1, 2])}, "row 0: attributes: 1 is not a JSON object"),
        ({"lengths": [1, 1], "advantages": [1.0, np.inf]}, "row 1: advantages: token 0 is inf; an advantage is"),
        (
            {"train_logprobs": ROWS, "inference_logprobs": ROWS, "lengths": [4, 1]},
            r"lengths: .* are not 2 whole numbers from 0 to 3",
        ),
    ],
)
def test_arrays_that_do_not_fit(tmp_path, arrays, message):
    given = {name: np.asarray(value) for name, value in ({**GOOD, **arrays}).items() if value is not None}
    np.savez(tmp_path / "a.npz", **given)
    with pytest.raises(RecordingError, match=message):
        load_recording(tmp_path / "a.npz")


@pytest.mark.parametrize("ending", ["npz", "jsonl"])
@pytest.mark.parametrize("padded", [-np.inf, -100.0, np.nan, 0.5])
def test_a_mask_that_is_additive_or_made_of_labels_or_weights_is_refused(tmp_path, ending, padded):
    """What is not 0 would count: all of the padding, and nothing else."""
    rows, mask = np.full((2, 3), -1.0) - np.arange(6).reshape(2, 3) / 10, np.array([[0.0, 0.0, padded]] * 2)
    path = write_columns(tmp_path / f"a.{ending}", train_logprobs=rows, inference_logprobs=rows, mask=mask)
    with pytest.raises(RecordingError, match=rf"mask: holds {padded:g}; pass truth values, or 1 where a token counts"):
        load_recording(path)


@pytest.mark.parametrize("column", ["tool_mask", "weight_versions", "train_kept_logprobs", "token_ids", "advantages"])
def test_a_column_that_the_first_row_lacks_is_named(problems, column):
    """Without a word the masks of an agent's tool output, or the weights of half of the tokens, would not count."""
    value = [-0.1, -0.2] if column == "train_kept_logprobs" else [1, 0]
    (found,) = problems(GOOD, {**GOOD, column: value}, {**GOOD, column: value})
    assert found == f"line 2: {column}: is not in the first row; write it in every row (1 more like this)"


@pytest.mark.parametrize("ending", ["npz", "jsonl", "parquet"])
def test_a_mask_of_another_name_is_refused(tmp_path, ending):
    """Ignoring it would count what the caller masked; a mask of the prompt and the completion is another thing."""
    rows = np.full((2, 3), -1.0) - np.arange(6).reshape(2, 3) / 10
    columns = {"train_logprobs": rows, "inference_logprobs": rows, "attention_mask": np.ones((2, 9))}
    columns["action_mask"] = np.array([[1, 1, 0]] * 2)
    path = write_columns(tmp_path / f"a.{ending}", **columns)
    with pytest.raises(RecordingError, match="action_mask: would be ignored, so that every token counts; name it mask"):
        load_recording(path)
    assert load_recording(path, columns={"mask": "action_mask"}).lengths.tolist() == [2, 2]
    del columns["action_mask"]
    assert "attention_mask" in load_recording(write_columns(tmp_path / f"b.{ending}", **columns)).unread


def test_files_of_a_folder_of_which_some_lack_a_column(tmp_path):
    """Without truncation the kept mass is 1; which weights sampled nobody can make up."""
    rng = np.random.default_rng(0)
    first, second = (
        [
            {"inference_logprobs": side.tolist(), "train_logprobs": (side - 0.01).tolist()}
            for side in -rng.random((4, 9))
        ]
        for _ in range(2)
    )
    kept = [{**row, "train_kept_logprobs": [-0.005] * 9} for row in second]
    folder = tmp_path / "kept"
    folder.mkdir()
    alone = [load_recording(write_rows(folder / f"{name}.jsonl", of)) for name, of in (("a", first), ("b", kept))]
    assert load_recording(folder).train.tolist() == pytest.approx(np.concatenate([file.train for file in alone]))
    write_rows(folder / "b.jsonl", [{**row, "weight_versions": [1] * 9} for row in second])
    with pytest.raises(RecordingError, match="4 of 8 sequences have no weight_versions; write the column in every"):
        load_recording(folder)


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        ("train_weights", 99.5, "99.5 is not a step, a whole number, or a name"),
        ("inference_weights", True, "True is not a step"),
        ("lag", "old", "'old' is not the number of versions behind, 0 or more"),
        ("lag", -5, "-5 is not the number"),
        ("lag", 0.5, "0.5 is not the number"),
    ],
)
def test_what_is_no_step_is_named(problems, column, value, said):
    (found,) = problems(GOOD, {**GOOD, column: value})
    assert found.startswith(f"line 2: {column}: {said}")
