"""One request on a connection of HTTP/2: what may still be sent of it, and its answer."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol

__all__ = ["Answers", "Request", "Stream"]


class Request(Protocol):
    """Whoever takes what a client sends on a stream."""

    def begin(self) -> None:
        """All that came with the headers has been taken: work may begin."""

    def room(self, most: int) -> memoryview | None:
        """Where the next bytes may be written, at most so many; `filled` says how many were. None to `take` them."""

    def filled(self, count: int) -> None:
        """Bytes that have come into the room."""

    def take(self, data: memoryview) -> None:
        """Bytes that have come; they are there until this returns."""

    def end(self) -> None:
        """There are no more."""

    def lose(self) -> None:
        """The client does not wait for an answer any more, or is gone."""


class Answers(Protocol):
    """The streams of a connection, as one of them sees them."""

    peer: Hashable

    def answer(self, stream: Stream, head: bytes, content: bytes, trailers: bytes) -> None:
        """Send an answer, as far as the client takes it at the moment."""

    def grant(self, stream: Stream, more: int) -> None:
        """Let the client send more."""


class Stream:
    """A stream that is open.

    Args:
        streams: Of which it is one.
        number: Its own there.
        window: Bytes that the client may send.
        peer_window: Bytes that the client takes.
        length: Bytes that it says it will send; None if it does not say.

    Attributes:
        open: Whether it may still be answered.
        request: Takes what is sent; None until the headers are understood.
        ended: Whether the client has sent all of it.
        unsent: What of the answer's content is not sent yet.
        trailers: What is sent at the answer's end.
        stalled: When the answer could not be sent, by the loop's clock.
    """

    __slots__ = (
        "_streams", "ended", "length", "number", "open", "peer_window", "request", "stalled", "trailers", "unsent",
        "window",
    )  # fmt: skip

    def __init__(self, streams: Answers, number: int, window: int, peer_window: int, length: int | None) -> None:
        self._streams, self.number = streams, number
        self.window, self.peer_window, self.length = window, peer_window, length
        self.request: Request | None = None
        self.open, self.ended = True, False
        self.unsent = self.trailers = b""
        self.stalled = 0.0

    @property
    def peer(self) -> Hashable:
        """Who sends."""
        return self._streams.peer

    def answer(self, head: bytes, content: bytes = b"", trailers: bytes = b"") -> None:
        """End it, with header blocks and, if there are trailers, content between them."""
        self._streams.answer(self, head, content, trailers)

    def grant(self, more: int) -> None:
        """Let the client send more bytes."""
        self._streams.grant(self, more)
