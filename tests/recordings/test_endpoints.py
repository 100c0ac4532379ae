"""Two live endpoints: what is asked, what answers say, and what becomes of those that do not come."""

from __future__ import annotations

import asyncio
import json
import math
import threading
import time

import httpx
import numpy as np
import pytest

from kc_otel.recordings.endpoints import protocol
from kc_otel.recordings.endpoints.endpoint_client import (
    CompletionClient,
    CompletionEndpoint,
    NotTakenError,
    RefusedError,
    RequestFailedError,
    endpoint_scorer,
)
from kc_otel.recordings.endpoints.endpoint_recording import Prompt, collect, read_prompts
from kc_otel.recordings.recording import RecordingError
from kc_otel.recordings.scoring import UnavailableError
from tests.tools.completions import completions, table, token_ids

pytestmark = pytest.mark.slow

CHOICE = {
    "finish_reason": "stop",
    "token_ids": [7, 8],
    "prompt_token_ids": [1, 2],
    "logprobs": {"token_logprobs": [-0.5, -9999.0], "tokens": ["a", "b"]},
}
SCORED = [None, {"2": {"logprob": -1.0}}, {"7": {"logprob": -0.25}}, {"8": {"logprob": -9999.0}}]


def answer(**changes):
    return {"choices": [{**CHOICE, **changes}]}


def ask(server, action, *, side="inference", key="", **options):
    """What `action(client)` returns, with a client of the server."""

    async def run():
        async with httpx.AsyncClient() as http:
            return await action(CompletionClient(CompletionEndpoint(side, server.address, key), http, **options))

    return asyncio.run(run())


def gathered(inference, train, prompts, *, model="tiny", **options):
    async def run():
        async with httpx.AsyncClient() as http:
            clients = [
                CompletionClient(CompletionEndpoint(side, server.address), http)
                for side, server in (("inference", inference), ("train", train))
            ]
            asked = [(client, model or await client.model(None)) for client in clients]
            return await collect(prompts, *asked, **options)

    return asyncio.run(run())


def after(times, status, headers=None, *, on="/v1/completions", error="busy"):
    """A fault: so many answers of a path are an error, and all later ones are right."""
    left = [times]

    def fault(path, _body, right):
        if path == on and left[0] > 0:
            left[0] -= 1
            return {"error": {"message": error}}, status, headers or {}
        return right, 200, {}

    return fault


@pytest.mark.parametrize("train_sglang", [True, False])
def test_sglang_is_asked_by_its_own_api(train_sglang):
    with completions(table(), sglang=True) as inference, completions(table(drift=0.2), sglang=train_sglang) as train:
        prompts = [Prompt(line, text=f"prompt {line}") for line in range(1, 9)]
        prompts.append(Prompt(9, token_ids=(3, 4)))
        found = gathered(inference, train, prompts, model=None, max_tokens=12)
        assert not found.failures
        recording = found.recording
        assert recording.lengths.tolist() == [12] * 9
        ends = np.cumsum(recording.lengths)
        tokens = recording.token_ids[ends[-2] :].tolist()
        for side, server in (("inference", inference), ("train", train)):
            expected = [server.logprobs[token, other] for token, other in zip([4, *tokens], tokens, strict=False)]
            np.testing.assert_allclose(getattr(recording, side)[ends[-2] :], expected)
        sent = next(body for path, body in inference.requests if path == "/generate")
        assert {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0}.items() <= sent["sampling_params"].items()


@pytest.mark.parametrize("sglang", [False, True])
def test_a_server_scores_what_waits_for_rescoring(sglang):
    with completions(table(), sglang=sglang) as server:
        score = endpoint_scorer(f"{server.address}/v1", "secret")
        ((first, second),) = score([np.array([5])], [np.array([6, 7])])
        assert (first, second) == (pytest.approx(server.logprobs[5, 6]), pytest.approx(server.logprobs[6, 7]))
        assert {headers["authorization"] for headers in server.headers} == {"Bearer secret"}
        server.fault = after(1, 400, on="/generate" if sglang else "/v1/completions", error="no such token")
        with pytest.raises(NotTakenError, match="400: no such token"):
            score([[1]], [[2]])
    with pytest.raises(UnavailableError, match="does not answer"):
        score([[1]], [[2]])
    with pytest.raises(ValueError, match="without temperature; score them with --model"):
        score([[1]], [[2]], {"temperature": 0.5})
    with pytest.raises(ValueError, match="--train-url"):
        endpoint_scorer("")


def test_completions_and_given_tokens_are_read_by_their_ids():
    """In vLLM's answers -9999 is log 0; SGLang says 0 for the last ids of a vocabulary."""
    found = protocol.sampled(answer(), "Hi")
    assert found == protocol.Sampled((1, 2), (7, 8), (-0.5, -math.inf), "stop")
    assert protocol.sampled(answer(prompt_token_ids=None), (1, 2)) == found
    assert math.isnan(protocol.sampled(answer(logprobs={"token_logprobs": [None, -1.0]}), "Hi").logprobs[0])
    rows = [*SCORED[:2], {"3": {"logprob": -0.1}} | SCORED[2], SCORED[3]]
    given = answer(prompt_logprobs=rows, prompt_token_ids=[1, 2, 7, 8])
    assert protocol.scored(given, (1, 2), (7, 8)) == (-0.25, -math.inf)
    found = {"meta_info": {"output_token_logprobs": [[-1.0, 3]]}, "prompt_token_ids": [1]}
    assert protocol.generated(found, "Hi") == protocol.Sampled((1,), (3,), (-1.0,), "")
    given = {"meta_info": {"input_token_logprobs": [[None, 1, None], [-1.0, 0, None], [-2.0, 3, None]]}}
    assert protocol.scores(given, (1,), (9, 3)) == (-1.0, -2.0)
    for prompt, tokens in (((1, 2), (3, 4)), ((1,), (9, 4))):
        with pytest.raises(protocol.AnswerError, match="that were sent"):
            protocol.scores(given, prompt, tokens)


def sampled(prompt="Hi", **changes):
    return lambda: protocol.sampled(answer(**changes), prompt)


def scored(**changes):
    return lambda: protocol.scored(answer(**{"prompt_token_ids": None, **changes}), (1, 2), (7, 8))


def generated(meta, prompt="Hi", **more):
    return lambda: protocol.generated({"meta_info": {"output_token_logprobs": meta}, **more}, prompt)


@pytest.mark.parametrize(
    ("read", "said"),
    [
        (sampled(logprobs=None), "without log-probabilities of the sampled tokens .* a server that returns them"),
        (sampled(token_ids=None, logprobs={"token_logprobs": [-1.0], "tokens": ["a"]}), "without the ids of the samp"),
        (sampled(token_ids=[7]), "2 log-probabilities for 1 sampled"),
        (sampled(prompt_token_ids=None), "put prompt_token_ids in place of prompt"),
        (sampled(prompt_token_ids=[]), "a prompt without a token"),
        (sampled((1, 2), prompt_token_ids=[0, 1, 2]), "3 for 2, different from place 0 on"),
        (lambda: protocol.sampled({"choices": []}, "Hi"), "is it an OpenAI-compatible"),
        (lambda: protocol.sampled(None, "Hi"), "is it an OpenAI-compatible"),
        (scored(prompt_logprobs=None), "given tokens .* a server that returns them"),
        (scored(prompt_logprobs=SCORED, prompt_token_ids=[1, 2, 7, 9]), "different from place 3 on"),
        (scored(prompt_logprobs=SCORED[:3]), "scored 3 tokens where 4 were sent"),
        (scored(prompt_logprobs=[*SCORED[:3], {"9": {"logprob": -1.0}}]), "another token than 8 at place 3"),
        (scored(prompt_logprobs=[*SCORED[:3], None]), "another token than 8 at place 3"),
        (lambda: protocol.generated({"detail": "no"}, "Hi"), "is it SGLang's /generate"),
        (generated(None), "log-probabilities with the ids"),
        (generated([[-1.0, None]]), "log-probabilities with the ids"),
        (generated([[-1.0, 3]]), "put prompt_token_ids in place"),
        (generated([[-1.0, 3]], (1, 2), prompt_token_ids=[1]), "other tokens than were sent"),
    ],
)
def test_an_answer_that_lacks_something_says_what_to_switch_on(read, said):
    with pytest.raises(protocol.AnswerError, match=said):
        read()


def test_prompts_are_read_with_what_slices_are_made_of(tmp_path):
    path = tmp_path / "prompts.jsonl"
    rows = [
        {"prompt": "Hi", "task": "code", "id": 3, "tags": ["a"], "temperature": 1},
        {"prompt_token_ids": [1, 2], "attributes": {"task": "prose"}},
        {"messages": [{"role": "user", "content": "Hi"}], "prompt": None},
    ]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    assert read_prompts(path) == (
        Prompt(1, text="Hi", attributes={"task": "code", "id": 3, "temperature": 1}),
        Prompt(2, token_ids=(1, 2), attributes={"task": "prose"}),
        Prompt(3, messages=({"role": "user", "content": "Hi"},)),
    )


def test_everything_that_is_wrong_with_prompts_is_said_at_once(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        '{"prompt": "Hi"}\n{\n{"prompt": ""}\n{"prompt": [1]}\n{"prompt_token_ids": [1.5]}\n'
        '{"prompt": "Hi", "temperature": 0.7, "top_p": 1}\n[]\n{"prompt": "a", "messages": [{}]}\n'
    )
    with pytest.raises(RecordingError) as caught:
        read_prompts(path)
    said = str(caught.value).splitlines()
    assert [line.partition(": line ")[2].partition(":")[0] for line in said] == list("2345678")
    assert "it has none" in said[1]
    assert "tokens are called prompt_token_ids" in said[2]
    assert "temperature: 0.7: both endpoints are compared at temperature 1" in said[4]
    assert "it has prompt and messages" in said[6]
    path.write_text("\n")
    with pytest.raises(RecordingError, match="has no prompt"):
        read_prompts(path)
    with pytest.raises(RecordingError, match="cannot be read"):
        read_prompts(tmp_path / "none.jsonl")


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", "http://", "http://host:port"])
def test_an_address_that_is_none_is_refused(url):
    with pytest.raises(ValueError, match=r"--train-url: .*is not a URL"):
        CompletionEndpoint("train", url)


def test_an_endpoint_shows_neither_key_nor_password():
    """Not where it is printed, and not where a traceback would show it; with or without /v1 it is the same."""
    endpoint = CompletionEndpoint("train", "https://me:secret@host:81/serve/v1/", "sk-secret")
    assert (str(endpoint), endpoint.root) == ("train endpoint https://host:81/serve", "https://me:secret@host:81/serve")
    assert "sk-secret" not in repr(endpoint)
    with pytest.raises(ValueError, match="KC_OTEL_TRAIN_API_KEY: holds characters") as caught:
        CompletionEndpoint("train", "https://host", "sk-sécret")
    assert "cret" not in str(caught.value)


def test_a_model_is_found_or_the_choice_is_told():
    with completions(table(), models=("a", "b")) as server:
        assert ask(server, lambda client: client.model("b")) == "b"
        with pytest.raises(RefusedError, match=r"serves a, b; name the model with --inference-model"):
            ask(server, lambda client: client.model(None))
        with pytest.raises(RefusedError, match=r"--inference-model: serves no 'c'; it serves a, b"):
            ask(server, lambda client: client.model("c"))
        server.models = ("tiny",)
        assert ask(server, lambda client: client.model(None)) == "tiny"
        server.fault = after(2, 404, on="/v1/models", error="Not Found")
        assert ask(server, lambda client: client.model("d")) == "d"
        with pytest.raises(RefusedError, match=r"does not say what it serves \(404: Not Found\)"):
            ask(server, lambda client: client.model(None))


def test_a_busy_endpoint_is_asked_again():
    with completions(table(), fault=after(2, 503, {"Retry-After": "0"})) as server:
        assert len(ask(server, lambda client: client.sample("tiny", "Hi", 5)).token_ids) == 5
        assert len(server.requests) == 3
        server.fault = after(9, 429, {"Retry-After": "0"})
        with pytest.raises(RequestFailedError, match="429: busy; 3 attempts"):
            ask(server, lambda client: client.sample("tiny", "Hi", 5), attempts=3)


def test_what_one_request_did_wrong_fails_that_request():
    release = threading.Event()

    def slow(_path, _body, right):
        release.wait(10.0)
        return right, 200, {}

    with completions(table(), fault=after(1, 400, error="maximum context\nlength is 8")) as server:
        with pytest.raises(RequestFailedError, match="400: maximum context length is 8"):
            ask(server, lambda client: client.sample("tiny", "Hi", 5))
        server.fault = slow
        try:
            with pytest.raises(RequestFailedError, match="no answer in time"):
                ask(server, lambda client: client.sample("tiny", "Hi", 5), timeout=0.2)
        finally:
            release.set()


def test_keys_are_sent_and_what_refuses_them_names_the_variable():
    with completions(table(), fault=after(1, 400, error="bad key sk-1234?")) as server:
        with pytest.raises(RequestFailedError, match=r"400: bad key \*\*\*\?"):
            ask(server, lambda client: client.sample("tiny", "Hi", 5), key="sk-1234")
        assert server.headers[-1]["authorization"] == "Bearer sk-1234"
        server.fault = after(3, 401)
        with pytest.raises(RefusedError, match="401: the key in KC_OTEL_INFERENCE_API_KEY is refused"):
            ask(server, lambda client: client.sample("tiny", "Hi", 5), key="sk-1234")
        with pytest.raises(RefusedError, match="401: it wants a key; put it into KC_OTEL_TRAIN_API_KEY"):
            ask(server, lambda client: client.score("tiny", (1,), (2,)), side="train")
        assert "Authorization" not in server.headers[-1]


def test_a_redirect_is_not_followed():
    """A key goes where its owner sent it and nowhere else."""
    with completions(table(), fault=after(1, 307, {"Location": "http://127.0.0.1:9/"}, error="")) as server:
        with pytest.raises(RefusedError, match=r"307: http://127\.0\.0\.1:9/"):
            ask(server, lambda client: client.sample("tiny", "Hi", 5), key="sk-1234")
        assert len(server.requests) == 1


def test_both_sides_are_of_the_same_tokens_in_the_order_of_the_prompts():
    prompts = [
        Prompt(1, text="ab", attributes={"task": "code"}),
        Prompt(2, token_ids=(3,), attributes={"model": "mine"}),
        Prompt(3, messages=({"role": "user", "content": "xyz"},)),
    ]
    with completions(table()) as inference, completions(table(drift=0.3)) as train:
        found = gathered(inference, train, prompts, samples=2, max_tokens=6, concurrency=3)
    recording = found.recording
    assert (found.asked, found.missing, found.failures) == (6, 0, ())
    assert recording.lengths.tolist() == [6] * 6
    last = [token_ids("ab")[-1]] * 2 + [3] * 2 + [token_ids("xyz")[-1]] * 2
    ids = recording.token_ids.reshape(6, 6)
    before = np.column_stack([last, ids[:, :-1]])
    assert np.array_equal(recording.inference, inference.logprobs[before, ids].ravel())
    assert np.array_equal(recording.train, train.logprobs[before, ids].ravel())
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0,
                "presence_penalty": 0.0, "frequency_penalty": 0.0}  # fmt: skip
    for server in (inference, train):
        assert all(sampling.items() <= body.items() for path, body in server.requests if path == "/v1/completions")
    about = {"prompt_tokens": 2, "completion_tokens": 6, **sampling}
    prompt_ids = [attributes.pop("prompt_id") for attributes in map(dict, recording.attributes)]
    assert [prompt_ids.index(name) for name in prompt_ids] == [0, 0, 2, 2, 4, 4], "samples of a prompt share its name"
    first = about | {"model": "tiny", "finish_reason": "length", "task": "code", "prompt_id": prompt_ids[0]}
    assert recording.attributes[0] == recording.attributes[1] == first
    assert recording.attributes[2]["model"] == "mine"
    assert recording.attributes[4]["prompt_tokens"] == 3


def test_a_gate_looks_where_each_prompt_has_all_its_samples():
    """A prompt is one observation: looked at before its last sample it would be another one afterwards."""
    seen = []

    def enough(recording):
        seen.append([attributes["prompt_id"] for attributes in recording.attributes])
        return len(seen) == 3

    prompts = [Prompt(line, text="a" * line) for line in range(1, 13)]
    with completions(table()) as inference, completions(table()) as train:
        found = gathered(
            inference, train, prompts, samples=3, max_tokens=4, concurrency=2, enough=enough, looks=(4, 5, 7, 10, 20)
        )
    assert [len(names) for names in seen] == [6, 9, 12]
    assert all(names.count(name) == 3 for names in seen for name in names)
    assert found.recording.lengths.size == 12
    assert len(train.requests) == 12, "nothing is asked that a look might make superfluous"


def test_no_more_requests_than_allowed_are_under_way():
    lock, under_way, most = threading.Lock(), [0], [0]

    def counted(_path, _body, right):
        with lock:
            under_way[0] += 1
            most[0] = max(most[0], under_way[0])
        time.sleep(0.005)
        with lock:
            under_way[0] -= 1
        return right, 200, {}

    with completions(table(), fault=counted) as inference, completions(table(), fault=counted) as train:
        gathered(inference, train, [Prompt(1, text="ab")] * 30, max_tokens=4, concurrency=2)
    assert most[0] == 2


def long_prompts(_path, body, right):
    """A fault: a prompt of more than five characters is too long."""
    if len(body.get("prompt", "")) > 5 and isinstance(body["prompt"], str):
        return {"error": {"message": "too long"}}, 400, {}
    return right, 200, {}


def test_failures_are_kept_with_their_lines_beside_what_succeeded():
    prompts = [Prompt(line, text="a" * (9 if line % 3 == 0 else 2)) for line in range(1, 91)]
    with completions(table(), fault=long_prompts) as inference, completions(table()) as train:
        some = gathered(inference, train, prompts[:9], max_tokens=3)
        many = gathered(inference, train, prompts, max_tokens=3, concurrency=1)
    assert sorted(line for line, _ in some.failures) == [3, 6, 9]
    assert (some.asked, some.missing, some.recording.lengths.size) == (9, 3, 6)
    assert (len(many.failures), many.asked, many.missing) == (20, 90, 50)


def test_a_failure_leaves_nobody_waiting_for_what_will_not_come():
    prompts = [Prompt(line, text="a" * (9 if line == 7 else 2)) for line in range(1, 41)]
    with completions(table(), fault=long_prompts) as inference, completions(table()) as train:
        found = gathered(inference, train, prompts, max_tokens=3, concurrency=2, enough=lambda _: False, looks=(39,))
    assert (len(found.failures), found.recording.lengths.size, found.asked) == (1, 39, 40)


def test_an_answer_that_would_be_the_same_for_all_ends_it_at_once():
    def without(_path, _body, right):
        right["choices"][0]["prompt_logprobs"] = None
        return right, 200, {}

    with completions(table()) as inference, completions(table(), fault=without) as train:
        with pytest.raises(
            RefusedError, match=r"^train endpoint .*: answers without log-probabilities of given tokens"
        ):
            gathered(inference, train, [Prompt(1, text="ab")] * 50, concurrency=2)
        assert len(train.requests) <= 4
