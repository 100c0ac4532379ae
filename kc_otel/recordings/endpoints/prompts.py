"""A file of prompts: one JSON object per line, with what is sent and what slices are made of."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kc_otel.contract.json_text import read_json_text
from kc_otel.contract.slices import Scalar
from kc_otel.recordings.read_table import ATTRIBUTES, Problems, lines, scalars_of
from kc_otel.recordings.recording import RecordingError
from kc_otel.recordings.request import NEUTRAL, effective


@dataclass(frozen=True, slots=True)
class Prompt:
    """A line of the file, counted from 1: one of `text`, `token_ids` and `messages`; endpoints make tokens."""

    line: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    messages: tuple[Mapping[str, Any], ...] = ()
    attributes: Mapping[str, Scalar] = field(default_factory=dict)


def read_prompts(path: str | Path) -> tuple[Prompt, ...]:
    """The prompts of a file: `prompt`, `prompt_token_ids` or `messages` in a line, and its other values as attributes.

    A RecordingError has everything that is wrong, sampling otherwise than at temperature 1 without truncation included.
    """
    problems = Problems(str(path))
    found = []
    for line, content in lines(Path(path)):
        try:
            found.append(_prompt(line, read_json_text(content)))
        except ValueError as error:
            said = f"is not JSON ({error}); every line is one object"
            problems.add(f"line {line}: {said if isinstance(error, json.JSONDecodeError) else error}")
    if not found and not problems.all():
        problems.add("has no prompt; write one JSON object per line, such as {'prompt': 'Hello'} in double quotes")
    if problems.all():
        raise RecordingError(*problems.all())
    return tuple(found)


def _prompt(line: int, row: Any) -> Prompt:
    if not isinstance(row, dict):
        raise ValueError(f"is {type(row).__name__}, not an object with a prompt")  # noqa: TRY004 - the file is wrong
    given = [name for name in ("prompt", "prompt_token_ids", "messages") if row.get(name)]
    if len(given) != 1:
        said = " and ".join(given) if given else "none"
        raise ValueError(f"needs exactly one of prompt, prompt_token_ids and messages, not empty; it has {said}")
    text, token_ids, messages = row.get("prompt") or "", row.get("prompt_token_ids") or [], row.get("messages") or []
    if not isinstance(text, str):
        raise ValueError("prompt: is not text; tokens are called prompt_token_ids")  # noqa: TRY004
    if not (isinstance(token_ids, list) and all(type(token) is int and token >= 0 for token in token_ids)):
        raise ValueError("prompt_token_ids: is not a list of whole numbers from 0 on")
    if not (isinstance(messages, list) and all(isinstance(message, dict) for message in messages)):
        raise ValueError("messages: is not a list of objects such as {'role': 'user', 'content': '...'}")
    asked = effective({name: row[name] for name in NEUTRAL if row.get(name) is not None})
    if asked:
        said = ", ".join(f"{name}: {value}" for name, value in asked.items())
        raise ValueError(
            f"{said}: both endpoints are compared at temperature 1 without truncation or penalties; leave it out"
        )
    more = row.get(ATTRIBUTES)
    own = {name: value for name, value in row.items() if name != "prompt"}
    attributes = scalars_of(own) | (scalars_of(more) if isinstance(more, dict) else {})
    return Prompt(line, text, tuple(token_ids), tuple(messages), attributes)
