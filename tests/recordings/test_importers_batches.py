"""Dumps of slime and SkyRL, written as their sources write them, become the sequences they hold."""

from __future__ import annotations

import io
import pickle
import sys
import types

import numpy as np
import pytest
import torch

from kc_otel.recordings.importers import pickled_batches
from kc_otel.recordings.importers.trainer_files import trainer_of
from kc_otel.recordings.read_table import Problems
from kc_otel.recordings.recording import RecordingError
from tests.recordings._files import read

PROMPT, WIDTH = 3, 5
MASK = np.array([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1], [0, 0, 0, 0, 0]])


@pytest.fixture
def sides():
    rng = np.random.default_rng(0)
    inference = np.log(rng.uniform(0.1, 1, (3, WIDTH))).astype(np.float32)
    return (inference + 0.01 * rng.standard_normal((3, WIDTH))).astype(np.float32), inference


def foreign(monkeypatch, module, **classes):
    """A trainer's module that is there while a file is written, and gone when it is read."""
    made = types.ModuleType(module)
    for name, cls in classes.items():
        cls.__module__, cls.__qualname__ = module, name
        setattr(made, name, cls)
    monkeypatch.setitem(sys.modules, module, made)
    for part in [module.rsplit(".", n)[0] for n in range(1, module.count(".") + 1)]:
        monkeypatch.setitem(sys.modules, part, types.ModuleType(part))
    return made


@pytest.fixture
def slime_dump(tmp_path, sides):
    """As `_build_dump_payload` makes it, its samples out of the order of rewards."""
    train, inference = (torch.from_numpy(side) for side in sides)
    samples = [
        {
            "data_parallel_rank": 0, "sample_index": 10 + row, "rollout_position": row, "truncated": 0,
            "tokens": torch.arange(PROMPT + WIDTH), "response_lengths": WIDTH,
            "loss_masks": torch.from_numpy(MASK[row]), "log_probs": train[row], "rollout_log_probs": inference[row],
            "advantages": torch.full((WIDTH,), 0.5), "source_names": "math",
        }
        for row in (2, 1, 0)
    ]  # fmt: skip
    path = tmp_path / "17.pt"
    payload = {"format_version": 2, "rollout_id": 17, "rank": 3, "samples": samples, "dp_shards": []}
    torch.save({**payload, "raw_reward": [0.25, 0.5, 1.0]}, path)
    return path


def test_slime_dumps_are_read(slime_dump, sides):
    assert trainer_of(slime_dump) == "slime"
    refusals = Problems()
    second, first = read(slime_dump, refusals)
    np.testing.assert_array_equal(first.train, sides[0][0])
    np.testing.assert_array_equal(second.inference, sides[1][1, 2:])
    assert (first.weights, first.attributes["reward"], second.attributes["reward"]) == ((17, None), 0.25, 0.5)
    assert (second.token_ids.tolist(), second.advantages.tolist()) == ([5, 6, 7], [0.5] * 3)
    assert second.attributes | {"source_names": "math", "prompt_tokens": 3} == second.attributes
    assert refusals.counts == {"no_tokens": 1}


def test_slime_samples_that_cannot_be_compared_are_counted(tmp_path, slime_dump):
    dump = torch.load(slime_dump)
    del dump["samples"][0]["log_probs"]
    dump["samples"][1]["rollout_log_probs"] = torch.zeros(WIDTH - 1)
    torch.save(dump, slime_dump)
    refusals = Problems()
    assert len(read(slime_dump, refusals)) == 1
    assert refusals.counts == {"no_logprobs": 1, "shape_mismatch": 1}
    assert "17.pt: sample 0: has no log_probs; dump with --save-debug-train-data" in refusals.first["no_logprobs"]
    other = tmp_path / "18.pt"
    torch.save({"rollout_id": 18, "samples": [{"tokens": [1, 2]}]}, other)
    with pytest.raises(RecordingError, match="format version 2"):
        read(other)


def plain(array):
    """A tensor as SkyRL pickles it."""
    return {"format": "numpy", "data": array.tobytes(), "shape": array.shape, "dtype": str(array.dtype)}


def skyrl_file(folder, fields, monkeypatch):
    """A file as `TensorBatch.save` pickles it, its device included; when it is read, SkyRL is not there."""

    class TrainingInputBatch(dict):
        def __reduce__(self):
            return module._rebuild_tensor_batch, (type(self), self.state())

        def state(self):
            return {"batch_dict": dict(self), "batch_size": 3, "device": torch.device("cpu"), "metadata": {}}

    def _rebuild_tensor_batch(*_):
        raise AssertionError("SkyRL's own code ran")

    path = folder / "global_step_4_training_input.pkl"
    name = "skyrl.backends.skyrl_train.training_batch"
    with monkeypatch.context() as patched:
        module = foreign(
            patched, name, TrainingInputBatch=TrainingInputBatch, _rebuild_tensor_batch=_rebuild_tensor_batch
        )
        path.write_bytes(pickle.dumps(TrainingInputBatch(fields)))
    return path


@pytest.fixture
def skyrl_dump(tmp_path, sides, monkeypatch):
    """A field in bfloat16, a list of tensors, one not there."""
    train, inference = sides
    buffer = io.BytesIO()
    torch.save(torch.full((3, WIDTH), 0.5, dtype=torch.bfloat16), buffer)
    fields = {
        "sequences": plain(np.tile(np.arange(PROMPT + WIDTH), (3, 1))), "action_log_probs": plain(train),
        "rollout_logprobs": plain(inference), "loss_mask": plain(MASK.astype(np.float32)), "values": None,
        "advantages": {"format": "torch", "data": buffer.getvalue()},
        "pixel_values": {"format": "tensor_list", "items": []},
    }  # fmt: skip
    return lambda **changes: skyrl_file(tmp_path, {**fields, **changes}, monkeypatch)


def test_skyrl_dumps_are_read_without_skyrl(skyrl_dump, sides):
    path = skyrl_dump()
    assert trainer_of(path) == "skyrl"
    refusals = Problems()
    first, second = read(path, refusals)
    np.testing.assert_array_equal(first.train, sides[0][0])
    np.testing.assert_array_equal(second.inference, sides[1][1, 2:])
    assert (second.token_ids.tolist(), second.advantages.tolist(), second.weights) == ([5, 6, 7], [0.5] * 3, (4, None))
    assert refusals.counts == {"no_tokens": 1}


def test_a_skyrl_token_counts_under_both_masks(skyrl_dump, sides):
    other = plain((np.arange(WIDTH) > 0).astype(np.float64)[None].repeat(3, 0))
    first, *_ = read(skyrl_dump(loss_mask=plain(np.ones((3, WIDTH))), response_mask=other))
    np.testing.assert_array_equal(first.train, sides[0][0][1:])


def test_rollouts_of_a_skyrl_prompt_are_of_one_prompt_whatever_their_lengths(skyrl_dump):
    """SkyRL pads prompt and response as one block, so that shorter responses have the prompt's end before them."""
    rows = [[7, 8, 9, 1, 1, 1, 1, 1], [0, 0, 7, 8, 9, 1, 1, 1], [0, 7, 8, 5, 1, 1, 1, 1]]
    masks = [[1, 1, 1, 1, 1], [0, 0, 1, 1, 1], [0, 1, 1, 1, 1]]
    first, shorter, other = read(
        skyrl_dump(
            sequences=plain(np.array(rows)), attention_mask=plain((np.array(rows) > 0).astype(np.int64)),
            response_mask=plain(np.array(masks)), loss_mask=plain(np.array(masks, dtype=np.float32)),
        )
    )  # fmt: skip
    assert first.prompt == shorter.prompt != other.prompt
    assert {row.attributes["prompt_tokens"] for row in (first, shorter, other)} == {3}


def test_a_container_of_one_trainer_is_none_of_another(tmp_path, skyrl_dump):
    content = skyrl_dump().read_bytes()
    with pytest.raises(RecordingError, match="_rebuild_tensor_batch"):
        pickled_batches.unpickled(tmp_path, content, "verl")
