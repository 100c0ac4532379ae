"""Saved responses of two inference servers, as a recording: one sampled, the other scored.

Read are, with log-probabilities asked for: completions and chat completions of OpenAI's API, which vLLM, SGLang and
llama.cpp serve too (`logprobs`, with `echo` or vLLM's `prompt_logprobs` for given tokens), SGLang's /generate
(`output_token_logprobs` and `input_token_logprobs` of `meta_info`) and llama.cpp's /completion
(`completion_probabilities`); by themselves, in JSON lines, or as the output of a batch (`custom_id`, `response.body`).

Sources: vLLM 0.32.0, vllm/entrypoints/openai/ (`prompt_logprobs` has the token itself first); sglang 0.5.23,
srt/managers/tokenizer_manager.py; llama.cpp, tools/server/README.md (`n_probs`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from kc_otel.contract.json_text import read_json_text
from kc_otel.contract.slices import Scalar
from kc_otel.recordings.columns import ATTRIBUTES
from kc_otel.recordings.read_jsonl import lines, scalars_of
from kc_otel.recordings.recording import RecordingError
from kc_otel.recordings.rows import Problems, Ragged, RaggedTable

_MINUS_INFINITY: Final = -9999.0
"""Value that vLLM and OpenAI write for the logarithm of 0, for which JSON has no number."""
_PREFIX: Final = "token_id:"
"""Before a token's id where vLLM was asked for ids in place of texts."""
_ABOUT_THE_ANSWER: Final = frozenset({"id", "object", "created", "service_tier", "system_fingerprint", "content"})

Token = int | str
"""A token's id, or its text where a response has no ids."""


@dataclass(frozen=True, slots=True)
class _Scored:
    """Log-probabilities of consecutive tokens, nats, and the tokens, as far as a response names them.

    `ends` is whether the last one is known to be the last that was sent: an echo may have generated some after it.
    """

    logprobs: tuple[float, ...]
    tokens: tuple[Token, ...]
    ends: bool = True


@dataclass(frozen=True, slots=True)
class _Choice:
    """One completion of a response: the sampled tokens, and the scored given tokens; None for neither."""

    sampled: _Scored | None
    given: _Scored | None
    prompt: str
    attributes: Mapping[str, Scalar]


def is_response(record: Any) -> bool:
    """Return whether a record is a server's answer, by itself or within a batch's output."""
    body = _body(record)
    return isinstance(body, dict) and any(
        isinstance(body.get(name), kind)
        for name, kind in (("choices", list), ("meta_info", dict), ("completion_probabilities", list))
    )


def read_responses(train: Path, inference: Path, columns: tuple[str, str] | None = None) -> RaggedTable:
    """Pair saved responses: the training kernel scored what the other had sampled, one for each, or by `custom_id`.

    Args:
        train: Responses of the training kernel.
        inference: Responses of the kernel that sampled.
        columns: Names under which a line of one file has both responses.

    Raises:
        RecordingError: If a file is no such one, a side has no log-probabilities, or they are of other tokens.
    """
    source = str(inference) if train == inference else f"train={train},inference={inference}"
    problems = Problems(source)
    scored, sampled = (
        list(_choices(path, None if columns is None else columns[place], problems))
        for place, path in enumerate((train, inference))
    )
    by_prompt = {choice.prompt: choice for choice in scored}
    if len(by_prompt) == len(scored) and {choice.prompt for choice in sampled} == by_prompt.keys():
        scored = [by_prompt[choice.prompt] for choice in sampled]
    elif len(scored) != len(sampled):
        problems.add(f"{len(scored)} completions were scored and {len(sampled)} sampled; give one answer for each")
    found: list[tuple[tuple[float, ...], _Scored]] = []
    for place, (given, own) in enumerate(zip(scored, sampled, strict=False)):
        try:
            found.append(_paired(given, own))
        except ValueError as error:
            problems.add(f"sequence {place}: {error}")
    if problems.all():
        raise RecordingError(*problems.all())
    ragged = {
        "train": Ragged.of_rows([np.array(logprobs, dtype=np.float64) for logprobs, _ in found]),
        "inference": Ragged.of_rows([np.array(own.logprobs, dtype=np.float64) for _, own in found]),
    }
    if all(isinstance(token, int) for _, own in found for token in own.tokens) and all(own.tokens for _, own in found):
        ragged["token_ids"] = Ragged.of_rows([np.array(own.tokens, dtype=np.int64) for _, own in found])
    names = {"train": "train's logprobs", "inference": "inference's logprobs"}
    attributes = tuple(choice.attributes for choice in sampled)
    return RaggedTable(source, ragged, names, attributes, lambda row: f"sequence {row}")


def _paired(given: _Choice, own: _Choice) -> tuple[tuple[float, ...], _Scored]:
    """Return the training kernel's log-probabilities of what the other sampled, and the other's own.

    Raises:
        ValueError: If one of them is missing, or they are of other tokens.
    """
    sampled = own.sampled
    if sampled is None or not sampled.logprobs:
        raise ValueError(
            "inference: has no log-probabilities of sampled tokens; ask for logprobs (OpenAI's API), return_logprob "
            "(SGLang) or n_probs (llama.cpp)"
        )
    size = len(sampled.logprobs)
    for side in (given.given, given.sampled):
        if side is None:
            continue
        # The completion ends the given tokens; an echo may have generated one after them.
        for end in range(len(side.logprobs), max(size, len(side.logprobs) - (not side.ends)) - 1, -1):
            same = _same(side.tokens[end - size : end], sampled.tokens)
            if same or (same is None and side.ends):
                return side.logprobs[end - size : end], sampled
    if given.given is None and given.sampled is None:
        raise ValueError(
            "train: has no log-probabilities; ask for prompt_logprobs (vLLM), echo with logprobs, or return_logprob "
            "with logprob_start_len (SGLang), of prompt and completion"
        )
    raise ValueError(
        "train: scores other tokens than were sampled, or names none of them; send prompt and completion as token ids, "
        "and ask for these (return_token_ids)"
    )


def _same(scored: Sequence[Token], sampled: Sequence[Token]) -> bool | None:
    """Return whether both name the same tokens; None where one has ids and the other texts, or no names."""
    if not scored or not sampled or type(scored[-1]) is not type(sampled[-1]):
        return None
    # SGLang writes 0 for the last ids of a vocabulary, which it takes for images'.
    return len(scored) == len(sampled) and all(a in (b, 0) for a, b in zip(scored, sampled, strict=True))


def _choices(path: Path, column: str | None, problems: Problems) -> Iterator[_Choice]:
    for place, record in _records(path, problems):
        answer = record.get(column) if column is not None and isinstance(record, dict) else record
        body = _body(answer)
        if not is_response(answer):
            problems.add(
                f"{path}: {place}: holds no answer of a server with choices, meta_info or completion_probabilities"
            )
            continue
        about = record if isinstance(record, dict) else {}
        prompt = str(about.get("custom_id", place))
        more = about.get(ATTRIBUTES)
        attributes = {
            **{name: value for name, value in scalars_of(about).items() if name not in _ABOUT_THE_ANSWER},
            **(scalars_of(more) if isinstance(more, dict) else {}),
            "prompt_id": prompt,
        }
        if isinstance(usage := body.get("usage"), dict) and isinstance(usage.get("prompt_tokens"), int):
            attributes["prompt_tokens"] = usage["prompt_tokens"]
        choices = body["choices"] if isinstance(body.get("choices"), list) else [body]
        for at, choice in enumerate(choice for choice in choices if isinstance(choice, dict)):
            try:
                sampled, given = _read(choice, body)
            except (TypeError, ValueError, KeyError, AttributeError) as error:
                problems.add(f"{path}: {place}: log-probabilities cannot be read ({error})")
                continue
            yield _Choice(sampled, given, prompt if len(choices) == 1 else f"{prompt}#{at}", attributes)


def number(value: Any) -> float:
    """Return a log-probability; nan where it is none, and -inf where it stands for the logarithm of 0."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    return -math.inf if value <= _MINUS_INFINITY else float(value)


def _read(choice: Mapping[str, Any], body: Mapping[str, Any]) -> tuple[_Scored | None, _Scored | None]:
    """Return the sampled and the given tokens of a completion."""
    if isinstance(about := choice.get("meta_info"), dict):
        return _triples(about.get("output_token_logprobs")), _triples(about.get("input_token_logprobs"))
    if isinstance(rows := choice.get("completion_probabilities"), list):
        return _Scored(
            tuple(map(_llama_logprob, rows)), tuple(row.get("id", row.get("token", "")) for row in rows)
        ), None
    logprobs = choice.get("logprobs") or {}
    content = logprobs.get("content")
    if isinstance(content, list):
        values, texts = [row["logprob"] for row in content], [row.get("token", "") for row in content]
    else:
        values, texts = logprobs.get("token_logprobs") or [], logprobs.get("tokens") or []
    scored = (
        _Scored(tuple(map(number, values)), tokens_of(texts, choice.get("token_ids"), len(values))) if values else None
    )
    if scored is not None and values[0] is None:  # an echo: the first token of all has no log-probability
        usage = body.get("usage") or {}
        generated = usage.get("completion_tokens") if len(body["choices"]) == 1 else None
        end = len(values) - (generated or 0)
        return None, _Scored(scored.logprobs[:end], scored.tokens[:end], ends=generated is not None)
    rows = choice.get("prompt_logprobs") or body.get("prompt_logprobs")
    return scored, None if not rows else _Scored(
        *_of_prompt(rows, choice.get("prompt_token_ids") or body.get("prompt_token_ids"))
    )


def _of_prompt(rows: Sequence[Any], ids: Any) -> tuple[tuple[float, ...], tuple[Token, ...]]:
    """Read `prompt_logprobs` of vLLM: a mapping of ids for each token, its own first; null for the first token."""
    known = ids if isinstance(ids, list) and len(ids) == len(rows) else [next(iter(row or (-1,))) for row in rows]
    chosen = [(row or {}).get(str(token), {}) for row, token in zip(rows, known, strict=True)]
    return tuple(number(entry.get("logprob")) for entry in chosen), tuple(map(int, known))


def _triples(rows: Any) -> _Scored | None:
    """Read SGLang's lists of log-probability, id and text."""
    return None if not rows else _Scored(tuple(number(row[0]) for row in rows), tuple(int(row[1]) for row in rows))


def _llama_logprob(row: Mapping[str, Any]) -> float:
    """Return a log-probability of llama.cpp, or the logarithm of what it gives with `post_sampling_probs`."""
    if "logprob" in row:
        return number(row["logprob"])
    probability = float(row["prob"])
    return math.log(probability) if probability > 0.0 else -math.inf


def tokens_of(texts: Sequence[Any], ids: Any, size: int) -> tuple[Token, ...]:
    """Return the ids of tokens where an answer has them, in a list or as `token_id:17`; their texts elsewhere."""
    if isinstance(ids, list) and len(ids) == size:
        return tuple(map(int, ids))
    if len(texts) != size:
        return ()
    named = [str(text) for text in texts]
    bare = [text.removeprefix(_PREFIX) for text in named]
    return tuple(map(int, bare)) if bare != named and all(text.isdecimal() for text in bare) else tuple(named)


def _body(record: Any) -> Any:
    """Return the answer within a batch's output, or the record itself."""
    for name in ("response", "body"):
        if isinstance(record, dict) and isinstance(record.get(name), dict):
            record = record[name]
    return record


def _records(path: Path, problems: Problems) -> Iterator[tuple[str, Any]]:
    if path.name.removesuffix(".gz").endswith(".json"):
        text = "".join(line for _, line in lines(path))
        try:
            whole = read_json_text(text)
        except ValueError as error:
            raise RecordingError(f"{path}: is not JSON ({error})") from None
        yield from (
            (f"answer {place}", answer) for place, answer in enumerate(whole if isinstance(whole, list) else [whole], 1)
        )
        return
    for line, content in lines(path):
        try:
            found = read_json_text(content)
        except ValueError as error:
            problems.add(f"{path}: line {line}: is not JSON ({error})")
            continue
        yield from ((f"line {line}", answer) for answer in (found if isinstance(found, list) else [found]))
