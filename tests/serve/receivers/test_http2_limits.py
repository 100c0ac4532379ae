"""What one client may cost: each kind of flood ends its own connection, and nothing that it does not read is kept."""

from __future__ import annotations

import asyncio
import tracemalloc

import hpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kc_otel.judge.otlp import Limits, RequestCounts
from kc_otel.serve.access.senders import Senders
from kc_otel.serve.receivers.fair_turns import FairTurns
from kc_otel.serve.receivers.grpc_server import _Receiver
from kc_otel.serve.receivers.http2_connection import Http2Connection
from kc_otel.serve.receivers.http2_frames import ErrorCode, frame, window_update
from kc_otel.serve.receivers.http2_headers import HeaderReader, literal
from kc_otel.serve.receivers.reading import Room
from tests.serve.receivers.http2_peer import HELLO, OK, Peer, data, head, headers, message, on_a_loop

CALM = ErrorCode.ENHANCE_YOUR_CALM
ALL = 60_000
"""Frames of a flood: nobody who behaves sends as many that bring nothing."""


def bomb() -> bytes:
    """A header of 4 kB in the table, and then a thousand times."""
    return b"\x40" + literal(b"a", b"b" * 4000)[1:] + b"\xbe" * 1000


@pytest.mark.parametrize(
    "flood",
    [
        frame(6, 0, 0, bytes(8)),
        frame(6, 1, 0, bytes(8)),
        frame(4, 0, 0, b""),
        frame(4, 0, 0, b"\0\4\0\0\0\0\0\4\0\0\xff\xff"),
        frame(4, 1, 0, b""),
        window_update(0, 1),
        window_update(1, 1),
        frame(2, 0, 1, bytes(5)),
        frame(0xEE, 0, 0, b""),
        frame(7, 0, 0, bytes(8)),
        frame(3, 0, 1, bytes(4)),
        data(1, b""),
        data(1, b"x"),
        frame(0, 8, 1, b"\0"),
        frame(0, 8, 1, b"\xff" + bytes(255)),
        frame(9, 0, 1, b""),
    ],
    ids=["ping", "pong", "settings", "windows", "settings-ack", "window", "window-1", "priority", "unknown", "goaway",
         "reset", "empty", "one-byte", "padded-empty", "only-padding", "continuation"],
)  # fmt: skip
def test_floods_of_what_brings_nothing_end_their_connection(flood):
    """A thousand of them or so: CVE-2019-9511 to -9518, CVE-2024-27316."""

    async def scenario():
        peer = Peer(answers=False)
        begun = frame(1, 0, 1, head()) if flood[3] == 9 else headers(1)
        peer.feed(begun + flood * ALL)
        return peer.ended(), peer.connection._reader.count, len(peer.transport.written), peer.said

    ended, count, written, said = on_a_loop(scenario)
    assert ended is not None
    assert ended[0] == CALM
    assert count < 1500
    assert written < 50_000
    assert ("lose", 1) in said or ("begin", 1) not in said


def test_requests_that_are_taken_back_at_once_cost_no_work_and_end_the_connection():
    """CVE-2023-44487: those of one read never begin; those that did are cancelled, and two hundred are enough."""

    async def scenario(together):
        peer = Peer(answers=False)
        for number in range(1, 20_001, 2):
            taken_back = frame(3, 0, number, bytes(4))
            peer.feed(headers(number, ends=True) + taken_back) if together else (
                peer.feed(headers(number, ends=True)), peer.feed(taken_back)
            )  # fmt: skip
        return peer.ended(), [one for one in peer.said if one[0] == "begin"], len(peer.requests)

    for together in (True, False):
        ended, begun, requests = on_a_loop(lambda together=together: scenario(together))
        assert ended is not None
        assert ended[0] == CALM
        assert requests < 300
        assert len(begun) == (0 if together else requests)


def test_who_makes_the_server_reset_streams_is_stopped_too():
    """CVE-2025-8671: requests that are wrong at once count as if they were taken back."""

    async def scenario():
        peer = Peer()
        for number in range(1, 20_001, 2):
            peer.feed(headers(number) + window_update(number, 0))
        return peer.ended(), len(peer.requests)

    ended, requests = on_a_loop(scenario)
    assert ended is not None
    assert ended[0] == CALM
    assert requests < 300


def later(block: bytes) -> bytes:
    """Headers on a stream whose answer has been given."""
    return headers(1, block)


LONG = b"\x82\x86\x84" + literal(b"a", b"") * 450


@pytest.mark.parametrize(
    ("begun", "flood", "most"),
    [
        pytest.param(b"", lambda number: headers(number, b"\x82\x86\x84", ends=True), 200, id="no gRPC"),
        pytest.param(b"", lambda number: headers(number, b"\x83" + LONG[1:]), 200, id="long headers"),
        pytest.param(headers(1, b"\x82\x86\x84"), lambda _: later(b"\x82"), 1000, id="late headers"),
        pytest.param(headers(1, b"\x82\x86\x84"), lambda _: later(LONG), 200, id="late long headers"),
    ],
)
def test_what_is_told_at_once_that_it_is_none_ends_its_connection_too(begun, flood, most):
    """It costs no work beyond its headers, but these are work: a read of them would hold up everybody for a second."""

    async def scenario():
        peer = Peer(_Receiver(None, Limits(), RequestCounts(), Senders(), FairTurns(), Room()).accept)  # type: ignore[arg-type]
        peer.feed(begun)
        peer.feed(b"".join(flood(number) for number in range(3, 20_001, 2)), 256 * 1024)
        return peer.ended(), peer.connection._reader.count

    ended, count = on_a_loop(scenario)
    assert ended is not None
    assert ended[0] == CALM
    assert count <= most + 5


@pytest.mark.slow
def test_headers_that_are_remembered_take_little_memory():
    """Blocks that only refer to tables are read once; a client chooses which, and how many hundred headers each has."""
    reader = HeaderReader()
    tracemalloc.start()
    for number in range(100):
        reader.read(b"\x82\x86\x84" + bytes([0x91 + number % 20]) * 250 + bytes([0x91 + number // 20]))
        reader.read(b"\x82\x86\x84" + bytes([0x91 + number % 20]) * 20 + bytes([0x91 + number // 20]))
    left, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert left < 50_000


@pytest.mark.slow
def test_who_is_answered_may_go_on_for_ever():
    """Thousands of requests in small frames, with pings and windows, as clients send them, are no flood."""

    async def scenario():
        peer = Peer()
        for number in range(1, 20_001, 2):
            usual = data(number, b"\0\0\0\0\5") + data(number, b"12345") + data(number, b"", ends=True)
            peer.feed(headers(number) + usual + frame(6, 0, 0, bytes(8)) + window_update(0, 5))
        return peer.ended(), len(peer.said)

    assert on_a_loop(scenario) == (None, 10_000)


def test_patience_grows_again_with_time():
    """A ping a second is no flood."""

    async def scenario():
        peer, now = Peer(), 0.0
        peer.connection._patience._clock = lambda: now
        peer.connection._patience._seen = 0.0
        for _ in range(5000):
            now += 1.0
            peer.feed(frame(6, 0, 0, bytes(8)))
        return peer.ended()

    assert on_a_loop(scenario) is None


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(bomb(), id="bomb"),
        pytest.param(literal(b"a", b"b" * 16_360), id="long value"),
        pytest.param(b"".join(literal(b"a%d" % one, b"") for one in range(1000)), id="many"),
        pytest.param(b"\x82" * 16_000, id="indexed"),
        pytest.param(b"\x3f" + b"\xff" * 8000, id="endless number"),
        pytest.param(b"\x00\x7f" + b"\xff" * 9 + b"\x7f", id="length beyond everything"),
        pytest.param(b"\x3f\xe1\xff\x03" + b"\x82", id="table of 64 kB"),
    ],
)
def test_header_blocks_that_grow_end_their_connection(block):
    """Before what they would become is made; neither the table nor the list is larger than it may be."""

    async def scenario():
        peer = Peer()
        tracemalloc.start()
        peer.feed(headers(1, block))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return peer.ended(), peak, peer.requests

    ended, peak, requests = on_a_loop(scenario)
    assert ended is not None
    assert ended[0] in {CALM, ErrorCode.COMPRESSION_ERROR}
    assert peak < 2_000_000
    assert not requests


def test_headers_in_parts_are_as_long_as_headers_may_be():
    """And in sixteen parts: what fits is taken, one byte more is not."""

    async def scenario(parts, size):
        peer = Peer()
        block = head() + literal(b"a", b"b" * size)
        cut = -(-len(block) // parts)
        pieces = [block[at : at + cut] for at in range(0, len(block), cut)]
        peer.feed(frame(1, 1, 1, pieces[0]))
        for number, piece in enumerate(pieces[1:], 2):
            peer.feed(frame(9, 4 * (number == len(pieces)), 1, piece))
        return peer.ended(), len(peer.requests)

    assert on_a_loop(lambda: scenario(16, 10_000)) == (None, 1)
    for parts, size in ((17, 10_000), (2, 17_000)):
        ended, requests = on_a_loop(lambda parts=parts, size=size: scenario(parts, size))
        assert ended is not None
        assert (ended[0], requests) == (CALM, 0)


def test_headers_that_do_not_end_are_not_kept():
    """The connection ends before their last part is there."""

    async def scenario():
        peer = Peer()
        peer.feed(frame(1, 0, 1, bytes(10_000)) + frame(9, 0, 1, bytes(10_000)))
        return peer.ended()

    assert on_a_loop(scenario)[0] == CALM


def test_streams_beyond_a_hundred_are_refused_and_may_come_again():
    """REFUSED_STREAM: nothing of it was looked at, but its headers are read: later ones may refer to them."""

    async def scenario():
        peer, encoder = Peer(answers=False), hpack.Encoder()
        for number in range(1, 205, 2):
            block = encoder.encode([*hpack.Decoder().decode(head()), ("x", str(number))])
            peer.feed(headers(number, block, ends=True))
        for one in peer.requests:
            one.stream.answer(OK)
        peer.feed(headers(205, encoder.encode([*hpack.Decoder().decode(head()), ("x", "201")]), ends=True))
        return peer.resets(), len(peer.requests), peer.requests[-1].found[b"x"], peer.ended()

    assert on_a_loop(scenario) == (dict.fromkeys((201, 203), ErrorCode.REFUSED_STREAM), 101, b"201", None)


def test_who_begins_many_at_once_is_not_cut_off_for_it():
    """A client may not know yet how many there may be: it begins five hundred, and those that are refused again."""

    async def scenario():
        peer = Peer(answers=False)
        for number in range(1, 1001, 2):
            peer.feed(headers(number, ends=True))
        return len(peer.resets()), peer.ended()

    assert on_a_loop(scenario) == (400, None)


def test_answers_that_nobody_takes_are_not_kept():
    """A window of nothing: more than a few of them end the connection, and a few are given up after a while."""

    async def many():
        peer = Peer(greeting=HELLO[:24] + frame(4, 0, 0, b"\0\4\0\0\0\0"))
        for number in range(1, 41, 2):
            peer.feed(headers(number, ends=True))
        return peer.ended(), len(peer.requests)

    async def few():
        peer = Peer(greeting=HELLO[:24] + frame(4, 0, 0, b"\0\4\0\0\0\0"))
        peer.feed(headers(1, ends=True))
        before = len(peer.connection._streams)
        peer.connection._streams.drop_stalled(asyncio.get_running_loop().time() + 1)
        return before, len(peer.connection._streams), peer.resets(), peer.ended()

    ended, requests = on_a_loop(many)
    assert ended is not None
    assert (ended[0], requests) == (CALM, 17)
    assert on_a_loop(few) == (1, 0, {1: ErrorCode.CANCEL}, None)


@pytest.mark.slow
def test_answers_are_given_up_with_time_and_connections_that_do_not_close(monkeypatch):
    """Nobody has to come by for it: an answer without a window is dropped, and what was said last is not waited for."""
    monkeypatch.setattr(Http2Connection, "seconds", 0.05)
    monkeypatch.setattr(Http2Connection, "silence", 0.1)

    async def scenario():
        peer = Peer(greeting=HELLO[:24] + frame(4, 0, 0, b"\0\4\0\0\0\0"))
        peer.feed(headers(1, ends=True))
        await asyncio.sleep(0.3)
        given_up = peer.resets(), len(peer.connection._streams), peer.ended()
        monkeypatch.setattr(peer.transport, "close", lambda: None)
        peer.feed(frame(5, 4, 1, bytes(4)))
        before = peer.transport.aborted
        await asyncio.sleep(0.2)
        return given_up, before, peer.transport.aborted

    assert on_a_loop(scenario) == (({1: ErrorCode.CANCEL}, 0, None), False, True)


@pytest.mark.slow
def test_who_does_not_read_is_not_read():
    """Whoever writes and never reads fills its own side of the wire, until the connection is cut."""

    async def scenario():
        peer = Peer()
        peer.connection.silence = 0.05
        peer.connection._watch()
        peer.connection.pause_writing()
        paused = peer.transport.paused
        await asyncio.sleep(0.02)
        peer.connection.resume_writing()
        on_again = not peer.transport.paused
        peer.connection.pause_writing()
        await asyncio.sleep(0.15)
        return paused, on_again, peer.transport.aborted, peer.open

    assert on_a_loop(scenario) == (True, True, True, set())


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        pytest.param(b"", "nothing was said", id="nothing"),
        pytest.param(HELLO[:10], "nothing was said", id="half a preface"),
        pytest.param(HELLO[:28], "nothing was said", id="half its settings"),
        pytest.param(HELLO + headers(1)[:30], "did not arrive in time", id="half a frame"),
        pytest.param(HELLO + frame(1, 0, 1, head()), "did not arrive in time", id="half of the headers"),
        pytest.param(HELLO + headers(1) + data(1, bytes(99))[:40], "did not arrive in time", id="half its content"),
        pytest.param(HELLO + b"\0\0\x09\xee\0\0\0\0\0", "did not arrive in time", id="half of nothing"),
    ],
)
def test_what_begins_has_to_arrive(sent, said, monkeypatch):
    """A slow loris, byte by byte, at each place where one may stop."""
    monkeypatch.setattr(Http2Connection, "seconds", 0.1)
    monkeypatch.setattr(Http2Connection, "content_seconds", 0.1)

    async def scenario():
        peer = Peer(greeting=b"")
        peer.feed(sent)
        for at in range(30):
            await asyncio.sleep(0.01)
            peer.feed(b"\0" if sent.endswith(b"\0\0\0") and at < 8 else b"")
            if peer.transport.closing:
                break
        return peer.ended(), peer.transport.closing, peer.open

    ended, closing, left = on_a_loop(scenario)
    assert (closing, left) == (True, set())
    assert ended is not None
    assert said in ended[1]


@pytest.mark.slow
def test_who_is_silent_is_asked_and_stays_if_it_answers(monkeypatch):
    """An idle connection of somebody who is there is kept; a half-open one is not."""
    monkeypatch.setattr(Http2Connection, "idle", 0.05)
    monkeypatch.setattr(Http2Connection, "silence", 0.05)

    async def scenario(answers):
        peer = Peer()
        asked = 0
        for _ in range(60):
            await asyncio.sleep(0.01)
            if peer.transport.closing:
                break
            pings = len([one for one in peer.frames() if one.type == 6])
            if answers and pings > asked:
                peer.feed(frame(6, 1, 0, b"still on"))
            asked = pings
        return asked, peer.transport.aborted

    asked, aborted = on_a_loop(lambda: scenario(answers=True))
    assert asked > 2
    assert not aborted
    assert on_a_loop(lambda: scenario(answers=False)) == (1, True)


FRAMES = st.one_of(
    st.builds(frame, st.integers(0, 12), st.integers(0, 255), st.integers(0, 9), st.binary(max_size=40)),
    st.builds(frame, st.sampled_from([0, 1, 3, 4, 6, 8, 9]), st.sampled_from([0, 1, 4, 5, 8, 0x20]), st.integers(0, 9),
              st.sampled_from([b"", bytes(4), bytes(5), bytes(8), b"\x7f\xff\xff\xff", b"\0\4\0\0\0\0", head()])),
    st.builds(headers, st.integers(0, 20), st.sampled_from([head(), head()[:9], bomb(), b"\x82"]), ends=st.booleans()),
    st.builds(data, st.integers(0, 9), st.binary(max_size=300) | st.just(message(bytes(70_000))), ends=st.booleans()),
    st.builds(window_update, st.integers(0, 9), st.integers(0, 2**31 - 1)),
    st.binary(max_size=30),
)  # fmt: skip


@pytest.mark.slow
@settings(max_examples=300)
@given(st.lists(FRAMES, max_size=40), st.integers(1, 5000), st.booleans())
def test_whatever_a_client_sends_nothing_is_raised_and_little_is_kept(frames, size, answers):
    """It is answered, or its streams are reset, or its connection ends with a reason and its requests are told."""

    async def scenario():
        peer = Peer(answers=answers)
        for number, one in enumerate(frames):
            peer.feed(one, size)
            if number % 7 == 3:
                for request in peer.requests[-2:]:
                    request.stream.answer(OK, b"\0\0\0\0\0", literal(b"grpc-status", b"0"))
            reader, streams = peer.connection._reader, peer.connection._streams
            assert len(reader._rest) <= 16_384 + 9
            assert reader._block is None or len(reader._block) <= 16_384
            assert len(streams) <= 100
            assert len(streams._stalled) <= 17
        if peer.transport.closing:
            await asyncio.sleep(0)
            assert not peer.open
            assert not len(peer.connection._streams)
            answered = {one.stream_id for one in peer.frames() if one.type in {1, 3}}
            lost = {one[1] for one in peer.said if one[0] == "lose"}
            assert {one.stream.number for one in peer.requests} <= answered | lost
        peer.frames()

    on_a_loop(scenario)
