"""Real text that every Python carries, in slices: library code, reference prose, and tables.

Nothing is downloaded: the text is the standard library's own source, its documentation (docstrings and the topics
behind `help()`), and the tables in `unicodedata`, `encodings` and `html.entities`. Tokens are bytes, so uniform
guessing costs 8 bits a byte. Details differ a little from one Python release to the next; for one interpreter the
corpus is always the same.
"""

from __future__ import annotations

import ast
import importlib.util
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

SLICES = ("code", "prose", "tables")
VOCABULARY = 256
HELD_OUT_EVERY = 10
"""One block in so many is kept from training."""

_BLOCK = 4096
_MODULES = """
    argparse ast asyncio.base_events asyncio.streams asyncio.tasks bdb calendar cmd codecs configparser contextlib csv
    dataclasses datetime difflib enum fractions ftplib gettext gzip heapq html.parser http.client http.cookies inspect
    ipaddress json.decoder json.encoder locale logging mailbox mimetypes optparse os pathlib pdb queue random sched
    shelve shlex shutil smtplib socket statistics string subprocess tempfile textwrap threading tokenize traceback
    types typing unittest.case urllib.parse urllib.request uuid warnings weakref xml.dom.minidom zipfile
""".split()  # noqa: SIM905 - a list of names, one a line, would be longer than the rest of the file


@dataclass(frozen=True)
class Text:
    """One slice's bytes, int64 [n] each, cut into blocks so that what is held out comes from everywhere."""

    train: torch.Tensor
    held_out: torch.Tensor


@cache
def load_corpus() -> dict[str, Text]:
    """The slices' texts; read once in a process, which takes seconds.

    Raises:
        RuntimeError: If this Python was installed without its library's sources.
    """
    sources = list(_sources())
    slices = {"code": "\n\n".join(sources), "prose": "\n\n".join(_prose(sources)), "tables": "\n".join(_tables())}
    for name, text in slices.items():
        if len(text) < 50_000:
            raise RuntimeError(
                f"this Python carries only {len(text)} characters of {name}; run the demo with a full one"
            )
    return {name: _split(text.encode()) for name, text in slices.items()}


def _split(data: bytes) -> Text:
    blocks = torch.frombuffer(bytearray(data), dtype=torch.uint8).long().split(_BLOCK)
    held_out = blocks[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    train = [block for i, block in enumerate(blocks) if i % HELD_OUT_EVERY != HELD_OUT_EVERY - 1]
    return Text(torch.cat(train), torch.cat(held_out))


def _sources() -> Iterator[str]:
    for name in _MODULES:
        try:
            found = importlib.util.find_spec(name)
        except ModuleNotFoundError:  # a module that this release no longer has
            continue
        if found and found.origin and found.origin.endswith(".py"):
            yield Path(found.origin).read_text(encoding="utf-8")


def _prose(sources: list[str]) -> Iterator[str]:
    try:
        from pydoc_data.topics import topics  # noqa: PLC0415 - some distributions package it apart
    except ModuleNotFoundError:
        topics = {}
    yield from (topics[name] for name in sorted(topics))
    documented = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    for source in sources:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, documented) and (text := ast.get_docstring(node)) and len(text) > 80:
                yield text


def _tables() -> Iterator[str]:
    """The Unicode character table: what the character is, its code point, category, name."""
    for code in range(0x20, 0x3100):
        if name := unicodedata.name(chr(code), ""):
            yield f"{code:04X} | {chr(code)} | {unicodedata.category(chr(code))} | {name}"
