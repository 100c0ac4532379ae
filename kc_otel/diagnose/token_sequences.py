"""Sequences that kernels are run on: tokens from a recording, a spool or JSON lines, of one slice."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, Final

from kc_otel.contract.model import Contract
from kc_otel.contract.slices import ALL, LENGTH, Scalar
from kc_otel.diagnose.captures import is_capture, read_capture
from kc_otel.offline.python_names import python_name
from kc_otel.recordings.read_table import ALIASES, MASK, Problems, records, row_attributes, scalars_of
from kc_otel.recordings.recording import PROMPT_IDS
from kc_otel.recordings.recording_files import load_recording
from kc_otel.recordings.spool import SpoolError, waiting

_TOKEN_COLUMNS: Final = ("token_ids", "completion_ids", "response_ids", "input_ids")
_MAX_SPOOLED_REQUESTS: Final = 4096
_MAX_CONSIDERED: Final = 65_536
_PROGRAM_DESCRIPTION: Final = "a function of a slice's name that returns objects with prompt_ids and token_ids"


@dataclass(frozen=True, slots=True, eq=False)
class TokenSequence:
    """One sequence: prompt and completion, at least two tokens; `messages` is the prompt's conversation, if known."""

    token_ids: tuple[int, ...]
    prompt_tokens: int = 0
    attributes: Mapping[str, Scalar] = field(default_factory=dict)
    messages: tuple[Mapping[str, str], ...] = ()


def chat_encoder(tokenizer: Any) -> Callable[[Sequence[Mapping[str, str]]], list[int]] | None:
    """Return the function from a conversation to token ids of a tokenizer of Hugging Face; None without a template."""
    if tokenizer is None or not getattr(tokenizer, "chat_template", None):
        return None

    def encode(messages: Sequence[Mapping[str, str]]) -> list[int]:
        options = {"tokenize": True, "add_generation_prompt": True, "return_dict": False}
        return [int(token) for token in tokenizer.apply_chat_template(list(messages), **options)]

    return encode


def read_sequences(
    source: str | Path, *, contract: Contract | None = None, slice: str = ALL, most: int = 64
) -> tuple[TokenSequence, ...]:
    """Sequences of one slice of a file or a program, from all over it and of many prompts; all of a capture.

    JSON lines have `token_ids` and, where known, `prompt_ids`, `messages`, and `attributes` or columns of them; what
    else `load_recording` reads is a recording with token ids. A program is `FILE.py:NAME`, given the slice.
    """
    if contract is not None and slice != ALL and slice not in contract.slices:
        known = ", ".join((ALL, *contract.slices))
        raise ValueError(f"--slice: {slice!r} is not a slice of the contract; there are {known}")
    if ".py:" in str(source):
        return _found(_program_rows(str(source), slice), source, contract, slice, most)
    path = Path(source)
    if is_capture(path):
        return tuple(
            TokenSequence(sequence.token_ids, sequence.prompt_tokens, {}, sequence.messages)
            for sequence in read_capture(path).sequences
        )
    if _is_spool(path):
        rows = _spooled(path)
    elif _has_tokens(path):
        rows = (_row(f"{path}:{number}", row) for number, row in records(path))
    else:
        rows = _recorded(path)
    return _found(rows, source, contract, slice, most)


def _found(
    rows: Iterable[TokenSequence], source: str | Path, contract: Contract | None, slice: str, most: int
) -> tuple[TokenSequence, ...]:
    wanted = (row for row in rows if contract is None or slice == ALL or slice in contract.slices_of(row.attributes))
    found = _spread(list(islice(wanted, _MAX_CONSIDERED)), most)
    if not found:
        raise ValueError(f"{source}: has no sequence of {slice}; sequences need the attributes that decide the slice")
    return found


def _spread(rows: Sequence[TokenSequence], most: int) -> tuple[TokenSequence, ...]:
    """At most so many of the sequences, in their order, from all over the file: of as many prompts as there are."""
    prompts: dict[Any, list[int]] = {}
    for place, row in enumerate(rows):
        prompts.setdefault(row.token_ids[: row.prompt_tokens] or place, []).append(place)
    turns = [turn for turn in zip_longest(*prompts.values()) if turn]
    taken: list[int] = []
    for turn in turns:
        places, left = [place for place in turn if place is not None], most - len(taken)
        step = max(len(places) / left, 1.0) if left else 0.0
        taken += [places[int(number * step)] for number in range(min(left, len(places)))]
    return tuple(rows[place] for place in sorted(taken))


def _program_rows(target: str, slice: str) -> Iterator[TokenSequence]:
    give = python_name(target, _PROGRAM_DESCRIPTION)
    if not callable(give):
        raise ValueError(f"{target}: is {type(give).__name__}, not {_PROGRAM_DESCRIPTION}")  # noqa: TRY004 - a wrong argument
    for number, row in enumerate(give(slice), 1):
        yield _row(f"{target}: sequence {number}", row)


def _has_tokens(path: Path) -> bool:
    """Return whether a file holds JSON lines and the first one has tokens."""
    lines = path.name.removesuffix(".gz").endswith(".jsonl") and path.is_file()
    first = next((row for _, row in records(path)), None) if lines else None
    return first is not None and any(first.get(name) is not None for name in (*PROMPT_IDS, *_TOKEN_COLUMNS))


def _row(where: str, row: Any) -> TokenSequence:
    if not isinstance(row, dict):
        raise ValueError(f"{where}: is no object; write {{'prompt_ids': [...], 'token_ids': [...]}}")  # noqa: TRY004 - a wrong file
    prompt = _ids(row, PROMPT_IDS, where, needed=False)
    completion = _ids(row, _TOKEN_COLUMNS, where, needed=True)
    ids = (*prompt, *completion)
    if len(ids) < 2:
        raise ValueError(f"{where}: token_ids: {len(ids)} tokens; a sequence needs two")
    problems = Problems()
    attributes = scalars_of(row_attributes(row, {}, where, problems))
    messages = row.get("messages") or ()
    if problems.all():
        raise ValueError(*problems.all())
    if not isinstance(messages, Sequence) or not all(isinstance(message, Mapping) for message in messages):
        raise ValueError(f"{where}: messages: write a list of {{'role': ..., 'content': ...}}")
    masks = [mask for name in ALIASES[MASK] if isinstance(mask := row.get(name), list) and len(mask) == len(completion)]
    counted = sum(map(all, zip(*masks, strict=True))) if masks else len(completion)
    return TokenSequence(ids, len(prompt), {LENGTH: counted, **attributes}, tuple(messages))


def _ids(row: Mapping[str, Any], names: Sequence[str], where: str, *, needed: bool) -> list[int]:
    name = next((name for name in names if row.get(name) is not None), None)
    if name is None:
        if needed:
            raise ValueError(f"{where}: has no {names[0]}; write the tokens' ids as a list")
        return []
    ids = row[name]
    if not isinstance(ids, list) or not all(
        isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids
    ):
        raise ValueError(f"{where}: {name}: is no list of whole numbers from 0")
    return ids


def _is_spool(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as opened:
        return opened.read(16) == b"SQLite format 3\0"


def _spooled(path: Path) -> Iterator[TokenSequence]:
    try:
        samples = waiting(path, _MAX_SPOOLED_REQUESTS)
    except SpoolError as error:
        raise ValueError(str(error)) from None
    if not samples:
        said = "no request waits in it: `kc-otel rescore` removes what it has scored; give a recording"
        raise ValueError(f"{path}: {said}")
    for sample in samples:
        ids = (*sample.prompt_ids.tolist(), *sample.token_ids.tolist())
        if len(ids) > 1:
            yield TokenSequence(ids, len(sample.prompt_ids), sample.attributes)


def _recorded(path: Path) -> Iterator[TokenSequence]:
    recording = load_recording(path)
    if recording.token_ids is None:
        raise ValueError(f"{path}: has no token_ids; record them, or give JSON lines with prompt_ids and token_ids")
    for start, length, attributes in zip(recording.starts, recording.lengths, recording.attributes, strict=True):
        if length > 1:
            yield TokenSequence(tuple(recording.token_ids[start : start + length].tolist()), 0, attributes)
