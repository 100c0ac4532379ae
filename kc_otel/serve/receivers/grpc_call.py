"""One call of a unary method of gRPC: its message comes in, and its answer goes out.

What is on the wire is gRPC's PROTOCOL-HTTP2: five bytes, whether the message is compressed and how long it is, and the
message; the answer's status in trailers.
"""

from __future__ import annotations

import asyncio
import base64
import re
from collections.abc import Callable, Iterable
from typing import Any, Final

import numpy as np

from kc_otel.judge.otlp.request_errors import BadRequestError, ReceiveError
from kc_otel.judge.otlp.request_limits import Limits
from kc_otel.judge.otlp.signals import Signal
from kc_otel.serve.receivers.http2_headers import literal, status
from kc_otel.serve.receivers.http2_stream import Stream
from kc_otel.serve.receivers.http2_streams import UNASKED

__all__ = ["Call", "CompressionError", "seconds_of"]

_PREFIX: Final = 5
_LONGEST: Final = 2**31 - 2**20
"""Bytes of a message whose window is none that there may be; protobuf has none that is longer either."""
_TIMEOUT: Final = re.compile(rb"([0-9]{1,8})([HMSmun])")
_UNITS: Final = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
_MOST_SAID: Final = 1024
_CONTENT_TYPE: Final = literal(b"content-type", b"application/grpc")
_ACCEPTED: Final = literal(b"grpc-accept-encoding", b"identity,deflate,gzip")
_HEAD: Final = status(200) + _CONTENT_TYPE
_DONE: Final = literal(b"grpc-status", b"0")
_UNSAFE: Final = re.compile(rb"[^\x20-\x24\x26-\x7e]")


class CompressionError(ReceiveError):
    """A message is compressed, and nobody said how."""

    code = 13


class Call:
    """A call that has begun.

    Args:
        stream: On which it comes.
        signal: What is called; None for what is not known.
        encoding: How messages of it are compressed.
        timeout: Seconds that its sender gives it; None for as many as it takes.
        authorization: Who it says it is.
        run: Makes the answer, given the call.
        limits: How long a message may be.
    """

    def __init__(
        self,
        stream: Stream,
        signal: Signal | None,
        encoding: str,
        timeout: float | None,
        authorization: str,
        run: Callable[[Call], None],
        limits: Limits,
    ) -> None:
        self.stream, self.signal, self.timeout, self.authorization = stream, signal, timeout, authorization
        self.encoding = ""
        """How its message is compressed, once that is there."""
        self.task: asyncio.Task[None] | None = None
        self._encoding, self._run, self._limits = encoding, run, limits
        self._prefix = b""
        self._memory: memoryview | None = None
        self._size = self._filled = 0
        self._body: bytes | None = None
        self._announced = self._ended = self._failed = False
        self._error: ReceiveError | None = None
        self._more: asyncio.Future[None] | None = None

    @property
    def is_there(self) -> bool:
        """Whether nothing of it has to come any more."""
        return self._failed or (self._ended and self._body is not None)

    async def size(self) -> int:
        """Bytes that its message has, as it was sent, once that is known.

        Raises:
            ReceiveError: If it sends none, or one that is not taken.
        """
        while not (self._announced or self._failed):
            await self._something()
        if self._failed:
            raise self._why()
        return self._size

    async def message(self) -> bytes:
        """Its message, as it was sent: from now on its sender may send all of it.

        Raises:
            ReceiveError: If it sends none, or one that is not taken.
        """
        if self._body is None and not self._failed:
            if self._memory is not None and len(self._memory) < self._size:
                begun, self._memory = self._memory, _memory(self._size)
                self._memory[: self._filled] = begun[: self._filled]
            self.stream.grant(_PREFIX + self._size - UNASKED)
        try:
            while not self.is_there:
                await self._something()
        finally:
            self._memory = None
        if self._failed:
            raise self._why()
        body, self._body = self._body, None
        assert body is not None
        return body

    def answer(self, message: bytes) -> None:
        """Success."""
        self.stream.answer(_HEAD, b"\0" + len(message).to_bytes(4, "big") + message, _DONE)

    def refuse(self, code: int, message: str, more: Iterable[tuple[str, bytes]] = ()) -> None:
        """Failure: a status, and why."""
        said = [_HEAD, _ACCEPTED, literal(b"grpc-status", str(code).encode()), literal(b"grpc-message", _said(message))]
        said += [literal(name.encode(), base64.b64encode(value).rstrip(b"=")) for name, value in more]
        self.stream.answer(b"".join(said))

    def fail(self, error: ReceiveError) -> None:
        """It is refused for what it is."""
        self._failed, self._memory, self._error = True, None, error
        self._wake()

    def _why(self) -> ReceiveError:
        """What it is refused for; it has it no longer: each would be in the other, and would stay."""
        error, self._error = self._error, None
        assert error is not None
        return error

    # What its stream brings.

    def begin(self) -> None:
        """All that came with the headers has been taken."""
        self._run(self)

    def room(self, most: int) -> memoryview | None:
        """Where the next bytes of the message go."""
        if self._memory is None or most > self._size - self._filled:
            return None
        return self._memory[self._filled : self._filled + most]

    def filled(self, count: int) -> None:
        """They have come."""
        self._filled += count
        if self._filled == self._size and self._memory is not None:
            self._body, self._memory = self._memory.tobytes(), None

    def take(self, data: memoryview) -> None:
        """Bytes of the prefix, or of the message."""
        if self._failed:
            return
        if self._memory is None and self._body is None:
            missing = _PREFIX - len(self._prefix)
            self._prefix += data[:missing]
            data = data[missing:]
            if len(self._prefix) < _PREFIX:
                return
            self._announce()
            if self._failed:
                return
            if len(data) == self._size:
                self._body = data.tobytes()
                return
            self._memory = _memory(min(self._size, UNASKED))
        if not len(data):
            return
        if self._body is not None or len(data) > self._size - self._filled:
            self.fail(BadRequestError("the call has more than one message"))
            return
        assert self._memory is not None
        self._memory[self._filled : self._filled + len(data)] = data
        self.filled(len(data))

    def end(self) -> None:
        """Nothing more comes."""
        self._ended = True
        if self._failed:
            return
        if self._body is None:
            late = "ended amid its message" if self._prefix else "ended without a message"
            self.fail(BadRequestError(f"the call {late}"))
        else:
            self._wake()

    def lose(self) -> None:
        """Its sender does not wait any more."""
        if self.task is not None:
            self.task.cancel()

    def arrived(self) -> int:
        """Bytes of its message that have come."""
        return self._filled

    async def _something(self) -> None:
        """Wait until something has come that matters."""
        self._more = asyncio.get_running_loop().create_future()
        try:
            await self._more
        finally:
            self._more = None

    def _wake(self) -> None:
        if self._more is not None and not self._more.done():
            self._more.set_result(None)

    def _announce(self) -> None:
        self._announced = True
        self._size = int.from_bytes(self._prefix[1:], "big")
        if self._prefix[0] > 1:
            self.fail(CompressionError("a message is compressed, with 1 before it, or is not, with 0"))
        elif self._prefix[0] and not self._encoding:
            self.fail(CompressionError("the message is compressed, and grpc-encoding does not say how"))
        elif self._size > min(self._limits.max_bytes, _LONGEST):
            self.fail(self._limits.too_large())
        elif self._prefix[0]:
            self.encoding = self._encoding
        self._wake()


def seconds_of(timeout: bytes) -> float:
    """What `grpc-timeout` says.

    Raises:
        BadRequestError: If it says nothing that is a time.
    """
    found = _TIMEOUT.fullmatch(timeout)
    if found is None:
        raise BadRequestError("grpc-timeout is a number and one of H, M, S, m, u, n")
    return int(found[1]) * _UNITS[found[2]]


def _said(message: str) -> bytes:
    """What is not printed in ASCII by its bytes in hexadecimal."""
    return _UNSAFE.sub(lambda one: b"%%%02X" % ord(one[0]), message[:_MOST_SAID].encode(errors="replace"))


def _memory(size: int) -> memoryview:
    # Nothing writes to it before the bytes come. It may have been another's, though, and then it takes what it is.
    memory: Any = np.empty(size, np.uint8)
    return memoryview(memory)
