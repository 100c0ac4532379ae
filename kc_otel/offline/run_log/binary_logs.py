"""Scalars in TensorBoard's event files and in W&B's offline files, without either package.

TensorBoard: TFRecord frames (length, checksum, data, checksum) of `Event` (tensorflow/core/util/event.proto). W&B: the
framing of LevelDB's log in blocks of 32 KiB, with records of `Record` (wandb/proto/wandb_internal.proto). Both are
append-only, and a run that was killed leaves half a record at the end, which is left out.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final

from kc_otel.contract.json_text import read_json_text

__all__ = ["WANDB_MAGIC", "event_scalars", "wandb_scalars"]

WANDB_MAGIC: Final = b":W&B\xe1\xbe"
_BLOCK: Final = 32768
_HEADER: Final = 7
_FULL, _FIRST, _LAST = 1, 2, 4

Scalar = tuple[int, str, float]
"""Step, name, value."""


def event_scalars(data: bytes) -> Iterator[Scalar]:
    """Scalars of an event file, as `add_scalar` and `tf.summary.scalar` write them.

    Raises:
        ValueError: If a frame is no event.
    """
    at = 0
    while at + 12 <= len(data):
        (size,) = struct.unpack_from("<Q", data, at)
        begin, at = at + 12, at + 16 + size
        if at > len(data):
            return
        event = dict(_fields(data[begin : begin + size]))
        if isinstance(summary := event.get(5), bytes):
            step = _signed(event.get(2, 0))
            for number, value in _fields(summary):
                if number == 1 and isinstance(value, bytes) and (found := _summary_value(value)) is not None:
                    yield step, *found


def wandb_scalars(data: bytes) -> Iterator[Scalar]:
    """Scalars of `run-*.wandb`: the history, with W&B's own step.

    Raises:
        ValueError: If a record is none of W&B's.
    """
    for record in _leveldb_records(data):
        for number, history in _fields(record):
            if number == 2 and isinstance(history, bytes):
                yield from _history(history)


def _history(history: bytes) -> Iterator[Scalar]:
    step, found = None, []
    for number, value in _fields(history):
        if number == 2 and isinstance(value, bytes):
            step = _signed(dict(_fields(value)).get(1, 0))
        elif number == 1 and isinstance(value, bytes):
            names, text = [], b""
            for each, content in _fields(value):
                if each in {1, 2} and isinstance(content, bytes):
                    names.append(content.decode("utf-8", "replace"))
                elif each == 16 and isinstance(content, bytes):
                    text = content
            if (number_or_none := _number(text)) is not None:
                found.append(("/".join(filter(None, names)), number_or_none))
    own = {name: value for name, value in found if name == "_step"}
    at = step if step is not None else int(own.get("_step", 0))
    yield from ((at, name, value) for name, value in found if not name.startswith("_"))


def _number(text: bytes) -> float | None:
    """A JSON number; W&B writes "NaN" and "Infinity" as texts."""
    try:
        value = read_json_text(text)
        return None if isinstance(value, bool | dict | list) or value is None else float(value)
    except ValueError:
        return None


def _leveldb_records(data: bytes) -> Iterator[bytes]:
    at, parts = _HEADER, b""
    while at + _HEADER <= len(data):
        left = _BLOCK - at % _BLOCK
        if left < _HEADER:
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        begin, at = at + _HEADER, at + _HEADER + size
        if at > len(data) or kind == 0:
            return
        piece = data[begin:at]
        parts = piece if kind in {_FULL, _FIRST} else parts + piece
        if kind in {_FULL, _LAST}:
            yield parts


def _summary_value(data: bytes) -> tuple[str, float] | None:
    tag, found = "", None
    for number, value in _fields(data):
        if number == 1 and isinstance(value, bytes):
            tag = value.decode("utf-8", "replace")
        elif number == 2 and isinstance(value, float):
            found = value
        elif number == 8 and isinstance(value, bytes):
            found = _scalar_tensor(value)
    return (tag, found) if tag and found is not None else None


def _scalar_tensor(data: bytes) -> float | None:
    """A float32 (1) or float64 (2) TensorProto of one element."""
    fields = dict(_fields(data))
    if isinstance(content := fields.get(4), bytes) and len(content) in {4, 8}:
        return float(struct.unpack("<f" if len(content) == 4 else "<d", content)[0])
    for number, form in ((5, "<f"), (6, "<d")):
        value = fields.get(number)
        if isinstance(value, float):
            return value
        if isinstance(value, bytes) and len(value) == struct.calcsize(form):
            return float(struct.unpack(form, value)[0])
    return None


def _fields(data: bytes) -> Iterator[tuple[int, bytes | int | float]]:
    """Numbers and values of a message's fields; a fixed 32-bit value as a float, and one of 64 bits as a double.

    Raises:
        ValueError: If the bytes are no message.
    """
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, kind = key >> 3, key & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield number, value
            continue
        size = {1: 8, 5: 4}.get(kind)
        if kind == 2:
            size, at = _varint(data, at)
        if size is None or at + size > len(data):
            raise ValueError("a record is cut or of another format")
        piece, at = data[at : at + size], at + size
        yield number, piece if kind == 2 else struct.unpack("<d" if size == 8 else "<f", piece)[0]


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data) and shift < 70:
        byte = data[at]
        value, at, shift = value | (byte & 0x7F) << shift, at + 1, shift + 7
        if byte < 0x80:
            return value, at
    raise ValueError("a record is cut or of another format")


def _signed(value: bytes | float) -> int:
    number = value if isinstance(value, int) else 0
    return number - (1 << 64) if number >= 1 << 63 else number
