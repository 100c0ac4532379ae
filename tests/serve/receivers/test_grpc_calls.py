"""gRPC on the wire: what a call may be, and how each that is not taken is told so. Byte by byte, without a library."""

from __future__ import annotations

import asyncio
import base64
import gc
import gzip
import socket
import tracemalloc
import weakref
import zlib
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes

import grpc
import pytest
from google.rpc.status_pb2 import Status
from hypothesis import given
from hypothesis import strategies as st

from kc_otel.judge.otlp import ExportResult, Limits, RequestCounts, ThrottledError
from kc_otel.judge.otlp.request_errors import BadRequestError
from kc_otel.serve.access.senders import Senders
from kc_otel.serve.receivers.fair_turns import FairTurns
from kc_otel.serve.receivers.grpc_call import _said, seconds_of
from kc_otel.serve.receivers.grpc_server import _Receiver, start_grpc
from kc_otel.serve.receivers.http2_frames import frame
from kc_otel.serve.receivers.reading import Room
from tests.serve.receivers.http2_peer import HELLO, Peer, data, head, headers, message, on_a_loop


def receiver(sink: Any, counts: RequestCounts, limits: Limits | None = None, room: Room | None = None) -> _Receiver:
    return _Receiver(sink, limits or Limits(), counts, Senders(), FairTurns(), room or Room())


def called(sink: Any, sent: bytes, limits: Limits | None = None, size: int = 1 << 20) -> Any:
    """Answer of the first stream, and what was counted."""

    async def scenario():
        counts = RequestCounts()
        peer = Peer(receiver(sink, counts, limits).accept)
        peer.feed(sent, size)
        for _ in range(20):
            await asyncio.sleep(0.001)
        return peer.answered().get(1), peer.content(1), counts.snapshot(), peer.resets().get(1), peer.ended()

    return on_a_loop(scenario)


def test_a_call_is_answered(sink: Any, request_of_metrics: Any) -> None:
    """With the response message, in status 0."""
    sink.answer = ExportResult(3, "why")
    body = request_of_metrics.SerializeToString()
    found, content, counts, reset, ended = called(sink, headers(1) + data(1, message(body), ends=True))
    assert found == {":status": "200", "content-type": "application/grpc", "grpc-status": "0"}
    assert content[0] == 0
    assert b"why" in content[5:]
    assert int.from_bytes(content[1:5], "big") == len(content) - 5
    assert (counts, reset, ended) == ({("grpc", "partial"): 1}, None, None)
    assert sink.requests == [("metrics", request_of_metrics)]


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("encoding", "packed"), [("gzip", gzip.compress), ("deflate", zlib.compress), ("identity", None), ("", None)]
)
def test_messages_are_inflated(sink: Any, request_of_metrics: Any, encoding: str, packed: Any, size: int) -> None:
    """As their headers say; also one that is not compressed, of a call that could."""
    body = request_of_metrics.SerializeToString()
    block = head((b"grpc-encoding", encoding.encode())) if encoding else head()
    sent = message(body) if packed is None else b"\1" + message(packed(body))[1:]
    for one in (sent, message(body)):
        found, *_ = called(sink, headers(1, block) + data(1, one, ends=True), size=size)
        assert found["grpc-status"] == "0"
    assert [request for _, request in sink.requests] == [request_of_metrics] * 2


LIMIT = Limits(max_bytes=1000)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sent", "code", "outcome", "words"),
    [
        (headers(1, head(path=b"/a/Export"), ends=True), 12, "not_found", "no such method"),
        (headers(1, head((b"grpc-encoding", b"br")), ends=True), 12, "unsupported_media", "gzip"),
        (headers(1, head((b"grpc-timeout", b"1s")), ends=True), 3, "bad_request", "grpc-timeout"),
        (headers(1, ends=True), 3, "bad_request", "without a message"),
        (headers(1) + data(1, b"\0\0", ends=True), 3, "bad_request", "amid"),
        (headers(1) + data(1, message(b"12345")[:-1], ends=True), 3, "bad_request", "amid"),
        (headers(1) + data(1, message(b"") * 2, ends=True), 3, "bad_request", "more than one"),
        (headers(1) + data(1, message(b"\n\0")) + data(1, b"x", ends=True), 3, "bad_request", "more than one"),
        (headers(1) + data(1, message(b"\xff"), ends=True), 3, "bad_request", ""),
        (headers(1) + data(1, b"\1\0\0\0\1x", ends=True), 13, "bad_request", "grpc-encoding"),
        (headers(1) + data(1, b"\2\0\0\0\1x", ends=True), 13, "bad_request", "compressed"),
        (headers(1) + data(1, message(bytes(1001)), ends=True), 8, "too_large", "1000 bytes"),
        (headers(1) + data(1, b"\0\xff\xff\xff\xff"), 8, "too_large", "1000 bytes"),
        (headers(1, head((b"grpc-encoding", b"gzip")))
         + data(1, b"\1" + message(gzip.compress(bytes(10**6)))[1:], ends=True), 8, "too_large", "1000 bytes"),
        (headers(1, head((b"grpc-encoding", b"gzip")))
         + data(1, b"\1\0\0\0\3abc", ends=True), 3, "bad_request", "gzip"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("size", [1, 1 << 20])
def test_what_is_not_taken_is_told_why(sink: Any, sent: bytes, code: int, outcome: str, words: str, size: int) -> None:
    """Each with gRPC's status for it, in words that are printable, and counted."""
    found, content, counts, reset, ended = called(sink, sent, LIMIT, size)
    assert (found[":status"], found["grpc-status"]) == ("200", str(code))
    assert words in unquote_to_bytes(found["grpc-message"]).decode()
    assert found["grpc-accept-encoding"] == "identity,deflate,gzip"
    assert (content, counts, ended) == (b"", {("grpc", outcome): 1}, None)
    assert reset in {None, 0}
    assert not sink.requests


@pytest.mark.parametrize(
    ("block", "code"),
    [
        (head().replace(b"POST", b"BREW"), "405"),
        (head().replace(b"application/grpc", b"application/json"), "415"),
        (head().replace(b"application/grpc", b"application/grpx"), "415"),
        (head().replace(b"content-type", b"content-typo"), "415"),
    ],
)
def test_what_is_not_grpc_is_told_so_by_http(sink: Any, block: bytes, code: str) -> None:
    """A status of HTTP's, and no trailers."""
    found, _, _, reset, _ = called(sink, headers(1, block) + data(1, message(b"")))
    assert found == {":status": code}
    assert reset == 0


@pytest.mark.parametrize("media", [b"application/grpc+proto", b"application/grpc;charset=utf-8"])
def test_other_names_of_the_content_type_are_known(sink: Any, media: bytes) -> None:
    """Those that gRPC has for protobuf."""
    block = head().replace(bytes([16]) + b"application/grpc", bytes([len(media)]) + media)
    assert called(sink, headers(1, block) + data(1, message(b""), ends=True))[0]["grpc-status"] == "0"


def test_details_are_in_base64_without_padding(sink: Any) -> None:
    """As gRPC has headers whose names end in -bin."""
    sink.answer = ThrottledError("busy: 100%, naïve", 0.5)
    found, *_ = called(sink, headers(1) + data(1, message(b""), ends=True))
    assert "=" not in found["grpc-status-details-bin"]
    status = Status.FromString(base64.b64decode(found["grpc-status-details-bin"] + "=="))
    assert (status.code, status.message) == (14, "busy: 100%, naïve")
    assert found["grpc-message"] == "busy: 100%25, na%C3%AFve"


@given(st.text(max_size=2000))
def test_words_are_printable_and_come_back(words: str) -> None:
    """Whatever they are made of."""
    said = _said(words)
    assert all(0x20 <= byte <= 0x7E for byte in said)
    assert len(said) <= 13_000
    assert unquote_to_bytes(said) == words[:1024].encode(errors="replace")


@pytest.mark.parametrize(
    ("said", "seconds"),
    [(b"1H", 3600), (b"2M", 120), (b"99999999S", 99999999), (b"5m", 5e-3), (b"7u", 7e-6), (b"0n", 0)],
)
def test_times_have_units(said: bytes, seconds: float) -> None:
    """Of gRPC's."""
    assert seconds_of(said) == pytest.approx(seconds)


@pytest.mark.parametrize("said", [b"", b"1", b"S", b"-1S", b"1.5S", b"123456789S", b"1s", b"1 S", b"\xb2S"])
def test_what_is_no_time_is_refused(said: bytes) -> None:
    """Eight digits and a unit, nothing else."""
    with pytest.raises(BadRequestError):
        seconds_of(said)


def test_a_deadline_that_passes_ends_the_work() -> None:
    """DEADLINE_EXCEEDED, while it is read as well as while it is worked on."""

    class Slow:
        ended = False

        async def metrics(self, _: Any) -> ExportResult:
            try:
                await asyncio.sleep(5)
            finally:
                self.ended = True
            return ExportResult()

    block, slow = head((b"grpc-timeout", b"5m")), Slow()
    for sent in (headers(1, block), headers(1, block) + data(1, message(b""), ends=True)):
        found, _, counts, *_ = called(slow, sent)
        assert (found["grpc-status"], counts) == ("4", {("grpc", "too_slow"): 1})
    assert slow.ended


@pytest.mark.parametrize("how", ["reset", "hang up"])
def test_who_does_not_wait_is_not_worked_for(how: str) -> None:
    """What runs for it is cancelled, and counted as nobody being there."""

    async def scenario():
        begun, ended = asyncio.Event(), asyncio.Event()

        class Slow:
            async def metrics(self, _: Any) -> ExportResult:
                begun.set()
                try:
                    await asyncio.sleep(60)
                finally:
                    ended.set()
                return ExportResult()

        counts = RequestCounts()
        peer = Peer(receiver(Slow(), counts).accept)
        peer.feed(headers(1) + data(1, message(b""), ends=True))
        await begun.wait()
        if how == "reset":
            peer.feed(frame(3, 0, 1, b"\0\0\0\x08"))
        else:
            peer.transport.close()
        await asyncio.wait_for(ended.wait(), 5)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return counts.snapshot(), peer.answered()

    assert on_a_loop(scenario) == ({("grpc", "disconnected"): 1}, {})


def test_a_fault_of_ours_is_said_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    """INTERNAL, and the connection goes on."""

    class Broken(Senders):
        def known(self, _: str) -> Any:
            raise RuntimeError("ours")

    async def scenario():
        counts = RequestCounts()
        peer = Peer(_Receiver(None, Limits(), counts, Broken(), FairTurns(), Room()).accept)  # type: ignore[arg-type]
        peer.feed(headers(1) + data(1, message(b""), ends=True))
        await asyncio.sleep(0.01)
        return peer.answered()[1]["grpc-status"], counts.snapshot(), peer.ended()

    assert on_a_loop(scenario) == ("13", {("grpc", "internal_error"): 1}, None)
    assert "ours" in caplog.text


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def big(number: int, size: int, sent: int) -> bytes:
    """A call whose message is announced, and begun."""
    return headers(number) + data(number, b"\0" + size.to_bytes(4, "big") + bytes(sent - 5))


async def ticks(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.slow
def test_a_long_message_gets_its_window_when_there_is_memory(sink: Any) -> None:
    """Five of 15 MB arrive at a time, from whichever connections; the sixth is let send when one of them is there."""

    async def scenario():
        counts, room, size = RequestCounts(), Room(), 15 * 2**20
        taking = receiver(sink, counts, Limits(max_items=10**9), room)
        peers = [Peer(taking.accept) for _ in range(7)]
        for peer in peers:
            peer.feed(big(1, size, 200_000))
        await ticks()

        def granted():
            return [
                sum(one.window_increment for one in peer.frames() if one.type == 8 and one.stream_id) for peer in peers
            ]

        first = granted()
        peers[1].transport.close()
        await ticks()
        second = granted()
        left = size + 5 - 200_000
        while left:
            step = min(left, 2**20)
            peers[0].feed(data(1, bytes(step), ends=left == step))
            left -= step
        for _ in range(100):
            await asyncio.sleep(0.01)
        return first, second, granted(), room._held.total(), peers[0].answered()

    first, second, third, held, answered = on_a_loop(scenario)
    more = 15 * 2**20 + 5 - 256 * 1024
    assert first == [more] * 5 + [0] * 2
    assert second == [more] * 6 + [0]
    assert third == [more] * 7
    assert held == 75 * 2**20
    assert answered[1][":status"] == "200"


@pytest.mark.slow
def test_no_call_outlives_its_answer(sink: Any) -> None:
    """Not until the collector of cycles comes by, which is seldom: each would hold its message until then."""

    async def scenario():
        taking, made = receiver(sink, RequestCounts()), []

        def accept(stream: Any, found: Any) -> Any:
            call = taking.accept(stream, found)
            made.append(weakref.ref(call))
            return call

        peer = Peer(accept)
        for number in range(1, 17, 4):
            peer.feed(headers(number) + data(number, message(b"")[: 5 - number % 8], ends=True))
            peer.feed(headers(number + 2) + frame(3, 0, number + 2, bytes(4)))
        for _ in range(10):
            await asyncio.sleep(0.001)
        return [one() for one in made]

    gc.collect()
    gc.disable()
    try:
        assert on_a_loop(scenario) == [None] * 8
    finally:
        gc.enable()


def test_no_window_is_wider_than_there_may_be(sink: Any) -> None:
    """Whatever somebody allows: a message of three gigabytes is refused, and nobody's stream is broken."""
    limits = Limits(max_bytes=4 * 2**30)
    found, *_ = called(sink, headers(1) + data(1, b"\0" + (3 * 2**30).to_bytes(4, "big")), limits)
    assert found["grpc-status"] == "8"


@pytest.mark.slow
def test_one_connection_keeps_no_places_from_another(sink: Any) -> None:
    """It may have all of them, while nobody else needs one; and what has come as a whole needs none."""

    async def scenario():
        taking = receiver(sink, RequestCounts(), Limits(max_concurrent=8, patience=0.4))
        many, few, whole = Peer(taking.accept), Peer(taking.accept), Peer(taking.accept)
        for number in range(1, 21, 2):
            many.feed(big(number, 200_000, 1000))
        await ticks()
        few.feed(big(99, 200_000, 1000))
        await ticks()
        refused = len(many.answered()) + len(few.answered())
        await asyncio.sleep(0.2)
        for number in range(101, 113, 2):
            few.feed(big(number, 200_000, 1000))
            await ticks(10)
        whole.feed(headers(1) + data(1, message(b""), ends=True))
        await ticks(10)
        found = refused, len(many.answered()), len(few.answered()), whole.answered()[1]["grpc-status"]
        await taking.cancel()
        return found

    assert on_a_loop(scenario) == (3, 6, 3, "0")


def test_a_message_has_its_memory_when_there_is_room_for_it(sink: Any) -> None:
    """Not while it waits: what an allocator gives out may be what another has left, and be there to the last byte."""

    async def scenario():
        taking = receiver(sink, RequestCounts())
        tracemalloc.start()
        peers = [Peer(taking.accept) for _ in range(60)]
        for peer in peers:
            peer.feed(big(1, 15 * 2**20, 100_000))
        await ticks()
        taken, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return taken, taking._room._held.total()

    taken, held = on_a_loop(scenario)
    assert held == 5 * 15 * 2**20
    assert taken < held + 60 * 2**19


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's own count of memory")
def test_messages_that_are_announced_take_no_memory(sink: Any) -> None:
    """Fifteen megabytes each of a hundred senders, of which a first part has come."""

    async def scenario():
        taking = receiver(sink, RequestCounts())
        before = resident()
        peers = [Peer(taking.accept) for _ in range(100)]
        for peer in peers:
            peer.feed(big(1, 15 * 2**20, 100_000))
        await ticks()
        return resident() - before, sum("grpc-status" in peer.answered().get(1, {}) for peer in peers)

    grown, refused = on_a_loop(scenario)
    assert grown < 64 * 2**20
    assert refused == 0, "they wait before they are read"


@pytest.mark.slow
def test_who_waited_for_memory_in_vain_may_come_again(sink: Any) -> None:
    """It was not slow itself: UNAVAILABLE, with when to come back."""

    async def scenario():
        counts = RequestCounts()
        limits = Limits(max_bytes=40 * 2**20, read_timeout=0.2, patience=5.0)
        taking = receiver(sink, counts, limits, Room(patience=0.05))
        peers = [Peer(taking.accept) for _ in range(4)]
        for peer in peers:
            peer.feed(big(1, 39 * 2**20, 100_000))
        await asyncio.sleep(0.3)
        return [peer.answered()[1]["grpc-status"] for peer in peers], counts.snapshot()

    codes, counts = on_a_loop(scenario)
    assert codes == ["4", "4", "14", "14"]
    assert counts == {("grpc", "too_slow"): 2, ("grpc", "throttled"): 2}


def test_a_real_socket_is_told_and_closed(sink: Any) -> None:
    """HTTP/1.1 on this port; and a flood, whose reason arrives before the end does."""

    async def scenario():
        server = await start_grpc(sink, port=0)

        def spoken(sent: bytes) -> bytes:
            with socket.create_connection(("127.0.0.1", server.port), timeout=5) as one:
                one.sendall(sent)
                return b"".join(iter(lambda: one.recv(65536), b""))

        first = await asyncio.to_thread(spoken, b"GET / HTTP/1.1\r\n\r\n")
        second = await asyncio.to_thread(spoken, HELLO + frame(6, 0, 0, bytes(8)) * 1200)
        await server.stop()
        return first, second

    first, second = asyncio.run(scenario())
    assert first.startswith(b"HTTP/1.1 400")
    assert b"bring nothing" in second


@pytest.mark.slow
def test_a_thousand_silent_connections_leave_who_speaks_alone(sink: Any) -> None:
    """On every stage of silence; and the end does not wait for them."""

    async def scenario():
        server = await start_grpc(sink, port=0, limits=Limits(patience=0.1))
        stages = [b"", HELLO[:10], HELLO, HELLO + headers(1), HELLO + headers(1)[:20], HELLO + big(1, 10**6, 1000)]
        writers = []
        for number in range(1000):
            _, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(stages[number % len(stages)])
            writers.append(writer)
        await asyncio.sleep(0.2)
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{server.port}")
        answer = await channel.unary_unary("/opentelemetry.proto.collector.logs.v1.LogsService/Export")(b"", timeout=30)
        await channel.close()
        began = asyncio.get_running_loop().time()
        await server.stop(1)
        took = asyncio.get_running_loop().time() - began
        for writer in writers:
            writer.close()
        return answer, took

    answer, took = asyncio.run(scenario())
    assert answer == b""
    assert took < 10
