"""Sequences that kernels are run on, and names of the boundaries that are held against each other."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from kc_otel.diagnose.boundaries import Boundary, boundaries_of
from kc_otel.diagnose.located import NotComparableError
from kc_otel.diagnose.same_checkpoint import complete_layers
from kc_otel.diagnose.token_sequences import read_sequences
from kc_otel.record.kernel import Kernel
from kc_otel.recordings.recording_files import load_recording
from kc_otel.recordings.request import SampledRequest
from kc_otel.recordings.spool import Spool, SpoolReader
from tests.tools.contracts import contract_of

CONTRACT = contract_of(slices={task: {"where": {"task": task}} for task in ("code", "prose")})
PROGRAM = """\
asked = []
def rows(slice):
    asked.append(slice)
    for task in ("prose", "code", "code"):
        yield {"prompt_ids": [1, 2], "token_ids": [len(task)], "attributes": {"task": task}}
def odd(slice):
    return [{"token_ids": [1, -2]}]
number = 3
"""


def test_a_recording_gives_its_tokens_by_sequence(tmp_path):
    logprobs = np.full((4, 3), -1.0)
    columns = {"train_logprobs": logprobs, "inference_logprobs": logprobs, "task": np.array(["code", "prose"] * 2)}
    np.savez(tmp_path / "with.npz", token_ids=np.arange(12).reshape(4, 3), **columns)
    np.savez(tmp_path / "without.npz", **columns)
    found = read_sequences(tmp_path / "with.npz", contract=CONTRACT, slice="prose")
    assert [sequence.token_ids for sequence in found] == [(3, 4, 5), (9, 10, 11)]
    assert len(read_sequences(tmp_path / "with.npz", most=3)) == 3
    with pytest.raises(ValueError, match="has no token_ids; record them"):
        read_sequences(tmp_path / "without.npz")


def test_lines_have_the_attributes_that_a_recording_of_them_has(tmp_path):
    """Columns of their own, and the number of tokens: `locate` takes the slice that `gate` judged."""
    contract = contract_of(slices={"long": {"where": {"task": "code", "completion_tokens": ">= 3"}}})
    rows = [
        {"prompt_ids": [9], "token_ids": [*range(4)], "task": task, "lag": 0, "mask": [1, 1, counts, 0],
         "train_logprobs": [-1.0] * 4, "inference_logprobs": [-1.0] * 4}
        for task in ("code", "prose") for counts in (0, 1)
    ]  # fmt: skip
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (found,) = read_sequences(path, contract=contract, slice="long")
    assert (found.token_ids, found.prompt_tokens) == ((9, 0, 1, 2, 3), 1)
    (judged,) = (row for row in load_recording(path).attributes if "long" in contract.slices_of(row))
    assert judged == {**found.attributes, "prompt_id": judged["prompt_id"]}


def test_what_import_reads_gives_its_tokens(tmp_path):
    with gzip.open(tmp_path / "rows.jsonl.gz", "wt") as lines:
        lines.write(json.dumps({"prompt_ids": [1], "token_ids": [2, 3]}) + "\n")
    assert read_sequences(tmp_path / "rows.jsonl.gz")[0].token_ids == (1, 2, 3)
    torch, folder = pytest.importorskip("torch"), tmp_path / "dumps"
    folder.mkdir()
    logprobs = torch.full((2, 3), -1.0)
    rows = {"old_log_probs": logprobs, "rollout_log_probs": logprobs, "response_mask": torch.ones(2, 3)}
    torch.save(rows | {"responses": torch.arange(6).reshape(2, 3)}, folder / "batch.pt")
    assert [sequence.token_ids for sequence in read_sequences(folder)] == [(0, 1, 2), (3, 4, 5)]


def test_sequences_are_of_as_many_prompts_as_there_are_from_all_over_the_file(tmp_path):
    """The first rows are rollouts of one prompt, or what the file is sorted by: a fault may be anywhere."""
    rows = [{"prompt_ids": [prompt], "token_ids": [prompt, rollout]} for prompt in range(25) for rollout in range(16)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = [sequence.token_ids for sequence in read_sequences(path, most=16)]
    assert len(found) == len({prompt for prompt, *_ in found}) == 16
    assert found == sorted(found)
    assert (found[0][0], found[-1][0]) == (0, 23)
    assert len(read_sequences(path, most=30)) == 30
    assert len(read_sequences(path, most=10_000)) == 400


def test_a_spool_is_read_and_stays_as_it_is(tmp_path):
    """Prompt and completion apart; the rescorer finds everything that it would have found."""
    spool = Spool(tmp_path / "spool.sqlite")
    for name, task in (("a", "prose"), ("b", "code")):
        tokens = np.arange(4)
        spool.put(
            SampledRequest(
                request_id=name,
                prompt_ids=np.arange(3) + 10,
                token_ids=tokens,
                logprobs=-tokens.astype(np.float32),
                kernel=Kernel("vllm"),
                attributes={"task": task},
            )
        )
    assert spool.flush()
    spool.close()
    with SpoolReader(tmp_path / "spool.sqlite") as reader:  # as while `rescore --follow` runs
        (found,) = read_sequences(tmp_path / "spool.sqlite", contract=CONTRACT, slice="code")
        assert (found.token_ids, found.prompt_tokens) == ((10, 11, 12, 0, 1, 2, 3), 3)
        taken = reader.take(9)
        assert [request.request_id for _, request in taken] == ["a", "b"]
        reader.done(number for number, _ in taken)
    with pytest.raises(ValueError, match="no request waits in it: `kc-otel rescore` removes what it has scored"):
        read_sequences(tmp_path / "spool.sqlite")


def test_a_program_is_asked_for_the_slice(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    found = read_sequences(f"{tmp_path}/program.py:rows", contract=CONTRACT, slice="code")
    assert [sequence.token_ids for sequence in found] == [(1, 2, 4), (1, 2, 4)]
    assert len(read_sequences(f"{tmp_path}/program.py:rows", contract=CONTRACT, slice="code", most=1)) == 1
    with pytest.raises(ValueError, match=r"program\.py:odd: sequence 1: token_ids: is no list of whole numbers"):
        read_sequences(f"{tmp_path}/program.py:odd")
    with pytest.raises(ValueError, match="is int, not a function of a slice's name"):
        read_sequences(f"{tmp_path}/program.py:number")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("[1]", "rows.jsonl:2: is not a JSON object but list"),
        ("{", "rows.jsonl:2: is not JSON"),
        ('{"token_ids": [true, 2]}', "rows.jsonl:2: token_ids: is no list of whole numbers"),
        ('{"token_ids": [1]}', "rows.jsonl:2: token_ids: 1 tokens; a sequence needs two"),
        ('{"prompt_ids": [1, 2]}', "rows.jsonl:2: has no token_ids"),
        ('{"token_ids": [1, 2], "attributes": 3}', "rows.jsonl:2: attributes: 3 is not a JSON object"),
    ],
)
def test_a_line_that_is_no_sequence_is_named(tmp_path, line, said):
    path = Path(tmp_path) / "rows.jsonl"
    path.write_text(json.dumps({"token_ids": [1, 2]}) + f"\n{line}\n")
    with pytest.raises(ValueError, match=said):
        read_sequences(path)


@pytest.mark.parametrize(
    ("name", "layer", "operator"),
    [
        ("model.embed_tokens", None, "embedding"),
        ("model.layers.11.input_layernorm", 11, "attention_norm"),
        ("model.layers.11.self_attn.qkv_proj", 11, "qkv_proj"),
        ("model.layers.0.self_attn.attn", 0, "attention"),
        ("model.layers.0.mlp.gate", 0, "router"),
        ("model.layers.0.mlp.gate_up_proj", 0, "gate_up_proj"),
        ("model.norm", None, "final_norm"),
        ("lm_head", None, "head"),
        ("transformer.h.3.attn.c_proj", 3, "o_proj"),
        ("transformer.h.3.mlp.c_proj", 3, "down_proj"),
        ("blocks.2.down", 2, "down_proj"),
        ("model.layers.4", 4, "block"),
    ],
)
def test_an_operator_has_one_name(name, layer, operator):
    assert boundaries_of([(name, False)]) == {name: Boundary(layer, operator)}


def test_modules_of_one_kind_keep_their_paths():
    names = ["layers.0.mlp.experts.0.up_proj", "layers.0.mlp.experts.1.up_proj", "layers.0.adapter", "layers.0.dropout"]
    found = boundaries_of([(name, "dropout" not in name) for name in names])
    assert [key.operator for key in found.values()] == ["mlp.experts.0.up_proj", "mlp.experts.1.up_proj", "adapter"]


NAMES = [f"model.layers.{layer}.{name}.weight" for layer in range(4) for name in ("self_attn.o_proj", "mlp.down_proj")]


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        (NAMES[:4] + NAMES[5:], "has no model.layers.2.self_attn.o_proj.weight, which all of its other layers have"),
        ([*NAMES, "model.layers.4.norm.weight"], ""),  # a layer of another kind
        ([name for name in NAMES if "0.mlp" not in name] + ["model.layers.0.mlp.experts.1.down_proj.weight"], ""),
        ([name.replace("weight", "qweight") if ".1." not in name else name for name in NAMES], ""),  # one in 16 bits
        (NAMES[:3], ""),
        (NAMES, ""),
    ],
)
def test_a_layer_that_lacks_a_tensor_is_refused_and_one_of_another_kind_is_not(tensors, said):
    if not said:
        complete_layers("folder", tensors)
        return
    with pytest.raises(NotComparableError, match=said):
        complete_layers("folder", tensors)
