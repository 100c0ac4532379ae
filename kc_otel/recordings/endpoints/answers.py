"""Requests to an OpenAI-compatible completions endpoint, and its answers. Pure.

Log-probabilities of given tokens come from `prompt_logprobs`, which vLLM takes in the body beside OpenAI's parameters.
They are from before any temperature or truncation, so that both sides are compared there: at temperature 1, with every
token allowed. Every such parameter is sent, because a server has defaults of its own from the checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from kc_otel.recordings.comparable import NEUTRAL
from kc_otel.recordings.responses import number

_UNPROCESSED: Final = {name: values[0] for name, values in NEUTRAL.items()}
_PREFIX: Final = "token_id:"


class AnswerError(ValueError):
    """An answer lacks what a comparison takes; the message says what, and how to switch it on."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """A completion.

    Attributes:
        prompt_ids: Tokens of the prompt.
        token_ids: Sampled tokens.
        logprobs: Their log-probabilities, nats.
        finish_reason: `stop`, `length` or what else the endpoint says; empty where it says nothing.
    """

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str = ""


def sampling_body(model: str, prompt: str | Sequence[int], max_tokens: int) -> dict[str, Any]:
    """A request for one completion, with the sampled tokens' ids and log-probabilities."""
    return {
        "model": model,
        "prompt": prompt if isinstance(prompt, str) else list(prompt),
        "max_tokens": max_tokens,
        "logprobs": 0,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        **_UNPROCESSED,
    }


def scoring_body(model: str, token_ids: Sequence[int]) -> dict[str, Any]:
    """A request for the log-probability of every one of these tokens after those before it."""
    # One token is generated and thrown away: no server takes a request for none.
    return {
        "model": model,
        "prompt": list(token_ids),
        "max_tokens": 1,
        "prompt_logprobs": 0,
        "return_token_ids": True,
        **_UNPROCESSED,
    }


def sampled(answer: Any, prompt: str | Sequence[int]) -> Sampled:
    """The completion that an answer to `sampling_body` holds.

    Raises:
        AnswerError: If ids or log-probabilities are missing, or it is about another prompt.
    """
    choice = _choice(answer)
    given = choice.get("logprobs") or {}
    logprobs = given.get("token_logprobs") if isinstance(given, dict) else None
    if not isinstance(logprobs, list):
        raise AnswerError(
            "answers without log-probabilities of the sampled tokens (choices[0].logprobs.token_logprobs) though "
            "logprobs was asked for; take a server that returns them, such as vLLM's, and a proxy that passes both on"
        )
    token_ids = _ids(choice.get("token_ids")) or _ids_in_text(given.get("tokens"))
    if token_ids is None and logprobs:
        raise AnswerError(
            "answers without the ids of the sampled tokens (choices[0].token_ids) though return_token_ids was asked "
            "for; vLLM has them from 0.10.2 on"
        )
    if len(token_ids or ()) != len(logprobs):
        raise AnswerError(f"answers with {len(logprobs)} log-probabilities for {len(token_ids or ())} sampled tokens")
    said = _ids(choice.get("prompt_token_ids"))
    if said is None:
        if isinstance(prompt, str):
            raise AnswerError(
                "answers without the ids of the prompt's tokens (choices[0].prompt_token_ids); put prompt_token_ids "
                "in place of prompt into the file of prompts"
            )
        said = tuple(prompt)
    _same_prompt(said, prompt)
    return Sampled(said, token_ids or (), tuple(map(number, logprobs)), str(choice.get("finish_reason") or ""))


def scored(answer: Any, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> tuple[float, ...]:
    """Log-probabilities of sampled tokens in an answer to `scoring_body`, nats, one per token of `token_ids`.

    Args:
        answer: The answer, decoded JSON.
        prompt_ids: Tokens of the prompt, at least one.
        token_ids: Sampled tokens, which followed them in the request.

    Raises:
        AnswerError: If log-probabilities are missing, or are of other tokens than were sent.
    """
    choice = _choice(answer)
    rows = choice.get("prompt_logprobs")
    if not isinstance(rows, list):
        raise AnswerError(
            "answers without log-probabilities of given tokens (choices[0].prompt_logprobs) though prompt_logprobs was "
            "asked for; take a server that scores them, such as vLLM's"
        )
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
        found.append(number(entry["logprob"]))
    return tuple(found)


def tokenized(answer: Any) -> tuple[int, ...]:
    """Tokens in an answer of vLLM's /tokenize.

    Raises:
        AnswerError: If there are none.
    """
    found = _ids(answer.get("tokens")) if isinstance(answer, dict) else None
    if not found:
        raise AnswerError("answers /tokenize without tokens; put prompt_token_ids into the file of prompts")
    return found


def models(answer: Any) -> tuple[str, ...]:
    """Names of the models that an endpoint lists; none where it is no such list."""
    rows = answer.get("data") if isinstance(answer, dict) else None
    return tuple(row["id"] for row in rows or () if isinstance(row, dict) and isinstance(row.get("id"), str))


def _choice(answer: Any) -> dict[str, Any]:
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not (isinstance(choices, list) and len(choices) == 1 and isinstance(choices[0], dict)):
        raise AnswerError(
            "answers with something else than one completion; is it an OpenAI-compatible /v1/completions?"
        )
    return choices[0]


def _ids(value: Any) -> tuple[int, ...] | None:
    if isinstance(value, list) and all(isinstance(token, int) for token in value):
        return tuple(value)
    return None


def _ids_in_text(value: Any) -> tuple[int, ...] | None:
    """Parse `token_id:17`, vLLM's form of tokens in versions without `token_ids`."""
    if not isinstance(value, list):
        return None
    texts = [str(token).removeprefix(_PREFIX) for token in value if str(token).startswith(_PREFIX)]
    return tuple(map(int, texts)) if len(texts) == len(value) and all(map(str.isdecimal, texts)) else None


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
