"""Importers: each trainer's own layout, written as the trainer writes it, becomes the sequences it holds."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import sys
import types
from types import SimpleNamespace

import numpy as np
import pytest

from kc_otel.recordings.importers.trainer_files import files_of, prime_rl_is_complete, trainer_of
from kc_otel.recordings.read_table import Problems
from kc_otel.recordings.recording import RecordingError
from kc_otel.recordings.recording_files import load_recording
from tests.recordings._files import read, write_rows


def numbers(rows=3, tokens=10, seed=0):
    """Log P and log Q of kernels that differ by rounding, float32."""
    rng = np.random.default_rng(seed)
    inference = np.log(rng.uniform(0.05, 1, (rows, tokens))).astype(np.float32)
    return np.minimum(inference + 0.01 * rng.standard_normal((rows, tokens)), 0).astype(np.float32), inference


def nemo_line(train, inference, *, prompt=3, padding=2, **changes):
    """A sample as `log_batched_dict_as_jsonl` writes it: cut from the batch with its axis, prompt and padding zero."""
    size, before, after = prompt + len(train) + padding, [0.0] * prompt, [0.0] * padding
    values = {
        "content": "question and answer", "rewards": 1.0, "input_lengths": prompt + len(train),
        "token_ids": [*range(size)], "token_loss_mask": [0] * prompt + [1] * len(train) + [0] * padding,
        "sample_loss_mask": 1.0, "advantages": [0.5] * size,
        "generation_logprobs": [*before, *map(float, inference), *after],
        "prev_logprobs": [*[-3.0 for _ in before], *map(float, train), *after],
        **changes,
    }  # fmt: skip
    return {**{name: [value] for name, value in values.items()}, "idx": 0}


def prime_line(train, inference, *, prompt=2, **changes):
    """A record as `TokenExporter` writes it."""
    size = prompt + len(train)
    return {
        "schema_version": 1, "step": 7, "export_step": 7, "rank": 0, "run_id": None, "env_name": "math",
        "token_ids": [*range(size)], "loss_mask": [False] * prompt + [True] * len(train),
        "advantages": [-0.25] * size, "rewards": [None] * prompt + [0.5] * len(train),
        "inference_logprobs": [0.0] * prompt + [float(logprob) for logprob in inference],
        "trainer_logprobs": [-2.0] * prompt + [float(logprob) for logprob in train],
        "entropy": [1.0] * size, **changes,
    }  # fmt: skip


def sides(found):
    return [sequence.train for sequence in found], [sequence.inference for sequence in found]


def test_nemo_rl_samples_are_read_without_prompt_and_padding(tmp_path):
    train, inference = numbers()
    lines = [nemo_line(p, q) for p, q in zip(train, inference, strict=True)]
    path = write_rows(tmp_path / "train_data_step12.jsonl", lines)
    assert trainer_of(path) == "nemo-rl"
    found = read(path)
    np.testing.assert_array_equal(sides(found), (train, inference))
    assert found[0].weights == (12, None)
    assert found[0].token_ids.tolist() == [*range(3, 13)]
    assert set(found[0].advantages) == {0.5}
    assert found[0].attributes == {
        "train_weights": 12, "prompt_id": found[0].prompt, "rewards": 1.0, "input_lengths": 13,
        "sample_loss_mask": 1.0, "reward": 1.0, "step": 12, "prompt_tokens": 3, "completion_tokens": 10,
    }  # fmt: skip
    assert len({sequence.prompt for sequence in found} - {None}) == 1, "equal prompt tokens are one prompt"


def test_nemo_rl_lines_that_cannot_be_compared_are_refused_one_by_one(tmp_path):
    train, inference = numbers()
    old = nemo_line(train[0], inference[0])
    del old["token_loss_mask"]
    lines = [
        nemo_line(train[0], inference[0], sample_loss_mask=0.0),
        old,
        nemo_line(train[0], inference[0], token_loss_mask=[1]),
        nemo_line(train[1], inference[1], generation_logprobs="none"),
        nemo_line(train[2], inference[2]),
    ]
    refusals = Problems()
    found = read(write_rows(tmp_path / "train_data_step1.jsonl", lines), refusals)
    assert len(found) == 1
    assert refusals.counts == {"no_tokens": 1, "no_logprobs": 1, "shape_mismatch": 2}
    assert "train_data_step1.jsonl: line 2: has no token_loss_mask" in refusals.first["no_logprobs"]


def test_prime_rl_exports_are_read_where_they_were_sampled(tmp_path):
    train, inference = numbers()
    echo = prime_line(train[1], inference[1], rl_weights=[*[1.0] * 5, 0.0, *[1.0] * 6])
    lines = [prime_line(train[0], inference[0]), echo]
    path = write_rows(tmp_path / "token_exports" / "step_7" / "rank_0.jsonl", lines)
    assert trainer_of(path) == "prime-rl"
    first, second = read(path)
    np.testing.assert_array_equal(first.train, train[0])
    np.testing.assert_array_equal(second.inference, np.delete(inference[1], 3))
    assert first.weights == (7, None)
    assert (first.attributes["env_name"], first.attributes["reward"]) == ("math", 0.5)
    assert set(first.advantages) == {-0.25}
    assert first.prompt == second.prompt is not None


def test_prime_rl_tokens_of_another_model_are_left_out(tmp_path):
    train, inference = numbers()
    nulls, zeros, ones = [None] * 12, [0.0] * 12, [1.0] * 12
    kinds = [
        {"rl_weights": nulls, "ce_weights": nulls, "ref_kl_weights": nulls},
        {"rl_weights": zeros, "ce_weights": ones, "ref_kl_weights": nulls},
        {"rl_weights": [*ones[:8], *zeros[:4]], "ce_weights": zeros, "ref_kl_weights": nulls},
        {"rl_weights": zeros, "ce_weights": zeros, "ref_kl_weights": ones},
    ]
    lines = [prime_line(train[0], inference[0]) | weights for weights in kinds]
    refusals = Problems()
    found = read(write_rows(tmp_path / "rank_0.jsonl", lines), refusals)
    assert [row.train.tolist() for row in found] == [train[0].tolist(), train[0][:6].tolist(), train[0].tolist()]
    assert refusals.counts == {"no_tokens": 1}
    assert refusals.first["no_tokens"].endswith(": line 2: loss_mask and rl_weights leave no token")


def test_prime_rl_without_losses_and_advantages_and_of_another_schema(tmp_path):
    train, inference = numbers()
    line = prime_line(train[0], inference[0], advantages=[None] * 12)
    nothing = prime_line(train[0], inference[0], loss_mask=[False] * 12)
    bare = {"schema_version": 1, "loss_mask": [True], "trainer_logprobs": [-1.0]}
    refusals = Problems()
    (found,) = read(write_rows(tmp_path / "a.jsonl", [line, nothing, bare]), refusals)
    assert found.train.size == 10
    assert found.advantages is None
    assert refusals.counts == {"no_tokens": 1, "no_logprobs": 1}
    with pytest.raises(RecordingError, match=r"b\.jsonl: line 1: schema_version: 2 is not 1"):
        read(write_rows(tmp_path / "b.jsonl", [{**line, "schema_version": 2}]))


def test_prime_rl_says_when_a_folder_is_complete(tmp_path):
    path = write_rows(tmp_path / "token_exports" / "step_1" / "rank_0.jsonl", [])
    assert not prime_rl_is_complete(path)
    (path.parent / "STABLE").touch()
    assert prime_rl_is_complete(path)
    assert prime_rl_is_complete(write_rows(tmp_path / "a.jsonl", []))


class DataProto:
    """Pickles as verl's class does: under its name, with its state."""

    __module__ = "verl.protocol"

    def __init__(self, state):
        self.state = state

    def __getstate__(self):
        return self.state

    def __setstate__(self, state):
        self.batch, self.non_tensor_batch, self.meta_info = state


@pytest.fixture
def proto(monkeypatch):
    """Bytes of a DataProto pickle; in the pickling process verl seems to be there."""

    def dump(state):
        module = types.ModuleType("verl.protocol")
        module.DataProto = DataProto
        with monkeypatch.context() as patched:
            patched.setitem(sys.modules, "verl", types.ModuleType("verl"))
            patched.setitem(sys.modules, "verl.protocol", module)
            return pickle.dumps(DataProto(state))

    return dump


def verl_arrays():
    train, inference = numbers()
    mask = np.ones(train.shape, dtype=np.int64)
    mask[1, 6:], mask[2] = 0, 0
    return {
        "old_log_probs": train,
        "rollout_log_probs": np.where(mask, inference, 0).astype(np.float32),
        "response_mask": mask,
        "responses": np.arange(30).reshape(3, 10),
        "attention_mask": np.concatenate([np.array([[0, 1, 1], [1, 1, 1], [0, 0, 1]]), mask], axis=1),
        "advantages": np.full((3, 10), 2.0, dtype=np.float32),
        "token_level_scores": np.eye(3, 10, dtype=np.float32),
    }


OTHERS = {
    "data_source": np.array(["gsm8k", "gsm8k", "math"], dtype=object),
    "min_global_steps": np.array([5, 6, 6], dtype=object),
    "reward_model": np.array([{"ground_truth": "1"}] * 3, dtype=object),
}
META = {"temperature": 0.7, "global_steps": 7}
PROMPTS = {"prompts": np.array([[0, 5, 6], [0, 5, 6], [0, 0, 7]])}


def serialized(arrays):
    """Tensors as `DataProto.__getstate__` has them, without tensordict."""
    torch, buffer = pytest.importorskip("torch"), io.BytesIO()
    torch.save({name: torch.from_numpy(array.copy()) for name, array in arrays.items()}, buffer)
    return buffer.getvalue()


def test_verl_batches_are_read_without_verl(tmp_path, proto):
    path = tmp_path / "7.pkl"
    path.write_bytes(proto((serialized(verl_arrays()), OTHERS, META)))
    assert trainer_of(path) == "verl"
    refusals = Problems()
    first, second = read(path, refusals)
    train, inference = numbers()
    np.testing.assert_array_equal(first.train, train[0])
    np.testing.assert_array_equal(second.inference, inference[1, :6])
    assert second.token_ids.tolist() == [*range(10, 16)]
    assert first.weights == (6, 5), "step 7 scores with the weights that step 6 made"
    assert first.attributes == {
        "data_source": "gsm8k", "min_global_steps": 5, "prompt_tokens": 2, "reward": 1.0, "step": 7,
        "temperature": 0.7, "train_weights": 6, "inference_weights": 5, "completion_tokens": 10,
    }  # fmt: skip
    assert refusals.counts == {"no_tokens": 1}
    assert "verl" not in sys.modules


def test_verl_batches_name_prompts_and_multiply_their_masks(tmp_path, proto):
    arrays = verl_arrays()
    loss = np.array(arrays["response_mask"])
    loss[0, 2:4] = 0
    path = tmp_path / "7.pkl"
    for others, more in ((OTHERS | {"uid": np.array(["a", "a", "b"], dtype=object)}, {}), (OTHERS, PROMPTS)):
        path.write_bytes(proto((serialized(arrays | more | {"loss_mask": loss}), others, META)))
        first, second = read(path)
        assert first.prompt == second.prompt is not None
        np.testing.assert_array_equal(first.train, np.delete(numbers()[0][0], [2, 3]))


def _rebuild_tensordict_files_consolidated(*_):
    raise AssertionError("tensordict's own code ran")


class Consolidated:
    """Pickles as a TensorDict of tensordict 0.10 does after `consolidate`: as views of one storage of bytes."""

    def __init__(self, tensors):
        self.tensors = tensors

    def __reduce__(self):
        torch, leaves, parts, end = pytest.importorskip("torch"), {}, [], 0
        for name, tensor in self.tensors.items():
            parts.append(tensor.contiguous().reshape(-1).view(torch.uint8))
            begin, end = end, end + parts[-1].numel()
            leaves[name] = str(tensor.dtype), list(tensor.shape), begin, end, 0
        return _rebuild_tensordict_files_consolidated, ({"cls": "TensorDict", "leaves": leaves}, torch.cat(parts))


def test_verl_batches_of_its_own_tensordict_and_of_bare_tensors_are_read(tmp_path, monkeypatch, proto):
    torch = pytest.importorskip("torch")
    tensors = {name: torch.from_numpy(array.copy()) for name, array in verl_arrays().items()}
    kinds = {"plain": tensors, "bfloat16": tensors | {"advantages": tensors["advantages"].bfloat16()}}
    kinds["consolidated"] = Consolidated(tensors)
    with contextlib.suppress(ImportError):
        from tensordict import TensorDict

        kinds["tensordict"] = TensorDict(tensors, batch_size=[3]).contiguous().consolidate()
    for name, batch in kinds.items():
        buffer = io.BytesIO()
        with monkeypatch.context() as patched:
            if name == "consolidated":
                rebuild = _rebuild_tensordict_files_consolidated
                patched.setattr(rebuild, "__module__", "tensordict._reductions")
                patched.setitem(sys.modules, "tensordict", types.ModuleType("tensordict"))
                patched.setitem(sys.modules, rebuild.__module__, SimpleNamespace(**{rebuild.__name__: rebuild}))
            torch.save(batch, buffer)
        for ending, content in (("pkl", proto((buffer.getvalue(), OTHERS, META))), ("pt", buffer.getvalue())):
            path = tmp_path / f"{name}.{ending}"
            path.write_bytes(content)
            np.testing.assert_array_equal(read(path)[0].train, numbers()[0][0])
            assert set(read(path)[0].advantages) == {2.0}


class Planted:
    def __reduce__(self):
        return os.mkdir, ("planted",)


def test_a_pickle_runs_nothing(tmp_path, monkeypatch, proto):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "evil.pkl"
    path.write_bytes(pickle.dumps(Planted()))
    with pytest.raises(RecordingError, match=r"holds \w+\.mkdir, which a batch needs not; save it without that"):
        read(path)
    inside = {**OTHERS, "extra": np.array([Planted()] * 3, dtype=object)}
    path.write_bytes(proto((serialized(verl_arrays()), inside, META)))
    with pytest.raises(RecordingError, match="mkdir"):
        read(path)
    assert not (tmp_path / "planted").exists()
    path.write_bytes(pickle.dumps([1, 2]))
    with pytest.raises(RecordingError, match="not a DataProto"):
        read(path)


def test_torch_files_are_loaded_without_running_them(tmp_path, monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    torch.save({"old_log_probs": Planted()}, tmp_path / "a.pt")
    with pytest.raises(RecordingError, match="cannot be read safely"):
        read(tmp_path / "a.pt")
    assert not (tmp_path / "planted").exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rollout_log_probs": None}, r"row 0: has no rollout_log_probs; .*calculate_log_probs=True .* \(2 more like"),
        ({"response_mask": None, "attention_mask": None}, "padding would count"),
        ({"response_mask": np.ones((3, 4), dtype=np.int64)}, "row 0: .* and mask have 10, 10, 4 entries"),
    ],
)
def test_verl_batches_that_cannot_be_compared_say_why(tmp_path, proto, change, said):
    arrays = {name: array for name, array in {**verl_arrays(), **change}.items() if array is not None}
    path = tmp_path / "a.pkl"
    path.write_bytes(proto((serialized(arrays), {}, {})))
    with pytest.raises(RecordingError, match=said):
        read(path)


def test_verl_text_dumps_are_refused_with_what_to_save_instead(tmp_path):
    line = {"input": "1+1", "output": "2", "gts": "2", "score": 1.0, "step": 3}
    with pytest.raises(RecordingError, match=r"text and scores without log-probabilities.*save_to_disk"):
        trainer_of(write_rows(tmp_path / "3.jsonl", [line]))


def test_folders_give_their_files_in_the_order_of_their_steps(tmp_path):
    for step in (10, 9, 1):
        write_rows(tmp_path / f"train_data_step{step}.jsonl", [])
    write_rows(tmp_path / "notes.txt", [])
    steps = [path.stem.removeprefix("train_data_step") for path in files_of([tmp_path])]
    assert steps == ["1", "9", "10"]
    assert files_of([tmp_path, tmp_path / "train_data_step9.jsonl"]) == files_of([tmp_path])
    with pytest.raises(FileNotFoundError, match="no such file or folder"):
        files_of([tmp_path / "nowhere"])


def test_what_trainers_write_without_log_probabilities_beside_their_training_data_is_left_out(tmp_path):
    names = ("exp_001/train_data_step2.jsonl", "exp_001/val_data_step2.jsonl", "rollout_data/0.pt", "train_data/0.pt")
    files = [write_rows(tmp_path / name, []) for name in names]
    assert files_of([tmp_path]) == [files[0], files[3]]
    assert files_of([files[1], tmp_path / "rollout_data"]) == files[1:3], "what is asked for is read, or refused"


def test_what_a_trainer_wrote_is_a_recording_and_so_is_its_folder(tmp_path):
    train, inference = numbers(4)
    for rank in range(2):
        lines = [prime_line(train[row], inference[row]) for row in (2 * rank, 2 * rank + 1)]
        write_rows(tmp_path / "step_7" / f"rank_{rank}.jsonl", lines)
    single = load_recording(tmp_path / "step_7" / "rank_0.jsonl")
    np.testing.assert_array_equal(single.train, train[:2].ravel())
    assert (single.attributes[0]["train_weights"], single.attributes[0]["step"]) == (7, 7)
    both = load_recording(tmp_path / "step_7")
    np.testing.assert_array_equal(both.train, train.ravel())
    assert both.prompts.tolist() == [0, 0, 0, 0]


def test_records_that_cannot_be_compared_are_one_line_with_a_count(tmp_path):
    train, inference = numbers()
    line = prime_line(train[0], inference[0])
    path = write_rows(tmp_path / "rank_0.jsonl", [line, line | {"loss_mask": [False] * 12}])
    assert load_recording(path).masked == 1
    write_rows(path, [line, *[line | {"trainer_logprobs": [-1.0]}] * 30])
    with pytest.raises(
        RecordingError, match=r"rank_0\.jsonl: line 2: .* have 1, 12, 12 entries \(29 more like this\)$"
    ):
        load_recording(path)
