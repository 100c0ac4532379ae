"""An OpenAI-compatible server in vLLM's format whose model is exact: the next token's softmax depends on the last one.

    with completions(table) as server:
        server.address, server.requests, server.headers

`table` is a model's logits [V, V], so that both endpoints' log-probabilities, and the drift between two tables, are
known. A function given as `fault` may change any answer: `fault(path, body, answer) -> answer, status, headers`.
"""

import json
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from tests.tools.servers import answering

VOCABULARY = 16


def table(*, drift=0.0, seed=5):
    """Logits [V, V]; `drift` is how far, in standard deviations of noise, they are from those of drift 0."""
    rng = np.random.default_rng(seed)
    logits = 1.5 * rng.standard_normal((VOCABULARY, VOCABULARY))
    return logits + drift * rng.standard_normal(logits.shape)


def token_ids(text):
    """The server's tokenizer: a character is a token."""
    return [ord(char) % VOCABULARY for char in text]


@dataclass
class Completions:
    address: str
    logprobs: np.ndarray
    fault: object = None
    sglang: bool = False
    models: tuple = ("tiny",)
    version: str = ""
    cache: str = ""
    requests: list = field(default_factory=list)
    headers: list = field(default_factory=list)
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(11))
    lock: threading.Lock = field(default_factory=threading.Lock)

    def answer(self, path, body):
        if path == "/v1/models":
            owner = "sglang" if self.sglang else "vllm"
            return {"object": "list", "data": [{"id": name, "owned_by": owner} for name in self.models]}
        if path in {"/version", "/metrics", "/server_info"}:
            return self._about().get(path)
        if path == "/generate" and self.sglang:
            return self._generated(body)
        if path == "/tokenize":
            text = "\n".join(message["content"] for message in body["messages"])
            return {"count": len(text), "max_model_len": 1024, "tokens": token_ids(text), "token_strs": None}
        if path != "/v1/completions" or self.sglang:
            return None
        prompt = token_ids(body["prompt"]) if isinstance(body["prompt"], str) else body["prompt"]
        drawn = self._draw(prompt[-1], body["max_tokens"])
        choice = {"index": 0, "text": "", "logprobs": None, "finish_reason": "length", "stop_reason": None}
        returned = bool(body.get("return_token_ids"))
        choice |= {"token_ids": drawn if returned else None, "prompt_token_ids": prompt if returned else None}
        choice["prompt_logprobs"] = None
        if body.get("logprobs") is not None:
            choice["logprobs"] = {
                "text_offset": [0] * len(drawn),
                "token_logprobs": self._logprobs_of([prompt[-1], *drawn]),
                "tokens": [f"token_id:{token}" for token in drawn],
                "top_logprobs": [{} for _ in drawn],
            }
        if body.get("prompt_logprobs") is not None:
            scored = zip(prompt[1:], self._logprobs_of(prompt), strict=True)
            choice["prompt_logprobs"] = [None] + [
                {str(token): {"logprob": value, "rank": 1, "decoded_token": ""}} for token, value in scored
            ]
        return {"id": "cmpl-1", "object": "text_completion", "created": 0, "model": "tiny", "choices": [choice]}

    def _about(self):
        """The engine's answers about itself, in the words of vLLM or SGLang."""
        said = {"/version": {"version": self.version}} if self.version else {}
        if self.cache and self.sglang:
            resolved = {"internal_states": [{"kv_cache_dtype": self.cache}]}
            said["/server_info"] = {"dtype": "auto", "kv_cache_dtype": "auto", **resolved}
        elif self.cache:
            said["/metrics"] = f'vllm:cache_config_info{{cache_dtype="{self.cache}",mamba_cache_dtype="auto"}} 1.0\n'
        return said

    def _generated(self, body):
        """An answer of SGLang's own API, recorded from its source: sglang 0.5.23, tokenizer_manager.py."""
        prompt = token_ids(body["text"]) if "text" in body else body["input_ids"]
        drawn = self._draw(prompt[-1], body["sampling_params"]["max_new_tokens"])
        about = {"id": "1", "finish_reason": {"type": "length", "length": len(drawn)}, "weight_version": "default"}
        if body.get("return_logprob"):
            values = self._logprobs_of([prompt[-1], *drawn])
            about["output_token_logprobs"] = [[value, token, None] for value, token in zip(values, drawn, strict=True)]
            start = body.get("logprob_start_len", -1)
            if start >= 0:
                scored = zip([None, *self._logprobs_of(prompt[start:])], prompt[start:], strict=True)
                about["input_token_logprobs"] = [[value, token, None] for value, token in scored]
        more = {"prompt_token_ids": prompt} if body.get("return_prompt_token_ids") else {}
        return {"text": "", "output_ids": drawn, "meta_info": about, **more}

    def _draw(self, last, count):
        drawn = []
        with self.lock:
            for _ in range(count):
                last = int(self.rng.choice(VOCABULARY, p=np.exp(self.logprobs[last])))
                drawn.append(last)
        return drawn

    def _logprobs_of(self, tokens):
        return [float(self.logprobs[token, other]) for token, other in pairwise(tokens)]


@contextmanager
def completions(logits, *, fault=None, models=("tiny",), sglang=False, version="", cache=""):
    """A server on a free port until the block ends; with `sglang` one that has `/generate` in place of completions."""
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    served = Completions("", logprobs, fault, sglang, models, version, cache)

    def respond(path, headers, body):
        asked = json.loads(body or b"{}")
        with served.lock:
            served.requests.append((path, asked))
            served.headers.append(headers)
        answer, status, more = served.answer(path, asked), 200, {}
        if served.fault is not None:
            answer, status, more = served.fault(path, asked, answer)
        elif answer is None:
            answer, status = {"error": {"message": "Not Found", "code": 404}}, 404
        content = answer if isinstance(answer, str) else json.dumps(answer)
        return status, {"content-type": "application/json", **more}, content.encode()

    with answering(respond) as served.address:
        yield served
