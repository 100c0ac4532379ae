"""Requests to an OpenAI-compatible completions endpoint or to SGLang's own `/generate`, and their answers. Pure.

Log-probabilities of given tokens come from `prompt_logprobs`, which vLLM takes in the body beside OpenAI's parameters,
and from SGLang's `input_token_logprobs`. They are from before any temperature or truncation, so that both sides are
compared there: at temperature 1, with every token allowed. Every such parameter is sent, because a server has defaults
of its own from the checkpoint.

Source: sglang 0.5.23, srt/managers/io_struct.py (`GenerateReqInput`), srt/managers/tokenizer_manager.py (`meta_info`):
`output_token_logprobs` and, of given tokens from `logprob_start_len` on, `input_token_logprobs` are lists of a
log-probability, a token's id and its text; the first token of all has null. Its `/server_info` has the arguments, and
in `internal_states` what they resolve to.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from kc_otel.contract.model import NUMBER_FORMATS
from kc_otel.recordings.request import NEUTRAL

UNPROCESSED: Final = {name: values[0] for name, values in NEUTRAL.items()}
"""Parameters that every request names, so that no default of the server is in force."""
COMPLETIONS: Final = "/v1/completions"
GENERATE: Final = "/generate"
METRICS: Final = "/metrics"
SERVER_INFO: Final = "/server_info"
_CACHE_FORMAT: Final = re.compile(r'^vllm:cache_config_info\{(?:.*,)?cache_dtype="([^"]+)"', re.MULTILINE)
_MINUS_INFINITY: Final = -9999.0
"""Value that vLLM and OpenAI write for the logarithm of 0, for which JSON has no number."""


class AnswerError(ValueError):
    """An answer lacks what a comparison takes; the message says what, and how to switch it on."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """A completion; `finish_reason` is `stop`, `length` or what else the endpoint says, empty where it says nothing."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str = ""


def sampling_body(model: str, prompt: str | Sequence[int], max_tokens: int) -> dict[str, Any]:
    """A request for one completion, with the sampled tokens' ids and log-probabilities."""
    return _completion_body(model, prompt, max_tokens) | {"logprobs": 0}


def scoring_body(model: str, token_ids: Sequence[int]) -> dict[str, Any]:
    """A request for the log-probability of every one of these tokens after those before it."""
    # One token is generated and thrown away: no server takes a request for none.
    return _completion_body(model, token_ids, 1) | {"prompt_logprobs": 0}


def _completion_body(model: str, prompt: str | Sequence[int], max_tokens: int) -> dict[str, Any]:
    sent = prompt if isinstance(prompt, str) else list(prompt)
    return {"model": model, "prompt": sent, "max_tokens": max_tokens, "return_token_ids": True, **UNPROCESSED}


def sampled(answer: Any, prompt: str | Sequence[int]) -> Sampled:
    """The completion that an answer to `sampling_body` holds, if it is about this prompt."""
    choice = _choice(answer)
    given = choice.get("logprobs") or {}
    logprobs = given.get("token_logprobs") if isinstance(given, dict) else None
    if not isinstance(logprobs, list):
        raise _without("log-probabilities of the sampled tokens (choices[0].logprobs.token_logprobs)")
    token_ids = _ids(choice.get("token_ids"))
    if token_ids is not None and len(token_ids) != len(logprobs):
        raise AnswerError(f"answers with {len(logprobs)} log-probabilities for {len(token_ids)} sampled tokens")
    if logprobs and token_ids is None:
        raise _without("the ids of the sampled tokens (choices[0].token_ids, in vLLM from 0.10.2 on)")
    said = _prompt_of(_ids(choice.get("prompt_token_ids")), prompt)
    return Sampled(said, token_ids or (), tuple(map(_number, logprobs)), str(choice.get("finish_reason") or ""))


def scored(answer: Any, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> tuple[float, ...]:
    """Log-probabilities of sampled tokens in an answer to `scoring_body`, nats, one per token of `token_ids`."""
    choice = _choice(answer)
    rows = choice.get("prompt_logprobs")
    if not isinstance(rows, list):
        raise _without("log-probabilities of given tokens (choices[0].prompt_logprobs)")
    sent = (*prompt_ids, *token_ids)
    if (said := _ids(choice.get("prompt_token_ids"))) is not None:
        _same_prompt(said, sent)
    if len(rows) != len(sent):
        raise AnswerError(
            f"scored {len(rows)} tokens where {len(sent)} were sent; tokens were added, dropped or made anew from text"
        )
    found = []
    for place, token in enumerate(token_ids, len(prompt_ids)):
        row = rows[place]
        entry = row.get(str(token)) if isinstance(row, dict) else None
        if not isinstance(entry, dict) or "logprob" not in entry:
            raise AnswerError(f"scored another token than {token} at place {place} of those that were sent")
        found.append(_number(entry["logprob"]))
    return tuple(found)


def generation_body(prompt: str | Sequence[int], max_tokens: int) -> dict[str, Any]:
    """A request to SGLang for one completion, with the sampled tokens' ids and log-probabilities."""
    sent = {"text": prompt} if isinstance(prompt, str) else {"input_ids": list(prompt)}
    params = {"max_new_tokens": max_tokens, **UNPROCESSED, "top_k": -1}
    return {**sent, "sampling_params": params, "return_logprob": True, "return_prompt_token_ids": True}


def scores_body(token_ids: Sequence[int]) -> dict[str, Any]:
    """A request to SGLang for the log-probability of every one of these tokens after those before it."""
    params = {"max_new_tokens": 0, **UNPROCESSED, "top_k": -1}
    return {"input_ids": list(token_ids), "sampling_params": params, "return_logprob": True, "logprob_start_len": 0}


def generated(answer: Any, prompt: str | Sequence[int]) -> Sampled:
    """The completion that an answer to `generation_body` holds, if it is about this prompt."""
    about = _about(answer)
    logprobs, ids = _rows(about.get("output_token_logprobs"), "output_token_logprobs")
    said = _prompt_of(_ids(answer.get("prompt_token_ids")) or None, prompt)
    reason = about.get("finish_reason")
    ended = reason.get("type") if isinstance(reason, dict) else reason
    return Sampled(said, ids, logprobs, str(ended or ""))


def scores(answer: Any, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> tuple[float, ...]:
    """Log-probabilities of sampled tokens in an answer to `scores_body`, nats, one per token of `token_ids`."""
    logprobs, ids = _rows(_about(answer).get("input_token_logprobs"), "input_token_logprobs")
    sent = (*prompt_ids, *token_ids)
    # SGLang writes 0 for the last ids of a vocabulary, which it takes for images'.
    if len(ids) != len(sent) or any(said not in (0, token) for said, token in zip(ids, sent, strict=True)):
        raise AnswerError(f"scored {len(ids)} tokens that are not the {len(sent)} that were sent")
    return logprobs[len(prompt_ids) :]


def tokenized(answer: Any) -> tuple[int, ...]:
    """Tokens in an answer of vLLM's /tokenize."""
    found = _ids(answer.get("tokens")) if isinstance(answer, dict) else None
    if not found:
        raise AnswerError("answers /tokenize without tokens; put prompt_token_ids into the file of prompts")
    return found


def served(answer: Any) -> tuple[tuple[str, ...], int | None, bool]:
    """Names of the models that an endpoint lists, the shortest context among them, and whether it is SGLang.

    There are no names where it is no such list, and no context where it does not say.
    """
    rows = answer.get("data") if isinstance(answer, dict) else None
    known = [row for row in rows or () if isinstance(row, dict)]
    names = tuple(row["id"] for row in known if isinstance(row.get("id"), str))
    contexts = (row["max_model_len"] for row in known if isinstance(row.get("max_model_len"), int))
    sglang = bool(known) and all(row.get("owned_by") == "sglang" for row in known)
    return names, min(contexts, default=None), sglang


def cache_format(metrics: str) -> dict[str, str]:
    """Number format of the KV cache in vLLM's metrics; empty where they are not vLLM's.

    >>> cache_format('vllm:cache_config_info{block_size="16",cache_dtype="fp8",mamba_cache_dtype="auto"} 1.0')
    {'kv_cache_dtype': 'fp8'}
    """
    found = _CACHE_FORMAT.search(metrics)
    return {"kv_cache_dtype": found[1]} if found else {}


def number_formats(info: Any) -> dict[str, str]:
    """Number formats in SGLang's answer about itself; empty where it is no such answer."""
    said = info if isinstance(info, dict) else {}
    states = said.get("internal_states")
    if isinstance(states, list) and states and isinstance(states[0], dict):
        said = {**said, **states[0]}
    found = {name: said[name] for name in NUMBER_FORMATS if isinstance(said.get(name), str)}
    return {name: value for name, value in found.items() if (name, value) != ("dtype", "auto")}


def _without(what: str) -> AnswerError:
    return AnswerError(f"answers without {what}; take a server that returns them, and a proxy that passes them on")


def _choice(answer: Any) -> dict[str, Any]:
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not (isinstance(choices, list) and len(choices) == 1 and isinstance(choices[0], dict)):
        raise AnswerError("answers with something else than one completion; is it an OpenAI-compatible server?")
    return choices[0]


def _number(value: Any) -> float:
    """Return a log-probability; nan where it is none, and -inf where it stands for the logarithm of 0."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    return -math.inf if value <= _MINUS_INFINITY else float(value)


def _ids(value: Any) -> tuple[int, ...] | None:
    if isinstance(value, list) and all(isinstance(token, int) for token in value):
        return tuple(value)
    return None


def _prompt_of(said: tuple[int, ...] | None, prompt: str | Sequence[int]) -> tuple[int, ...]:
    """Return the tokens of the prompt, as the answer has them or as they were sent."""
    if said is None and isinstance(prompt, str):
        raise AnswerError(
            "answers without the ids of the prompt's tokens (prompt_token_ids); put prompt_token_ids in place of "
            "prompt into the file of prompts"
        )
    found = tuple(map(int, prompt)) if said is None else said
    _same_prompt(found, prompt)
    return found


def _same_prompt(said: tuple[int, ...], sent: str | Sequence[int]) -> None:
    if isinstance(sent, str) or said == tuple(sent):
        if not said:
            raise AnswerError("was given a prompt without a token; a first token has no log-probability: add one")
        return
    same = 0
    while same < min(len(said), len(sent)) and said[same] == sent[same]:
        same += 1
    raise AnswerError(
        f"read other tokens than were sent: {len(said)} for {len(sent)}, different from place {same} on; a proxy that "
        f"makes text of them, or a server that adds tokens, cannot be compared"
    )


def _about(answer: Any) -> dict[str, Any]:
    about = answer.get("meta_info") if isinstance(answer, dict) else None
    if not isinstance(about, dict):
        raise AnswerError("answers with something else than one completion (meta_info); is it SGLang's /generate?")
    return about


def _rows(rows: Any, name: str) -> tuple[tuple[float, ...], tuple[int, ...]]:
    if not isinstance(rows, list) or not all(
        isinstance(row, list) and len(row) >= 2 and isinstance(row[1], int) for row in rows
    ):
        raise _without(f"log-probabilities with the ids of their tokens (meta_info.{name})")
    return tuple(_number(row[0]) for row in rows), tuple(row[1] for row in rows)
