"""Clients in any order of doing and leaving undone: whatever they do, in the end nothing is held for them."""

from __future__ import annotations

import asyncio
import gzip
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kc_otel.judge.otlp import ExportResult, Limits, RequestCounts
from kc_otel.serve.access.senders import Senders
from kc_otel.serve.receivers.fair_turns import FairTurns
from kc_otel.serve.receivers.grpc_server import _Receiver
from kc_otel.serve.receivers.http2_frames import frame
from kc_otel.serve.receivers.reading import Room
from tests.serve.receivers.http2_peer import HELLO, Peer, data, head, headers, message, on_a_loop

TRACES = b"/opentelemetry.proto.collector.trace.v1.TraceService/Export"
LONG = b"\xfa\x01\x80\x80\x18" + bytes(0x60000)
"""A message of 384 KiB, all of it in a field that nobody knows."""
BODIES = {
    "empty": (0, b""),
    "short": (0, b"\xfa\x01\x64" + bytes(100)),
    "no message": (0, b"\xff" * 50),
    "long": (0, LONG),
    "packed": (1, gzip.compress(LONG)),
    "not packed": (1, b"x" * 50),
}


class OneByOne(FairTurns):
    """As where each request takes longer than a tenth of a second."""

    def _room(self) -> float:
        return 0.0


class Slow:
    """Takes everything, after a while."""

    async def traces(self, _: Any) -> ExportResult:
        await asyncio.sleep(0.002)
        return ExportResult()


class Client:
    """One of them, with its calls: what each has still to send, and which send as soon as they may."""

    def __init__(self, taking: _Receiver, *, takes: bool) -> None:
        self.peer = Peer(taking.accept, greeting=HELLO if takes else HELLO[:24] + frame(4, 0, 0, b"\0\4\0\0\0\0"))
        self.left: dict[int, bytes] = {}
        self.willing: set[int] = set()
        self.number = -1

    def begin(self, body: str, timeout: bytes, willing: bool) -> None:
        packed, content = BODIES[body]
        self.number += 2
        more = [(b"grpc-encoding", b"gzip")] * packed + [(b"grpc-timeout", timeout)] * bool(timeout)
        self.peer.feed(headers(self.number, head(*more, path=TRACES)))
        self.left[self.number] = bytes([packed]) + message(content)[1:]
        if willing:
            self.willing.add(self.number)

    def go_on(self) -> None:
        """Send what may be sent of calls that do."""
        if self.peer.transport.closing:
            return
        for number in self.willing & self.left.keys():
            self._send(number, 400_000)

    def send(self, most: int) -> None:
        """Send the next of the oldest call."""
        if self.left:
            self._send(next(iter(self.left)), most)

    def _send(self, number: int, most: int) -> None:
        window = self.open[number].window if number in self.open else 0
        content = self.left[number][: min(most, window)]
        self.left[number] = left = self.left[number][len(content) :]
        if content or not left:
            self.peer.feed(data(number, content, ends=not left))
        if not left or number not in self.open:
            del self.left[number]

    def reset(self) -> None:
        if self.left:
            number = next(iter(self.left))
            del self.left[number]
            self.peer.feed(frame(3, 0, number, bytes(4)))

    def leave(self) -> None:
        self.peer.transport.close()

    @property
    def open(self) -> dict[int, Any]:
        return self.peer.connection._streams._open


WHO = st.integers(0, 2)
ACTIONS = st.one_of(
    st.builds(
        lambda *of: ("begin", *of), WHO, st.sampled_from(sorted(BODIES)), st.sampled_from([b"", b"", b"5m"]),
        st.sampled_from([True, True, True, False]),
    ),
    st.tuples(st.just("begin"), WHO, st.just("long"), st.just(b""), st.booleans()),
    st.tuples(st.just("send"), WHO, st.sampled_from([3, 1000, 200_000, 400_000])),
    st.tuples(st.just("reset"), WHO),
    st.tuples(st.sampled_from(["reset", "reset", "leave"]), WHO),
    st.tuples(st.just("wait"), st.sampled_from([0, 0, 1, 5, 20])),
    st.tuples(st.just("wait"), st.sampled_from([0, 1])),
)  # fmt: skip


@pytest.mark.slow
@settings(max_examples=60)
@given(st.lists(ACTIONS, min_size=15, max_size=50), st.booleans())
def test_in_the_end_nothing_is_held_for_anybody(actions, takes):
    """No place, memory, turn or task; each call was answered, unless its client took it back or left."""

    async def scenario():
        turns, room = OneByOne(most=500_000), Room(most=500_000, patience=0.05)
        limits = Limits(max_bytes=500_000, max_concurrent=3, read_timeout=0.1, patience=0.01)
        taking = _Receiver(Slow(), limits, RequestCounts(), Senders(), turns, room)  # type: ignore[arg-type]
        clients = [Client(taking, takes=takes) for _ in range(3)]

        async def go_on(seconds: float) -> None:
            for one in clients:
                one.go_on()
            await asyncio.sleep(seconds)

        for action, *of in actions:
            if action == "wait":
                await go_on(of[0] / 1000)
            elif not clients[of[0]].peer.transport.closing:
                getattr(clients[of[0]], action)(*of[1:])
        end = asyncio.get_running_loop().time() + 5
        while taking._running and asyncio.get_running_loop().time() < end:
            await go_on(0.003)
        held = taking._running, taking._places._held, room._held, room._waiting, room.reading
        assert [len(one) for one in held] == [0] * 5
        assert (turns.waiting, turns._taken, turns._places._value) == (0, 0, 2)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        for one in clients:
            stalled = one.peer.connection._streams._stalled
            assert one.open.keys() == stalled.keys()
            assert not (takes and stalled)
            one.peer.transport.close()

    on_a_loop(scenario)
