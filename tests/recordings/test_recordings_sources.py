"""One reader for whatever holds both kernels' log-probabilities: trainers' files, folders, saved responses."""

import json

import numpy as np
import pytest

from kc_otel.recordings.recording import RecordingError
from kc_otel.recordings.recording_files import load_recording

PROMPT, TOKENS = [3, 1, 4], [15, 9, 26, 5]
P, Q = [-0.5, -1.25, -0.75, -2.0], [-0.75, -1.0, -0.5, -2.5]
TEXTS = ["Hel", "lo", " wor", "ld"]


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
    """As the recordings' own faults are; one without a token that counts is masked, and no fault."""
    path = tmp_path / "rank_0.jsonl"
    gone, short = prime_rl(1) | {"loss_mask": [False] * 5}, prime_rl(2) | {"trainer_logprobs": [-1.0]}
    path.write_text("\n".join(map(json.dumps, [prime_rl(1), gone])))
    assert len(load_recording(path).masked) == 1
    path.write_text("\n".join(map(json.dumps, [prime_rl(1), *[short] * 30])))
    with pytest.raises(RecordingError, match=r"rank_0\.jsonl:2: .* have 1, 5, 5 entries \(29 more like this\)$"):
        load_recording(path)


def vllm_prompt(tokens, logprobs):
    """`prompt_logprobs` with two alternatives: the token's own entry comes first."""
    rows = zip(tokens, logprobs, strict=True)
    return [None if value is None else {str(t): {"logprob": value}, "7": {"logprob": -3.0}} for t, value in rows]


WHOLE = [None, -1.0, -1.0, *P]
SCORED = {
    "vllm-completion": {"choices": [{"prompt_logprobs": vllm_prompt(PROMPT + TOKENS, WHOLE), "text": "x"}]},
    "vllm-chat": {"choices": [{"message": {}}], "prompt_logprobs": vllm_prompt(PROMPT + TOKENS, WHOLE)},
    "sglang": {
        "text": "x",
        "meta_info": {
            "input_token_logprobs": [[v, t, None] for v, t in zip(WHOLE, PROMPT + TOKENS, strict=True)],
            "output_token_logprobs": [],
        },
    },
    "echo": {
        "choices": [{"logprobs": {"token_logprobs": WHOLE, "tokens": ["a", "b", "c", *TEXTS]}}],
        "usage": {"prompt_tokens": 7, "completion_tokens": 0},
    },
    "echo-and-one-more": {
        "choices": [{"logprobs": {"token_logprobs": [*WHOLE, -0.1], "tokens": ["a", "b", "c", *TEXTS, "!"]}}],
        "usage": {"prompt_tokens": 7, "completion_tokens": 1},
    },
}
SAMPLED = {
    "completion": {"choices": [{"logprobs": {"token_logprobs": Q, "tokens": TEXTS}}], "usage": {"prompt_tokens": 3}},
    "token-ids": {"choices": [{"logprobs": {"token_logprobs": Q, "tokens": TEXTS}, "token_ids": TOKENS}]},
    "ids-as-text": {"choices": [{"logprobs": {"token_logprobs": Q, "tokens": [f"token_id:{t}" for t in TOKENS]}}]},
    "chat": {
        "choices": [{"logprobs": {"content": [{"token": t, "logprob": v} for t, v in zip(TEXTS, Q, strict=True)]}}]
    },
    "sglang": {"meta_info": {"output_token_logprobs": [[v, t, None] for v, t in zip(Q, TOKENS, strict=True)]}},
    "llama.cpp": {
        "content": "x",
        "completion_probabilities": [
            {"id": t, "token": text, "logprob": v, "top_logprobs": []}
            for t, text, v in zip(TOKENS, TEXTS, Q, strict=True)
        ],
    },
    "llama.cpp-after-sampling": {
        "completion_probabilities": [{"id": t, "prob": float(np.exp(v))} for t, v in zip(TOKENS, Q, strict=True)]
    },
}


@pytest.mark.parametrize("scored", SCORED)
@pytest.mark.parametrize("sampled", SAMPLED)
def test_saved_responses_of_two_servers_are_a_recording(tmp_path, scored, sampled):
    """Whatever servers they are of: the completion's tokens at the end of the prompt that was scored."""
    (tmp_path / "p.jsonl").write_text(json.dumps(SCORED[scored]) + "\n" + json.dumps(SCORED[scored]))
    (tmp_path / "q.jsonl").write_text(json.dumps(SAMPLED[sampled]) + "\n" + json.dumps(SAMPLED[sampled]))
    found = load_recording(f"train={tmp_path / 'p.jsonl'},inference={tmp_path / 'q.jsonl'}")
    assert found.train.tolist() == P * 2
    np.testing.assert_allclose(found.inference, Q * 2)
    assert found.prompts.tolist() == [0, 1]


def test_an_echo_whose_end_is_not_known_is_found_by_its_tokens(tmp_path):
    """And refused where one side has texts and the other ids: a shift by one would be a drift."""
    answer = {"choices": SCORED["echo-and-one-more"]["choices"]}
    (tmp_path / "p.jsonl").write_text(json.dumps(answer))
    (tmp_path / "q.jsonl").write_text(json.dumps(SAMPLED["chat"]))
    pair = f"train={tmp_path / 'p.jsonl'},inference={tmp_path / 'q.jsonl'}"
    assert load_recording(pair).train.tolist() == P
    (tmp_path / "q.jsonl").write_text(json.dumps(SAMPLED["sglang"]))
    with pytest.raises(RecordingError, match="or names none of them"):
        load_recording(pair)


def test_answers_of_a_batch_are_paired_by_their_custom_ids(tmp_path):
    """OpenAI's and vLLM's batch output: in any order, with what else a line says as attributes."""
    for name, answers in (("p", SCORED["vllm-completion"]), ("q", SAMPLED["token-ids"])):
        rows = [
            {
                "custom_id": f"r{at}",
                "task": "code" if at else "prose",
                "response": {"status_code": 200, "body": answers},
            }
            for at in ((0, 1) if name == "p" else (1, 0))
        ]
        (tmp_path / f"{name}.json").write_text(json.dumps(rows))
    found = load_recording(f"inference={tmp_path / 'q.json'},train={tmp_path / 'p.json'}")
    assert [attributes["task"] for attributes in found.attributes] == ["code", "prose"]
    assert [attributes["prompt_id"] for attributes in found.attributes] == ["r1", "r0"]


def test_one_line_may_hold_both_answers(tmp_path):
    """Under `train` and `inference`, or under names that are given."""
    row = {"scored": SCORED["sglang"], "sampled": SAMPLED["chat"], "task": "code"}
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    found = load_recording(tmp_path / "a.jsonl", columns={"train": "scored", "inference": "sampled"})
    assert found.train.tolist() == P
    assert found.attributes[0]["task"] == "code"
    (tmp_path / "b.jsonl").write_text(json.dumps({"train": row["scored"], "inference": row["sampled"]}))
    assert load_recording(tmp_path / "b.jsonl").inference.tolist() == Q


@pytest.mark.parametrize(
    ("scored", "sampled", "said"),
    [
        (SCORED["sglang"], {"choices": [{"text": "x"}]}, "inference: has no log-probabilities of sampled tokens; ask"),
        ({"choices": [{"text": "x"}]}, SAMPLED["sglang"], "train: has no log-probabilities; ask for prompt_logprobs"),
        (
            SCORED["sglang"],
            {"meta_info": {"output_token_logprobs": [[-1.0, 15, None], [-1.0, 8, None]]}},
            "train: scores other tokens than were sampled",
        ),
        ({"a": 1}, SAMPLED["sglang"], "holds no answer of a server"),
    ],
)
def test_responses_that_lack_a_side_say_what_to_ask_for(tmp_path, scored, sampled, said):
    """Once, with how often it occurs."""
    (tmp_path / "p.jsonl").write_text("\n".join([json.dumps(scored)] * 4))
    (tmp_path / "q.jsonl").write_text("\n".join([json.dumps(sampled)] * 4))
    with pytest.raises(RecordingError) as caught:
        load_recording(f"train={tmp_path / 'p.jsonl'},inference={tmp_path / 'q.jsonl'}")
    found = [problem for problem in caught.value.problems if said in problem]
    assert len(found) == 1
    assert found[0].endswith("(3 more like this)")
