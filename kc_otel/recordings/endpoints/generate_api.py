"""Requests to SGLang's own `/generate`, and its answers. Pure.

Source: sglang 0.5.23, srt/managers/io_struct.py (`GenerateReqInput`), srt/managers/tokenizer_manager.py (`meta_info`):
`output_token_logprobs` and, of given tokens from `logprob_start_len` on, `input_token_logprobs` are lists of a
log-probability, a token's id and its text; the first token of all has null. With no temperature and every token allowed
both are of the softmax of the logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from kc_otel.recordings.endpoints.answers import AnswerError, Sampled
from kc_otel.recordings.responses import number

PATH: Final = "/generate"
_WHOLE_DISTRIBUTION: Final = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0,
                 "presence_penalty": 0.0, "frequency_penalty": 0.0}  # fmt: skip


def is_sglang(models: Any) -> bool:
    """Return True if a list of models is SGLang's."""
    rows = models.get("data") if isinstance(models, dict) else None
    return bool(rows) and all(isinstance(row, dict) and row.get("owned_by") == "sglang" for row in rows or ())


def generation_body(prompt: str | Sequence[int], max_tokens: int) -> dict[str, Any]:
    """A request for one completion, with the sampled tokens' ids and log-probabilities."""
    sent = {"text": prompt} if isinstance(prompt, str) else {"input_ids": list(prompt)}
    params = {"max_new_tokens": max_tokens, **_WHOLE_DISTRIBUTION}
    return {**sent, "sampling_params": params, "return_logprob": True, "return_prompt_token_ids": True}


def scores_body(token_ids: Sequence[int]) -> dict[str, Any]:
    """A request for the log-probability of every one of these tokens after those before it."""
    params = {"max_new_tokens": 0, **_WHOLE_DISTRIBUTION}
    return {"input_ids": list(token_ids), "sampling_params": params, "return_logprob": True, "logprob_start_len": 0}


def generated(answer: Any, prompt: str | Sequence[int]) -> Sampled:
    """The completion that an answer to `generation_body` holds.

    Raises:
        AnswerError: If ids or log-probabilities are missing.
    """
    about = _about(answer)
    logprobs, ids = _rows(about.get("output_token_logprobs"), "output_token_logprobs")
    said = answer.get("prompt_token_ids")
    if not said and isinstance(prompt, str):
        raise AnswerError(
            "answers without the ids of the prompt's tokens (prompt_token_ids); put prompt_token_ids in place of "
            "prompt into the file of prompts"
        )
    if said and not isinstance(prompt, str) and list(said) != list(prompt):
        raise AnswerError(f"read other tokens than were sent: {len(said)} for {len(prompt)}")
    reason = about.get("finish_reason")
    ended = reason.get("type") if isinstance(reason, dict) else reason
    return Sampled(tuple(said or map(int, prompt)), ids, logprobs, str(ended or ""))


def scores(answer: Any, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> tuple[float, ...]:
    """Log-probabilities of sampled tokens in an answer to `scores_body`, nats, one per token of `token_ids`.

    Raises:
        AnswerError: If log-probabilities are missing, or are of other tokens than were sent.
    """
    logprobs, ids = _rows(_about(answer).get("input_token_logprobs"), "input_token_logprobs")
    sent = (*prompt_ids, *token_ids)
    # SGLang writes 0 for the last ids of a vocabulary, which it takes for images'.
    if len(ids) != len(sent) or any(said not in (0, token) for said, token in zip(ids, sent, strict=True)):
        raise AnswerError(f"scored {len(ids)} tokens that are not the {len(sent)} that were sent")
    return logprobs[len(prompt_ids) :]


def _about(answer: Any) -> dict[str, Any]:
    about = answer.get("meta_info") if isinstance(answer, dict) else None
    if not isinstance(about, dict):
        raise AnswerError("answers with something else than one completion (meta_info); is it SGLang's /generate?")
    return about


def _rows(rows: Any, name: str) -> tuple[tuple[float, ...], tuple[int, ...]]:
    if not isinstance(rows, list) or not all(isinstance(row, list) and len(row) >= 2 for row in rows):
        raise AnswerError(f"answers without log-probabilities (meta_info.{name}) though return_logprob was asked for")
    if not all(isinstance(row[1], int) for row in rows):
        raise AnswerError(f"answers with log-probabilities of no tokens (meta_info.{name})")
    return tuple(number(row[0]) for row in rows), tuple(row[1] for row in rows)
