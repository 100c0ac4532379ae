"""One connection of HTTP/2: what it makes of a client's bytes, however they are cut, and what it answers."""

from __future__ import annotations

import asyncio

import h2.config
import h2.connection
import h2.events
import h2.settings
import pytest
from hyperframe.frame import PingFrame, SettingsFrame
from hypothesis import given, settings
from hypothesis import strategies as st

from kc_otel.serve.receivers.http2_frames import ErrorCode, frame, window_update
from tests.serve.receivers.http2_peer import EXPORT, HELLO, Peer, data, head, headers, message, on_a_loop

USUAL = [(":method", "POST"), (":scheme", "http"), (":authority", "a"), (":path", EXPORT), ("te", "trailers"),
         ("content-type", "application/grpc")]  # fmt: skip


def client() -> h2.connection.H2Connection:
    made = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
    made.initiate_connection()
    return made


@st.composite
def conversations(draw):
    """What a well-behaved client sends, as python-hyper's h2 writes it, and the requests that it means."""
    conn, meant, sent = client(), {}, b""
    for number in range(1, 2 * draw(st.integers(1, 6)), 2):
        more = draw(st.lists(st.tuples(st.sampled_from(["x-a", "x-b"]), st.text("abc", max_size=30)), max_size=3))
        body = draw(st.binary(max_size=40)) * draw(st.sampled_from([1, 1, 10, 1000]))
        conn.send_headers(number, [*USUAL, *more], end_stream=not body)
        at = 0
        while at < len(body):
            step = min(draw(st.integers(1, 20_000)), 16_384 - 256, len(body) - at)
            pad = draw(st.sampled_from([None, None, 0, 7, 255]))
            last = at + step == len(body)
            trailers = last and draw(st.booleans())
            if conn.local_flow_control_window(number) < step + 256:
                conn._connection_window = None
            conn.send_data(number, body[at : at + step], end_stream=last and not trailers, pad_length=pad)
            at += step
            if trailers:
                conn.send_headers(number, [("x-trailer", "1")], end_stream=True)
        if draw(st.booleans()):
            conn.ping(b"12345678")
        meant[number] = body
        sent += conn.data_to_send()
        if draw(st.booleans()):
            sent += frame(0xFA, 3, number, b"unknown") + frame(2, 0, number, b"\0\0\0\0\1")
        if sum(map(len, meant.values())) > 20_000:
            break
    return sent, meant


@pytest.mark.slow
@settings(max_examples=60)
@given(conversations(), st.lists(st.integers(1, 3000), max_size=40), st.integers(1, 4000))
def test_however_bytes_are_cut_they_say_the_same(conversation, cuts, size):
    """The same requests, with the same content, and the same answers; h2 reads those, too."""
    sent, meant = conversation

    async def whole():
        peer = Peer(greeting=b"")
        peer.feed(sent)
        return [one for one in peer.said if one[0] != "begin"], bytes(peer.transport.written)

    async def cut():
        peer, at = Peer(greeting=b""), 0
        for step in cuts:
            peer.feed(sent[at : at + step])
            at += step
        peer.feed(sent[at:], size)
        return [one for one in peer.said if one[0] != "begin"], bytes(peer.transport.written)

    said, answered = on_a_loop(whole)
    assert said == [(number, EXPORT.encode(), body) for number, body in meant.items()]
    assert on_a_loop(cut) == (said, answered)
    ended = set()
    reader = client()
    for number, body in meant.items():
        reader.send_headers(number, USUAL, end_stream=not body)
        if body:
            reader.end_stream(number)
    for event in reader.receive_data(answered):
        if isinstance(event, h2.events.StreamEnded):
            ended.add(event.stream_id)
        assert not isinstance(event, h2.events.StreamReset | h2.events.ConnectionTerminated)
    assert ended == meant.keys()


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 9, 100, 65_536, 1 << 20])
def test_a_frame_of_a_megabyte_is_read_into_its_place(size):
    """In one piece, or in a million."""

    async def sent():
        peer = Peer()
        body = bytes(range(256)) * 800
        peer.feed(headers(1) + data(1, body, ends=True) + headers(3, ends=True), size)
        return [one for one in peer.said if one[0] != "begin"], body

    said, body = on_a_loop(sent)
    assert said == [(1, EXPORT.encode(), body), (3, EXPORT.encode(), b"")]


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (frame(0, 0, 0, b"x"), ErrorCode.PROTOCOL_ERROR),
        (frame(0, 0, 1, b"x"), ErrorCode.PROTOCOL_ERROR),
        (headers(2), ErrorCode.PROTOCOL_ERROR),
        (headers(0), ErrorCode.PROTOCOL_ERROR),
        (headers(3, ends=True) + headers(1), ErrorCode.STREAM_CLOSED),
        (headers(3, ends=True) + data(3, b"x"), ErrorCode.STREAM_CLOSED),
        (headers(3, ends=True) + data(1, b"x"), ErrorCode.STREAM_CLOSED),
        (frame(3, 0, 0, b"\0\0\0\0"), ErrorCode.PROTOCOL_ERROR),
        (frame(3, 0, 1, b"\0\0\0\0"), ErrorCode.PROTOCOL_ERROR),
        (headers(1) + frame(3, 0, 1, b"\0\0\0"), ErrorCode.FRAME_SIZE_ERROR),
        (frame(8, 0, 1, b"\0\0\0\1"), ErrorCode.PROTOCOL_ERROR),
        (window_update(0, 0), ErrorCode.PROTOCOL_ERROR),
        (window_update(0, 2**31 - 1), ErrorCode.FLOW_CONTROL_ERROR),
        (frame(8, 0, 0, b"\0\0\1"), ErrorCode.FRAME_SIZE_ERROR),
        (frame(4, 0, 1, b""), ErrorCode.PROTOCOL_ERROR),
        (frame(4, 0, 0, b"\0\4\xff\xff\xff\xff"), ErrorCode.FLOW_CONTROL_ERROR),
        (frame(4, 1, 0, b"\0\4\0\0\0\0"), ErrorCode.FRAME_SIZE_ERROR),
        (frame(4, 0, 0, bytes(6 * 65)), ErrorCode.ENHANCE_YOUR_CALM),
        (frame(5, 4, 1, b"\0\0\0\2"), ErrorCode.PROTOCOL_ERROR),
        (frame(6, 0, 0, b"1234567"), ErrorCode.FRAME_SIZE_ERROR),
        (frame(6, 0, 1, b"12345678"), ErrorCode.PROTOCOL_ERROR),
        (frame(2, 0, 1, b"1234"), ErrorCode.FRAME_SIZE_ERROR),
        (frame(2, 0, 0, b"12345"), ErrorCode.PROTOCOL_ERROR),
        (frame(7, 0, 1, bytes(8)), ErrorCode.PROTOCOL_ERROR),
        (frame(9, 4, 1, head()), ErrorCode.PROTOCOL_ERROR),
        (frame(1, 0, 1, head()) + frame(6, 0, 0, bytes(8)), ErrorCode.PROTOCOL_ERROR),
        (frame(1, 0, 1, head()) + frame(9, 4, 3, b""), ErrorCode.PROTOCOL_ERROR),
        (frame(1, 4, 1, b"\xff\xff\xff"), ErrorCode.COMPRESSION_ERROR),
        (headers(1) + frame(0, 8, 1, b"\x04abc"), ErrorCode.PROTOCOL_ERROR),
        (headers(1) + frame(0, 8, 1, b""), ErrorCode.PROTOCOL_ERROR),
        (b"\x10\0\1\0\0\0\0\0\1", ErrorCode.FRAME_SIZE_ERROR),
        (b"\xff\xff\xff\x63\0\0\0\0\0", ErrorCode.FRAME_SIZE_ERROR),
        (b"\0\x41\0\1\4\0\0\0\1", ErrorCode.ENHANCE_YOUR_CALM),
    ],
)  # fmt: skip
def test_what_ends_the_connection_is_said(sent, code):
    """With the code that RFC 9113 has for it, and nothing is taken any more."""

    async def scenario():
        peer = Peer(answers=True)
        peer.feed(sent)
        taken = len(peer.said)
        peer.feed(headers(99, ends=True))
        await asyncio.sleep(0)
        return peer.ended(), peer.transport.closing, len(peer.said) == taken or "lose" in peer.said[-1], peer.open

    ended, closing, quiet, left = on_a_loop(scenario)
    assert ended is not None
    assert (ended[0], closing, quiet, left) == (code, True, True, set())


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (headers(1, head((b"Upper", b"x"))), ErrorCode.PROTOCOL_ERROR),
        (headers(1, head((b"connection", b"close"))), ErrorCode.PROTOCOL_ERROR),
        (headers(1, head((b"content-length", b"7"))) + data(1, b"12345678"), ErrorCode.PROTOCOL_ERROR),
        (headers(1, head((b"content-length", b"9"))) + data(1, b"12345678", ends=True), ErrorCode.PROTOCOL_ERROR),
        (headers(1, head((b"content-length", b"9")), ends=True), ErrorCode.PROTOCOL_ERROR),
        (headers(1) + headers(1), ErrorCode.PROTOCOL_ERROR),
        (headers(1) + headers(1, head(), ends=True), ErrorCode.PROTOCOL_ERROR),
        (headers(1) + window_update(1, 2**31 - 1), ErrorCode.FLOW_CONTROL_ERROR),
        (headers(1) + window_update(1, 0), ErrorCode.PROTOCOL_ERROR),
        (headers(1) + data(1, bytes(256 * 1024 + 1)), ErrorCode.FLOW_CONTROL_ERROR),
        (headers(1, ends=True) + headers(1, ends=True), ErrorCode.STREAM_CLOSED),
        (headers(1, ends=True) + data(1, b""), ErrorCode.STREAM_CLOSED),
    ],
)
def test_what_ends_a_stream_leaves_the_others(sent, code):
    """The stream is reset, its request is told, and the next one is answered; what still comes of it is ignored."""

    async def scenario():
        peer = Peer(answers=False)
        peer.feed(sent)
        peer.feed(data(1, b"late") + frame(3, 0, 1, bytes(4)))
        peer._answers = True
        peer.feed(headers(3, ends=True))
        return peer.resets(), peer.answered(), peer.ended()

    resets, answered, ended = on_a_loop(scenario)
    assert resets == {1: code}
    assert answered[3]["grpc-status"] == "0"
    assert ended is None


@pytest.mark.parametrize("first", [b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", b"POST /v1/metrics HTTP/1.1\r\n"])
def test_http_1_is_told_where_it_is(first):
    """In its own words."""

    async def scenario():
        peer = Peer(greeting=first)
        return bytes(peer.transport.written), peer.transport.closing

    said, closing = on_a_loop(scenario)
    assert said.startswith(b"HTTP/1.1 400 ")
    assert b"OTLP over gRPC" in said
    assert closing


@pytest.mark.parametrize("first", [b"\x16\x03\x01\x02\x00\x01\x00", b"\x00", HELLO[:20] + b"x"])
def test_what_is_no_http_is_closed(first):
    """TLS on a port without it, and anything else."""

    async def scenario():
        peer = Peer(greeting=first)
        return peer.transport.closing

    assert on_a_loop(scenario)


@pytest.mark.parametrize("first", [frame(6, 0, 0, bytes(8)), frame(4, 1, 0), headers(1)])
def test_settings_come_first(first):
    """RFC 9113, section 3.4."""

    async def scenario():
        peer = Peer(greeting=HELLO[:24] + first)
        return peer.ended()

    assert on_a_loop(scenario)[0] == ErrorCode.PROTOCOL_ERROR


def test_settings_and_pings_are_answered():
    """Both with what they were."""

    async def scenario():
        peer = Peer()
        peer.feed(frame(6, 0, 0, b"12345678") + frame(6, 1, 0, b"12345678"))
        return peer.frames()

    found = on_a_loop(scenario)
    assert [one for one in found if isinstance(one, SettingsFrame)][1].flags == {"ACK"}
    [ping] = [one for one in found if isinstance(one, PingFrame)]
    assert (ping.opaque_data, ping.flags) == (b"12345678", {"ACK"})


def test_an_answer_goes_out_as_its_client_takes_it():
    """No byte more than both windows let through, nor less; also where a setting makes one less than nothing."""

    async def scenario():
        peer = Peer(answers=False)
        peer.feed(frame(4, 0, 0, b"\0\4\0\0\0\3") + headers(1, ends=True) + headers(3, ends=True))
        seen = []

        def look():
            seen.append((peer.content(1), peer.content(3), len(peer.connection._streams)))

        for one in peer.requests:
            one.stream.answer(b"\x88", b"answer", b"\x88")
        look()
        peer.feed(window_update(1, 1))
        look()
        peer.feed(frame(4, 0, 0, b"\0\4\0\0\0\0") + window_update(1, 2))
        look()
        peer.feed(window_update(1, 2))
        look()
        peer.feed(frame(4, 0, 0, b"\0\4\0\0\0\6"))
        look()
        return seen, peer.ended()

    seen, ended = on_a_loop(scenario)
    assert seen == [(b"ans", b"ans", 2), (b"answ", b"ans", 2), (b"answ", b"ans", 2),
                    (b"answe", b"ans", 2), (b"answer", b"answer", 0)]  # fmt: skip
    assert ended is None


def test_the_connections_window_is_shared_by_its_streams():
    """Of answers of 60 kB the second waits for it."""

    async def scenario():
        peer = Peer(answers=False)
        peer.feed(headers(1, ends=True) + headers(3, ends=True))
        for one in peer.requests:
            one.stream.answer(b"\x88", bytes(60_000), b"\x88")
        first = len(peer.content(1)), len(peer.content(3))
        peer.feed(window_update(0, 60_000))
        return first, (len(peer.content(1)), len(peer.content(3))), len(peer.connection._streams)

    assert on_a_loop(scenario) == ((60_000, 5535), (60_000, 60_000), 0)


def test_what_is_read_may_be_sent_again():
    """The connection's window grows with what has come, so that no number of requests uses it up."""

    async def scenario():
        peer, body = Peer(), bytes(250_000)
        for number in range(1, 401, 2):
            peer.feed(headers(number) + data(number, body, ends=True))
        return len([one for one in peer.said if one[0] != "begin"]), peer.ended()

    assert on_a_loop(scenario) == (200, None)


def test_a_client_that_sends_more_than_the_connections_window_is_stopped():
    """Sixteen megabytes that nobody reads are on no stream that would stop it."""

    async def scenario():
        peer = Peer()
        peer.connection._streams._window = 100_000
        peer.connection._streams._read = -(10**9)
        peer.feed(headers(1) + data(1, bytes(60_000)) + data(1, bytes(60_000)))
        return peer.ended()

    assert on_a_loop(scenario)[0] == ErrorCode.FLOW_CONTROL_ERROR


def test_padding_is_given_back_to_the_stream():
    """However much there is of it, the content that may be sent is the same."""

    async def scenario():
        peer = Peer()
        padded = frame(0, 8, 1, b"\xff" + b"x" * 300 + bytes(255))
        peer.feed(headers(1) + padded * 870 + data(1, b"", ends=True))
        return peer.resets(), [len(one[2]) for one in peer.said if one[0] == 1]

    assert on_a_loop(scenario) == ({}, [261_000])


def test_it_goes_in_two_steps():
    """What was sent before the client knew is answered; what it sends after is not taken, and nothing is cut off."""

    async def scenario():
        peer = Peer(answers=False)
        peer.feed(headers(1, ends=True))
        peer.connection.go_away()
        first = peer.ended(), peer.frames()[-2].last_stream_id
        peer.feed(headers(3, ends=True) + frame(6, 1, 0, b"goodbye!") + headers(5, ends=True) + data(5, b""))
        second = peer.frames()[-1].last_stream_id
        for one in peer.requests:
            one.stream.answer(b"\x88", b"x", b"\x88")
            await asyncio.sleep(0)
        return first, second, sorted(peer.answered()), peer.transport.closing, peer.ended()

    first, second, answered, closing, ended = on_a_loop(scenario)
    assert first == ((0, ""), 2**31 - 1)
    assert (second, answered, closing, ended) == (3, [1, 3], True, (0, ""))


def test_a_message_that_is_answered_early_is_not_read_any_more():
    """Its client is told that the rest is not needed; what is on its way is passed over."""

    async def scenario():
        peer = Peer(answers=False)
        peer.feed(headers(1) + data(1, message(bytes(100_000))[:1000]))
        peer.requests[0].stream.answer(b"\x88")
        peer.feed(data(1, bytes(99_005), ends=True))
        peer._answers = True
        peer.feed(headers(3, ends=True))
        return peer.resets(), sorted(peer.answered()), peer.ended(), len(peer.requests[0].body)

    assert on_a_loop(scenario) == ({1: ErrorCode.NO_ERROR}, [1, 3], None, 1000)
