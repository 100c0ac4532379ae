"""One reader for whatever holds both kernels' log-probabilities: trainers' files and folders of them."""

import json

import numpy as np
import pytest

from kc_otel.recordings.recording import RecordingError
from kc_otel.recordings.recording_files import load_recording


def prime_rl(place):
    """A line of prime-rl's export: a prompt of two tokens, and three that were sampled."""
    mask = [False, False, True, True, True]
    sides = {"trainer_logprobs": [-9.0, -9.0, -1.0, -2.0, -0.5 * place], "inference_logprobs": [0, 0, -1.5, -1.5, -1.0]}
    return {"schema_version": 1, "step": 3, "loss_mask": mask, "token_ids": [1, 2, 3, 4, place], **sides}


def test_what_a_trainer_wrote_is_a_recording_and_so_is_its_folder(tmp_path):
    """Masks are applied, versions and steps are attributes; files of a folder follow each other."""
    folder = tmp_path / "step_3"
    folder.mkdir()
    for rank in range(2):
        lines = [json.dumps(prime_rl(place + 2 * rank)) for place in (1, 2)]
        (folder / f"rank_{rank}.jsonl").write_text("\n".join(lines))
    single = load_recording(folder / "rank_0.jsonl")
    assert single.lengths.tolist() == [3, 3]
    assert single.train.tolist() == [-1.0, -2.0, -0.5, -1.0, -2.0, -1.0]
    assert single.token_ids.tolist() == [3, 4, 1, 3, 4, 2]
    assert (single.attributes[0]["train_weights"], single.attributes[0]["step"]) == (3, 3)
    both = load_recording(folder)
    np.testing.assert_array_equal(both.train[:6], single.train)
    assert both.lengths.size == 4
    assert both.prompts.tolist() == [0, 0, 0, 0]


def test_records_that_cannot_be_compared_are_one_line_with_a_count(tmp_path):
    path = tmp_path / "rank_0.jsonl"
    gone, short = prime_rl(1) | {"loss_mask": [False] * 5}, prime_rl(2) | {"trainer_logprobs": [-1.0]}
    path.write_text("\n".join(map(json.dumps, [prime_rl(1), gone])))
    assert len(load_recording(path).masked) == 1
    path.write_text("\n".join(map(json.dumps, [prime_rl(1), *[short] * 30])))
    with pytest.raises(RecordingError, match=r"rank_0\.jsonl:2: .* have 1, 5, 5 entries \(29 more like this\)$"):
        load_recording(path)
